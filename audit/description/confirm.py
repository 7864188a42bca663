"""Confirm a completed description on what clients kept, or find the nearest one that explains."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bract.attacks.problem.case import Case
from bract.attacks.task import AttackTask, open_cases
from bract.audit.captures import Capture, Captures, Lazy
from bract.audit.description.alternatives import Alternative
from bract.audit.description.check import check_case, with_noise, without_truth
from bract.audit.description.draft import INFERRED
from bract.audit.description.facts import is_unmoved
from bract.audit.description.infer import Findings
from bract.audit.description.invariants import failing_invariants
from bract.audit.description.model import UNSENT_NORMS
from bract.audit.description.noise import is_other_loss, undeclared_noise
from bract.audit.description.search_time import SearchTime
from bract.audit.truth import load_truth
from bract.captures.observation import Observation
from bract.errors import BractError, listed, one_line
from bract.models.losses import RECONSTRUCTION
from bract.schema.check import DescriptionCheck
from bract.schema.description import AppDescription
from bract.schema.description_text import build_description

_log = logging.getLogger(__name__)

MOST = 8
"""Uploads that are repeated, the first ones by round."""

FEWEST, SECONDS = 2, 2.0
"""Uploads that are repeated in any case, and processor time after which no other one is begun."""

SHOWN = 3
"""Tensors that are named."""

MOSTLY = 0.5
"""Share of the difference from which on it is one tensor's."""

_KEYS = {
    **{name: f"training.{name}" for name in ("optimizer", "lr", "momentum", "weight_decay")},
    **{"batch_size": "training.batch_size", "local_steps": "training.local_steps"},
    **{"proximal_mu": "training.proximal_mu", "norm_mode": "norm_mode"},
    **{"local_epochs": "training.local_epochs"},
    **{name: f"training.{name}" for name in ("label_smoothing", "class_weights", "max_grad_norm")},
    **{"mean": "input.mean", "std": "input.std"},
}
"""Keys of ``bract.yaml`` by the field of a declaration that an alternative changes."""


@dataclass(frozen=True)
class _Checked:
    capture: Capture
    check: DescriptionCheck
    others: Sequence[Alternative] = ()
    other_loss: bool = False
    kept: int | None = None

    @property
    def lacking(self) -> str:
        """Say that the client kept fewer examples than it declares; empty where it did not."""
        declared = self.capture.declaration.num_examples
        if self.kept is None or declared is None or self.kept >= declared:
            return ""
        return (
            f"; it kept {self.kept} different examples and declares {declared}, as of a sampler "
            "that draws with replacement, a loop that ends early or a count over all passes"
        )


def confirm(
    captures: Captures,
    found: Findings,
    given: AppDescription,
    *,
    truth: Path | None,
    force: bool = False,
    rounds: Collection[int] | None = None,
    look: bool = True,
    clock: SearchTime | None = None,
) -> Findings:
    """Return findings whose description explains what clients sent, as far as they kept anything.

    Parameters
    ----------
    captures
        As the description was completed from; its trusted models are run.
    given
        What a person wrote: none of its values is replaced.
    force
        Return a description that is contradicted, with the reason among its doubts.
    rounds
        Rounds that the description is for; None for all.
    look
        Look for another description where this one is contradicted. Of a training that is known not
        to be simulated one that explains the updates does so by chance.
    clock
        The time for that; what is not tried for want of it is said.

    Raises
    ------
    BractError
        If what clients kept contradicts the description, and no other value explains it.
    """
    clock = clock or SearchTime()
    described = Captures(captures.root, captures.models, found.description)
    chosen = [one for one in described.index if rounds is None or one.round in rounds]
    checked = _check(described, chosen[:MOST], truth, look=look, clock=clock)
    wrong = [one for one in checked if one.check.state == "contradicted"]
    against = found.against
    if wrong:
        taken = _explaining(captures, found, given, wrong, truth, clock)
        if taken is None and look:
            taken = _own_start(captures, found, wrong, truth)
        if taken is None:
            reason = _contradiction(wrong, described.description, clock)
            unsent = [doubt for doubt in found.doubts if doubt.startswith(UNSENT_NORMS)]
            reason = "; ".join([reason, *unsent])
            _judge_sign(found, against, checked, force=force)
            if not force:
                raise BractError(reason, code="declaration-wrong")
            found.doubts.append(reason)
            return found
        found, checked = taken
    _judge_sign(found, against, checked, force=force)
    if not force:
        _check_rebuilding(found, checked)
        _check_loss(found, checked)
    _tell(found, checked)
    if clock.untried and not found.is_confirmed:
        found.doubts.append(_untried(clock))
    return found


