"""Long local training, simulated along the line between the sent and the returned model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bract.attacks.problem.client_model import ForwardModel, loss_gradient
from bract.attacks.problem.target_model import TargetModel
from bract.protocol.observation import Observation
from bract.protocol.update import Tensors

MOVED = "training_path.moved."
"""Among the buffers, before a parameter's name: how far local training moved it."""


@dataclass(frozen=True, kw_only=True)
class TrainingPath(ForwardModel):
    """The mean of all images' gradients where local training went by.

    The server knows both ends of the client's training, ``w_0`` and ``w_K``, and so about where it
    were in between: at ``w_0 + t (w_K - w_0)``. There every image counts alike, in whatever batch
    and order it was taken, so nothing about the order is searched, and all epochs share one set of
    images (unlike Dimitrov et al., TMLR 2022: they unroll every step and tie one set of images an
    epoch together). The cost is that of ``nodes`` batches instead of one gradient a step. What it
    leaves out is the bend of the path and how a step's batch differs from the whole, of the order
    of learning rate times curvature; the mean gradient at ``w_0`` leaves out the whole motion.

    Attributes
    ----------
    nodes
        Points on the line, at the midpoints of as many equal parts.
    """

    nodes: int = 1

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return the mean gradient over the nodes."""
        state = {n: v for n, v in (buffers | unknowns).items() if not n.startswith(MOVED)}
        total: Tensors = {}
        for node in range(self.nodes):
            share = (node + 0.5) / self.nodes
            here = {
                name: value - share * buffers[MOVED + name].to(value)
                for name, value in parameters.items()
            }
            gradient = loss_gradient(target_model, here, state, inputs, labels)
            total = {n: total[n] + g for n, g in gradient.items()} if total else gradient
        return {name: value / self.nodes for name, value in total.items()}


def knows_path(observation: Observation) -> bool:
    """Whether the update is where plain SGD of several steps ended, undefended."""
    p = observation.declaration
    several = p.algorithm == "fedavg" and p.local_steps is not None and p.local_steps > 1
    return several and p.optimizer == "sgd" and bool(p.lr) and not p.defenses


def moved(observation: Observation) -> Tensors:
    """How far each parameter went, for the buffers of a problem."""
    return {MOVED + name: observation.update[name] for name in observation.parameters}
