"""Make the model that the clients train, and hold it against the captured parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import nn

from bract.attacks.problem.spectral import unsent_norms
from bract.attacks.problem.target_model import check_made_alike
from bract.audit.description.draft import SIDES, Draft, check_readable, times
from bract.audit.description.naming import freeze_unmoved, leave_out_absent, name_tensors
from bract.audit.description.shapes import refuse_other_inputs
from bract.audit.description.signals import guess_signals, refuse_open_signals, takes_signals
from bract.audit.description.texts import doubt_tokenizer, text_schema_of
from bract.captures.observation import ClientDeclaration
from bract.config.text import TextSchema
from bract.data.texts import tokenizer_of, with_schema
from bract.data.tokens import Tokenizer
from bract.defenses.entries import prepare_model
from bract.errors import BractError
from bract.installed.references import vouched
from bract.models import create_model
from bract.models.third_party_texts import embedding_of
from bract.updates.ties import ties_of

UNSENT_NORMS = "vectors of spectral norms"
"""How a doubt about them begins."""

_GUESSED = ("text", "signal")
"""Inputs whose schema the model, or what clients kept, shows where it is not declared."""


def choose_model(draft: Draft) -> None:
    """Make the named model, and hold its parameters against the captured ones."""
    _take_schema(draft)
    declared = draft.declaration()
    if declared.input not in _GUESSED or declared.text is not None or declared.signal is not None:
        check_readable(draft)
    name = declared.model
    if name is None:
        raise BractError(
            "bract.yaml: model is not given and no capture declares it; give it as "
            "--model package.module:callable",
            code="declaration-lacks",
        )
    name = vouched(name, draft.captures.models, what="the model", how=f"name it: --model {name}")
    classes = declared.classes or draft.classes_by_layer() or 10
    shape = declared.image_shape or (draft.channels()[0], SIDES[0], SIDES[0])

    def made(declared: ClientDeclaration, shape: Sequence[int]) -> nn.Module:
        return create_model(
            name,
            classes=classes,
            channels=shape[0],
            image_size=shape[1],
            activation=declared.activation,
            table=declared.table,
            text=declared.text,
            signal=declared.signal,
        )

    try:
        model = made(declared, shape)
        refuse_other_inputs(name, model)
        if _guess_texts(draft, model) or _guess_signals(draft, model):
            declared = draft.declaration()
            model = made(declared, declared.image_shape or shape)
    except BractError as error:
        if declared.text is None:
            raise
        raise BractError(f"bract.yaml: input.text: {error}", code=error.code) from None
    check_readable(draft)
    _check_tokenizer(draft, model)
    _check_precision(name, model)
    draft.model = prepare_model(model, declared.defenses)
    name_tensors(draft)
    leave_out_absent(draft)
    freeze_unmoved(draft)
    observation = draft.observation()
    own = {n: tuple(v.shape) for n, v in draft.model.named_parameters()}
    buffers = {n for n, _ in draft.model.named_buffers()} | ties_of(draft.model).keys()
    if taken := sorted(buffers & set(observation.parameters)):
        draft.content["buffers"] = [*draft.content.get("buffers", ()), *taken]
        observation = draft.observation()
    found = {n: tuple(v.shape) for n, v in observation.parameters.items()}
    if problem := _mismatch(name, own, found):
        raise BractError(f"{observation.key}: {problem}", code="declaration-wrong")
    check_made_alike(
        draft.model, lambda: made(declared, declared.image_shape or shape), observation
    )
    if norms := unsent_norms(draft.model, observation.buffers):
        draft.doubts.append(
            f"{UNSENT_NORMS} ({norms[0].vectors[0]}) were not sent: they are taken as those of the "
            "sent weights, to which training moves them; where clients draw them anew and take few "
            "steps they are others: let the app send and return model.state_dict()"
        )
    draft.confirmed.append(
        f"{name} has the {len(own)} captured parameters "
        f"({sum(v.numel() for v in draft.model.parameters()):,} values)"
    )


def _check_precision(name: str, model: nn.Module) -> None:
    """Refuse parameters of 16 bits: what training in them rounds away is no gradient."""
    for path, value in model.named_parameters():
        if value.dtype in (torch.float16, torch.bfloat16):
            raise BractError(
                f"model {name} holds its parameters in {str(value.dtype).removeprefix('torch.')} "
                f"({path}): expected float32; clients may compute in 16 bits by torch.autocast",
                code="model-unsuited",
            )


def _take_schema(draft: Draft) -> None:
    """Write the schema that the app declares alone: shape and statistics follow from it."""
    declared = draft.declaration()
    for kind, schema in (
        ("table", declared.table),
        ("text", declared.text),
        ("signal", declared.signal),
    ):
        taken = draft.given.input.kind in (None, kind) and declared.image_shape is None
        if schema is not None and taken:
            section = draft.content.setdefault("input", {})
            section |= {"kind": kind, kind: asdict(schema)}


def _guess_texts(draft: Draft, model: nn.Module) -> bool:
    """Take the schema of undeclared texts from a model that begins with an embedding."""
    declared = draft.declaration()
    embedding = embedding_of(model)
    if embedding is None or declared.text is not None or declared.table is not None:
        return False
    if draft.given.input.kind not in (None, "text") or declared.input not in ("image", "text"):
        return False
    schema, reasons = text_schema_of(
        model,
        embedding,
        draft.kept_texts,
        draft.observation().update,
        _tokenizer(draft),
    )
    draft.content["input"] = {"kind": "text", "text": asdict(schema)}
    for key, reason in reasons.items():
        draft.content["guessed"][f"input.text.{key}"] = reason
    return True


def _guess_signals(draft: Draft, model: nn.Module) -> bool:
    """Take the schema of undeclared signals from those that clients kept."""
    declared, given = draft.declaration(), draft.given.input
    schemas = (declared.signal, declared.table, declared.text, given.shape)
    if any(schema is not None for schema in schemas) or given.kind not in (None, "signal"):
        return False
    if declared.input not in ("image", "signal") or declared.image_shape is not None:
        return False
    kept = draft.kept_signals
    if not kept:
        if takes_signals(model):
            refuse_open_signals(model)
        return False
    schema = guess_signals([k["inputs"] for k in kept], [k["labels"] for k in kept], model)
    draft.content["input"] = {"kind": "signal", "signal": asdict(schema)}
    reason = (
        f"{sum(len(k['inputs']) for k in kept)} signals that clients kept; give the range that is "
        "public, and the unit"
    )
    for key in ("low", "high"):
        draft.content["guessed"][f"input.signal.{key}"] = reason
    return True


def _tokenizer(draft: Draft, schema: TextSchema | None = None) -> Tokenizer | None:
    """Return the tokenizer that the data section names, held against the declared schema."""
    data = draft.given.data
    if data is None or data.text is None or data.text.tokenizer is None:
        return None
    return tokenizer_of(data if schema is None else with_schema(data, schema))


def _check_tokenizer(draft: Draft, model: nn.Module) -> None:
    """Refuse a tokenizer that is not the clients', and doubt one of which nothing shows it."""
    schema = draft.declaration().text
    found = None if schema is None else _tokenizer(draft, schema)
    if schema is None or found is None:
        return
    embedding = embedding_of(model)
    name = next((f"{n}.weight" for n, m in model.named_modules() if m is embedding), None)
    doubt = doubt_tokenizer(found, schema, draft.kept_texts, draft.observation().update, name)
    # A schema that was guessed has the fingerprint of this tokenizer, not one of the clients'.
    guessed = "input.text.vocabulary" in draft.content["guessed"]
    if doubt is not None and (guessed or not schema.tokenizer):
        draft.doubts.append(doubt)


