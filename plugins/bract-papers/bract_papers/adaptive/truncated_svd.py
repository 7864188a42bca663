"""Against truncated SVD: what was left out lies outside the rows and columns of what was sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bract.attacks import Evidence, Known, declared
from bract.attacks.adaptive.chains import alone, named, noisy, parts_of_first, pruned
from bract.attacks.adaptive.simulated_defense import Simulated, simulated
from bract.attacks.problem.evidence import CHAINS, FORWARD
from bract.attacks.reading.spectrum import Spectrum
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.updates.update import Tensors
from bract_papers.defenses.truncated_svd import (
    TruncatedSVD,
    from_layer_matrices,
    layer_matrices,
    rank_of,
)

_ROUNDING = 1e-5
"""Singular values below this share of the largest are rounding of float32."""


@dataclass(frozen=True, eq=False)
class SentSubspaces:
    """A part that leaves of a candidate's gradient what an upload says about it.

    With U and V the singular vectors of an upload ``S`` of rank k, truncated from ``G``:
    ``G - S = (I - U U^T) G (I - V V^T)``, so ``S = G - (I - U U^T) G (I - V V^T)``. That is linear
    in G and holds for the client's own: k (m + n - k) equations of a layer of m x n.

    Attributes
    ----------
    bases
        ``U (m, k)`` and ``V (n, k)`` by the name of the layer's weight.
    """

    bases: dict[str, tuple[Tensor, Tensor]]

    def __call__(self, sent: Tensors) -> Tensors:
        """Return the part of each trial's gradient that the upload determines."""
        made = {}
        for name, matrix in layer_matrices(sent, trials=1).items():
            left, right = (basis.to(matrix) for basis in self.bases[name])
            rest = matrix - left @ (left.mT @ matrix)
            made[name] = matrix - (rest - (rest @ right) @ right.mT)
        return from_layer_matrices(made, sent, trials=1)


@dataclass(frozen=True)
class Truncate:
    """The defense itself, on candidates; which directions are kept counts as a constant."""

    energy: float

    def __call__(self, sent: Tensors) -> Tensors:
        """Truncate each trial's layers."""
        made = {}
        for name, matrix in layer_matrices(sent, trials=1).items():
            left, values, _ = torch.linalg.svd(matrix.detach(), full_matrices=False)
            at = torch.arange(values.shape[-1], device=values.device)
            kept = at < rank_of(values, self.energy)[..., None]
            left = left * kept[..., None, :].to(left)
            made[name] = left @ (left.mT @ matrix)
        return from_layer_matrices(made, sent, trials=1)


def match_sent_subspaces(observation: Observation, known: Known) -> Evidence:
    """Compare candidates' gradients in the rows and columns of the upload, where it is exact.

    That what was left out is no larger than the least singular value that was sent is not used.

    Raises
    ------
    BractError
        If a layer holds singular values that the declared energy would have left out.
    """
    del known
    bases, equations, values = sent_subspaces(observation)
    found = simulated(observation, SentSubspaces(bases))
    return Evidence(
        target=found.target,
        adapt=found.adapt,
        notes={
            "defense": "truncated-svd",
            "method": "matched gradients in the rows and columns of what was sent",
            "equations": equations,
            "parameters": values,
        },
    )


@FORWARD.register("truncated-svd")
def simulate_truncation(observation: Observation, known: Known) -> Evidence:
    """Truncate the candidates' gradients alike, and compare all coordinates."""
    found = truncation(observation, known)
    return Evidence(
        target=found.target,
        adapt=found.adapt,
        notes={"defense": "truncated-svd", "method": "truncated candidates alike"},
    )


def truncation(observation: Observation, known: Known) -> Simulated:
    """Return the upload with the declared truncation of candidates."""
    del known
    return simulated(observation, Truncate(declared(TruncatedSVD, observation).energy))


def sent_subspaces(
    observation: Observation,
) -> tuple[dict[str, tuple[Tensor, Tensor]], int, int]:
    """Return singular vectors of each layer, how many equations they give, and of how many."""
    hyper = declared(TruncatedSVD, observation)
    bases, equations, unknowns = {}, 0, 0
    for name, matrix in layer_matrices(observation.update).items():
        seen = Spectrum.of(matrix)
        rank = seen.rank(share=_ROUNDING)
        # All of a layer that was sent whole: the last value was needed to reach the energy.
        enough = int(rank_of(seen.values, hyper.energy * (1 - 1e-3)))
        if enough < rank == len(seen.values) > 1:
            raise BractError(
                f"{observation.key}: {name} has all of its {rank} singular values, but "
                f"{hyper.energy:g} of the energy is in fewer; correct declaration.defenses",
                code="declaration-wrong",
            )
        bases[name] = (seen.left[:, :rank], seen.right[:rank].mT.contiguous())
        rows, columns = matrix.shape
        equations += rank * (rows + columns - rank)
        unknowns += rows * columns
    return bases, equations, unknowns


@CHAINS.register("pruning then truncated-svd")
@CHAINS.register("noise then truncated-svd")
def before_truncation(observation: Observation, known: Known) -> Evidence:
    """Pruning, or clipping and noise, then truncated SVD: compared where the upload is exact.

    The noise in the rows and columns that were sent has the law of all noise.
    """
    del known
    parts, law = parts_of_first(observation)
    last = SentSubspaces(sent_subspaces(alone(observation, 1))[0])
    found = simulated(observation, *parts, last)
    evidence = Evidence(
        target=found.target,
        adapt=found.adapt,
        likelihood=law,
        notes={"method": "matched the first defense in the rows and columns of what was sent"},
    )
    return named(evidence, observation)


CHAINS.register("truncated-svd then pruning")(partial(pruned, simulate=truncation))
CHAINS.register("truncated-svd then noise")(partial(noisy, simulate=truncation))