def _judge_sign(
    found: Findings, against: str | None, checked: Sequence[_Checked], *, force: bool
) -> None:
    """Refuse updates that the next model goes against, unless the clients' steps give them.

    An asynchronous server, one whose other clients were not captured, or one that sends each group
    of clients a model of its own does not follow the mean of a round's updates.
    """
    if against is None:
        return
    states = {one.check.state for one in checked}
    if "confirmed" in states and "contradicted" not in states:
        reason = "what clients kept gives the updates as they are read: the server takes other ones"
    else:
        reason = (
            "either they are read with the opposite sign: pass the hook update='delta' where "
            "clients return trained minus received weights, 'gradient' where they return a "
            "gradient; or the server does not follow the mean of these updates, as one that takes "
            "each as it comes, or where other clients were not captured: pass --force"
        )
        if not force:
            raise BractError(f"{against}: {reason}", code="declaration-wrong")
    found.doubts.append(f"{against}: {reason}")


def _check_rebuilding(found: Findings, checked: Sequence[_Checked]) -> None:
    """Refuse a model from images to images that nothing shows to be an autoencoder."""
    description = found.description
    if description.loss != RECONSTRUCTION or "loss" not in description.guessed:
        return
    if not any(one.check.state == "confirmed" for one in checked):
        raise BractError(
            f"model {description.model} returns an image for an image, and nothing shows its loss: "
            "segmentation is not audited; if the clients train it to rebuild its input by the mean "
            "squared error, declare that: --set loss=reconstruction",
            code="declaration-lacks",
        )


def _check_loss(found: Findings, checked: Sequence[_Checked]) -> None:
    """Refuse softmax and cross entropy that nothing declares and every upload contradicts."""
    description = found.description
    if description.loss is not None or not checked:
        return
    if any(one.check.state == "confirmed" or not one.other_loss for one in checked):
        return
    failing = next(iter(checked[0].check.failing), "its sums are none of cross entropy")
    raise BractError(
        f"{checked[0].capture.key}: {failing}; so of {len(checked)} uploads, which have the "
        f"rank of their examples: the loss is none over {description.classes} classes, as where an "
        "image has several labels, which is not audited; declare another loss with --set loss=NAME",
        code="declaration-wrong",
    )


def _check(
    captures: Captures,
    chosen: Sequence[Capture],
    truth: Path | None,
    *,
    look: bool = True,
    clock: SearchTime | None = None,
) -> list[_Checked]:
    guessed = set() if captures.description is None else set(captures.description.guessed)
    fields = [field for field, key in _KEYS.items() if key in guessed]
    found: list[_Checked] = []
    end = time.thread_time() + SECONDS
    for capture in chosen:
        if len(found) >= FEWEST and time.thread_time() > end:
            break
        try:
            # One upload that is wrong is enough to find what explains it.
            wrong = any(one.check.state == "contradicted" for one in found)
            observation = captures.load(capture)
            if not is_unmoved(observation):
                one = _check_one(
                    captures,
                    observation,
                    capture,
                    truth,
                    fields,
                    look=look and not wrong,
                    clock=clock,
                )
                found.append(one)
        except (BractError, RuntimeError, ValueError) as error:
            # Of a description that is only tried it says nothing about the client.
            level = logging.INFO if look else logging.DEBUG
            _log.log(level, "%s: not checked: %s", capture.key, error)
    return found


def _check_one(
    captures: Captures,
    observation: Observation,
    capture: Capture,
    truth: Path | None,
    guessed: Sequence[str],
    *,
    look: bool,
    clock: SearchTime | None,
) -> _Checked:
    earlier = Lazy(captures.before(capture), captures.load)
    failing = failing_invariants(observation, earlier)
    noise, other = undeclared_noise(observation), is_other_loss(observation)
    kept = None if truth is None else load_truth(truth, capture)
    if kept is None:
        check = with_noise(without_truth(failing), noise)
        return _Checked(capture, check, other_loss=other)
    (case, *_), _ = open_cases([observation], AttackTask(), attack="check")
    if not isinstance(case, Case):
        check = DescriptionCheck(state="open", failing=failing, reason=case.reason)
        return _Checked(capture, check)
    check, others = check_case(
        case,
        kept.images,
        kept.entered,
        failing=failing,
        guessed=guessed,
        thorough=True,
        look=look,
        clock=clock,
    )
    return _Checked(capture, with_noise(check, noise), others, other, len(kept.images))


