"""The ServerApp: run the configured federation and leave a run directory behind."""

from __future__ import annotations

import math
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bract
from bract.config import FederationConfig, config_of_run
from bract.data import data_spec, test_data
from bract.errors import BractError
from bract.evaluation import evaluate
from bract.logs import log_to_stderr
from bract.models import create_model, initialise, prepare_model
from bract.observation import Protocol
from bract.records import VERSION_KEY, from_arrays, to_arrays
from bract.rundir import RunDirectory
from bract.seeds import derive_seed
from bract.server.grid import PromptGrid
from bract.server.hook import HonestButCurious
from bract.strategies import FedAvg, create_strategy
from bract.update import buffers_of, parameters_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds; called by Flower."""
    log_to_stderr()
    config = config_of_run(context.run_config)
    own_folder = Path("runs") / f"{config.name}-{context.run_id}"
    run = RunDirectory(str(context.run_config.get("run-dir") or own_folder))
    run.create(config)
    run.update_state(
        status="running",
        started=time.time(),
        flower_run_id=str(context.run_id),
        bract=bract.__version__,
    )
    try:
        _federation(config, run).train(PromptGrid(grid))
    except Exception as error:
        run.update_state(
            status="failed", finished=time.time(), error=f"{type(error).__name__}: {error}"
        )
        raise
    run.update_state(status="finished", finished=time.time())


def _federation(config: FederationConfig, run: RunDirectory) -> Federation:
    if not config.encryption.enabled:
        return Federation(config, run)
    from bract.server.encrypted import EncryptedFederation

    return EncryptedFederation(config, run)


class Federation:
    """One training run of a federation on the server's side.

    Parameters
    ----------
    config
        What to run.
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
        self._round_started = time.time()
        self.done = self._resume()
        self.strategy = self._new_strategy()

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
        strategy: Strategy = self.strategy
        if self.config.capture.enabled:
            strategy = HonestButCurious(
                strategy,
                self.run.captures,
                protocol=self.protocol(),
                rounds=self.config.capture.rounds,
            )
        strategy.start(
            grid,
            to_arrays(parameters_of(self.model) | buffers_of(self.model)),
            num_rounds=rounds,
            timeout=self.config.strategy.timeout,
            train_config=ConfigRecord({VERSION_KEY: bract.__version__}),
            evaluate_fn=self._after_round,
        )

    def protocol(self) -> Protocol:
        """Return what the configuration declares of every client's computation."""
        training = self.config.training
        return Protocol(
            algorithm=training.algorithm,
            model=self.config.model.name,
            activation=self.config.model.activation,
            image_shape=self.spec.image_shape,
            classes=self.spec.classes,
            mean=self.spec.mean,
            std=self.spec.std,
            optimizer=training.optimizer,
            lr=training.lr,
            momentum=training.momentum,
            batch_size=training.batch_size,
            defenses=tuple(self.config.defenses),
            encryption=self.config.encryption.scheme,
        )

    def _new_model(self) -> nn.Module:
        model = create_model(
            self.config.model.name,
            classes=self.spec.classes,
            channels=self.spec.image_shape[0],
            image_size=self.spec.image_shape[1],
            activation=self.config.model.activation,
        )
        model = prepare_model(model, self.config.defenses)
        return initialise(model, self.config.model.init, derive_seed(self.config.seed, "model"))

    def _new_strategy(self) -> FedAvg:
        return create_strategy(self.config, first_round=self.done + 1)

    def _resume(self) -> int:
        """Load the last model of an interrupted run; return how many rounds it has seen."""
        rounds = [int(row["round"]) for row in self.run.metrics()]
        last = self.run.models / "last.safetensors"
        if not rounds or not last.is_file():
            return 0
        try:
            self.model.load_state_dict(load_file(last))
        except (OSError, RuntimeError) as error:
            raise BractError(f"{last}: does not fit the configured model: {error}") from error
        for row in self.run.metrics():
            if row.get("global"):
                self.best_accuracy = max(self.best_accuracy, float(row["global"]["accuracy"]))
        return max(rounds)

    def _after_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        number = server_round + self.done
        if server_round == 0 and self.done > 0:
            return None
        state = from_arrays(arrays)
        self.model.load_state_dict(state)
        loss, accuracy = evaluate(self.model, *self.test_split, spec=self.spec)
        _save(state, self.run.models / "last.safetensors")
        if accuracy > self.best_accuracy:
            self.best_accuracy = accuracy
            _save(state, self.run.models / "best.safetensors")
        if number == self.config.rounds:
            _save(state, self.run.models / "final.safetensors")
        self.run.append_metrics(
            {**self.row(number), "global": {"loss": loss, "accuracy": accuracy}}
        )
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    def row(self, number: int) -> dict[str, Any]:
        """Return what there is to say of a round, but for the global model's accuracy."""
        outcome = self.strategy.outcome
        now = time.time()
        weights = dict(zip((c.client for c in outcome.contributions), outcome.weights, strict=True))
        row = {
            "round": number,
            "seconds": now - self._round_started,
            "time": now,
            "clients": {
                c.client: {
                    **c.metrics,
                    "num_examples": c.num_examples,
                    "weight": weights[c.client],
                }
                for c in outcome.contributions
            },
            "failures": [{"client": f.client, "reason": f.reason} for f in outcome.failures],
            **({"boosting": outcome.boosting.to_dict()} if outcome.boosting else {}),
        }
        self._round_started = now
        return row


def _save(state: dict[str, Tensor], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(state, temporary)
    temporary.replace(path)
