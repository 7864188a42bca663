"""Take what witnesses saw at clients (`bract.client.witness`) as values of a description.

The files are their clients': every value is checked when it is read, and the description that they
make is held against the captures like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bract.attacks.problem.step_rules import BETAS
from bract.audit.captures import Capture, Captures
from bract.audit.description.truth_check import REPLAYED_STEPS
from bract.audit.truth import truth_path
from bract.config.work import MOST_FACTORS
from bract.errors import BractError, listed, one_line
from bract.models.losses import RECONSTRUCTION
from bract.protocol.observation import ClientDeclaration
from bract.schema.description import planned_steps
from bract.schema.work import (
    GroupSeen,
    LossTerm,
    OptimizerSeen,
    Settings,
    Work,
    read_work,
    work_name,
)

ALIKE = 1e-6
"""Relative difference up to which two witnessed numbers are one."""

_LOSSES = {
    "cross_entropy": "cross_entropy",
    "nll_loss": "cross_entropy",
    "binary_cross_entropy": "binary_cross_entropy",
    "binary_cross_entropy_with_logits": "binary_cross_entropy_logits",
    "mse_loss": "mse",
    "l1_loss": "mae",
    "smooth_l1_loss": "huber",
    "huber_loss": "huber",
}
"""Names of `bract.models.losses` by PyTorch's; nll of log-probabilities is their cross entropy."""

_SIMULATED: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"dampening": 0.0, "maximize": False},
    "Adam": {"eps": 1e-8, "amsgrad": False, "maximize": False},
    "AdamW": {"eps": 1e-8, "amsgrad": False, "maximize": False},
    "RMSprop": {"alpha": 0.99, "eps": 1e-8, "centered": False, "maximize": False},
}
"""Settings of PyTorch's optimizers with which attacks simulate them, besides those declared."""


