"""How DefenseMod reads what an app returns: the parameters and nothing else are protected."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from foreign_apps import clients_of
from refusals import check_named, refused
from torch import Tensor, nn

from bract.client import REFUSED, DefenseMod

NORM = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Linear(12, 12))


START = {name: value.clone() for name, value in network().state_dict().items()}
NAMES = list(START)
PARAMETERS = [name for name, _ in network().named_parameters()]


def trained(received: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move parameters and buffers alike by a quarter, the counter by 1."""
    return {n: v + (0.25 if v.is_floating_point() else 1) for n, v in received.items()}


def as_list(state: dict[str, Tensor]) -> ArrayRecord:
    return ArrayRecord([value.numpy() for value in state.values()])


def exchange(
    mod: DefenseMod,
    reply: Any,
    *,
    sent: ArrayRecord | None = None,
    number: int = 1,
    more: dict[str, ArrayRecord] | None = None,
    answer: str = "arrays",
) -> tuple[Message, list[str]]:
    """Return the reply of an app, whose ``reply(received arrays)`` returns, and its calls."""
    app, calls = ClientApp(mods=[mod]), []

    @app.train()
    def train(message: Any, context: Any) -> Any:
        calls.append("train")
        arrays = message.content["arrays"]
        values = [torch.from_numpy(np.array(a.numpy())) for a in arrays.values()]
        content = RecordDict({"metrics": MetricRecord({"num-examples": 4})})
        content[answer] = reply(dict(zip(arrays, values, strict=True)))
        return Message(content, reply_to=message)

    grid = clients_of(app)
    config = ConfigRecord({"server-round": number})
    content = RecordDict({"arrays": sent or ArrayRecord(START), "config": config, **(more or {})})
    (found,) = grid.send_and_receive([grid.create_message(content, "train", 1, "1")])
    return found, calls


def noise(**options: Any) -> DefenseMod:
    return DefenseMod("noise", std=0.5, **options)


def values(reply: Message) -> list[Tensor]:
    arrays = reply.content.array_records["arrays"]
    return [torch.from_numpy(np.array(array.numpy())) for array in arrays.values()]


