"""What enters the linear layers of a model lies in the row space of their gradients."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vmap

from bract.attacks.problem.case import Case
from bract.attacks.problem.linear_layers import entering
from bract.attacks.problem.site import Site
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.errors import Errors
from bract.attacks.reading.span import span_above, span_under_noise
from bract.attacks.solve.labels import last_layer
from bract.models import tap
from bract.updates.update import Tensors

_ROUNDING = 1e-6
"""Singular value, relative to the largest, below which a direction is rounding of float32."""


class Spans:
    """The spans that a batch of rows must lie in, as a function of candidate rows.

    Parameters
    ----------
    case
        Whose update is a gradient, or the mean one of local steps.
    read
        The spans of its layers, by `read_layers`, exact or under white noise of a known deviation.
    """

    def __init__(self, case: Case, read: Entered) -> None:
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
        self.noisy = read.errors.level == "noisy"
        self.read = read.layers
        self.rank = max(one.space.rank for one in self.read if one.space is not None)
        self.room = read.certificate.equations

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
        given = self.entering(rows, [one.site.layer for one in self.read])
        parts = [one.outside(value) for one, value in zip(self.read, given, strict=True)]
        return torch.cat(parts, dim=1)

    def losses(self, rows: Tensor) -> Tensor:
        """Return the mean squared residual over the layers, ``(N,)``.

        Each layer's is in [0, 1]; under noise it is one of all coordinates, 1 on average for rows
        of the batch.
        """
        count = self.room if self.noisy else len(self.read)
        with torch.no_grad():
            return self.residuals(rows).square().sum(dim=1) / count

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
        target = case.evidence.target
        layer = weight.removesuffix(".weight").removesuffix("weight")
        site = Site(layer, biased=bias is not None and bias in target)
        (features,) = self.entering(rows, [site.layer])
        if site.biased:
            features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
        wanted = site.rows(target)
        found: Tensor = torch.linalg.lstsq(features.T.detach(), wanted.T, driver="gelsd").solution
        return found * case.images


def read_layers(case: Case) -> list[Entered]:
    """Return the spans of the layers whose gradient leaves room for other rows than the batch's.

    Of several steps, whose features drift a little, it is the span of the largest directions, as
    many as there are rows.
    """
    target, errors = case.evidence.target, Errors.of(case, ())
    case.target_model.model.float()
    seen = entering(
        case.target_model, case.observation, torch.zeros(1, *case.target_model.image_shape)
    )
    found = []
    for name, value in seen.items():
        site = Site(name, biased=Site(name).bias in target)
        if site.weight not in target or value.shape[0] != 1 or value.dim() != 2:
            continue
        gradient = site.rows(target)
        # With fewer outputs than examples the gradient holds a part of the features' span alone.
        if case.images > len(gradient):
            continue
        if errors.noise:
            span = span_under_noise(gradient, errors.noise)
            determined = span.rank == case.images
        else:
            most = None if case.law.one_step else case.images
            span = span_above(gradient, _ROUNDING, most)
            determined = span.rank <= case.images
        if determined and not span.full:
            found.append(
                Entered(
                    site=site,
                    space=span,
                    errors=Errors.of(case, site.names),
                    certificate=span.certificate,
                    component="row span",
                )
            )
    return found