@dataclass
class Said:
    """Values of one file by their dotted key, and causes why no attack simulates all of it.

    ``notes`` says of a value what else than the training's own argument is in it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    unaudited: str | None = None


@dataclass
class Witnessed:
    """Values that witnesses saw, as far as a description holds them.

    Attributes
    ----------
    values, reasons
        Values by their dotted key, and at which clients each was seen.
    causes
        What was seen that no attack simulates, in words.
    doubts
        Files that could not be read, and what differs between rounds.
    rounds
        The rounds for which the values hold; None for all.
    unaudited
        Why an audit handles no such training; None where it does.
    """

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    rounds: frozenset[int] | None = None
    unaudited: str | None = None


def read_witnessed(captures: Captures, truth: Path | None, work: Path | None) -> Witnessed:
    """Read what witnesses saw of these captures, or the one file that an operator names.

    Parameters
    ----------
    truth
        Folder of what clients kept; a file there that cannot be read is a doubt.
    work
        A file that holds for every client; it comes before those beside the truth.

    Raises
    ------
    BractError
        If ``work`` cannot be read.
    """
    if work is not None:
        said = say(read_work(work), _declared_alike(captures))
        source = f"as {one_line(work.name, 100)} says"
        reasons = {key: source + said.notes.get(key, "") for key in said.values}
        return Witnessed(said.values, reasons, said.causes, unaudited=said.unaudited)
    found = Witnessed()
    by_client: dict[str, dict[int, Said]] = {}
    for capture in captures.index if truth is not None else ():
        assert truth is not None
        path = truth_path(truth, capture.client, capture).with_name(work_name(capture.round))
        if not path.is_file():
            continue
        try:
            seen = read_work(path)
        except BractError as error:
            found.doubts.append(f"not used: {one_line(error, 300)}")
            continue
        by_client.setdefault(capture.client, {})[capture.round] = say(seen, capture.declaration)
    if by_client:
        _merge(found, by_client, captures.index)
    return found


def _declared_alike(captures: Captures) -> ClientDeclaration:
    """Return a declaration without a number of examples, unless all clients have the same."""
    known = [capture.declaration for capture in captures.index]
    if not known:
        return ClientDeclaration()
    counts = {one.num_examples for one in known}
    return known[0] if len(counts) == 1 else known[0].updated({"num_examples": None})


def _merge(
    found: Witnessed, by_client: Mapping[str, Mapping[int, Said]], index: Sequence[Capture]
) -> None:
    """Lay together what clients saw: common values for all, others for one client."""
    firsts = {client: rounds[min(rounds)] for client, rounds in by_client.items()}
    for said in firsts.values():
        found.causes += [cause for cause in said.causes if cause not in found.causes]
        found.unaudited = found.unaudited or said.unaudited
    who = _named(sorted(firsts))
    for key in dict.fromkeys(key for said in firsts.values() for key in said.values):
        values = [said.values.get(key) for said in firsts.values()]
        section, _, name = key.partition(".")
        if all(_same(value, values[0]) for value in values[1:]) and key != "num_examples":
            note = next(iter(firsts.values())).notes.get(key, "")
            found.values[key], found.reasons[key] = values[0], f"seen at {who}{note}"
        elif section == "training" or key == "num_examples":
            for client, said in firsts.items():
                if said.values.get(key) is not None:
                    own = f"clients.{client}.{name or key}"
                    found.values[own] = said.values[key]
                    found.reasons[own] = f"seen at {client}{said.notes.get(key, '')}"
        else:
            found.causes.append(f"clients have different values of {key}")
    _compare_rounds(found, by_client, index)


def _compare_rounds(
    found: Witnessed, by_client: Mapping[str, Mapping[int, Said]], index: Sequence[Capture]
) -> None:
    """Find the rounds for which the first one's values hold."""
    declared = {(c.client, c.round): c.declaration.lr for c in index}
    numbers = sorted({number for rounds in by_client.values() for number in rounds})
    if len(numbers) < 2:
        return
    by_message = all(
        _same(said.values.get("training.lr"), declared.get((client, number)))
        for client, rounds in by_client.items()
        for number, said in rounds.items()
    )
    if by_message:
        # The train message of each round names its rate.
        for key in [k for k in found.values if k.rpartition(".")[2] == "lr"]:
            del found.values[key], found.reasons[key]
    differing: dict[str, None] = {}
    holding = set(numbers)
    for rounds in by_client.values():
        first = rounds[min(rounds)].values
        for number, said in rounds.items():
            keys = [
                key
                for key in first.keys() | said.values.keys()
                if not (by_message and key == "training.lr") and key != "num_examples"
                if not _same(first.get(key), said.values.get(key))
            ]
            if keys:
                holding.discard(number)
                differing |= dict.fromkeys(sorted(keys))
    if differing:
        found.rounds = frozenset(holding)
        shown = ", ".join(map(str, sorted(holding)[:5]))
        found.doubts.append(
            f"{', '.join(differing)} differ between rounds; what is described holds for round "
            f"{shown}: audit with --rounds {min(holding)}"
        )


def say(work: Work, declared: ClientDeclaration) -> Said:
    """Return what a work says as values of a description, and what none of them says.

    Parameters
    ----------
    declared
        Of the same client and round; its number of examples is what steps are counted by.
    """
    said = Said()
    if not work.whole:
        said.causes.append("the training ended with an error")
    if work.steps and not work.forwards:
        said.causes.append("no forward pass of the witnessed model was seen")
    scale = _say_loss(said, work)
    _say_optimizer(said, work, scale)
    _say_steps(said, work, declared)
    _say_modes(said, work)
    return said


