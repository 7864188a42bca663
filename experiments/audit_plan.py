"""Rows of the audit of the defenses, panel by panel; what decides most comes first."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from experiments.harness import clients
from experiments.harness.attacking import Tier
from experiments.harness.operating_points import GUARDIAN, POINTS

TIERS: dict[Tier, str] = {
    "plain": "undefended",
    "oblivious": "ignores it",
    "adaptive": "knows it",
    "discounting": "knows it, discounts it",
    "both known": "knows it and all secrets",
}

REFERENCES = ("grnn", "best")
"""Attacks on the undefended update: the strongest for each image is what rows are compared with."""

REFERENCES = ("grnn", "best")
"""Attacks on the undefended update: the strongest for each image is what rows are compared with."""

MODELS = ("lenet-strided", "lenet")
LOCKED_MODELS = ("lenet-strided-bn", "lenet-bn")
LOCKS = ("fedkl", "fedkl, ReLU")
"""The paper's formula, and the authors' code."""

GUARDIANS = tuple(GUARDIAN)
TWO_GUARDIANS = ("guardian", "guardian, cosine 0.3")
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
    uploads: int = 16

    @property
    def clients(self) -> clients.Situation:
        """What these clients do."""
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
    iterations: int = 2000
    restarts: int = 1


def standard_plan(iterations: int | None = None) -> list[Setting]:
    """Return every row, with its own number of iterations or the given one."""
    rows = [
        replace(row, iterations=iterations or each)
        for panels, each in (((_core,), 1000), ((_first_round, _locks), 2000), (_BREADTH, 1000))
        for panel in panels
        for row in panel()
    ]
    return list(dict.fromkeys(rows))


def _core() -> Iterator[Setting]:
    """What the documents' first sentences rest on, eight images on eight networks."""
    for model, defenses in (
        ("lenet-strided", ("adadefense", "guardian")),
        ("lenet-strided-bn", LOCKS[:1]),
    ):
        base = Situation("digits", model, uploads=8)
        for row in _panel(f"core, {model}", base, defenses):
            yield row
            if row.tier == "adaptive":
                yield replace(row, attack="best")


def _first_round() -> Iterator[Setting]:
    for model, count in zip(MODELS, (16, 8), strict=True):
        base = Situation("digits", model, uploads=count)
        yield from _panel(f"first round, {model}", base, (*ONE_TO_ONE, *GUARDIANS))


def _locks() -> Iterator[Setting]:
    for model in LOCKED_MODELS:
        base = Situation("digits", model, uploads=8)
        yield from _panel(f"locks, {model}", base, LOCKS, known=True)


def _other_defenses() -> Iterator[Setting]:
    base = Situation("digits", "lenet-strided", uploads=8)
    yield from _panel("other defenses", base, (*OTHERS, *CHAINS))


def _other_images() -> Iterator[Setting]:
    for data in ("mnist", "faces", "grey", "photos"):
        base = Situation(data, "lenet-strided", uploads=8)
        yield from _panel(f"{data}, lenet-strided", base, ("adadefense", *TWO_GUARDIANS))
        locked = replace(base, model="lenet-strided-bn")
        yield from _panel(f"{data}, lenet-strided-bn", locked, LOCKS[:1])


def _more_images() -> Iterator[Setting]:
    one = Situation("digits", "lenet-strided")
    for name, base in {
        "batch 4": replace(one, batch=4, uploads=4),
        "batch 8": replace(one, batch=8, uploads=4),
        "4 local steps": replace(one, batch=4, steps=4, step_images=2, uploads=4),
        "trained": replace(one, trained=True, uploads=8),
    }.items():
        defenses = ("adadefense", "guardian", "noise 0.001")
        yield from _panel(f"{name}, lenet-strided", base, defenses)
        locked = replace(base, model="lenet-strided-bn")
        yield from _panel(f"{name}, lenet-strided-bn", locked, LOCKS[:1])


def _later() -> Iterator[Setting]:
    for number in (2, 5):
        for defense in ONE_TO_ONE:
            there = Situation("digits", "lenet-strided", defense, round=number)
            panel = f"round {number}, {defense}"
            # The server has stepped by defended uploads: each defense has its own undefended rows.
            for attack in REFERENCES:
                yield Setting(panel, there, "plain", attack)
            yield Setting(panel, there, "adaptive")


_BREADTH = (_other_defenses, _other_images, _more_images, _later)


def _panel(
    name: str, base: Situation, defenses: tuple[str, ...], *, known: bool = False
) -> Iterator[Setting]:
    for attack in REFERENCES:
        yield Setting(name, base, "plain", attack)
    for defense in defenses:
        tiers: list[Tier] = ["oblivious", "adaptive"]
        if defense in RANDOM:
            tiers.append("discounting")
        if known:
            tiers.append("both known")
        for tier in tiers:
            yield Setting(name, replace(base, defense=defense), tier)
