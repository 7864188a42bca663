"""How the hook reads the replies of apps in the shapes that public apps have."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from foreign_apps import clients_of
from refusals import check_named, refused
from torch import Tensor, nn

from bract import ObservationStore
from bract.server import HonestButCurious

STEP = 0.125


def network() -> nn.Module:
    """Parameters and buffers of a small network, whose names and order are a state dict's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Linear(12, 12, bias=False))
        net.register_buffer("position_ids", torch.arange(4))
        return net


NAMES = list(network().state_dict())
PARAMETERS = [name for name, _ in network().named_parameters()]
START = {name: value.clone() for name, value in network().state_dict().items()}


def trained(received: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move every parameter by `STEP` against the update, as one step of training would."""
    return {n: v - STEP if n in PARAMETERS else v for n, v in received.items()}


def app(reply: Any, *, action: str = "", examples: Any = 4, trains: bool = True) -> ClientApp:
    """Return an app whose reply to a message's arrays is ``reply(arrays by record)``."""
    made = ClientApp()
    add = made.train if trains else made.query

    @add(action) if action else add()
    def train(message: Any, context: Any) -> Any:
        number = int(context.node_config["id"])
        received = {key: dict(r.items()) for key, r in message.content.array_records.items()}
        metrics = {"num-examples": examples(number) if callable(examples) else examples}
        content = {"arrays": reply(received)} if callable(reply) else reply
        records = content["arrays"]
        records = records if isinstance(records, dict) else {"arrays": records}
        return Message(RecordDict({**records, "metrics": MetricRecord(metrics)}), reply_to=message)

    return made


def as_state(received: Any, key: str = "arrays") -> dict[str, Tensor]:
    """Return a record's tensors under the model's names and in its types."""
    values = [torch.from_numpy(np.array(a.numpy())) for a in received[key].values()]
    return {n: v.to(START[n].dtype) for n, v in zip(NAMES, values, strict=True)}


def returns_weights(received: Any) -> ArrayRecord:
    return ArrayRecord(trained(as_state(received)))


def as_list(state: dict[str, Tensor]) -> ArrayRecord:
    return ArrayRecord([value.numpy() for value in state.values()])


def captured(
    folder: Path,
    client: ClientApp,
    *,
    strategy: Any = None,
    rounds: int = 1,
    initial: ArrayRecord | None = None,
    **options: Any,
) -> dict[tuple[int, str], Any]:
    """Run two clients under the hook; return its captures by round and client."""
    hook = HonestButCurious(
        strategy or FedAvg(fraction_evaluate=0.0), ObservationStore(folder), **options
    )
    grid = clients_of(client, 2)
    hook.start(grid, initial or ArrayRecord(START), num_rounds=rounds)
    return {(o.round, o.client): o for o in ObservationStore(folder)}


def check_step(seen: Any, names: Any = None) -> None:
    """Check that the update is that of `trained`, of every parameter."""
    assert sorted(seen.update) == sorted(seen.parameters) == sorted(names or PARAMETERS)
    for value in seen.update.values():
        torch.testing.assert_close(value, torch.full_like(value, STEP))


def refusals(folder: Path) -> list[dict[str, Any]]:
    """Return what ``missed.jsonl`` lists."""
    return [json.loads(line) for line in (folder / "missed.jsonl").read_text().splitlines()]


def reading(seen: Any) -> dict[str, Any]:
    return dict(seen.provenance["reading"])


def test_options_of_a_wrapped_strategys_own_start_are_handed_on_as_given(tmp_path: Path) -> None:
    class Later(FedAvg):
        """A strategy whose loop takes more than Flower's."""

        def start(self, *given: Any, should_stop: Any = None, **named: Any) -> Any:
            self.given = (len(given), sorted(named), should_stop)
            return super().start(*given, **named)

    def stop() -> bool:
        return False

    for number, by_name in enumerate((False, True)):
        strategy = Later(fraction_evaluate=0.0)
        hook = HonestButCurious(strategy, ObservationStore(tmp_path / str(number)))
        grid = clients_of(app(returns_weights), 2)
        own: dict[str, Any] = {"num_rounds": 1, "should_stop": stop}
        if by_name:
            hook.start(grid=grid, initial_arrays=ArrayRecord(START), **own)
            assert strategy.given == (0, ["grid", "initial_arrays", "num_rounds"], stop)
        else:
            hook.start(grid, ArrayRecord(START), **own)
            assert strategy.given == (2, ["num_rounds"], stop)
        assert len(list(ObservationStore(tmp_path / str(number)))) == 2


def test_of_two_records_with_the_same_names_the_one_sent_and_returned_is_the_model(
    tmp_path: Path,
) -> None:
    class Scaffold(FedAvg):
        def configure_train(self, *given: Any) -> Any:
            messages = list(super().configure_train(*given))
            for message in messages:
                message.content["control"] = ArrayRecord(
                    {n: torch.zeros_like(v) for n, v in START.items()}
                )
            return messages

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return None, None

    def reply(received: Any) -> Any:
        change = {n: torch.full_like(v, 7) for n, v in START.items()}
        return {"arrays": returns_weights(received), "change": ArrayRecord(change)}

    found = captured(tmp_path, app(reply), strategy=Scaffold(fraction_evaluate=0.0))
    assert len(found) == 2
    for seen in found.values():
        check_step(seen)
        left = [x for x in reading(seen)["left_out"] if x["kind"] == "arrays"]
        assert [(x["record"], x["values"]) for x in left] == [
            ("change", sum(v.numel() for v in START.values()))
        ]


@pytest.mark.parametrize("key", ["model", "other"])
def test_of_two_records_that_both_came_back_the_strategy_knows_the_model(
    tmp_path: Path, key: str
) -> None:
    def reply(received: Any) -> Any:
        moved = {k: trained(as_state(received, k)) for k in ("model", "other")}
        return {k: ArrayRecord(v) for k, v in moved.items()}

    class Two(FedAvg):
        def configure_train(self, *given: Any) -> Any:
            messages = list(super().configure_train(*given))
            for message in messages:
                message.content["model" if key == "other" else "other"] = ArrayRecord(START)
            return messages

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return None, None

    strategy = Two(fraction_evaluate=0.0, arrayrecord_key=key)
    found = captured(tmp_path, app(reply), strategy=strategy)
    assert [reading(seen)["record"] for seen in found.values()] == [key, key]


def test_lists_are_paired_by_their_order(tmp_path: Path) -> None:
    """In every round names are numbers."""

    def reply(received: Any) -> ArrayRecord:
        return as_list(trained(as_state(received)))

    initial = as_list(START)
    found = captured(tmp_path, app(reply), initial=initial, rounds=2)
    assert sorted(found) == [(r, f"node-{n}") for r in (1, 2) for n in (1, 2)]
    moved = {str(NAMES.index(name)) for name in PARAMETERS}
    for seen in found.values():
        assert moved <= set(seen.update)
        assert str(NAMES.index("position_ids")) in seen.buffers


def test_names_that_change_to_numbers_are_paired_by_order_and_noted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Lists(FedAvg):
        def aggregate_train(self, *given: Any) -> Any:
            arrays, metrics = super().aggregate_train(*given)
            assert arrays is not None
            return ArrayRecord(arrays.to_numpy_ndarrays()), metrics

    strategy = Lists(fraction_evaluate=0.0)
    found = captured(tmp_path, app(returns_weights), strategy=strategy, rounds=3)
    assert len(found) == 6
    for (number, _), seen in found.items():
        check_step(seen)
        assert reading(seen)["matched"] == ("name" if number == 1 else "order")
    assert [r.levelno for r in caplog.records if "order" in r.getMessage()] == [logging.WARNING]


def test_an_integer_buffer_that_was_averaged_to_floating_numbers_costs_no_round(
    tmp_path: Path,
) -> None:
    found = captured(tmp_path, app(returns_weights), rounds=3)
    assert len(found) == 6
    for seen in found.values():
        check_step(seen)
        assert "position_ids" in seen.buffers and "position_ids" in seen.returned_buffers

    # A client that never loads it into a model sends back what it received.
    def untouched(received: Any) -> ArrayRecord:
        ids = torch.from_numpy(np.array(received["arrays"]["position_ids"].numpy()))
        return ArrayRecord({**trained(as_state(received)), "position_ids": ids})

    for seen in captured(tmp_path / "untouched", app(untouched), rounds=2).values():
        check_step(seen)


def test_parameters_that_do_not_come_back_are_absent_and_named(tmp_path: Path) -> None:
    def without_norm(received: Any) -> ArrayRecord:
        state = trained(as_state(received))
        return ArrayRecord({n: v for n, v in state.items() if not n.startswith("1.")})

    found = captured(tmp_path, app(without_norm))
    assert len(found) == 2
    for seen in found.values():
        check_step(seen, [n for n in PARAMETERS if not n.startswith("1.")])
        absent = [n for n in NAMES if n.startswith("1.")]
        assert list(reading(seen)["absent"]) == absent
        assert set(absent) <= set(seen.buffers)


def test_arrays_that_were_not_sent_are_named_and_left_out(tmp_path: Path) -> None:
    def more(received: Any) -> ArrayRecord:
        return ArrayRecord({**trained(as_state(received)), "mean_of_labels": torch.ones(3)})

    for seen in captured(tmp_path, app(more)).values():
        check_step(seen)
        assert list(reading(seen)["extra"]) == ["mean_of_labels"]


def gradient(received: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(START[n].shape, generator=generator) / 9 for n in PARAMETERS}


class FedSGD(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return None, None


def test_a_gradient_is_not_taken_for_weights(tmp_path: Path) -> None:
    def reply(received: Any) -> ArrayRecord:
        return ArrayRecord(gradient(received))

    strategy = FedSGD(fraction_evaluate=0.0)
    assert captured(tmp_path / "open", app(reply), strategy=strategy) == {}
    for missed in refusals(tmp_path / "open"):
        check_named(missed["reason"], "update='gradient'", "update='delta'")
    declared = captured(tmp_path / "told", app(reply), strategy=strategy, update="gradient")
    assert len(declared) == 2
    for seen in declared.values():
        assert seen.declaration.algorithm == "fedsgd"
        assert (reading(seen)["update"], reading(seen)["source"]) == ("gradient", "declared")
        for name, value in gradient({}).items():
            assert torch.equal(seen.gradient()[name], value)


def coded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as an app's own quantisation to 8 bits sends them, with their scales."""
    found = dict(state)
    for name in ("0.weight", "2.weight"):
        scale = state[name].abs().max() / 127
        found |= {name: (state[name] / scale).round().to(torch.int8), f"{name}.scale": scale[None]}
    return found


def coded_in_floats(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: v.float() if v.dtype == torch.int8 else v for n, v in coded(state).items()}


def weighted(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: 4 * v if n in PARAMETERS else v for n, v in state.items()}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (coded, ("int8", "codes")),
        (coded_in_floats, ("times those that were sent", "codes")),
        (weighted, ("4 times those that were sent", "update='weights'")),
    ],
)
def test_weights_in_other_units_than_were_sent_are_refused(
    changed: Any, words: tuple[str, ...], named: bool, tmp_path: Path
) -> None:
    def reply(received: Any) -> ArrayRecord:
        state = as_state(received)
        state = {n: v - STEP / 100 if n in PARAMETERS else v for n, v in state.items()}
        found = changed(state)
        if not named:  # a list has no place for the scales
            return as_list({n: v for n, v in found.items() if n in NAMES})
        return ArrayRecord(found)

    strategy = FedSGD(fraction_evaluate=0.0)
    initial = ArrayRecord(START) if named else as_list(START)
    assert captured(tmp_path, app(reply), strategy=strategy, initial=initial) == {}
    for missed in refusals(tmp_path):
        check_named(missed["reason"], *words)