def _say_loss(said: Said, work: Work) -> float | None:
    """Say the loss; return what multiplies the mean loss over the examples of a step."""
    if work.remainder:
        said.causes.append("a term that is no loss function of PyTorch is added to the loss")
    if not work.terms:
        if work.backwards:
            said.causes.append("no loss function of PyTorch was seen")
        return None
    if len(work.terms) > 1:
        said.causes.append(_several(work.terms))
        return None
    term = work.terms[0]
    kind = _kind(work)
    said.unaudited = _unaudited(term, kind)
    _say_arguments(said, term, work)
    name = RECONSTRUCTION if term.rebuilds and term.name == "mse_loss" else _LOSSES.get(term.name)
    if name is None:
        said.causes.append(f"the loss is {term.name}")
    elif kind == "image":
        said.values["loss"] = name
    if term.scale is None:
        said.causes.append("examples count differently in the loss")
        return None
    if not work.even:
        said.causes.append(
            "the loss is summed over batches of different sizes"
            if term.reduction == "sum"
            else "the loss differs between steps"
        )
        return None
    per_step = work.backwards / _lockstep(work) if _lockstep(work) else 1.0
    if per_step != round(per_step):
        said.causes.append("steps follow different numbers of backward passes")
        return None
    if per_step > 1 and any(one.kind == "normalisation" and one.training for one in work.layers):
        said.causes.append(
            f"gradients of {per_step:.0f} passes are accumulated, each normalised by itself"
        )
    return term.scale * per_step


def _several(terms: Sequence[LossTerm]) -> str:
    names = listed(f"{t.factor or 1.0:.3g} x {t.name}" for t in terms)
    alike = {t.name for t in terms} == {"cross_entropy"} and len({t.outputs for t in terms}) == 1
    return f"the loss is a sum of terms: {names}" + (" (as of mixup)" if alike else "")


def _say_arguments(said: Said, term: LossTerm, work: Work) -> None:
    weighted = term.weight is not None and len(set(term.weight)) > 1
    if weighted and term.weight is not None:
        if _is_of_examples(term, work) and term.reduction == "mean" and min(term.weight) >= 0.0:
            said.values["training.class_weights"] = tuple(map(_plain, term.weight))
        else:
            said.causes.append(f"class weights {_numbers(term.weight)} enter the loss")
    if term.label_smoothing:
        if _is_of_examples(term, work):
            said.values["training.label_smoothing"] = _plain(term.label_smoothing)
        else:
            said.causes.append(f"label smoothing {term.label_smoothing:g}")
    if term.pos_weight is not None and set(term.pos_weight) != {1.0}:
        said.causes.append(f"weights of positives {_numbers(term.pos_weight)} enter the loss")
    if term.settings.get("weighted"):
        said.causes.append("weights of examples enter the loss")
    if term.soft and term.targets == term.outputs:
        said.causes.append("targets of cross entropy are probabilities")
    for key in ("beta", "delta"):
        if term.settings.get(key, 1.0) != 1.0:
            said.causes.append(f"{term.name} has {key} {term.settings[key]}")


def _is_of_examples(term: LossTerm, work: Work) -> bool:
    """Return whether a loss is cross entropy of one class an example."""
    first = next((one for one in work.inputs if one.shape), None)
    whole = len(term.outputs) == 2 and first is not None and term.outputs[0] == first.shape[0]
    return _LOSSES.get(term.name) == "cross_entropy" and whole


def _kind(work: Work) -> str:
    """Return which input entered the model: ``text``, ``table`` or ``image``."""
    names = [one.name for one in work.inputs]
    first = next((one for one in work.inputs if one.shape), None)
    if "input_ids" in names or (first is not None and "int" in first.dtype):
        return "text"
    return "table" if first is not None and len(first.shape) == 2 else "image"


def _unaudited(term: LossTerm, kind: str) -> str | None:
    if kind != "image" or term.rebuilds:
        return None
    if len(term.outputs) > 2:
        return (
            f"the clients' loss is {term.name} of outputs {list(term.outputs)}, values at every "
            "place: segmentation is not audited"
        )
    of_values = _LOSSES.get(term.name) not in (None, "cross_entropy")
    if of_values and len(term.outputs) == 2 and term.outputs[1] > 1:
        return (
            f"the clients' loss is {term.name} over {term.outputs[1]} values an example: several "
            "labels or numbers an example are not audited"
        )
    return None


