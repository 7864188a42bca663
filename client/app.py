"""The ClientApp: what one client does with a message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import bract
from bract.client.defending import Defending
from bract.client.site import Site, pick_device
from bract.client.training import LocalResult, train_locally
from bract.client.truth import save_report, save_truth
from bract.config import FederationConfig, config_of_run
from bract.data import ClientData, DataSpec, client_data, data_spec
from bract.errors import BractError
from bract.evaluation import evaluate
from bract.fused import TRAINING_SCORE_KEY, answer_fused
from bract.models import create_model, key_locks, with_random_key
from bract.records import (
    ARRAYS,
    CONFIG,
    METRICS,
    NUM_EXAMPLES_KEY,
    PROXIMAL_KEY,
    ROUND_KEY,
    VERSION_KEY,
    from_arrays,
    write_reply,
)
from bract.seeds import derive_seed
from bract.update import Tensors

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own data and reply with a defended update."""
    started = time.perf_counter()
    with _session(message, context) as session:
        data = session.data()
        config = session.config
        # The received model is judged before training on it: no extra message round is needed.
        metrics = session.validate(data)
        result = train_locally(
            session.model,
            data.images,
            data.labels,
            config=config.training,
            spec=session.spec,
            seed=derive_seed(config.seed, "train", session.site.partition, session.server_round),
            device=session.device,
            proximal_mu=_number(session.instructions.get(PROXIMAL_KEY, 0.0)),
        )
        trained = time.perf_counter()
        update = session.protect(result, data)
        metrics |= {
            "train_loss": result.loss,
            "train_accuracy": result.accuracy,
            "local_steps": float(result.steps),
            "defense_seconds": time.perf_counter() - trained,
        }
        if session.instructions.get(TRAINING_SCORE_KEY):
            loss, accuracy = session.score(data.images[result.used], data.labels[result.used])
            metrics |= {"trained_loss": loss, "trained_accuracy": accuracy}
        session.keep_truth(result, data)
        return write_reply(
            client=session.site.name,
            version=bract.__version__,
            update=update,
            buffers=result.buffers,
            num_examples=len(result.used),
            metrics=metrics | {"seconds": time.perf_counter() - started},
            protocol={
                "local_steps": result.steps,
                "num_examples": len(result.used),
                "batch_size": min(config.training.batch_size, len(result.used)),
                **session.defending.declaration(),
            },
            reply_to=message,
        )


@app.evaluate()
def evaluate_global(message: Message, context: Context) -> Message:
    """Evaluate the received model on the client's own validation share."""
    with _session(message, context) as session:
        data = session.data()
        loss, accuracy = session.score(data.validation_images, data.validation_labels)
        metrics = MetricRecord(
            {NUM_EXAMPLES_KEY: len(data.validation_images), "loss": loss, "accuracy": accuracy}
        )
        return Message(RecordDict({METRICS: metrics}), reply_to=message)


@app.evaluate("fused")
def evaluate_fused(message: Message, context: Context) -> Message:
    """Score FedBoosting's fused models on the client's own validation share."""
    with _session(message, context) as session:
        data = session.data()

        def score(arrays: Tensors) -> tuple[float, float]:
            session.receive(arrays)
            return session.score(data.validation_images, data.validation_labels)

        return answer_fused(message, score, num_examples=len(data.validation_images))


@dataclass(frozen=True)
class _Session:
    """One message at one client: what it was sent, what it agreed to, what is its own."""

    site: Site
    config: FederationConfig
    spec: DataSpec
    model: nn.Module
    device: torch.device
    defending: Defending
    instructions: ConfigRecord
    server_round: int

    def receive(self, arrays: Tensors) -> None:
        """Load what the server sent into the model."""
        try:
            self.model.load_state_dict(arrays)
        except RuntimeError as error:
            raise BractError(
                f"the received parameters do not fit model {self.config.model.name!r}: {error}"
            ) from error

    def data(self) -> ClientData:
        """Decode this client's part of the data."""
        return client_data(self.config, self.site.partition)

    def score(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Return loss and accuracy of the model as it stands."""
        return evaluate(self.model, images, labels, spec=self.spec, device=self.device)

    def validate(self, data: ClientData) -> dict[str, float]:
        """Judge the received model on the validation share, also under a key that is nobody's."""
        held_out = (data.validation_images, data.validation_labels)
        if not len(held_out[0]):
            return {}
        loss, accuracy = self.score(*held_out)
        metrics = {"validation_loss": loss, "validation_accuracy": accuracy}
        if key_locks(self.model):
            generator = self.defending.context.generator("random-key")
            stranger = with_random_key(self.model, generator)
            _, accuracy = evaluate(stranger, *held_out, spec=self.spec, device=self.device)
            metrics["random_key_accuracy"] = accuracy
        return metrics

    def protect(self, result: LocalResult, data: ClientData) -> Tensors:
        """Return what may leave this client, and keep what must not.

        Raises
        ------
        BractError
            If a defense fails: then nothing is sent.
        """
        first = result.used[: self.config.training.batch_size]
        return self.defending.protect(
            result.update,
            model=self.model,
            images=self.spec.normalise(data.images[first].to(self.device)),
            labels=data.labels[first].to(self.device),
        )

    def keep_truth(self, result: LocalResult, data: ClientData) -> None:
        """Write what was trained on to this client's disk, where its operator switched it on."""
        folder = self.site.truth_dir
        if folder is None:
            return
        save_truth(folder, self.server_round, data.images[result.used], data.labels[result.used])
        if self.defending.report:
            save_report(folder, self.server_round, self.defending.report)


@contextmanager
def _session(message: Message, context: Context) -> Iterator[_Session]:
    """Open a message; every error that leaves names the client."""
    name = f"node-{context.node_id}"
    try:
        site = Site.from_node_config(context.node_config)
        name = site.name
        yield _open(site, message, context)
    except torch.cuda.OutOfMemoryError as error:
        raise BractError(
            f"{name}: out of GPU memory ({error}); lower training.batch_size, or give this client "
            "another device in its node config"
        ) from error
    except BractError as error:
        raise type(error)(f"{name}: {error}") from error


def _open(site: Site, message: Message, context: Context) -> _Session:
    instructions = message.content.config_records[CONFIG]
    theirs = str(instructions.get(VERSION_KEY))
    if theirs != bract.__version__:
        raise BractError(
            f"the server runs bract {theirs}, this client {bract.__version__}; "
            "install the same version on both"
        )
    config = config_of_run(context.run_config)
    server_round = instructions[ROUND_KEY]
    assert isinstance(server_round, int)
    defending = Defending.open(config, site, context, server_round)
    spec = data_spec(config.data)
    model = defending.chain.prepare_model(
        create_model(
            config.model.name,
            classes=spec.classes,
            channels=spec.image_shape[0],
            image_size=spec.image_shape[1],
            activation=config.model.activation,
        )
    )
    device = pick_device(site.device or config.device)
    session = _Session(
        site=site,
        config=config,
        spec=spec,
        model=model,
        device=device,
        defending=defending,
        instructions=instructions,
        server_round=server_round,
    )
    if ARRAYS in message.content:
        session.receive(from_arrays(message.content.array_records[ARRAYS]))
    defending.attach(model)
    return session


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
