"""Read what entered a convolution off the row space of its gradient."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bract.attacks.problem.case import Case
from bract.attacks.problem.exact import require_exact
from bract.attacks.problem.target_model import NORMS, TargetModel, moments
from bract.errors import BractError
from bract.protocol.update import Tensors

MOST_UNKNOWNS = 7168
"""Most unknowns of the linear system. It is solved densely: the matrix and its factor take 0.8 GB
together at most, and the products of the basis `_MOST_PRODUCTS`."""

_MOST_PRODUCTS = 2**25
"""Most products of two vectors of the basis at two offsets of a kernel, a quarter of a gigabyte."""

_OVERDETERMINED = 1.1
"""Least equations an unknown. With fewer than one any row space has a null space, noise has one."""

_MEAN_LOST = 1e-3
"""Ratio of the last two singular values below which the last one is rounding: normalisation by the
batch takes one dimension off the row space."""

_SPANNED = 1e-6
"""Least singular value, of the greatest, of a dimension that is not float32's rounding."""

_APART = 1e-2
"""Most that an eigenvalue of the null space may be of the next one. Fresh and trained ResNet-20s
leave 1e-6 to 1e-11; where nothing is determined neighbours differ by less."""

_JITTER = 1e-13
_ITERATIONS = 6
_BESIDE = 4


class _ReachedError(Exception):
    """The layer was reached; what follows is not run."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of the attacked model, as it runs on one image.

    Attributes
    ----------
    name
        Of the module; its weight has shape ``(O, C, k, l)``.
    entering
        Shape ``(C, H, W)`` of what enters.
    positions
        Number of places P at which the kernel is applied.
    kernel, stride, padding
        Down and across, in pixels.
    """

    name: str
    entering: tuple[int, int, int]
    positions: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def weight(self) -> str:
        """Name of its weight."""
        return f"{self.name}.weight" if self.name else "weight"

    def unfolded(self, maps: Tensor) -> Tensor:
        """Return patches ``(P, c, k * l)`` of maps ``(c, H, W)``, zero outside."""
        patches = F.unfold(maps[None], self.kernel, padding=self.padding, stride=self.stride)
        return patches[0].T.reshape(self.positions, len(maps), -1)

    def folded(self, patches: Tensor) -> Tensor:
        """Return the sum ``(c, H, W)`` of patches ``(P, c, k * l)`` in their places."""
        columns = patches.flatten(1).T[None]
        size = self.entering[1:]
        made: Tensor = F.fold(columns, size, self.kernel, padding=self.padding, stride=self.stride)
        return made[0]


@dataclass(frozen=True)
class Activations:
    """A space of few dimensions that what entered a convolution lies in.

    Attributes
    ----------
    layer
        The convolution.
    space
        ``(d, C * H * W)``, orthonormal rows; float64 as it is read.
    reached
        bool ``(H, W)``: pixels that a kernel reaches; elsewhere rows are zero.
    """

    layer: Convolution
    space: Tensor
    reached: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Activations:
        """Return it where, and in the precision in which, maps are compared."""
        return Activations(self.layer, self.space.to(device, dtype), self.reached.to(device))

    def distance(self, maps: Tensor) -> Tensor:
        """Return the squared sine of maps ``(C, H, W)`` and the space, in [0, 1]."""
        seen = (maps * self.reached).flatten()
        tiny = torch.finfo(maps.dtype).tiny ** 0.5
        inside = (self.space @ seen).square().sum()
        return 1.0 - inside / seen.square().sum().clamp_min(tiny)


def convolutions(case: Case) -> list[Convolution]:
    """Return the convolutions whose gradient may determine what enters, first ones first.

    There are no more places, of all images together, than the layer has units, but for the one
    dimension that a normalisation by the batch takes, and patches overlap.
    """
    shape = case.observation.declaration.image_shape
    assert shape is not None
    seen: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    model = case.target_model.model
    modules = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and _plain(m)}
    handles = [
        module.register_forward_hook(
            lambda _, given, made, name=name: seen[name].append(
                (tuple(given[0].shape[1:]), tuple(made.shape[2:]))
            )
        )
        for name, module in modules.items()
    ]
    state = case.target_model.captured(case.observation)
    try:
        with torch.no_grad():
            functional_call(model, state, (torch.full((2, *shape), 0.5),))
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for name, calls in seen.items():
        module = modules[name]
        entering, leaving = calls[0]
        if len(calls) > 1 or len(entering) != 3 or not entering[1] * entering[2]:
            continue
        padding = module.padding
        assert not isinstance(padding, str)
        layer = Convolution(
            name,
            (entering[0], entering[1], entering[2]),
            leaving[0] * leaving[1],
            (module.kernel_size[0], module.kernel_size[1]),
            (module.stride[0], module.stride[1]),
            (int(padding[0]), int(padding[1])),
        )
        overlap = any(k > s for k, s in zip(layer.kernel, layer.stride, strict=True))
        dims = layer.positions * case.images
        inside = layer.positions * dims + module.weight[0].numel() <= MOST_UNKNOWNS
        inside = inside and (layer.kernel[0] * layer.kernel[1] * dims) ** 2 <= _MOST_PRODUCTS
        if layer.positions > 1 and dims <= module.out_channels + 1 and overlap and inside:
            found.append(layer)
    return found