@pytest.mark.parametrize("name", ["num-examples", "num_examples", "num_samples"])
def test_the_number_of_examples_is_read_under_its_usual_names(name: str, tmp_path: Path) -> None:
    made = ClientApp()

    @made.train()
    def train(message: Any, context: Any) -> Any:
        received = {key: dict(r.items()) for key, r in message.content.array_records.items()}
        content = RecordDict({"metrics": MetricRecord({name: 6})})
        content["arrays"] = returns_weights(received)
        return Message(content, reply_to=message)

    strategy = FedAvg(fraction_evaluate=0.0, weighted_by_key=name)
    found = captured(tmp_path, made, strategy=strategy)
    assert [seen.declaration.num_examples for seen in found.values()] == [6, 6]


class Clusters(FedAvg):
    """Sends two models, of which each client trains the one that fits it better."""

    apart = 1.0

    def configure_train(self, *given: Any) -> Any:
        messages = list(super().configure_train(*given))
        # All messages share one content.
        content = messages[0].content
        state = as_state({"arrays": dict(content.array_records.pop("arrays").items())})
        other = {n: v + self.apart if n in PARAMETERS else v for n, v in state.items()}
        content["first"], content["second"] = ArrayRecord(other), ArrayRecord(state)
        return messages

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return None, None


