"""A network from updates to latents of a trained generator, and how it is trained."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks import Objective, Problem, Run
from bract.attacks.problem.client_model import local_training
from bract.attacks.problem.likelihoods import GaussianLikelihood, LaplaceLikelihood
from bract.attacks.problem.over_rounds import SumOverRounds, round_of
from bract.attacks.solve.checkpoints import digest_of, made_by, write_atomically
from bract.errors import BractError
from bract.process.clock import now
from bract.seeds import derive_seed
from bract.updates.update import Tensors
from bract_priors.flow import Flow
from bract_priors.latent import made_images
from bract_priors.sketch import Sketch
from bract_priors.trained_prior import Decoder, TrainedPrior

_PROBES = 512
_FARTHEST = 10.0
_RIDGE = 1e-3
_AT_ONCE = 2**26
_CHECKPOINT_SECONDS = 30.0
_KEPT = 8

_trained: OrderedDict[str, Inverter] = OrderedDict()
"""The last inverters of this process, so that uploads of several batches share one."""


@dataclass(frozen=True, kw_only=True)
class InverterSettings:
    """Size of an inverter and how it is trained.

    Attributes
    ----------
    features
        Most buckets of the sketch.
    width
        Of both hidden layers.
    pairs
        Pairs of a step, each drawn anew.
    lr
        Of Adam, falling along half a cosine.
    """

    features: int = 2048
    width: int = 512
    pairs: int = 64
    lr: float = 1e-3


class Inverter(nn.Module):
    """A perceptron of two hidden layers from a sketched update and its labels to latents.

    Parameters
    ----------
    images, classes, latent
        B, the length of a label row and that of a latent.
    """

    def __init__(
        self, sketch: Sketch, width: int, *, images: int, classes: int, latent: int
    ) -> None:
        super().__init__()
        self.sketch = sketch
        self._shape = (images, latent)
        self.of_labels: Tensor
        self.deviation: Tensor
        self.register_buffer("of_labels", torch.zeros(classes, sketch.length))
        self.register_buffer("deviation", torch.ones(sketch.length))
        self.layers = nn.Sequential(
            nn.Linear(sketch.length + images * classes, width),
            nn.SiLU(),
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.LayerNorm(width),
            nn.Linear(width, images * latent),
        )

    def standardise(self, features: Tensor, labels: Tensor) -> None:
        """Learn of features ``(N, F)`` and label rows what `forward` takes out.

        That is what the numbers of each label explain linearly, and the deviation of the rest:
        much of an update is the same for all images of a label.
        """
        counts = labels.sum(dim=1)
        kept = counts.T @ counts + _RIDGE * torch.eye(counts.shape[1]).to(counts)
        self.of_labels = torch.linalg.solve(kept, counts.T @ features)
        self.deviation = (features - counts @ self.of_labels).std(dim=0) + 1e-6

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Map features ``(N, F)`` and label rows ``(N, B, classes)`` to latents ``(N, B, n)``."""
        rest = (features - labels.sum(dim=1) @ self.of_labels) / self.deviation
        inputs = [rest.clamp(-_FARTHEST, _FARTHEST), labels.flatten(1)]
        found: Tensor = self.layers(torch.cat(inputs, dim=1))
        return found.view(-1, *self._shape)


def predicted_latents(
    problem: Problem, labels: Tensor, prior: TrainedPrior, settings: InverterSettings, run: Run
) -> tuple[Tensor, int]:
    """Train an inverter for each model and declaration, and apply it to the uploads.

    Trials of one restart with equal parameters and equal knowledge (replayed moments, trust in
    coordinates) have one inverter, which depends on these and the seed alone.

    Parameters
    ----------
    labels
        Rows ``(L, B, classes)``.

    Returns
    -------
    tuple
        Latents ``(L, B, n)``, and the steps of the longest training.
    """
    if problem.unknowns():
        raise BractError(
            f"{problem.cases[0].observation.key}: a learned inverter predicts images alone, and "
            "the client's unknowns need a gradient; use gias",
            code="attack-unsuited",
        )
    groups: dict[str, list[int]] = {}
    for trial in range(problem.trials):
        groups.setdefault(_identity(problem, trial, prior, settings), []).append(trial)
    found: dict[int, Tensor] = {}
    most = 0
    for number, (identity, trials) in enumerate(groups.items()):
        low, high = number / len(groups), (number + 1) / len(groups)
        own = run.part("inverter", low, high, run.iterations)
        if own.checkpoint is not None:
            # The learning rate falls by the number of steps, so another number is another training.
            length = "" if run.seconds is not None else f"-{run.iterations}"
            own.checkpoint = own.checkpoint.with_name(f"{identity}{length}.inverter")
        of_group = problem.select(trials)
        inverter, steps = _inverter(of_group.select([0]), prior, settings, own, identity)
        most = max(most, steps)
        with torch.no_grad():
            features = inverter.sketch(of_group, of_group.target)
            latents = inverter(features, labels[trials].to(features))
        found |= dict(zip(trials, latents, strict=True))
    return torch.stack([found[trial] for trial in range(problem.trials)]), most