def _plain(module: nn.Conv2d) -> bool:
    once = module.groups == 1 and module.dilation == (1, 1)
    return once and module.padding_mode == "zeros" and not isinstance(module.padding, str)


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
    seen: list[Tensor] = []
    statistics: dict[str, tuple[Tensor, Tensor]] = {}

    def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0])
        raise _ReachedError

    def note(_: nn.Module, given: tuple[Tensor, ...], *, norm: str) -> None:
        statistics[norm] = moments(given[0].transpose(0, 1).flatten(1))

    model = target_model.model
    handles = [model.get_submodule(name).register_forward_pre_hook(stop)]
    handles += [
        module.register_forward_pre_hook(partial(note, norm=norm))
        for norm, module in model.named_modules()
        if isinstance(module, NORMS)
    ]
    try:
        functional_call(model, state, (inputs,))
    except _ReachedError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return seen[0], statistics


def read_activations(case: Case, *, seconds: float | None = None) -> Activations:
    """Return what entered the first convolution whose gradient determines it.

    Parameters
    ----------
    seconds
        After them no other convolution is tried; one takes a second or two, with large kernels or
        many channels ten.

    Raises
    ------
    BractError
        If there is none, with the reason for every convolution that was tried.
    """
    reasons: list[str] = []
    begun = time.perf_counter()
    for layer in convolutions(case):
        if reasons and seconds is not None and time.perf_counter() - begun > seconds:
            reasons.append(f"no time was left for {layer.name} and later ones")
            break
        try:
            require_exact(case, (layer.weight,), "patch-span")
            gradient = case.evidence.target[layer.weight].cpu().double()
            return solved(layer, gradient, case.images)
        except BractError as error:
            reasons.append(str(error).removeprefix(f"{case.observation.key}: "))
    raise BractError(
        f"{case.observation.key}: no convolution's gradient determines what entered it: "
        + ("; ".join(reasons) or "none has as many units as places, and patches that overlap")
    )


def solved(layer: Convolution, gradient: Tensor, images: int = 1) -> Activations:
    """Return the space of what entered a convolution, from the gradient of its weight.

    Of several images it is that of all their maps, which are not told from their mixtures.

    The gradient is ``sum_p g_p u_p^T`` over places p, with u_p the patch there and g_p the gradient
    of what left the layer. With as many units as places its row space is that of all patches; where
    a normalisation by the batch follows, whose gradients sum to zero over the places, that of their
    differences. Sought are maps all of whose patches lie in it: ``u_p = V^T c_p``, there plus one
    mean patch m, where what two patches say of one pixel is the same and what they say of padding
    is zero. That is linear, with more equations than unknowns, so that a space of chance has no
    solution. The null space holds the map, and besides it what the geometry leaves: with the mean
    patch, constants of pixels that neither padding nor other pixels are tied to; without it, or of
    several images, the map moved by whole strides, where padding is on one side alone.

    Parameters
    ----------
    gradient
        float64 ``(O, C, k, l)``.
    images
        Number of images of the gradient.

    Raises
    ------
    BractError
        If the row space has too few dimensions, patches overlap too little for as many unknowns,
        or the null space cannot be told from others.
    """
    rows = gradient.flatten(1)
    places = layer.positions
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    whole = rank = places * images
    if len(values) < whole or values[whole - 1] <= _MEAN_LOST * values[whole - 2]:
        rank = whole - 1
    if rank >= rows.shape[1] or values[rank - 1] <= _SPANNED * values[0]:
        raise BractError(
            f"{layer.name}: its gradient does not determine its activations: the row space has "
            f"{int((values > _SPANNED * values[0]).sum())} dimensions beyond rounding, {rank} are "
            f"needed of {rows.shape[1]}, as where units are dead"
        )
    basis = right[:rank]
    free = _free_classes(layer) if rank < whole else []
    equations, unknowns = _sizes(layer, rank, affine=rank < whole, free=len(free))
    if equations < _OVERDETERMINED * unknowns:
        raise BractError(
            f"{layer.name}: its patches overlap too little: {equations} equations for {unknowns} "
            "unknowns"
        )
    vectors = _null_space(layer, _system(layer, basis, affine=rank < whole, free=free), whole)
    mean = vectors[:, places * rank :] if rank < whole else vectors.new_zeros(len(vectors), 1)
    patches = vectors[:, : places * rank].reshape(-1, places, rank) @ basis + mean[:, None]
    channels = layer.entering[0]
    inner = rows.shape[1] // channels
    count = layer.folded(rows.new_ones(places, channels, inner))
    maps = [
        layer.folded(each.reshape(places, channels, inner)) / count.clamp_min(1.0)
        for each in patches
    ]
    for offsets in free:
        pixels = rows.new_zeros(places, channels, inner)
        pixels[:, :, offsets] = 1.0
        constant = layer.folded(pixels).clamp_max(1.0)
        maps += [torch.eye(channels).to(rows)[c][:, None, None] * constant for c in range(channels)]
    space = torch.linalg.qr(torch.stack(maps).flatten(1).T)[0].T
    return Activations(layer, space.contiguous(), count[0] > 0)


