"""Open a message at the site's gate, for what it asks of the client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flwr.app import Context, Message

from bract.client.accounting import mechanism_of
from bract.client.agreement import agree, request_of
from bract.client.assignment import assignment_secret
from bract.client.defending import Defending
from bract.client.gate import Gate, guarded
from bract.client.guarding import check_guard_installed
from bract.client.sealing import PlainSealing, encrypted_client, masked_client, sealing_of
from bract.client.session import Session
from bract.process.logs import log_to_stderr

if TYPE_CHECKING:
    from bract.client.encrypted.client import EncryptedClient
    from bract.client.masked import MaskedClient


@contextmanager
def open_session(message: Message, context: Context) -> Iterator[Session]:
    """Admit a message; every error that leaves names the client."""
    log_to_stderr()
    with guarded(context) as gate:
        yield _admit(gate, message, context)


@contextmanager
def open_encrypted(message: Message, context: Context) -> Iterator[EncryptedClient]:
    """Open a message about keys; no data and no model are needed for it."""
    log_to_stderr()
    with guarded(context) as gate:
        agreed = agree(gate, message, context)
        yield encrypted_client(agreed.config, agreed.site, context, message.content)


@contextmanager
def open_masked(message: Message, context: Context) -> Iterator[MaskedClient]:
    """Open a message about masks; no model is needed for it, and of the data only their number."""
    log_to_stderr()
    with guarded(context) as gate:
        agreed = agree(gate, message, context)

        def open_data() -> None:
            gate.admit(agreed.answers(context), request_of(agreed, message, context))
            gate.open()

        yield masked_client(
            agreed.config, agreed.site, agreed.policy, context, message.content, open_data
        )


def _admit(gate: Gate, message: Message, context: Context) -> Session:
    """Hold a message against the site's policy and record; the data stay closed."""
    agreed = agree(gate, message, context)
    site, config = agreed.site, agreed.config
    request, answers = request_of(agreed, message, context), agreed.answers(context)
    assert request.server_round is not None
    private = request.trains and config.training.private is not None
    mechanism = mechanism_of(agreed.chain) if request.trains and not private else None
    if agreed.policy.guard is not None:
        mechanism = None  # no noise covers the choice of a guard
        with gate.own_settings():
            check_guard_installed()
            answers.check_guard(request, agreed.policy.guard)
    instead = gate.admit(answers, request, mechanism, charged=not private)
    with gate.own_settings():
        secret = assignment_secret(config, site, context.state)
    session = Session(
        gate=gate,
        site=site,
        policy=agreed.policy,
        answers=answers,
        request=request,
        message=message,
        config=config,
        defending=Defending.open(agreed.chain, config, site, context, request.server_round),
        sealing=PlainSealing(message.content),
        instructions=agreed.instructions,
        instead=instead,
        mechanism=mechanism,
        secret=secret,
    )
    session.instead = session.instead or session.absence()
    if session.instead is None:
        session.sealing = sealing_of(
            config,
            site,
            agreed.policy,
            context,
            message.content,
            server_round=request.server_round,
            trains=request.trains,
        )
        session.instead = session.sealing.ready()
    return session
