"""What a client's update should look like before its image is known."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bract.attacks.descent import Run
from bract.attacks.evidence import Evidence
from bract.attacks.matching import minimise
from bract.attacks.objectives import RelativeError
from bract.attacks.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.pixels import PixelSearch
from bract.attacks.problem import Case, Problem
from bract.attacks.simulation import forward_model, images_in, loss_gradient
from bract.attacks.victim import Victim
from bract.attacks.visibility import smooth_images
from bract.observation import Observation
from bract.update import Tensors

_PROBES = 16
_UNROLL = 16
_LR = 0.05


def class_gradients(observation: Observation, victim: Victim) -> list[Tensors]:
    """Mean gradient of smooth random images under each label, at the captured parameters."""
    shape, classes = observation.protocol.image_shape, observation.protocol.classes
    if shape is None or classes is None:
        raise AssertionError("victim_of refuses protocols without shape and classes")
    pixels = smooth_images(_PROBES, shape, torch.Generator().manual_seed(0))
    inputs = victim.normalise(pixels)[None]
    victim.model.cpu()
    parameters = {n: observation.parameters[n].cpu()[None] for n in victim.parameter_names}
    buffers = {n: observation.buffers[n].cpu()[None] for n in victim.buffer_names}
    found = []
    for k in range(classes):
        rows = torch.zeros(1, _PROBES, classes)
        rows[..., k] = 1.0
        gradient = loss_gradient(victim, parameters, buffers, inputs, rows)
        found.append({n: v[0].detach().double() for n, v in gradient.items()})
    return found


def likely_labels(classes: int, images: int, misfit: Callable[[list[int]], float]) -> list[int]:
    """Labels that fit best, added one by one."""
    chosen: list[int] = []
    for _ in range(images):
        chosen.append(min(range(classes), key=lambda k: misfit([*chosen, k])))
    return sorted(chosen)


def fitted_gradient(
    observation: Observation, victim: Victim, evidence: Evidence, labels: list[int], steps: int
) -> Tensors:
    """Gradient of images that ``steps`` of Adam on their pixels fit to the evidence, from grey."""
    protocol = observation.protocol
    images = images_in(protocol, len(labels))
    forward = forward_model(protocol, images=images, unroll=_UNROLL)
    case = Case(observation, victim, evidence, forward, images)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    grey = torch.full((1, *problem.image_shape), 0.5)
    rows = torch.nn.functional.one_hot(torch.tensor([labels]), problem.classes).float()
    spread = 0.05 * torch.randn(grey.shape, generator=problem.generators()[0])
    search = PixelSearch(problem, victim.normalise(grey + spread), rows)
    optimizer = FirstOrder(
        search.variables,
        FirstOrderSettings(kind="adam", lr=_LR, schedule="cosine"),
        project=search.box,
    )
    found = minimise(problem, search, optimizer, Run(iterations=steps), objective=RelativeError())
    simulated: dict[str, Tensor] = problem.simulate(found.images, rows, {})
    return {n: v[0].detach().double() for n, v in simulated.items()}
