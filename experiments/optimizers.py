"""Time of bract's own optimizer over trials against `torch.optim`, on the variables of two attacks.

    python -m experiments.optimizers [--trials 1 8] [--repetitions 200] [--json]

The variables are those of GRNN (a generator's weights) and IG (pixels) against a LeNet, the
gradients those of their first step. All implementations step in turn in each repetition, on one
thread, by processor time, and cleaning of gradients that are not finite and IG's sign count for
each. ``step_ratio`` is the median over the repetitions, ``iteration_ratio`` holds together whole
iterations: one evaluation of the attack's loss with its gradient, and the step. ``same`` says
whether the variables are equal to the last bit after all steps, where they are the same ones.

bract moves the first layer of GRNN's generator as the sum of weights that are not kept
(`FirstOrder`'s ``sums``), which `torch.optim` cannot express: ``whole layer`` keeps the weights,
``sum as plain`` takes the sum for a plain variable, which is less work and another search.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bract.attacks.methods.grnn.generator import GeneratorSearch
from bract.attacks.methods.grnn.grnn import GRNN
from bract.attacks.methods.ig import IG
from bract.attacks.problem.case import open_case
from bract.attacks.problem.problem import Problem
from bract.attacks.solve.matching import hard_labels, noise
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.solve.pixels import PixelSearch
from bract.attacks.solve.regularizers import image_priors
from bract.updates.update import Tensors
from experiments.attacks import observe
from experiments.harness.command import emit, note, parser
from experiments.harness.images import image_set
from experiments.harness.splits import first_seed

COLUMNS = (
    "attack",
    "optimizer",
    "trials",
    "values",
    "implementation",
    "step_us",
    "step_ratio",
    "iteration_ratio",
    "same",
)

OWN = "bract"


@dataclass
class Task:
    """Variables of an attack, its optimizer's settings, and its loss, which leaves gradients."""

    attack: str
    variables: Tensors
    sums: Tensors
    settings: FirstOrderSettings
    evaluate: Callable[[], None]


class Torch:
    """A `torch.optim` optimizer that cleans and signs gradients as `FirstOrder` does."""

    def __init__(self, task: Task, variables: Tensors, **implementation: Any) -> None:
        values, settings = list(variables.values()), task.settings
        self._values, self._signed = values, settings.signed
        self._optimizer: torch.optim.Optimizer
        if settings.kind == "adam":
            self._optimizer = torch.optim.Adam(values, lr=settings.lr, **implementation)
        else:
            self._optimizer = torch.optim.RMSprop(
                values, lr=settings.lr, momentum=settings.momentum, **implementation
            )

    def step(self, evaluate: Callable[[], Tensor], progress: float) -> None:
        """Evaluate once, then move."""
        del progress
        evaluate()
        for value in self._values:
            if value.grad is not None:
                value.grad.nan_to_num_(0.0, 0.0, 0.0)
                if self._signed:
                    value.grad.sign_()
        self._optimizer.step()


def main() -> None:
    """Measure every attack with every number of trials."""
    options = _options()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for trials in options.trials:
        for make in (grnn, ig):
            task = make(problem_of(trials))
            note(f"{task.attack}, {trials} trials")
            rows += measure(task, trials, options.repetitions)
    emit(rows, COLUMNS, as_json=options.json)


def problem_of(trials: int) -> Problem:
    """One digit of 32 x 32 pixels, its gradient on a fresh LeNet, and several restarts."""
    images = image_set("digits", 1, "choose")
    seen = observe(
        images.images,
        images.labels,
        model="lenet",
        init="default",
        network_seed=first_seed("choose"),
        client="client-0",
    )
    case = open_case(seen, tier="oblivious", max_images=1, unroll=1)
    restarts = [(case, restart) for restart in range(trials)]
    return Problem.stack(restarts, seed=0, device=torch.device("cpu"))


def grnn(problem: Problem) -> Task:
    """Return GRNN's generator, RMSprop as published."""
    attack = GRNN().for_model(problem.target_model.traits)
    search = GeneratorSearch(problem, latent=attack.latent, width=attack.width)
    settings = FirstOrderSettings(kind=attack.optimizer, lr=attack.lr, momentum=attack.momentum)
    return _task("grnn", problem, search, attack, 2, settings, search.sums)


