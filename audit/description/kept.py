"""Read what consenting clients kept: the schema of rows, signals, and the shape of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bract.audit.description.draft import SIDES, Draft, times
from bract.audit.description.facts import CaptureFacts
from bract.audit.description.normalisation import normalisation_of
from bract.audit.description.rows import guess_schema
from bract.audit.truth import load_truth, truth_path
from bract.captures.observation import ClientDeclaration
from bract.errors import BractError, apart, first_line
from bract.inputs.image import as_pictures
from bract.schema.inputs import outline_of

_MOST_REASONS = 50
"""Reasons for single clients' counts that are listed."""

_COLUMNS = "input.table.columns"
"""Key of the reason for a guessed schema."""


def guess_columns(draft: Draft, truth: Path) -> None:
    """Take the columns of undeclared rows from those that clients kept."""
    declared = draft.declaration()
    if declared.table is not None or declared.signal is not None:
        return
    if draft.given.input.kind not in (None, "table", "text", "signal"):
        return
    kept = [c for f in draft.facts if (c := _kept(truth, f)) is not None]
    draft.kept_texts = [c["inputs"] for c in kept if _are_texts(c["inputs"])]
    draft.kept_signals = [c for c in kept if _are_signals(c, draft)]
    shapes = {tuple(kept["inputs"].shape[1:]) for kept in draft.kept_signals}
    square = next((s for s in shapes if len(s) == 2 and s[0] == s[1] and s[0] in SIDES), None)
    if square is not None and draft.given.input.kind is None:
        what = f"signals of {square[0]} channels of {square[1]} values"
        draft.doubts.append(_as_pictures(what, [1, *square], "x.squeeze(1)"))
    if declared.input == "text" or draft.kept_signals:
        return
    rows = [c["inputs"] for c in kept if c["inputs"].dim() == 2]
    if not rows or len(rows) < len(kept) or not all(r.is_floating_point() for r in rows):
        return
    schema = guess_schema(rows, [c["labels"] for c in kept], outputs=draft.classes_by_layer())
    reason = (
        f"{sum(map(len, rows))} rows that clients kept; name the columns, and give the ranges "
        "and means that are public"
    )
    if len(schema.columns) == schema.width and (shape := _picture(schema.width)):
        draft.doubts.append(_as_pictures(f"rows of {schema.width} numbers", shape, "x.flatten(1)"))
    draft.content["input"] = {"table": asdict(schema)}
    draft.content["guessed"][_COLUMNS] = reason


