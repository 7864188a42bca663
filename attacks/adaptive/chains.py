"""Against two defenses in a row, of which one clips, adds noise or prunes.

What came last is undone or weighed first: noise by the law that is declared, pruning by the bounds
that survivors set. What came before it is simulated on candidates, since the upload does not show
its result to rounding any more; AdaDefense under pruning is inverted where coordinates survived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from bract.attacks.adaptive.adadefense.adadefense import undo_adadefense
from bract.attacks.adaptive.adadefense.forward import simulated_at
from bract.attacks.adaptive.adadefense.keyed import expected
from bract.attacks.adaptive.adadefense.moments import Moments
from bract.attacks.adaptive.censor import OrthogonalLikelihood, match_norms_and_orthogonality
from bract.attacks.adaptive.declared import declared
from bract.attacks.adaptive.fedkl.fedkl import regressed
from bract.attacks.adaptive.guardian.guardian_turning import Turn
from bract.attacks.adaptive.noise import clipping, noise_after
from bract.attacks.adaptive.precode import bottlenecked
from bract.attacks.adaptive.pruning import bound_dropped, bounds_on_dropped, checked_pruning
from bract.attacks.adaptive.simulated_defense import (
    Part,
    Prune,
    Simulated,
    defended_by,
    simulated,
)
from bract.attacks.adaptive.soteria import mute_pruned_features
from bract.attacks.adaptive.truncated_svd import SentSubspaces, sent_subspaces, truncation
from bract.attacks.problem.evidence import CHAINS, Evidence, Known
from bract.attacks.problem.likelihoods import GaussianLikelihood, LaplaceLikelihood
from bract.attacks.problem.target_model import target_model_of
from bract.captures.observation import Observation
from bract.defenses import AdaDefense, Guardian
from bract.defenses.entries import read_settings
from bract.defenses.noise import Noise
from bract.defenses.pruning import Pruning
from bract.errors import BractError
from bract.models.layers import last_linear
from bract.updates.update import flatten

_LOOSE = 0.3
"""Deviation that a norm and a cosine are granted where pruning or noise changed both."""

Simulate = Callable[[Observation, Known], Simulated]
"""Simulate the first defense of a chain; the observation declares it alone."""


def noisy(observation: Observation, known: Known, *, simulate: Simulate) -> Evidence:
    """Clipping and noise after another defense.

    ``-log p(u | x) = |u - c(D(g)) D(g)|^2 / (2 sigma^2)`` with D what the first defense makes of
    the candidate's gradient.
    """
    first, last = _alone(observation, 0), _alone(observation, 1)

    def read(seen: Observation) -> Simulated:
        return simulate(replace(seen, declaration=first.declaration), known)

    return _named(noise_after(last, known, read), observation)


def pruned_and_noisy(observation: Observation, known: Known) -> Evidence:
    """Pruning, then noise: Gaussian or Laplace around the clipped, pruned update.

    Which coordinates were dropped does not show under noise; each candidate determines it.
    """
    found = noisy(observation, known, simulate=_pruning)
    if found.likelihood is None:
        # The noise is gone: what is left is a pruned update.
        kept = {n: (v != 0).to(v.dtype) for n, v in found.target.items()}
        found = replace(found, weights=kept)
    return found


def pruned(observation: Observation, known: Known, *, simulate: Simulate) -> Evidence:
    """Pruning after another defense: survivors as the simulation has them, the others bounded."""
    first, last = _alone(observation, 0), _alone(observation, 1)
    hyper, found = checked_pruning(last), simulate(first, known)
    sent = {n: found.target[n] for n in observation.parameters}
    evidence = Evidence(
        target=found.target,
        weights=found.weights,
        bounds=bounds_on_dropped(hyper, sent),
        adapt=found.adapt,
        buffers=found.buffers,
        notes=found.notes
        | {"method": "simulated the first defense, held dropped coordinates below the survivors"},
    )
    return _named(evidence, observation)


def adadefense_and_pruned(observation: Observation, known: Known) -> Evidence:
    """AdaDefense, then pruning: survivors are inverted, in a client's first round the rest bounded.

    In the first round the defended update grows with the gradient, so the smallest surviving
    gradient bounds the dropped ones. Moments of coordinates that were dropped in an earlier round
    are not known: these do not count, nor do dropped ones of this round.
    """
    first, last = _alone(observation, 0), _alone(observation, 1)
    if declared(AdaDefense, first).secret_updates:
        return pruned(observation, known, simulate=_adadefense)
    hyper = checked_pruning(last)
    history = [_alone(seen, 0) for seen in known.history]
    found = undo_adadefense(first, replace(known, history=history))
    dropped = {n: observation.update[n] == 0 for n in observation.parameters}
    if found.notes["round_of_client"] == 1:
        sent = {n: v.masked_fill(dropped[n], 0.0) for n, v in found.target.items()}
        found = replace(found, target=sent, bounds=bounds_on_dropped(hyper, sent))
    else:
        for seen in history:
            dropped = {n: gone | (seen.update[n] == 0) for n, gone in dropped.items()}
        weights = found.weights or {}
        found = replace(
            found, weights={n: v.masked_fill(dropped[n], 0.0) for n, v in weights.items()}
        )
    return _named(found, observation)


def before_adadefense(observation: Observation, known: Known) -> Evidence:
    """Pruning, or clipping and noise, then AdaDefense, which is inverted first."""
    first = observation.declaration.defenses[0]
    if declared(AdaDefense, _alone(observation, 1)).secret_updates:
        raise BractError(
            f"{observation.key}: no adaptive attacker knows {first['name']} before adadefense with "
            "secret_updates; remove secret_updates, or the first defense",
            code="attack-unsuited",
        )
    history = [_alone(seen, 1) for seen in known.history]
    found = undo_adadefense(_alone(observation, 1), replace(known, history=history))
    found = replace(found, labels=None)
    unit = observation.law.to_gradient
    if first["name"] == "pruning":
        found = replace(found, adapt=defended_by(_prune(read_settings(Pruning, first))))
        return _named(found, observation)
    hyper = read_settings(Noise, first)
    kind = GaussianLikelihood if hyper.kind == "gaussian" else LaplaceLikelihood
    found = replace(
        found,
        adapt=defended_by(*clipping(hyper, unit)),
        likelihood=kind(hyper.deviation * unit),
    )
    return _named(found, observation)


def before_guardian(observation: Observation, known: Known) -> Evidence:
    """Pruning, or clipping and noise, then Guardian, both simulated; the noise itself is not."""
    del known
    first = observation.declaration.defenses[0]
    unit = observation.law.to_gradient
    parts: tuple[Part, ...]
    if first["name"] == "pruning":
        parts = (_prune(read_settings(Pruning, first)),)
    else:
        parts = clipping(read_settings(Noise, first), unit)
    found = simulated(observation, *parts, _turn(_alone(observation, 1)))
    evidence = Evidence(
        target=found.target,
        adapt=found.adapt,
        notes={"method": "applied both defenses to candidates, without the noise"},
    )
    return _named(evidence, observation)


def censored_and_changed(observation: Observation, known: Known) -> Evidence:
    """CENSOR, then pruning or noise: norms and orthogonality, as far as these leave them.

    CENSOR keeps each tensor's norm, so clipping shortens the candidate's gradient as the upload.
    """
    found = match_norms_and_orthogonality(_alone(observation, 0), known)
    last = observation.declaration.defenses[1]
    if last["name"] == "noise":
        parts = clipping(read_settings(Noise, last), observation.law.to_gradient)
        found = replace(found, adapt=defended_by(*parts))
    return _named(replace(found, likelihood=OrthogonalLikelihood(_LOOSE)), observation)


def before_censor(observation: Observation, known: Known) -> Evidence:
    """Pruning, or clipping and noise, then CENSOR: its input is simulated, without the noise."""
    found = match_norms_and_orthogonality(_alone(observation, 1), known)
    first, unit = observation.declaration.defenses[0], observation.law.to_gradient
    if first["name"] == "pruning":
        return _named(
            replace(found, adapt=defended_by(_prune(read_settings(Pruning, first)))), observation
        )
    parts = clipping(read_settings(Noise, first), unit)
    found = replace(found, adapt=defended_by(*parts), likelihood=OrthogonalLikelihood(_LOOSE))
    return _named(found, observation)


def before_truncation(observation: Observation, known: Known) -> Evidence:
    """Pruning, or clipping and noise, then truncated SVD: compared where the upload is exact.

    The noise in the rows and columns that were sent has the law of all noise.
    """
    del known
    first, unit = observation.declaration.defenses[0], observation.law.to_gradient
    part = SentSubspaces(sent_subspaces(_alone(observation, 1))[0])
    if first["name"] == "pruning":
        found = simulated(observation, _prune(read_settings(Pruning, first)), part)
        likelihood = None
    else:
        hyper = read_settings(Noise, first)
        found = simulated(observation, *clipping(hyper, unit), part)
        kind = GaussianLikelihood if hyper.kind == "gaussian" else LaplaceLikelihood
        likelihood = kind(hyper.deviation * unit)
    evidence = Evidence(
        target=found.target,
        adapt=found.adapt,
        likelihood=likelihood,
        notes={"method": "matched the first defense in the rows and columns of what was sent"},
    )
    return _named(evidence, observation)


def muted_and_pruned(observation: Observation, known: Known) -> Evidence:
    """Soteria, then pruning: bounds on dropped coordinates, none in columns that are zero."""
    muted = mute_pruned_features(_alone(observation, 0), known)
    found = bound_dropped(_alone(observation, 1), known)
    found = replace(
        found,
        weights=muted.weights,
        notes=found.notes | {"pruned": muted.notes["pruned"]},
    )
    return _named(found, observation)


def _adadefense(observation: Observation, known: Known) -> Simulated:
    """Simulate with the moments of a first round; noise hides what they became since."""
    hyper = declared(AdaDefense, observation)
    if hyper.secret_updates:
        return expected(observation, hyper, len(known.history) + 1)
    size = flatten(observation.update).numel()
    return simulated_at(observation, hyper, Moments.zero(size))


def _guardian(observation: Observation, known: Known) -> Simulated:
    del known
    return simulated(observation, _turn(observation))


def _pruning(observation: Observation, known: Known) -> Simulated:
    del known
    return simulated(observation, _prune(declared(Pruning, observation)))


def _soteria(observation: Observation, known: Known) -> Simulated:
    """Leave the last layer's weight out: which of its columns were pruned does not show."""
    del known
    found = simulated(observation)
    weight = f"{last_linear(target_model_of(observation).model)[0]}.weight"
    return replace(
        found,
        weights={
            weight: found.target[weight].new_zeros(()).expand_as(found.target[weight]).contiguous()
        },
    )