def ig(problem: Problem) -> Task:
    """Return IG's pixels, signed Adam."""
    attack = IG().for_model(problem.target_model.traits)
    search = PixelSearch(problem, noise(problem, *problem.image_shape), hard_labels(problem))
    settings = FirstOrderSettings(kind="adam", lr=attack.lr, signed=True)
    return _task("ig", problem, search, attack, 1, settings, {})


def _task(
    name: str,
    problem: Problem,
    search: GeneratorSearch | PixelSearch,
    attack: GRNN | IG,
    power: int,
    settings: FirstOrderSettings,
    sums: Tensors,
) -> Task:
    priors = image_priors(tv=attack.tv or 0.0, power=power, bn=0.0)

    def evaluate() -> None:
        for value in search.variables.values():
            value.grad = None
        images, labels = search.decode()
        loss = problem.distance(attack.objective, problem.simulate(images, labels, {}))
        for prior in priors:
            loss = loss + prior(problem, images)
        loss.sum().backward()

    return Task(name, search.variables, sums, settings, evaluate)


def measure(task: Task, trials: int, repetitions: int) -> list[dict[str, Any]]:
    """Return one row an implementation."""
    evaluations = []
    for _ in range(10):
        begun = time.process_time()
        task.evaluate()
        evaluations.append(time.process_time() - begun)
    gradients = [v.grad.clone() for v in task.variables.values() if v.grad is not None]
    plain = dict(zip(task.variables, gradients, strict=True))
    ways: dict[str, dict[str, Any]] = {
        "foreach": {"foreach": True},
        "for-loop": {"foreach": False},
    }
    if task.settings.kind == "adam":
        ways["fused"] = {"fused": True}
    steps = {OWN: _stepper(task, task.variables, plain, None)}
    for name, way in ways.items():
        if task.sums:
            kept = _whole(task, task.variables), _whole(task, plain, gradients=True)
            steps[f"torch {name}, whole layer"] = _stepper(task, *kept, way)
            name += ", sum as plain"
        steps[f"torch {name}"] = _stepper(task, task.variables, plain, way)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, (step, _) in steps.items():
            begun = time.process_time()
            step()
            times[name].append(time.process_time() - begun)
    once = statistics.median(evaluations)
    return [
        {
            "attack": task.attack,
            "optimizer": task.settings.kind,
            "trials": trials,
            "values": sum(v.numel() for v in steps[name][1]),
            "implementation": name,
            "step_us": 1e6 * statistics.median(times[name]),
            "evaluation_us": 1e6 * once,
            "step_ratio": _ratio(times[name], times[OWN], 0.0),
            "iteration_ratio": _ratio(times[name], times[OWN], once),
            "same": _same(steps[name][1], steps[OWN][1]),
        }
        for name in steps
    ]


def _whole(task: Task, tensors: Tensors, *, gradients: bool = False) -> Tensors:
    """Return what is kept without sums: weights ``(L, n, ...)``, or their gradients."""
    found = dict(tensors)
    for name, latent in task.sums.items():
        factor = latent if gradients else latent / latent.square().sum(dim=1, keepdim=True)
        found[name] = torch.einsum("li,l...->li...", factor, tensors[name].detach())
    return found


def _stepper(
    task: Task, start: Tensors, gradients: Tensors, way: dict[str, Any] | None
) -> tuple[Callable[[], None], list[Tensor]]:
    variables = {n: v.detach().clone().requires_grad_() for n, v in start.items()}
    own = [gradient.clone() for gradient in gradients.values()]
    optimizer: FirstOrder | Torch
    if way is None:
        optimizer = FirstOrder(variables, task.settings, sums=task.sums)
    else:
        optimizer = Torch(task, variables, **way)

    def give() -> Tensor:
        for value, gradient in zip(variables.values(), own, strict=True):
            value.grad = gradient
        return torch.zeros(())

    return lambda: optimizer.step(give, 0.0), list(variables.values())


def _same(found: Sequence[Tensor], own: Sequence[Tensor]) -> bool | None:
    pairs = list(zip(found, own, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return None
    return all(torch.equal(a, b) for a, b in pairs)


def _ratio(times: Sequence[float], own: Sequence[float], added: float) -> float:
    pairs = zip(times, own, strict=True)
    return statistics.median((one + added) / (other + added) for one, other in pairs)


def _options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--trials", type=int, nargs="+", default=[1, 8], help="restarts held together"
    )
    made.add_argument("--repetitions", type=int, default=200, help="steps of each implementation")
    return made.parse_args()


if __name__ == "__main__":
    main()
