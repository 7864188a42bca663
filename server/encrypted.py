"""An encrypted run on the server's side: it has no model to judge, the clients judge theirs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from bract.captures.aggregates import Aggregates
from bract.config import FederationConfig
from bract.protocol.ciphertexts import PARAMETERS, plan_layout
from bract.protocol.records import NUM_EXAMPLES_KEY
from bract.rundir import RunDirectory
from bract.schema.metrics import GlobalRow, MetricsRow
from bract.server.federation import Federation
from bract.strategies import FedAvg
from bract.strategies.encrypted.secure import EncryptedFedAvg
from bract.strategies.registry import create_strategy
from bract.updates.update import parameters_of

_log = logging.getLogger(__name__)


class EncryptedFederation(Federation):
    """A federation whose server holds ciphertexts and the public initial model only.

    The clients judge the model that they decrypt, with the next train message or, after the last
    round, with the final one. So a round's row in ``metrics.jsonl`` appears when its accuracy is
    known, one round later. It is that of the public test split where the clients hold it, and else
    of their validation splits, weighted by their examples.

    Parameters
    ----------
    config, run
        As in `Federation`; ``run.aggregates`` holds what is needed to go on.
    """

    def __init__(self, config: FederationConfig, run: RunDirectory) -> None:
        self.aggregates = Aggregates(run.aggregates)
        self._pending: MetricsRow | None = run.state().pending_row
        super().__init__(config, run)
        self._say_plan()

    def train(self, grid: Grid) -> None:
        """Run the rounds that are left and deliver the last aggregate."""
        if self.config.rounds in self._logged():
            return
        self.start(grid, max(0, self.config.rounds - self.done))
        assert isinstance(self.strategy, EncryptedFedAvg)
        self._complete(self.aggregates.last, self.strategy.final)
        self._hold(None)

    def _new_strategy(self) -> FedAvg:
        return create_strategy(self.config, first_round=self.done + 1, aggregates=self.aggregates)

    def _resume(self) -> int:
        return self.aggregates.last

    def _after_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        del arrays
        number = server_round + self.done
        if server_round == 0:
            if number == 0:
                self._hold(self.row(0))
            return None
        self._complete(
            number - 1,
            {
                c.client: {**c.metrics, NUM_EXAMPLES_KEY: c.num_examples}
                for c in self.strategy.outcome.contributions
            },
        )
        self._hold(self.row(number))
        return None

    def _complete(self, number: int, judged: Mapping[str, Mapping[str, float]]) -> None:
        """Log a round's row, with what the clients found its model to be worth."""
        row = self._pending
        if row is None or row.round != number:
            row = MetricsRow(round=number, seconds=0.0)
        if number not in self._logged():
            self.run.append_metrics(row.model_copy(update={"evaluation": mean_judgement(judged)}))

    def _hold(self, row: MetricsRow | None) -> None:
        self._pending = row
        self.run.update_state(pending_row=row)

    def _logged(self) -> set[int]:
        return {row.round for row in self.run.metrics()}

    def _say_plan(self) -> None:
        values = sum(value.numel() for value in parameters_of(self.model).values())
        layout = plan_layout(self.config.encryption, PARAMETERS, values)
        _log.info(
            "encryption: %d values in %d ciphertexts, %.2f MB an update; slots of %d bits hold "
            "weights up to a sum of %d, one step is %.2g",
            values,
            layout.rows,
            layout.rows * layout.cipher_bytes / 1e6,
            layout.slot_bits,
            layout.max_weight,
            layout.fixed_point.step,
        )
        for caution in self.config.encryption.cautions(
            self.config.clients, self.config.strategy.name
        ):
            _log.warning("%s", caution)


def mean_judgement(judged: Mapping[str, Mapping[str, float]]) -> GlobalRow | None:
    """Return the clients' mean loss and accuracy, and on which split; None where none has one.

    Parameters
    ----------
    judged
        Each client's metrics by name: ``test_*`` where it holds the public test split,
        ``validation_*`` of its own split, and ``num-examples``.
    """
    everyone = list(judged.values())
    split: Literal["test", "validation"]
    split = "test" if everyone and all("test_accuracy" in m for m in everyone) else "validation"
    found = [m for m in everyone if f"{split}_accuracy" in m]
    weights = [1.0 if split == "test" else m[NUM_EXAMPLES_KEY] for m in found]
    if not sum(weights):
        return None
    means = {
        name: sum(w * m[f"{split}_{name}"] for w, m in zip(weights, found, strict=True))
        / sum(weights)
        for name in ("loss", "accuracy")
    }
    return GlobalRow(**means, split=split, clients=len(found))
