"""Read what entered a convolution off the row space of its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from bract.attacks.methods.patch_span.layers import Convolution, convolutions
from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import LocalTraining
from bract.attacks.problem.target_model import NORMS, TargetModel, moments
from bract.attacks.problem.training_path import TrainingPath
from bract.attacks.reading.errors import require_exact, require_one_gradient
from bract.attacks.reading.span import Span
from bract.attacks.reading.spectrum import Spectrum
from bract.errors import BractError
from bract.models import tap
from bract.process import clock
from bract.updates.update import Tensors

_OVERDETERMINED = 1.1
"""Least equations an unknown. With fewer than one any row space has a null space, noise has one."""

_MEAN_LOST = 1e-3
"""Ratio of the last two singular values below which the last one is rounding: normalisation by the
batch takes one dimension off the row space."""

_SPANNED = 1e-6
"""Least singular value, of the greatest, of a dimension that is not float32's rounding."""

_APART = 1e-2
"""Most that an eigenvalue of the null space may be of the next one. Undisturbed gradients leave
1e-10 and less; where nothing is determined neighbours differ by less."""

_BESIDE = 8
"""Vectors that are sought besides one an image."""

_RESIDUAL, _ROUNDING = 1e-7, 1e-14
_LANCZOS, _MOST_RESTARTS = 40, 400


@dataclass(frozen=True, kw_only=True)
class Maps(Span):
    """Space of few dimensions that the maps which entered a convolution lie in.

    Its rows are ``(d, C * H * W)``.

    Attributes
    ----------
    layer
        The convolution.
    reached
        bool ``(H, W)``: pixels that a kernel reaches; elsewhere rows are zero.
    """

    layer: Convolution
    reached: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Maps:
        """Return it where, and in the precision in which, maps are compared."""
        return replace(self, basis=self.basis.to(device, dtype), reached=self.reached.to(device))

    def distance(self, inputs: Tensor) -> Tensor:
        """Return the squared sine of maps ``(C, H, W)`` and the space, in [0, 1]."""
        seen = (inputs * self.reached).flatten()
        tiny = torch.finfo(inputs.dtype).tiny ** 0.5
        inside = (self.basis @ seen).square().sum()
        return 1.0 - inside / seen.square().sum().clamp_min(tiny)