def changed(found: list[Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are not as the app returned them."""
    pairs = zip(expected.items(), found, strict=True)
    return [name for (name, value), other in pairs if not torch.equal(value, other)]


def test_a_list_that_may_hold_running_statistics_is_refused_before_training() -> None:
    reply, calls = exchange(noise(), lambda a: as_list(trained(a)), sent=as_list(START))
    assert calls == []
    positions = [str(NAMES.index(name)) for name in NORM[:2]]
    check_named(str(reply.error.reason), "state_dict", f"buffers={positions}", "buffers=[]")


def test_the_buffers_of_a_list_that_are_given_by_number_get_no_noise() -> None:
    positions = [str(NAMES.index(name)) for name in NORM]
    mod = noise(buffers=positions)
    reply, _ = exchange(mod, lambda a: as_list(trained(a)), sent=as_list(START))
    assert changed(values(reply), trained(START)) == PARAMETERS
    # The model has no buffers, says its user.
    reply, _ = exchange(noise(buffers=[]), lambda a: as_list(trained(a)), sent=as_list(START))
    assert changed(values(reply), trained(START)) == [n for n in NAMES if n != NORM[2]]


def test_a_list_without_neighbours_of_one_size_holds_parameters_alone() -> None:
    start = {n: v for n, v in START.items() if not n.startswith("1.")}
    reply, _ = exchange(noise(), lambda a: as_list(trained(a)), sent=as_list(start))
    assert changed(values(reply), trained(start)) == list(start)


def test_names_of_the_reply_decide_where_those_received_are_numbers() -> None:
    """As in round 2 of a strategy that returns a list."""

    def named(received: dict[str, Tensor]) -> ArrayRecord:
        return ArrayRecord(dict(zip(NAMES, trained(received).values(), strict=True)))

    reply, _ = exchange(noise(), named, sent=as_list(START), number=2)
    assert list(reply.content["arrays"]) == NAMES
    assert changed(values(reply), trained(START)) == PARAMETERS


def test_a_list_is_refused_after_training_where_names_were_received() -> None:
    reply, calls = exchange(noise(), lambda a: as_list(trained(a)))
    assert calls == ["train"]
    assert reply.error.reason == REFUSED


def test_what_does_not_come_back_needs_no_protection() -> None:
    def without_norm(received: dict[str, Tensor]) -> ArrayRecord:
        state = trained(received)
        return ArrayRecord({n: v for n, v in state.items() if not n.startswith("1.")})

    reply, _ = exchange(noise(), without_norm)
    expected = {n: v for n, v in trained(START).items() if not n.startswith("1.")}
    assert list(reply.content["arrays"]) == list(expected)
    assert changed(values(reply), expected) == list(expected)


def test_an_averaged_integer_buffer_that_is_sent_back_as_it_came_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = torch.arange(4, dtype=torch.float64)
    sent = ArrayRecord({**START, "position_ids": ids})
    reply, _ = exchange(noise(), lambda a: ArrayRecord(trained(a)), sent=sent)
    assert reply.error.reason == REFUSED
    check_named(caplog.text, "position_ids", "float64", "buffers=")
    told = noise(buffers=["position_ids", *(n.removeprefix("1.") for n in NORM)])
    reply, _ = exchange(told, lambda a: ArrayRecord(trained(a)), sent=sent)
    after = {**trained(START), "position_ids": ids + 0.25}
    assert changed(values(reply), after) == PARAMETERS


def gradient(received: dict[str, Tensor]) -> ArrayRecord:
    generator = torch.Generator().manual_seed(1)
    return ArrayRecord({n: torch.randn(START[n].shape, generator=generator) for n in PARAMETERS})


@pytest.mark.parametrize("kind", ["gradient", "delta"])
def test_a_gradient_is_refused_or_protected_as_what_it_is(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reply, _ = exchange(noise(), gradient)
    assert reply.error.reason == REFUSED
    check_named(caplog.text, "update='gradient'")
    reply, _ = exchange(DefenseMod("pruning", ratio=0.5, update=kind), gradient)
    sent = torch.cat([value.flatten() for value in gradient({}).to_torch_state_dict().values()])
    found = torch.cat([value.flatten() for value in values(reply)])
    assert int((found == 0).sum()) == len(found) // 2
    assert torch.equal(found[found != 0], sent[found != 0])


def test_an_unknown_kind_of_update_is_refused_when_the_app_is_built() -> None:
    with refused("config-value", "update", "grad", "gradient"):
        noise(update="grad")


def decoy() -> ArrayRecord:
    return ArrayRecord({name: value + 1 for name, value in START.items()})


@pytest.mark.parametrize("answer", ["arrays", "model"])
def test_no_server_chooses_what_an_update_is_taken_from(answer: str) -> None:
    """Not by a record under the name of the reply, where the app reads another."""
    reply, calls = exchange(
        DefenseMod("pruning"),
        lambda a: ArrayRecord(trained(a)),
        more={"model": decoy()},
        answer=answer,
    )
    assert calls == [] and not reply.has_content()
    check_named(str(reply.error.reason), "arrays, model", "record=")


@pytest.mark.parametrize("answer", ["arrays", "model"])
def test_the_record_that_an_author_names_is_what_an_update_is_taken_from(answer: str) -> None:
    reply, _ = exchange(
        DefenseMod("pruning", record="arrays"),
        lambda a: ArrayRecord(trained(a)),
        more={"model": decoy()},
        answer=answer,
    )
    arrays = reply.content.array_records[answer]
    for name in PARAMETERS:
        found = torch.from_numpy(np.array(arrays[name].numpy()))
        assert bool(((found == START[name]) | torch.isclose(found, START[name] + 0.25)).all())
    unsent, calls = exchange(DefenseMod("pruning", record="other"), trained)
    assert calls == [] and unsent.has_error()


def test_arrays_in_the_answer_to_an_evaluation_stay_at_the_client() -> None:
    app = ClientApp(mods=[noise()])

    @app.evaluate()
    def evaluate(message: Any, context: Any) -> Any:
        metrics = MetricRecord({"num-examples": 4, "loss": 0.5})
        content = RecordDict({"metrics": metrics, "arrays": ArrayRecord(trained(START))})
        return Message(content, reply_to=message)

    grid = clients_of(app)
    content = RecordDict(
        {"arrays": ArrayRecord(START), "config": ConfigRecord({"server-round": 1})}
    )
    (reply,) = grid.send_and_receive([grid.create_message(content, "evaluate", 1, "1")])
    assert reply.has_error() and str(reply.error.reason) == REFUSED
