"""Deep Leakage from Gradients (DLG) and its improvement with known labels (iDLG)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from bract.attacks import Attack, Objective, Outcome, PixelSearch, Problem, Run, minimise, noise
from bract.attacks.base import Cost
from bract.attacks.options import Count, Rate
from bract.attacks.problem.objectives import LayerWeighting, SquaredError
from bract.attacks.solve.lbfgs import BatchedLBFGS
from bract.attacks.solve.matching import searched_labels


@dataclass(frozen=True, kw_only=True)
class DLG(Attack):
    """Deep Leakage from Gradients (Zhu et al., NeurIPS 2019).

    Squared error, L-BFGS, images and soft labels found jointly from N(0, 1), whatever the tier
    knows of the labels (`IDLG` reads them). Restarts matter: many end in a poor minimum.

    Attributes
    ----------
    line_search
        Search along each direction, which keeps trials from diverging; False takes full steps as
        the published code does.
    lr
        Factor of a full step without the line search.
    history
        Pairs that L-BFGS keeps; PyTorch's default of 100 in the published code.
    objective, weighting
        The matching loss and the weights of the layers in it.
    """

    name: ClassVar[str] = "dlg"
    title: ClassVar[str] = "DLG"
    family: ClassVar[str] = "gradient matching over pixels"
    inputs: ClassVar[tuple[str, ...]] = ("image", "signal")
    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 300

    line_search: bool = True
    lr: Rate = 1.0
    history: Count = 100
    objective: Objective = field(default_factory=SquaredError)
    weighting: LayerWeighting = "equal"

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search in pixel space, labels included."""
        return self._search(problem, run, joint=True)

    def _search(self, problem: Problem, run: Run, *, joint: bool) -> Outcome:
        start = noise(problem, *problem.image_shape)
        known, logits = searched_labels(problem, joint=joint)
        search = PixelSearch(problem, start, known, logits)
        unknowns = problem.unknowns()
        optimizer = BatchedLBFGS(
            search.variables | unknowns,
            history=self.history,
            line_search=self.line_search,
            lr=self.lr,
        )
        return minimise(
            problem,
            search,
            optimizer,
            run,
            objective=self.objective,
            weighting=self.weighting,
            unknowns=unknowns,
        )


@dataclass(frozen=True, kw_only=True)
class IDLG(DLG):
    """Improved Deep Leakage from Gradients (Zhao et al. 2020): labels first, then DLG."""

    name: ClassVar[str] = "idlg"
    title: ClassVar[str] = "iDLG"

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search in pixel space with the labels of the last layer."""
        return self._search(problem, run, joint=False)
