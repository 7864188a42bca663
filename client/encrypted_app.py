"""Encryption for any ClientApp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

import bract
from bract.client.answers import Answers
from bract.client.defenses import build_defenses
from bract.client.encrypted.pins import Pins
from bract.client.gate import Gate, passing
from bract.client.mod import DefenseMod, Handler, check_visible
from bract.client.policy import SitePolicy, load_policy
from bract.client.policy_checks import check
from bract.client.requests import request_to_app
from bract.client.sealing import PaillierSealing, encrypted_client
from bract.client.site import Site
from bract.client.withholding import answer_of, round_metrics, withhold
from bract.config import build_config
from bract.errors import BractError
from bract.installed.versions import check_release
from bract.parse.strict_json import parse_json
from bract.protocol.arrays import to_arrays
from bract.protocol.keyexchange import DEAL_TYPE, FINAL_TYPE, HELLO_TYPE, PARTIAL_TYPE
from bract.protocol.records import (
    ARRAYS,
    CONFIG,
    DEFENSES,
    NUM_EXAMPLES_KEY,
    ROUND_KEY,
    VERSION_KEY,
    examples_of,
    instruction,
    instructions_of,
    read_metrics,
    read_weights,
    write_final,
    write_reply,
)

if TYPE_CHECKING:
    from bract.client.encrypted.client import EncryptedClient

NAME = "own-app"
"""Name under which a site keeps what belongs to such a run."""

_NO_EVALUATE = "No evaluate function registered"
"""How Flower's error begins of an app without a function to evaluate with."""


