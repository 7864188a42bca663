"""Training with per-example privacy, by Opacus: Poisson samples, clipped gradients, secret noise.

Per-example gradients, ghost clipping, the accountants and the choice of noise are Opacus'. The
examples that a step draws and the noise come from this client's secret stream in place of torch's
generator, whose seeds a server can try.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bract.client.accounting import Mechanism
from bract.client.augmentation import augment
from bract.client.training import LocalResult, planned_steps
from bract.config.config import FederationConfig, TrainingConfig
from bract.config.sections import PrivateConfig
from bract.data.views import DataSpec
from bract.errors import BractError, one_line
from bract.models.dropout import seed_dropout
from bract.models.keylock import trainable_parameters
from bract.models.losses import label_rows
from bract.models.losses import loss_of as objective_of
from bract.protocol.update import buffers_of, difference, parameters_of
from bract.randomness import SecretStream
from bract.seeds import derive_seed

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer

HOW_TO_INSTALL = "pip install 'bract[opacus]' at every client"


def private_mechanism(config: FederationConfig, count: int) -> Mechanism | None:
    """Return the noise of one round's update of ``count`` examples; None without per-example noise.

    Raises
    ------
    BractError
        If Opacus is not installed, or no noise gives the configured epsilon.
    """
    training = config.training
    private = training.private
    if private is None:
        return None
    if importlib.util.find_spec("opacus") is None:
        raise BractError(f"training.private needs Opacus: {HOW_TO_INSTALL}", code="package-missing")
    rate = min(1.0, training.batch_size / count)
    steps = planned_steps(training, count)
    multiplier = private.noise_multiplier
    if multiplier is None:
        multiplier = _multiplier(private, rate, steps * config.rounds)
    return Mechanism("sampled", multiplier, rate, steps, private.accountant)


@lru_cache(maxsize=8)
def _multiplier(private: PrivateConfig, rate: float, steps: int) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the search tries noise at the ends of its range
            return float(
                get_noise_multiplier(
                    target_epsilon=private.epsilon,
                    target_delta=private.delta,
                    sample_rate=rate,
                    steps=steps,
                    accountant=private.accountant,
                )
            )
    except (ValueError, RuntimeError) as error:
        raise BractError(
            f"training.private: no noise gives epsilon {private.epsilon:g} at delta "
            f"{private.delta:g} over {steps} steps ({one_line(error, 200)}); raise epsilon",
            code="privacy-budget",
        ) from error


def check_layers(model: nn.Module) -> None:
    """Refuse a model with layers that mix examples, naming each and what takes its place.

    Raises
    ------
    BractError
        With Opacus' replacement of the layer, where it has one.
    """
    from opacus.validators import ModuleValidator

    found = []
    for name, layer in model.named_modules():
        validate = ModuleValidator.VALIDATORS.get(type(layer))
        if validate is None or not validate(layer):
            continue
        fix = ModuleValidator.FIXERS.get(type(layer))
        try:
            instead = f"replace it by {fix(layer)}" if fix else "leave it out"
        except Exception as error:  # noqa: BLE001 - Opacus' advice is more than it can always give
            instead = f"replace it ({one_line(error, 100)})"
        found.append(f"{name} ({type(layer).__name__}): {instead}")
    if found:
        more = f"; and {len(found) - 3} more layers" if len(found) > 3 else ""
        raise BractError(
            "training.private: the gradient of one example must not depend on others, but the "
            f"model has {'; '.join(found[:3])}{more}. opacus.validators.ModuleValidator.fix(model) "
            "replaces all of them",
            code="model-unsuited",
        )
    loose = [
        name
        for name, layer in model.named_modules()
        for buffer_name, buffer in layer.named_buffers(recurse=False)
        if buffer is not None
        and buffer.is_floating_point()
        and buffer_name not in layer._non_persistent_buffers_set  # frozen, and never sent
    ]
    if loose:
        raise BractError(
            f"training.private: {loose[0] or 'the model'} keeps statistics of the data "
            "(floating point buffers), which would leave without noise; take a model without",
            code="model-unsuited",
        )


def train_privately(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    config: TrainingConfig,
    spec: DataSpec,
    seed: int,
    device: torch.device,
    mechanism: Mechanism,
    stream: SecretStream,
    proximal_mu: float = 0.0,
) -> LocalResult:
    """Train ``model`` in place with per-example noise and return the update.

    As `bract.client.training.train_locally`, but for what `training.private` changes: each of the
    same number of steps draws every example with probability ``mechanism.rate``, so batches differ
    in size and may be empty; gradients are clipped one by one, summed, noised and divided by
    ``batch_size``. With ``fedsgd`` the update is one such gradient.

    Parameters
    ----------
    mechanism
        Noise, rate and steps, as they are accounted for.
    stream
        Draws the samples and the noise.
    """
    private = config.private
    assert private is not None
    check_layers(model)
    draws = torch.Generator().manual_seed(derive_seed(seed, "augmentation"))
    seed_dropout(model, torch.Generator().manual_seed(derive_seed(seed, "dropout")))
    model.to(device).train()
    before = parameters_of(model)
    used: dict[int, Tensor | None] = {}
    losses: list[float] = []
    objective, correct, seen = objective_of(spec.loss), 0.0, 0
    example = spec.normalise(torch.zeros_like(images[:1]).to(device))
    step = _Step(model, config, mechanism, stream, len(images), proximal_mu, example)
    try:
        for batch in _samples(len(images), mechanism, stream):
            if not batch:
                step.empty()
                continue
            inputs = images[batch]
            if config.augmentation:
                inputs = augment(inputs, config.augmentation, draws)
            for position, index in enumerate(batch):
                used.setdefault(index, inputs[position] if config.augmentation else None)
            inputs, target = spec.normalise(inputs.to(device)), labels[batch].to(device)
            while len(inputs):
                outputs = step.module(inputs)
                each = objective.each(outputs, label_rows(target, outputs.shape[-1], objective))
                finite = step.take(each)
                if finite is None:
                    losses.append(float(each.detach().mean()))
                    correct += float(objective.right(outputs, target).sum())
                    seen += len(inputs)
                    break
                inputs, target = inputs[finite], target[finite]
            else:
                step.empty()
        update = step.gradient
        if config.algorithm != "fedsgd":
            update = difference(before, parameters_of(model))
    finally:
        step.close()
    return LocalResult(
        update=update,
        buffers=buffers_of(model),
        loss=sum(losses) / len(losses) if losses else float("nan"),
        accuracy=correct / seen if seen else float("nan"),
        steps=mechanism.steps,
        used=list(used),
        augmented=torch.stack([i for i in used.values() if i is not None])
        if config.augmentation and used
        else None,
        # How many were drawn is the sample's; how many there are is public.
        examples=len(images),
    )


class _Step:
    """One noisy step after another, of Opacus' optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        mechanism: Mechanism,
        stream: SecretStream,
        count: int,
        proximal_mu: float,
        example: Tensor,
    ) -> None:
        private = config.private
        assert private is not None
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._received = {n: p.detach().clone() for n, p in self._named.items()}
        self._mu = proximal_mu
        self._applies = config.algorithm != "fedsgd"
        self.ghost = uses_ghost_clipping(model, private, example)
        self.module, self._optimizer = _wrapped(
            model, config, mechanism, stream, count, ghost=self.ghost
        )
        self.gradient: dict[str, Tensor] = {}

    def take(self, losses: Tensor) -> Tensor | None:
        """Step along the losses ``(B,)`` of a sample.

        Returns
        -------
        Tensor or None
            Where some example's gradient is not finite, which of them are; no step was made then.
            A server can choose parameters at which one example overflows: no noise hides that, and
            an example without a finite gradient adds nothing.
        """
        self._optimizer.zero_grad()
        with warnings.catch_warnings():
            # The images need no gradient, of which torch warns at every layer that they enter.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            self._backward(losses)
        finite = self._finite()
        if not bool(finite.all()):
            self._optimizer.zero_grad()
            return finite
        self._step()
        return None

    def _finite(self) -> Tensor:
        """Return of which examples ``(B,)`` the gradient is finite."""
        if self.ghost:
            norms: Tensor = self.module.per_sample_gradient_norms
            return norms.isfinite()
        samples = [s for s in self._optimizer.grad_samples if len(s)]
        return torch.stack([s.flatten(1).isfinite().all(1) for s in samples]).all(0)

    def _backward(self, losses: Tensor) -> None:
        if not self.ghost:
            losses.sum().backward()
            return
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        DPTensorFastGradientClipping(self.module, self._optimizer, losses, "sum").backward()

    def empty(self) -> None:
        """Step along the noise alone: the sample was empty."""
        self._optimizer.zero_grad()
        for p in self._named.values():
            if self.ghost:
                p.grad = torch.zeros_like(p)
            else:
                p.grad_sample = torch.zeros((0, *p.shape), device=p.device, dtype=p.dtype)  # type: ignore[attr-defined]
        self._step()

    def close(self) -> None:
        """Take Opacus' hooks off the model."""
        self.module.remove_hooks()
        for p in self._named.values():
            for name in ("grad_sample", "summed_grad", "_norm_sample", "_forward_counter"):
                if hasattr(p, name):
                    delattr(p, name)
            p.grad = None

    def _step(self) -> None:
        self._optimizer.pre_step()
        if self._mu > 0.0 and self._applies:
            # The proximal term depends on no example.
            for name, p in self._named.items():
                assert p.grad is not None
                p.grad += self._mu * (p.detach() - self._received[name])
        if self._applies:
            self._optimizer.original_optimizer.step()
            return
        self.gradient = {
            n: p.grad.detach().cpu().clone() for n, p in self._named.items() if p.grad is not None
        }


