"""Messages to an app other than bract's own, as the record of answers knows them."""

from __future__ import annotations

import hashlib

from flwr.app import Context, Message, MessageType

from bract.client.answered import QUERY, Request
from bract.client.policy import PolicyError
from bract.client.replies import digest
from bract.errors import shown
from bract.protocol.keyexchange import FINAL_TYPE
from bract.protocol.records import ROUND_KEY, stated_round

ROUNDS_KEY = "num-server-rounds"
"""Run config key that declares the rounds, as Flower's own templates call it."""


def request_to_app(
    msg: Message, context: Context, *, federation: str = "", scored: bool = False
) -> Request:
    """Return a message to an app other than bract's own, as the record of answers knows it.

    Parameters
    ----------
    scored
        Whether the answer to a query holds scores, of which a round has one of each kind.

    Raises
    ------
    PolicyError
        If the round is no whole number, or two records give it differently.
    """
    number = one_value(msg, ROUND_KEY)
    if number is None:
        number = stated_round(msg)
    declared = context.run_config.get(ROUNDS_KEY)
    kind = msg.metadata.message_type
    query = kind.partition(".")[0] not in (MessageType.TRAIN, MessageType.EVALUATE)
    if not query and number is not None and type(number) is not int:
        raise PolicyError(
            f"a {shown(kind)} message gives {ROUND_KEY} as {shown(number)}, expected a whole "
            "number; an app may read a round of it that its site does not count"
        )
    if query and scored:
        kind, query = f"scores.{kind}", False
    return Request(
        kind=QUERY if query else kind,
        server_round=number if not query and type(number) is int else None,
        digest=digest(msg.content),
        run=context.run_id,
        federation=federation,
        config=hashlib.sha256(repr(sorted(context.run_config.items())).encode()).hexdigest(),
        # An encrypted run's final model comes in a round of its own.
        last_round=declared + (kind == FINAL_TYPE) if type(declared) is int else None,
    )


def one_value(msg: Message, key: str) -> object:
    """Return what a message's config records give for a key; None where none does.

    Raises
    ------
    PolicyError
        If two records differ in it: the app could read another one than was checked.
    """
    found = [r[key] for r in msg.content.config_records.values() if key in r]
    if any(value != found[0] for value in found):
        raise PolicyError(
            f"was sent {len(found)} config records that give {key}: {shown(found)}; an app could "
            "read another one than its site checks. Send one"
        )
    return found[0] if found else None