def _mismatch(
    name: str, own: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> str | None:
    lacking, strange = sorted(set(own) - set(found)), sorted(set(found) - set(own))
    prefixes = {key.removesuffix(name) for key in found for name in lacking if key.endswith(name)}
    if lacking and len(prefixes) == 1:
        return (
            f"its names begin with {min(prefixes)!r}, those of model {name} do not; name a "
            "callable that makes the model as the clients wrap it"
        )
    if lacking and not strange:
        return (
            f"model {name} has {', '.join(lacking[:3])}, which were neither sent nor returned; "
            "where the clients freeze them, name a callable that does so too: "
            f"with_frozen_backbone(model, {sorted({n.rpartition('.')[0] for n in found})[:5]}) of "
            "bract.models.frozen; else name the model that the clients trained"
        )
    if lacking:
        return (
            f"model {name} has {', '.join(lacking[:3])}, which the capture lacks"
            f"{_and_strange(strange)}; name the model that the clients trained"
        )
    if strange:
        return (
            f"it holds {', '.join(strange[:3])}, which model {name} lacks; name the model that "
            "the clients trained"
        )
    for key, shape in own.items():
        if found[key] != shape:
            return (
                f"{key} was captured as {times(found[key])}, model {name} has {times(shape)}; "
                "name the model that the clients trained"
            )
    return None


def _and_strange(names: Sequence[str]) -> str:
    return f" (it holds {', '.join(names[:3])} instead)" if names else ""