def test_of_several_models_the_one_that_was_trained_from_is_taken(tmp_path: Path) -> None:
    def reply(received: Any) -> ArrayRecord:
        return ArrayRecord(trained(as_state(received, "second")))

    strategy = Clusters(fraction_evaluate=0.0)
    found = captured(tmp_path / "apart", app(reply), strategy=strategy)
    assert len(found) == 2
    for seen in found.values():
        check_step(seen)
    strategy.apart = -2 * STEP
    assert captured(tmp_path / "near", app(reply), strategy=strategy) == {}
    for missed in refusals(tmp_path / "near"):
        check_named(missed["reason"], "first", "second")


def test_weights_that_are_declared_may_have_any_length(tmp_path: Path) -> None:
    def reply(received: Any) -> ArrayRecord:
        return ArrayRecord(weighted(as_state(received)))

    strategy = FedSGD(fraction_evaluate=0.0)
    assert len(captured(tmp_path, app(reply), strategy=strategy, update="weights")) == 2


def test_complex_parameters_are_no_buffers(tmp_path: Path) -> None:
    filters = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))

    def reply(received: Any) -> ArrayRecord:
        held = {n: v for n, v in received["arrays"].items() if n != "filters"}
        state = trained(as_state({"arrays": held}))
        return ArrayRecord({"filters": filters * 1.5, **state})

    initial = ArrayRecord({"filters": filters, **START})
    found = captured(tmp_path, app(reply), strategy=FedSGD(fraction_evaluate=0.0), initial=initial)
    assert found == {}
    for missed in refusals(tmp_path):
        check_named(missed["reason"], "filters", "complex64")


