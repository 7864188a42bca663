"""What the model takes and returns: sizes of images, classes, or the image itself."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bract.audit.description.draft import SIDES, Draft, check_readable, times
from bract.errors import BractError, apart, first_line, listed, one_line
from bract.inputs.base import what_is_audited
from bract.models.autoencoder import Autoencoder
from bract.models.losses import RECONSTRUCTION, loss_of

_RETURNED = {
    "classification": "{classes} classes",
    "token-classification": "{classes} log-probabilities of the labels of their tokens",
    "language-model": "their losses",
}
"""What one forward pass of a model of texts returns, by the task."""


_OTHER = "it returns a "
"""How the reason begins why an output that is no tensor is not taken."""


def choose_loss(draft: Draft) -> None:
    """Take the model as an autoencoder where it is declared as one, or rebuilds its input."""
    declared = draft.declaration()
    shape = declared.image_shape
    if declared.loss == RECONSTRUCTION:
        if shape is None:
            shape = next((one for one in _shapes(draft) if _rebuilds(draft, one)), None)
        if shape is None:
            raise BractError(
                f"bract.yaml: loss is {RECONSTRUCTION}, and model {declared.model} rebuilds "
                "none of the usual square images; give --set input.shape=[channels,height,"
                "width]",
                code="declaration-lacks",
            )
    elif draft.given.loss is not None or any(
        one is not None for one in (declared.table, declared.text, declared.signal)
    ):
        return
    else:
        shapes = [shape] if shape is not None else _shapes(draft)
        shape = None
        if not any(_classifies(draft, one) for one in shapes):
            shape = next((one for one in shapes if _rebuilds(draft, one)), None)
        if shape is None:
            return
        draft.guess(
            "",
            "loss",
            RECONSTRUCTION,
            f"the model classifies no image, and rebuilds one of {times(shape)}",
        )
    if declared.image_shape is None:
        reason = "of the usual sizes the model rebuilds this one"
        draft.guess("input", "shape", list(shape), reason)
    draft.model = Autoencoder(draft.model, shape)
    draft.content["classes"] = 1


def choose_input(draft: Draft) -> None:
    """Infer the shape of the input where it is open, and count the classes."""
    declared = draft.declaration()
    if declared.image_shape is not None:
        outputs = _outputs(draft, declared.image_shape)
        if isinstance(outputs, str):
            raise BractError(
                f"bract.yaml: input.shape is {list(declared.image_shape)}, which model "
                f"{declared.model} does not take: {_why_not(draft, [outputs])}",
                code="declaration-wrong",
            )
    else:
        outputs = _infer_shape(draft)
    shape = draft.declaration().image_shape
    check_readable(draft)
    first = next((m for m in draft.model.modules() if isinstance(m, nn.Conv2d)), None)
    of_images = declared.signal is None and declared.table is None
    if of_images and first is not None and shape is not None and first.in_channels != shape[0]:
        draft.doubts.append(
            f"input.shape has {shape[0]} channels, the first convolution of model "
            f"{declared.model} takes {first.in_channels}"
        )
    if declared.signal is not None and outputs.dim() != 2:
        raise BractError(
            f"model {declared.model} returns {times(tuple(outputs.shape))} for two signals, "
            "expected (2, classes) of a classifier or (2, values) of a forecast: models that "
            "return a value at every step are not audited; name a callable whose forward returns "
            "what the loss takes",
            code="model-unsuited",
        )
    if outputs.dim() != 2 and outputs.dim() == 4:
        raise BractError(
            f"model {declared.model} returns {times(tuple(outputs.shape))} for two images, values "
            "at every place: segmentation is not audited; a model that rebuilds its input is, with "
            "--set loss=reconstruction",
            code="model-unsuited",
        )
    if outputs.dim() != 2:
        raise BractError(
            f"model {declared.model} returns {times(tuple(outputs.shape))} for two images, "
            "expected (2, classes) of a classifier, or two images of an autoencoder",
            code="declaration-wrong",
        )
    classes = int(outputs.shape[1])
    if declared.classes is not None and declared.classes != classes:
        raise BractError(
            f"bract.yaml: classes is {declared.classes}, model {declared.model} has {classes} "
            "outputs; correct it",
            code="declaration-wrong",
        )
    draft.content["classes"] = classes
    _choose_loss_of_numbers(draft, classes)
    if classes == 1:
        _choose_loss_of_one_output(draft)
    draft.confirmed.append(
        f"one forward pass: texts of {declared.text.length} tokens to "
        + _RETURNED[declared.text.task].format(classes=classes)
        if declared.text is not None
        else f"one forward pass: signals of {declared.signal.channels} channels of "
        f"{declared.signal.length} values to {classes} "
        + ("values" if declared.signal.task == "forecast" else "classes")
        if declared.signal is not None
        else f"one forward pass: {_taken(draft, shape or ())} to {_returned(draft, classes)}"
    )
    _doubt_dropout(draft)
    if declared.mean is None and draft.declaration().mean is None and not draft.normalisation_known:
        channels = shape[0] if shape else 1
        reason = "no capture shows it: pixels as they are, in [0, 1]"
        draft.guess("input", "mean", [0.0] * channels, reason)
        draft.guess("input", "std", [1.0] * channels, reason)
        draft.doubts.append(
            "nothing says how the clients normalise their inputs; pixels in [0, 1] are taken "
            "as they are; correct input.mean and input.std if that is wrong"
        )


def _taken(draft: Draft, shape: Sequence[int]) -> str:
    """Return in words what a model of images or rows takes."""
    of_rows = draft.declaration().table is not None
    return f"rows of {shape[0]} features" if of_rows else f"{times(shape)} images"


def _returned(draft: Draft, classes: int) -> str:
    """Return in words what a model of images or rows returns."""
    loss = loss_of(draft.declaration().loss)
    if not loss.labelled:
        return "themselves"
    return _plural(classes, "number") if loss.values else f"{classes} classes"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _choose_loss_of_numbers(draft: Draft, outputs: int) -> None:
    """Take the mean squared error where clients kept numbers as the targets of images."""
    labels = draft.kept_labels
    if draft.given.loss is not None or labels is None or not labels.is_floating_point():
        return
    values = 1 if labels.dim() == 1 else labels.shape[1]
    if values > 1 and bool(((labels == 0) | (labels == 1)).all()):
        raise BractError(
            f"clients kept {values} values of 0 and 1 an image as its target: several labels an "
            "example are not audited; where they are numbers, declare their loss: --set loss=mse",
            code="model-unsuited",
        )
    if values != outputs:
        raise BractError(
            f"model {draft.declaration().model} has {_plural(outputs, 'output')}, and clients kept "
            f"{_plural(values, 'number')} an image as its target: one class an image is audited, "
            "or as many numbers as outputs; keep what enters the loss, or train inside "
            "bract.client.witness",
            code="model-unsuited",
        )
    draft.guess("", "loss", "mse", "the targets that clients kept are numbers")


def _choose_loss_of_one_output(draft: Draft) -> None:
    """Take a loss of a single output, on which softmax and cross entropy would never move."""
    declared = draft.declaration()
    if not loss_of(declared.loss).of_classes:
        return
    labels = draft.kept_labels
    binary = labels is not None and bool(((labels == 0) | (labels == 1)).all())
    if draft.given.loss is not None or not binary:
        raise BractError(
            f"model {declared.model} has one output, on which cross entropy over classes is "
            "always 0; give its loss: --set loss=binary_cross_entropy_logits, or "
            "binary_cross_entropy, mse, mae or huber",
            code="declaration-lacks" if draft.given.loss is None else "declaration-wrong",
        )
    last = [m for m in draft.model.modules() if not list(m.children())][-1]
    shares = isinstance(last, nn.Sigmoid)
    name = "binary_cross_entropy" if shares else "binary_cross_entropy_logits"
    draft.guess("", "loss", name, "one output, and the labels that clients kept are 0 and 1")


def _doubt_dropout(draft: Draft) -> None:
    """Say that a model of texts drops inputs at random, which no attack simulates."""
    rates = {m.p for m in draft.model.modules() if isinstance(m, nn.Dropout) and m.p > 0.0}
    if draft.declaration().text is not None and rates and draft.given.training.dropout is None:
        draft.doubts.append(
            f"the model drops {max(rates):.0%} of inputs at random where it trains; the masks "
            "are unknown, and attacks simulate it without: positions and order of tokens may "
            "not be found; declare training.dropout=0 if the clients train in evaluation mode"
        )


def _infer_shape(draft: Draft) -> Tensor:
    tried: dict[tuple[int, int, int], Tensor] = {}
    reasons = []
    for shape in _shapes(draft):
        outputs = _outputs(draft, shape)
        if isinstance(outputs, str):
            reasons.append(outputs)
        elif outputs.dim() != 2:
            reasons.append(f"it returns {times(tuple(outputs.shape))} for two images")
        else:
            tried[shape] = outputs
    if not tried:
        # What it returns says more than which sizes it does not take.
        reasons.sort(key=lambda reason: not reason.startswith("it returns"))
        if reasons[0].startswith(_OTHER):
            raise BractError(
                f"model {draft.declaration().model} is not audited: {reasons[0]}",
                code="declaration-lacks",
            )
        raise BractError(
            f"model {draft.declaration().model} takes none of the usual square images: "
            f"{_why_not(draft, reasons)}; "
            f"{what_is_audited()}; give --set input.shape=[channels,height,width] for images "
            "of another size, and declare another input in the app: "
            'HonestButCurious(..., declaration={"input": ...})',
            code="declaration-lacks",
        )
    shape = next(iter(tried))
    others = [times(other) for other in list(tried)[1:4]]
    reason = "the only usual size that the model takes"
    if others:
        reason = f"the model takes it, and {', '.join(others)} as well"
        draft.doubts.append(
            f"input {times(shape)} is a guess: {reason}; correct input.shape if it is another"
        )
    draft.guess("input", "shape", list(shape), reason)
    return tried[shape]


def _why_not(draft: Draft, reasons: Sequence[str]) -> str:
    """Say why a model takes no images: by what it returns, by its first layer, by its errors."""
    if reasons[0].startswith(_OTHER):
        return reasons[0]
    return _first_layer(draft) or listed(dict.fromkeys(reasons), most=1)


def _first_layer(draft: Draft) -> str | None:
    """Return why the model's first layer takes no images; None where it does not show."""
    modules = draft.model.modules()
    # Weights of a frozen backbone are buffers.
    first = next((m for m in modules if [*m.parameters(recurse=False), *_floats(m)]), None)
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        return "it begins with an embedding, so its inputs are token ids"
    sides = [side for side in SIDES for c in (1, 3) if c * side * side == _wide(first)]
    if sides:
        return (
            f"it begins with a linear layer of {_wide(first)} inputs, {sides[0]}×{sides[0]} "
            "pixels; name a callable that makes it with nn.Flatten before it if it classifies "
            "them, and one whose forward returns the reconstruction if it is an autoencoder"
        )
    if isinstance(first, nn.Linear):
        return (
            f"it begins with a linear layer of {first.in_features} inputs, which is no usual "
            "image; for rows of a table, write their schema to bract.yaml first: bract schema "
            "rows.csv --target COLUMN --describe"
        )
    return None


