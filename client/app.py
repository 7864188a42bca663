"""The ClientApp: what one client does with a message."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

import bract
from bract.client.defending import Defending
from bract.client.site import Site, pick_device
from bract.client.training import train_locally
from bract.client.truth import save_report, save_truth
from bract.config import FederationConfig, config_of_run
from bract.data import DataSpec, client_data, data_spec
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


@dataclass(frozen=True)
class _Session:
    site: Site
    config: FederationConfig
    spec: DataSpec
    model: nn.Module
    device: torch.device
    instructions: ConfigRecord
    server_round: int
    defending: Defending

    def receive(self, arrays: Tensors) -> None:
        """Load what the server sent into the model."""
        try:
            self.model.load_state_dict(arrays)
        except RuntimeError as error:
            raise BractError(
                f"{self.site.name}: the received parameters do not fit model "
                f"{self.config.model.name!r}: {error}"
            ) from error


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own data and reply with an update."""
    started = time.perf_counter()
    session = _open_session(message, context)
    site, config = session.site, session.config
    try:
        data = client_data(config, site.partition)
        held_out = (data.validation_images, data.validation_labels)
        # The received model is judged before training on it: no extra message round is needed.
        loss_before, accuracy_before = evaluate(
            session.model, *held_out, spec=session.spec, device=session.device
        )
        stranger = _accuracy_without_key(session, held_out)
        result = train_locally(
            session.model,
            data.images,
            data.labels,
            config=config.training,
            spec=session.spec,
            seed=derive_seed(config.seed, "train", site.partition, session.server_round),
            device=session.device,
            proximal_mu=_number(session.instructions.get(PROXIMAL_KEY, 0.0)),
        )
        first = result.used[: config.training.batch_size]
        trained = time.perf_counter()
        update = session.defending.protect(
            result.update,
            model=session.model,
            images=session.spec.normalise(data.images[first]).to(session.device),
            labels=data.labels[first].to(session.device),
        )
        defended = time.perf_counter()
    except torch.cuda.OutOfMemoryError as error:
        raise BractError(
            f"{site.name}: out of memory on {session.device} ({error}); lower "
            "training.batch_size, or give this client another device in its node config"
        ) from error
    except BractError as error:
        raise BractError(f"{site.name}: {error}") from error
    if site.truth_dir is not None:
        save_truth(
            site.truth_dir, session.server_round, data.images[result.used], data.labels[result.used]
        )
        if session.defending.report:
            save_report(site.truth_dir, session.server_round, session.defending.report)
    metrics = {
        "train_loss": result.loss,
        "train_accuracy": result.accuracy,
        "local_steps": float(result.steps),
        "seconds": time.perf_counter() - started,
    }
    if session.defending.declaration():
        metrics["defense_seconds"] = defended - trained
    if stranger is not None:
        metrics["random_key_accuracy"] = stranger
    if len(data.validation_images):
        metrics |= {"validation_loss": loss_before, "validation_accuracy": accuracy_before}
    if session.instructions.get(TRAINING_SCORE_KEY):
        used = (data.images[result.used], data.labels[result.used])
        loss, accuracy = evaluate(session.model, *used, spec=session.spec, device=session.device)
        metrics |= {"trained_loss": loss, "trained_accuracy": accuracy}
    return write_reply(
        client=site.name,
        version=bract.__version__,
        update=update,
        buffers=result.buffers,
        num_examples=len(result.used),
        metrics=metrics,
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
    session = _open_session(message, context)
    data = client_data(session.config, session.site.partition)
    loss, accuracy = evaluate(
        session.model,
        data.validation_images,
        data.validation_labels,
        spec=session.spec,
        device=session.device,
    )
    metrics = MetricRecord(
        {NUM_EXAMPLES_KEY: len(data.validation_images), "loss": loss, "accuracy": accuracy}
    )
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


@app.evaluate("fused")
def evaluate_fused(message: Message, context: Context) -> Message:
    """Score FedBoosting's fused models on the client's own validation share."""
    session = _open_session(message, context)
    data = client_data(session.config, session.site.partition)

    def score(arrays: Tensors) -> tuple[float, float]:
        session.receive(arrays)
        return evaluate(
            session.model,
            data.validation_images,
            data.validation_labels,
            spec=session.spec,
            device=session.device,
        )

    return answer_fused(message, score, num_examples=len(data.validation_images))


def _accuracy_without_key(session: _Session, held_out: tuple[Tensor, Tensor]) -> float | None:
    """Evaluate a locked model under a key and lock layers that are nobody's."""
    if not key_locks(session.model) or not len(held_out[0]):
        return None
    generator = session.defending.context.generator("random-key")
    stranger = with_random_key(session.model, generator)
    return evaluate(stranger, *held_out, spec=session.spec, device=session.device)[1]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _open_session(message: Message, context: Context) -> _Session:
    site = Site.from_node_config(context.node_config)
    try:
        instructions = message.content.config_records[CONFIG]
        theirs = str(instructions.get(VERSION_KEY))
        if theirs != bract.__version__:
            raise BractError(
                f"the server runs bract {theirs}, this client {bract.__version__}; "
                "install the same version on both"
            )
        config = config_of_run(context.run_config)
        spec = data_spec(config.data)
        model = create_model(
            config.model.name,
            classes=spec.classes,
            channels=spec.image_shape[0],
            image_size=spec.image_shape[1],
            activation=config.model.activation,
        )
        device = pick_device(site.device or config.device)
        server_round = instructions[ROUND_KEY]
        assert isinstance(server_round, int)
        defending = Defending.open(config, site, context, server_round)
        model = defending.chain.prepare_model(model)
    except BractError as error:
        raise BractError(f"{site.name}: {error}") from error
    session = _Session(site, config, spec, model, device, instructions, server_round, defending)
    if ARRAYS in message.content:
        session.receive(from_arrays(message.content.array_records[ARRAYS]))
    try:
        defending.attach(model)
    except BractError as error:
        raise BractError(f"{site.name}: {error}") from error
    return session
