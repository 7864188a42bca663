"""Labels of examples by the slopes of what left a layer, and how often each example is there."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks.problem.linear_layers import FirstLayer
from bract.attacks.problem.problem import Problem
from bract.errors import BractError


def labels_of(
    problem: Problem, trial: int, layer: FirstLayer, images: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return one-hot labels ``(N, classes)`` and the length of each row as a multiple of its own.

    The gradient of one example's loss with respect to the layer's bias is its row of L. Where the
    model predicts a number, its length determines the target.
    """
    classes, model = problem.classes, problem.target_model
    if model.loss.values:
        return _targets(problem, trial, layer, images, rows)
    chosen, shares = [], []
    for image, row in zip(images, rows, strict=True):
        inputs = model.normalise(image).expand(classes, 1, *image.shape).to(problem.dtype)
        state = {n: v[trial].expand(classes, *v.shape[1:]) for n, v in problem.parameters.items()}
        buffers = {n: v[trial].expand(classes, *v.shape[1:]) for n, v in problem.buffers.items()}
        bias = state[layer.site.bias].clone().requires_grad_()
        logits = model(state | {layer.site.bias: bias}, buffers, inputs)[:, 0]
        loss = model.loss.each(logits[:, None], torch.eye(classes).to(logits)[:, None]).sum()
        (gradient,) = torch.autograd.grad(loss, bias)
        best, share = nearest_class(gradient.detach().cpu(), row)
        chosen.append(best)
        shares.append(share)
    labels = torch.nn.functional.one_hot(torch.tensor(chosen), classes)
    return labels, torch.tensor(shares, dtype=torch.float64)


def nearest_class(alone: Tensor, slope: Tensor) -> tuple[int, float]:
    """Return the class whose slopes ``(classes, outputs)`` point as a slope does, and its share.

    The share is the length of the slope along that class', in the class' own length.
    """
    lengths = alone.norm(dim=1).clamp_min(1e-300)
    best = int((alone @ slope / lengths).argmax())
    return best, float(alone[best] @ slope / lengths[best] ** 2)


def _targets(
    problem: Problem, trial: int, layer: FirstLayer, images: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return targets ``(N, 1)`` at which the loss has the slope of each row, and ones.

    With ``dz`` the gradient of the output with respect to the layer's bias, a row is ``s dz``.
    """
    model, loss = problem.target_model, problem.target_model.loss
    if loss.label is None:
        raise BractError(
            f"{problem.cases[trial].observation.key}: the slope of the declared loss does not "
            "determine a target",
            code="attack-unsolved",
        )
    found = []
    for image, row in zip(images, rows, strict=True):
        inputs = model.normalise(image)[None, None].to(problem.dtype)
        state = {n: v[trial][None] for n, v in problem.parameters.items()}
        buffers = {n: v[trial][None] for n, v in problem.buffers.items()}
        bias = state[layer.site.bias].clone().requires_grad_()
        output = model(state | {layer.site.bias: bias}, buffers, inputs).sum()
        (gradient,) = torch.autograd.grad(output, bias)
        alone = gradient[0].detach().cpu()
        # A row is a share of the batch's mean.
        slope = (alone @ row) / alone.square().sum().clamp_min(1e-300) * problem.image_shape[0]
        found.append(loss.label(output.detach().cpu(), slope))
    return torch.stack(found)[:, None], torch.ones(len(found), dtype=torch.float64)


def repeated(shares: Tensor, images: int) -> list[int]:
    """Indices of the images, each as often as its share implies, where that accounts for all."""
    times = (shares / shares.median().clamp_min(1e-300)).round().clamp(1, images + 1)
    times = times.nan_to_num(1.0).to(torch.int64)
    if int(times.sum()) != images:
        return list(range(len(shares)))
    return torch.arange(len(shares)).repeat_interleave(times).tolist()