def _floats(module: nn.Module) -> list[Tensor]:
    return [value for value in module.buffers(recurse=False) if value.is_floating_point()]


def _classifies(draft: Draft, shape: tuple[int, int, int]) -> bool:
    """Return whether the model maps an image to classes, fewer than the values of the image."""
    outputs = _outputs(draft, shape)
    if isinstance(outputs, str):
        return False
    return outputs.dim() == 2 and outputs.shape[1] < math.prod(shape)


def _rebuilds(draft: Draft, shape: tuple[int, int, int]) -> bool:
    try:
        Autoencoder(draft.model, shape)
    except BractError:
        return False
    return True


def _shapes(draft: Draft) -> list[tuple[int, int, int]]:
    return [(channels, side, side) for channels in draft.channels() for side in SIDES]


def _outputs(draft: Draft, shape: tuple[int, int, int]) -> Tensor | str:
    """Run the model once on two grey images; return what it says, or why it does not."""
    kept, when = {name: value.clone() for name, value in draft.model.named_buffers()}, ""
    training = draft.model.training
    draft.model.eval()
    try:
        text = draft.declaration().text
        inputs = torch.full((2, *shape), 0.5)
        if text is not None:
            other = next(i for i in range(text.vocabulary) if i != text.padding)
            inputs = torch.full((2, text.length), other)
        with torch.no_grad(), apart():
            found = draft.model(inputs)
            if isinstance(found, Tensor) and draft.declaration().norm_mode == "train":
                # Auxiliary heads return more than the logits while they are trained.
                with torch.random.fork_rng(devices=[]):
                    trained = draft.model.train()(inputs)
                when = "" if isinstance(trained, Tensor) else " while it trains"
                found = found if isinstance(trained, Tensor) else trained
    except Exception as error:  # noqa: BLE001 - a third-party model may raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    finally:
        draft.model.train(training)
        with torch.no_grad():
            for name, value in draft.model.named_buffers():
                value.copy_(kept[name])
    if isinstance(found, Tensor):
        return found
    return (
        f"{_OTHER}{type(found).__name__}{when}, expected one tensor: name a callable that "
        "makes a model whose forward returns the logits alone, or an object that has them as logits"
    )


def refuse_other_inputs(name: str, model: nn.Module) -> None:
    """Refuse a model that takes more than one input, or volumes, before any size is tried."""
    if needed := _further_inputs(model):
        raise BractError(
            f"model {name} is not audited: its forward needs {needed} besides: a model of one "
            f"input is; {what_is_audited()}",
            code="model-unsuited",
        )
    convolutions = (m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd))
    if isinstance(next(convolutions, None), nn.Conv3d):
        raise BractError(
            f"model {name} is not audited: it begins with a convolution over volumes "
            f"(channels, depth, height, width); {what_is_audited()}",
            code="model-unsuited",
        )


def _further_inputs(model: nn.Module) -> str:
    """Return the arguments without a default that a forward takes besides its first one.

    A mask of attention follows from the ids of a text.
    """
    given = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        taken = list(inspect.signature(model.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ""
    return ", ".join(
        one_line(one.name, 60)
        for one in taken
        if one.default is inspect.Parameter.empty
        and one.kind in given
        and one.name != "attention_mask"
    )


def _wide(layer: nn.Module | None) -> int | None:
    return layer.in_features if isinstance(layer, nn.Linear) else None