def _identity(problem: Problem, trial: int, prior: TrainedPrior, settings: InverterSettings) -> str:
    """Digest of everything that the inverter of a trial depends on, but for its budget."""
    case = problem.cases[trial]
    settled = (
        problem.seed,
        problem.restarts[trial],
        problem.image_shape,
        repr(problem.forward),
        repr(problem.likelihood),
        case.evidence.unknown_factor,
        case.observation.declaration.to_dict(),
        tuple(problem.target),
        prior.digest,
        repr(settings),
    )
    groups = {
        "parameters": problem.parameters,
        "buffers": problem.buffers,
        "weights": problem.weights or {},
        "nuisance": problem.nuisance or {},
    }
    own = {kind: {n: v[trial] for n, v in of.items()} for kind, of in groups.items()}
    return digest_of(settled, own)


def _inverter(
    problem: Problem, prior: TrainedPrior, settings: InverterSettings, run: Run, identity: str
) -> tuple[Inverter, int]:
    """Return the inverter of one trial's model, and how many steps it was trained."""
    key = f"{identity} {run.iterations} {problem.device} {problem.dtype}"
    if run.seconds is None and key in _trained:
        _trained.move_to_end(key)
        return _trained[key], run.iterations or 0
    # Not of the identity: what a declaration leaves unsaid must not change what is drawn.
    seed = derive_seed(problem.seed, "inverter", problem.restarts[0])
    training = InverterTraining(problem, prior, settings, seed)
    steps = training.run(run)
    made = training.inverter.eval().requires_grad_(False)
    if run.seconds is None:
        _trained[key] = made
        while len(_trained) > _KEPT:
            _trained.popitem(last=False)
    return made, steps