def uses_ghost_clipping(model: nn.Module, private: PrivateConfig, example: Tensor) -> bool:
    """Return whether gradients are clipped without computing them one by one.

    Norms are those of Opacus' rules for layers. They are exact for what enters a linear layer as
    one vector an example. Of sequences they are a difference of large numbers, which rounding can
    leave too small, and a weight that is used outside of its layer, or twice, is not counted.

    Parameters
    ----------
    example
        Some model input ``(1, ...)``; what enters the layers is looked at, not its values.

    Raises
    ------
    BractError
        If it is asked for, and a layer has no such rule, or one that is not exact.
    """
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    known = GradSampleModuleFastGradientClipping.NORM_SAMPLERS
    others = [
        f"{name or 'the model'} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if type(layer) not in known
        and any(p.requires_grad for p in layer.parameters(recurse=False))
    ]
    if private.clipping == "each":
        return False
    others += _inexact(model, example)
    if private.clipping == "ghost" and others:
        raise BractError(
            f"training.private.clipping is ghost, but Opacus has no exact rule for {others[0]} and "
            f"{len(others) - 1} more layers; set clipping: auto",
            code="model-unsuited",
        )
    return not others


def _inexact(model: nn.Module, example: Tensor) -> list[str]:
    """Name what Opacus' norms of layers do not cover: foreign code, sequences, repeated layers."""
    found = [
        f"{name or 'the model'} ({type(layer).__name__}, whose code may use weights of others)"
        for name, layer in model.named_modules()
        if type(layer).__module__.partition(".")[0] not in ("torch", "bract")
    ]
    calls: dict[str, list[int]] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: calls.setdefault(name, []).append(inputs[0].dim())
        )
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Embedding)
    ]
    try:
        with torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    found += [
        f"{name} (called {len(dims)} times, with inputs of {max(dims)} dimensions)"
        for name, dims in calls.items()
        if len(dims) > 1 or (max(dims) > 2 and isinstance(model.get_submodule(name), nn.Linear))
    ]
    return found


