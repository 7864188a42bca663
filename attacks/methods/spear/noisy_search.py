"""Find all factors of a gradient whose zeros are blurred: by noise, or by several local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from bract.attacks.methods.spear.gated_vectors import GatedVectors, descended, distinct, fitted
from bract.attacks.methods.spear.low_rank import Subspace
from bract.attacks.methods.spear.noisy_factors import Layer, NoisyFactors, alternate, unmixed
from bract.attacks.methods.spear.sparse_directions import anneal, products_of, unit, widths
from bract.attacks.reading.spectrum import complement, independent

_STARTS, _FITTED, _KEPT = 64, 24, 6
"""Starts a round, mixtures fitted of them, and candidates kept for each dimension."""

_GOOD, _MOSTLY = 0.9, 0.5
_ONE_VECTOR, _ONE_PATTERN, _INDEPENDENT = 0.97, 0.97, 0.02
_TURN, _TRIED = 3, 5
_NEAR = (0.3, 0.1, 0.03)
_BETWEEN = (0.15, 0.05)
_EXPLAINED, _AGREEING, _BETTER = 1.15, 0.9, 1e-3
_WORST, _DROPPED = 5, 3


class _OutOfTimeError(Exception):
    """Raised inside a round where the time is over."""


@dataclass
class NoisySearch:
    """Search factors until they leave no more than the noise.

    1. Starts descend to sparse vectors, no narrower than their noise, and each becomes a mixture
       that the layer gates (`bract.attacks.methods.spear.gated_vectors`); two rounds in three among
       the vectors that the inputs of good ones leave room for.
    2. As many independent ones of different patterns as there are dimensions are fitted together
       (`bract.attacks.methods.spear.noisy_factors`).
    3. Where more is left than noise, those that agree least with their pattern are dropped, one,
       two or three at a time, and sought again among what the others leave room for. A set replaces
       another one if its cost is lower: nothing here sees the truth.

    Attributes
    ----------
    layer
        On the row space of ``space``.
    stop
        Whether the time is over. It is asked within a round too: one of many images through many
        units takes long.
    """

    space: Subspace
    layer: Layer
    generator: torch.Generator
    best: NoisyFactors | None = None
    rounds_done: int = 0
    stop: Callable[[], bool] = lambda: False
    _pool: GatedVectors | None = None
    _tried: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def done(self) -> bool:
        """Return whether the factors leave hardly more than the noise, and agree with the layer."""
        best = self.best
        return (
            best is not None
            and best.misfit < _EXPLAINED
            and float(best.agreement.min()) > _AGREEING
        )

    @property
    def sure(self) -> int:
        """Rows of the best set that agree with the layer."""
        return 0 if self.best is None else int((self.best.agreement > _GOOD).sum())

    def rounds(self) -> Iterator[int]:
        """Search on, and yield the number of good vectors after every round until all are found.

        It ends where the time is over, and where equations are singular.
        """
        try:
            yield from self._rounds()
        except _OutOfTimeError:
            return
        except RuntimeError as error:
            if "linalg" not in str(error):
                raise

    def _check(self) -> None:
        if self.stop():
            raise _OutOfTimeError

    def _rounds(self) -> Iterator[int]:
        if self.space.rank == 1:
            self.best = self._fit(torch.ones(1, 1, dtype=torch.float64))
        while not self.done:
            for _ in range(_TRIED):
                self._propose()
                chosen = self._chosen()
                good = int((chosen.agreement > _GOOD).sum())
                self.rounds_done += 1
                if good == self.space.rank:
                    break
                yield good
            self._together(chosen)
            while not self.done and self._repair():
                self.rounds_done += 1
                assert self.best is not None
                yield int((self.best.agreement > _GOOD).sum())
            yield self.space.rank if self.done else 0

    def _propose(self) -> None:
        space = self.space
        good = self._pool and self._chosen()
        inputs = good.inputs[good.agreement > _GOOD] if good else torch.empty(0, space.rank)
        if not 0 < len(inputs) < space.rank or self.rounds_done % _TURN == 0:
            drawn = descended(space, self._draw(_STARTS, space.rank), check=self._check)
        else:
            drawn = self._among_the_others(inputs, _STARTS, _NEAR[self.rounds_done % len(_NEAR)])
        if self.best is not None:
            drawn = torch.cat([drawn, self.best.coefficients(space)])
        new = fitted(space, self.layer.outputs, distinct(space, drawn, _FITTED), self._check)
        pool = new if self._pool is None else self._pool.joined(new)
        kept: list[int] = []
        for index in pool.agreement.argsort(descending=True).tolist():
            own = pool.coefficients[index]
            if kept and float((pool.coefficients[kept] @ own).square().max()) > _ONE_VECTOR:
                continue
            kept.append(index)
            if len(kept) == _KEPT * space.rank:
                break
        self._pool = pool.kept(kept)

    def _among_the_others(self, inputs: Tensor, starts: int, first: float) -> Tensor:
        """Descend to vectors that are orthogonal to known inputs ``(K, N)``, about and then freely.

        For N - 1 inputs that is one vector.
        """
        space, known = self.space, len(inputs)
        others = complement(inputs / space.values).T
        count = space.rank - known
        coarse = torch.ones(1, 1, dtype=torch.float64)
        back = torch.eye(1, dtype=torch.float64)
        if count > 1:
            basis, back = torch.linalg.qr(space.left @ others)
            products = products_of(basis)
            coarse = torch.cat(
                [
                    anneal(
                        basis,
                        products,
                        self._draw(starts // 2, count),
                        widths(2.0, last),
                        check=self._check,
                    )
                    for last in _BETWEEN
                ]
            )
        near = unit(torch.linalg.solve(back, coarse.T).T @ others.T)
        return torch.cat([near, descended(space, near, first, self._check)])

    def _chosen(self) -> GatedVectors:
        """The candidates that agree best with their patterns, independent and of different ones."""
        assert self._pool is not None
        pool, kept = self._pool, list[int]()
        for index in pool.agreement.argsort(descending=True).tolist():
            alike = (pool.on[kept] == pool.on[index]).to(torch.float64).mean(dim=1)
            if kept and float(alike.max()) > _ONE_PATTERN:
                continue
            if not independent(pool.coefficients[[*kept, index]], _INDEPENDENT):
                continue
            kept.append(index)
            if len(kept) == self.space.rank:
                break
        return pool.kept(kept)

    def _together(self, chosen: GatedVectors) -> None:
        """Fit chosen vectors together; what is missing is filled from what they leave room for."""
        space = self.space
        inputs, coefficients = chosen.inputs, chosen.coefficients
        if len(inputs) < space.rank:
            coefficients = torch.cat([coefficients, complement(inputs / space.values)])
        else:
            self._keep(self._fit(inputs))
        if independent(coefficients, _INDEPENDENT):
            self._keep(self._fit(torch.linalg.inv(coefficients / space.values).T))

    def _repair(self) -> bool:
        """Seek the least certain vectors of the best set again; False where all were tried."""
        best, space = self.best, self.space
        if best is None:
            return False
        worst = best.agreement.argsort()[:_WORST].tolist()
        sets = [s for n in range(1, _DROPPED + 1) for s in combinations(worst, n)]
        left = [s for s in sets if s not in self._tried and len(s) < space.rank]
        if not left:
            return False
        dropped = left[0]
        self._tried.add(dropped)
        kept = [index for index in range(space.rank) if index not in dropped]
        vectors = best.coefficients(space)[kept]
        drawn = self._among_the_others(best.inputs[kept], _STARTS // 2, _NEAR[1])
        new = fitted(space, self.layer.outputs, distinct(space, drawn, _FITTED // 2), self._check)
        picked: list[int] = []
        for index in new.agreement.argsort(descending=True).tolist():
            together = torch.cat([vectors, new.coefficients[[*picked, index]]])
            if independent(together, _INDEPENDENT):
                picked.append(index)
            if len(picked) == len(dropped):
                break
        if len(picked) < len(dropped):
            return True
        inputs = torch.cat([unit(best.inputs[kept]), unit(new.inputs[picked])])
        together = torch.cat([vectors, new.coefficients[picked]])
        self._keep(self._fit(inputs))
        self._keep(self._fit(torch.linalg.inv(together / space.values).T))
        return True

    def _fit(self, inputs: Tensor) -> NoisyFactors | None:
        return alternate(self.space, self.layer, inputs, self._check)

    def _keep(self, found: NoisyFactors | None) -> None:
        if found is None:
            return
        before = self.best
        if before is None or found.cost < before.cost - _BETTER * abs(before.cost):
            self.best = found
            if self._nearly(found):
                self.best = unmixed(self.space, self.layer, found, self._check)
            self._tried = set()

    def _nearly(self, found: NoisyFactors) -> bool:
        """Return whether most rows are right, so that the others are worth unmixing."""
        return float((found.agreement > _GOOD).to(torch.float64).mean()) > _MOSTLY

    def _draw(self, count: int, size: int) -> Tensor:
        return unit(torch.randn(count, size, generator=self.generator, dtype=torch.float64))
