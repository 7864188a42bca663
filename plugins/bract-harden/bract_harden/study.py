"""Optuna's part of a search: which settings are proposed next, and which of them bought what."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bract.errors import BractError, one_line
from bract_harden.space_file import Range

FEWEST_TRIALS = 10
"""Attacked candidates below which no importance of settings is given."""


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
            "pip install 'bract[harden]'",
            code="package-missing",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def open_study(
    path: Path,
    *,
    trials: int,
    seed: int,
    starts: Sequence[Mapping[str, Any]],
    keys: Mapping[str, Sequence[Any] | Range],
) -> Any:
    """Open or begin the study of a search; what was interrupted in it is asked for again.

    Parameters
    ----------
    trials
        Candidates of the whole search; until a third of them were tried, those that are not
        enqueued are drawn at random.
    starts
        Settings that a new study tries first, at most half of ``trials``.
    keys
        Keys of the space, with their values.
    """
    optuna = load_optuna()
    sampler = optuna.samplers.TPESampler(
        multivariate=True, group=True, n_startup_trials=max(4, trials // 3), seed=seed
    )
    from sqlalchemy.exc import DatabaseError

    try:
        study = optuna.create_study(
            study_name="harden",
            storage=f"sqlite:///{path}",
            directions=["minimize", "maximize", "minimize"],
            sampler=sampler,
            load_if_exists=True,
        )
    except (DatabaseError, optuna.exceptions.StorageInternalError, RuntimeError) as error:
        raise BractError(
            f"{path}: cannot be opened as Optuna's study: {one_line(str(error), 200)}; remove it "
            "and pass --resume: what candidates/ holds is not trained again",
            code="file-damaged",
        ) from error
    if not study.trials:
        for setting in starts[: max(1, trials // 2)]:
            enqueue(study, setting, keys)
    for trial in study.get_trials(deepcopy=False):
        if trial.state == optuna.trial.TrialState.RUNNING:
            study.enqueue_trial(trial.params)
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def enqueue(
    study: Any, setting: Mapping[str, Any], keys: Mapping[str, Sequence[Any] | Range]
) -> None:
    """Have a study ask for a setting next; ``keys`` are those of its space, with their values."""
    params = {}
    for name, value in setting.items():
        among = keys.get(name)
        by_text = among is not None and not isinstance(among, Range) and not _plain(among)
        params[name] = json.dumps(value) if by_text else value
    study.enqueue_trial(params, skip_if_exists=True)


def _plain(choices: Sequence[Any]) -> bool:
    """Return whether Optuna can hold the choices themselves; others go by their text."""
    return all(isinstance(choice, str | int | float | bool | None) for choice in choices)


def is_waiting(study: Any) -> bool:
    """Return whether a study has enqueued trials that it did not ask for yet."""
    waiting = load_optuna().trial.TrialState.WAITING
    return bool(study.get_trials(deepcopy=False, states=(waiting,)))


def finished(study: Any) -> int:
    """Return how many trials have a result; one that was interrupted has none."""
    states = load_optuna().trial.TrialState
    return sum(
        t.state in (states.COMPLETE, states.PRUNED) or "error" in t.user_attrs
        for t in study.get_trials(deepcopy=False)
    )


class Ask:
    """Optuna's trial as `Space.suggest` asks it."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial

    def categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the choices; lists and mappings go by their text."""
        if _plain(choices):
            return self._trial.suggest_categorical(name, list(choices))
        texts = {json.dumps(choice): choice for choice in choices}
        return texts[self._trial.suggest_categorical(name, list(texts))]

    def number(self, name: str, among: Range) -> float:
        """Return a number of a range, to three significant digits."""
        if among.whole:
            return int(
                self._trial.suggest_int(name, int(among.low), int(among.high), log=among.log)
            )
        value = self._trial.suggest_float(name, among.low, among.high, log=among.log)
        return among.rounded(value)


def importance(study: Any) -> dict[str, dict[str, float]]:
    """Return the share of each objective's variance by setting; empty where it cannot be said."""
    optuna = load_optuna()
    found: dict[str, dict[str, float]] = {}
    warnings.filterwarnings("ignore", module=r"optuna\.importance")
    done = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    # A field of one chain has values in few trials: its share would be of those alone.
    shared = set.intersection(*(set(t.params) for t in done)) if done else set()
    if len(done) < FEWEST_TRIALS or len(shared) < 2:
        return found
    # Optuna's evaluator asks which settings lead to low values: of accuracy, to low losses of it.
    for position, (name, sign) in enumerate(
        (("leakage", 1.0), ("accuracy", -1.0), ("seconds", 1.0))
    ):
        try:
            shares = optuna.importance.get_param_importances(
                study,
                params=sorted(shared),
                target=lambda trial, at=position, by=sign: by * trial.values[at],
            )
        except (RuntimeError, ValueError, ZeroDivisionError, ImportError):
            continue
        found[name] = {key: float(value) for key, value in shares.items() if value > 0.0}
    return found