def test_a_delta_is_read_as_declared(tmp_path: Path) -> None:
    def reply(received: Any) -> ArrayRecord:
        return ArrayRecord({n: -v for n, v in gradient(received).items()})

    strategy = FedSGD(fraction_evaluate=0.0)
    found = captured(tmp_path, app(reply), strategy=strategy, update="delta")
    assert len(found) == 2
    for seen in found.values():
        for name, value in gradient({}).items():
            assert torch.equal(seen.update[name], value)


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_weights_stay_weights_also_under_noise(tmp_path: Path, spread: float) -> None:
    """Noise lowers the cosine, and not the share of what was sent."""

    def reply(received: Any) -> ArrayRecord:
        generator = torch.Generator().manual_seed(2)
        state = trained(as_state(received))
        noise = {n: spread * torch.randn(START[n].shape, generator=generator) for n in PARAMETERS}
        return ArrayRecord({n: v + noise[n] if n in noise else v for n, v in state.items()})

    large = {n: 3 * v if n in PARAMETERS else v for n, v in START.items()}
    found = captured(tmp_path, app(reply), initial=ArrayRecord(large))
    assert [reading(seen)["update"] for seen in found.values()] == ["weights", "weights"]


def test_an_unknown_kind_of_update_is_refused_when_the_hook_is_built(tmp_path: Path) -> None:
    with refused("config-value", "update", "grad", "gradient"):
        HonestButCurious(FedAvg(), ObservationStore(tmp_path), update="grad")  # type: ignore[arg-type]


def test_a_matrix_of_the_clients_own_is_noted_with_its_last_upload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def own_head(received: Any) -> ArrayRecord:
        generator = torch.Generator().manual_seed(3)
        head = torch.randn(12, 12, generator=generator) / 4
        return ArrayRecord({**trained(as_state(received)), "2.weight": head})

    found = captured(tmp_path, app(own_head), strategy=FedSGD(fraction_evaluate=0.0), rounds=1)
    assert [reading(seen)["unlike"] for seen in found.values()] == [("2.weight",)] * 2
    check_named(caplog.text, "diverged", "2.weight")
    assert [reading(seen)["previous"] for seen in found.values()] == [None, None]
    later = captured(tmp_path / "later", app(returns_weights), rounds=2)
    assert [reading(later[2, name])["previous"] for name in ("node-1", "node-2")] == [1, 1]
    assert {reading(seen)["unlike"] for seen in later.values()} == {()}


class Retyped(FedAvg):
    """Send train messages of another type."""

    kind = "train.fit"

    def configure_train(self, *given: Any) -> Any:
        return [
            Message(content=m.content, message_type=self.kind, dst_node_id=m.metadata.dst_node_id)
            for m in super().configure_train(*given)
        ]


