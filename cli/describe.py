"""``bract describe``: propose ``bract.yaml`` for an app, and check it against the captures."""

from __future__ import annotations

import copy
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer
from rich.status import Status

from bract.audit.captures import Captures
from bract.audit.description.confirm import confirm
from bract.audit.description.draft import INFERRED
from bract.audit.description.infer import Findings, complete
from bract.audit.description.search_time import SECONDS, SearchTime
from bract.audit.description.witnessed import Witnessed, read_witnessed
from bract.audit.handled import why_unhandled
from bract.cli.console import print_json, say, stderr, working
from bract.disk.files import write_text
from bract.errors import BractError, listed, printable
from bract.inputs import INPUTS
from bract.inputs.base import what_is_audited
from bract.parse.strict_yaml import parse_yaml
from bract.rundir import RunDirectory
from bract.schema.description import DESCRIPTION, AppDescription
from bract.schema.description_text import build_description, dump_description

ASKED = {
    "input.mean": "Mean subtracted from the pixels (0 to 1), one value per channel",
    "input.std": "Standard deviation the pixels are divided by, one value per channel",
    "input.shape": "Shape of one input: channels,height,width",
    "training.optimizer": "Optimizer (sgd, adam)",
    "training.lr": "Learning rate of a local step",
    "training.batch_size": "Images of a local step",
    "training.local_epochs": "Passes of a client over its images in a round",
}
"""Guesses that a person on a terminal is asked about."""

_WORK = ("training.batch_size", "training.local_epochs", "training.local_steps")


def describe_app(
    root: Path,
    settings: Mapping[str, Any],
    *,
    model: str | None = None,
    truth: Path | None = None,
    work: Path | None = None,
    force: bool = False,
    seconds: float = SECONDS,
    as_json: bool = False,
) -> None:
    """Write or check ``bract.yaml`` of a folder with captures.

    A file that a person has edited is only replaced with ``force``, and one that what clients kept
    contradicts is only written with it.

    Parameters
    ----------
    settings
        Values by their dotted key, laid over the file.
    model
        Registered name or ``package.module:callable``, which is imported and called.
    work
        A file of `bract.client.witness` that holds for every client, as of the app's author.
    seconds
        Processor time in which another description is looked for.
    """
    run = RunDirectory.open(root)
    path = run.root / DESCRIPTION
    earlier = run.description()
    given = dict(settings) if model is None else {**settings, "model": model}
    asks = sys.stdin.isatty() and stderr.is_terminal
    where = _truth(run, truth)
    with run.reading():
        seen = read_witnessed(Captures(run.captures), where, work)
    if seen.unaudited is not None:
        raise BractError(f"{run.root}: {seen.unaudited}", code="model-unsuited")
    content, unlike = _witnessed(_laid_over(earlier, given), seen)
    if not content.get("model") and asks and not _declared_model(run):
        content["model"] = typer.prompt("Model, package.module:callable", err=True)
    # A model named on the command line, or typed here, may be imported and called.
    trusted = {given.get("model"), *([content.get("model")] if asks else [])} - {None}
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = _complete(run, content, trusted, where, seen)
        if asks:
            answers = _ask(found.description)
            if answers:
                content = _with(content, answers)
                found = _complete(run, content, trusted, where, seen)
        checking = "checking it on what clients kept; where that contradicts a guess, others are "
        with working(f"{checking}tried") if where is not None else nullcontext() as shown:
            clock = SearchTime(seconds, lambda words: _show(shown, words))
            found = _confirm(run, content, trusted, where, found, seen, clock, force=force)
    except BractError as error:
        if not seen.causes and seen.unlike is None:
            raise
        known = [seen.unlike] if seen.unlike is not None else []
        known += [_causes(seen)] if seen.causes else []
        raise BractError(f"{run.root}: {'; '.join(known)}; {error}", code=error.code) from None
    found.doubts += [*seen.doubts, *unlike, *([seen.unlike] if seen.unlike is not None else [])]
    text = dump_description(found.description)
    if earlier is not None and found.description == earlier:
        verdict = f"{path}: fits the captures"
    elif earlier is not None and not force and path.read_text() != dump_description(earlier):
        _tell(found)
        raise BractError(
            f"{path}: was edited, and {_differing(earlier, found.description)} would change; "
            "edit the file, or pass --force to write it anew (its comments are lost)",
            code="file-taken",
        )
    else:
        write_text(path, text)
        verdict = f"wrote {path}"
    _tell(found)
    say(f"done: {verdict}; next: {_audit(run, found.description, truth)}")
    if as_json:
        print_json(
            {
                "description": found.description.model_dump(mode="json", exclude_none=True),
                "confirmed": found.confirmed,
                "doubts": found.doubts,
            }
        )


