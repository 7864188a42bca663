"""Optimizer, momentum and learning rate, by the size of the updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bract.attacks.problem.step_rules import RULES
from bract.audit.description.draft import INFERRED, Draft
from bract.audit.description.explain import (
    LABELS,
    OPTIMIZERS,
    Explained,
    Labels,
    explain,
    is_as_initialised,
    likeliest_optimizer,
)
from bract.audit.description.facts import CaptureFacts
from bract.audit.description.label_counts import APART, LabelCounts, label_counts
from bract.audit.description.noise import hides, undeclared_noise
from bract.errors import BractError
from bract.updates.step_law import StepLaw

EXPLAINED = 4.0
"""Factor between captured and simulated size up to which a description explains an update: above
the largest simulated one, or below the smallest while the model is as it was initialised. A model
that has learnt its clients' data makes their updates smaller without any bound."""

DECISIVE = 1.15
"""Factor by which one optimizer's simulated updates must stray less than the other's."""

FEW_TENSORS = 4
"""Parameters below which how far they stray from each other says nothing of the optimizer."""

MOMENTUM = 0.9
"""The momentum, besides none, that may explain updates where nothing gives one."""

AGREEING = 1.05
"""Factor up to which learning rates read off several captures are one."""

COMPARED = 4
"""Most captures whose update is compared with a simulated one: those of the fewest steps in the
first round, where a simulated client is most like a real one."""

START = {"sgd": 0.05, "adam": 0.001}
"""Learning rates from which the captured one is inferred."""


def choose_size(draft: Draft) -> None:
    """Hold optimizer and learning rate against the size of the updates, or infer them."""
    work = draft.given.training
    named = draft.declaration()
    if named.defenses:
        draft.doubts.append(
            "the updates are defended, so their size does not show the learning rate"
        )
        if named.lr is None:
            raise BractError(
                "bract.yaml: training.lr is not given, and it does not show in defended "
                "updates; give --set training.lr=RATE",
                code="declaration-lacks",
            )
        return
    if work.optimizer in (None, "sgd", "nesterov") and _is_noise(draft):
        return
    chosen = _compared(draft)
    found = {name: _explain(draft, chosen, name) for name in OPTIMIZERS}
    best, advantage = likeliest_optimizer(found)
    decided = advantage >= DECISIVE and len(draft.observation().update) >= FEW_TENSORS
    if work.optimizer is None:
        fitting = [n for n in OPTIMIZERS if named.lr and _explains(draft, chosen, n)]
        name = best if decided else "sgd"
        reason = "simulated updates look most like the captured ones"
        if len(fitting) == 1:
            name, reason = fitting[0], f"alone explains the updates' size with lr {named.lr:g}"
        elif not decided:
            reason = "a convention"
        draft.guess("training", "optimizer", name, reason)
    elif work.optimizer not in RULES:
        draft.doubts.append(
            f"optimizer {work.optimizer} is simulated by no attack: the update is matched as "
            "if it were a gradient"
        )
        return
    elif work.optimizer not in OPTIMIZERS:
        return
    elif decided and work.optimizer != best:
        draft.doubts.append(
            f"training.optimizer is {work.optimizer}, but the updates look like {best}'s "
            f"(their layers stray {advantage:.1f} times less from simulated ones)"
        )
    name = str(draft.content["training"]["optimizer"])
    within = _within(draft, chosen, name)
    momentum = _choose_momentum(draft, within, named.lr)
    low, high = within[momentum]
    if named.lr is None:
        if not _read_rate(draft, chosen, low, high):
            _guess_rate(draft, name, low, high, len(chosen))
        return
    # Above all explanations, or below them where nothing that was learnt makes updates small.
    small = high < 1 / EXPLAINED and is_as_initialised(draft.model, draft.observation())
    if low <= EXPLAINED and not small:
        off = max(low, 1 / high, 1.0)
        draft.confirmed.append(
            f"a simulated client with {name}, lr {named.lr:g} explains the updates' size"
            + (f" (to a factor of {off:.1f})" if off <= EXPLAINED else ", after training")
        )
        return
    ratio = low if low > EXPLAINED else high
    rate = float(f"{named.lr * ratio:.1g}")
    draft.doubts.append(
        f"the updates are {_times_as(ratio)} a simulated client's with lr {named.lr:g} and "
        f"momentum {momentum:g}: training.lr of about {rate:g} would explain them, or another "
        "number of local steps"
    )


def _is_noise(draft: Draft) -> bool:
    """Take plain SGD where noise is most of the update: nothing shows size and optimizer then."""
    described = replace(draft.declaration(), optimizer=draft.given.training.optimizer or "sgd")
    described = described.trusting(draft.captures.models)
    noise = undeclared_noise(replace(draft.observation(), declaration=described))
    if noise is None or not hides(noise):
        return False
    if described.lr is None:
        raise BractError(
            f"{draft.first.capture.key}: noise of about {noise.size:.2g} a coordinate hides the "
            "update, and nothing declares the learning rate; give --set training.lr=RATE",
            code="declaration-lacks",
        )
    if draft.given.training.optimizer is None:
        draft.guess("training", "optimizer", "sgd", "a convention; noise hides the update's size")
    return True


def _explains(draft: Draft, chosen: Sequence[CaptureFacts], name: str) -> bool:
    """Return whether an optimizer leads as far as the captured updates, with the known rate."""
    within = _within(draft, chosen, name).values()
    return any(low <= EXPLAINED and high >= 1 / EXPLAINED for low, high in within)