def entering(
    target_model: TargetModel, state: Tensors, inputs: Tensor, name: str
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return what enters a layer, ``(B, C, H, W)``, and statistics before it, differentiably.

    What follows the layer is not run. Statistics are mean and unbiased variance ``(channels,)`` of
    what enters every normalisation by the batch that runs before, by its name.

    Parameters
    ----------
    state
        Parameters and buffers of one trial.
    inputs
        Normalised images ``(B, c, h, w)``.
    """
    statistics: dict[str, tuple[Tensor, Tensor]] = {}

    def note(norm: str, value: Tensor) -> None:
        statistics[norm] = moments(value.transpose(0, 1).flatten(1))

    model = target_model.model
    with tap.entering(model, tap.named(model, *NORMS), note):
        seen = tap.inputs(lambda: functional_call(model, state, (inputs,)), model, [name])
    return seen[name], statistics


def read_activations(case: Case, *, seconds: float | None = None) -> Maps:
    """Return what entered the first convolution whose gradient determines it.

    Parameters
    ----------
    seconds
        After them the search stops; a convolution takes seconds, and a minute or two where there
        are nearly as many products as are taken.

    Raises
    ------
    BractError
        If there is none, with the reason for every convolution that was tried.
    """
    reasons: list[str] = []
    begun, most = clock.now(), steps_on_all(case)
    # Where the first step leaves next to nothing to learn, the others show no dimensions.
    counts = dict.fromkeys((most, 1))
    tried = [(steps, layer) for steps in counts for layer in convolutions(case, steps)]
    for steps, layer in tried:
        if reasons and seconds is not None and clock.now() - begun > seconds:
            reasons.append(f"no time was left for {layer.name} and later ones")
            break
        try:
            require_exact(case, (layer.weight,), "patch-span")
            gradient = case.evidence.target[layer.weight].cpu().double()
            left = None if seconds is None else max(0.0, seconds - (clock.now() - begun))
            return solved(layer, gradient, case.images * steps, seconds=left)
        except BractError as error:
            reasons.append(str(error).removeprefix(f"{case.observation.key}: "))
    raise BractError(
        f"{case.observation.key}: no convolution's gradient determines what entered it: "
        + ("; ".join(reasons) or "none has as many units as places, and patches that overlap"),
        code="attack-unsolved",
    )


def steps_on_all(case: Case) -> int:
    """Return how many local steps of SGD an update sums, each on all images.

    Raises
    ------
    BractError
        If it is no such sum: of another optimizer, of steps on parts of the images, or of a
        defense.
    """
    law, declared = case.law, case.observation.declaration
    batch, examples = declared.batch_size, declared.num_examples
    whole = examples == case.images and (examples == 1 or batch is None or batch >= examples)
    sgd = law.averaging and law.optimizer == "sgd" and law.scaled and not law.decays
    summed = sgd and isinstance(case.forward, LocalTraining | TrainingPath)
    if law.one_gradient or not (whole and summed):
        require_one_gradient(case, "patch-span")
        return 1
    return law.counted


def solved(
    layer: Convolution, gradient: Tensor, images: int = 1, *, seconds: float | None = None
) -> Maps:
    """Return the space of what entered a convolution, from the gradient of its weight.

    Of several images it is that of all their maps, which are not told from their mixtures.

    The gradient is ``sum_p g_p u_p^T`` over places p, with u_p the patch there and g_p the gradient
    of what left the layer. With as many units as places its row space is that of all patches; where
    a normalisation by the batch follows, whose gradients sum to zero over the places, that of their
    differences. Sought are maps all of whose patches, or their differences from the mean patch, lie
    in it: the null space of a quadratic form, the sum of what the patches have outside of it. There
    are more equations than unknowns, so that a space of chance has no solution. The null space
    holds the map, and besides it what the geometry leaves: behind a normalisation constants of
    pixels that no padding is tied to; without one, or of several images, the map moved by whole
    strides, where padding is on one side alone.

    Parameters
    ----------
    gradient
        float64 ``(O, C, k, l)``.
    images
        Number of maps whose patches the gradient sums: images, times steps on them.
    seconds
        After them the search for the null space stops.

    Raises
    ------
    BractError
        If the row space has too few dimensions, patches overlap too little for as many unknowns,
        the null space cannot be told from others, or no time was left.
    """
    until = None if seconds is None else clock.now() + seconds
    if not bool(gradient.isfinite().all()):
        raise BractError(
            f"{layer.name}: its gradient holds values that are not finite", code="attack-evidence"
        )
    whole = layer.positions * images
    seen, fewer = Spectrum.of(gradient.flatten(1)), whole - layer.taken
    lost = not seen.holds(whole, _MEAN_LOST, of=fewer)
    refused: BractError | None = None
    # Noise hides the dimensions that a normalisation took. Where none took any, one is missing for
    # another reason, as of a dead unit: maps whose differences lie in what is left need not be
    # those that entered.
    for rank in dict.fromkeys((fewer,) if lost else (whole, fewer)):
        try:
            return _found(layer, seen, rank, images, until)
        except BractError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _found(layer: Convolution, seen: Spectrum, rank: int, images: int, until: float | None) -> Maps:
    """Return the space from the first dimensions of a gradient's row space."""
    width = seen.right.shape[1]
    if rank >= width or not seen.holds(rank, _SPANNED):
        raise BractError(
            f"{layer.name}: its gradient does not determine its activations: the row space has "
            f"{seen.rank(share=_SPANNED)} dimensions beyond rounding, {rank} are "
            f"needed of {width}, as where units are dead",
            code="attack-unsolved",
        )
    centred = rank < layer.positions * images
    form = OutsideSpan(layer, seen.right[:rank], centred=centred, until=until)
    if form.equations < _OVERDETERMINED * form.unknowns:
        raise BractError(
            f"{layer.name}: its patches overlap too little: {form.equations} equations for "
            f"{form.unknowns} unknowns",
            code="attack-unsolved",
        )
    maps = torch.cat([form.null_space(images), form.constants.flatten(1)])
    space = torch.linalg.qr(maps.T)[0].T
    return Maps(basis=space.contiguous(), gap=form.apart, layer=layer, reached=form.reached)


class OutsideSpan:
    """The quadratic form whose value is how much of a map's patches lies outside of a space.

    Pixels are weighted by the square root of the number of patches that hold them, so that its
    eigenvalues lie in [0, 1].

    Parameters
    ----------
    basis
        Of the space, ``(r, C * k * l)``, orthonormal rows.
    centred
        Whether the patches' mean is taken off first.
    until
        Reading of `clock.now` at which the search for the null space is refused.

    Attributes
    ----------
    reached
        bool ``(H, W)``: pixels that a patch holds.
    constants
        ``(d, C, H, W)``: maps that the form cannot tell, where it is centred.
    apart
        Ratio of the least eigenvalue outside of its null space to the largest inside, once that
        was found.
    """

    def __init__(
        self, layer: Convolution, basis: Tensor, *, centred: bool, until: float | None = None
    ) -> None:
        self._layer = layer
        self._until = until
        self._basis = basis
        self._centred = centred
        self.apart = 1.0
        channels, inner = layer.entering[0], layer.kernel[0] * layer.kernel[1]
        count = layer.folded(basis.new_ones(layer.positions, 1, inner))[0]
        self.reached = count > 0
        self._weights = count.clamp_min(1.0).sqrt()
        self.constants = self._undetermined() if centred else basis.new_zeros(0, *layer.entering)
        held = (self.constants * self._weights).flatten(1)
        self._held = held / held.norm(dim=1, keepdim=True)
        outside = basis.shape[1] - len(basis)
        self.equations = (layer.positions - centred) * outside
        self.unknowns = channels * int(self.reached.sum()) - len(self.constants)

    def _undetermined(self) -> Tensor:
        """Return what no difference of patches shows: a channel constant on a lattice of pixels."""
        layer = self._layer
        channels, height, width = layer.entering
        found = []
        for down in range(layer.stride[0]):
            for across in range(layer.stride[1]):
                pixels = self._basis.new_zeros(1, height, width)
                pixels[:, down :: layer.stride[0], across :: layer.stride[1]] = 1.0
                patches = layer.unfolded(pixels * self.reached)
                if patches.any() and torch.equal(patches, patches[:1].expand_as(patches)):
                    found.append(pixels[0] * self.reached)
        own = torch.eye(channels).to(self._basis)
        made = [c[:, None, None] * pixels for pixels in found for c in own]
        return torch.stack(made) if made else self._basis.new_zeros(0, *layer.entering)

    def __call__(self, weighted: Tensor) -> Tensor:
        """Return the form's product with a weighted map ``(C * H * W)``."""
        maps = weighted.view(self._layer.entering)
        patches = self._layer.unfolded(maps / self._weights).flatten(1)
        outside = self._centre(patches)
        outside = self._centre(outside - (outside @ self._basis.T) @ self._basis)
        inner = self._layer.kernel[0] * self._layer.kernel[1]
        folded = self._layer.folded(outside.view(len(patches), -1, inner)) / self._weights
        kept = (folded + maps * ~self.reached).flatten()
        made: Tensor = kept + (self._held @ weighted) @ self._held
        return made

    def _centre(self, patches: Tensor) -> Tensor:
        return patches - patches.mean(dim=0) if self._centred else patches

    def null_space(self, images: int) -> Tensor:
        """Return maps ``(d, C * H * W)`` whose patches have next to nothing outside of the space.

        They are eigenvectors of the least eigenvalues, by the Lanczos method, which finds one of
        several that are equal: it is repeated on what is left until none is as small. Fewer than
        one an image are refused: an image whose gradient is faint is not told from none.
        """
        found: list[Tensor] = []
        limit, largest = None, 0.0
        while True:
            values, vectors = self._least(images + _BESIDE, found)
            if limit is None:
                ratios = values[:-1] / values[1:]
                last = int(ratios.argmin())
                if ratios[last] > _APART:
                    raise self._open(f"the least are {values[0]:.0e} and {values[1]:.0e}")
                limit = _APART * values[last + 1]
            small = vectors[values < limit]
            if not len(small):
                break
            found += [*small]
            largest = max(largest, float(values[values < limit].max()))
        if len(found) < images:
            raise self._open(f"{len(found)} are apart from the others, of {images} images")
        self.apart = float(limit / (_APART * largest))
        return torch.stack(found) / self._weights.expand(self._layer.entering).flatten()

    def _least(self, most: int, beside: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the least eigenvalues, and eigenvectors ``(most, C * H * W)`` beside others."""
        from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

        size = math.prod(self._layer.entering)
        others = torch.stack(beside) if beside else self._held[:0]

        def inside(vector: NDArray[np.float64]) -> NDArray[np.float64]:
            if self._until is not None and clock.now() > self._until:
                raise BractError(
                    f"{self._layer.name}: no time was left to read its activations",
                    code="budget-spent",
                )
            given = torch.from_numpy(np.ascontiguousarray(vector).reshape(-1))
            return (given - self(given) - (others @ given) @ others).numpy()

        generator = torch.Generator().manual_seed(len(beside))
        start = torch.randn(size, generator=generator, dtype=torch.float64)
        try:
            found, vectors = eigsh(
                LinearOperator((size, size), matvec=inside, dtype=np.float64),
                k=min(most, size - 1),
                which="LA",
                v0=start.numpy(),
                ncv=min(max(_LANCZOS, 2 * most + 1), size),
                tol=_RESIDUAL,
                maxiter=_MOST_RESTARTS,
            )
        except ArpackError as error:
            raise self._open("none is apart from the others") from error
        order = np.argsort(-found)
        values = torch.from_numpy(1.0 - found[order]).clamp_min(_ROUNDING)
        return values, torch.from_numpy(np.ascontiguousarray(vectors[:, order].T))

    def _open(self, found: str) -> BractError:
        return BractError(
            f"{self._layer.name}: its gradient does not determine its activations (of the "
            f"eigenvalues {found}), as under noise or after several steps",
            code="attack-unsolved",
        )