def _fedkl(observation: Observation, known: Known, *, statistics: bool) -> Simulated:
    """Search the lock with the images; a likelihood has no place for batch statistics."""
    kept = observation if statistics else replace(observation, returned_buffers={})
    return _as_simulated(regressed(kept, known, exact=False), observation)


def _precode(observation: Observation, known: Known) -> Simulated:
    del known
    return _as_simulated(bottlenecked(observation, exact=False), observation)


def _truncation(observation: Observation, known: Known) -> Simulated:
    del known
    return truncation(observation)


def _as_simulated(found: Evidence, observation: Observation) -> Simulated:
    return Simulated(
        target=found.target,
        unit=observation.law.to_gradient,
        adapt=found.adapt,
        buffers=found.buffers,
        weights=found.weights,
        notes=found.notes,
    )


def _prune(hyper: Pruning) -> Prune:
    return Prune(hyper.ratio, hyper.scope)


def _turn(observation: Observation) -> Turn:
    return Turn(declared(Guardian, observation), observation.law.to_gradient)


def _alone(observation: Observation, position: int) -> Observation:
    """Return the observation as if it declared one defense of its chain alone."""
    entries: tuple[Any, ...] = (observation.declaration.defenses[position],)
    return replace(observation, declaration=replace(observation.declaration, defenses=entries))


