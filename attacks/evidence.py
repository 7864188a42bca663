"""From an observation to what an attack tries to match.

An attacker who ignores the defense takes the captured tensors as they are. One who knows it
undoes, simulates or discounts it first; each such method registers in `ADAPTIVE` under the
defense's name and hands back the same `Evidence`, so every attack runs on it unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from bract.attacks.simulation import ForwardModel
from bract.errors import BractError
from bract.observation import Observation
from bract.registry import Registry
from bract.update import Tensors

Tier = Literal["oblivious", "adaptive", "colluding"]
TIERS: tuple[Tier, ...] = ("oblivious", "adaptive", "colluding")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an attack matches, and how far it trusts it.

    Attributes
    ----------
    target
        Scaled like `Observation.gradient`; may cover some of the parameters only.
    weights
        Trust in each coordinate, same names and shapes; names left out count fully. Only their
        proportions matter: `bract.attacks.problem.open_case` scales them so that two images stay
        as far apart as they are undefended. Weights of tensors that are no parameters stay.
    alternatives
        Other readings that a coordinate allows, ``(K, ...)`` for the names of ``target``: what is
        simulated is compared with the nearest one.
    nuisance
        Directions along which the target is not known, ``(R, ...)`` for the names of ``target``,
        orthonormal over all of them: differences along them do not count.
    unknown_factor
        Whether the target is the true one divided by an unknown factor of at least 1; the best
        factor is found for whatever is simulated.
    forward
        How to simulate the client; None leaves the choice to the protocol.
    adapt
        Makes of the forward model that the protocol asks for, and of the number of images, one
        that knows the defense.
    buffers
        What the attacker worked out of the model's inside, by the names of its buffers, for
        example the noise of a bottleneck; the forward model finds it among the captured buffers.
    labels
        Labels known with certainty, int64 ``(B,)``, or None; attacks do not search for them then.
    notes
        What was decided and why, JSON-ready; becomes part of the reconstruction's settings.
    """

    target: Tensors
    weights: Tensors | None = None
    alternatives: Tensors | None = None
    nuisance: Tensors | None = None
    unknown_factor: bool = False
    forward: ForwardModel | None = None
    adapt: Callable[[ForwardModel, int], ForwardModel] | None = None
    buffers: Tensors = field(default_factory=dict)
    labels: Tensor | None = None
    notes: dict[str, Any] = field(default_factory=dict)


AdaptiveView = Callable[[Observation, Sequence[Observation]], Evidence]

ADAPTIVE: Registry[AdaptiveView] = Registry("adaptive attacker for the defense")


def evidence_for(
    observation: Observation, tier: Tier = "oblivious", history: Sequence[Observation] = ()
) -> Evidence:
    """Return what an adversary of this tier makes of an observation.

    Parameters
    ----------
    history
        Earlier observations of the same client, by round; adaptive attackers may need them.

    Raises
    ------
    BractError
        If the tier is unknown, or no adaptive attacker is known for a declared defense.
    """
    if tier not in TIERS:
        raise BractError(f"unknown tier {tier!r}; expected one of {', '.join(TIERS)}")
    memory = _MEMORY.get()
    if memory is None:
        return _work_out(observation, tier, history)
    key = (id(observation), tier, _identity(history))
    if key not in memory:
        found: Evidence | BractError
        try:
            found = _work_out(observation, tier, history)
        except BractError as error:
            found = error
        memory[key] = _Remembered(found, observation, history)
    known = memory[key].found
    if isinstance(known, BractError):
        raise known
    return known


@contextlib.contextmanager
def remembered_evidence() -> Iterator[None]:
    """Work out the evidence of each observation once within this block.

    Undoing a defense can take seconds, and a choice among attacks asks for it again and again. An
    observation is the same if it is the same object, with the same history; neither may change
    within the block. Refusals are remembered too. A block within a block shares its memory, and
    everything is forgotten where the outermost one ends.
    """
    if _MEMORY.get() is not None:
        yield
        return
    token = _MEMORY.set({})
    try:
        yield
    finally:
        _MEMORY.reset(token)


class _Remembered(NamedTuple):
    """What was found, with what its key names by identity: as long as it lives, so do they."""

    found: Evidence | BractError
    observation: Observation
    history: Sequence[Observation]


_MEMORY: ContextVar[dict[Any, _Remembered] | None] = ContextVar("evidence", default=None)


def _identity(history: Sequence[Observation]) -> tuple[int, ...]:
    if isinstance(history, list | tuple):
        return tuple(id(seen) for seen in history)
    return (id(history),) if len(history) else ()


def _work_out(observation: Observation, tier: Tier, history: Sequence[Observation]) -> Evidence:
    defenses = [str(d.get("name", "?")) for d in observation.protocol.defenses]
    if tier == "oblivious" or not defenses:
        wanted = observation.gradient()
        return Evidence(target={name: wanted[name] for name in observation.parameters})
    if len(defenses) > 1:
        raise BractError(
            f"{observation.key}: adaptive attackers know one defense at a time, declared are "
            f"{', '.join(defenses)}"
        )
    return ADAPTIVE[defenses[0]](observation, history)