def _explaining(
    captures: Captures,
    found: Findings,
    given: AppDescription,
    wrong: Sequence[_Checked],
    truth: Path | None,
    clock: SearchTime,
) -> tuple[Findings, list[_Checked]] | None:
    """Return the first other description that leaves no upload contradicted."""
    fixed = given.given().keys() - given.guessed.keys()
    for one in wrong[0].others:
        # Steps follow from the size of a batch, but where clients took a part of their examples.
        by_count = "training.local_steps" not in found.description.guessed
        changes = {k: v for k, v in one.changes.items() if k != "local_steps" or not by_count}
        keys = {_KEYS[field]: value for field, value in changes.items() if field in _KEYS}
        if not keys or len(keys) < len(changes) or fixed & _moved(keys, found.description):
            continue
        if clock.is_over:
            clock.miss([f"{one.words} on the other uploads"])
            return None
        clock.tell(f"{one.words} on the other uploads")
        described = _with(found.description, keys, one, len(wrong))
        again = Captures(captures.root, captures.models, described)
        checked = _check(again, again.index[:MOST], truth, look=False)
        if any(each.check.state == "contradicted" for each in checked):
            continue
        line = (
            f"{one.words} explains {len(wrong)} updates on what clients kept (cosine "
            f"{one.cosine:.6f}); as first described their cosine is "
            f"{wrong[0].check.cosine or 0.0:.3f}"
        )
        confirmed = [c for c in found.confirmed if "explains the updates' size" not in c]
        best, doubts = wrong[0].others[0], list(found.doubts)
        if best is not one and not best.changes:
            doubts.append(
                f"{best.words} explains them still better (cosine {best.cosine:.6f}); no "
                f"description says that, so attacks simulate {one.words}"
            )
        doubts += _conflicts(captures, one)
        return Findings(described, [*confirmed, line], doubts), checked
    return None


def _conflicts(captures: Captures, one: Alternative) -> list[str]:
    """Say where train messages declare another value than the one that explains the updates."""
    declared = captures.index[0].declaration
    return [
        f"the train message says {field} {getattr(declared, field):g}, and what clients kept shows "
        f"{value:g}: clients may not use what they are sent"
        for field, value in one.changes.items()
        if isinstance(value, float) and getattr(declared, field) not in (None, 0.0, value)
    ]


def _own_start(
    captures: Captures, found: Findings, wrong: Sequence[_Checked], truth: Path | None
) -> tuple[Findings, list[_Checked]] | None:
    """Try the client's own last upload as the start of the layers that explain an update least."""
    if found.description.own or wrong[0].others:
        return None
    last, names = wrong[-1], found.description.names
    seen = captures.load(last.capture)
    # The hook names matrices that came back with nothing of what was sent in them.
    unlike = (seen.provenance.get("reading") or {}).get("unlike", ())
    apart = [names.get(name, name) for name in unlike] or [
        tensor.name for tensor in last.check.tensors if (tensor.share or 0.0) > MOSTLY
    ]
    layers = {name.rpartition(".")[0] for name in apart}
    whole = [names.get(name, name) for name in seen.parameters]
    own = [name for name in whole if name.rpartition(".")[0] in layers]
    if not own or len(own) == len(whole):
        return None
    content = found.description.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    reason = f"{INFERRED}of what clients kept, their own last upload explains these layers"
    content |= {"own": own, "guessed": dict(found.description.guessed) | {"own": reason}}
    described = build_description(content)
    again = Captures(captures.root, captures.models, described)
    checked = _check(again, again.index[:MOST], truth, look=False)
    if not any(one.check.state == "confirmed" for one in checked):
        return None
    if any(one.check.state == "contradicted" for one in checked):
        return None
    line = f"clients train {', '.join(own)} from their own last upload, not from what was sent"
    first = "their first captured round is left out: nothing shows where it began"
    return Findings(described, [*found.confirmed, line], [*found.doubts, first]), checked


def _moved(keys: Mapping[str, Any], description: AppDescription) -> set[str]:
    values = description.given()
    return {key for key, value in keys.items() if values.get(key) != value}


