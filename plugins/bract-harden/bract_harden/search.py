"""The search: Optuna proposes candidates, and attacks of growing strength sort them.

Candidates come in groups of ``search.together``, whose federations are trained and attacked at once
where there are several workers: the same candidates get the same attacks however many there are.
Every candidate is trained once and, unless it learns too little, attacked cheaply. One that no
other beats so far is attacked harder; and every point of the frontier is trained with several seeds
and gets the full attack. A point that leaks more under it than it seemed to may leave the frontier,
which is recorded, and the next one takes its place, until all points of the frontier had the full
attack.

All is in one folder, and a search that was interrupted goes on there: ``study.db`` (Optuna's),
and ``candidates/NAME/`` with ``candidate.json`` and a run directory for each seed.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from bract.config import FederationConfig
from bract.disk import make_private_folder, write_text
from bract.errors import BractError, one_line
from bract.pool import Pool
from bract_harden.chains import describe
from bract_harden.comparing import LEAK_STEP, beats, in_steps, objectives, violations
from bract_harden.measure import pooled
from bract_harden.records import Candidate, Stage
from bract_harden.space import Setting, Space
from bract_harden.space_file import Search
from bract_harden.study import (
    Ask,
    enqueue,
    finished,
    importance,
    is_waiting,
    load_optuna,
    open_study,
)
from bract_harden.work import Job, Outcome, outcome_of

BASE = "as configured"

_REDRAWS = 20
"""Neighbours that are drawn for one that was not tried."""


@dataclass(frozen=True)
class _Order:
    """An attack that a candidate is to get."""

    found: Candidate
    config: FederationConfig
    stage: Stage
    seeds: Sequence[int] = (0,)
    floor: float | None = None


@dataclass(frozen=True)
class _Asked:
    """A trial of Optuna's, and its candidate."""

    trial: Any
    number: int
    config: FederationConfig
    name: str


