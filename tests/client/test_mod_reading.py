"""How DefenseMod reads what an app returns: the parameters and nothing else are protected."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from foreign_apps import clients_of
from refusals import check_named, refused
from torch import Tensor, nn

from bract.client import REFUSED, DefenseMod
from bract.protocol.arrays import to_packed
from bract.server.loopback import LoopbackGrid

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
    node: dict[str, Any] | None = None,
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

    grid = clients_of(app) if node is None else LoopbackGrid(app, [node], run_id=1)
    config = ConfigRecord({"server-round": number})
    content = RecordDict({"arrays": sent or ArrayRecord(START), "config": config, **(more or {})})
    (found,) = grid.send_and_receive([grid.create_message(content, "train", 1, "1")])
    return found, calls


def noise(**options: Any) -> DefenseMod:
    """A mod of an app that trains without an optimizer; test_held.py has the others."""
    return DefenseMod("noise", std=0.5, seen=False, **options)


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

    reply, _ = exchange(noise(reads="order"), named, sent=as_list(START), number=2)
    assert list(reply.content["arrays"]) == NAMES
    assert changed(values(reply), trained(START)) == PARAMETERS


def loosely(received: dict[str, Tensor]) -> ArrayRecord:
    """Train as an app does that loads what it finds by name, and returns its own names."""
    model = network()
    model.load_state_dict(received, strict=False)
    return ArrayRecord(trained(model.state_dict()))


def test_no_server_sends_a_list_to_an_app_that_reads_by_name() -> None:
    """An app that is not strict loads nothing of it, and trains from a start of its own."""
    offset = {n: v + 0.5 if v.is_floating_point() else v for n, v in START.items()}
    for mod in (noise(), noise(buffers=[]), noise(reads="name")):
        found, calls = exchange(mod, loosely, sent=as_list(offset), number=2)
        assert calls == ["train"] and found.error.reason == REFUSED


def test_a_list_is_refused_after_training_where_names_were_received() -> None:
    reply, calls = exchange(noise(), lambda a: as_list(trained(a)))
    assert calls == ["train"]
    assert reply.error.reason == REFUSED


def in_order(received: dict[str, Tensor]) -> ArrayRecord:
    """Train as an app does that takes arrays one after the other, and returns its own names."""
    return ArrayRecord(trained(dict(zip(NAMES, received.values(), strict=False))))


def under_names_received(received: dict[str, Tensor]) -> ArrayRecord:
    return ArrayRecord(trained(received))


def under_names_received_with_numbers(received: dict[str, Tensor]) -> ArrayRecord:
    return as_list(trained(received))


MOVED = {"x" + name: value for name, value in START.items()}
PARTS = {n: v for n, v in START.items() if not n.startswith("1.")}


@pytest.mark.parametrize(
    ("sent", "reply"),
    [
        (MOVED | {n: v + 9 if v.is_floating_point() else v for n, v in START.items()}, in_order),
        (dict(zip(["2.weight", *NAMES[1:]], START.values(), strict=False)) | START, in_order),
        ({"1": START["0.weight"], "0": START["2.bias"]}, under_names_received_with_numbers),
        ({n: START[n] for n in ("2.bias", "0.bias")}, lambda a: in_names(a, ("0.bias", "2.bias"))),
    ],
    ids=["more arrays", "other names first", "numbers exchanged", "names exchanged"],
)
def test_no_server_chooses_the_base_within_one_record(sent: dict[str, Tensor], reply: Any) -> None:
    """Names and order of what was sent must lead to the same arrays."""
    found, _ = exchange(noise(), reply, sent=ArrayRecord(sent))
    assert found.error.reason == REFUSED


def in_names(received: dict[str, Tensor], names: tuple[str, ...]) -> ArrayRecord:
    return ArrayRecord(trained(dict(zip(names, received.values(), strict=True))))


def test_an_author_says_how_the_app_reads_what_it_receives() -> None:
    turned = {name: START[name] for name in reversed(NAMES)}

    def by_name(received: dict[str, Tensor]) -> ArrayRecord:
        return ArrayRecord({name: trained(received)[name] for name in NAMES})

    reply, _ = exchange(noise(reads="name"), by_name, sent=ArrayRecord(turned))
    assert changed(values(reply), trained(START)) == PARAMETERS
    listed = noise(reads="order", buffers=[])
    reply, _ = exchange(listed, lambda a: as_list(trained(a)), sent=ArrayRecord(PARTS))
    assert changed(values(reply), trained(PARTS)) == list(PARTS)
    with refused("config-value", "reads", "'names'"):
        DefenseMod("noise", std=0.5, reads="names")  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["keeps", "buffers"])
@pytest.mark.parametrize("given", ["bn", [1]])
def test_names_are_a_list_of_texts(what: str, given: Any) -> None:
    """Of one text every letter would count as a name, and more would leave undefended."""
    settings: dict[str, Any] = {what: given}
    with refused("config-value", what, "list of names"):
        DefenseMod("pruning", ratio=0.5, **settings)


@pytest.mark.parametrize(
    "names",
    [
        ["0.running_mean", "0.running_var", "2.weight", "2.bias"],
        ["running_mean", "running_var", "num_batches_tracked", "b"],
        ["0.weight", "0.running_mean", "0.running_var", "0.num_batches_tracked"],
    ],
)
def test_no_server_names_a_parameter_as_a_running_statistic(names: list[str]) -> None:
    """Of an app that returns what it received under the names that it received."""
    sent = dict(zip(names, PARTS.values(), strict=True))
    found, _ = exchange(noise(), under_names_received, sent=ArrayRecord(sent))
    assert found.error.reason == REFUSED


def test_names_turned_within_a_layer_leave_no_parameter_bare() -> None:
    """The count is a whole number, which shows where the statistics of its layer are."""
    names = ["1.running_mean", "1.running_var", "x", "y", "1.weight", "1.bias", "z", "v", "w"]
    names[6] = "1.num_batches_tracked"
    sent = dict(zip(names, START.values(), strict=True))
    found, _ = exchange(noise(), under_names_received, sent=ArrayRecord(sent))
    assert found.error.reason == REFUSED


def test_told_endings_of_pytorch_show_no_more_than_its_names() -> None:
    """Whole names do, which an author gives of names of the app's own."""
    names = ["0.running_mean", "0.running_var", "2.weight", "2.bias"]
    sent = ArrayRecord(dict(zip(names, PARTS.values(), strict=True)))
    endings = [name.rpartition(".")[2] for name in names[:2]]
    for mod in (noise(buffers=endings), noise(buffers=endings, reads="name")):
        found, _ = exchange(mod, under_names_received, sent=sent)
        assert found.error.reason == REFUSED
    reply, _ = exchange(noise(buffers=names[:2], reads="name"), under_names_received, sent=sent)
    expected = trained(dict(zip(names, PARTS.values(), strict=True)))
    assert changed(values(reply), expected) == names[2:]


