"""One message at one client: what it was sent, what it agreed to, and what is its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn

import bract
from bract.client.defending import Defending
from bract.client.site import Site, pick_device
from bract.client.training import LocalResult
from bract.client.truth import save_report, save_truth
from bract.config import FederationConfig, config_of_run
from bract.data import ClientData, DataSpec, client_data, data_spec, test_data
from bract.errors import BractError
from bract.evaluation import evaluate
from bract.logs import log_to_stderr
from bract.models import create_model, key_locks, with_random_key
from bract.records import ARRAYS, CONFIG, ROUND_KEY, VERSION_KEY, from_arrays
from bract.update import Tensors

if TYPE_CHECKING:
    from bract.client.encryption import EncryptedClient


@dataclass(frozen=True)
class Session:
    """One message at one client: what it was sent, what it agreed to, what is its own."""

    site: Site
    config: FederationConfig
    spec: DataSpec
    model: nn.Module
    device: torch.device
    defending: Defending
    instructions: ConfigRecord
    server_round: int
    encrypted: EncryptedClient | None = None
    lacks: RecordDict | None = None
    """What to answer where this client cannot follow: it lacks a key or an aggregate."""

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
        metrics = {}
        if self.encrypted is not None and self.site.public_test:
            loss, accuracy = self.score(*test_data(self.config.data))
            metrics = {"test_loss": loss, "test_accuracy": accuracy}
        held_out = (data.validation_images, data.validation_labels)
        if not len(held_out[0]):
            return metrics
        loss, accuracy = self.score(*held_out)
        metrics |= {"validation_loss": loss, "validation_accuracy": accuracy}
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

    def encrypt(
        self, update: Tensors, buffers: Tensors
    ) -> tuple[ArrayRecord | None, dict[str, float]]:
        """Encrypt what `protect` returned, where the run asks for it; figures for the server."""
        if self.encrypted is None:
            return None, {}
        ciphertexts, figures = self.encrypted.encrypt(update, buffers)
        return ciphertexts.to_record(), figures | self.encrypted.seconds

    def keep_truth(self, result: LocalResult, data: ClientData) -> None:
        """Write what was trained on to this client's disk, where its operator switched it on."""
        folder = self.site.truth_dir
        if folder is None:
            return
        save_truth(folder, self.server_round, data.images[result.used], data.labels[result.used])
        if self.defending.report:
            save_report(folder, self.server_round, self.defending.report)


@contextmanager
def open_session(message: Message, context: Context) -> Iterator[Session]:
    """Open a message; every error that leaves names the client."""
    with _named(context) as site:
        yield _open(site, message, context)


@contextmanager
def open_encrypted(message: Message, context: Context) -> Iterator[EncryptedClient]:
    """Open a message about keys; no data and no model are needed for it."""
    with _named(context) as site:
        config, _ = _agree(site, message, context)
        yield _encrypted_client(config, site, message, context)


@contextmanager
def _named(context: Context) -> Iterator[Site]:
    log_to_stderr()
    name = f"node-{context.node_id}"
    try:
        site = Site.from_node_config(context.node_config)
        name = site.name
        yield site
    except torch.cuda.OutOfMemoryError as error:
        raise BractError(
            f"{name}: out of GPU memory ({error}); lower training.batch_size, or give this client "
            "another device in its node config"
        ) from error
    except BractError as error:
        raise type(error)(f"{name}: {error}") from error


def _agree(site: Site, message: Message, context: Context) -> tuple[FederationConfig, ConfigRecord]:
    instructions = message.content.config_records[CONFIG]
    theirs = str(instructions.get(VERSION_KEY))
    if theirs != bract.__version__:
        raise BractError(
            f"the server runs bract {theirs}, this client {bract.__version__}; "
            "install the same version on both"
        )
    config = config_of_run(context.run_config)
    if site.paillier_key is not None and not config.encryption.enabled:
        raise BractError(
            "this client was given a Paillier key, but the run would send updates unencrypted; "
            "set encryption: paillier, or take paillier-key out of the node config"
        )
    return config, instructions


def _encrypted_client(
    config: FederationConfig, site: Site, message: Message, context: Context
) -> EncryptedClient:
    # gmpy2 and phe are loaded by the clients of encrypted runs only.
    from bract.client.encryption import EncryptedClient

    if not config.encryption.enabled:
        raise BractError("was asked for a key, but the run has encryption.scheme: none")
    return EncryptedClient(config, site, context, message.content)


def _open(site: Site, message: Message, context: Context) -> Session:
    config, instructions = _agree(site, message, context)
    server_round = instructions[ROUND_KEY]
    assert isinstance(server_round, int)
    defending = Defending.open(config, site, context, server_round)
    encrypted = lacks = None
    if config.encryption.enabled:
        encrypted = _encrypted_client(config, site, message, context)
        if not encrypted.catch_up(message.content, server_round):
            lacks = encrypted.hello().to_content()
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
    session = Session(
        site=site,
        config=config,
        spec=spec,
        model=model,
        device=device,
        defending=defending,
        instructions=instructions,
        server_round=server_round,
        encrypted=encrypted,
        lacks=lacks,
    )
    if encrypted is not None and lacks is None:
        session.receive(encrypted.model)
    elif ARRAYS in message.content:
        session.receive(from_arrays(message.content.array_records[ARRAYS]))
    defending.attach(model)
    return session
