"""GGL: search the latent of a generator that was trained on public images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torch import Tensor

from bract.attacks import (
    Attack,
    Case,
    Cosine,
    FirstOrder,
    FirstOrderSettings,
    Objective,
    Outcome,
    Problem,
    Reconstruction,
    Refusal,
    Run,
    hard_labels,
    minimise,
)
from bract.attacks.base import Cost
from bract.attacks.options import Count, Rate, ScheduleName, Weight
from bract.attacks.problem.case import open_case
from bract.attacks.problem.evidence import FORWARD
from bract.attacks.solve.regularizers import LatentPrior
from bract.attacks.task import AttackTask
from bract.config.audit import Tier
from bract.defenses import DEFENSES
from bract.errors import BractError
from bract_priors.earlier_rounds import EARLIER, in_order_of_rounds
from bract_priors.evolution import CMAES, narrowed, population_of, widened
from bract_priors.latent import (
    LATENT,
    LatentSearch,
    Relative,
    Start,
    likeliest_start,
    usable_prior,
)
from bract_priors.prior_facts import PriorKind

_RESOLVED = 0.35


@dataclass(frozen=True, kw_only=True)
class GGL(Attack):
    """Generative gradient leakage (Li et al., CVPR 2022): the likeliest image a generator makes.

    Images are what a generator trained on public data makes of a latent z; labels are read from the
    last layer, and a generator that knows classes is given them. The loss is a distance of
    gradients plus a penalty that keeps z like a standard normal one. It is searched by CMA-ES,
    without derivatives, so what a defense does to a candidate's gradient need not be
    differentiable: it is applied to the candidate, and the result is compared with the upload.

    Differences to the published attack: the distance is one minus the cosine, not the squared
    error, whose scale changes from model to model and would need a weight each; the generator is
    a small one of bract's own (`bract prior train`).

    Attributes
    ----------
    search
        ``cma``, or ``adam`` where the loss has a gradient all the way.
    lr, schedule
        Of Adam.
    sigma
        Deviation of CMA-ES's first generation.
    starts
        Random latents of which the search begins at the one that matches best.
    regularisation
        Weight of the penalty on the latent (`LatentPrior`) relative to a distance that is 1 at a
        random latent; with a likelihood it is the latent's own prior in nats.
    defense
        ``simulate`` applies a defense that can be simulated to the candidate; ``undo`` matches
        what the tier's reading makes of the upload, as other attacks do; ``auto`` does the latter
        but where float32 resolves less than 0.35 of an inverted upload's coordinates.
    earlier
        ``reconstruct`` attacks the client's earlier rounds first, one after the other, where the
        defense keeps state that their float32 uploads do not resolve (the same share), and
        simulates it with the updates that their images make; each costs as much as the attacked
        round. ``replay`` takes the state from the uploads alone.
    objective
        The matching loss.
    """

    name: ClassVar[str] = "ggl"
    title: ClassVar[str] = "GGL"
    family: ClassVar[str] = "search in a generator trained on public images"
    tiers: ClassVar[tuple[Tier, ...]] = ("surrogate",)
    generator: ClassVar[PriorKind | None] = "autoencoder"
    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 500

    search: Literal["cma", "adam"] = "cma"
    lr: Rate = 0.2
    schedule: ScheduleName = "cosine"
    sigma: Rate = 0.5
    starts: Count = 32
    regularisation: Weight = 0.1
    defense: Literal["simulate", "undo", "auto"] = "simulate"
    earlier: Literal["reconstruct", "replay"] = "reconstruct"
    objective: Objective = field(default_factory=Cosine)

    def run(self, cases: Sequence[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        """Attack cases as `Attack.run` does, earlier rounds first where ``earlier`` is set."""
        wanted = [self._reconstructs_earlier(case) for case in cases]
        return in_order_of_rounds(cases, task, super().run, wanted=wanted)

    def _reconstructs_earlier(self, case: Case) -> bool:
        defenses = [str(d.get("name")) for d in case.observation.declaration.defenses]
        return (
            self.earlier == "reconstruct"
            and self.matches
            and self.defense != "undo"
            and case.tier != "oblivious"
            and case.public is not None
            and bool(case.known.history)
            and not case.rounds
            and len(defenses) == 1
            and defenses[0] in FORWARD
            and DEFENSES[defenses[0]].keeps == "state"
            and float(case.evidence.notes.get("resolved", 1.0)) < _RESOLVED
        )

    def prepare(self, case: Case) -> Case:
        """Read an upload as it was sent where its defense can be simulated."""
        usable_prior(case, self.generator)
        view = None
        defenses = [str(d.get("name")) for d in case.observation.declaration.defenses]
        resolved = float(case.evidence.notes.get("resolved", 1.0))
        wanted = self.defense == "simulate" or (self.defense == "auto" and resolved < _RESOLVED)
        if wanted and case.tier != "oblivious" and len(defenses) == 1:
            view = FORWARD.get(defenses[0])
        if view is not None:
            opened = open_case(
                case.observation,
                tier=case.tier,
                known=case.known,
                max_images=case.images,
                unroll=self.unroll,
                view=view,
                public=case.public,
            )
            notes = {n: v for n, v in case.evidence.notes.items() if n == EARLIER}
            evidence = replace(opened.evidence, notes=opened.evidence.notes | notes)
            case = replace(opened, evidence=evidence, seconds=case.seconds)
        return super().prepare(case)

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search the latent space."""
        return without_latent(search_latent(self, problem, run))