def test_a_norm_of_weight_bias_and_count_has_no_running_statistics() -> None:
    """Two vectors before a whole number are a layer's own weight and bias."""
    names = ["0.weight", "0.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    vectors = [START["0.weight"], START["0.bias"], START["1.weight"], START["1.bias"] - 1.0]
    sent = dict(zip(names, [*vectors, torch.tensor(0)], strict=True))
    found, _ = exchange(noise(), under_names_received, sent=ArrayRecord(sent))
    assert found.error.reason == REFUSED


class CountingNorm(nn.LayerNorm):
    """Counts its steps, so that two vectors and a whole number are next to each other."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("steps", torch.tensor(0))


def counting() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), CountingNorm(12), nn.Linear(12, 12))


KEPT: list[nn.Module] = []
"""A model that an app makes once, as Flower's older examples do."""


def training(make: Any, *, received: bool = False, keep: bool = False) -> Any:
    """Return an app that loads arrays in their order, or by name, and trains a real layer."""

    def reply(arrays: dict[str, Tensor]) -> ArrayRecord:
        model = KEPT[0] if keep else make()
        names = list(model.state_dict())
        model.load_state_dict(
            dict(zip(names, arrays.values(), strict=True)) if received else arrays
        )
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.25)
        model(torch.linspace(-1, 1, 128).reshape(8, 16))
        state = model.state_dict()
        return ArrayRecord(dict(zip(arrays if received else names, state.values(), strict=True)))

    return reply


def left_bare(reply: Message, sent: dict[str, Tensor]) -> list[str]:
    """Return the names of the floating arrays that moved by what the app did, and no noise."""
    pairs = zip(sent.items(), values(reply), strict=True)
    return [n for (n, v), w in pairs if v.is_floating_point() and bool((w - v).eq(0.25).all())]


