"""Loops without a strategy, and what the hook makes of Flower's older API beyond an app's run."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters
from flwr.server.strategy import FedAvg, Strategy
from foreign_apps import clients_of
from refusals import refused

from bract import ObservationStore
from bract.server import HonestButCurious, listen

APP = ClientApp()


@APP.train()
@APP.query()
def _answer(message: Message, context: Context) -> Message:
    del context
    moved = {n: Array(a.numpy() + 1) for n, a in message.content.array_records["arrays"].items()}
    content: dict[str, Any] = {
        "arrays": ArrayRecord(moved),
        "metrics": MetricRecord({"num-examples": 3}),
    }
    return Message(RecordDict(content), reply_to=message)


def ask(grid: Any, kind: str, group: str = "") -> None:
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(4, np.float32))})})
    list(grid.send_and_receive([grid.create_message(content, kind, 1, group)]))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "not captured" in r.getMessage()]


def test_replies_of_other_types_that_hold_arrays_are_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = listen(clients_of(APP), store=tmp_path)
    for kind in ("train", "query", "query"):
        ask(grid, kind)
    assert not warnings_of(caplog)
    grid.close()
    grid.close()
    (line,) = warnings_of(caplog)
    assert "2 replies" in line and "query" in line
    assert len(ObservationStore(tmp_path / "1").folders()) == 1


def test_a_group_numbers_the_rounds_of_a_loop_and_its_end_is_that_of_the_grid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = listen(clients_of(APP), store=tmp_path)
    ask(grid, "train", "4")
    ask(grid, "query")
    del grid
    assert len(warnings_of(caplog)) == 1
    assert [o.round for o in ObservationStore(tmp_path / "1")] == [4]


def test_messages_of_one_round_may_be_sent_one_by_one_before_any_is_answered(
    tmp_path: Path,
) -> None:
    grid = listen(clients_of(APP, 2), store=tmp_path)
    pushed: list[str] = []
    for node in (1, 2):
        content = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(4, np.float32))})})
        pushed += grid.push_messages([grid.create_message(content, "train", node, "3")])
    assert len(list(grid.pull_messages(pushed))) == 2
    assert [(o.round, o.client) for o in ObservationStore(tmp_path / "1")] == [
        (3, "node-1"),
        (3, "node-2"),
    ]


def test_what_is_no_grid_is_refused(tmp_path: Path) -> None:
    with refused("config-value", "FedAvg", "Grid"):
        listen(FedAvg(), store=tmp_path)  # type: ignore[arg-type]


PARAMETERS = ndarrays_to_parameters([np.ones((3, 2), np.float32), np.ones(2, np.float32)])


def zeros() -> Any:
    return ndarrays_to_parameters([np.zeros((3, 2), np.float32), np.zeros(2, np.float32)])


def result(parameters: Any, examples: int = 5) -> FitRes:
    return FitRes(Status(Code.OK, ""), parameters, examples, {"loss": 0.5, "which": b"x"})


class Fixed(FedAvg):
    """Asks two clients that are connected without a SuperLink."""

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        del server_round, client_manager
        return [(SimpleNamespace(cid=name), FitIns(parameters, {})) for name in ("ab12", "7")]


def older_round(hook: Any, results: Any, failures: Any = ()) -> Any:
    asked = hook.configure_fit(3, PARAMETERS, None)
    came = [(client, res) for (client, _), res in zip(asked, results, strict=False)]
    return hook.aggregate_fit(3, came, list(failures))


def test_clients_without_a_superlink_are_captured_in_their_round(tmp_path: Path) -> None:
    hook = HonestButCurious(Fixed(), ObservationStore(tmp_path))
    asked = hook.configure_fit(3, PARAMETERS, None)
    results = [(client, result(zeros())) for client, _ in asked]
    arrays, _ = hook.aggregate_fit(3, results, [])
    plain, _ = Fixed().aggregate_fit(3, results, [])
    assert plain is not None and arrays.tensors == plain.tensors
    held = list(ObservationStore(tmp_path))
    assert len(held) == 2 and {o.round for o in held} == {3}
    assert all((o.update["0"] == 1).all() and o.declaration.num_examples == 5 for o in held)
    assert isinstance(hook, Strategy)


def test_a_sum_in_the_place_of_every_result_is_no_clients_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = HonestButCurious(Fixed(), ObservationStore(tmp_path))
    older_round(hook, [result(PARAMETERS), result(PARAMETERS)])
    assert not ObservationStore(tmp_path).folders()
    assert [r for r in caplog.records if r.levelno == logging.ERROR and "sum" in r.getMessage()]


def test_a_result_that_cannot_be_read_costs_itself_alone(tmp_path: Path) -> None:
    hook = HonestButCurious(Fixed(), ObservationStore(tmp_path))
    garbage = SimpleNamespace(tensors=[b"no array", b""], tensor_type="numpy.ndarray")
    broken = SimpleNamespace(parameters=garbage, num_examples=5, metrics=None)
    asked = hook.configure_fit(3, PARAMETERS, None)
    hook.strategy.aggregate_fit = lambda *_: (None, {})
    hook.aggregate_fit(3, [(asked[0][0], broken), (asked[1][0], result(zeros()))], [])
    assert len(ObservationStore(tmp_path).folders()) == 1
    assert len((tmp_path / "missed.jsonl").read_text().splitlines()) == 1


def test_what_else_an_app_asks_of_its_strategy_is_the_strategys(tmp_path: Path) -> None:
    hook = HonestButCurious(FedAvg(min_fit_clients=7), ObservationStore(tmp_path))
    assert hook.min_fit_clients == 7 and not hasattr(hook, "no_such_option")
