"""Training with per-example privacy: Poisson samples, clipped gradients, secret noise.

Each example passes through the model alone. In a batch, rounding depends on the other examples, and
a server can choose parameters that amplify it without limit. The accountants, the choice of noise
and the list of layers that mix examples are Opacus'. Samples, noise, and the augmentation and
dropout of each example and step come from this client's secret stream in place of torch's
generator, whose seeds a server can try.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn

from bract.client.accounting import Mechanism
from bract.client.augmentation import augment
from bract.client.steps import Steps
from bract.client.training import LocalResult, planned_steps
from bract.config.config import FederationConfig, TrainingConfig
from bract.config.sections import PrivateConfig
from bract.crypto.randomness import SecretStream
from bract.data.views import DataSpec
from bract.defenses.accountants import smallest_noise
from bract.errors import BractError, one_line
from bract.models.dropout import SeededDropout, seed_dropout
from bract.models.keylock import trainable_parameters
from bract.models.losses import Loss, label_rows
from bract.models.losses import loss_of as objective_of
from bract.models.own_loss import auxiliary_loss, own_losses
from bract.updates.update import buffers_of, difference, parameters_of

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
    assert private.epsilon is not None
    why = "none of up to 1e6 times max_grad_norm does"
    found = None
    try:
        if private.accountant == "prv":
            found = smallest_noise(private.epsilon, private.delta, rate, steps)
        else:
            found = _by_opacus(private, rate, steps)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        why = one_line(error, 200)
    if found is None:
        raise BractError(
            f"training.private: no noise gives epsilon {private.epsilon:g} at delta "
            f"{private.delta:g} over {steps} steps ({why}); raise epsilon",
            code="privacy-budget",
        )
    return found


def _by_opacus(private: PrivateConfig, rate: float, steps: int) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the search tries noise at the ends of its range
        return float(
            get_noise_multiplier(
                target_epsilon=private.epsilon,
                target_delta=private.delta,
                sample_rate=rate,
                steps=steps,
                accountant="rdp",
            )
        )


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
    device: torch.device,
    mechanism: Mechanism,
    stream: SecretStream,
    proximal_mu: float = 0.0,
) -> LocalResult:
    """Train ``model`` in place with per-example noise and return the update.

    As `bract.client.training.train_locally`, but for what `training.private` changes: each of the
    same number of steps draws every example with probability ``mechanism.rate``, so batches differ
    in size and may be empty; gradients are clipped one by one, summed, noised and divided by
    ``batch_size``. With ``fedsgd`` the update is one such gradient. Buffers stay as they were.

    Parameters
    ----------
    mechanism
        Noise, rate and steps, as they are accounted for.
    stream
        Draws the samples and the noise, and, by a stream of its own for each example and step, what
        augmentation, dropout and a variational bottleneck draw.
    """
    private = config.private
    assert private is not None
    check_layers(model)
    model.to(device).train()
    before = parameters_of(model)
    gradients = _ExampleGradients(model, objective_of(spec.loss), private.max_grad_norm)
    step = _NoisyStep(model, config, mechanism, stream, len(images), proximal_mu)
    used: dict[int, Tensor | None] = {}
    losses: list[float] = []
    correct, seen = 0.0, 0
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), gradients:
        for number, batch in enumerate(_samples(len(images), mechanism, stream)):
            scores = []
            for index in batch:
                draws = stream.child("example", number, index)
                image = images[index : index + 1]
                if config.augmentation:
                    image = augment(image, config.augmentation, draws)
                used.setdefault(index, image[0] if config.augmentation else None)
                inputs, target = spec.normalise(image.to(device)), labels[index : index + 1]
                score = gradients.add(step.total, inputs, target.to(device), draws)
                if score is not None:
                    scores.append(score)
            if scores:
                losses.append(sum(loss for loss, _ in scores) / len(scores))
                correct += sum(right for _, right in scores)
                seen += len(scores)
            step.apply()
    update = step.gradient
    if config.algorithm != "fedsgd":
        update = difference(before, parameters_of(model))
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


class _ExampleGradients:
    """Clipped gradients of single examples, each independent of every other example.

    As a context manager it gives back the sources of random numbers that it replaced.
    """

    def __init__(self, model: nn.Module, objective: Loss, bound: float) -> None:
        self._model, self._objective, self._bound = model, objective, bound
        self._parameters = _trained(model)
        self._own_losses = [(layer, layer.stream) for layer in own_losses(model)]
        self._drops = any(isinstance(layer, SeededDropout) for layer in model.modules())
        self._places = [
            (layer, name, f"{path}.{name}".removeprefix("."))
            for path, layer in model.named_modules()
            for name, value in layer._buffers.items()
            if value is not None
        ]
        self._buffers = self._versions()

    def __enter__(self) -> None:
        """Do nothing: every example sets its own sources."""

    def __exit__(self, *_: object) -> None:
        """Take the sources of the last example off the model."""
        seed_dropout(self._model, None)
        for layer, stream in self._own_losses:
            layer.stream = stream

    def add(
        self, total: list[Tensor], inputs: Tensor, target: Tensor, draws: SecretStream
    ) -> tuple[float, float] | None:
        """Add the clipped gradient of one example ``(1, ...)`` to ``total``.

        Returns
        -------
        tuple of float and float or None
            Its loss, and how far the prediction is right. None if its gradient is not finite: a
            server can choose parameters at which one example overflows, which no noise hides, so
            such an example adds nothing.
        """
        if self._drops:
            seed_dropout(self._model, draws)
        for layer, _ in self._own_losses:
            layer.stream = draws
        seed = int(draws.words(1)[0]) >> 1  # for what third-party layers draw
        torch.default_generator.manual_seed(seed)
        if inputs.is_cuda:
            torch.cuda.manual_seed(seed)
        outputs = self._model(inputs)
        rows = label_rows(target, outputs.shape[-1], self._objective).to(outputs)
        loss = self._objective.each(outputs, rows).sum()
        whole = loss + auxiliary_loss(self._model) if self._own_losses else loss
        found = torch.autograd.grad(whole, self._parameters, allow_unused=True)
        self._check_buffers()
        # In float64 no square of a float32 overflows, and a sum of many keeps to the bound.
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in found if g is not None]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        if not math.isfinite(norm):
            return None
        factor = min(1.0, self._bound / norm) if norm else 1.0
        for held, gradient in zip(total, found, strict=True):
            if gradient is not None:
                held.add_(gradient, alpha=factor)
        return float(loss.detach()), float(self._objective.right(outputs, target).sum())

    def _check_buffers(self) -> None:
        """Refuse a model whose buffers changed: they would carry one example to the next."""
        found = self._versions()
        if found != self._buffers:
            changed = next(n for n, version in found.items() if version != self._buffers[n])
            raise BractError(
                f"training.private: training changes the model's buffer {changed}, which would "
                "leave without noise and carry one example to the next; take a model without",
                code="model-unsuited",
            )

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Return what changes with a buffer's values, by its name."""
        values = [(where, layer._buffers[name]) for layer, name, where in self._places]
        return {where: (id(v), 0 if v is None else v._version) for where, v in values}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in trainable_parameters(model) if p.requires_grad]