@pytest.mark.parametrize("declared", [{}, {"buffers": NORM}, {"reads": "order"}, {"buffers": []}])
def test_no_server_makes_running_statistics_of_a_layer_by_its_names(declared: Any) -> None:
    """Mean, variance and count are the shapes of a weight, a bias and a count of another norm."""
    state = counting().state_dict()
    names = ["0.weight", "0.bias", *NORM, "2.weight", "2.bias"]
    sent = dict(zip(names, state.values(), strict=True)) | {NORM[1]: state["1.bias"] + 1.0}
    app = training(counting, received=True)
    reply, _ = exchange(noise(**declared), app, sent=ArrayRecord(sent))
    if declared.get("buffers") == []:
        assert left_bare(reply, sent) == []
    else:
        assert reply.error.reason == REFUSED


@pytest.mark.parametrize("declared", [None, ["ema"], NORM[:2]])
@pytest.mark.parametrize("received", [False, True], ids=["own names", "names received"])
@pytest.mark.parametrize("keep", [False, True], ids=["made for the round", "made once"])
def test_the_running_statistics_of_an_apps_own_layer_get_no_noise(
    declared: Any, received: bool, keep: bool
) -> None:
    """The layers that the app trains show them, with or without a declaration."""
    KEPT[:] = [network()]
    app = training(network, received=received, keep=keep)
    reply, _ = exchange(noise(buffers=declared), app)
    expected = training(network)({n: v.clone() for n, v in START.items()})
    assert changed(values(reply), expected.to_torch_state_dict()) == PARAMETERS
    assert not torch.equal(held_by(reply)[NORM[0]], START[NORM[0]])


def test_no_parameter_leaves_as_whole_numbers() -> None:
    """Of an app that returns what it trained in the type that it received."""
    sent = PARTS | {"0.weight": (8 * PARTS["0.weight"]).round().to(torch.int64)}
    found, _ = exchange(noise(), under_names_received, sent=ArrayRecord(sent))
    assert found.error.reason == REFUSED
    places = PARTS | {"0.weight": torch.arange(16)}

    def kept(received: dict[str, Tensor]) -> ArrayRecord:
        return ArrayRecord(trained(received) | {"0.weight": received["0.weight"]})

    reply, _ = exchange(noise(), kept, sent=ArrayRecord(places))
    assert not reply.has_error()


def test_a_server_that_averages_in_float64_is_read_as_the_app_reads_it() -> None:
    """As Flower's FedAdam does from round 2 on."""
    sent = {name: value.double() for name, value in PARTS.items()}

    def loaded(received: dict[str, Tensor]) -> ArrayRecord:
        return ArrayRecord({n: v.float() for n, v in trained(received).items()})

    reply, _ = exchange(noise(), loaded, sent=ArrayRecord(sent), number=2)
    assert changed(values(reply), trained(PARTS)) == list(PARTS)
    assert all(value.dtype == torch.float32 for value in values(reply))


def test_a_packed_record_is_refused_before_training() -> None:
    """Another app does not unpack what the mod would."""
    reply, calls = exchange(noise(reads="name"), under_names_received, sent=to_packed(START))
    assert calls == [] and reply.has_error()


def test_what_does_not_come_back_needs_no_protection() -> None:
    def without_norm(received: dict[str, Tensor]) -> ArrayRecord:
        state = trained(received)
        return ArrayRecord({n: v for n, v in state.items() if not n.startswith("1.")})

    for mod in (noise(), noise(reads="name"), noise(keeps=["1."])):
        found, _ = exchange(mod, without_norm)
        assert found.error.reason == REFUSED
    reply, _ = exchange(noise(reads="name", keeps=["1."]), without_norm)
    expected = {n: v for n, v in trained(START).items() if not n.startswith("1.")}
    assert list(reply.content["arrays"]) == list(expected)
    assert changed(values(reply), expected) == list(expected)


def test_an_averaged_integer_buffer_that_is_sent_back_as_it_came_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = torch.arange(4, dtype=torch.float64)
    sent = ArrayRecord({**START, "position_ids": ids})
    reply, _ = exchange(noise(reads="name"), lambda a: ArrayRecord(trained(a)), sent=sent)
    assert reply.error.reason == REFUSED
    check_named(caplog.text, "position_ids", "float64", "buffers=")
    mod = noise(buffers=["position_ids", *(n.removeprefix("1.") for n in NORM)], reads="name")
    reply, _ = exchange(mod, lambda a: ArrayRecord(trained(a)), sent=sent)
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
    reply, _ = exchange(DefenseMod("pruning", ratio=0.5, update=kind, seen=False), gradient)
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
        DefenseMod("pruning", record="arrays", reads="name", seen=False),
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