class InverterTraining:
    """Training of an inverter on updates that the client of a problem's one trial would send.

    The images are what the generator makes of latents that are drawn anew for every step, with
    labels drawn alike. They go through the same simulation as an attack's candidates, defense
    included; noise is drawn where the evidence has its law. The loss is the squared error of the
    latents; where several images of a batch have one label it is that of their best order, since a
    gradient does not determine it.
    """

    def __init__(
        self, problem: Problem, prior: TrainedPrior, settings: InverterSettings, seed: int
    ) -> None:
        self._problem, self._settings, self._seed = problem, settings, seed
        self._decoder: Decoder | Flow = prior.decoder().to(problem.device, problem.dtype)
        self._facts = prior.facts
        images, classes = problem.image_shape[0], problem.classes
        self._sketch = Sketch(problem, length=settings.features, seed=seed)
        self._sketch.fit(self._pairs("probes", 0, _PROBES, twice=True)[2])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "inverter"))
            self.inverter = Inverter(
                self._sketch,
                settings.width,
                images=images,
                classes=classes,
                latent=self._facts.latent,
            ).to(problem.device, problem.dtype)
        _, labels, parts = self._pairs("probes", 1, _PROBES)
        features = torch.cat([self._sketch(*part) for part in parts])
        self.inverter.standardise(features, labels)

    def run(self, run: Run) -> int:
        """Train within the limits of ``run``, from its checkpoint where there is one.

        The last state stays there: the batches to come of the same attack take it.
        """
        optimizer = torch.optim.Adam(self.inverter.parameters(), lr=self._settings.lr)
        step, spent = 0, 0.0
        if run.checkpoint is not None and run.checkpoint.exists():
            saved = torch.load(run.checkpoint, map_location=self._problem.device, weights_only=True)
            if saved["made_by"] == list(made_by()):
                self.inverter.load_state_dict(saved["inverter"])
                optimizer.load_state_dict(saved["optimizer"])
                step, spent = int(saved["step"]), float(saved["spent"])
        begun = now() - spent
        saved_at, began_at = now(), step

        def save() -> None:
            if run.checkpoint is not None:
                write_atomically(
                    run.checkpoint,
                    {
                        "inverter": self.inverter.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                        "spent": now() - begun,
                        "made_by": list(made_by()),
                    },
                )

        while (done := run.share(step, now() - begun)) < 1.0:
            for group in optimizer.param_groups:
                group["lr"] = self._settings.lr * 0.5 * (1.0 + math.cos(math.pi * done))
            loss = self._loss(step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            run.advance(done, float(loss.detach()))
            if now() - saved_at > _CHECKPOINT_SECONDS:
                saved_at = now()
                save()
        if step > began_at:
            save()
        return step

    def _loss(self, step: int) -> Tensor:
        latents, labels, parts = self._pairs("pairs", step, self._settings.pairs)
        features = torch.cat([self._sketch(*part) for part in parts])
        found: Tensor = self.inverter(features, labels)
        return (found - _in_order(found.detach(), latents, labels)).square().mean()

    def _pairs(
        self, purpose: str, step: int, count: int, *, twice: bool = False
    ) -> tuple[Tensor, Tensor, Iterator[tuple[Problem, Tensors]]]:
        """Draw latents ``(N, B, n)`` and label rows; return them and the updates, in parts.

        Parameters
        ----------
        twice
            Whether two pairs in a row have the same labels.
        """
        problem = self._problem
        images, classes = problem.image_shape[0], problem.classes
        generator = torch.Generator().manual_seed(derive_seed(self._seed, purpose, step))
        drawn = torch.randint(classes, (count, images), generator=generator)
        if local_training(problem.forward) is None:
            drawn = drawn.sort(dim=1).values  # as inferred labels of one gradient are
        if twice:
            drawn = drawn[: count // 2].repeat_interleave(2, dim=0)
        labels = F.one_hot(drawn, classes).to(problem.device, problem.dtype)
        latents = torch.randn(count, images, self._facts.latent, generator=generator)
        latents = latents.to(problem.device, problem.dtype)
        return latents, labels, self._sent(latents, labels, generator)

    @torch.no_grad()
    def _sent(
        self, latents: Tensor, labels: Tensor, generator: torch.Generator
    ) -> Iterator[tuple[Problem, Tensors]]:
        """Yield what clients with these images would send, an even number of them at a time."""
        problem = self._problem
        made = made_images(self._decoder, latents, labels if self._facts.classes else None)
        size = sum(value.numel() for value in problem.parameters.values())
        together = 2 * max(1, _AT_ONCE // (2 * size))
        law = problem.likelihood
        for at in range(0, len(made), together):
            part = slice(at, at + together)
            several = problem.select([0] * len(made[part]))
            sent = several.simulate(made[part], labels[part], {})
            sent = {n: v + _noise(law, n, v, generator) for n, v in sent.items()}
            yield several, {n: v.detach() for n, v in sent.items()}


def _noise(law: Objective | None, name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return what a law adds to one tensor; of several rounds, that of the tensor's round."""
    if isinstance(law, SumOverRounds):
        law = law.parts[round_of(name)]
    if isinstance(law, GaussianLikelihood | LaplaceLikelihood):
        return law.draw(like, generator)
    return torch.zeros_like(like)


def _in_order(found: Tensor, latents: Tensor, labels: Tensor) -> Tensor:
    """Return ``latents`` ``(N, B, n)``, those of one label in the order nearest to ``found``."""
    if latents.shape[1] == 1:
        return latents
    from scipy.optimize import linear_sum_assignment

    apart = (found[:, :, None] - latents[:, None]).square().sum(dim=3)
    other = (labels[:, :, None] != labels[:, None]).any(dim=3)
    cost = apart.masked_fill(other, 1e12).cpu().numpy()
    order = torch.tensor([linear_sum_assignment(one)[1].tolist() for one in cost])
    rows = torch.arange(len(latents))[:, None]
    return latents[rows, order.to(latents.device)]