def _sizes(layer: Convolution, rank: int, *, affine: bool, free: int) -> tuple[int, int]:
    """Return how many equations `_system` stands for, and how many unknowns they decide."""
    channels, inner = layer.entering[0], layer.kernel[0] * layer.kernel[1]
    reached = sum(pixel >= 0 for pixel, _ in _claims(layer))
    equations = channels * (layer.positions * inner - reached)
    unknowns = layer.positions * rank
    if affine:
        unknowns += channels * (inner - free) - rank
    return equations, unknowns


def _claims(layer: Convolution) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Every pixel, -1 for padding, with the places and offsets of the patches that hold it."""
    _, height, width = layer.entering
    numbers = torch.arange(1, height * width + 1, dtype=torch.float64).view(1, height, width)
    claimed = defaultdict(list)
    for place, row in enumerate((layer.unfolded(numbers)[:, 0].round().long() - 1).tolist()):
        for offset, pixel in enumerate(row):
            claimed[pixel].append((place, offset))
    yield from claimed.items()


def _offsets(layer: Convolution) -> dict[tuple[int, int], list[int]]:
    """Offsets of a patch by the lattice of pixels that they share with other patches."""
    found = defaultdict(list)
    for offset in range(layer.kernel[0] * layer.kernel[1]):
        row, column = divmod(offset, layer.kernel[1])
        found[row % layer.stride[0], column % layer.stride[1]].append(offset)
    return found


def _free_classes(layer: Convolution) -> list[list[int]]:
    """Sets of offsets that no padding meets, whose constant is therefore free."""
    padded = {offset for pixel, each in _claims(layer) if pixel < 0 for _, offset in each}
    return [each for each in _offsets(layer).values() if not padded.intersection(each)]


def _system(layer: Convolution, basis: Tensor, *, affine: bool, free: list[list[int]]) -> Tensor:
    """Return the quadratic form whose value is how far patches disagree, symmetric.

    Its unknowns are c_p ``(P, r)``, then m ``(C * k * l)`` where ``affine``.
    """
    rank, width = basis.shape
    channels, places = layer.entering[0], layer.positions
    inner = width // channels
    split = basis.view(rank, channels, inner)
    pairs = torch.einsum("acx,bcy->xyab", split, split)
    first = places * rank
    matrix = basis.new_zeros(first + width * affine, first + width * affine)
    blocks = matrix[:first, :first].view(places, rank, places, rank)
    means = matrix[first:, first:]
    channel = torch.arange(channels) * inner

    def add(one: tuple[int, int], other: tuple[int, int], weight: float) -> None:
        (p, x), (q, y) = one, other
        blocks[p, :, q] += weight * pairs[x, y]
        if affine:
            matrix[p * rank : (p + 1) * rank, first + channel + y] += weight * split[:, :, x]
            matrix[first + channel + y, p * rank : (p + 1) * rank] += weight * split[:, :, x].T
            means[channel + x, channel + y] += weight

    for pixel, claims in _claims(layer):
        if pixel < 0:
            for claim in claims:
                add(claim, claim, 1.0)
        elif len(claims) > 1:
            # The sum of squared differences from the mean of what is said.
            for one in claims:
                for other in claims:
                    add(one, other, float(one == other) - 1.0 / len(claims))
    if affine:
        # Moving m along V and every c_p back changes nothing: let the c_p sum to zero.
        diagonal = torch.arange(rank)
        blocks.permute(0, 2, 1, 3)[:, :, diagonal, diagonal] += 1.0 / places
        for offsets in free:
            for x in offsets:
                for y in offsets:
                    means[channel + x, channel + y] += 1.0
    return matrix


def _null_space(layer: Convolution, matrix: Tensor, most: int) -> Tensor:
    """Return eigenvectors ``(d, n)`` of a positive matrix whose eigenvalues are all but zero."""
    size = len(matrix)
    scale = float(matrix.diagonal().mean())
    try:
        matrix.diagonal().add_(_JITTER * scale)
        factor = torch.linalg.cholesky(matrix)
    except RuntimeError:
        raise BractError(f"{layer.name}: its system of patches is singular in float64") from None
    generator = torch.Generator().manual_seed(0)
    count = min(size, most + _BESIDE)
    vectors = torch.randn(size, count, dtype=matrix.dtype, generator=generator)
    for _ in range(_ITERATIONS):
        vectors = torch.linalg.qr(torch.cholesky_solve(vectors, factor))[0]
    values, turned = torch.linalg.eigh(vectors.T @ matrix @ vectors)
    values = values.clamp_min(_JITTER * scale)
    ratios = values[:-1] / values[1:]
    last = int(ratios.argmin())
    if ratios[last] > _APART:
        raise BractError(
            f"{layer.name}: its gradient does not determine its activations (least eigenvalues "
            f"{float(values[0]):.0e}, {float(values[1]):.0e}), as under noise or after "
            "several steps"
        )
    found: Tensor = vectors @ turned[:, : last + 1]
    return found.T
