"""The search: Optuna proposes candidates, and attacks of growing strength sort them.

Every candidate is trained once and attacked cheaply. One that no other beats so far is attacked
harder; and every point of the frontier is trained with several seeds and gets the full attack. A
point that leaks more under it than it seemed to may leave the frontier, which is recorded, and the
next one takes its place, until all points of the frontier had the full attack.

All is in one folder, and a search that was interrupted goes on there: ``study.db`` (Optuna's),
and ``candidates/NAME/`` with ``candidate.json`` and a run directory for each seed.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from bract.attacks.problem.evidence import has_attacker
from bract.config import FederationConfig, build_config
from bract.defenses.per_example import PerExample
from bract.deploy.harden.measure import measure, pooled, quiet
from bract.deploy.harden.space import Range, Search, Setting, Space, describe
from bract.errors import BractError, one_line
from bract.files import write_text
from bract.permissions import make_private_folder
from bract.schema.hardening import Candidate, Stage
from bract.strict_json import dump_json

BASE = "as configured"
LEAK_STEP, ACCURACY_STEP, COST_FACTOR = 0.02, 0.005, 1.5
"""Differences below which two candidates count as equal; of costs a factor."""

_log = logging.getLogger(__name__)


class Bench(Protocol):
    """How a federation is trained and attacked."""

    def train(self, config: FederationConfig, root: Path) -> float | None:
        """Train it into a run directory; return CPU seconds of a round, None if not known."""

    def attack(self, root: Path, settings: Mapping[str, Any]) -> None:
        """Attack a run directory in all tiers that apply, with these keys of the audit section."""


class Hardening:
    """One search and its folder.

    Parameters
    ----------
    say
        Takes one line about each step.
    """

    def __init__(
        self, root: Path, space: Space, bench: Bench, *, say: Callable[[str], None]
    ) -> None:
        self.root, self.space, self.bench, self.say = root, space, bench, say
        self.folder = root / "candidates"
        self.settings = space.file.search
        self.notes = list(space.notes)
        self._found: dict[str, Candidate] = {}
        self._importance: dict[str, dict[str, float]] = {}

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates so far, in the order in which they were tried."""
        return list(self._found.values())

    @property
    def control(self) -> Candidate | None:
        """The configuration as it was given."""
        return self._found.get(_name(self.space.base))

    def run(self) -> None:
        """Search, and hold the frontier to the full attack."""
        make_private_folder(self.folder)
        self._read()
        self._control()
        study = self._study()
        done = len([t for t in study.trials if t.state.is_finished()])
        while done < self.settings.trials:
            self._try(study, study.ask(), done + 1)
            done += 1
        self._confirm()
        self._importance = _importance(study)

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
        found = [c for c in pool if not any(_beats(other, c) for other in pool)]
        same: dict[tuple[float, ...], Candidate] = {}
        for one in sorted(found, key=lambda c: (c.stage != "full", c.leak, -(c.accuracy or 0.0))):
            same.setdefault(_rounded(one), one)
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
        if found.stage == "full" or found.error:
            return
        self._strengthen(found, self.space.base, "full", list(range(self.settings.seeds)))

    def _try(self, study: Any, trial: Any, number: int) -> None:
        from optuna.trial import TrialState

        setting = self.space.suggest(_Ask(trial))
        try:
            config = self.space.configure(setting)
        except BractError as error:
            trial.set_user_attr("infeasible", str(error))
            study.tell(trial, state=TrialState.PRUNED)
            return
        found = self._candidate(config, setting)
        trial.set_user_attr("candidate", found.name)
        where = f"candidate {number}/{self.settings.trials} {found.name}: {found.title}"
        if found.leak is None and not found.error:
            found = self._strengthen(found, config, "cheap", [0])
            if not found.error and self._is_good(found):
                found = self._strengthen(found, config, "middle", [0])
        if found.error:
            self.say(f"{where}: failed: {found.error}")
            study.tell(trial, state=TrialState.FAIL)
            return
        self.say(f"{where}: {in_words(found)}")
        study.tell(trial, _objectives(found))

    def _confirm(self) -> None:
        """Give the frontier the full attack until all of its points have had it."""
        while True:
            front = self.frontier()
            left = sorted(
                (c for c in front if c.stage != "full"), key=lambda c: (c.leak, -(c.accuracy or 0))
            )
            had = sum(c.stage == "full" for c in self.candidates)
            if not left or had >= self.settings.points + 1:
                if left:
                    self.notes.append(
                        f"{len(left)} candidates looked good to the cheaper attackers and did not "
                        f"get the full attack (search.points is {self.settings.points}): they are "
                        "not on the frontier."
                    )
                break
            one = left[0]
            self.say(f"full attack on {one.name}: {one.title}")
            self._strengthen(one, self.config(one), "full", list(range(self.settings.seeds)))
        front_names = {c.name for c in self.frontier(full=True)}
        for one in self.candidates:
            if one.stage == "full" and one.setting and one.name not in front_names:
                self._keep(one.model_copy(update={"dropped": self._why_dropped(one)}))

    def _why_dropped(self, one: Candidate) -> str:
        cheap = self._before.get(one.name)
        by = next((leak.attack for leak in one.leaks if leak.value == one.leak and leak.attack), "")
        if cheap is None or one.leak is None or one.leak <= cheap + LEAK_STEP:
            return "another point is at least as good in every respect"
        return f"leakage rose from {cheap:.2f} to {one.leak:.2f} under {by or 'the full attack'}"

    @property
    def _before(self) -> dict[str, float]:
        path = self.root / "before.json"
        found: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
        return found

    def _is_good(self, found: Candidate) -> bool:
        others = [c for c in self.candidates if c.name != found.name and c.leak is not None]
        return not any(_beats(other, found) for other in others)

    def _strengthen(
        self, found: Candidate, config: FederationConfig, stage: Stage, seeds: Sequence[int]
    ) -> Candidate:
        """Attack the candidate's federations by the attackers of a stage; keep what was found."""
        if stage == "full" and found.leak is not None:
            write_text(
                self.root / "before.json", json.dumps(self._before | {found.name: found.leak})
            )
        least = found.leak or 0.0
        begun = time.process_time()
        measures = {m.seed: m for m in found.measures}
        try:
            for seed in seeds:
                run = self.run_of(found, seed)
                known = measures.get(seed)
                seconds = known.seconds if known else self._train(config, run, seed)
                self.bench.attack(run, _settings(self.settings, stage, config))
                measures[seed] = measure(run, config, seed, seconds)
        except Exception as error:  # noqa: BLE001 - a candidate costs itself alone
            reason = one_line(str(error) or type(error).__name__, 500)
            if not isinstance(error, BractError):
                reason = f"{type(error).__name__}: {reason}"
                _log.debug("candidate %s", found.name, exc_info=True)
            return self._keep(found.model_copy(update={"stage": "crashed", "error": reason}))
        spent = (found.cpu_seconds or 0.0) + time.process_time() - begun
        update = {
            "stage": stage,
            "measures": [measures[s] for s in sorted(measures)],
            "cpu_seconds": spent,
        }
        found = pooled(found.model_copy(update=update), config)
        if len(seeds) == 1:
            # An earlier attacker of the same federation may have got more than this one.
            found = found.model_copy(update={"leak": max(least, found.leak or 0.0)})
        broken = violations(found, config, self.space, self.control)
        return self._keep(found.model_copy(update={"violated": broken}))

    def _train(self, config: FederationConfig, run: Path, seed: int) -> float | None:
        """Train from the start: what an interrupted search left half-made does not count."""
        timing = run.with_suffix(".json")
        if timing.is_file() and run.is_dir():
            kept: float | None = json.loads(timing.read_text())["seconds"]
            return kept
        shutil.rmtree(run, ignore_errors=True)
        seconds = self.bench.train(seeded(config, seed), run)
        write_text(timing, json.dumps({"seconds": seconds}))
        return seconds

    def _candidate(self, config: FederationConfig, setting: Setting) -> Candidate:
        name = _name(config)
        if name not in self._found:
            title = describe(config) if setting else f"{describe(config)}, {BASE}"
            self._found[name] = Candidate(name=name, title=title, setting=setting, stage="cheap")
        return self._found[name]

    def _keep(self, found: Candidate) -> Candidate:
        self._found[found.name] = found
        make_private_folder(self.folder / found.name)
        write_text(self.folder / found.name / "candidate.json", dump_json(found.to_dict()))
        return found

    def _read(self) -> None:
        paths = self.folder.glob("*/candidate.json")
        for path in sorted(paths, key=lambda p: p.stat().st_mtime):
            found = Candidate.parse_text(path.read_bytes(), source=str(path))
            self._found[found.name] = found

    def _study(self) -> Any:
        optuna = load_optuna()
        sampler = optuna.samplers.TPESampler(
            multivariate=True,
            group=True,
            n_startup_trials=max(4, self.settings.trials // 3),
            seed=self.space.base.seed + len(self._found),
        )
        study = optuna.create_study(
            study_name="harden",
            storage=f"sqlite:///{self.root / 'study.db'}",
            directions=["minimize", "maximize", "minimize"],
            sampler=sampler,
            load_if_exists=True,
        )
        # A trial that was interrupted is tried again.
        for trial in study.get_trials(deepcopy=False):
            if trial.state == optuna.trial.TrialState.RUNNING:
                study.enqueue_trial(trial.params)
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        if not study.trials:
            for name in self.space.names()[: max(1, self.settings.trials // 2)]:
                study.enqueue_trial({"defenses": name})
        return study


class _Ask:
    """Optuna's trial as `Space.suggest` asks it."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial

    def categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the choices; lists and mappings go by their text."""
        texts = {json.dumps(choice): choice for choice in choices}
        plain = [c for c in choices if isinstance(c, str | int | float | bool | None)]
        if len(plain) == len(choices):
            return self._trial.suggest_categorical(name, list(choices))
        return texts[self._trial.suggest_categorical(name, list(texts))]

    def number(self, name: str, among: Range) -> float:
        """Return a number of a range, to three significant digits."""
        if among.whole:
            return int(
                self._trial.suggest_int(name, int(among.low), int(among.high), log=among.log)
            )
        value = self._trial.suggest_float(name, among.low, among.high, log=among.log)
        return min(max(float(f"{value:.3g}"), among.low), among.high)


def load_optuna() -> Any:
    """Import Optuna, quietly.

    Raises
    ------
    BractError
        If it is not installed, with the command that installs it.
    """
    try:
        import optuna
    except ImportError:
        raise BractError(
            "bract harden searches with Optuna, which is not installed: "
            "pip install 'bract[audit,search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def in_words(found: Candidate) -> str:
    """Return what was measured of a candidate, in one line."""
    accuracy = "unknown" if found.accuracy is None else f"{found.accuracy:.3f}"
    return (
        f"leakage {found.leak or 0.0:.2f} ({found.stage} attack), accuracy {accuracy}, "
        f"{found.seconds or 0.0:.2f} s a round"
    )


def violations(
    found: Candidate, config: FederationConfig, space: Space, control: Candidate | None
) -> list[str]:
    """Return the constraints that a candidate does not keep, in words."""
    limits, said = space.file.constraints, []
    accuracy = found.accuracy
    if limits.accuracy is not None and (accuracy is None or accuracy < limits.accuracy):
        said.append(f"accuracy below {limits.accuracy:g}")
    before = control.accuracy if control else None
    if limits.accuracy_loss is not None and accuracy is not None and before is not None:
        lost = before - accuracy
        if lost > limits.accuracy_loss + 1e-9:
            said.append(f"accuracy lower by {lost:.3f}, allowed {limits.accuracy_loss:g}")
    if not adaptive(config):
        said.append("no adaptive attacker knows these defenses together")
    if limits.leak == "none" and not quiet(found, encrypted=config.encryption.uses_paillier):
        said.append("a leak, or no decision, by the rule of the page")
    if limits.epsilon is not None and (found.epsilon is None or found.epsilon > limits.epsilon):
        said.append(f"epsilon above {limits.epsilon:g}")
    if limits.seconds is not None and (found.seconds or 0.0) > limits.seconds:
        said.append(f"more than {limits.seconds:g} s a round")
    if limits.bytes is not None and (found.bytes or 0.0) > limits.bytes:
        said.append(f"more than {limits.bytes} bytes an upload")
    return said


def adaptive(config: FederationConfig) -> bool:
    """Whether an adaptive attacker reads uploads of a configuration's defenses."""
    names = [str(entry["name"]) for entry in config.defenses]
    if config.training.private is not None:
        names.insert(0, PerExample.name)
    return has_attacker(names)


def seeded(config: FederationConfig, seed: int) -> FederationConfig:
    """Return the federation of a further seed; 0 is the configuration's own."""
    content = config.model_dump(mode="json")
    content |= {"seed": (config.seed + seed) % 2**31, "truth": True}
    content["capture"]["store"] = None
    return build_config(content).as_own_word()


def _settings(search: Search, stage: Stage, config: FederationConfig) -> dict[str, Any]:
    if stage == "full":
        return dict(search.full)
    first = (config.audit.rounds or [1])[:1]
    shared = {k: v for k, v in search.full.items() if k in ("clients", "max_images")}
    shared |= {"rounds": first, "attacks": config.audit.attacks[:1]}
    own: dict[str, Any] = search.cheap if stage == "cheap" else search.middle
    return shared | own


def _objectives(found: Candidate) -> tuple[float, float, float]:
    return found.leak or 0.0, found.accuracy or 0.0, found.seconds or 0.0


def _rounded(found: Candidate) -> tuple[float, ...]:
    leak, accuracy, seconds = _objectives(found)
    cost = math.log(max(seconds, 1e-3)) / math.log(COST_FACTOR)
    return round(leak / LEAK_STEP), -round(accuracy / ACCURACY_STEP), round(cost)


def _beats(one: Candidate, other: Candidate) -> bool:
    """Whether a candidate is at least as good in every respect and better in one."""
    first, second = _rounded(one), _rounded(other)
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))


def _name(config: FederationConfig) -> str:
    content = config.model_dump(mode="json", exclude={"name", "audit", "deployment"})
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _importance(study: Any) -> dict[str, dict[str, float]]:
    optuna = load_optuna()
    found: dict[str, dict[str, float]] = {}
    warnings.filterwarnings("ignore", module=r"optuna\.importance")
    # Optuna's evaluator asks which settings lead to low values: of accuracy, to low losses of it.
    for position, (name, sign) in enumerate(
        (("leakage", 1.0), ("accuracy", -1.0), ("seconds", 1.0))
    ):
        try:
            shares = optuna.importance.get_param_importances(
                study, target=lambda trial, at=position, by=sign: by * trial.values[at]
            )
        except (RuntimeError, ValueError, ZeroDivisionError, ImportError):
            continue
        found[name] = {key: float(value) for key, value in shares.items() if math.isfinite(value)}
    return found
