"""One training run of a federation on the server's side."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from functools import cached_property

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from bract.captures.observation import ClientDeclaration, ObservationStore
from bract.captures.remote import RemoteStore, local_folder
from bract.config import FederationConfig
from bract.data.views import data_spec, test_data
from bract.defenses.configured import configured_model, work_declaration
from bract.defenses.entries import noise_entry, read_settings
from bract.defenses.noise import Noise
from bract.disk.tensor_files import write_tensors
from bract.errors import BractError, one_line
from bract.installed.versions import release
from bract.models.evaluation import evaluate
from bract.models.initialise import initialise
from bract.process.timeline import span
from bract.protocol.arrays import view_arrays
from bract.protocol.records import VERSION_KEY, to_arrays
from bract.rundir import RunDirectory
from bract.schema.metrics import ClientRow, FailureRow, GlobalRow, LateRow, MetricsRow
from bract.seeds import derive_seed
from bract.server.hook import HonestButCurious
from bract.strategies import FedAvg
from bract.strategies.registry import create_strategy
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)


class Federation:
    """One training run of a federation on the server's side.

    Parameters
    ----------
    config
        The configuration to run.
    run
        Where to leave metrics, models and captures. Where it holds an interrupted run's last
        model, training goes on after it.
    """

    def __init__(self, config: FederationConfig, run: RunDirectory) -> None:
        self.config = config
        self.run = run
        self.spec = data_spec(config.data)
        self.model = self._new_model()
        self.best_accuracy = -math.inf
        self._initial = ArrayRecord()
        self._round_started = time.monotonic()
        self.done = self._resume()
        self._judged = bool(run.metrics())
        self.strategy = self._new_strategy()
        self.strategy.waiting.expected = frozenset(
            client for row in run.metrics() for client in row.clients
        )
        self.strategy.waiting.announce = lambda text: run.update_state(waiting=text)

    def train(self, grid: Grid) -> None:
        """Run the rounds that are left."""
        if self.done < self.config.rounds:
            self.start(grid, self.config.rounds - self.done)

    @cached_property
    def test_split(self) -> tuple[Tensor, Tensor]:
        """Images and labels on which the global model is judged."""
        return test_data(self.config.data)

    def start(self, grid: Grid, rounds: int) -> None:
        """Run the strategy, with the hook around it where captures are on."""
        self._log_privacy_of_sums()
        strategy: Strategy = self.strategy
        if self.config.capture.enabled:
            strategy = HonestButCurious(
                strategy,
                self._store(),
                declaration=self._declared,
                capture=self.config.capture.model_copy(update={"store": None}),
                seed=self.config.seed,
                audit=self.config.audit.attacks if self.config.audit.live_every else None,
                every=self.config.audit.live_every or 1,
            )
        self._initial = self._first_arrays()
        strategy.start(
            grid,
            self._initial,
            num_rounds=rounds,
            timeout=self.config.strategy.timeout,
            train_config=ConfigRecord({VERSION_KEY: release()}),
            evaluate_fn=self._after_round,
        )

    def _log_privacy_of_sums(self) -> None:
        """Log what noise on whole updates gives a client, where only their sums are known."""
        noise = noise_entry(self.config.defenses)
        masked, rounds = self.config.encryption.uses_masks, self.config.rounds
        if noise is None or not masked or importlib.util.find_spec("opacus") is None:
            return
        spec, fraction = read_settings(Noise, noise), self.config.strategy.fraction
        summed = self.config.strategy.quorum_of(self.config.asked)
        alone = spec.spent_in_sums(rounds, summed)
        if alone is None:
            return
        outside = spec.spent_in_sums(rounds, summed, fraction)
        _log.info(
            "client-level privacy at delta %g over %d rounds, if no client colludes and all weigh "
            "alike: epsilon %.3g to the server, which learns sums of %d, and %.3g to who sees the "
            "models alone and not who took part",
            spec.delta,
            rounds,
            alone,
            summed,
            outside,
        )

    def _first_arrays(self) -> ArrayRecord:
        """Return parameters and then buffers, as clients do; copied once, into the arrays."""
        state = self.model.state_dict()
        parameters = dict.fromkeys(name for name, _ in self.model.named_parameters())
        return to_arrays((name, state[name]) for name in parameters | dict.fromkeys(state))

    def _store(self) -> ObservationStore | RemoteStore:
        """Return where the captures go."""
        place = self.config.capture.place(self.config.name)
        if place is None:
            return ObservationStore(self.run.captures)
        folder = local_folder(place)
        store = RemoteStore(place) if folder is None else ObservationStore(folder)
        if not self.done and not store.is_empty:
            raise BractError(
                f"{store.place}: holds the captures of an earlier run; name another capture.store "
                "or run, or remove them",
                code="file-taken",
            )
        return store

    def declaration(self) -> ClientDeclaration:
        """Return the configuration's declaration of every client's computation, in round 1."""
        return self._declared(1)

    def _declared(self, server_round: int) -> ClientDeclaration:
        return work_declaration(self.config, self.spec, self.model, server_round)

    def _new_model(self) -> nn.Module:
        model = configured_model(self.config, self.spec)
        return initialise(model, self.config.model.init, derive_seed(self.config.seed, "model"))

    def _new_strategy(self) -> FedAvg:
        aggregates = None
        if self.config.encryption.uses_masks and self.config.capture.enabled:
            # An audit attacks each round's mean, which the server learns.
            from bract.captures.aggregates import Aggregates

            aggregates = Aggregates(self.run.aggregates)
        return create_strategy(self.config, first_round=self.done + 1, aggregates=aggregates)

    def _resume(self) -> int:
        """Load the last model of an interrupted run; return how many rounds it has seen."""
        rounds = [row.round for row in self.run.metrics()]
        last = self.run.models / "last.safetensors"
        if not rounds:
            return 0
        try:
            with safe_open(last, framework="pt") as file:
                seen = int((file.metadata() or {}).get("round", max(rounds)))
            self.model.load_state_dict(load_file(last))
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            raise BractError(
                f"{last}: is not the model of round {max(rounds)}, which {self.run.metrics_path} "
                f"ends with ({one_line(error, 300)}); restore it, or start anew with --overwrite",
                code="file-damaged",
            ) from error
        for row in self.run.metrics():
            if row.evaluation is not None and row.evaluation.accuracy is not None:
                self.best_accuracy = max(self.best_accuracy, row.evaluation.accuracy)
        if seen == max(rounds) + 1:
            # Killed between the model and its row: training that round again would count it twice.
            loss, accuracy = self._settle(seen, self.model.state_dict())
            judged = GlobalRow(loss=loss, accuracy=accuracy)
            self.run.append_metrics(MetricsRow(round=seen, time=time.time(), evaluation=judged))
            return seen
        return max(rounds)

    def _after_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        number = server_round + self.done
        if server_round == 0 and self._judged:
            return None
        with span("judge and keep the global model"):
            # The model is these arrays, not a copy of them: it is judged and written, not changed.
            state = view_arrays(arrays)
            self.model.load_state_dict(state, assign=True)
            if server_round and self._initial is not arrays:
                self._initial.clear()  # which Flower refers to until the last round
            loss, accuracy = self._settle(number, state)
        judged = GlobalRow(loss=loss, accuracy=accuracy)
        self.run.append_metrics(self.row(number).model_copy(update={"evaluation": judged}))
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    def _settle(self, number: int, state: Tensors) -> tuple[float, float]:
        """Keep the model of a round, which is loaded; return its loss and accuracy."""
        loss, accuracy = evaluate(self.model, *self.test_split, spec=self.spec)
        about = {"round": str(number)}
        write_tensors(self.run.models / "last.safetensors", state, about=about)
        if accuracy > self.best_accuracy:
            self.best_accuracy = accuracy
            write_tensors(self.run.models / "best.safetensors", state, about=about)
        if number == self.config.rounds:
            write_tensors(self.run.models / "final.safetensors", state, about=about)
        return loss, accuracy

    def row(self, number: int) -> MetricsRow:
        """Return the row of a round, without the global model's accuracy."""
        outcome = self.strategy.outcome
        now = time.monotonic()
        weights = dict(zip((c.client for c in outcome.contributions), outcome.weights, strict=True))
        row = MetricsRow(
            round=number,
            seconds=now - self._round_started,
            time=time.time(),
            clients={
                c.client: ClientRow.of(
                    c.metrics, num_examples=c.num_examples, weight=weights[c.client]
                )
                for c in outcome.contributions
            },
            failures=[FailureRow(client=f.client, reason=f.reason) for f in outcome.failures],
            late=[
                LateRow(
                    client=self.strategy.names.of(late.node_id),
                    round=late.server_round,
                    reason=late.reason,
                )
                for late in outcome.late
            ],
            boosting=outcome.boosting.to_record() if outcome.boosting else None,
        )
        self._round_started = now
        return row
