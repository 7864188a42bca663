"""Updates as short vectors: coordinates added up with random signs in buckets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bract.attacks import Problem
from bract.seeds import derive_seed
from bract.updates.update import Tensors

_TINY = 1e-30
_FLOOR = 0.01


class Sketch:
    """Feature hashing of the tensors of a problem's target (Weinberger et al. 2009, eq. 1).

    Every coordinate has a bucket and a sign, drawn under the seed; a feature is the sum of its
    bucket's coordinates, each times its sign, so that inner products are kept in expectation. With
    as many buckets as coordinates each has one of its own and nothing is lost.

    Before that, what the evidence does not trust is taken out: coordinates are multiplied by the
    root of their weight, and directions along which the target is not known are projected away.
    Each update is then divided by its norm, and each coordinate by how much it differs among
    updates of one label that `fit` was given. The logarithm of the norm is the last feature, but
    where the target is known up to a factor only.

    Parameters
    ----------
    length
        Most buckets.
    """

    def __init__(self, problem: Problem, *, length: int, seed: int) -> None:
        self.names = tuple(problem.target)
        self._shapes = {name: problem.target[name].shape[1:] for name in self.names}
        size = sum(shape.numel() for shape in self._shapes.values())
        generator = torch.Generator().manual_seed(derive_seed(seed, "sketch"))
        if size <= length:
            length, buckets = size, torch.arange(size)
        else:
            buckets = torch.randint(length, (size,), generator=generator)
        signs = torch.randint(2, (size,), generator=generator) * 2.0 - 1.0
        self.length = length + 1
        self._buckets = buckets.to(problem.device)
        self._signs = signs.to(problem.device, problem.dtype)
        self._scale = torch.ones(size, device=problem.device, dtype=problem.dtype)
        self._factor_open = problem.cases[0].evidence.unknown_factor

    def fit(self, parts: Iterable[tuple[Problem, Tensors]]) -> None:
        """Take for each coordinate's scale how much it differs within one label.

        Trials ``2k`` and ``2k + 1`` of every part have the same labels; the scale is the root mean
        square of their differences, over the root of two. One that is far below the others is not
        enlarged as much: what it holds is rounding.
        """
        square, count = torch.zeros_like(self._scale), 0
        for problem, sent in parts:
            rows, _ = self._rows(problem, sent)
            square += 0.5 * (rows[::2] - rows[1::2]).square().sum(dim=0)
            count += len(rows) // 2
        square /= count
        self._scale = (square.sqrt() + _FLOOR * square.mean().sqrt()).clamp_min(_TINY)

    def __call__(self, problem: Problem, sent: Tensors) -> Tensor:
        """Return features ``(L, length)`` of updates ``(L, ...)`` by name."""
        rows, norm = self._rows(problem, sent)
        signed = rows / self._scale * self._signs
        made = torch.zeros(len(rows), self.length - 1, device=rows.device, dtype=rows.dtype)
        made.index_add_(1, self._buckets, signed)
        made *= (made.shape[1] / len(self._buckets)) ** 0.5
        last = torch.zeros_like(norm) if self._factor_open else norm.log()
        return torch.cat([made, last[:, None]], dim=1)

    def _rows(self, problem: Problem, sent: Tensors) -> tuple[Tensor, Tensor]:
        """Return updates of unit norm ``(L, D)``, and their norms ``(L,)``."""
        known = {name: sent[name].detach() for name in self.names}
        if problem.nuisance is not None:
            along = problem.nuisance
            shares = torch.stack(
                [(a * known[name][:, None]).flatten(2).sum(dim=2) for name, a in along.items()]
            ).sum(dim=0)
            known |= {
                name: known[name] - torch.einsum("lr,lr...->l...", shares, a)
                for name, a in along.items()
            }
        for name, weight in (problem.weights or {}).items():
            known[name] = known[name] * weight.sqrt()
        rows = torch.cat([value.flatten(1) for value in known.values()], dim=1)
        rows = rows.nan_to_num(0.0, 0.0, 0.0)
        norm = rows.norm(dim=1).clamp_min(_TINY)
        return rows / norm[:, None], norm