def _say_optimizer(said: Said, work: Work, scale: float | None) -> None:
    optimizers = work.optimizers
    if not optimizers:
        said.causes.append("no optimizer of PyTorch made a step")
        return
    first = optimizers[0]
    for other in optimizers[1:]:
        if not _alike(first, other):
            names = listed(sorted({one.name for one in optimizers}))
            said.causes.append(f"{len(optimizers)} optimizers ({names}) train the model")
            return
    if first.resumed:
        said.causes.append("the optimizer began with moments of earlier rounds")
    groups = [group for group in first.groups if group.names] or list(first.groups)
    settings = groups[0].settings if groups else {}
    for key in sorted({k for group in groups for k in group.settings}):
        if any(not _same(group.settings.get(key), settings.get(key)) for group in groups[1:]):
            said.causes.append(f"groups of parameters have different values of {key}")
    rates = _rates(said, first, groups, settings)
    if first.name not in _SIMULATED or not first.module.startswith("torch.optim"):
        said.values["training.optimizer"] = one_line(first.name.lower(), 64)
        said.causes.append(f"the optimizer is {one_line(first.name, 64)}")
        return
    for key, usual in _SIMULATED[first.name].items():
        held = settings.get(key, usual)
        if not _same(held, usual) and not (key == "dampening" and not settings.get("momentum")):
            said.causes.append(f"{first.name} has {key} {held}")
    betas = settings.get("betas")
    if isinstance(betas, tuple) and len(betas) == 2 and not _same(betas, BETAS):
        said.values["training.betas"] = betas
    momentum = _number(settings.get("momentum", 0.0))
    name = first.name.lower()
    if name == "sgd" and settings.get("nesterov"):
        name = "nesterov"
    rate, decay = _number(settings.get("lr")), _number(settings.get("weight_decay", 0.0))
    if rates:
        rate = max(rates)
        said.values["training.lr_factors"] = tuple(_plain(one / rate) for one in rates)
        if work.steps > REPLAYED_STEPS and (name != "sgd" or momentum):
            said.causes.append(f"lr changes within a round of {len(rates)} steps")
    shown = f": {rate:g}"
    if scale is not None and not _same(scale, 1.0) and scale > 0.0:
        shown += f", times {scale:.4g} by which the loss is that of a mean over the step"
        rate = rate * scale if name in ("sgd", "nesterov") else rate
        decay = decay if name == "adamw" else decay / scale
    clipping = _clipping(said, work, scale)
    if clipping < 1.0:
        shown += f", times {clipping:.4g} by which the gradient was clipped"
    rate *= clipping
    said.values |= {
        "training.optimizer": name,
        "training.momentum": momentum if 0.0 <= momentum < 1.0 else 0.0,
        "training.weight_decay": max(0.0, decay),
    }
    if rate > 0.0 and math.isfinite(rate):
        said.values["training.lr"] = _plain(rate)
        if shown.count(","):
            said.notes["training.lr"] = shown


def _rates(
    said: Said, first: OptimizerSeen, groups: Sequence[GroupSeen], settings: Settings
) -> list[float]:
    """Return the learning rate of each step where it changes; name any other change."""
    for key in sorted({k for change in first.changes for k in change.settings} - {"lr"}):
        values = [c.settings[key] for c in first.changes if key in c.settings]
        said.causes.append(
            f"{key} changes within a round, from {settings.get(key)} to {values[-1]}"
        )
    changes = [change for change in first.changes if "lr" in change.settings]
    if not changes:
        return []
    tracks = []
    for number, group in enumerate(first.groups):
        if group not in groups:
            continue
        rate, track = _number(group.settings.get("lr")), []
        mine = {c.step: _number(c.settings["lr"]) for c in changes if c.group == number}
        for step in range(min(first.steps, MOST_FACTORS)):
            rate = mine.get(step, rate)
            track.append(rate)
        tracks.append(track)
    known = not first.left_out and first.steps <= MOST_FACTORS
    if known and all(_same(track, tracks[0]) for track in tracks) and max(tracks[0]) > 0.0:
        return tracks[0]
    shown = f"from {settings.get('lr')} to {changes[-1].settings['lr']}"
    said.causes.append(f"lr changes within a round, {shown}, and differs between parameters")
    return []