def _within(
    draft: Draft, chosen: Sequence[CaptureFacts], name: str
) -> dict[float, tuple[float, float]]:
    """Return the least and largest captured over simulated size, by momentum.

    Relative to the declared learning rate, or to the one to begin with (`START`).
    """
    steps = max(StepLaw.of(draft.declaration(fact.capture)).counted for fact in chosen)
    declared = draft.declaration().momentum
    tried = [declared]
    if name == "sgd" and _momentum_open(draft) and steps > 1:
        tried = [0.0, MOMENTUM]
    found = {}
    for momentum in tried:
        factors = []
        for labels in LABELS:
            each = _explain(draft, chosen, name, labels=labels, momentum=momentum)
            factors.append(median(one.factor for one in each))
        rate = draft.declaration().lr
        scale = START[name] / rate if rate else 1.0
        found[momentum] = (min(factors) * scale, max(factors) * scale)
    return found


def _momentum_open(draft: Draft) -> bool:
    """Return whether neither a person nor a train message gives the momentum."""
    return draft.given.training.momentum is None and not draft.declaration().momentum


def _choose_momentum(
    draft: Draft, within: dict[float, tuple[float, float]], rate: float | None
) -> float:
    """Return the momentum, which is a guess where nothing gives it and it matters."""
    if len(within) == 1:
        return next(iter(within))
    chosen, reason = 0.0, "a convention; the captures do not say"
    whole = None if rate is None else _whole_momentum(draft, rate, list(within))
    if whole is not None:
        chosen = whole
        reason = f"{INFERRED}alone gives whole numbers of examples by class with lr {rate:g}"
    elif rate is not None and within[0.0][0] > EXPLAINED >= within[MOMENTUM][0]:
        chosen, reason = MOMENTUM, f"explains the updates' size with lr {rate:g}; 0 does not"
    draft.guess("training", "momentum", chosen, reason)
    return chosen


def _whole_momentum(draft: Draft, rate: float, tried: Sequence[float]) -> float | None:
    """Return the one momentum of several that gives whole numbers of examples by class."""
    found = {momentum: _label_counts(draft, draft.first, rate, momentum) for momentum in tried}
    whole = [m for m, counts in found.items() if counts is not None and counts.is_whole(rate)]
    if len(whole) != 1 or None in found.values():
        return None
    counts = found[whole[0]]
    return whole[0] if counts is not None and counts.apart(rate) <= APART else None


def _label_counts(
    draft: Draft, fact: CaptureFacts, rate: float, momentum: float
) -> LabelCounts | None:
    """Return what a capture implies of its labels under SGD, None where it shows nothing."""
    p = replace(draft.declaration(fact.capture), optimizer="sgd", lr=rate, momentum=momentum)
    return label_counts(replace(draft.observation(fact), declaration=p), draft.model)


def _read_rate(draft: Draft, chosen: Sequence[CaptureFacts], low: float, high: float) -> bool:
    """Take the learning rate under which captures hold whole numbers of examples by class."""
    momentum = draft.declaration().momentum
    if draft.content["training"]["optimizer"] != "sgd":
        return False
    found = []
    for fact in chosen:
        rate: float | None = START["sgd"] * math.sqrt(low * high)
        # Steps after the first one depend on the rate a little.
        for _ in range(2):
            counts = None if rate is None else _label_counts(draft, fact, rate, momentum)
            bounds = START["sgd"] * low / EXPLAINED, START["sgd"] * high * EXPLAINED
            rate = None if counts is None else counts.fitting_rate(*bounds)
        if rate is not None:
            found.append(rate)
    if not found or max(found) > AGREEING * min(found):
        return False
    rate = median(found)
    short = float(f"{rate:.1g}")
    rate = short if max(rate, short) <= AGREEING * min(rate, short) else float(f"{rate:.2g}")
    draft.guess(
        "training",
        "lr",
        rate,
        f"{INFERRED}alone gives whole numbers of examples by class, of {len(found)} updates",
    )
    return True


def _guess_rate(draft: Draft, name: str, low: float, high: float, compared: int) -> None:
    rate = float(f"{START[name] * math.sqrt(low * high):.1g}")
    draft.guess(
        "training",
        "lr",
        rate,
        f"the size of {compared} updates compared with simulated ones; good to a factor of "
        f"{EXPLAINED * math.sqrt(high / low):.1g}",
    )


def _compared(draft: Draft) -> list[CaptureFacts]:
    def order(fact: CaptureFacts) -> tuple[int, int]:
        return fact.capture.round, StepLaw.of(draft.declaration(fact.capture)).counted

    fewest = min(map(order, draft.facts))
    return [f for f in draft.facts if order(f) == fewest][:COMPARED]


def _explain(
    draft: Draft,
    chosen: Sequence[CaptureFacts],
    name: str,
    *,
    labels: Labels = "mixed",
    momentum: float | None = None,
) -> list[Explained]:
    """Compare captures with simulated clients; factors are relative to `START`."""
    found = []
    for fact in chosen:
        declared = draft.declaration(fact.capture)
        lr = declared.lr if declared.lr and declared.optimizer == name else START[name]
        simulated = replace(declared, optimizer=name, lr=lr)
        if name != "sgd":
            simulated = replace(simulated, momentum=0.0)
        elif momentum is not None:
            simulated = replace(simulated, momentum=momentum)
        one = explain(draft.model, draft.observation(fact), simulated, labels=labels)
        found.append(Explained(one.factor * lr / START[name], one.spread))
    return found


def _times_as(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio >= 1 else f"1/{1 / ratio:.3g} of"
