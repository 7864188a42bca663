"""A client over several rounds: every round's names, forward model and likelihood side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import BatchGradient, ForwardModel
from bract.attacks.problem.likelihoods import Likelihood
from bract.attacks.problem.target_model import TargetModel
from bract.updates.update import Tensors

PARAMETERS, BUFFERS, _UNKNOWNS = "parameters", "buffers", "unknowns"
_SEPARATOR = ":"
"""No name of a PyTorch parameter or buffer holds it by convention; see `of_model`."""

Assigned = tuple[tuple[int, ...], ...]
"""By round, the positions of its images among those of the case."""


@dataclass(frozen=True)
class OverRounds:
    """Simulate a client round by round, every round with its own parameters and forward model.

    What was sent in each round is looked up among the buffers (`join_rounds`); the parameters that
    the problem gives are those of the last round, and are not used twice.

    Attributes
    ----------
    forwards
        One a round.
    assigned
        Images that each round took; None gives every round all of them.
    """

    forwards: tuple[ForwardModel, ...]
    assigned: Assigned | None = None

    def unknowns(
        self, target_model: TargetModel, trials: int, generators: list[torch.Generator]
    ) -> Tensors:
        """Those of every round, each by the round's own name."""
        found: Tensors = {}
        for number, forward in enumerate(self.forwards):
            own = forward.unknowns(target_model, trials, generators)
            found |= {name_in(number, n, _UNKNOWNS): value for n, value in own.items()}
        return found

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return every round's tensors, ``(L, ...)`` by the round's number and name."""
        del parameters
        if self.side_by_side and self._alike(buffers):
            return self._at_once(target_model, buffers, inputs, labels)
        found: Tensors = {}
        for number, forward in enumerate(self.forwards):
            taken = slice(None) if self.assigned is None else list(self.assigned[number])
            own = forward(
                target_model,
                _group(buffers, number, PARAMETERS),
                _group(buffers, number, BUFFERS),
                inputs[:, taken],
                labels[:, taken],
                _group(unknowns, number, _UNKNOWNS),
            )
            found |= {name_in(number, n): value for n, value in own.items()}
        return found

    @property
    def side_by_side(self) -> bool:
        """Return whether rounds can be simulated like trials: plain gradients of equally many
        images.
        """
        sizes = {len(row) for row in self.assigned or ()}
        return len(sizes) < 2 and all(type(f) is BatchGradient for f in self.forwards)

    def _alike(self, buffers: Tensors) -> bool:
        """Return whether all rounds have the same buffers; a mask of dropout is read in some
        alone.
        """
        each = [set(_group(buffers, i, BUFFERS)) for i in range(len(self.forwards))]
        return all(names == each[0] for names in each)

    def _at_once(
        self, target_model: TargetModel, buffers: Tensors, inputs: Tensor, labels: Tensor
    ) -> Tensors:
        """Simulate all rounds as trials of one batch, a trial's rounds one after the other."""
        rounds, trials = len(self.forwards), len(inputs)

        def pile(group: str) -> Tensors:
            each = [_group(buffers, number, group) for number in range(rounds)]
            return {n: torch.stack([e[n] for e in each], dim=1).flatten(0, 1) for n in each[0]}

        def taken(value: Tensor) -> Tensor:
            if self.assigned is None:
                return value[:, None].expand(-1, rounds, *value.shape[1:]).flatten(0, 1)
            return value[:, torch.tensor(self.assigned)].flatten(0, 1)

        found = BatchGradient()(
            target_model, pile(PARAMETERS), pile(BUFFERS), taken(inputs), taken(labels), {}
        )
        return {
            name_in(number, name): value.unflatten(0, (trials, rounds))[:, number]
            for number in range(rounds)
            for name, value in found.items()
        }


@dataclass(frozen=True)
class SumOverRounds:
    """Negative log-likelihood of several independent uploads: the sum of theirs, in nats.

    Attributes
    ----------
    parts
        One a round.
    """

    parts: tuple[Likelihood, ...]
    component: ClassVar[str] = "likelihood over rounds"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return nats ``(L,)``."""
        own = [
            part(
                _group(simulated, number),
                _group(captured, number),
                None if weights is None else _group(weights, number),
            )
            for number, part in enumerate(self.parts)
        ]
        return torch.stack(own).sum(dim=0)

    def tempered(self) -> SumOverRounds:
        """Return the sum with each round's law as a first-order search through kinks can use it."""
        return SumOverRounds(tuple(part.tempered() for part in self.parts))


def round_names(case: Case) -> list[list[str]]:
    """Return the names of the case's target, one list a round; one list of a single upload."""
    target = case.evidence.target
    if not case.rounds:
        return [list(target)]
    return [[name_in(i, n) for n in c.evidence.target] for i, c in enumerate(case.rounds)]


def of_last_round(case: Case, tensors: Tensors) -> Tensors:
    """Return the tensors of a case's last round by the model's names; all of a single upload's."""
    return _group(tensors, len(case.rounds) - 1) if case.rounds else tensors


def of_model(buffers: Tensors) -> Tensors:
    """Leave out what `join_rounds` keeps of several rounds among the buffers."""
    return {name: value for name, value in buffers.items() if _SEPARATOR not in name}


def name_in(number: int, name: str, group: str = "") -> str:
    """Return how a tensor of one round, from 0, is called among those of all."""
    return f"{number}{_SEPARATOR}{group}{_SEPARATOR}{name}"


def round_of(name: str) -> int:
    """Return the number of the round, from 0, of a name of `name_in`."""
    return int(name.partition(_SEPARATOR)[0])


def _group(tensors: Tensors, number: int, group: str = "") -> Tensors:
    prefix = name_in(number, "", group)
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
