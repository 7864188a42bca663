"""Find the places that max pooling took, and the image behind them, of one image's gradient.

    OMP_NUM_THREADS=1 python -m experiments.pooled_places [--images 4] [--split choose] [--json]

Through a fresh sigmoid LeNet with max pooling. The first dense layer's gradient tells the pooled
features h that entered it and the slopes on them. The sigmoid before the pooling gives the highest
output of each cell, ``logit(h)``, and its slope; which of the cell's four places has them is not
told. Given the places, the convolution's gradient and its outputs there are linear in the map p
that entered it, with more equations than p has values. `solved` seeks both together: each place has
a share, the softmax of the outputs in its cell, whose width falls from step to step (Gauss-Newton,
damped), from what GRNN's image makes enter. Then the first convolution gives the image in the same
way, with total variation, since its equations are fewer than the pixels of a colour image.

``start`` is the PSNR of `best` in dB with the same iterations, ``after`` that of the image found
from it; ``places`` and ``first_places`` are the shares of cells, of the second and of the first
convolution, whose place is the client's; ``residual`` is what is left of the second convolution's
gradient, by its size: at rounding the places are proven without the truth.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn import functional as F

from bract.attacks import Budget, attack
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.images import image_set
from experiments.harness.result import Row
from experiments.harness.splits import first_seed
from experiments.harness.uploads import gradient_upload, network_for, plain_spec

ITERATIONS = 600
DATA = ("digits", "grey", "photos")
COLUMNS = (
    *("data", "images", "start", "after", "each_start", "each_after"),
    *("places", "first_places", "residual", "seconds"),
)

_STEPS = 24
_NARROWER = 0.7
_NARROWEST = 1e-6
_VARIATION = 1e-5
_EDGE = 1e-4
_TRIES = 5
_AT_ONCE = 128
_LAYERS = ("features.0", "features.3", "classifier.1")


@dataclass(frozen=True)
class Pooled:
    """A convolution, a sigmoid and a 2x2 max pooling, and what a gradient tells of them.

    Attributes
    ----------
    weight, bias
        Of the convolution, float64 ``(O, I, k, k)`` and ``(O,)``.
    gradient
        Of the weight.
    highest, slopes
        Highest output of each cell and the loss' gradient of it, ``(O, h, w)``.
    """

    weight: Tensor
    bias: Tensor
    gradient: Tensor
    highest: Tensor
    slopes: Tensor

    @classmethod
    def behind(cls, layer: nn.Conv2d, gradient: Tensor, pooled: Tensor, slopes: Tensor) -> "Pooled":
        """Return it for pooled features and the loss' gradient of them, ``(O, h, w)``."""
        assert layer.bias is not None
        weight, bias = (v.detach().double() for v in (layer.weight, layer.bias))
        inside = pooled.clamp(1e-4, 1.0 - 1e-4)
        return cls(weight, bias, gradient, inside.logit(), slopes * inside * (1.0 - inside))

    def outputs(self, entering: Tensor) -> Tensor:
        """Return the outputs of a map ``(I, H, W)`` by cell, ``(O, cells, 4)``."""
        made = F.conv2d(entering[None], self.weight, self.bias)[0]
        filters, height, width = self.highest.shape
        cells = made[:, : 2 * height, : 2 * width].view(filters, height, 2, width, 2)
        return cells.permute(0, 1, 3, 2, 4).reshape(filters, height * width, 4)

    def entered_slopes(self, places: Tensor) -> Tensor:
        """Return the loss' gradient of what entered, for places ``(O, cells)``."""
        filters, height, width = self.highest.shape
        at = F.one_hot(places, 4).to(self.slopes) * self.slopes.flatten(1)[..., None]
        whole = at.view(filters, height, width, 2, 2).permute(0, 1, 3, 2, 4)
        return F.conv_transpose2d(whole.reshape(1, filters, 2 * height, 2 * width), self.weight)[0]


def solved(layer: Pooled, start: Tensor, variation: float) -> tuple[Tensor, Tensor, float]:
    """Return what entered ``(I, H, W)``, its places ``(O, cells)``, and what is left.

    Parameters
    ----------
    start
        What may have entered, in [0, 1].
    variation
        Weight of the total variation of what entered.
    """
    highest, slopes = layer.highest.flatten(1), layer.slopes.flatten(1)
    by_gradient = 1.0 / layer.gradient.square().mean().sqrt()
    indices, (one, other) = _patches(layer, start.shape), _neighbours(start.shape)

    def errors(values: Tensor, width: float) -> Tensor:
        """Return relative errors of the gradient, then of the highest outputs."""
        outputs = layer.outputs(values.view_as(start))
        shares = (outputs / width).softmax(-1)
        patches = torch.einsum("ock,ckf->ocf", shares, values[indices])
        made = torch.einsum("oc,ocf->of", slopes, patches) - layer.gradient.flatten(1)
        tops = (shares * outputs).sum(-1) - highest
        return torch.cat([made.flatten() * by_gradient, tops.flatten() / highest.std()])

    values, damping = start.flatten().clone(), 1e-6
    tops = layer.outputs(start).amax(-1) - highest
    width = max(float(tops.square().mean().sqrt()), _NARROWEST)
    for _ in range(_STEPS):
        weights = ((values[one] - values[other]).square() + _EDGE).rsqrt()

        def total(at: Tensor, width: float = width, weights: Tensor = weights) -> float:
            varied = (weights * (at[one] - at[other]).square()).sum()
            return float(errors(at, width).square().sum() + variation * varied)

        jacobian = _jacobian(partial(errors, width=width), values)
        rough = variation * _laplacian(one, other, weights, len(values))
        normal = jacobian.T @ jacobian + rough
        downhill = -(jacobian.T @ errors(values, width) + rough @ values)
        before = total(values)
        for _ in range(_TRIES):
            damped = normal.clone()
            damped.diagonal().add_(damping)
            step = torch.cholesky_solve(downhill[:, None], torch.linalg.cholesky(damped))[:, 0]
            if total(moved := (values + step).clamp(0.0, 1.0)) < before:
                values, damping = moved, max(damping / 5.0, 1e-10)
                break
            damping *= 10.0
        width = max(width * _NARROWER, _NARROWEST)
    outputs = layer.outputs(values.view_as(start))
    left = errors(values, _NARROWEST)[: layer.gradient.numel()].square().mean().sqrt()
    return values.view_as(start), outputs.argmax(-1), float(left)


