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
from bract.attacks.adaptive.declared import declared
from bract.attacks.adaptive.fedkl.fedkl import regressed
from bract.attacks.adaptive.guardian.guardian_turning import Turn
from bract.attacks.adaptive.noise import clipping, noise_after
from bract.attacks.adaptive.pruning import bounds_on_dropped, checked_pruning
from bract.attacks.adaptive.simulated_defense import (
    Part,
    Prune,
    Simulated,
    defended_by,
    simulated,
)
from bract.attacks.problem.evidence import CHAINS, Evidence, Known
from bract.attacks.problem.likelihoods import GaussianLikelihood, LaplaceLikelihood, Likelihood
from bract.captures.observation import Observation
from bract.defenses import AdaDefense, Guardian
from bract.defenses.entries import read_settings
from bract.defenses.noise import Noise
from bract.defenses.pruning import Pruning
from bract.errors import BractError
from bract.updates.update import flatten

Simulate = Callable[[Observation, Known], Simulated]
"""Simulate the first defense of a chain; the observation declares it alone."""


def noisy(observation: Observation, known: Known, *, simulate: Simulate) -> Evidence:
    """Clipping and noise after another defense.

    ``-log p(u | x) = |u - c(D(g)) D(g)|^2 / (2 sigma^2)`` with D what the first defense makes of
    the candidate's gradient.
    """
    first, last = alone(observation, 0), alone(observation, 1)

    def read(seen: Observation) -> Simulated:
        return simulate(replace(seen, declaration=first.declaration), known)

    return named(noise_after(last, known, read), observation)


@CHAINS.register("pruning then noise")
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
    first, last = alone(observation, 0), alone(observation, 1)
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
    return named(evidence, observation)


@CHAINS.register("adadefense then pruning")
def adadefense_and_pruned(observation: Observation, known: Known) -> Evidence:
    """AdaDefense, then pruning: survivors are inverted, in a client's first round the rest bounded.

    In the first round the defended update grows with the gradient, so the smallest surviving
    gradient bounds the dropped ones. Moments of coordinates that were dropped in an earlier round
    are not known: these do not count, nor do dropped ones of this round.
    """
    first, last = alone(observation, 0), alone(observation, 1)
    if declared(AdaDefense, first).secret_updates:
        return pruned(observation, known, simulate=_adadefense)
    hyper = checked_pruning(last)
    history = [alone(seen, 0) for seen in known.history]
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
    return named(found, observation)


@CHAINS.register("pruning then adadefense")
@CHAINS.register("noise then adadefense")
def before_adadefense(observation: Observation, known: Known) -> Evidence:
    """Pruning, or clipping and noise, then AdaDefense, which is inverted first."""
    if declared(AdaDefense, alone(observation, 1)).secret_updates:
        first = observation.declaration.defenses[0]["name"]
        raise BractError(
            f"{observation.key}: no adaptive attacker knows {first} before adadefense with "
            "secret_updates; remove secret_updates, or the first defense",
            code="attack-unsuited",
        )
    history = [alone(seen, 1) for seen in known.history]
    found = undo_adadefense(alone(observation, 1), replace(known, history=history))
    parts, law = parts_of_first(observation)
    found = replace(found, labels=None, adapt=defended_by(*parts), likelihood=law)
    return named(found, observation)


@CHAINS.register("pruning then guardian")
@CHAINS.register("noise then guardian")
def before_guardian(observation: Observation, known: Known) -> Evidence:
    """Pruning, or clipping and noise, then Guardian, both simulated; the noise itself is not."""
    del known
    parts, _ = parts_of_first(observation)
    found = simulated(observation, *parts, _turn(alone(observation, 1)))
    evidence = Evidence(
        target=found.target,
        adapt=found.adapt,
        notes={"method": "applied both defenses to candidates, without the noise"},
    )
    return named(evidence, observation)


def parts_of_first(observation: Observation) -> tuple[tuple[Part, ...], Likelihood | None]:
    """Return what pruning, or clipping and noise, does before another defense.

    Returns
    -------
    tuple of Part, and Likelihood or None
        The deterministic parts, in the units of gradients, and the law of the noise after them.
    """
    first, unit = observation.declaration.defenses[0], observation.law.to_gradient
    if first["name"] == "pruning":
        return (_prune(read_settings(Pruning, first)),), None
    hyper = read_settings(Noise, first)
    kind = GaussianLikelihood if hyper.kind == "gaussian" else LaplaceLikelihood
    return clipping(hyper, unit), kind(hyper.deviation * unit)


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


def _fedkl(observation: Observation, known: Known, *, statistics: bool) -> Simulated:
    """Search the lock with the images; a likelihood has no place for batch statistics."""
    kept = observation if statistics else replace(observation, returned_buffers={})
    return as_simulated(regressed(kept, known, exact=False), observation)


def as_simulated(found: Evidence, observation: Observation) -> Simulated:
    """Return an evidence of one defense as the simulation that a chain continues."""
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


def alone(observation: Observation, position: int) -> Observation:
    """Return the observation as if it declared one defense of its chain alone."""
    entries: tuple[Any, ...] = (observation.declaration.defenses[position],)
    return replace(observation, declaration=replace(observation.declaration, defenses=entries))


def named(found: Evidence, observation: Observation) -> Evidence:
    """Return the evidence with the declared defenses in its notes."""
    names = ", ".join(str(entry["name"]) for entry in observation.declaration.defenses)
    return replace(found, notes=found.notes | {"defense": names})


for _chain, _view in {
    "adadefense then noise": partial(noisy, simulate=_adadefense),
    "guardian then pruning": partial(pruned, simulate=_guardian),
    "guardian then noise": partial(noisy, simulate=_guardian),
    "fedkl then pruning": partial(pruned, simulate=partial(_fedkl, statistics=True)),
    "fedkl then noise": partial(noisy, simulate=partial(_fedkl, statistics=False)),
}.items():
    CHAINS.register(_chain)(_view)
