"""The attacked model as a pure function of its parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from bract.attacks.problem.batched_network import BatchedNetwork
from bract.attacks.problem.constants import constant
from bract.attacks.problem.model_traits import ModelTraits, traits_of
from bract.attacks.problem.spectral import hold_still, spectral_norms, take_converged
from bract.captures.observation import ClientDeclaration, Observation
from bract.defenses.entries import prepare_model
from bract.errors import BractError
from bract.models import create_model, tap
from bract.models.losses import Loss, loss_of
from bract.models.own_loss import OwnLoss, auxiliary_loss, own_losses
from bract.models.recurrent import unroll
from bract.models.registry import seen_by_model
from bract.models.third_party_texts import freeze
from bract.updates.update import Tensors

_MOST_EXCESS = 2**26
"""Parameters by which a declared model may exceed a captured one and is still built to compare."""

_MOST_FROZEN = 2**29
"""Numbers besides its parameters, such as frozen weights, with which a declared model is built."""

NORMS = (nn.modules.batchnorm._BatchNorm,)
"""Layers that normalise by the batch, in training mode."""


def declared_loss(declaration: ClientDeclaration) -> Loss:
    """Return the loss that a protocol declares, with its terms.

    Raises
    ------
    BractError
        If the loss is unknown, has no such terms, or its weights are not one a class.
    """
    p = declaration
    if p.class_weights is not None and p.classes not in (None, len(p.class_weights)):
        raise BractError(
            f"class_weights declares {len(p.class_weights)} weights for {p.classes} classes; give "
            "one a class",
            code="declaration-wrong",
        )
    return loss_of(
        p.loss, smoothing=p.label_smoothing, class_weights=p.class_weights, soft=p.soft_targets
    )


class TargetModel:
    """The global model that an observation was computed with.

    Everything an attack computes carries a leading *trial* dimension: trial l is one restart of one
    observation, with its own parameters, images and labels. One trial runs plainly, several run as
    one batch through `torch.func.vmap`.

    Parameters
    ----------
    model
        Architecture; its own parameter values are never used.
    protocol
        Declares normalisation, loss and the mode of batch normalisation.
    """

    def __init__(self, model: nn.Module, declaration: ClientDeclaration) -> None:
        self.model = unroll(copy.deepcopy(model))
        self.declaration = declaration
        # What a transformer does otherwise in training is dropout, whose masks are unknown.
        self.model.train(declaration.norm_mode == "train" and declaration.text is None)
        hold_still(self.model)
        for module in self.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd | OwnLoss):
                module.eval()
            if isinstance(module, NORMS) and module.training:
                # The batch's own statistics need no running ones, and updating those in place
                # cannot be batched over trials.
                module.running_mean = module.running_var = module.num_batches_tracked = None
                module.track_running_stats = False
        self.model.register_forward_hook(_require_logits)
        self.parameter_names = tuple(name for name, _ in self.model.named_parameters())
        held, buffers = self.model.state_dict(), [name for name, _ in self.model.named_buffers()]
        self.buffer_names = tuple(name for name in buffers if name in held)
        # Tracing leaves out the hooks by which a model of texts reads token ids, and reads every
        # weight from the captured state, where frozen ones are not.
        traced = declaration.text is None and len(self.buffer_names) == len(buffers)
        self.network = BatchedNetwork.of(self.model) if traced else None

    @cached_property
    def loss(self) -> Loss:
        """The declared loss."""
        return declared_loss(self.declaration)

    @cached_property
    def traits(self) -> ModelTraits:
        """Traits of the model, for settings that depend on it."""
        return traits_of(self.model, self.image_shape)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The declared shape ``(C, H, W)`` of one input."""
        if self.declaration.image_shape is None:
            raise AssertionError("target_model_of refuses declarations without an image shape")
        return self.declaration.image_shape

    @property
    def classes(self) -> int:
        """The declared number of classes."""
        if self.declaration.classes is None:
            raise AssertionError("target_model_of refuses declarations without classes")
        return self.declaration.classes

    def __call__(self, parameters: Tensors, buffers: Tensors, inputs: Tensor) -> Tensor:
        """Return logits ``(L, B, classes)`` for normalised inputs ``(L, B, C, H, W)``.

        ``parameters`` and ``buffers`` hold ``(L, ...)`` for the names of the model; buffers may
        hold ``gamma`` and ``beta`` of a locked layer, and the ``noise`` of a bottleneck, as well.
        Without them gamma is 1, beta 0, and a bottleneck decodes the mean.
        """
        return self.outputs(parameters, buffers, inputs)[0]

    def outputs(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits and what the model itself adds to the loss, ``(L,)``."""

        def one(state: Tensors, images: Tensor) -> tuple[Tensor, Tensor]:
            logits: Tensor = functional_call(self.model, state, (images,))
            added = auxiliary_loss(self.model).to(logits)
            for layer in own_losses(self.model):
                layer.term = None
            return logits, added

        if self.network is not None:
            # Tracing leaves out the hooks by which a model sees its own input.
            seen = seen_by_model(inputs, self.declaration.table, self.declaration.signal)
            logits = self.network(parameters | buffers, seen)
            return logits, logits.new_zeros(len(inputs))
        self.follow(parameters)
        # PyTorch's fused attention has no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            if len(inputs) == 1 or self.declaration.text is not None:
                # Models of transformers make masks by control flow on values, which vmap refuses.
                each = [
                    one({n: v[trial] for n, v in (parameters | buffers).items()}, inputs[trial])
                    for trial in range(len(inputs))
                ]
                return torch.stack([made for made, _ in each]), torch.stack([a for _, a in each])
            batched: tuple[Tensor, Tensor] = vmap(one)(parameters | buffers, inputs)
            return batched

    def captured(self, observation: Observation, dtype: torch.dtype = torch.float32) -> Tensors:
        """Return captured parameters and buffers on the CPU, for calls of ``model`` itself.

        The model is moved there, and what it holds besides its state to this precision.
        """
        self.model.cpu()
        held = {n: observation.parameters[n] for n in self.parameter_names}
        held |= {n: observation.buffers[n] for n in self.buffer_names}
        found = {
            n: v.cpu().to(dtype if v.is_floating_point() else v.dtype) for n, v in held.items()
        }
        self.follow(found)
        return found

    def follow(self, parameters: Tensors) -> None:
        """Move what the model holds besides its state, such as frozen weights, to a precision.

        Parameters
        ----------
        parameters
            Those that the model is called with next.
        """
        wanted = next(iter(parameters.values())).dtype
        held = next(self.model.parameters(), None)
        if held is not None and held.dtype != wanted:
            self.model.to(wanted)

    def batch_statistics(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and unbiased variance of what every batch norm sees, ``(L, channels)`` each.

        Running statistics average the same two.
        """
        if self.network is not None:
            seen = seen_by_model(inputs, self.declaration.table, self.declaration.signal)
            entering = self.network.normalised(parameters | buffers, seen)
            return {
                name: moments(value.movedim(2, 1).flatten(2)) for name, value in entering.items()
            }

        self.follow(parameters)

        def one(state: Tensors, images: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
            seen: dict[str, tuple[Tensor, Tensor]] = {}

            def note(name: str, value: Tensor) -> None:
                seen[name] = moments(value.transpose(0, 1).flatten(1))

            with tap.entering(self.model, tap.named(self.model, *NORMS), note):
                functional_call(self.model, state, (images,))
            return seen

        batched: dict[str, tuple[Tensor, Tensor]] = vmap(one)(parameters | buffers, inputs)
        return batched

    def normalise(self, images: Tensor) -> Tensor:
        """Map pixels ``(..., C, H, W)`` in [0, 1] to what the model sees."""
        mean, std = self._moments(images)
        return (images - mean) / std

    def denormalise(self, inputs: Tensor) -> Tensor:
        """Map model inputs ``(..., C, H, W)`` back to pixels, without clipping."""
        mean, std = self._moments(inputs)
        return inputs * std + mean

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        channels = like.shape[-3]
        mean = self.declaration.mean or (0.0,) * channels
        std = self.declaration.std or (1.0,) * channels
        first, second = (constant(tuple(v), like.dtype, like.device) for v in (mean, std))
        return first.view(-1, 1, 1), second.view(-1, 1, 1)

    def check(self, observation: Observation) -> None:
        """Refuse an observation whose tensors are not this model's."""
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        if missing := sorted(set(shapes) - set(observation.parameters)):
            raise BractError(
                f"{observation.key}: the capture lacks {', '.join(missing[:5])} of model "
                f"{self.declaration.model!r}; declare the model that the clients trained",
                code="model-mismatch",
            )
        if strange := sorted(set(observation.parameters) - set(shapes)):
            raise BractError(
                f"{observation.key}: model {self.declaration.model!r} has no "
                f"{', '.join(strange[:5])}; declare the model that the clients trained",
                code="model-mismatch",
            )
        for name, shape in shapes.items():
            found = tuple(observation.parameters[name].shape)
            if found != shape:
                raise BractError(
                    f"{observation.key}: {name} was captured as {found}, but model "
                    f"{self.declaration.model!r} with {self.declaration.classes} classes on "
                    f"{self.declaration.image_shape} images has {shape}",
                    code="model-mismatch",
                )
        if missing := sorted(set(self.buffer_names) - set(observation.buffers)):
            raise BractError(
                f"{observation.key}: the capture lacks the buffers {', '.join(missing[:5])}, which "
                "norm_mode 'eval' needs",
                code="capture-lacks",
            )


def _require_logits(model: nn.Module, _: tuple[object, ...], output: object) -> None:
    """Refuse a forward that returns a tuple, a dictionary or another structure."""
    if not isinstance(output, Tensor):
        raise BractError(
            f"model {type(model).__name__} returns a {type(output).__name__}; expected its logits "
            "(images, classes) as one tensor: declare a module whose forward returns them alone",
            code="model-faulty",
        )


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance over the last dimension."""
    correction = min(1, features.shape[-1] - 1)
    return features.mean(dim=-1), features.var(dim=-1, correction=correction)


def target_model_of(observation: Observation) -> TargetModel:
    """Build the model that an observation's protocol declares, and check that
    both fit.
    """
    observation.check()
    p = observation.declaration
    for name in ("model", "image_shape", "classes"):
        if getattr(p, name) is None:
            raise BractError(
                f"{observation.key}: the protocol declares no {name}; "
                f"give it as declaration={{{name!r}: ...}} where the capture was made",
                code="declaration-lacks",
            )
    if p.model is None or p.image_shape is None or p.classes is None:
        raise AssertionError("checked above")
    try:
        loss = declared_loss(p)
    except BractError as error:
        raise BractError(f"{observation.key}: {error}", code=error.code) from None
    if loss.values and not loss.several and p.classes != 1:
        raise BractError(
            f"{observation.key}: loss {p.loss!r} is declared, which is of a single output, and "
            f"{p.classes} classes; declare the loss that the clients trained with",
            code="declaration-wrong",
        )
    if p.table is not None and p.table.width != p.image_shape[0]:
        raise BractError(
            f"{observation.key}: the schema has {p.table.width} features, the declared row "
            f"{p.image_shape[0]}; declare the schema that the clients encode with",
            code="declaration-wrong",
        )
    if p.signal is not None and p.signal.shape != p.image_shape:
        raise BractError(
            f"{observation.key}: the schema is of {p.signal.channels} channels of "
            f"{p.signal.length} values, the declared input is {list(p.image_shape)}; declare what "
            "the clients train on",
            code="declaration-wrong",
        )
    channels, height, width = p.image_shape
    if p.signal is None and height != width and not p.imports:
        raise BractError(
            f"{observation.key}: images of {height}x{width}, and model {p.model!r} of the registry "
            "takes square ones; name the app's own as package.module:callable",
            code="model-unsuited",
        )

    def build() -> nn.Module:
        assert p.model is not None and p.classes is not None
        model = create_model(
            p.model,
            classes=p.classes,
            channels=channels,
            image_size=height,
            activation=p.activation,
            table=p.table,
            text=p.text,
            signal=p.signal,
            loss=p.loss,
        )
        return kept_at_client(prepare_model(model, p.defenses), observation)

    if not p.imports:
        # An untrusted declaration may ask for a model that fills the memory.
        with torch.device("meta"):
            outline = build()
        _check_outline(observation, outline)
    model = build()
    take_converged(model, observation.parameters, observation.buffers)
    target_model = TargetModel(model, p)
    target_model.check(observation)
    check_made_alike(target_model.model, build, observation)
    return target_model


_ANEW: OrderedDict[tuple[object, ...], tuple[str, ...]] = OrderedDict()
"""Parts that a declared model draws anew at each call, by model; those last looked at."""

_MOST_ANEW = 256


def check_made_alike(
    model: nn.Module, again: Callable[[], nn.Module], observation: Observation
) -> None:
    """Refuse a model that makes at random what neither was sent nor returned.

    The clients' values of it are unknown then: a frozen backbone from a file of theirs, say. Every
    attack would simulate another client, and find nothing.

    Parameters
    ----------
    again
        Makes the model a second time; called only where the captures lack a part of it, once for
        each declared model and what they lack.
    """
    p = observation.declaration
    known = observation.parameters.keys() | observation.buffers.keys() | set(p.absent)
    known |= {name for norm in spectral_norms(model) for name in norm.vectors}
    held = {n: v for n, v in _tensors(model).items() if n not in known and v.numel()}
    if not held:
        return
    key = p.model, p.classes, p.image_shape, *sorted(held)
    found = _ANEW.get(key) if p.model else None
    if found is None:
        other = _tensors(again())
        found = tuple(n for n, v in held.items() if n in other and not _equal(v, other[n]))[:3]
        _ANEW[key] = found
        while len(_ANEW) > _MOST_ANEW:
            _ANEW.popitem(last=False)
    if found:
        raise BractError(
            f"{observation.key}: the model makes {', '.join(found)} anew each time, and neither "
            "side sent them: what the clients have there is unknown, so nothing that is simulated "
            "is theirs; name a callable that loads the clients' values, or draws them from their "
            "seed",
            code="model-unsuited",
        )


def _tensors(model: nn.Module) -> Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def kept_at_client(model: nn.Module, observation: Observation) -> nn.Module:
    """Take what clients keep to themselves out of a model's parameters, in place; return the model.

    That is what is declared absent, and parameters that need no gradient and were not sent, as of
    a frozen backbone. Where a value of it was sent, it is a buffer; else it stays as it was made.
    """
    absent, sent = set(observation.declaration.absent), observation.parameters.keys()
    gone = {
        name
        for name, value in model.named_parameters()
        if name in absent or (not value.requires_grad and name not in sent)
    }
    for name in gone:
        freeze(model, name, persistent=name in observation.buffers)
    for path, module in model.named_modules():
        own = {n: f"{path}.{n}" if path else n for n, _ in module.named_buffers(recurse=False)}
        with_it = any(name in gone for name in own.values())
        for short, name in own.items():
            if name not in observation.buffers and (with_it or name in absent):
                module._non_persistent_buffers_set.add(short)
    return model


def _check_outline(observation: Observation, outline: nn.Module) -> None:
    """Refuse a declared model that is far larger than what was captured, before it is built."""
    declared = sum(value.numel() for value in outline.parameters())
    frozen = sum(value.numel() for value in outline.buffers())
    if frozen > _MOST_FROZEN:
        raise BractError(
            f"{observation.key}: model {observation.declaration.model!r} holds {frozen} numbers "
            f"that are never sent, {_MOST_FROZEN} are built at most; declare the model that the "
            "clients trained",
            code="model-mismatch",
        )
    captured = sum(value.numel() for value in observation.parameters.values())
    if declared > captured + _MOST_EXCESS:
        p = observation.declaration
        raise BractError(
            f"{observation.key}: model {p.model!r} with {p.classes} classes on {p.image_shape} "
            f"images has {declared} parameters, captured were {captured}; declare the model that "
            "the clients trained",
            code="model-mismatch",
        )