class Queried(Retyped):
    kind = "query.fit"


def test_actions_of_train_are_captured(tmp_path: Path) -> None:
    strategy = Retyped(fraction_evaluate=0.0)
    assert len(captured(tmp_path, app(returns_weights, action="fit"), strategy=strategy)) == 2


def test_a_loop_of_ones_own_is_captured_over_a_grid_that_listens(tmp_path: Path) -> None:
    hook = HonestButCurious(FedAvg(), ObservationStore(tmp_path))
    grid = hook.listen(clients_of(app(returns_weights), 2))
    for number in (1, 2):
        config = ConfigRecord({"server-round": number})
        content = RecordDict({"arrays": ArrayRecord(START), "config": config})
        messages = [Message(content, node, "train") for node in grid.get_node_ids()]
        assert len(list(grid.send_and_receive(messages))) == 2
    found = list(ObservationStore(tmp_path))
    assert [seen.round for seen in found] == [1, 1, 2, 2]
    for seen in found:
        check_step(seen)


def test_a_run_without_a_capture_ends_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = Queried(fraction_evaluate=0.0)
    client = app(returns_weights, action="fit", trains=False)
    assert captured(tmp_path, client, strategy=strategy, rounds=2) == {}
    (line,) = [r.getMessage() for r in caplog.records if "captured" in r.getMessage()]
    check_named(line, 4, "query.fit", "train")
    caplog.clear()

    def fails(received: Any) -> Any:
        raise RuntimeError("no data at site-7")

    assert captured(tmp_path / "failing", app(fails)) == {}
    (line,) = [r.getMessage() for r in caplog.records if "captured" in r.getMessage()]
    check_named(line, 2, "train", "no data at site-7")
    caplog.clear()
    captured(tmp_path / "usual", app(returns_weights))
    assert not [r for r in caplog.records if "nothing" in r.getMessage()]


def test_a_client_without_examples_costs_itself_alone(tmp_path: Path) -> None:
    found = captured(tmp_path, app(returns_weights, examples=lambda number: 4 * number))
    assert list(found) == [(1, "node-2")]
    (missed,) = refusals(tmp_path)
    assert missed["node_id"] == "1"
    check_named(missed["reason"], "num-examples", 0)


def test_everything_else_that_came_is_listed_by_name_and_size(tmp_path: Path) -> None:
    made = ClientApp()

    @made.train()
    def train(message: Any, context: Any) -> Any:
        received = {k: dict(r.items()) for k, r in message.content.array_records.items()}
        metrics = MetricRecord({"num-examples": 4, "label_counts": [1, 0, 3]})
        content = RecordDict(
            {
                "arrays": returns_weights(received),
                "metrics": metrics,
                "stats": ConfigRecord({"names": ["Ada", "Grace"], "note": "hello"}),
            }
        )
        return Message(content, reply_to=message)

    for seen in captured(tmp_path, made).values():
        found = {
            (x["kind"], x["record"], x["name"]): x["values"] for x in reading(seen)["left_out"]
        }
        assert found == {
            ("metrics", "metrics", "num-examples"): 1,
            ("metrics", "metrics", "label_counts"): 3,
            ("config", "stats", "names"): 2,
            ("config", "stats", "note"): 5,
        }


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (lambda received: ArrayRecord({"trees": torch.zeros(9, dtype=torch.uint8)}), ["trees"]),
        (lambda received: ArrayRecord({"0.weight": torch.zeros(3, 3)}), ["0.weight", "(3, 3)"]),
        (lambda received: ArrayRecord({"else": torch.zeros(3, 3)}), ["else", "state_dict"]),
    ],
)
def test_what_cannot_be_read_is_refused_in_round_1_by_its_cause(
    tmp_path: Path, reply: Any, named: list[str]
) -> None:
    assert captured(tmp_path, app(reply), strategy=FedSGD(fraction_evaluate=0.0)) == {}
    reasons = {missed["reason"] for missed in refusals(tmp_path)}
    assert len(reasons) == 1
    check_named(reasons.pop(), *named)


def test_a_strategy_of_flowers_older_api_is_refused_by_name(tmp_path: Path) -> None:
    class Older:
        """What ``flwr.server.strategy`` looks like."""

        def configure_fit(self) -> None: ...

    with refused("config-value", "Older", "flwr.serverapp.strategy"):
        HonestButCurious(Older(), ObservationStore(tmp_path))
