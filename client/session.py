"""One message at one client: its content, the agreement, and the client's own data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from bract.client.accounting import Mechanism
from bract.client.agreement import check_start
from bract.client.answered import Request
from bract.client.answers import Answers
from bract.client.canaries import Canaries, open_canaries
from bract.client.candidates import keep_candidates
from bract.client.defending import Defending
from bract.client.gate import Gate
from bract.client.guarding import Outgoing, RunLedger, check_sums, sent_to
from bract.client.guarding import guarded as through_guard
from bract.client.policy import PolicyError, SitePolicy
from bract.client.policy_checks import check_training
from bract.client.private import own_files
from bract.client.sealing import Sealing
from bract.client.site import Site, pick_device
from bract.client.training import LocalResult, train_locally
from bract.client.truth import save_report, save_truth
from bract.config import FederationConfig
from bract.data.views import ClientData, DataSpec, client_data, data_spec, known_spec, own_test_data
from bract.defenses.configured import configured_model, work_declaration
from bract.errors import BractError, one_line
from bract.models.evaluation import evaluate
from bract.models.keylock import key_locks, with_random_key
from bract.protocol.fused import TRAINING_SCORE_KEY
from bract.protocol.records import write_absence
from bract.seeds import derive_seed
from bract.updates.update import Tensors, buffers_of, counts_steps

if TYPE_CHECKING:
    pass

_log = logging.getLogger(__name__)


@dataclass
class Session:
    """One message at one client, from its admission to its answer.

    Attributes
    ----------
    instead
        What to answer in place of work: what this client lacks (a key, an aggregate), that it
        trains from a later round on, or the reply of before where this is the same message again.
    mechanism
        The noise on an update; with per-example noise known once the data are open.
    secret
        Assigns the examples by their content, where training claims an example's privacy.
    spec, model
        There after `open`.
    """

    gate: Gate
    site: Site
    policy: SitePolicy
    answers: Answers
    request: Request
    message: Message
    config: FederationConfig
    defending: Defending
    sealing: Sealing
    instructions: ConfigRecord
    instead: RecordDict | None = None
    mechanism: Mechanism | None = None
    secret: bytes | None = None
    spec: DataSpec = field(init=False)
    model: nn.Module = field(init=False)
    device: torch.device = field(init=False)

    @property
    def server_round(self) -> int:
        """The round that the message names."""
        assert self.request.server_round is not None
        return self.request.server_round

    def open(self) -> ClientData:
        """Count the message as answered, and decode this client's part of the data.

        Everything that the request alone decides is checked before. Where only the data show how
        many classes there are, the model is built after they are open.
        """
        local, known = self.site.local(self.config), self._known_spec()
        if known is not None:
            self._prepare(known)
        self.gate.open(self._failure_price())
        if known is None:
            self._prepare(data_spec(local.data))
        data = client_data(local, self.site.part, self.secret)
        self.gate.drop_price()  # what is refused from here on depends on their number alone
        if self.request.trains:
            count = len(data.images)
            check_training(self.policy, self.config.training, count, self.defending.chain)
            self._count_noise(count)
        return data

    def open_to_score(self) -> ClientData:
        """Open the data, of which the server may read a score.

        Raises
        ------
        PolicyError
            If it is of so few images that the server could read single ones off it.
        """
        data = self.open()
        found, least = len(data.validation_images), self.policy.min_validation_images
        if found < least:
            raise PolicyError(
                f"was asked to score a model on {found} images, and this site's policy demands "
                f"min_validation_images: {least}; raise data.validation, or ask the site"
            )
        return data

    def absence(self) -> RecordDict | None:
        """Return what a client answers that trains from a later round on; None where it trains."""
        first = self.config.strategy.joins.get(self.site.name, 1)
        if not self.request.trains or self.server_round >= first:
            return None
        if self.policy.initial_model == "from-seed":
            spec = self._known_spec()
            if spec is None:
                self.gate.open()
                spec = data_spec(self.site.local(self.config).data)
            check_start(self.config, spec, self.message, self.request, self.answers)
        return write_absence(self.site.name, first)

    def _known_spec(self) -> DataSpec | None:
        return known_spec(self.site.local(self.config).data)

    def _prepare(self, spec: DataSpec) -> None:
        """Build the model and load what the message brings."""
        self.spec = spec
        if self.policy.initial_model == "from-seed":
            check_start(self.config, spec, self.message, self.request, self.answers)
            self.sealing.start_checked()
        with own_files() if self.site.device else nullcontext():
            self.device = pick_device(self.site.device or self.config.device)
        self.model = configured_model(self.config, spec)
        self._check_buffers()
        received = self.sealing.model()
        if received is not None:
            self.receive(received)  # which copies them into the model
        self.defending.attach(self.model)

    def _failure_price(self) -> Mechanism | None:
        """Return the noise to count where the data cannot be read; None where it is counted.

        How many examples there are is not known then: it is as if each step read all of them.
        """
        if self.config.training.private is None or not self.request.trains:
            return None
        from bract.client.private_training import private_mechanism

        return private_mechanism(self.config, self.config.training.batch_size)

    def _count_noise(self, examples: int) -> None:
        """Count the noise of training, whose rate depends on how many examples there are."""
        if self.config.training.private is None:
            return
        from bract.client.private_training import private_mechanism

        self.mechanism = private_mechanism(self.config, examples)
        assert self.mechanism is not None
        self.gate.charge(self.mechanism)

    def receive(self, arrays: Tensors) -> None:
        """Load received parameters into the model."""
        try:
            self.model.load_state_dict(arrays)
        except RuntimeError as error:
            raise BractError(
                f"the received parameters do not fit model {self.config.model.name!r}: "
                f"{one_line(error, 300)}",
                code="model-mismatch",
            ) from error

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

    def train(self, data: ClientData, proximal_mu: float) -> LocalResult:
        """Train the model, with noise on every step where the run asks for per-example privacy."""
        work: dict[str, Any] = {
            "config": self.config.training.at(self.server_round, self.config.rounds),
            "spec": self.spec,
            "seed": self._training_seed(),
            "device": self.device,
            "proximal_mu": proximal_mu,
        }
        if self.config.training.private is None:
            return train_locally(self.model, data.images, data.labels, **work)
        # Opacus is loaded by the clients of such runs only.
        from bract.client.private_training import train_privately

        assert self.mechanism is not None
        stream = self.defending.context.stream("per-example")
        del work["seed"]  # the server knows it
        return train_privately(
            self.model,
            data.images,
            data.labels,
            mechanism=self.mechanism,
            stream=stream,
            **work,
        )

    def _training_seed(self) -> int:
        """Return the seed of the order of the examples, and of what training draws.

        Where the server reads sums, it is the client's secret: an update that comes out the same to
        the bit is the difference of two sums.
        """
        if self.sealing.sums:
            return int(self.defending.context.stream("training").words(1)[0] >> 1)
        return derive_seed(self.config.seed, "train", self.site.partition, self.server_round)

    def declared_defenses(self) -> dict[str, Any]:
        """Return the defenses of this update, as the protocol declares them."""
        private = self.config.training.private
        if private is None or self.mechanism is None:
            return self.defending.declaration()
        entry = private.declared() | {"noise_multiplier": self.mechanism.multiplier}
        return {"defenses": [entry, *self.defending.chain.public()]}

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
        if self.policy.initial_model == "from-seed" and not self.answers.knows_start(self.request):
            raise PolicyError(
                "this site's policy sets initial_model: from-seed, and fused models are none of "
                "the seed's; let this site train before it scores any (strategy.fraction: 1)"
            )

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
        hidden = bool(len(self.defending.chain)) or self.sealing.hides or private
        # What a guard strengthens or skips, training's own figures would tell.
        hidden = hidden or self.policy.guard is not None
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

    def _check_buffers(self) -> None:
        """Refuse buffers that no noise covers, where epsilon is limited.

        Only a count of steps may leave: other buffers may hold statistics of the data.

        Raises
        ------
        PolicyError
            If there are any and they would leave unencrypted.
        """
        buffers = buffers_of(self.model)
        names = [n for n, v in buffers.items() if not counts_steps(n, v.dtype, v.shape)]
        if self.policy.max_epsilon is not None and names and not self.sealing.covers_buffers:
            raise PolicyError(
                f"this site's policy sets max_epsilon, but the model's buffers ({names[0]} and "
                f"{len(names) - 1} more) leave without noise; take a model without "
                "buffers, as those of batch normalisation are"
            )

    def validate(self, data: ClientData) -> dict[str, float]:
        """Judge the received model on the validation share, also under a key of no client."""
        metrics = {}
        if self.sealing.judges and self.site.public_test:
            loss, accuracy = self.score(*own_test_data(self.site.local(self.config), self.secret))
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

    def outgoing(
        self, result: LocalResult, data: ClientData, proximal_mu: float, canaries: Canaries | None
    ) -> Outgoing:
        """Return what leaves of the training: defended, and past the site's guard where it has one.

        Where the update is sealed, the server reads sums alone and the guard rests.

        Raises
        ------
        BractError
            If a defense fails, or the guard lets nothing leave.
        """
        guard, size = self.policy.guard, self.config.training.batch_size
        before = {name: value.clone() for name, value in self.defending.state.items()}
        first = Outgoing(self.protect(result, data, canaries), result, size)
        if guard is None:
            return first
        if self.sealing.hides:
            check_sums(self.policy)
            _log.info("guard: the update is sealed, the server reads sums alone; not attacked")
            return first

        def again(size: int) -> Outgoing | None:
            training = self.config.training.model_copy(update={"batch_size": size})
            received = self.sealing.model()
            if self.defending.chain.keeps_model or received is None:
                return None
            check_training(self.policy, training, len(data.images), self.defending.chain)
            self.receive(received)
            self.defending.state.clear()
            self.defending.state.update(before)
            other = replace(self, config=self.config.model_copy(update={"training": training}))
            other.spec, other.model, other.device = self.spec, self.model, self.device
            larger = other.train(data, proximal_mu)
            return Outgoing(other.protect(larger, data), larger, size)

        return through_guard(
            first,
            again,
            policy=guard,
            sent=sent_to(
                self.site.name,
                self.server_round,
                self.sealing.model() or {},
                first.update,
                work_declaration(self.config, self.spec, self.model, self.server_round),
            ),
            data=data,
            defending=self.defending,
            device=self.device,
            ledger=RunLedger(self.answers, self.request, guard),
            folder=self.gate.folder,
        )

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