def _picture(values: int) -> list[int] | None:
    """Return the shape of a usual square picture of so many values; None where there is none."""
    for channels in (1, 3):
        side = math.isqrt(values // channels)
        if channels * side * side == values and side in SIDES:
            return [channels, side, side]
    return None


def _as_pictures(what: str, shape: Sequence[int], seen: str) -> str:
    """Say that kept inputs may be pictures, and how to have them shown and judged as such."""
    return (
        f"{what} may be pictures of {times(shape)}: to have them judged as such, name a subclass "
        f"of the model whose forward(self, x) returns super().forward({seen}), with --set "
        f"input.kind=image --set input.shape=[{','.join(map(str, shape))}]"
    )


def _choose_binary_loss(draft: Draft, inputs: Tensor) -> None:
    """Take outputs that are all in [0, 1] as probabilities, of rows whose schema is a guess."""
    target = draft.content["input"]["table"]["target"]
    if target["loss"] != "binary_cross_entropy_logits":
        return
    try:
        with torch.no_grad(), apart():
            outputs = draft.model.eval()(inputs)
    except Exception as error:  # noqa: BLE001 - a third-party model may raise anything
        raise BractError(
            f"model {draft.declaration().model} does not take the rows of {inputs.shape[1]} "
            f"numbers that clients kept: {type(error).__name__}: {first_line(error)}",
            code="truth-unusable",
        ) from None
    draft.model.train()
    if float(outputs.min()) >= 0.0 and float(outputs.max()) <= 1.0:
        target["loss"] = "binary_cross_entropy"


def read_truth(draft: Draft, truth: Path) -> None:
    """Take the shape of the input, and check the normalisation, by what clients kept."""
    from safetensors.torch import load_file

    paths = [truth_path(truth, f.capture.client, f.capture) for f in draft.facts]
    for fact, kept_at in zip(draft.facts, paths, strict=True):
        _check_count(draft, fact, kept_at)
    _take_counts(draft, paths)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise BractError(
            f"{truth}: holds nothing of the captured clients; expected "
            f"{paths[0].relative_to(truth)} and the like",
            code="truth-lacking",
        )
    content = load_file(path)
    declared = draft.declaration()
    if any(one is not None for one in (declared.table, declared.text, declared.signal)):
        _read_rows(draft, path, truth, paths)
        return
    kept = content.get("inputs", content.get("images"))
    if kept is not None and draft.given.input.kind == "image":
        kept = as_pictures(kept, declared.image_shape)
    if kept is None or kept.dim() != 4:
        raise BractError(
            f"{path}: holds no images; expected what bract.client.keep writes", code="truth-lacking"
        )
    shape = tuple(kept.shape[1:])
    if declared.image_shape is not None and declared.image_shape != shape:
        raise BractError(
            f"bract.yaml: input.shape is {list(declared.image_shape)}, the client kept inputs "
            f"of {list(shape)} ({path}); correct it",
            code="declaration-wrong",
        )
    if declared.image_shape is None and _ends_with_channels(shape):
        raise BractError(
            f"{path}: the client kept inputs of {times(shape)}, which are height, width and "
            "channels; expected channels, height and width: turn images where they are loaded, "
            "not in the model's forward, or declare --set "
            f"input.shape=[{','.join(map(str, shape))}] if the first are channels",
            code="truth-unusable",
        )
    draft.content.setdefault("input", {})["shape"] = list(shape)
    draft.kept_labels = content.get("labels")
    if "inputs" not in content:
        return
    if draft.declaration().mean is None:
        mean, std = normalisation_of(kept)
        reason = f"the kept inputs go from {float(kept.min()):.3g} to {float(kept.max()):.3g}"
        if mean is not None and std is not None:
            draft.guess("input", "mean", mean, reason)
            draft.guess("input", "std", std, reason)
    capture = next(f.capture for f, p in zip(draft.facts, paths, strict=True) if p == path)
    _check_pixels(draft, path, kept, draft.declaration(capture))
    draft.normalisation_known = True
    draft.confirmed.append(f"inputs that clients kept are {times(shape)} pixels in [0, 1]")
    if load_truth(truth, replace(capture, declaration=draft.declaration(capture))) is None:
        raise BractError(
            f"{path}: cannot be used to score; see the warning above", code="truth-unusable"
        )


def _ends_with_channels(shape: tuple[int, ...]) -> bool:
    """Return whether a shape is that of a picture whose channels stand last.

    One value wide are recordings of several leads, too; what is square besides is a picture.
    """
    first, height, last = shape
    square = last == 1 and first == height
    return (last in (3, 4) or square) and first > 4 and height > 4


def _check_count(draft: Draft, fact: CaptureFacts, path: Path) -> None:
    """Refuse a client that kept more examples than it declares to have trained on; note fewer."""
    declared = draft.declaration(fact.capture)
    if not path.is_file() or declared.num_examples is None or declared.augmentation:
        return
    held = _held(path)
    if held > declared.num_examples:
        raise BractError(
            f"{fact.capture.key}: the client kept {held} examples ({path}) and declares "
            f"{declared.num_examples}, perhaps its number of batches: let it reply with "
            "num-examples of len(loader.dataset); or describe the client: "
            f"--set clients.{fact.capture.client}.num_examples={held}",
            code="declaration-wrong",
        )
    if 0 < held < declared.num_examples:
        draft.kept_fewer.setdefault(fact.capture.client, held)


def _held(path: Path) -> int:
    """Return how many examples a client kept."""
    with safe_open(path, "pt") as file:
        return len(file.get_tensor("labels")) if "labels" in file.keys() else 0  # noqa: SIM118


def _take_counts(draft: Draft, paths: Sequence[Path]) -> None:
    """Take what clients kept for their numbers of examples where no reply says them."""
    counts: dict[str, set[int]] = {}
    for fact, path in zip(draft.facts, paths, strict=True):
        declared = draft.declaration(fact.capture)
        if declared.num_examples is None and not declared.augmentation and path.is_file():
            counts.setdefault(fact.capture.client, set()).add(_held(path))
    found = {client: held.pop() for client, held in counts.items() if len(held) == 1}
    reason = "as many as were kept, since no reply says how many examples it is of"
    whole = found.keys() == {fact.capture.client for fact in draft.facts}
    if whole and len(set(found.values())) == 1:
        draft.guess("training", "num_examples", next(iter(found.values())), reason)
        return
    for client, count in found.items():
        section = draft.content.setdefault("clients", {}).setdefault(client, {})
        section["num_examples"] = count
        if len(draft.content["guessed"]) < _MOST_REASONS:
            draft.content["guessed"][f"clients.{client}.num_examples"] = reason


def _read_rows(draft: Draft, path: Path, truth: Path, paths: Sequence[Path]) -> None:
    """Check what a client kept of rows, texts or signals against the schema."""
    fact = next(f for f, p in zip(draft.facts, paths, strict=True) if p == path)
    kept = _kept(truth, fact)
    if kept is not None and _COLUMNS in draft.content["guessed"]:
        _choose_binary_loss(draft, kept["inputs"])
    capture = fact.capture
    declared = draft.declaration(capture)
    if load_truth(truth, replace(capture, declaration=declared)) is None:
        raise BractError(
            f"{path}: cannot be used to score; see the warning above", code="truth-unusable"
        )
    draft.normalisation_known = True
    noun = outline_of(declared.input).noun
    draft.confirmed.append(f"the {noun}s that clients kept fit input.{declared.input}")


def _check_pixels(draft: Draft, path: Path, inputs: Tensor, declared: ClientDeclaration) -> None:
    from bract.inputs.image import on_steps, pixels_of

    try:
        pixels = pixels_of(inputs.float(), declared.mean, declared.std)
    except BractError as error:
        raise BractError(f"{path}: {error}", code=error.code) from None
    low, high = float(pixels.min()), float(pixels.max())
    if high - low < 0.5 and not on_steps(pixels):
        draft.doubts.append(
            f"{path}: the pixels go from {low:.3g} to {high:.3g} only; if clients' pictures "
            "have more contrast than that, input.std is too small and every PSNR too high"
        )


def _kept(truth: Path, fact: CaptureFacts) -> dict[str, Tensor] | None:
    """Return inputs and labels ``(N, ...)`` of a capture's client, where it kept them."""
    from safetensors.torch import load_file

    path = truth_path(truth, fact.capture.client, fact.capture)
    content = load_file(path) if path.is_file() else {}
    inputs, labels = content.get("inputs"), content.get("labels")
    if inputs is None or labels is None or not len(inputs):
        return None
    of_tokens = _are_texts(inputs) and labels.shape == inputs.shape
    of_values = inputs.is_floating_point() and inputs.dim() < 4 and labels.is_floating_point()
    of_values = of_values and labels.dim() == 2 and len(labels) == len(inputs)
    if labels.shape != (len(inputs),) and not (of_tokens or of_values):
        return None
    return {"inputs": inputs, "labels": labels}


def _are_signals(kept: dict[str, Tensor], draft: Draft) -> bool:
    """Return whether kept inputs are values over time; rows are, where that is declared."""
    inputs, labels = kept["inputs"], kept["labels"]
    if not inputs.is_floating_point() or inputs.dim() not in (2, 3):
        return False
    declared = "signal" in (draft.given.input.kind, draft.declaration().input)
    return inputs.dim() == 3 or labels.dim() == 2 or declared


def _are_texts(inputs: Tensor) -> bool:
    return inputs.dim() == 2 and inputs.dtype == torch.int64