class Hardening:
    """One search and its folder.

    Parameters
    ----------
    crew
        Trains and attacks the federations.
    say
        Takes one line about each step.
    """

    def __init__(
        self, root: Path, space: Space, pool: Pool[Job, Outcome], *, say: Callable[[str], None]
    ) -> None:
        self.root, self.space, self.pool, self.say = root, space, pool, say
        self.folder = root / "candidates"
        self.settings = space.file.search
        self.notes = list(space.notes)
        self._found: dict[str, Candidate] = {}
        self._importance: dict[str, dict[str, float]] = {}
        self._begun = time.monotonic() - self.wall_seconds

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates so far, in the order in which they were tried."""
        return list(self._found.values())

    @property
    def control(self) -> Candidate | None:
        """The configuration as it was given."""
        return self._found.get(_name(self.space.base))

    @property
    def wall_seconds(self) -> float:
        """Wall time up to the last result, without the time between interruptions."""
        kept = _kept(self.root / "wall.json")
        return float(kept.get("seconds", 0.0))

    def run(self) -> None:
        """Search, and hold the frontier to the full attack."""
        make_private_folder(self.folder)
        self._read()
        self._control()
        study = open_study(
            self.root / "study.db",
            trials=self.settings.trials,
            seed=self.space.base.seed + len(self._found),
            starts=self.space.starts(),
            keys=self.space.keys,
        )
        self._try_until(study, self.settings.trials)
        self._confirm()
        while self._wants_more(most := 2 * self.settings.trials, finished(study)):
            self._try_until(study, min(most, finished(study) + self.settings.together))
            self._confirm()
        self._drop()
        self._importance = importance(study)

    def run_grid(self, settings: Sequence[Setting]) -> None:
        """Give every setting the full attack: the slow reference of `run`."""
        make_private_folder(self.folder)
        self._read()
        self._control()
        seeds = range(self.settings.seeds)
        orders = []
        for setting in settings:
            config = self.space.configure(setting)
            found = self._candidate(config, setting)
            if not found.error and self._left(found):
                orders.append(_Order(found, config, "full", seeds))
        self._strengthen(orders)

    @property
    def importance(self) -> dict[str, dict[str, float]]:
        """Share of each objective's variance by setting; empty where it cannot be said."""
        return self._importance

    def frontier(self, *, full: bool = False) -> list[Candidate]:
        """Return the candidates that no other one beats; with ``full`` among those fully attacked.

        A candidate that was not fully attacked is only held against: what it leaks may be more.
        """
        pool = [c for c in self.candidates if c.leak is not None and not c.error]
        if full:
            pool = [c for c in pool if c.stage == "full"]
        found = [c for c in pool if not any(beats(other, c) for other in pool)]
        same: dict[tuple[float, ...], Candidate] = {}
        for one in sorted(found, key=lambda c: (c.stage != "full", c.leak, -(c.accuracy or 0.0))):
            same.setdefault(in_steps(one), one)
        return list(same.values())

    def config(self, candidate: Candidate) -> FederationConfig:
        """Return the configuration of a candidate, with the name of the given one."""
        if not candidate.setting:
            return self.space.base
        return self.space.configure(dict(candidate.setting))

    def run_of(self, candidate: Candidate, seed: int = 0) -> Path:
        """Return the run directory of one of a candidate's federations."""
        return self.folder / candidate.name / f"seed-{seed}"

    def _control(self) -> None:
        """Hold the configuration as it is to the full attack: what all others are compared with."""
        found = self._candidate(self.space.base, {})
        if found.error or not (left := self._left(found)):
            return
        self._strengthen([_Order(found, self.space.base, "full", left)])

    def _try_until(self, study: Any, trials: int) -> None:
        while (done := finished(study)) < trials:
            last = min(done + self.settings.together, trials)
            self._seed(study, range(done + 1, last + 1))
            self._try(study, range(done + 1, last + 1))

    def _seed(self, study: Any, numbers: Sequence[int]) -> None:
        """Enqueue neighbours of the frontier: half of a group, all once ``trials`` were tried."""
        front = [c for c in self.frontier() if c.setting]
        if is_waiting(study) or not front:
            return
        draw = Random(f"{self.space.base.seed} {numbers[0]}")
        for number in numbers:
            if number % 2 and number <= self.settings.trials:
                continue
            for _ in range(_REDRAWS):
                setting = self.space.neighbour(dict(draw.choice(front).setting), draw)
                if not self._is_known(setting):
                    enqueue(study, setting, self.space.keys)
                    break

    def _is_known(self, setting: Setting) -> bool:
        """Return whether a setting was tried, or can be no candidate."""
        try:
            return _name(self.space.configure(setting)) in self._found
        except BractError:
            return True

    def _wants_more(self, most: int, done: int) -> bool:
        """Return whether the frontier has too few points, and more could be found and attacked."""
        few = len(self.frontier(full=True)) < self.settings.frontier
        had = sum(c.stage == "full" for c in self.candidates)
        return few and done < most and had <= self.settings.points and bool(self.frontier())

    def _try(self, study: Any, numbers: Sequence[int]) -> None:
        """Ask for some candidates, and tell what came of each in that order."""
        asked = [one for n in numbers if (one := self._ask(study, n)) is not None]
        new = {one.name: one.config for one in asked if self._is_new(self._found[one.name])}
        floor = self._floor()
        self._strengthen(
            [_Order(self._found[n], config, "cheap", floor=floor) for n, config in new.items()]
        )
        good = [n for n in new if self._is_good(self._found[n])]
        self._strengthen([_Order(self._found[n], new[n], "middle") for n in good])
        for one in asked:
            self._tell(study, one)

    def _ask(self, study: Any, number: int) -> _Asked | None:
        trial = study.ask()
        setting = self.space.suggest(Ask(trial))
        try:
            config = self.space.configure(setting)
        except BractError as error:
            trial.set_user_attr("infeasible", str(error))
            study.tell(trial, state=load_optuna().trial.TrialState.PRUNED)
            return None
        found = self._candidate(config, setting)
        trial.set_user_attr("candidate", found.name)
        return _Asked(trial, number, config, found.name)

    def _tell(self, study: Any, one: _Asked) -> None:
        states = load_optuna().trial.TrialState
        found = self._found[one.name]
        of = f"/{self.settings.trials}" if one.number <= self.settings.trials else ""
        where = f"candidate {one.number}{of} {found.name}: {found.title}"
        if found.error:
            self.say(f"{where}: failed: {found.error}")
            one.trial.set_user_attr("error", found.error)
            study.tell(one.trial, state=states.FAIL)
        elif found.leak is None:
            one.trial.set_user_attr("infeasible", "accuracy")
            self.say(f"{where}: accuracy {found.accuracy or 0.0:.3f}, not attacked")
            study.tell(one.trial, state=states.PRUNED)
        else:
            self.say(f"{where}: {in_words(found)}")
            study.tell(one.trial, objectives(found))

    def _confirm(self) -> None:
        """Give the frontier the full attack until all of its points have had it."""
        together = max(1, self.settings.together // self.settings.seeds)
        while True:
            front = self.frontier()
            left = sorted(
                (c for c in front if self._left(c)), key=lambda c: (c.leak, -(c.accuracy or 0))
            )
            had = sum(c.stage == "full" and not self._left(c) for c in self.candidates)
            more = min(together, self.settings.points + 1 - had)
            if not left or more <= 0:
                break
            for one in left[:more]:
                self.say(f"full attack on {one.name}: {one.title}")
            self._strengthen(
                [_Order(c, self.config(c), "full", self._left(c)) for c in left[:more]]
            )

    def _left(self, found: Candidate) -> list[int]:
        """Return the seeds of which a candidate had no full attack."""
        had = {m.seed for m in found.measures} if found.stage == "full" else set()
        return [seed for seed in range(self.settings.seeds) if seed not in had]

    def _drop(self) -> None:
        """Record why candidates that got the full attack are not on the frontier."""
        if left := [c for c in self.frontier() if self._left(c)]:
            self.notes.append(
                f"{len(left)} candidates looked good to the cheaper attackers and did not get the "
                f"full attack (search.points is {self.settings.points}): they are not on the "
                "frontier."
            )
        front_names = {c.name for c in self.frontier(full=True)}
        for one in self.candidates:
            if one.stage == "full" and one.setting:
                why = "" if one.name in front_names else self._why_dropped(one)
                self._keep(one.model_copy(update={"dropped": why}))

    def _why_dropped(self, one: Candidate) -> str:
        cheap = self._before.get(one.name)
        by = next((leak.attack for leak in one.leaks if leak.value == one.leak and leak.attack), "")
        if cheap is None or one.leak is None or one.leak <= cheap + LEAK_STEP:
            return "another point is at least as good in every respect"
        return f"leakage rose from {cheap:.2f} to {one.leak:.2f} under {by or 'the full attack'}"

    @property
    def _before(self) -> dict[str, float]:
        return _kept(self.root / "before.json")

    def _floor(self) -> float | None:
        """Return the accuracy below which a candidate is not attacked."""
        best = self.control.accuracy if self.control else None
        return None if best is None else self.settings.floor * best

    def _is_new(self, found: Candidate) -> bool:
        return found.leak is None and not found.error and found.stage != "trained"

    def _is_good(self, found: Candidate) -> bool:
        if found.leak is None or found.error:
            return False
        others = [c for c in self.candidates if c.name != found.name and c.leak is not None]
        return not any(beats(other, found) for other in others)

    def _strengthen(self, orders: Sequence[_Order]) -> None:
        """Attack candidates' federations by the attackers of a stage; keep what was found."""
        for order in orders:
            if order.stage == "full" != order.found.stage and order.found.leak is not None:
                before = self._before | {order.found.name: order.found.leak}
                write_text(self.root / "before.json", json.dumps(before))
        named = {order.found.name: order for order in orders}
        outcomes: dict[str, dict[int, Outcome]] = defaultdict(dict)
        for job, found in self.pool.run([job for o in orders for job in self._jobs(o)]):
            outcome = outcome_of(found)
            known = self._found[job.candidate]
            spent = (known.cpu_seconds or 0.0) + outcome.cpu_seconds
            self._keep(known.model_copy(update={"cpu_seconds": spent}))
            outcomes[job.candidate][job.seed] = outcome
            order = named[job.candidate]
            if len(outcomes[job.candidate]) == len(order.seeds):
                self._take(order, outcomes[job.candidate])

    def _jobs(self, order: _Order) -> list[Job]:
        settings = _settings(self.settings, order.stage, order.config)
        return [
            Job(
                order.found.name,
                order.config,
                self.run_of(order.found, seed),
                seed,
                settings,
                order.floor,
            )
            for seed in order.seeds
        ]

    def _take(self, order: _Order, outcomes: dict[int, Outcome]) -> None:
        """Keep what the jobs of one order found."""
        found = self._found[order.found.name]
        errors = [outcomes[seed].error for seed in order.seeds if outcomes[seed].error]
        if errors:
            self._keep(found.model_copy(update={"stage": "crashed", "error": errors[0]}))
            return
        measures = {m.seed: m for m in found.measures}
        measures |= {seed: o.measure for seed, o in outcomes.items() if o.measure is not None}
        attacked = all(o.attacked for o in outcomes.values())
        update = {
            "stage": order.stage if attacked else "trained",
            "measures": [measures[seed] for seed in sorted(measures)],
        }
        least = found.leak or 0.0
        found = pooled(found.model_copy(update=update), order.config)
        if not attacked:
            self._keep(found.model_copy(update={"leak": None, "leaks": []}))
            return
        if len(measures) == 1:
            # An earlier attacker of the same federation may have got more than this one.
            found = found.model_copy(update={"leak": max(least, found.leak or 0.0)})
        broken = violations(found, order.config, self.space, self.control)
        self._keep(found.model_copy(update={"violated": broken}))

    def _candidate(self, config: FederationConfig, setting: Setting) -> Candidate:
        name = _name(config)
        if name not in self._found:
            title = describe(config) if setting else f"{describe(config)}, {BASE}"
            self._found[name] = Candidate(name=name, title=title, setting=setting, stage="cheap")
        return self._found[name]

    def _keep(self, found: Candidate) -> Candidate:
        self._found[found.name] = found
        make_private_folder(self.folder / found.name)
        write_text(self.folder / found.name / "candidate.json", found.to_text())
        seconds = time.monotonic() - self._begun
        write_text(self.root / "wall.json", json.dumps({"seconds": seconds}))
        return found

    def _read(self) -> None:
        paths = self.folder.glob("*/candidate.json")
        for path in sorted(paths, key=lambda p: p.stat().st_mtime):
            found = Candidate.parse_text(path.read_bytes(), source=str(path))
            self._found[found.name] = found


def _kept(path: Path) -> dict[str, float]:
    """Return the numbers of a file of the search; none where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BractError(
            f"{path}: expected numbers by name in JSON ({one_line(error, 100)}); remove it "
            "and pass --resume",
            code="file-damaged",
        ) from error


def in_words(found: Candidate) -> str:
    """Return what was measured of a candidate, in one line."""
    accuracy = "unknown" if found.accuracy is None else f"{found.accuracy:.3f}"
    return (
        f"leakage {found.leak or 0.0:.2f} ({found.stage} attack), accuracy {accuracy}, "
        f"{found.seconds or 0.0:.2f} s a round"
    )


def _settings(search: Search, stage: Stage, config: FederationConfig) -> dict[str, Any]:
    full = dict(search.full)
    if config.encryption.uses_masks:
        # Of masked uploads the server has the sum alone, which belongs to no client.
        full.pop("clients", None)
    if stage == "full":
        return from_first_uploads(full, config)
    first = (config.audit.rounds or [1])[:1]
    shared = {k: v for k, v in full.items() if k in ("clients", "max_images")}
    shared |= {"rounds": first, "attacks": config.audit.attacks[:1]}
    own: dict[str, Any] = dict(search.cheap if stage == "cheap" else search.middle)
    if config.encryption.uses_masks:
        own.pop("clients", None)
    return from_first_uploads(shared | own, config)


def from_first_uploads(settings: dict[str, Any], config: FederationConfig) -> dict[str, Any]:
    """Attack a client that joins later in its first round, in place of rounds before it.

    Parameters
    ----------
    settings
        Keys of the audit section that stand for the configuration's own.
    """
    audit = config.audit.model_dump() | settings
    joins = config.strategy.joins
    if not joins or audit["rounds"] is None:
        return settings
    names = config.sites or [f"client-{number}" for number in range(config.clients)]
    clients = names if audit["clients"] is None else audit["clients"]
    first = {max(number, joins.get(name, 1)) for number in audit["rounds"] for name in clients}
    return settings | {"rounds": sorted(first)}


def _name(config: FederationConfig) -> str:
    content = config.model_dump(mode="json", exclude={"name", "audit", "deployment"})
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