def _complete(
    run: RunDirectory,
    content: Mapping[str, Any],
    trusted: set[Any],
    truth: Path | None,
    seen: Witnessed,
) -> Findings:
    description = build_description(content, source=str(run.root / DESCRIPTION))
    with run.reading():
        captures = Captures(run.captures, trusted, description)
        _check_input(run, description, captures)
        return complete(captures, description, truth=truth, counted=seen.counted)


def _confirm(
    run: RunDirectory,
    content: Mapping[str, Any],
    trusted: set[Any],
    truth: Path | None,
    found: Findings,
    seen: Witnessed,
    clock: SearchTime,
    *,
    force: bool,
) -> Findings:
    """Hold the description against what clients kept, before anything is written."""
    given = build_description(content, source=str(run.root / DESCRIPTION))
    with run.reading():
        captures = Captures(run.captures, trusted, found.description)
        found = confirm(
            captures,
            found,
            given,
            truth=truth,
            force=force,
            rounds=seen.rounds,
            look=not seen.causes,
            clock=clock,
        )
    if not seen.causes:
        return found
    if not found.is_confirmed and not force:
        raise BractError(
            "nothing confirms the description without it: pass --force to write it, or take it out "
            "of the training to audit it",
            code="declaration-wrong",
        )
    found.doubts.append(_causes(seen))
    unsimulated = tuple(cause[:500] for cause in seen.causes[:100])
    found.description = found.description.model_copy(update={"unsimulated": unsimulated})
    return found


def _show(status: object, words: str) -> None:
    """Show on a terminal which description is tried."""
    if isinstance(status, Status):
        status.update(printable(f"trying another description: {words or 'as described'}"))


def _causes(seen: Witnessed) -> str:
    return f"witnessed, and simulated by no attack: {listed(seen.causes)}"


def _witnessed(content: Mapping[str, Any], seen: Witnessed) -> tuple[dict[str, Any], list[str]]:
    """Return a description with what witnesses saw where nothing is declared, and contradictions.

    What an earlier description guessed, or took from witnesses, is no declaration.
    """
    old = copy.deepcopy(dict(content))
    old.pop("unsimulated", None)
    for key in [
        *old.pop("witnessed", {}),
        *(k for k in seen.values if k in old.get("guessed", {})),
    ]:
        _take_out(old, key)
    values = dict(build_description(old).given())
    if values.keys() & {"training.local_steps", "training.local_epochs"}:
        values |= {k: values.get(k) for k in ("training.local_steps", "training.local_epochs")}
    taken = {key: value for key, value in seen.values.items() if key not in values}
    unlike = [
        f"{key} is {_shown(values[key])}, and witnesses saw {_shown(value)} ({seen.reasons[key]})"
        for key, value in seen.values.items()
        if values.get(key) not in (None, value)
    ]
    laid = old
    for key, value in taken.items():
        *sections, last = key.split(".")
        target = laid
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    if taken:
        laid["witnessed"] = {key: seen.reasons[key] for key in taken}
    return laid, unlike


def _take_out(content: dict[str, Any], key: str) -> None:
    """Remove a dotted key, and that it was guessed."""
    content.get("guessed", {}).pop(key, None)
    *sections, last = key.split(".")
    target = content
    for section in sections:
        target = target.get(section, {})
    target.pop(last, None)


