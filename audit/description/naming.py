"""Give captured tensors the model's names, and leave out what clients keep to themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from bract.attacks.problem.target_model import kept_at_client
from bract.audit.description.draft import INFERRED, Draft, times
from bract.errors import BractError, listed
from bract.models.third_party_texts import adapter_names
from bract.updates.ties import ties_of
from bract.updates.update import numbered

Shapes = dict[str, tuple[int, ...]]

WRAPPERS = ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")
"""What `torch.nn.DataParallel` and `torch.compile` put before the names of a model."""


def name_tensors(draft: Draft) -> None:
    """Find the model's names for captured tensors that were sent under others.

    Those are adapters without their adapter's name, a list of arrays whose names are numbers, the
    arrays of a wrapped model, and those of one layer under its own short names. Shapes decide; a
    description that a person gave is left as it is.

    Raises
    ------
    BractError
        If a list has not the shapes of the model's state, in its order.
    """
    if draft.given.names:
        return
    seen = draft.observation()
    captured = _shapes(seen.parameters | seen.buffers)
    adapters = adapter_names(draft.model)
    found = {short: name for short, name in adapters.items() if short in captured}
    reason = "peft leaves the adapter's own name out"
    if not found and numbered(captured):
        found = _by_order(draft, captured)
        reason = "the order of the model's state_dict(), of which all shapes agree"
    elif not found and not captured.keys() & draft.model.state_dict().keys():
        found = _by_prefix(draft.model, captured)
        reason = "without what a wrapper such as DataParallel puts before them"
        if not found:
            found = _by_layer(draft.model, captured)
            reason = "of the model's arrays that end so, this one alone has the shape"
    if found:
        draft.content["names"] = found
        draft.content["guessed"]["names"] = f"{INFERRED}{reason}"


def leave_out_absent(draft: Draft) -> None:
    """Take what no client returns out of the model: unknown to attacks, and said."""
    names = draft.content.get("names", {})
    model = dict(draft.model.named_parameters()) | dict(draft.model.named_buffers())
    parameters = dict(draft.model.named_parameters())
    kept = {names.get(name, name) for fact in draft.facts for name in fact.absent} & model.keys()
    lacking = sorted(kept - draft.observation().parameters.keys())
    if lacking and not draft.given.absent:
        draft.content["absent"] = lacking
        reason = "sent and never returned, as what clients keep to themselves"
        draft.content["guessed"]["absent"] = f"{INFERRED}{reason}"
    if lacking := [name for name in lacking if name in parameters]:
        draft.doubts.append(
            f"clients keep {listed(lacking)} to themselves: unknown, so attacks take what was sent "
            "of them, or what the model makes, and start from less than the client did"
        )
    seen = draft.observation()
    described = draft.declaration()
    draft.model = kept_at_client(draft.model, replace(seen, declaration=described))


def freeze_unmoved(draft: Draft) -> None:
    """Take layers of a model of images out that no client moves, as of a frozen backbone.

    What was sent of them is known to attacks, and no gradient is simulated for them. A bias alone
    may stand still, before a normalisation; and of adapters one half does in a first step.
    """
    if draft.given.absent or draft.given.buffers or draft.declaration().input != "image":
        return
    names = draft.content.get("names", {})
    still = set.intersection(*({names.get(n, n) for n in fact.unmoved} for fact in draft.facts))
    parameters = dict(draft.model.named_parameters())
    moved = {name.rpartition(".")[0] for name in parameters.keys() - still}
    frozen = sorted(n for n in parameters if n.rpartition(".")[0] not in moved)
    if not frozen or len(frozen) == len(parameters) or adapter_names(draft.model):
        return
    for key in ("absent", "buffers"):
        draft.content[key] = [*draft.content.get(key, ()), *frozen]
        draft.content["guessed"][key] = f"{INFERRED}no client moves them, as of a frozen backbone"
    draft.confirmed.append(f"no client moves {listed(frozen)}: taken as frozen")
    draft.model = kept_at_client(
        draft.model, replace(draft.observation(), declaration=draft.declaration())
    )


def _by_prefix(model: nn.Module, captured: Shapes) -> dict[str, str]:
    """Return the names behind a wrapper's, where all that was captured begins with one of them."""
    own = _shapes(model.state_dict())
    for prefix in WRAPPERS:
        inner = {name: name.removeprefix(prefix) for name in captured}
        if all(short != name and own.get(short) == captured[name] for name, short in inner.items()):
            return inner
    return {}


def _by_order(draft: Draft, captured: Shapes) -> dict[str, str]:
    """Return the names of a list of arrays: those of the state, else of the parameters alone."""
    model = draft.model
    aliases = ties_of(model)
    state = _shapes(model.state_dict())
    orders = [state, {n: v for n, v in state.items() if n not in aliases}]
    orders.append(_shapes(dict(model.named_parameters())))
    own = sorted(captured, key=int)
    for order in orders:
        if [captured[n] for n in own] == list(order.values()):
            return dict(zip(own, order, strict=True))
    apart = next(
        (
            f"array {n} is {times(captured[n])}, {name} {times(shape)}"
            for n, (name, shape) in zip(own, state.items(), strict=False)
            if captured[n] != shape
        ),
        f"{len(own)} arrays were captured, the model's state holds {len(state)}",
    )
    raise BractError(
        f"{draft.first.capture.key}: its arrays have numbers for names, and their shapes are not "
        f"those of model {draft.declaration().model} in the order of its state_dict() or "
        f"parameters(): {apart}; "
        "name the model that the clients trained, or send ArrayRecord(model.state_dict())",
        code="declaration-wrong",
    )


def _by_layer(model: nn.Module, captured: Shapes) -> dict[str, str]:
    """Return the names of one layer's arrays, where shapes leave one choice; else none."""
    own = _shapes(model.state_dict())
    found = {}
    for short, shape in captured.items():
        fitting = [n for n, other in own.items() if n.endswith(f".{short}") and other == shape]
        if len(fitting) != 1:
            return {}
        found[short] = fitting[0]
    return found if len(set(found.values())) == len(found) else {}


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(value.shape) for name, value in tensors.items()}
