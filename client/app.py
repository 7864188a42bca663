"""The ClientApp: what one client does with a message."""

from __future__ import annotations

import math
import time

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import bract
from bract.client.opening import open_encrypted, open_masked, open_session
from bract.client.session import Session
from bract.data.views import ClientData
from bract.errors import BractError, shown
from bract.process.timeline import span
from bract.protocol.fused import MODELS_KEY, answer_fused
from bract.protocol.records import (
    DECLARED,
    METRICS,
    NUM_EXAMPLES_KEY,
    PACKING_KEY,
    PROXIMAL_KEY,
    write_final,
    write_reply,
)
from bract.updates.rounding import rounded
from bract.updates.ties import Ties
from bract.updates.update import Tensors

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own data and reply with a defended update."""
    started = time.perf_counter()
    with open_session(message, context) as session:
        if session.instead is not None:
            return Message(session.instead, reply_to=message)
        mu = _proximal_mu(session.instructions.get(PROXIMAL_KEY, 0.0))
        with span("load data"):
            data = session.open()
        reply = _train(session, data, mu, message, started)
        with span("keep the answer"):
            return session.gate.keep(reply)


def _train(
    session: Session, data: ClientData, proximal_mu: float, message: Message, started: float
) -> Message:
    """Train, defend and seal; ``started`` is when the message came, by `time.perf_counter`."""
    config = session.config
    # The received model is judged before training on it: no extra message round is needed.
    with span("canaries"):
        data, canaries = session.with_canaries(data)
    with span("validate"):
        metrics = session.validate(data)
    ties = Ties.of(session.model)
    with span("train"):
        result = session.train(data, proximal_mu)
    trained = time.perf_counter()
    with span("defend"):
        out = session.outgoing(result, data, proximal_mu, canaries)
    update, result = out.update, out.result
    metrics["defense_seconds"] = time.perf_counter() - trained
    with span("keep truth, judge"):
        metrics |= session.training_metrics(result, data)
        session.keep_truth(result, data)
    # Last of all, so that defenses work on float32; any noise is in it already.
    sent, _ = rounded(update, config.training.update_dtype)
    buffers = result.buffers | ties.after(sent, config.strategy.server_lr)
    with span("encrypt"):
        sealed, figures = session.sealing.seal(update, buffers)
    metrics |= figures
    return write_reply(
        client=session.site.name,
        version=bract.__version__,
        update=sent,
        buffers=buffers,
        num_examples=result.num_examples,
        metrics=session.rounded(metrics) | {"seconds": time.perf_counter() - started},
        declaration={
            "local_steps": result.steps,
            "num_examples": result.num_examples,
            "batch_size": min(out.batch_size, result.num_examples),
            "encryption": config.encryption.scheme,
            **session.declared_defenses(),
        },
        reply_to=message,
        packed=session.instructions.get(PACKING_KEY) is True,
        **sealed,
    )


@app.evaluate()
def evaluate_global(message: Message, context: Context) -> Message:
    """Evaluate the received model on the client's own validation share."""
    with open_session(message, context) as session:
        if session.instead is not None:
            return Message(session.instead, reply_to=message)
        data = session.open_to_score()
        loss, accuracy = session.score(data.validation_images, data.validation_labels)
        found = session.rounded({"loss": loss, "accuracy": accuracy})
        metrics = MetricRecord({NUM_EXAMPLES_KEY: len(data.validation_images), **found})
        return session.gate.keep(Message(RecordDict({METRICS: metrics}), reply_to=message))


@app.evaluate("fused")
def evaluate_fused(message: Message, context: Context) -> Message:
    """Score FedBoosting's fused models on the client's own validation share."""
    with open_session(message, context) as session:
        if session.instead is not None:
            return Message(session.instead, reply_to=message)
        session.check_fused(session.instructions.get(MODELS_KEY))
        with span("load data"):
            data = session.open_to_score()

        def score(arrays: Tensors) -> tuple[float, float]:
            session.receive(session.sealing.open(arrays))
            loss, accuracy = session.score(data.validation_images, data.validation_labels)
            return session.policy.rounded(loss), session.policy.rounded(accuracy)

        with span("score fused models"):
            reply = answer_fused(
                message,
                score,
                num_examples=len(data.validation_images),
                signal=session.config.strategy.scored,
            )
        with span("keep the answer"):
            return session.gate.keep(reply)


@app.evaluate("final")
def finish(message: Message, context: Context) -> Message:
    """Apply an encrypted run's last aggregate, judge the final model and keep it."""
    with open_session(message, context) as session:
        if session.instead is not None:
            return Message(session.instead, reply_to=message)
        if not session.sealing.judges:
            raise BractError(
                "was asked to keep the final model, which the server of this run holds itself",
                code="request-refused",
            )
        data = session.open()
        metrics = session.validate(data)
        session.sealing.keep_final()
        reply = write_final(
            session.site.name,
            session.rounded(metrics) | session.sealing.figures,
            num_examples=len(data.images),
            reply_to=message,
        )
        return session.gate.keep(reply)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Announce this client, with the key and model that it holds."""
    with open_encrypted(message, context) as client:
        return Message(client.hello().to_content(), reply_to=message)


@app.query("deal")
def deal(message: Message, context: Context) -> Message:
    """Box the private key, or shares of it, for the other clients."""
    with open_encrypted(message, context) as client:
        return Message(client.deal(message.content), reply_to=message)


@app.query("partial")
def partial(message: Message, context: Context) -> Message:
    """Help to decrypt aggregates with this client's key share."""
    with open_encrypted(message, context) as client:
        return Message(client.partial(message.content), reply_to=message)


@app.query("advertise")
def advertise(message: Message, context: Context) -> Message:
    """Announce this client's keys of a masked sum."""
    with open_masked(message, context) as client:
        return _by_name(client.site.name, client.advertise(), message)


@app.query("share")
def share(message: Message, context: Context) -> Message:
    """Share the seeds of this client's masks among its neighbours."""
    with open_masked(message, context) as client:
        return _by_name(client.site.name, client.share(message.content), message)


@app.query("open")
def open_shares(message: Message, context: Context) -> Message:
    """Take the shares of the neighbours' seeds."""
    with open_masked(message, context) as client:
        return _by_name(client.site.name, client.open(message.content), message)


@app.query("agree")
def agree_on_survivors(message: Message, context: Context) -> Message:
    """Seal who answered for the neighbours."""
    with open_masked(message, context) as client:
        return _by_name(client.site.name, client.agree(message.content), message)


@app.query("unmask")
def unmask(message: Message, context: Context) -> Message:
    """Reveal one share of each client, of whom the sum takes off masks."""
    with open_masked(message, context) as client:
        return _by_name(client.site.name, client.unmask(message.content), message)


def _by_name(client: str, content: RecordDict, message: Message) -> Message:
    content[DECLARED] = ConfigRecord({"client": client})
    return Message(content, reply_to=message)


def _proximal_mu(value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value) and value >= 0.0:
        return float(value)
    raise BractError(
        f"the server sent {PROXIMAL_KEY} {shown(value)}, expected a finite number from 0; set "
        "strategy.proximal_mu",
        code="message-malformed",
    )
