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

from bract.audit.captures import Capture, Captures
from bract.audit.description.facts import read_tensors
from bract.audit.description.said import Said, plain, same
from bract.audit.description.witnessed_steps import lockstep, say_optimizer
from bract.audit.truth import truth_path
from bract.captures.observation import ClientDeclaration
from bract.errors import BractError, listed, one_line
from bract.models.losses import RECONSTRUCTION
from bract.schema.described_work import planned_steps
from bract.schema.work import MOST_KEPT, OF_PARTS, LossTerm, Work, read_work, work_name
from bract.updates.projection import projection

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


_USUAL: Mapping[tuple[str, tuple[str, ...]], str] = {
    ("nll_loss", ("logsoftmax",)): "cross_entropy",
    ("binary_cross_entropy", ("sigmoid",)): "binary_cross_entropy_logits",
}
"""Losses of a model's output by PyTorch's name and what the training does before it."""

EARLIER = (
    "an earlier bract witnessed the training: it did not see inputs that differ between passes, "
    "steps that were skipped, inputs that another network computed, weights, gradients and outputs "
    "that were changed by hand, rounds of several blocks, to which of several passes a loss "
    "belongs, or whether what was returned is what training ended with"
)


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
    unlike
        What was returned is not what training ended with, in words; None where it is.
    counted
        Passes that batch normalisation counted, by client and round.
    """

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    rounds: frozenset[int] | None = None
    unaudited: str | None = None
    unlike: str | None = None
    counted: dict[tuple[str, int], int] = field(default_factory=dict)


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
        seen = read_work(work)
        said = say(seen, _declared_alike(captures))
        source = f"as {one_line(work.name, 100)} says"
        reasons = {key: source + said.notes.get(key, "") for key in said.values}
        doubts = [] if seen.is_whole else [EARLIER]
        return Witnessed(said.values, reasons, said.causes, doubts, unaudited=said.unaudited)
    found = Witnessed()
    by_client: dict[str, dict[int, Said]] = {}
    earlier = False
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
        earlier = earlier or not seen.is_whole
        if seen.normalised is not None:
            found.counted[capture.client, capture.round] = seen.normalised
        by_client.setdefault(capture.client, {})[capture.round] = say(seen, capture.declaration)
        found.unlike = found.unlike or _unlike(captures, capture, seen)
    if earlier:
        found.doubts.append(EARLIER)
    if by_client:
        _merge(found, by_client, captures.index)
    return found


_APART = 0.1
"""Share of an update, in the one number that a witness keeps of it, up to which what was returned
is what the training ended with; rounding to 16 bits leaves less in most tensors."""


def _unlike(captures: Captures, capture: Capture, seen: Work) -> str | None:
    """Say where a client returned other values than its training ended with, if it names any."""
    if capture.declaration.defenses:
        return None
    try:
        observation = read_tensors(captures.root, capture)
    except BractError:
        return None
    wrong, compared = [], 0
    for name, ended in seen.ends.items():
        sent, update = observation.parameters.get(name), observation.update.get(name)
        if sent is None or update is None or ended is None or not bool(update.any()):
            continue
        compared += 1
        root = math.sqrt(update.numel())
        exact = 1e-6 * float(sent.double().norm()) / root
        allowed = _APART * float(update.double().norm()) / root + exact
        if abs(projection(sent - update) - ended) > allowed:
            wrong.append(name)
    if len(wrong) * 2 <= compared:
        return None
    return (
        f"{capture.key}: the client did not return what its training ended with "
        f"({listed(wrong, 3)} are others): an average of weights, those of another epoch, "
        "or changed after training"
    )


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
        if all(same(value, values[0]) for value in values[1:]) and key != "num_examples":
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
        same(said.values.get("training.lr"), declared.get((client, number)))
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
                if not same(first.get(key), said.values.get(key))
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
    data = work.forwards - work.computed - work.drawn
    if data > 0 and work.terms and not (work.distinct or work.unclear):
        said.causes.append("of no pass of the model its targets were seen, so nothing is kept")
    if work.unclear:
        said.causes.append("it was not seen to which pass of several a loss belongs")
    if work.computed:
        said.causes.append(
            f"inputs of {work.computed} of {work.forwards} passes are what another network "
            "computed (a generator, a teacher, a feature extractor)"
        )
    if work.drawn:
        said.causes.append(
            f"inputs or targets of {work.drawn} of {work.forwards} passes are random numbers (as "
            "of a generator, or in diffusion)"
        )
    if work.blocks > 1:
        said.causes.append(
            f"the round was trained in {work.blocks} blocks of a witness, of which the last one is "
            "described: put one around all of it"
        )
    if work.edited and work.steps:
        said.causes.append(
            "weights change outside of an optimizer's steps, as by an average, Lookahead, SAM, the "
            "best epoch or clipped weights"
        )
    if work.turned:
        hint = " (of FedProx declare --set training.proximal_mu=MU)"
        said.causes.append(
            "gradients change between the backward pass and the step, as by noise, a factor, a "
            f"mean that is taken off or a term{'' if declared.proximal_mu else hint}"
        )
    scale = _say_loss(said, work, declared)
    say_optimizer(said, work, scale)
    _say_steps(said, work, declared)
    _say_modes(said, work)
    if work.anew:
        said.values["training.augmentation"] = work.transforms or ("other inputs in each pass",)
    return said


def _say_loss(said: Said, work: Work, declared: ClientDeclaration) -> float | None:
    """Say the loss; return what multiplies the mean loss over the examples of a step."""
    if work.remainder:
        hint = " (where it is FedProx's, declare --set training.proximal_mu=MU)"
        said.causes.append(
            "a term that is no loss function of PyTorch is added to the loss"
            + (hint if not declared.proximal_mu else "")
        )
    if not work.terms:
        if work.steps or work.backwards:
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
    usual = _USUAL.get((term.name, term.through))
    changes = [one for one in term.through if kind != "text" or one not in OF_PARTS]
    name = usual or name
    if changes and usual is None:
        said.causes.append(
            f"the model's output is changed before it enters the loss ({listed(changes)})"
        )
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
    per_step = work.backwards / lockstep(work) if lockstep(work) else 1.0
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
        usual = _is_of_examples(term, work) and term.reduction == "mean" and not term.soft
        if usual and min(term.weight) >= 0.0:
            said.values["training.class_weights"] = tuple(map(plain, term.weight))
        else:
            said.causes.append(f"class weights {_numbers(term.weight)} enter the loss")
    if term.label_smoothing:
        if _is_of_examples(term, work):
            said.values["training.label_smoothing"] = plain(term.label_smoothing)
        else:
            said.causes.append(f"label smoothing {term.label_smoothing:g}")
    if term.pos_weight is not None and set(term.pos_weight) != {1.0}:
        said.causes.append(f"weights of positives {_numbers(term.pos_weight)} enter the loss")
    if term.settings.get("weighted"):
        said.causes.append("weights of examples enter the loss")
    if term.soft:
        if _is_of_examples(term, work) and _kind(work) == "image":
            said.values["training.soft_targets"] = True
        else:
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
    binary = _LOSSES.get(term.name) in ("binary_cross_entropy", "binary_cross_entropy_logits")
    if binary and len(term.outputs) == 2 and term.outputs[1] > 1:
        return (
            f"the clients' loss is {term.name} over {term.outputs[1]} values an example: several "
            "labels an example are not audited"
        )
    return None


def _say_steps(said: Said, work: Work, declared: ClientDeclaration) -> None:
    steps = lockstep(work)
    if not steps or not work.examples:
        return
    batch = max(work.examples)
    kept, known, passes = work.distinct, declared.num_examples, work.passes
    if any(term.soft for term in work.terms) and kept == sum(work.examples):
        passes = 1  # mixed anew in each pass, and kept
    if known is not None and kept > known and passes <= 1 and sum(work.examples) == kept:
        said.values["num_examples"] = known = kept
    mixed = any(term.soft for term in work.terms)
    whole = (work.loader.examples if work.loader is not None else None) or kept
    if known is not None and 0 < kept <= whole < min(known, sum(work.examples), MOST_KEPT):
        # As of a reply that counts the examples of every pass.
        said.values["num_examples"] = known = whole
    # Of weights that are moved and moved back a batch enters twice, too.
    drawn = work.passes == 1 and not mixed and not work.edited
    if drawn and 0 < kept < min(sum(work.examples), MOST_KEPT):
        said.causes.append(
            f"{sum(work.examples)} examples of one pass are {kept} different ones, as under a "
            "sampler that draws with replacement"
        )
    said.values["training.batch_size"] = batch
    count = known or kept or None
    drop = work.loader is not None and work.loader.drop_last
    if count is not None:
        epochs = passes or max(1, round(sum(work.examples) / count))
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


def _numbers(values: Sequence[float]) -> str:
    return listed((f"{value:.3g}" for value in values), most=8)


def _named(clients: Sequence[str]) -> str:
    return clients[0] if len(clients) == 1 else f"{clients[0]} and {len(clients) - 1} more"