def _named(found: Evidence, observation: Observation) -> Evidence:
    names = ", ".join(str(entry["name"]) for entry in observation.declaration.defenses)
    return replace(found, notes=found.notes | {"defense": names})


CHAINS |= {
    ("censor", "pruning"): censored_and_changed,
    ("censor", "noise"): censored_and_changed,
    ("pruning", "censor"): before_censor,
    ("noise", "censor"): before_censor,
    ("pruning", "noise"): pruned_and_noisy,
    ("truncated-svd", "pruning"): partial(pruned, simulate=_truncation),
    ("truncated-svd", "noise"): partial(noisy, simulate=_truncation),
    ("pruning", "truncated-svd"): before_truncation,
    ("noise", "truncated-svd"): before_truncation,
    ("soteria", "pruning"): muted_and_pruned,
    ("soteria", "noise"): partial(noisy, simulate=_soteria),
    ("adadefense", "pruning"): adadefense_and_pruned,
    ("adadefense", "noise"): partial(noisy, simulate=_adadefense),
    ("guardian", "pruning"): partial(pruned, simulate=_guardian),
    ("guardian", "noise"): partial(noisy, simulate=_guardian),
    ("fedkl", "pruning"): partial(pruned, simulate=partial(_fedkl, statistics=True)),
    ("fedkl", "noise"): partial(noisy, simulate=partial(_fedkl, statistics=False)),
    ("precode", "pruning"): partial(pruned, simulate=_precode),
    ("precode", "noise"): partial(noisy, simulate=_precode),
    ("pruning", "adadefense"): before_adadefense,
    ("noise", "adadefense"): before_adadefense,
    ("pruning", "guardian"): before_guardian,
    ("noise", "guardian"): before_guardian,
}