def _clipping(said: Said, work: Work, scale: float | None) -> float:
    """Return the factor by which clipping shortened the only step; name what is not simulated.

    Of several steps the norm is described.
    """
    first = work.optimizers[0]
    reached = [clip for clip in work.clips if clip.reached]
    if work.steps == 1 and not reached:
        return 1.0
    plain = first.name == "SGD" and not _number(first.groups[0].settings.get("weight_decay", 0.0))
    if work.steps == len(reached) == 1 and reached[0].kind == "norm" and plain:
        return reached[0].least or 1.0
    if len(work.clips) == 1 and len(work.optimizers) == 1 and scale is not None and scale > 0.0:
        clip = work.clips[0]
        tensors = sum(len(group.names) for group in first.groups)
        whole = clip.kind == "norm" and clip.norm_type == 2.0 and clip.tensors in (0, tensors)
        each = clip.steps == work.steps
        if whole and each and clip.bound > 0.0:
            said.values["training.max_grad_norm"] = _plain(clip.bound / scale)
            if not reached or work.steps <= REPLAYED_STEPS:
                return 1.0
    for clip in reached:
        said.causes.append(f"gradients are clipped to a {clip.kind} of {clip.bound:g}")
    return 1.0


def _say_steps(said: Said, work: Work, declared: ClientDeclaration) -> None:
    steps = _lockstep(work)
    if not steps or not work.examples:
        return
    batch = max(work.examples)
    kept, known = work.distinct, declared.num_examples
    if known is not None and kept > known and work.passes <= 1 and sum(work.examples) == kept:
        said.values["num_examples"] = known = kept
    said.values["training.batch_size"] = batch
    count = known or kept or None
    drop = work.loader is not None and work.loader.drop_last
    if count is not None:
        epochs = work.passes or max(1, round(sum(work.examples) / count))
        for dropped in (drop, not drop):
            if planned_steps(count, min(batch, count), epochs, dropped) == steps:
                said.values["training.local_epochs"] = epochs
                if dropped and count % batch:
                    said.values["training.drop_last"] = True
                break
        else:
            said.values["training.local_steps"] = steps
    else:
        said.values["training.local_steps"] = steps
    left = count % batch if count else 0
    if len(work.examples) == steps and set(work.examples) - {batch, left or batch}:
        said.causes.append("steps take different numbers of examples")


def _say_modes(said: Said, work: Work) -> None:
    modes = {one.training for one in work.layers if one.kind == "normalisation"}
    if len(modes) == 1:
        said.values["norm_mode"] = "train" if modes == {True} else "eval"
    elif modes:
        said.causes.append("some normalisations run in training mode, and others do not")
    dropping = {one.training for one in work.layers if one.kind == "dropout" and one.rate}
    if dropping == {False}:
        said.values["training.dropout"] = 0.0


def _lockstep(work: Work) -> int:
    """Return the steps of the training: those of one optimizer, where several step together."""
    return max((one.steps for one in work.optimizers), default=0)


def _alike(one: OptimizerSeen, other: OptimizerSeen) -> bool:
    def settings(seen: OptimizerSeen) -> list[Any]:
        return [dict(group.settings) for group in seen.groups if group.names]

    return (one.name, one.steps, one.changes) == (other.name, other.steps, other.changes) and all(
        a == b for a in settings(one) for b in settings(other)
    )


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else 0.0  # type: ignore[arg-type]


def _plain(value: float) -> float:
    """Return a number as people write it, where that is nearly the same."""
    short = float(f"{value:.4g}")
    return short if abs(short - value) <= ALIKE * abs(value) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return bool(one == other)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= ALIKE * max(abs(one), abs(other))
    return bool(one == other)


def _numbers(values: Sequence[float]) -> str:
    return listed((f"{value:.3g}" for value in values), most=8)


def _named(clients: Sequence[str]) -> str:
    return clients[0] if len(clients) == 1 else f"{clients[0]} and {len(clients) - 1} more"
