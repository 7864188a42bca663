"""One message at one client: its content, the agreement, and the client's own data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn

from bract.client.accounting import Mechanism, mechanism_of
from bract.client.agreement import agree, check_start, request_of
from bract.client.answered import Request
from bract.client.answers import Answers
from bract.client.canaries import Canaries, open_canaries
from bract.client.candidates import keep_candidates
from bract.client.defending import Defending
from bract.client.defenses import DefenseChain
from bract.client.failures import hiding
from bract.client.policy import PolicyError, SitePolicy, refuse
from bract.client.private import warn_of_open_folders
from bract.client.refusals import note_refusal
from bract.client.site import Site, pick_device
from bract.client.training import LocalResult, planned_steps, train_locally
from bract.client.truth import save_report, save_truth
from bract.config import FederationConfig
from bract.data.views import (
    ClientData,
    DataSpec,
    client_data,
    data_spec,
    test_data,
    training_examples,
)
from bract.defenses.configured import configured_model
from bract.errors import BractError, not_installed, one_line, out_of_memory, reworded
from bract.logs import log_to_stderr
from bract.models.evaluation import evaluate
from bract.models.keylock import key_locks, with_random_key
from bract.protocol.arrays import from_arrays, to_arrays, view_arrays
from bract.protocol.fused import TRAINING_SCORE_KEY
from bract.protocol.records import ARRAYS, write_absence
from bract.protocol.update import Tensors, buffers_of

if TYPE_CHECKING:
    from bract.client.encrypted.client import EncryptedClient
    from bract.client.masked import MaskedClient

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """One message at one client: its content, the agreement, and the client's own data."""

    site: Site
    policy: SitePolicy
    answers: Answers
    request: Request
    mechanism: Mechanism | None
    config: FederationConfig
    spec: DataSpec
    model: nn.Module
    device: torch.device
    defending: Defending
    instructions: ConfigRecord
    server_round: int
    encrypted: EncryptedClient | None = None
    masked: MaskedClient | None = None
    received: ArrayRecord | None = None
    instead: RecordDict | None = None
    """What to answer in place of work: what this client lacks (a key, an aggregate), that it trains
    from a later round on, or the reply of before where this is the same message once more."""

    def receive(self, arrays: Tensors) -> None:
        """Load the received parameters into the model."""
        try:
            self.model.load_state_dict(arrays)
        except RuntimeError as error:
            raise BractError(
                f"the received parameters do not fit model {self.config.model.name!r}: "
                f"{one_line(error, 300)}",
                code="model-mismatch",
            ) from error

    def data(self) -> ClientData:
        """Decode this client's part of the data.

        A decoder's error names files of the site, so the server reads none.
        """
        with hiding(f"reading the data of round {self.server_round}", own=False):
            return client_data(self.site.local(self.config), self.site.part)

    def with_canaries(self, data: ClientData) -> tuple[ClientData, Canaries | None]:
        """Return the data with the canaries that this site includes, where the run asks for any."""
        found = open_canaries(
            self.config.canaries,
            self.policy,
            self.site.truth_dir,
            data,
            self.spec,
            run=self.request.run,
            rounds=self.config.rounds,
            model=self.model,
        )
        return (data, None) if found is None else (found.extend(data), found)

    def score(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Return loss and accuracy of the model in its present state."""
        return evaluate(self.model, images, labels, spec=self.spec, device=self.device)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count the message as answered, then work on this site's data for it.

        A failure that depends on the data, such as NaN where an image is dark, is one more answer:
        it costs the round, and reads the same whatever failed.

        Raises
        ------
        PolicyError
            If the message must not be answered.
        BractError
            `bract.client.failures.FAILED`, if the block fails.
        """
        self.answers.commit(self.request, self.mechanism)
        with hiding(f"{self.request.kind} of round {self.server_round}"):
            yield

    def answer(self, reply: Message) -> Message:
        """Keep ``reply`` for the same message once more, and return it."""
        self.answers.keep(self.request, reply.content)
        return reply

    def train(self, data: ClientData, seed: int, proximal_mu: float) -> LocalResult:
        """Train the model, with noise on every step where the run asks for per-example privacy."""
        work: dict[str, Any] = {
            "config": self.config.training.at(self.server_round, self.config.rounds),
            "spec": self.spec,
            "seed": seed,
            "device": self.device,
            "proximal_mu": proximal_mu,
        }
        if self.config.training.private is None:
            return train_locally(self.model, data.images, data.labels, **work)
        # Opacus is loaded by the clients of such runs only.
        from bract.client.private_training import train_privately

        assert self.mechanism is not None
        stream = self.defending.context.stream("per-example")
        return train_privately(
            self.model,
            data.images,
            data.labels,
            mechanism=self.mechanism,
            stream=stream,
            **work,
        )

    def declared_defenses(self) -> dict[str, Any]:
        """Return the defenses of this update, as the protocol declares them."""
        private = self.config.training.private
        if private is None or self.mechanism is None:
            return self.defending.declaration()
        entry = private.declared() | {"noise_multiplier": self.mechanism.multiplier}
        return {"defenses": [entry, *self.defending.chain.public()]}

    def check_training(self, data: ClientData) -> None:
        """Refuse local training that the site's policy does not allow on its data."""
        policy, training, count = self.policy, self.config.training, len(data.images)
        problems = policy.local_steps.violations("local steps", planned_steps(training, count))
        problems += policy.batch_size.violations("a batch", min(training.batch_size, count))
        if count < policy.min_training_images:
            problems.append(
                f"training images must be at least {policy.min_training_images}, the run's "
                f"partition gives this site {count}"
            )
        refuse(problems, self.defending.chain)

    def check_validation(self, data: ClientData) -> None:
        """Refuse scores from which the server could read single images."""
        found, least = len(data.validation_images), self.policy.min_validation_images
        if found < least:
            raise PolicyError(
                f"was asked to score a model on {found} images, and this site's policy demands "
                f"min_validation_images: {least}; raise data.validation, or ask the site"
            )

    def check_fused(self, models: object) -> None:
        """Refuse to score more fused models than a round of the run's strategy has.

        Parameters
        ----------
        models
            Number of models that the message asks to score.
        """
        if self.config.strategy.scored is None:
            raise PolicyError(
                f"was asked to score fused models, but the run's strategy "
                f"{self.config.strategy.name!r} fuses none"
            )
        self.policy.check_models(models, self.config.clients)

    def training_metrics(self, result: LocalResult, data: ClientData) -> dict[str, float]:
        """Return the metrics of local training for the server, and FedBoosting's score T.

        With an update that is defended or encrypted, loss and accuracy of training are not sent
        unless the site's policy allows it: they reveal of the batch what the update was to hide.
        """
        metrics = {"local_steps": float(result.steps)}
        if self.config.training.private is not None:
            metrics["epsilon_spent"] = self.answers.epsilon()
            _log.info("epsilon %.4g spent by all updates of this site", metrics["epsilon_spent"])
        private = self.config.training.private is not None
        hidden = bool(len(self.defending.chain)) or self.config.encryption.enabled or private
        if self.policy.tells_training(hidden=hidden):
            metrics |= {"train_loss": result.loss, "train_accuracy": result.accuracy}
        strategy = self.config.strategy
        if strategy.name == "fedboosting" and self.instructions.get(TRAINING_SCORE_KEY):
            loss, accuracy = self.score(data.images[result.used], data.labels[result.used])
            exact = accuracy if strategy.signal == "accuracy" else loss
            score = self.policy.training_score(exact, len(result.used), hidden=hidden)
            if score is None:
                _log.warning(
                    "the training score of %d images stays here, as the site's policy demands; "
                    "FedBoosting counts it as the worst",
                    len(result.used),
                )
            else:
                metrics[f"trained_{strategy.signal}"] = score
        return metrics

    def rounded(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return measurements as the site's policy lets them leave."""
        # Times, steps and counts do not measure the data.
        return {
            name: self.policy.rounded(value) if name.endswith(("loss", "accuracy")) else value
            for name, value in metrics.items()
        }

    def check_buffers(self) -> None:
        """Refuse statistics of the data that no noise covers, where epsilon is limited.

        Raises
        ------
        PolicyError
            If there are any and they would leave unencrypted.
        """
        buffers = buffers_of(self.model)
        names = [name for name, value in buffers.items() if value.is_floating_point()]
        if self.policy.max_epsilon is not None and names and self.encrypted is None:
            raise PolicyError(
                f"this site's policy sets max_epsilon, but the model's buffers ({names[0]} and "
                f"{len(names) - 1} more) leave without noise; take a model without batch "
                "normalisation"
            )

    def validate(self, data: ClientData) -> dict[str, float]:
        """Judge the received model on the validation share, also under a key of no client."""
        metrics = {}
        if self.encrypted is not None and self.site.public_test:
            loss, accuracy = self.score(*test_data(self.site.local(self.config).data))
            metrics = {"test_loss": loss, "test_accuracy": accuracy}
        held_out = (data.validation_images, data.validation_labels)
        if len(held_out[0]) < self.policy.min_validation_images:
            if len(held_out[0]):
                _log.warning(
                    "scores of %d validation images stay here, the policy demands %d",
                    len(held_out[0]),
                    self.policy.min_validation_images,
                )
            return metrics
        loss, accuracy = self.score(*held_out)
        metrics |= {"validation_loss": loss, "validation_accuracy": accuracy}
        if key_locks(self.model):
            stream = self.defending.context.stream("random-key")
            without_key = with_random_key(self.model, stream)
            _, accuracy = evaluate(without_key, *held_out, spec=self.spec, device=self.device)
            metrics["random_key_accuracy"] = accuracy
        return metrics

    def protect(
        self, result: LocalResult, data: ClientData, canaries: Canaries | None = None
    ) -> Tensors:
        """Return what may leave this client, and keep what must not.

        Raises
        ------
        BractError
            If a defense fails: then nothing is sent.
        """
        most = self.config.training.batch_size
        update = result.update
        if canaries is not None:
            update = canaries.replace_update(
                update,
                self.defending.chain,
                seed=self.config.seed,
                client=self.site.name,
                number=self.server_round,
            )
        if self.config.training.private is not None:
            # What is made of noisy updates alone spends nothing more.
            return self.defending.protect(update, model=self.model, images=None, labels=None)
        return self.defending.protect(
            update,
            model=self.model,
            images=self.spec.normalise(result.trained_on(data.images, most).to(self.device)),
            labels=data.labels[result.used[:most]].to(self.device),
        )

    def encrypt(
        self, update: Tensors, buffers: Tensors
    ) -> tuple[dict[str, ArrayRecord], dict[str, float]]:
        """Encrypt or mask what `protect` returned, where the run asks for it.

        Returns
        -------
        tuple of dict and dict
            The arguments of `write_reply` besides the update, and figures for the server.
        """
        if self.masked is not None:
            assert self.received is not None
            received = from_arrays(self.received)
            masked, figures = self.masked.mask(update, received, buffers)
            return {"ciphertexts": to_arrays(masked.to_tensors())}, figures
        if self.encrypted is None:
            return {}, {}
        ciphertexts, figures = self.encrypted.encrypt(update, buffers)
        records = {"ciphertexts": to_arrays(ciphertexts.to_tensors())}
        if ciphertexts.powers:
            powers = {part: torch.from_numpy(p) for part, p in ciphertexts.powers.items()}
            records["powers"] = to_arrays(powers)
        return records, figures | self.encrypted.seconds

    def keep_truth(self, result: LocalResult, data: ClientData) -> None:
        """Write the training images to this client's disk, if its operator switched that on."""
        folder = self.site.truth_dir
        if folder is None or not result.used:
            return
        kept = result.trained_on(data.images)
        save_truth(folder, self.server_round, kept, data.labels[result.used])
        own = [index for index in result.used if index < len(data.images) - data.canaries]
        keep_candidates(
            folder,
            self.request.run,
            self.server_round,
            (data.images[own], data.labels[own]),
            (data.validation_images, data.validation_labels),
        )
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
        yield _encrypted_client(agree(site, message, context).config, site, message, context)


@contextmanager
def open_masked(message: Message, context: Context) -> Iterator[MaskedClient]:
    """Open a message about masks; no model is needed for it."""
    with _named(context) as site:
        agreed = agree(site, message, context)
        yield _masked_client(agreed.config, site, agreed.policy, message, context)


@contextmanager
def _named(context: Context) -> Iterator[Site]:
    log_to_stderr()
    name, folder = f"node-{context.node_id}", None
    try:
        site = Site.from_node_config(context.node_config)
        name, folder = site.name, site.state_dir
        warn_of_open_folders(context.state, site.state_dir, site.truth_dir)
        yield site
    except BractError as error:
        note_refusal(folder, name, error)
        raise reworded(error, f"{name}: {error}") from error
    except (MemoryError, RuntimeError, ImportError) as error:
        if isinstance(error, ImportError) and (missing := not_installed(error)) is not None:
            raise BractError(f"{name}: {missing}", code=missing.code) from error
        if not out_of_memory(error):
            raise
        why = one_line(error, 200) or type(error).__name__
        raise BractError(
            f"{name}: out of memory ({why}); lower training.batch_size, or give this client more "
            "memory or another device in its node config",
            code="out-of-memory",
        ) from error


def _encrypted_client(
    config: FederationConfig, site: Site, message: Message, context: Context
) -> EncryptedClient:
    # gmpy2 and phe are loaded by the clients of encrypted runs only.
    from bract.client.encrypted.client import EncryptedClient

    if not config.encryption.uses_paillier:
        raise BractError(
            f"was asked for a key, but the run has encryption.scheme: {config.encryption.scheme}",
            code="request-refused",
        )
    return EncryptedClient(config, site, context, message.content)


def _mechanism(site: Site, config: FederationConfig, chain: DefenseChain) -> Mechanism | None:
    """Return the noise on an update, of training or of the defenses after it."""
    if config.training.private is None:
        return mechanism_of(chain)
    from bract.client.private_training import private_mechanism

    with hiding("opening the data", own=False):
        count = training_examples(site.local(config), site.part)
    return private_mechanism(config, count)


def _masked_client(
    config: FederationConfig, site: Site, policy: SitePolicy, message: Message, context: Context
) -> MaskedClient:
    from bract.client.masked import MaskedClient

    if not config.encryption.uses_masks:
        raise BractError(
            f"was asked for masks, but the run has encryption.scheme: {config.encryption.scheme}",
            code="request-refused",
        )
    return MaskedClient(config, site, policy, context, message.content)


def _open(site: Site, message: Message, context: Context) -> Session:
    agreed = agree(site, message, context)
    config, chain = agreed.config, agreed.chain
    request = request_of(agreed, message, context)
    server_round = request.server_round
    assert server_round is not None
    answers = Answers(context.state, directory=site.state_dir, site=site.name, policy=agreed.policy)
    mechanism = _mechanism(site, config, chain) if request.trains else None
    instead = answers.admit(request, mechanism)
    with hiding("opening the data", own=False):
        spec = data_spec(site.local(config).data)
    if instead is None and agreed.policy.initial_model == "from-seed":
        check_start(config, spec, message, request, answers)
    first = config.strategy.joins.get(site.name, 1)
    if request.trains and instead is None and server_round < first:
        if agreed.policy.initial_model == "from-seed":
            answers.note_start(request)
        instead = write_absence(site.name, first)
    defending = Defending.open(chain, config, site, context, server_round)
    encrypted = masked = None
    if config.encryption.uses_masks and request.trains and instead is None:
        masked = _masked_client(config, site, agreed.policy, message, context)
        masked.check_ready()
    if config.encryption.uses_paillier and instead is None:
        encrypted = _encrypted_client(config, site, message, context)
        if not encrypted.catch_up(message.content, server_round):
            instead = encrypted.hello().to_content()
    model = configured_model(config, spec)
    session = Session(
        site=site,
        policy=agreed.policy,
        answers=answers,
        request=request,
        mechanism=mechanism,
        config=config,
        spec=spec,
        model=model,
        device=pick_device(site.device or config.device),
        defending=defending,
        instructions=agreed.instructions,
        server_round=server_round,
        encrypted=encrypted,
        masked=masked,
        received=message.content.array_records.get(ARRAYS),
        instead=instead,
    )
    if instead is not None:
        return session
    if encrypted is not None:
        session.receive(encrypted.model)
    elif (sent := message.content.array_records.get(ARRAYS)) is not None:
        session.receive(view_arrays(sent))  # which copies them into the model
    defending.attach(model)
    return session