def _jacobian(errors: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Return the derivatives of errors ``(E,)`` by values ``(N,)``, ``(E, N)``."""

    def along(direction: Tensor) -> Tensor:
        found: Tensor = jvp(errors, (values,), (direction,))[1]
        return found

    columns: Tensor = vmap(along, chunk_size=_AT_ONCE)(torch.eye(len(values)).to(values))
    return columns.T


def _patches(layer: Pooled, shape: torch.Size) -> Tensor:
    """Return which values the convolution sees at each place, ``(cells, 4, I * k * k)``."""
    size, (_, height, width) = layer.weight.shape[-1], layer.highest.shape
    seen = torch.arange(shape.numel()).view(shape).unfold(1, size, 1).unfold(2, size, 1)
    at = seen.permute(1, 2, 0, 3, 4)[: 2 * height, : 2 * width].flatten(2)
    cells = at.view(height, 2, width, 2, -1).permute(0, 2, 1, 3, 4)
    return cells.reshape(height * width, 4, -1)


def _neighbours(shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return pairs of values below and beside each other."""
    at = torch.arange(shape.numel()).view(shape)
    pairs = ((at[:, 1:], at[:, :-1]), (at[:, :, 1:], at[:, :, :-1]))
    return (
        torch.cat([one.flatten() for one, _ in pairs]),
        torch.cat([other.flatten() for _, other in pairs]),
    )


def _laplacian(one: Tensor, other: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return the matrix whose quadratic form is the weighted sum of squared differences."""
    found = torch.zeros(count, count, dtype=weights.dtype)
    for row, column, sign in ((one, one, 1), (other, other, 1), (one, other, -1), (other, one, -1)):
        found.index_put_((row, column), sign * weights, accumulate=True)
    return found


def main() -> None:
    """Attack every data set's images; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=4, help="of a row")
    arguments.add_argument("--data", nargs="+", default=list(DATA))
    options = parse(arguments)
    done = Finished(options.resume, "experiments.pooled_places")
    rows = []
    for data in options.data:
        made = partial(row, data, options.images, options.split)
        found = done.row([data, options.images, options.split, ITERATIONS], made)
        rows.append(note_row(found, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def row(data: str, count: int, split: str) -> Row:
    """Attack images of a set, each through a network of its own."""
    given = image_set(data, count, split)
    begun = time.process_time()
    each = [
        _found(given.images[[n]], given.labels[[n]], first_seed(split) + n) for n in range(count)
    ]
    start, after, places, first, residual = zip(*each, strict=True)
    return {
        "data": data,
        "split": split,
        "iterations": ITERATIONS,
        "images": count,
        "start": fmean(start),
        "after": fmean(after),
        "each_start": list(start),
        "each_after": list(after),
        "places": fmean(places),
        "first_places": fmean(first),
        "residual": max(residual),
        "seconds": (time.process_time() - begun) / count,
    }


def _found(image: Tensor, label: Tensor, seed: int) -> tuple[float, float, float, float, float]:
    """Return PSNR before and after, shares of places, and what the second layer's gradient left."""
    network = network_for(plain_spec(image.shape[1:]), "lenet", seed, activation="sigmoid")
    seen = gradient_upload(network, image, label, model="lenet", activation="sigmoid")
    begun = attack("best")(seen, budget=Budget(iterations=ITERATIONS)).images
    gradient = {name: value.double() for name, value in seen.gradient().items()}
    first, second, dense = (network.get_submodule(n) for n in _LAYERS)
    assert isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d)
    assert isinstance(dense, nn.Linear)

    def inner(images: Tensor) -> Tensor:
        return F.max_pool2d(torch.sigmoid(first.double()(images.double())), 2).detach()[0]

    bias = gradient[f"{_LAYERS[2]}.bias"]
    pooled = (bias @ gradient[f"{_LAYERS[2]}.weight"]) / bias.square().sum()
    slopes = dense.weight.detach().double().T @ bias
    side = round((len(pooled) / second.out_channels) ** 0.5)
    shape = (second.out_channels, side, side)
    behind = Pooled.behind(
        second, gradient[f"{_LAYERS[1]}.weight"], pooled.view(shape), slopes.view(shape)
    )
    entered, places, residual = solved(behind, inner(begun), 0.0)
    before = Pooled.behind(
        first, gradient[f"{_LAYERS[0]}.weight"], entered, behind.entered_slopes(places)
    )
    found, first_places, _ = solved(before, begun[0].double(), _VARIATION)
    own = behind.outputs(inner(image)).argmax(-1), before.outputs(image[0].double()).argmax(-1)
    right, first_right = (
        float((a == b).double().mean()) for a, b in zip(own, (places, first_places), strict=True)
    )
    return _psnr(begun[0], image[0]), _psnr(found, image[0]), right, first_right, residual


def _psnr(found: Tensor, image: Tensor) -> float:
    """Return the PSNR of an image in dB, at most 100."""
    apart = (found.double() - image.double()).square().mean()
    return float(-10.0 * apart.clamp_min(1e-10).log10())


if __name__ == "__main__":
    main()
