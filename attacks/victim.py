"""The attacked model as a pure function of its parameters."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.func import functional_call, vmap

from bract.attacks.lanes import LaneNetwork
from bract.errors import BractError
from bract.models import create_model, prepare_model
from bract.observation import Observation, Protocol
from bract.update import Tensors

_NORMS = (nn.modules.batchnorm._BatchNorm,)


class Victim:
    """The global model that an observation was computed with.

    Everything an attack computes carries a leading *lane* dimension: lane l is one restart of one
    observation, with its own parameters, images and labels. One lane runs plainly, several run as
    one batch through `torch.func.vmap`.

    Parameters
    ----------
    model
        Architecture; its own parameter values are never used.
    protocol
        Declares normalisation, loss and the mode of batch normalisation.
    """

    def __init__(self, model: nn.Module, protocol: Protocol) -> None:
        self.model = copy.deepcopy(model)
        self.protocol = protocol
        self.model.train(protocol.norm_mode == "train")
        for module in self.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
            if isinstance(module, _NORMS) and module.training:
                # The batch's own statistics need no running ones, and updating those in place
                # cannot be batched over lanes.
                module.running_mean = module.running_var = module.num_batches_tracked = None
                module.track_running_stats = False
        self.network = LaneNetwork.of(self.model)
        self.parameter_names = tuple(name for name, _ in self.model.named_parameters())
        self.buffer_names = tuple(name for name, _ in self.model.named_buffers())

    def __call__(self, parameters: Tensors, buffers: Tensors, inputs: Tensor) -> Tensor:
        """Return logits ``(L, B, classes)`` for normalised inputs ``(L, B, C, H, W)``.

        ``parameters`` and ``buffers`` hold ``(L, ...)`` for the names of the model.
        """
        if self.network is not None:
            return self.network(parameters | buffers, inputs)
        if len(inputs) == 1:
            state = {name: value[0] for name, value in (parameters | buffers).items()}
            logits: Tensor = functional_call(self.model, state, (inputs[0],))
            return logits[None]

        def one(state: Tensors, images: Tensor) -> Tensor:
            result: Tensor = functional_call(self.model, state, (images,))
            return result

        batched: Tensor = vmap(one)(parameters | buffers, inputs)
        return batched

    def batch_statistics(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and biased variance, ``(L, channels)`` each, of what every batch norm sees."""

        def one(state: Tensors, images: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
            seen: dict[str, tuple[Tensor, Tensor]] = {}
            handles = []
            for name, module in self.model.named_modules():
                if isinstance(module, _NORMS):

                    def remember(
                        _: nn.Module, arguments: tuple[Tensor, ...], name: str = name
                    ) -> None:
                        features = arguments[0].transpose(0, 1).flatten(1)
                        seen[name] = (features.mean(dim=1), features.var(dim=1, correction=0))

                    handles.append(module.register_forward_pre_hook(remember))
            try:
                functional_call(self.model, state, (images,))
            finally:
                for handle in handles:
                    handle.remove()
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
        mean = self.protocol.mean or (0.0,) * channels
        std = self.protocol.std or (1.0,) * channels
        return like.new_tensor(mean).view(-1, 1, 1), like.new_tensor(std).view(-1, 1, 1)

    def check(self, observation: Observation) -> None:
        """Refuse an observation whose tensors are not this model's.

        Raises
        ------
        BractError
            Naming the tensor, what was found and what was expected.
        """
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        if missing := sorted(set(shapes) - set(observation.parameters)):
            raise BractError(
                f"{observation.key}: the capture lacks {', '.join(missing[:5])} of model "
                f"{self.protocol.model!r}; declare the model that the clients trained"
            )
        if strange := sorted(set(observation.parameters) - set(shapes)):
            raise BractError(
                f"{observation.key}: model {self.protocol.model!r} has no {', '.join(strange[:5])};"
                " declare the model that the clients trained"
            )
        for name, shape in shapes.items():
            found = tuple(observation.parameters[name].shape)
            if found != shape:
                raise BractError(
                    f"{observation.key}: {name} was captured as {found}, but model "
                    f"{self.protocol.model!r} with {self.protocol.classes} classes on "
                    f"{self.protocol.image_shape} images has {shape}"
                )
        if missing := sorted(set(self.buffer_names) - set(observation.buffers)):
            raise BractError(
                f"{observation.key}: the capture lacks the buffers {', '.join(missing[:5])}, which "
                "norm_mode 'eval' needs"
            )


def victim_of(observation: Observation) -> Victim:
    """Build the model that an observation's protocol declares, and check that both fit.

    Raises
    ------
    BractError
        If the observation is unusable (see `Observation.check`), the protocol does not say what
        the model is, its loss is not known, or the tensors do not match.
    """
    observation.check()
    p = observation.protocol
    for name in ("model", "image_shape", "classes"):
        if getattr(p, name) is None:
            raise BractError(
                f"{observation.key}: the protocol declares no {name}; "
                f"give it as protocol={{{name!r}: ...}} where the capture was made"
            )
    if p.model is None or p.image_shape is None or p.classes is None:
        raise AssertionError("checked above")
    if p.loss != "cross_entropy":
        raise BractError(
            f"{observation.key}: loss {p.loss!r} is declared; attacks know 'cross_entropy'"
        )
    channels, height, width = p.image_shape
    if height != width:
        raise BractError(f"{observation.key}: images of {height}x{width}; expected square ones")
    model = create_model(
        p.model,
        classes=p.classes,
        channels=channels,
        image_size=height,
        activation=p.activation,
    )
    victim = Victim(prepare_model(model, p.defenses), p)
    victim.check(observation)
    return victim