class EncryptedClientApp(ClientApp):
    """A ClientApp whose every update leaves encrypted.

    The app's functions get the plain global model, which this client keeps and the server never
    holds, and return local weights as usual. What leaves are ciphertexts, the number of examples
    and rounded metrics. The server's strategy is `bract.strategies.Encrypted`, with the same
    arguments. Every other message, and every failure, is answered with an error: no update leaves
    in the clear. The key is ``paillier-key`` of the node config, or comes in-band.

    Mods run inside: with `bract.client.DefenseMod` what is encrypted is the defended update.

    Examples
    --------
    ::

        app = EncryptedClientApp(clients=3, mods=[DefenseMod("adadefense")])

    Parameters
    ----------
    clients
        Clients of the run.
    mods
        As Flower's ClientApp takes them.
    encryption
        Fields of the ``encryption`` section, such as ``clip=4.0`` or ``keys="in-band"``.
    """

    def __init__(self, *, clients: int, mods: list[Any] | None = None, **encryption: Any) -> None:
        super().__init__(mods=mods)
        defending = [mod for mod in mods or () if isinstance(mod, DefenseMod)]
        for mod in defending:
            mod.encrypted = True
        # A mod holds the app's messages to the record itself.
        self._counts = not defending
        self.config = build_config(
            {"name": NAME, "clients": clients, "encryption": {**encryption, "scheme": "paillier"}}
        )

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message; state is read per message, in Flower's fresh process."""
        call_next = super().__call__
        return passing(
            message, context, lambda gate: self._answer(gate, message, context, call_next)
        )

    def _answer(self, gate: Gate, msg: Message, context: Context, call_next: Handler) -> Message:
        with gate.own_settings():
            site = Site.from_node_config(context.node_config)
            policy = load_policy(site.policy)
            pins = Pins.from_node_config(context.node_config)
        check_visible(policy, encrypts=True)
        check_release(str(instruction(msg.content, VERSION_KEY)))
        pins.check_run(self.config, site.paillier_key)
        # The app's own settings are in Flower's run config, and decide an update too.
        client = encrypted_client(
            self.config, site, context, msg.content, run_config=context.run_config
        )
        kind = msg.metadata.message_type
        if kind == HELLO_TYPE:
            return Message(client.hello().to_content(), reply_to=msg)
        if kind == DEAL_TYPE:
            return Message(client.deal(msg.content), reply_to=msg)
        if kind == PARTIAL_TYPE:
            return Message(client.partial(msg.content), reply_to=msg)
        if kind not in (MessageType.TRAIN, FINAL_TYPE):
            raise BractError(
                f"no message of type {kind} is answered in an encrypted run",
                code="request-refused",
            )
        request = request_to_app(msg, context, federation=NAME)
        number = request.server_round
        if number is None:
            raise BractError(f"the message's {ROUND_KEY} is missing", code="message-malformed")
        if self._counts:
            check(policy, build_defenses([]))
            answers = Answers(context.state, directory=gate.folder, site=site.name, policy=policy)
            kept = gate.admit(answers, request)
            if kept is not None:
                return Message(kept, reply_to=msg)
        sealing = PaillierSealing(client, msg.content, number)
        instead = sealing.ready()
        if instead is not None:
            return Message(instead, reply_to=msg)
        work = self._finish if kind == FINAL_TYPE else self._train
        if not self._counts:
            gate.open_uncounted()
            return work(msg, context, call_next, client, sealing, policy)
        gate.open()
        return gate.keep(work(msg, context, call_next, client, sealing, policy))

    def _train(
        self,
        msg: Message,
        context: Context,
        call_next: Handler,
        client: EncryptedClient,
        sealing: PaillierSealing,
        policy: SitePolicy,
    ) -> Message:
        """Let the app train on the plain model, and reply with ciphertexts."""
        sent = dict(client.model)
        reply = _asked(msg, context, call_next, sent, MessageType.TRAIN)
        chain = _applied(reply)
        check(policy, build_defenses(chain))
        withhold(reply, policy, hidden=True)
        round_metrics(reply, policy)
        answer = read_weights(reply, sent)
        # The order in which a model is kept is not that in which it was sent; sums need one order.
        update, buffers = (dict(sorted(t.items())) for t in (answer.update, answer.buffers))
        sealed, figures = sealing.seal(update, buffers)
        return write_reply(
            client=client.site.name,
            version=bract.__version__,
            update={},
            buffers={},
            num_examples=answer.num_examples,
            metrics=answer.metrics | figures,
            declaration={
                "num_examples": answer.num_examples,
                "encryption": self.config.encryption.scheme,
                "defenses": chain,
            },
            reply_to=msg,
            packed=False,
            **sealed,
        )

    def _finish(
        self,
        msg: Message,
        context: Context,
        call_next: Handler,
        client: EncryptedClient,
        sealing: PaillierSealing,
        policy: SitePolicy,
    ) -> Message:
        """Keep the final model; let the app evaluate it, where it evaluates at all."""
        sealing.keep_final()
        name, model = client.site.name, dict(client.model)
        try:
            # The last aggregate comes in a message after the last round, which the app never ran.
            last = client.model_round
            reply = _asked(msg, context, call_next, model, MessageType.EVALUATE, number=last)
        except ValueError as error:
            if not str(error).startswith(_NO_EVALUATE):
                raise
            return write_final(name, client.seconds, num_examples=0, reply_to=msg)
        round_metrics(reply, policy)
        found = _metrics(reply)
        examples = examples_of(found.pop(NUM_EXAMPLES_KEY, None))
        if examples < policy.min_validation_images:
            found = {}
        return write_final(name, found | client.seconds, num_examples=examples, reply_to=msg)


def _asked(
    msg: Message,
    context: Context,
    call_next: Handler,
    model: Mapping[str, Tensor],
    kind: str,
    *,
    number: int | None = None,
) -> Message:
    """Return the app's reply to a plain message with this model, of round ``number``."""
    content, asked = msg.content, msg.metadata.message_type
    config = instructions_of(content)
    if number is not None:
        config = ConfigRecord({**config, ROUND_KEY: number})
    msg.content = RecordDict({ARRAYS: to_arrays(model), CONFIG: config})
    msg.metadata.message_type = kind
    try:
        reply = call_next(msg, context)
    finally:
        msg.content, msg.metadata.message_type = content, asked
    return answer_of(reply)


def _applied(reply: Message) -> list[dict[str, Any]]:
    """Return the defenses that `DefenseMod` applied within this client."""
    record = reply.content.config_records.get(DEFENSES)
    if record is None:
        return []
    found: list[dict[str, Any]] = parse_json(str(record["chain"]), most=16_384)
    return found


def _metrics(reply: Message) -> dict[str, float]:
    records = reply.content.metric_records.values()
    return read_metrics({name: value for record in records for name, value in record.items()})