def _check_input(run: RunDirectory, description: AppDescription, captures: Captures) -> None:
    """Refuse an input that nothing is inferred of, by its name."""
    declared = {capture.declaration.input for capture in captures.index}
    for kind in [description.input.kind] if description.input.kind else sorted(declared):
        if reason := why_unhandled(kind):
            raise BractError(
                f"{run.root / DESCRIPTION}: input.kind: {reason}; {what_is_audited()}",
                code="input-mismatch",
            )
        if not INPUTS[kind].is_described:
            known = ", ".join(name for name in INPUTS if INPUTS[name].is_described)
            raise BractError(
                f"{run.root}: the clients train on the input {kind}; bract describe infers "
                f"{known} alone: declare everything in the app, with "
                "HonestButCurious(..., declaration=...), and audit without bract.yaml",
                code="input-mismatch",
            )


def _laid_over(earlier: AppDescription | None, given: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if earlier is not None:
        content = earlier.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return _with(content, given)


def _with(content: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with some dotted keys changed, which are no guesses any more."""
    changed = copy.deepcopy(dict(content))
    for key, value in values.items():
        if key in ("training.local_steps", "training.local_epochs"):
            for other in ("local_steps", "local_epochs"):
                changed.get("training", {}).pop(other, None)
                changed.get("guessed", {}).pop(f"training.{other}", None)
        if key in _WORK:
            _forget_clients(changed)
        *sections, last = key.split(".")
        target = changed
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise BractError(f"{key}: {section} holds a value, not keys", code="config-value")
        target[last] = value
        for source in ("guessed", "witnessed"):
            changed.get(source, {}).pop(key, None)
    return changed


def _forget_clients(content: dict[str, Any]) -> None:
    """Remove inferred steps of single clients, which now follow from the common section."""
    guessed, clients = content.get("guessed", {}), content.get("clients", {})
    for name in [name for name in clients if f"clients.{name}.batch_size" in guessed]:
        del guessed[f"clients.{name}.batch_size"]
        for key in ("batch_size", "local_steps"):
            clients[name].pop(key, None)
        if not clients[name]:
            del clients[name]


def _ask(description: AppDescription) -> dict[str, Any]:
    """Ask about guesses; return the changed values by their key."""
    values = description.given()
    answers = {}
    for key, question in ASKED.items():
        if key not in description.guessed:
            continue
        guess = _shown(values[key])
        typed = typer.prompt(question, default=guess, err=True)
        if typed != guess:
            answers[key] = parse_yaml(f"[{typed}]" if isinstance(values[key], tuple) else typed)
    return answers


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"of {len(value)} arrays"
    if isinstance(value, tuple | list) and any(isinstance(v, Mapping) for v in value):
        return f"of {len(value)} entries"
    if isinstance(value, tuple | list) and any(isinstance(v, str) for v in value):
        return listed(map(str, value))
    return ",".join(f"{v:g}" for v in value) if isinstance(value, tuple | list) else str(value)


def _truth(run: RunDirectory, truth: Path | None) -> Path | None:
    return truth or (run.truth if run.truth.is_dir() else None)


def _declared_model(run: RunDirectory) -> str | None:
    return next(
        (c.declaration.model for c in Captures(run.captures).index if c.declaration.model), None
    )


def _tell(found: Findings) -> None:
    for line in found.confirmed:
        say(f"fits: {line}")
    values = found.description.given()
    for key, reason in found.description.witnessed.items():
        say(f"witnessed: {key} {_shown(values[key])} ({reason})")
    for key, reason in found.description.guessed.items():
        source = "inferred" if reason.startswith(INFERRED) else "guessed"
        say(f"{source}: {key} {_shown(values[key])} ({reason.removeprefix(INFERRED)})")
    for line in found.doubts:
        say(f"warning: {line}")


def _differing(earlier: AppDescription, now: AppDescription) -> str:
    before, after = earlier.given(), now.given()
    keys: Sequence[str] = [k for k in after if before.get(k) != after[k]]
    return ", ".join(keys) or "what is guessed"


def _audit(run: RunDirectory, description: AppDescription, truth: Path | None) -> str:
    words = ["bract", "audit", str(run.root)]
    if description.model and ":" in description.model:
        words += ["--model", description.model]
    if truth is not None:
        words += ["--truth", str(truth)]
    return shlex.join(words)
