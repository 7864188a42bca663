"""The trained head of a model whose backbone is frozen: what enters it, and its own gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from bract.attacks.problem.case import Case
from bract.attacks.problem.site import Site
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.problem.visibility import smooth_images
from bract.errors import BractError
from bract.models import tap
from bract.updates.update import Tensors

_NAMED = 3


@dataclass(frozen=True)
class Head:
    """Linear layers that are trained, behind a backbone that is not.

    Attributes
    ----------
    layer
        Name of the first trained linear layer, which features enter.
    trained
        Names of the trained parameters.
    of_tokens
        Whether the layer works on every token, or patch, of an image, and what it makes of them is
        averaged: the same as of their mean, since it is linear.
    """

    target_model: TargetModel
    layer: str
    trained: tuple[str, ...]
    of_tokens: bool = False

    @property
    def site(self) -> Site:
        """The layer that features enter."""
        return Site(self.layer, biased=True)

    def features(self, state: Tensors, inputs: Tensor) -> Tensor:
        """Return what enters the head, or its mean over tokens, ``(B, n)``, differentiably.

        Parameters
        ----------
        state
            Parameters and buffers of one trial.
        inputs
            Normalised images ``(B, C, H, W)``.
        """
        model = self.target_model.model
        run = partial(functional_call, model, state, (inputs,))
        found = tap.inputs(run, model, [self.layer])[self.layer]
        return found.mean(dim=1) if self.of_tokens else found

    def gradient(
        self, state: Tensors, inputs: Tensor, features: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the layer's weight and bias for features ``(B, n)``.

        Parameters
        ----------
        inputs
            Images of any content, normalised: the backbone runs on them and their features are
            replaced.
        labels
            Soft labels ``(B, classes)``.
        """
        names = self.site.names

        def loss(at: tuple[Tensor, ...]) -> Tensor:
            model, own = self.target_model.model, dict(zip(names, at, strict=True))
            with tap.entering(model, [self.layer], lambda _, seen: self._entering(features, seen)):
                logits = functional_call(model, state | own, (inputs,))
            return self.target_model.loss.each(logits, labels).mean()

        found: tuple[Tensor, Tensor] = grad(loss)(tuple(state[name] for name in names))
        return found

    def _entering(self, features: Tensor, seen: Tensor) -> Tensor:
        """Return features ``(B, n)`` as they enter the layer, each token the same."""
        return features[:, None].expand(-1, seen.shape[1], -1) if self.of_tokens else features


def trained_head(case: Case) -> Head:
    """Find the head of an update, and check that nothing before it was trained.

    A parameter counts as trained where its update is not zero in every coordinate. Frozen weights
    are buffers of the model (`bract.models.frozen.with_frozen_backbone`), or parameters whose
    update is zero.

    Raises
    ------
    BractError
        If the update holds parameters of the backbone, no layer is frozen, or the first trained
        layer is not linear, has no bias, or is not called once with one row an image.
    """
    model, target, key = case.target_model, case.evidence.target, case.observation.key
    trained = tuple(n for n in model.parameter_names if n in target and bool(target[n].any()))
    layers = {
        name: module
        for name, module in model.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    order, shapes = _calls(case)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in trained)
    backbone = [name for name in trained if name.rpartition(".")[0] not in layers]
    if backbone:
        raise BractError(
            f"{key}: the update holds {_some(backbone)} of the backbone; maui reads updates of a "
            "head of linear layers behind frozen ones. Use another attack, such as ig or best",
            code="attack-unsuited",
        )
    first = next((name for name in order if name in owners), None)
    if first is None:
        raise BractError(
            f"{key}: no linear layer was trained; maui needs a trained head", code="attack-unsuited"
        )
    before = order[: order.index(first)]
    if not before:
        raise BractError(
            f"{key}: nothing before {first or 'the first layer'} is frozen, since it is the first "
            "layer with weights; its input is the image, which analytic and spear read",
            code="attack-unsuited",
        )
    if layers[first].bias is None:
        raise BractError(
            f"{key}: {first} has no bias, whose gradient fixes the scale of each image's features",
            code="attack-unsuited",
        )
    of_tokens = shapes[first] == [3] and _is_averaged(case, first)
    if shapes[first] != [2] and not of_tokens:
        raise BractError(
            f"{key}: {first} is called {len(shapes[first])} times on tensors of "
            f"{shapes[first][:_NAMED]} dimensions; expected once, on one row an image, or on "
            "tokens whose mean is taken",
            code="attack-unsuited",
        )
    return Head(model, first, trained, of_tokens)


def _is_averaged(case: Case, layer: str) -> bool:
    """Return whether the model returns the same for the mean of what enters a layer as tokens."""
    model, state = case.target_model.model, case.target_model.captured(case.observation)
    run = partial(functional_call, model, state, (probe_inputs(case, 2, 0),))

    def mean(_: str, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=1, keepdim=True).expand_as(tokens)

    with torch.no_grad():
        wanted = run()
        with tap.entering(model, [layer], mean):
            found = run()
    return torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def probe_inputs(case: Case, count: int, seed: int) -> Tensor:
    """Return normalised smooth random images ``(count, C, H, W)``."""
    shape = case.target_model.image_shape
    generator = torch.Generator().manual_seed(seed)
    return case.target_model.normalise(smooth_images(count, shape, generator))


def _calls(case: Case) -> tuple[list[str], dict[str, list[int]]]:
    """Return modules with weights in the order of first calls, and dimensions of each input."""
    shapes: dict[str, list[int]] = {}

    def note(name: str, value: Tensor) -> None:
        shapes.setdefault(name, []).append(value.dim())

    model, state = case.target_model.model, case.target_model.captured(case.observation)
    weighted = [
        name
        for name, module in model.named_modules()
        if any(
            value.is_floating_point()
            for value in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        )
    ]
    with tap.entering(model, weighted, note), torch.no_grad():
        functional_call(model, state, (probe_inputs(case, 2, 0),))
    return list(shapes), shapes


def _some(names: list[str]) -> str:
    more = "" if len(names) <= _NAMED else f" and {len(names) - _NAMED} more"
    return ", ".join(names[:_NAMED]) + more