def test_arrays_of_the_older_api_name_no_type_and_are_floating_all_the_same(
    tmp_path: Path,
) -> None:
    """Flower leaves dtype and shape of such arrays empty; a policy looks at their values."""
    (tmp_path / "policy.yaml").write_text("max_epsilon: 100000\nmax_rounds_total: 5\n")
    tmp_path.chmod(0o700)
    app = ClientApp(mods=[DefenseMod([{"name": "noise", "std": 1.0, "clip": 1.0}])])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        received = message.content.array_records["arrays"]
        moved = [a + np.float32(0.01) for a in received.to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 8})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "m": metrics}), reply_to=message)

    node = {"state-dir": str(tmp_path), "policy": str(tmp_path / "policy.yaml")}
    grid = LoopbackGrid(app, [node], {"num-server-rounds": 3})
    whole = Array(np.ones((8, 8), np.float32))
    bare = ArrayRecord({"0": Array("", (), stype=whole.stype, data=whole.data)})
    content = RecordDict({"arrays": bare, "config": ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", 1, "1")])
    assert not reply.has_error()


@pytest.mark.parametrize("buffers", [None, [], ["ema"], ["1.running_mean", "1.running_var"]])
@pytest.mark.parametrize("own", [False, True], ids=["names received", "own names"])
def test_a_bounded_epsilon_lets_no_statistic_leave_whatever_buffers_are_told(
    buffers: Any, own: bool, tmp_path: Path
) -> None:
    (tmp_path / "policy.yaml").write_text("max_epsilon: 8")
    node = {"policy": str(tmp_path / "policy.yaml"), "state-dir": str(tmp_path / "state")}
    renamed = [n if n == NORM[2] else f"x{place}" for place, n in enumerate(NAMES)]
    sent = dict(zip(renamed, START.values(), strict=True)) if own else START
    mod = DefenseMod("noise", std=50.0, clip=1.0, buffers=buffers, reads="order" if own else None)
    reply = in_order if own else under_names_received
    found, calls = exchange(mod, reply, sent=ArrayRecord(sent), node=node)
    # Names that the app gives are known once it has trained.
    assert calls == (["train"] if own else [])
    if own:
        assert found.error.reason == REFUSED
    else:
        check_named(str(found.error.reason), "max_epsilon", "1.running_mean")


@pytest.mark.parametrize("buffers", [["positives"], []])
@pytest.mark.parametrize("counted", [0, 13])
def test_a_count_that_a_server_renames_leaves_under_a_bounded_epsilon_only_as_it_came(
    buffers: Any, counted: int, tmp_path: Path
) -> None:
    """The app counts its own examples in a buffer, and returns the names that it received."""
    (tmp_path / "policy.yaml").write_text("max_epsilon: 1")
    node = {"policy": str(tmp_path / "policy.yaml"), "state-dir": str(tmp_path / "state")}
    sent = {"w": torch.rand(12, 8), "a.num_batches_tracked": torch.tensor(0)}

    def reply(received: dict[str, Tensor]) -> ArrayRecord:
        w, count = received.values()
        return ArrayRecord(dict(zip(received, [w + 0.1, count + counted], strict=True)))

    mod = DefenseMod("noise", std=200.0, clip=1.0, buffers=buffers)
    found, _ = exchange(mod, reply, sent=ArrayRecord(sent), node=node)
    assert found.has_error() is (counted > 0)


def test_names_of_a_server_leave_no_statistic_of_a_list_without_noise(tmp_path: Path) -> None:
    """The author gives places of a list, the server sends names of running statistics."""
    (tmp_path / "policy.yaml").write_text("max_epsilon: 8")
    node = {"policy": str(tmp_path / "policy.yaml"), "state-dir": str(tmp_path / "state")}
    mod = noise(clip=1.0, buffers=["2", "3"], reads="order")
    found, calls = exchange(mod, under_names_received, node=node)
    assert calls == [] and found.has_error()
    check_named(str(found.error.reason), "max_epsilon", "1.running_mean")


@pytest.mark.parametrize("names", [["2", "a", "b", "c"], ["1.running_mean", "b", "c", "2"]])
def test_a_told_place_is_a_place_whatever_the_names(names: list[str]) -> None:
    """A server that names one parameter `2` among others gets it defended all the same."""
    sent = dict(zip(names, PARTS.values(), strict=True))
    mod = noise(buffers=["2", "3"], reads="order")
    reply, _ = exchange(mod, under_names_received, sent=ArrayRecord(sent))
    expected = trained(dict(zip(sent, PARTS.values(), strict=True)))
    assert changed(values(reply), expected) == names[:2]


class Tied(nn.Module):
    """Reads one weight under two names, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.last = nn.Linear(12, 12)
        self.last.weight = self.first.weight


def loaded(received: dict[str, Tensor]) -> ArrayRecord:
    """Train as an app does that loads what it received, and returns its whole state."""
    model = Tied()
    model.load_state_dict(received)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.25)
    return ArrayRecord(model.state_dict())


TIED = [["first.weight", "last.weight"]]


def tied_state(offset: float = 0.0) -> dict[str, Tensor]:
    start = {name: value.clone() for name, value in Tied().state_dict().items()}
    return start | {"first.weight": start["first.weight"] + offset}


def held_by(reply: Message) -> dict[str, Tensor]:
    return dict(zip(reply.content.array_records["arrays"], values(reply), strict=True))


@pytest.mark.parametrize("reads", [None, "name"])
@pytest.mark.parametrize("offset", [1.0, 1e-6])
def test_no_server_chooses_the_base_of_a_tied_weight(reads: Any, offset: float) -> None:
    """Undeclared ties are refused where the values differ; declared ones are one value."""
    sent = tied_state(offset)
    assert exchange(noise(reads=reads), loaded, sent=ArrayRecord(tied_state()))[0].has_content()
    found, _ = exchange(noise(reads=reads), loaded, sent=ArrayRecord(sent))
    assert found.error.reason == REFUSED
    mod = DefenseMod("noise", std=1e-4, reads=reads, tied=TIED, seen=False)
    held = held_by(exchange(mod, loaded, sent=ArrayRecord(sent))[0])
    assert torch.equal(held["first.weight"], held["last.weight"])
    # Every parameter moved alike, whatever the update was clipped to: without the offset.
    changes = [held[name] - sent[name] for name in ("first.weight", "first.bias", "last.bias")]
    assert max(float((c - changes[0].mean()).abs().max()) for c in changes) < 0.001
    assert float(changes[0].mean()) > 0.01


def loaded_in_order(received: dict[str, Tensor]) -> ArrayRecord:
    """Train as an app does that sets its weights from a list, and returns its own names."""
    return loaded(dict(zip(tied_state(), received.values(), strict=True)))


@pytest.mark.parametrize("names", [["0", "1", "2", "3"], ["a", "b", "c", "d"]])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e-6])
def test_no_server_unties_a_weight_by_the_names_that_it_sends(
    names: list[str], offset: float
) -> None:
    """A tie is looked for under the names received, and the update is taken by the order."""
    sent = ArrayRecord(dict(zip(names, tied_state(offset).values(), strict=True)))
    mod = noise(reads="order", tied=TIED, buffers=[])
    found, _ = exchange(mod, loaded_in_order, sent=sent)
    assert found.has_error() is (offset > 0)
    if offset:
        assert found.error.reason == REFUSED


@pytest.mark.parametrize("tied", [TIED, []])
def test_a_declared_tie_has_one_draw_of_noise(tied: Any) -> None:
    """Values alone give none: a server that sends two layers equal would see when they part."""
    found, _ = exchange(noise(tied=tied), loaded, sent=ArrayRecord(tied_state()))
    held = held_by(found)
    assert torch.equal(held["first.weight"], held["last.weight"]) is bool(tied)
    assert not torch.equal(held["first.bias"], held["last.bias"])


def test_arrays_that_are_told_as_tied_and_are_not_stop_the_update() -> None:
    found, _ = exchange(
        noise(tied=[["first.bias", "last.bias"]]), parted, sent=ArrayRecord(tied_state())
    )
    assert found.error.reason == REFUSED
    for tied in (["first.bias"], [["first.bias"]], [["a", "b"], ["b", "c"]]):
        with refused("config-value", "tied"):
            noise(tied=tied)


def parted(received: dict[str, Tensor]) -> ArrayRecord:
    moved = {name: value + 0.1 for name, value in received.items()}
    return ArrayRecord(moved | {"last.bias": received["last.bias"] + 0.2})


def test_equal_constant_arrays_that_were_sent_with_other_values_are_refused() -> None:
    """A tied scalar is one, too."""
    sent = {"w": START["0.weight"], "a": torch.full((12,), 0.01), "b": torch.zeros(12)}

    def reset(received: dict[str, Tensor]) -> ArrayRecord:
        return ArrayRecord(received | {"w": received["w"] + 0.01, "a": torch.zeros(12)})

    found, _ = exchange(noise(), reset, sent=ArrayRecord(sent))
    assert found.error.reason == REFUSED
    found, _ = exchange(noise(), reset, sent=ArrayRecord(sent | {"a": torch.zeros(12)}))
    assert not found.has_error()