def _with(
    description: AppDescription, keys: Mapping[str, Any], one: Alternative, count: int
) -> AppDescription:
    """Return a description with other values, and the reason for each."""
    content = description.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    content["guessed"] = dict(description.guessed)
    reason = f"{INFERRED}explains {count} updates on what clients kept, cosine {one.cosine:.6f}"
    for key, value in keys.items():
        *sections, last = key.split(".")
        target = content
        for section in sections:
            target = target.setdefault(section, {})
        if value is None:
            target.pop(last, None)
            content["guessed"].pop(key, None)
        else:
            target[last] = value
            content["guessed"][key] = reason
    return build_description(content)


def _contradiction(
    wrong: Sequence[_Checked], description: AppDescription | None, clock: SearchTime
) -> str:
    first = wrong[0]
    check = first.check
    if first.others:
        best = first.others[0]
        given = {_KEYS.get(field, field) for field in best.changes}
        how = (
            f"correct {', '.join(sorted(given))}"
            if best.changes
            else "no attack simulates that, so take it out of the training to audit it"
        )
    else:
        how = _where(check)
        if guessed := guessed_training(description):
            how += f"; say how clients train where it was guessed: {' '.join(guessed)}"
    worst = ", ".join(
        f"{t.name} (cosine {t.cosine:.3f})" for t in check.tensors[:SHOWN] if t.cosine is not None
    )
    others = f"; so of {len(wrong)} uploads" if wrong[1:] else ""
    # Below its cosine nothing of an upload is sure but what every upload has.
    others += "".join(f"; {one}" for one in check.failing[:1])
    if clock.untried:
        how += f"; {_untried(clock)}"
    return one_line(
        f"{first.capture.key}: {check.reason}{others}{first.lacking}; the tensors that differ "
        f"most: {worst}; {how}, or pass --force: attacks on such uploads give no verdict",
        1000,
    )


def _untried(clock: SearchTime) -> str:
    """Say what was not tried, and how it is."""
    more = max(10 * clock.seconds, 60.0)
    return f"for want of time not tried ({listed(clock.untried)}): --seconds {more:g} tries longer"


_TRAINED_BY = {
    "training.batch_size": "training.batch_size",
    "training.local_epochs": "training.local_epochs",
    "training.optimizer": "training.momentum",
}
"""Option that settles how clients train, by the key that is guessed without it."""


def guessed_training(description: AppDescription | None) -> list[str]:
    """Return the options by which a user says how clients train, for what was guessed of it."""
    guessed = description.guessed if description else {}
    return [f"--set {key}=VALUE" for name, key in _TRAINED_BY.items() if name in guessed]


def _where(check: DescriptionCheck) -> str:
    """Say what to look at."""
    share = check.tensors[0].share or 0.0 if check.tensors else 0.0
    if share > 0.9:
        return (
            "the others fit better, so look at what is special about that layer: a part that "
            "clients keep to themselves, another learning rate, or the loss"
        )
    return (
        "look at the model, its loss, how inputs are normalised, what was kept, and whether the "
        "captured arrays are the model's weights"
    )


def _tell(found: Findings, checked: Sequence[_Checked]) -> None:
    right = [one.check for one in checked if one.check.state == "confirmed"]
    found.is_confirmed = bool(right) and len(right) == len(checked)
    if found.is_confirmed:
        # What was assumed gives the updates, and their size is no question any more.
        found.doubts = [
            doubt
            for doubt in found.doubts
            if "assumed" not in doubt and "simulated" not in doubt and "look like" not in doubt
        ]
    if right:
        least = min(check.cosine or 0.0 for check in right)
        found.confirmed.append(
            f"{len(right)} of {len(checked)} updates are what clients so described send, repeated "
            f"on what they kept (cosine {least:.6f})"
        )
    noisy = [one.check.noise for one in checked if one.check.noise is not None]
    if noisy:
        found.doubts.append(
            f"none declared; noise of about {max(noisy):.2g} is in every coordinate of "
            f"{len(noisy)} of {len(checked)} updates: declare the defense, "
            "--set 'defenses=[{name: noise, std: S}]', or look for 16-bit arithmetic"
        )
    for one in checked:
        check = one.check
        if check.state == "confirmed" and check.alternative is not None:
            found.doubts.append(f"{one.capture.key}: {check.reason}")
            break
    for one in checked:
        check = one.check
        if check.state == "open" and (check.cosine is not None or check.failing):
            found.doubts.append(f"{one.capture.key}: not confirmed: {check.reason}")
            break