def _wrapped(
    model: nn.Module,
    config: TrainingConfig,
    mechanism: Mechanism,
    stream: SecretStream,
    count: int,
    *,
    ghost: bool,
) -> tuple[Any, DPOptimizer]:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

    private = config.private
    assert private is not None

    def add_noise(optimizer: DPOptimizer) -> None:
        deviation = optimizer.noise_multiplier * optimizer.max_grad_norm
        for p in optimizer.params:
            noise = stream.normal(p.shape).to(p)
            p.grad = (p.summed_grad + deviation * noise).view_as(p)

    kind = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    secret = type("SecretNoise", (kind,), {"add_noise": add_noise})
    optimizer = secret(
        _optimizer(model, config),
        noise_multiplier=mechanism.multiplier,
        max_grad_norm=private.max_grad_norm,
        expected_batch_size=min(config.batch_size, count),
        loss_reduction="mean",
    )
    if ghost:
        wrapped: Any = GradSampleModuleFastGradientClipping(
            model, loss_reduction="sum", max_grad_norm=private.max_grad_norm, strict=False
        )
    else:
        wrapped = GradSampleModule(model, loss_reduction="sum", strict=False)
    return wrapped, optimizer


def _samples(count: int, mechanism: Mechanism, stream: SecretStream) -> Iterator[list[int]]:
    """Yield the examples of each step: every one with the same probability, by itself."""
    for _ in range(mechanism.steps):
        drawn = stream.uniform((count,), dtype=torch.float64) < mechanism.rate
        yield torch.nonzero(drawn).flatten().tolist()


def _optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the optimizer of local training."""
    if config.optimizer == "adam":
        return torch.optim.Adam(
            trainable_parameters(model), lr=config.lr, weight_decay=config.weight_decay
        )
    return torch.optim.SGD(
        trainable_parameters(model),
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
