"""Claims of protection beside what was measured: epsilon and noise, with the unit of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bract.audit.questions.epsilon.gaussian import gaussian_epsilon
from bract.errors import listed
from bract.protocol.claims import ClaimKind, claim_of
from bract.report.read import RunFiles
from bract.schema import ObservationFile
from bract.schema.account import ClaimRow, Standing
from bract.schema.claims import ProtectionClaim
from bract.schema.epsilon import EpsilonAnswer
from bract.schema.report_rows import ObservationFacts

AWAY = 2.0
"""Factor by which a claimed number may differ from what it implies, or from what was measured."""

USUAL_DELTA = 1e-5

_SHOWN = 4


@dataclass(frozen=True)
class Measured:
    """What was measured of some clients' uploads.

    Attributes
    ----------
    noise
        Largest standard deviation of a coordinate that no declaration explains.
    looked
        Whether any upload was looked at for noise.
    exact
        Whether a repetition of the client's steps gave an upload to the last digits.
    epsilon
        Least epsilon that canaries show; None without canaries.
    """

    noise: float | None = None
    looked: bool = False
    exact: bool = False
    epsilon: float | None = None

    @property
    def words(self) -> str:
        """Return it in words."""
        found = []
        if self.noise is not None:
            found.append(f"noise of about {self.noise:.2g} on each number of an update")
        elif self.looked:
            found.append("no noise was found in the updates")
        if self.epsilon is not None:
            found.append(f"canaries show an epsilon of at least {self.epsilon:.2g}")
        return "; ".join(found) or "not measured"


def claim_rows(files: RunFiles, observations: Sequence[ObservationFacts]) -> list[ClaimRow]:
    """Return every claim of the server's strategy, the app's code and the replies."""
    rows = [_row_of(claim, files, _measured(files, observations, None)) for claim in files.claims]
    for clients, said in _replied(files):
        found = _measured(files, observations, set(clients))
        rows.append(_row_of_replies(clients, said, files, found))
    return rows


def _measured(
    files: RunFiles, observations: Sequence[ObservationFacts], clients: set[str] | None
) -> Measured:
    checks = [
        o.check
        for o in observations
        if o.check is not None and (clients is None or o.client in clients)
    ]
    epsilons = [
        one.low
        for answer in files.answers
        if isinstance(answer, EpsilonAnswer)
        for one in answer.clients
        if one.low is not None and (clients is None or one.client in clients)
    ]
    return Measured(
        noise=max((c.noise for c in checks if c.noise is not None), default=None),
        looked=bool(checks),
        exact=any(c.state == "confirmed" for c in checks),
        epsilon=max(epsilons, default=None),
    )


# Claims of a mechanism: a mod in the app, or a strategy around the server's.


def local_noise(claim: ProtectionClaim) -> float | None:
    """Return the noise of Flower's ``LocalDpMod``, by the classical bound that it uses.

    ``sensitivity sqrt(2 ln(1.25 / delta)) / epsilon`` (Dwork and Roth 2014, theorem A.1).
    """
    epsilon, delta, change = claim.epsilon, claim.delta, claim.sensitivity
    if not epsilon or not delta or change is None or not 0.0 < delta < 1.25 or epsilon < 0.0:
        return None
    return change * math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


def _row_of(claim: ProtectionClaim, files: RunFiles, found: Measured) -> ClaimRow:
    if claim.place == "server":
        return _central(claim, found)
    noise = local_noise(claim)
    row = ClaimRow(
        source=f"{claim.by} in the app's code ({claim.where})",
        claim=_numbers(
            epsilon=claim.epsilon,
            delta=claim.delta,
            clip=claim.clip,
            sensitivity=claim.sensitivity,
            noise=noise,
        ),
        unit="one client's whole update, one round",
        measured=found.words,
        epsilon=claim.epsilon,
        delta=claim.delta,
        noise=noise,
        found_noise=found.noise,
        found_epsilon=found.epsilon,
    )
    rounds = len({capture.round for capture in files.captures})
    if noise is None or claim.epsilon is None or claim.delta is None:
        return _standing(row, found)
    true = gaussian_epsilon(claim.clip / noise, claim.delta) if claim.clip and noise else 0.0
    if claim.clip and true > AWAY * claim.epsilon:
        return _with(
            row,
            "impossible",
            f"This cannot be: noise of {noise:.2g} gives an epsilon of {claim.epsilon:g} only "
            f"where updates differ by at most {claim.sensitivity:g}, and they are clipped to "
            f"{claim.clip:g}; for a change of that size one round's epsilon is {_large(true)}.",
        )
    row = _standing(row, found)
    if rounds > 1 and row.standing != "contradicted" and claim.clip and noise:
        all_rounds = gaussian_epsilon(math.sqrt(rounds) * claim.clip / noise, claim.delta)
        more = (
            f" It is for one round; over the {rounds} captured rounds it is {_large(all_rounds)}."
        )
        row = row.model_copy(update={"sentence": (row.sentence + more).strip()})
    return row


def _central(claim: ProtectionClaim, found: Measured) -> ClaimRow:
    noise = None
    if claim.noise_multiplier is not None and claim.clip and claim.clients:
        noise = claim.noise_multiplier * claim.clip / claim.clients
    multiplier = claim.noise_multiplier or 0.0
    epsilon = gaussian_epsilon(1.0 / multiplier, USUAL_DELTA) if multiplier > 0.0 else math.inf
    shown = _large(epsilon) if math.isfinite(epsilon) else "without a bound"
    return ClaimRow(
        source=f"{claim.by}, the server's strategy",
        claim=_numbers(noise_multiplier=claim.noise_multiplier, clip=claim.clip, noise=noise),
        unit="one client, one round, against those who see the new model alone",
        measured=found.words,
        noise=noise,
        found_noise=found.noise,
        found_epsilon=found.epsilon,
        sentence=(
            "The server adds this noise after it has read every update, so it protects no one from "
            f"the server's operator. For others one round's epsilon is {shown} at delta "
            f"{USUAL_DELTA:g}, by the noise multiplier alone."
        ),
    )


# Claims in replies: numbers under names such as epsilon.


@dataclass
class _Said:
    """Numbers that one client claims, the largest epsilon of all rounds among them."""

    values: dict[ClaimKind, float] = field(default_factory=dict)

    def add(self, name: str, value: float | None) -> None:
        kind = claim_of(name)
        if kind is None or value is None:
            return
        larger = kind == "epsilon" and value < self.values.get(kind, -math.inf)
        if not larger:
            self.values[kind] = value


def _replied(files: RunFiles) -> list[tuple[list[str], dict[ClaimKind, float]]]:
    """Return clients that claim the same, and what; by the list of what left, else by captures."""
    said: dict[str, _Said] = {}
    for reply in files.left:
        for thing in reply.things:
            said.setdefault(reply.client, _Said()).add(thing.name, thing.claim)
    if not files.left:
        for capture in files.captures:
            for name, value in capture.provenance.metrics.items():
                said.setdefault(capture.client, _Said()).add(name, value)
    groups: dict[tuple[tuple[ClaimKind, float], ...], list[str]] = {}
    for client, one in said.items():
        if one.values.keys() - {"delta", "clip"}:
            groups.setdefault(tuple(sorted(one.values.items())), []).append(client)
    return [(clients, dict(values)) for values, clients in groups.items()]


def _row_of_replies(
    clients: Sequence[str], said: dict[ClaimKind, float], files: RunFiles, found: Measured
) -> ClaimRow:
    captures = [c for c in files.captures if c.client in clients]
    multiplier, clip = said.get("noise_multiplier"), said.get("clip")
    noise = said.get("noise_std")
    if noise is None and multiplier is not None and clip is not None:
        noise = _trained_noise(captures, multiplier * clip)
    row = ClaimRow(
        source=f"replies of {listed(list(clients), _SHOWN)}",
        claim=_numbers(
            epsilon=said.get("epsilon"),
            delta=said.get("delta"),
            noise_multiplier=multiplier,
            clip=clip,
            noise=noise,
        ),
        unit=(
            "not stated; as Opacus counts, one example, all rounds so far"
            if multiplier is not None
            else "not stated"
        ),
        measured=found.words,
        epsilon=said.get("epsilon"),
        delta=said.get("delta"),
        noise=noise,
        found_noise=found.noise,
        found_epsilon=found.epsilon,
    )
    least = _least_epsilon(captures, multiplier, said.get("delta", USUAL_DELTA))
    if row.epsilon is not None and least is not None and least > max(AWAY * row.epsilon, 1e-3):
        return _with(
            row,
            "impossible",
            f"This cannot be: with a noise multiplier of {multiplier:g} one step alone has an "
            f"epsilon of {_large(least)} at least.",
        )
    return _standing(row, found)


def _least_epsilon(
    captures: Iterable[ObservationFile], multiplier: float | None, delta: float
) -> float | None:
    """Return a lower bound on epsilon of one step of DP-SGD with that noise; None where unknown.

    Of a step on a Poisson sample of the share q, adding an example gives exactly
    ``ln(1 + q (e^e0 - 1))`` at ``q delta0`` where the whole batch has (e0, delta0) (Balle, Barthe
    and Gaboardi 2018, theorem 8); more steps only add to it. q is 1 where it is not known.
    """
    if multiplier is None or multiplier <= 0.0 or not 0.0 < delta < 1.0:
        return None
    shares = [
        min(1.0, d.batch_size / d.num_examples)
        for d in (c.declaration for c in captures)
        if d.batch_size and d.num_examples
    ]
    if not shares:
        return None
    share = min(shares)
    if delta / share >= 1.0:
        return None
    whole = gaussian_epsilon(1.0 / multiplier, delta / share)
    if whole > 30.0:
        return whole + math.log(share)
    return math.log1p(share * math.expm1(whole))


def _trained_noise(captures: Iterable[ObservationFile], deviation: float) -> float | None:
    """Return the noise of an update that SGD with noisy gradients leaves; None where unknown.

    ``lr * multiplier * clip * sqrt(steps) / batch``: each step adds noise of ``multiplier * clip``
    to a sum over a batch.
    """
    for capture in captures:
        d = capture.declaration
        batch = d.batch_size or d.num_examples
        plain = d.optimizer == "sgd" and not d.momentum
        if plain and d.lr and batch and d.local_steps:
            return d.lr * deviation * math.sqrt(d.local_steps) / batch
    return None


# What both have in common.


def _standing(row: ClaimRow, found: Measured) -> ClaimRow:
    """Return a row with what the measurements say of its epsilon and its noise."""
    if row.epsilon is not None and found.epsilon is not None and found.epsilon > row.epsilon:
        return _with(
            row,
            "contradicted",
            f"Canaries show an epsilon of at least {found.epsilon:.2g}, above the claimed one.",
        )
    if row.noise is None or not found.looked:
        return row
    if found.noise is None:
        if not found.exact:
            return row
        return _with(
            row,
            "contradicted",
            f"Noise of about {row.noise:.2g} is claimed; repeating the client's steps gave its "
            "update, so there is none.",
        )
    if found.noise * AWAY < row.noise:
        return _with(
            row,
            "contradicted",
            f"Noise of about {row.noise:.2g} is claimed, and about {found.noise:.2g} is in the "
            "updates.",
        )
    return _with(row, "agrees", f"As much noise as claimed is in the updates ({row.noise:.2g}).")


def _with(row: ClaimRow, standing: Standing, sentence: str) -> ClaimRow:
    return row.model_copy(update={"standing": standing, "sentence": sentence})


_NAMES = {
    "epsilon": "epsilon",
    "delta": "delta",
    "noise_multiplier": "noise multiplier",
    "clip": "clipping norm",
    "sensitivity": "sensitivity",
    "noise": "noise on each number",
}


def _numbers(**values: float | None) -> str:
    """Return claimed numbers in words."""
    shown = [f"{_NAMES[key]} {value:.3g}" for key, value in values.items() if value is not None]
    return ", ".join(shown) or "no number"


def _large(value: float) -> str:
    """Return an epsilon: ``about 213 million`` for one that no one reads as a number."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if value >= size:
            return f"about {value / size:,.3g} {word}"
    return f"about {value:.2g}"
