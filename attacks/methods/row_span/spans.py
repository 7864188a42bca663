"""What enters the linear layers of a model lies in the row space of their gradients."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vmap

from bract import tap
from bract.attacks.problem.case import Case
from bract.attacks.problem.linear_layers import entering
from bract.attacks.solve.labels import last_layer
from bract.protocol.update import Tensors

_ROUNDING = 1e-6
"""Singular value, relative to the largest, below which a direction is rounding of float32."""


@dataclass(frozen=True)
class Span:
    """Row space of the gradient of one linear layer, its bias beside its weight.

    Attributes
    ----------
    layer
        Name of the module.
    basis
        float64 ``(rank, features + 1)``, orthonormal rows.
    biased
        Whether the last feature is the bias', which is 1.
    """

    layer: str
    basis: Tensor
    biased: bool

    def residual(self, entering: Tensor) -> Tensor:
        """Return the part of features ``(N, features)`` outside the span, relative to each."""
        ones = entering.new_ones(len(entering), 1)
        whole = torch.cat([entering, ones], dim=1) if self.biased else entering
        outside = whole - (whole @ self.basis.T) @ self.basis
        found: Tensor = outside / whole.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return found


class Spans:
    """The spans that a batch of rows must lie in, as a function of candidate rows.

    Parameters
    ----------
    case
        Whose update is a gradient, or the mean one of local steps.
    exact
        Whether it is one batch's gradient, to rounding.
    """

    def __init__(self, case: Case, *, exact: bool = True) -> None:
        self._model = case.target_model
        self._model.model.cpu().double()
        observation = case.observation
        self._state: Tensors = {
            name: observation.parameters[name].double().cpu()
            for name in self._model.parameter_names
        }
        self._state |= {
            name: value.double().cpu() if value.is_floating_point() else value.cpu()
            for name, value in observation.buffers.items()
            if name in self._model.buffer_names
        }
        self.spans = _spans_of(case, exact)
        self.rank = max((len(span.basis) for span in self.spans), default=0)

    def entering(self, rows: Tensor, layers: list[str]) -> list[Tensor]:
        """Return what enters some layers for model inputs ``(N, D)``."""
        model, given = self._model.model, (rows[..., None, None],)
        seen = tap.inputs(lambda: functional_call(model, self._state, given), model, layers)
        return [seen[name] for name in layers]

    def outputs(self, rows: Tensor) -> Tensor:
        """Return the model's outputs ``(N, K)`` for model inputs ``(N, D)``."""
        with torch.no_grad():
            found: Tensor = functional_call(
                self._model.model, self._state, (rows[..., None, None],)
            )
        return found

    def residuals(self, rows: Tensor) -> Tensor:
        """Return all residuals of model inputs ``(N, D)`` side by side."""
        given = self.entering(rows, [span.layer for span in self.spans])
        parts = [span.residual(value) for span, value in zip(self.spans, given, strict=True)]
        return torch.cat(parts, dim=1)

    def losses(self, rows: Tensor) -> Tensor:
        """Return the mean squared residual over the layers, ``(N,)``, each in [0, 1]."""
        with torch.no_grad():
            return self.residuals(rows).square().sum(dim=1) / len(self.spans)

    def jacobian(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return derivatives ``(N, residuals, places)`` with respect to some features."""
        directions = torch.eye(rows.shape[1], dtype=rows.dtype)[places]

        def along(direction: Tensor) -> Tensor:
            tangent = direction.expand_as(rows)
            found: Tensor = jvp(self.residuals, (rows,), (tangent,))[1]
            return found

        with torch.no_grad(), warnings.catch_warnings():
            # Forward derivatives make PyTorch script its own formulas, which it deprecates.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return vmap(along)(directions).permute(1, 2, 0)

    def slopes(self, case: Case, rows: Tensor) -> Tensor:
        """Return the derivative of each row's loss with respect to its outputs, ``(N, K)``.

        The gradient of the last layer is linear in them: ``dW = sum_i s_i h_i^T / B``.
        """
        weight, bias = last_layer(self._model)
        (features,) = self.entering(rows, [weight.removesuffix(".weight").removesuffix("weight")])
        target = case.evidence.target
        wanted = target[weight].double().cpu()
        if bias is not None and bias in target:
            features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
            wanted = torch.cat([wanted, target[bias].double().cpu()[:, None]], dim=1)
        found: Tensor = torch.linalg.lstsq(features.T.detach(), wanted.T, driver="gelsd").solution
        return found * case.images


def _spans_of(case: Case, exact: bool) -> list[Span]:
    """Return the layers whose gradient leaves room for other rows than the batch's.

    Of several steps, whose features drift a little, it is the span of the largest directions, as
    many as there are rows.
    """
    shape = case.target_model.image_shape
    target = case.evidence.target
    probe = torch.zeros(1, *shape)
    found = []
    case.target_model.model.float()
    seen = entering(case.target_model, case.observation, probe)
    case.target_model.model.double()
    for name, value in seen.items():
        weight, bias = (
            (f"{name}." if name else "") + "weight",
            (f"{name}." if name else "") + "bias",
        )
        if weight not in target or value.shape[0] != 1 or value.dim() != 2:
            continue
        gradient = target[weight].double().cpu()
        biased = bias in target
        if biased:
            gradient = torch.cat([gradient, target[bias].double().cpu()[:, None]], dim=1)
        values, rows = torch.linalg.svd(gradient, full_matrices=False)[1:]
        rank = int((values > _ROUNDING * values[0]).sum())
        if not exact:
            rank = min(rank, case.images)
        # With fewer outputs than examples the gradient holds a part of the features' span alone.
        if case.images <= len(gradient) and rank < gradient.shape[1] and rank <= case.images:
            found.append(Span(name, rows[:rank], biased))
    return found