def search_latent(
    attack: GGL, problem: Problem, run: Run, proposed: Tensor | None = None
) -> Outcome:
    """Search the latent by the settings of ``attack``; the outcome's unknowns hold it as `LATENT`.

    Parameters
    ----------
    proposed
        A further latent that the search may begin at, ``(L, B, n)``.
    """
    labels = hard_labels(problem)
    start = likeliest_start(problem, labels, attack.starts, attack.objective, proposed)
    return (_by_adam if attack.search == "adam" else _by_cma)(attack, problem, run, labels, start)


def _by_cma(attack: GGL, problem: Problem, run: Run, labels: Tensor, start: Start) -> Outcome:
    if problem.unknowns():
        raise BractError(
            f"{problem.cases[0].observation.key}: CMA-ES searches the latent alone, and the "
            "client's unknowns need a gradient; use gias",
            code="attack-unsuited",
        )
    population = population_of(start.latent[0].numel())

    def wide(value: Tensor) -> Tensor:
        return value.repeat_interleave(population, dim=0)

    several = widened(problem, population)
    space = LatentSearch(several, wide(labels), wide(start.latent))
    relative = Relative(attack.objective, wide(start.scale))
    chosen: Objective = relative if attack.matches else attack.objective
    found = minimise(
        several,
        space,
        CMAES(space.latent, start.latent, sigma=attack.sigma, seeds=list(problem.seeds)),
        run,
        objective=chosen,
        priors=[LatentPrior(latent=space.latent, weight=attack.regularisation)],
        kept={LATENT: space.latent},
    )
    return narrowed(relative.undone(found), population)


def _by_adam(attack: GGL, problem: Problem, run: Run, labels: Tensor, start: Start) -> Outcome:
    space = LatentSearch(problem, labels, start.latent)
    unknowns = problem.unknowns()
    relative = Relative(attack.objective, start.scale)
    chosen: Objective = relative if attack.matches else attack.objective
    found = minimise(
        problem,
        space,
        FirstOrder(
            space.variables | unknowns,
            FirstOrderSettings(kind="adam", lr=attack.lr, schedule=attack.schedule),
        ),
        run,
        objective=chosen,
        priors=[LatentPrior(latent=space.latent, weight=attack.regularisation)],
        unknowns=unknowns,
        kept={LATENT: space.latent},
    )
    return relative.undone(found)


def without_latent(outcome: Outcome) -> Outcome:
    """Return an outcome whose unknowns are the client's alone."""
    return replace(outcome, unknowns={n: v for n, v in outcome.unknowns.items() if n != LATENT})