class _NoisyStep:
    """Steps along sums of clipped gradients with noise.

    Attributes
    ----------
    total
        The sum of the next step, float64, one tensor a trained parameter.
    gradient
        The last step's mean gradient by name, of ``fedsgd``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        mechanism: Mechanism,
        stream: SecretStream,
        count: int,
        proximal_mu: float,
    ) -> None:
        assert config.private is not None
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._received = {n: p.detach().clone() for n, p in self._named.items()}
        self._parameters = _trained(model)
        self._deviation = mechanism.multiplier * config.private.max_grad_norm
        self._expected = min(config.batch_size, count)
        self._stream, self._mu = stream, proximal_mu
        self._optimizer = None if config.algorithm == "fedsgd" else Steps(self._parameters, config)
        self.total = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        self.gradient: dict[str, Tensor] = {}

    @torch.no_grad()
    def apply(self) -> None:
        """Step along ``total``, which may be zero, with noise; then set it to zero."""
        for p, total in zip(self._parameters, self.total, strict=True):
            noise = self._stream.normal(p.shape, torch.float64).to(total.device)
            p.grad = ((total + self._deviation * noise) / self._expected).to(p.dtype)
            total.zero_()
        if self._optimizer is None:
            self.gradient = {n: p.grad.cpu() for n, p in self._named.items() if p.grad is not None}
        else:
            for name, p in self._named.items() if self._mu > 0.0 else ():
                # The proximal term depends on no example.
                assert p.grad is not None
                p.grad += self._mu * (p.detach() - self._received[name])
            self._optimizer.step()
        for p in self._parameters:
            p.grad = None


def _samples(count: int, mechanism: Mechanism, stream: SecretStream) -> Iterator[list[int]]:
    """Yield the examples of each step: every one with the same probability, by itself."""
    for _ in range(mechanism.steps):
        drawn = stream.uniform((count,), dtype=torch.float64) < mechanism.rate
        yield torch.nonzero(drawn).flatten().tolist()
