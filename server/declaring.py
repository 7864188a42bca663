"""Declare one client's computation: the operator's word, what was sent, the client's claims."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from flwr.app import Message

from bract.captures.observation import ClientDeclaration
from bract.defenses.entries import read_defense
from bract.errors import BractError, one_line
from bract.parse.strict_json import parse_json
from bract.protocol.records import DEFENSES, PROXIMAL_KEY
from bract.schema.declaration import ClientStatement


def with_sent_mu(
    declaration: ClientDeclaration, request: Message, flags: list[str]
) -> ClientDeclaration:
    """Declare the proximal term that the train message asked for, unless the operator did."""
    sent = next(
        (r[PROXIMAL_KEY] for r in request.content.config_records.values() if PROXIMAL_KEY in r),
        None,
    )
    if sent is None:
        return declaration
    own = declaration.proximal_mu
    if own is None:
        changed = or_flag(flags, declaration.updated, {"proximal_mu": sent})
        return declaration if changed is None else changed
    if own != sent:
        flags.append(
            f"was sent {PROXIMAL_KEY} {one_line(sent, 40)}, the server declares proximal_mu "
            f"{own}; what it declares was used"
        )
    return declaration


SENT = {
    "lr": ("lr", "learning-rate", "learning_rate"),
    "momentum": ("momentum",),
    "weight_decay": ("weight-decay", "weight_decay"),
    "dropout": ("dropout",),
    "batch_size": ("batch-size", "batch_size"),
    "local_steps": ("local-steps", "local_steps"),
}
"""Config keys of a train message, by the declared field they set."""


def with_sent(declaration: ClientDeclaration, request: Message) -> ClientDeclaration:
    """Declare the train message's config where the operator declared nothing.

    A value that no client could follow is left out.
    """
    blank = ClientDeclaration()
    for field, keys in SENT.items():
        if getattr(declaration, field) != getattr(blank, field):
            continue
        for record in request.content.config_records.values():
            sent = next((record[key] for key in keys if key in record), None)
            if isinstance(sent, bool) or not isinstance(sent, int | float):
                continue
            with contextlib.suppress(BractError):
                declaration = declaration.updated({field: sent})
    return declaration


def read_statement(claimed: dict[str, Any]) -> ClientStatement:
    """Read a client's statement; the defenses that it names are known here, with their ranges."""
    statement = ClientStatement.of(claimed)
    for entry in statement.defenses or ():
        read_defense(entry)
    return statement


def read_defenses(reply: Message) -> Any:
    """Read the defenses that an app of its own declares, as JSON."""
    chain = reply.content.config_records[DEFENSES].get("chain")
    if not isinstance(chain, str):
        raise BractError(
            f"declared its defenses as a {type(chain).__name__}, expected JSON",
            code="message-malformed",
        )
    return parse_json(chain, most=16_384)


def or_flag(flags: list[str], read: Callable[[Any], Any], value: Any) -> Any:
    """Read a client's claim about itself; what cannot be read is flagged and left out."""
    try:
        return read(value)
    except (BractError, KeyError) as error:
        flags.append(f"{error_words(error)}; that was left out")
        return None


def error_words(error: Exception) -> str:
    """Return an error in one line, with its type where it is not bract's own."""
    text = one_line(error, 500)
    return text if isinstance(error, BractError) else f"{type(error).__name__}: {text}"
