"""Rows of the audit of the defenses, panel by panel; what decides most comes first."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from experiments.harness import clients
from experiments.harness.attacking import Tier
from experiments.harness.operating_points import POINTS

TIERS: dict[Tier, str] = {
    "plain": "undefended",
    "oblivious": "ignores it",
    "adaptive": "knows it",
    "discounting": "knows it, discounts it",
    "both known": "knows it and all secrets",
}

REFERENCES = {"idlg": ("idlg", "grnn"), "grnn": ("grnn", "ig")}
"""Attacks on a panel's undefended update, by the attack of its defended rows: the strongest for
each image is what rows are compared with."""

ITERATIONS = 300
"""Of every row of every attack. With each panel's attack it was chosen on the split ``choose``, by
what some minutes of a core allow, before any of the rows was run."""

LOCKS = ("fedkl", "fedkl, ReLU")
"""The paper's formula, and the authors' code."""

ONE_TO_ONE = ("adadefense", "adadefense, eps outside")
OTHERS = ("clipping", "noise 0.001", "noise 0.01", "pruning", "soteria", "precode")
CHAINS = ("adadefense, noise 0.001", "pruning, noise 0.001")
RANDOM = ("noise 0.001", "noise 0.01", "pruning")
"""Where knowing a defense means the Bayes adversary; ``discounting`` is who only trusts less."""


@dataclass(frozen=True)
class Situation:
    """What clients do in one row: a `clients.Situation` with a name of `POINTS`."""

    data: str
    model: str
    defense: str = "none"
    round: int = 1
    batch: int = 1
    steps: int = 0
    step_images: int = 0
    trained: bool = False
    uploads: int = 8

    @property
    def clients(self) -> clients.Situation:
        """Return what these clients do."""
        given = asdict(self)
        # Rows without a model are baselines; they name no defense.
        chain = POINTS.get(given.pop("defense"), [])
        return clients.Situation(**given, defenses=tuple(chain))


@dataclass(frozen=True)
class Setting:
    """One row: what clients do, and who attacks them.

    Attributes
    ----------
    panel
        Name of the group of rows that share an undefended row.
    """

    panel: str
    situation: Situation
    tier: Tier
    attack: str = "grnn"
    iterations: int = ITERATIONS
    restarts: int = 1


def standard_plan(iterations: int = ITERATIONS) -> list[Setting]:
    """Return every row: eight uploads on eight networks, all with as many iterations."""
    panels = (_one_digit, _locks, _later, _pooled, _more_images, _other_images)
    return [replace(row, iterations=iterations) for panel in panels for row in panel()]


def _one_digit() -> Iterator[Setting]:
    base = Situation("digits", "lenet-strided")
    defenses = (*ONE_TO_ONE, "guardian", *OTHERS, *CHAINS)
    yield from _panel("one digit", base, defenses, "idlg")


def _pooled() -> Iterator[Setting]:
    base = Situation("digits", "lenet")
    yield from _panel("pooled LeNet", base, ("adadefense", "guardian"), "grnn")


def _other_images() -> Iterator[Setting]:
    for data in ("mnist", "faces", "grey", "photos"):
        base = Situation(data, "lenet-strided")
        yield from _panel(data, base, ("adadefense", "guardian"), "idlg")


def _more_images() -> Iterator[Setting]:
    one = Situation("digits", "lenet-strided")
    for name, base in {
        "batch 4": replace(one, batch=4),
        "batch 8": replace(one, batch=8),
        "2 local steps": replace(one, batch=2, steps=2, step_images=1),
        "trained": replace(one, trained=True),
    }.items():
        yield from _panel(name, base, ("adadefense",), "grnn")
        locked = replace(base, model="lenet-strided-bn")
        yield from _panel(f"{name}, FedKL", locked, LOCKS[:1], "grnn")


def _later() -> Iterator[Setting]:
    # The server has stepped by defended uploads: each defense has its own undefended rows.
    for number in (2, 5):
        there = Situation("digits", "lenet-strided", "adadefense", round=number)
        yield from _panel(f"round {number}", there, ("adadefense",), "idlg")


def _locks() -> Iterator[Setting]:
    base = Situation("digits", "lenet-strided-bn")
    yield from _panel("one digit, FedKL", base, LOCKS, "grnn", known=True)


def _panel(
    name: str, base: Situation, defenses: tuple[str, ...], attack: str, *, known: bool = False
) -> Iterator[Setting]:
    """Yield a panel: the undefended rows, then each defense ignored and known.

    Where no closed form serves, who knows the defense has every attack of the undefended rows.
    """
    for reference in REFERENCES[attack]:
        yield Setting(name, base, "plain", reference)
    for defense in defenses:
        tiers: list[Tier] = ["oblivious", "adaptive"]
        if defense in RANDOM:
            tiers.append("discounting")
        if known:
            tiers.append("both known")
        for tier in tiers:
            every = tier == "adaptive" and attack == "grnn"
            for method in REFERENCES[attack] if every else (attack,):
                yield Setting(name, replace(base, defense=defense), tier, method)
