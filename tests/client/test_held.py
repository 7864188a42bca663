"""DefenseMod takes an update from what the app's parameters held, or sends nothing."""

import copy
from collections.abc import Callable, Iterable
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
from bract.defenses import DEFENSES, ProtectContext

State = dict[str, Tensor]
Reply = Callable[[State], State]


def exchange(mod: DefenseMod, reply: Reply, sent: State) -> Message:
    """Return the answer of an app whose ``reply(received)`` is the state that it returns."""
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Any, context: Any) -> Any:
        found = reply(message.content["arrays"].to_torch_state_dict())
        content = RecordDict({"arrays": ArrayRecord(found)})
        content["metrics"] = MetricRecord({"num-examples": 4})
        return Message(content, reply_to=message)

    grid = clients_of(app)
    config = ConfigRecord({"server-round": 1})
    content = RecordDict({"arrays": ArrayRecord(sent), "config": config})
    (found,) = grid.send_and_receive([grid.create_message(content, "train", 1, "1")])
    return found


def held_by(reply: Message) -> State:
    assert reply.has_content(), reply.error
    return {
        n: v.clone() for n, v in reply.content.array_records["arrays"].to_torch_state_dict().items()
    }


def check_refused(reply: Message) -> None:
    assert reply.has_error() and reply.error.reason == REFUSED


def clipped(**options: Any) -> DefenseMod:
    """A defense that changes nothing of a small update, so that its base shows."""
    return DefenseMod("noise", std=1e-12, clip=1e6, **options)


def fit(
    model: nn.Module, parameters: Iterable[Tensor] | None = None, *, lr: float = 0.1, **options: Any
) -> None:
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=lr, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 96).reshape(8, 12)).square().mean().backward()
        optimizer.step()


class Pair(nn.Module):
    """Two layers, the second of which may be another view of the first one's weight."""

    def __init__(self, share: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.enc, self.dec = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.head = nn.Linear(12, 3)
        if share is not None:
            self.dec.weight = nn.Parameter(share(self.enc.weight.data))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.dec(self.enc(x)).relu())
        return y


class Tied(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.dec.weight = self.enc.weight


def state_of(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def plain(make: Callable[[], nn.Module], strict: bool = True) -> Reply:
    def reply(received: State) -> State:
        model = make()
        model.load_state_dict(received, strict=strict)
        fit(model)
        return model.state_dict()

    return reply


def moved(sent: State, name: str, by: float = 1.0) -> State:
    return sent | {name: sent[name] + by}


SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda weight: weight.t(),
    "a part": lambda weight: weight[:6],
    "the same memory": lambda weight: weight,
}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["enc.weight", "dec.weight"])
@pytest.mark.parametrize("declared", [{}, {"reads": "name"}])
def test_no_server_chooses_the_base_of_a_view(share: str, name: str, declared: Any) -> None:
    """The class of attack: one tensor is received twice, and the app keeps one of the values."""

    def make() -> nn.Module:
        return Pair(SHARES[share])

    check_refused(exchange(clipped(**declared), plain(make), moved(state_of(make()), name)))


@pytest.mark.parametrize("share", ["turned", "a part"])
def test_arrays_that_are_parts_of_one_another_are_refused(share: str) -> None:
    def make() -> nn.Module:
        return Pair(SHARES[share])

    check_refused(exchange(clipped(), plain(make), state_of(make())))


def deltas(make: Callable[[], nn.Module], scale: float = 1.0) -> Reply:
    def reply(received: State) -> State:
        after = plain(make)(received)
        return {name: scale * (value - received[name]) for name, value in after.items()}

    return reply


@pytest.mark.parametrize("name", ["enc.weight", "dec.weight"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_no_server_chooses_the_base_of_a_tied_delta(name: str, scale: float) -> None:
    mod = clipped(update="delta")
    check_refused(exchange(mod, deltas(Tied, scale), moved(state_of(Tied()), name)))


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.5])
def test_a_delta_is_protected_as_it_is(scale: float) -> None:
    sent = state_of(Pair())
    found = held_by(exchange(clipped(update="delta"), deltas(Pair, scale), sent))
    for name, value in deltas(Pair, scale)(sent).items():
        torch.testing.assert_close(found[name], value)


def test_no_server_sends_a_tied_weight_in_two_types() -> None:
    """Of an app that returns each array in the type that it received."""

    def reply(received: State) -> State:
        after = plain(Tied)(received)
        return {name: value.to(received[name].dtype) for name, value in after.items()}

    sent = moved(state_of(Tied()), "enc.weight")
    check_refused(exchange(clipped(), reply, sent | {"dec.weight": sent["dec.weight"].half()}))


def test_a_head_that_is_named_as_kept_and_loaded_all_the_same_is_no_base() -> None:
    def reply(received: State) -> State:
        return {n: v for n, v in plain(Tied)(received).items() if n != "dec.weight"}

    mod = clipped(reads="name", keeps=["dec"])
    check_refused(exchange(mod, reply, moved(state_of(Tied()), "enc.weight")))
    found = held_by(exchange(mod, reply, state_of(Tied())))
    torch.testing.assert_close(found["enc.weight"], reply(state_of(Tied()))["enc.weight"])


def test_a_head_that_was_not_loaded_does_not_come_back() -> None:
    def reply(received: State) -> State:
        return plain(Pair, strict=False)({n: v for n, v in received.items() if "head" not in n})

    check_refused(exchange(clipped(), reply, moved(state_of(Pair()), "head.weight")))


def test_an_app_may_read_by_name_or_by_order_and_loads_what_its_update_is_taken_from() -> None:
    """Names and order that do not agree need no declaration where the parameters show it."""
    sent = state_of(Pair())
    names = list(sent)

    def in_order(received: State) -> State:
        return plain(Pair)(dict(zip(names, received.values(), strict=True)))

    expected = plain(Pair)(sent)
    for other in (["0", "1", "2", "3"], ["a", "b", "c", "d"]):
        found = held_by(exchange(clipped(), in_order, dict(zip(other, sent.values(), strict=True))))
        torch.testing.assert_close(found, expected)
    turned = {name: sent[name] for name in reversed(names)}
    torch.testing.assert_close(held_by(exchange(clipped(), plain(Pair), turned)), expected)
    # Two layers of one shape: by its names the first is received second.
    check_refused(
        exchange(clipped(), in_order, {n: sent[n] for n in (names[1], names[0], *names[2:])})
    )


def test_ties_are_seen_and_have_one_draw() -> None:
    """Equal values alone give none: a server that sends two layers equal would see them part."""
    mod = DefenseMod("noise", std=0.5)
    found = held_by(exchange(mod, plain(Tied), state_of(Tied())))
    assert torch.equal(found["enc.weight"], found["dec.weight"])
    equal = state_of(Pair())
    equal["dec.weight"] = equal["enc.weight"].clone()
    found = held_by(exchange(mod, plain(Pair), equal))
    assert not torch.equal(found["enc.weight"], found["dec.weight"])


def with_more(make: Callable[[], nn.Module]) -> Reply:
    """An app that merges what it trained into what it received."""

    def reply(received: State) -> State:
        return received | plain(make, strict=False)(received)

    return reply


def kept_coordinates(reply: Message, sent: State, names: Iterable[str]) -> int:
    found = held_by(reply)
    return sum(int((found[name] != sent[name]).sum()) for name in names)


def test_no_server_fills_up_the_share_that_pruning_removes() -> None:
    sent = state_of(Pair())
    mod = DefenseMod("pruning", ratio=0.9)
    few = kept_coordinates(exchange(mod, with_more(Pair), sent), sent, sent)
    padded = sent | {"more": torch.ones(10_000)}
    reply = exchange(mod, with_more(Pair), padded)
    assert kept_coordinates(reply, sent, sent) == few
    assert torch.equal(held_by(reply)["more"], padded["more"])


def test_layers_that_nothing_trains_take_no_part_in_a_share() -> None:
    def reply(received: State) -> State:
        model = Pair()
        model.load_state_dict(received)
        model.enc.requires_grad_(False)
        fit(model)
        return model.state_dict()

    sent = state_of(Pair())
    found = exchange(DefenseMod("pruning", ratio=0.5), reply, sent)
    trained = [name for name in sent if name != "enc.weight"]
    count = sum(sent[name].numel() for name in trained)
    assert kept_coordinates(found, sent, trained) == count - count // 2
    assert torch.equal(held_by(found)["enc.weight"], sent["enc.weight"])


def test_a_parameter_that_is_told_as_a_buffer_does_not_leave() -> None:
    sent = state_of(Pair())
    check_refused(exchange(clipped(reads="name", buffers=["enc.weight"]), plain(Pair), sent))


def best_epoch(received: State) -> State:
    model = Pair()
    model.load_state_dict(received)
    fit(model)
    best = copy.deepcopy(model.state_dict())
    fit(model)
    return best


def averaged(received: State) -> State:
    model = Pair()
    model.load_state_dict(received)
    average = torch.optim.swa_utils.AveragedModel(model)
    fit(model)
    average.update_parameters(model)
    return {n.removeprefix("module."): v for n, v in average.state_dict().items() if "module" in n}


def two_optimizers(received: State) -> State:
    model = Pair()
    model.load_state_dict(received)
    fit(model, model.enc.parameters())
    fit(model, model.head.parameters(), momentum=0.9)
    return model.state_dict()


def unfrozen(received: State) -> State:
    model = Pair()
    model.load_state_dict(received)
    model.dec.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 12)).square().mean().backward()
        optimizer.step()
        model.dec.requires_grad_(True)
    return model.state_dict()


def by_closure(received: State) -> State:
    model = Pair()
    model.load_state_dict(received)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 12)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model.state_dict()


def in_bfloat16(received: State) -> State:
    model = Pair()
    model.load_state_dict(received)
    model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(2, 12, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    return {name: value.float() for name, value in model.state_dict().items()}


def gone(received: State) -> State:
    return {name: value.clone() for name, value in plain(Pair)(received).items()}


HONEST = [best_epoch, averaged, two_optimizers, unfrozen, by_closure, in_bfloat16, gone]


@pytest.mark.parametrize("reply", HONEST, ids=lambda reply: reply.__name__)
def test_what_apps_do_between_loading_and_returning(reply: Reply) -> None:
    sent = state_of(Pair())
    found = held_by(exchange(clipped(), reply, sent))
    torch.testing.assert_close(found, reply(state_of(Pair())))


def test_half_precision_that_the_app_widens_is_read_as_the_app_reads_it() -> None:
    sent = {name: value.half() for name, value in state_of(Pair()).items()}
    found = held_by(exchange(clipped(), plain(Pair), sent))
    expected = plain(Pair)({name: value.float() for name, value in sent.items()})
    torch.testing.assert_close(found, expected)


def test_the_rounding_of_a_narrower_model_is_no_part_of_the_update() -> None:
    """A server that sends what bfloat16 cannot hold would add what is cut off to the update."""
    sent = state_of(Pair())
    found = held_by(exchange(DefenseMod("pruning", ratio=0.5), in_bfloat16, sent))
    rounded = {name: value.bfloat16().float() for name, value in sent.items()}
    as_held = sum(int((found[name] == value).sum()) for name, value in rounded.items())
    assert as_held >= sum(value.numel() for value in sent.values()) // 2


def by_hand(received: State) -> State:
    return {name: value + 0.25 for name, value in received.items()}


def test_an_app_without_optimizers_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sent = state_of(Pair())
    check_refused(exchange(clipped(), by_hand, sent))
    check_named(caplog.text, "seen=False", "optimizer")
    found = held_by(exchange(clipped(seen=False), by_hand, sent))
    torch.testing.assert_close(found, by_hand(sent))
    with refused("config-value", "seen", "'no'"):
        clipped(seen="no")


def test_the_hook_is_gone_when_the_app_has_answered() -> None:
    from torch.optim import optimizer as module

    before = len(module._global_optimizer_pre_hooks)
    exchange(clipped(), plain(Pair), state_of(Pair()))
    exchange(clipped(), lambda received: {"enc": received["none"]}, state_of(Pair()))
    assert len(module._global_optimizer_pre_hooks) == before


def test_arrays_of_numpy_are_compared_as_those_of_torch() -> None:
    """As apps set their weights from a list, with zip over the state."""

    def from_list(received: State) -> State:
        model = Pair()
        arrays = [value.numpy().copy() for value in received.values()]
        names = model.state_dict()
        model.load_state_dict(
            {n: torch.tensor(a) for n, a in zip(names, arrays, strict=True)}, strict=True
        )
        fit(model)
        return {str(k): v for k, v in enumerate(model.state_dict().values())}

    sent = {str(k): v for k, v in enumerate(state_of(Pair()).values())}
    found = held_by(exchange(clipped(buffers=[]), from_list, sent))
    torch.testing.assert_close(found, from_list(sent))


class Blocks(nn.Module):
    """Layers of one shape, of which some may be frozen, and a tie of the first two."""

    def __init__(self, frozen: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(4))
        if tied:
            self.layers[1].weight = self.layers[0].weight
        self.layers[2:].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def best_of(make: Callable[[], nn.Module]) -> Reply:
    """An app that returns the best epoch, which no parameter has at the end."""

    def reply(received: State) -> State:
        model = make()
        model.load_state_dict(received)
        fit(model)
        best = copy.deepcopy(model.state_dict())
        fit(model)
        return best

    return reply


def halved(make: Callable[[], nn.Module]) -> Reply:
    return deltas(make, 0.5)


def names_of(count: int) -> list[str]:
    return [f"layers.{place}.weight" for place in range(count)]


def test_frozen_blocks_that_are_sent_equal_to_a_trained_one_fill_up_no_share() -> None:
    def make() -> nn.Module:
        return Blocks(frozen=True)

    sent = state_of(make())
    mod = DefenseMod("pruning", ratio=0.75)
    few = kept_coordinates(exchange(mod, best_of(make), sent), sent, names_of(2))
    equal = sent | {name: sent[names_of(1)[0]].clone() for name in names_of(4)[2:]}
    assert kept_coordinates(exchange(mod, best_of(make), equal), equal, names_of(2)) == few == 72


@pytest.mark.parametrize(("app", "kind"), [(best_of, None), (halved, "delta")])
def test_of_arrays_that_are_sent_equal_no_more_come_back_than_there_are_parameters(
    app: Any, kind: Any
) -> None:
    """The second name of a tied weight would be taken for the third layer's."""

    def make() -> nn.Module:
        return Blocks(tied=True)

    first, second, third, _ = names_of(4)
    sent = state_of(make())
    other = sent | {first: sent[third].clone()}
    check_refused(exchange(clipped(update=kind), app(make), other))
    # A tie with a third array of equal values has one draw of noise all the same.
    equal = sent | {name: sent[first].clone() for name in (second, third)}
    found = held_by(exchange(DefenseMod("noise", std=0.5, update=kind), app(make), equal))
    assert torch.equal(found[first], found[second])
    assert not torch.equal(found[first], found[third])


class Own(Blocks):
    """Keeps its last layer, whatever it is handed."""

    def __init__(self, own: Tensor) -> None:
        super().__init__()
        self._own = own

    def load_state_dict(self, *arguments: Any, **settings: Any) -> Any:
        found = super().load_state_dict(*arguments, **settings)
        self.get_parameter("layers.3.weight").data.copy_(self._own)
        return found


@pytest.mark.parametrize(("app", "kind"), [(best_of, None), (halved, "delta")])
def test_a_layer_of_the_clients_own_leaves_with_no_equal_array(app: Any, kind: Any) -> None:
    own = Blocks().get_parameter("layers.3.weight").detach() + 1.0

    def make() -> nn.Module:
        return Own(own)

    sent = state_of(Blocks())
    equal = sent | {name: torch.zeros(12, 12) for name in names_of(4)[1:]}
    check_refused(exchange(clipped(update=kind), app(make), equal))


class Averaging(nn.Module):
    """Keeps an average of its weight as a buffer, as teachers and targets are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(12, 12)
        self.register_buffer("ema", torch.zeros(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("far", [1e-3, 3.0])
def test_a_buffer_that_follows_a_parameter_does_not_leave_as_it_is(far: float) -> None:
    """Wherever the server sent the buffer from which the average goes on."""

    def reply(received: State) -> State:
        model = Averaging()
        model.load_state_dict(received)
        for _ in range(3):
            fit(model)
            with torch.no_grad():
                model.get_buffer("ema").lerp_(model.layer.weight, 0.1)
        return model.state_dict()

    sent = state_of(Averaging())
    drawn = np.random.default_rng(0).normal(size=(12, 12)).astype(np.float32)
    sent["ema"] = sent["layer.weight"].clone() + far * torch.from_numpy(drawn)
    for declared in ({"buffers": ["ema"]}, {"buffers": ["ema"], "reads": "name"}):
        check_refused(exchange(clipped(**declared), reply, sent))


def test_units_that_a_model_switches_off_take_no_part_in_a_share() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.one, self.two = nn.Linear(12, 40), nn.Linear(40, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.two(self.one(x).relu())
            return y

    sent = state_of(Switched())
    sent["one.bias"][4:] = -100.0
    found = held_by(exchange(DefenseMod("pruning", ratio=0.5), plain(Switched), sent))
    moved = {n: int((v != sent[n]).sum()) for n, v in plain(Switched)(sent).items()}
    kept = sum(int((found[n] != sent[n]).sum()) for n in sent)
    assert sum(moved.values()) < 0.2 * sum(value.numel() for value in sent.values())
    assert kept == sum(moved.values()) - sum(moved.values()) // 2


def test_heads_that_no_loss_reaches_take_no_part_in_a_share() -> None:
    class Heads(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(12, 500)

    sent = state_of(Heads())
    mod = DefenseMod("pruning", ratio=0.5)
    trained = list(state_of(Pair()))
    kept = kept_coordinates(exchange(mod, plain(Heads), sent), sent, trained)
    count = sum(sent[name].numel() for name in trained)
    assert kept == count - count // 2


@pytest.mark.parametrize("names", [["w0", "b0", "w1", "b1"], ["0", "1", "2", "3"]])
def test_a_bias_is_truncated_with_its_matrix_whatever_it_is_called(names: list[str]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.two(self.one(x).tanh())
            return y

    def in_order(received: State) -> State:
        after = plain(Two)(dict(zip(state_of(Two()), received.values(), strict=True)))
        return dict(zip(received, after.values(), strict=True))

    mod = DefenseMod("truncated-svd", energy=0.5, buffers=[])
    own = held_by(exchange(mod, plain(Two), state_of(Two())))
    sent = dict(zip(names, state_of(Two()).values(), strict=True))
    found = held_by(exchange(mod, in_order, sent))
    for one, other in zip(own.values(), found.values(), strict=True):
        torch.testing.assert_close(one, other)


class Normed(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.dec(self.enc(x))))
        return y


TEMPLATE = Normed()


def test_the_statistics_of_a_copied_model_are_known() -> None:
    """A copy is not made layer by layer, and is gone when the app has answered."""

    def reply(received: State) -> State:
        model = copy.deepcopy(TEMPLATE)
        model.load_state_dict(received)
        fit(model)
        return {name: value.clone() for name, value in model.state_dict().items()}

    sent = state_of(TEMPLATE)
    found = held_by(exchange(DefenseMod("noise", std=0.5), reply, sent))
    expected = reply(sent)
    bare = [name for name in sent if torch.equal(found[name], expected[name])]
    assert bare == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_a_model_that_is_rounded_after_training_is_taken_from_what_it_held() -> None:
    def reply(received: State) -> State:
        model = Pair()
        model.load_state_dict(received)
        fit(model)
        taken = {name: value.clone() for name, value in model.state_dict().items()}
        model.half()
        return taken

    sent = state_of(Pair())
    found = held_by(exchange(DefenseMod("pruning", ratio=0.5), reply, sent))
    kept = sum(int((found[name] == sent[name]).sum()) for name in sent)
    assert kept >= sum(value.numel() for value in sent.values()) // 2


def test_a_whole_number_in_a_list_of_one_is_a_count() -> None:
    """As the place in a queue is."""

    def reply(received: State) -> State:
        after = plain(Pair, strict=False)({n: v for n, v in received.items() if n != "place"})
        return after | {"place": received["place"] + 8}

    sent = state_of(Pair()) | {"place": torch.zeros(1, dtype=torch.int64)}
    assert int(held_by(exchange(clipped(), reply, sent))["place"]) == 8


def test_what_parameters_show_is_not_asked_of_the_values() -> None:
    """Whether a reply resembles what was sent is a bit of the bare update; sent values set it."""

    def far(received: State) -> State:
        model = Pair()
        model.load_state_dict(received)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for value in model.parameters():
            value.grad = 3.0 * value.detach()
        optimizer.step()
        return model.state_dict()

    sent = state_of(Pair())
    torch.testing.assert_close(held_by(exchange(clipped(), far, sent)), far(sent))


@pytest.mark.parametrize(
    "more",
    [{"model": b"1234"}, {"model": "x" * 2000}, {"counts": list(range(300))}],
    ids=["bytes", "a long text", "many whole numbers"],
)
@pytest.mark.parametrize("arrays", [True, False])
def test_an_update_leaves_in_no_other_record(more: Any, arrays: bool) -> None:
    app = ClientApp(mods=[clipped()])

    @app.train()
    def train(message: Any, context: Any) -> Any:
        after = plain(Pair)(message.content["arrays"].to_torch_state_dict())
        content: Any = {"metrics": MetricRecord({"num-examples": 4}), "c": ConfigRecord(more)}
        return Message(
            RecordDict(content | ({"arrays": ArrayRecord(after)} if arrays else {})),
            reply_to=message,
        )

    grid = clients_of(app)
    content = RecordDict(
        {"arrays": ArrayRecord(state_of(Pair())), "config": ConfigRecord({"server-round": 1})}
    )
    (found,) = grid.send_and_receive([grid.create_message(content, "train", 1, "1")])
    check_refused(found)


def personal_first(make: Callable[[], nn.Module]) -> Reply:
    """Train a copy of the received model, which stays here, and then return the best epoch."""

    def reply(received: State) -> State:
        own = make()
        own.load_state_dict(received)
        fit(own, lr=0.05)
        return best_of(make)(received)

    return reply


def test_a_second_copy_of_the_model_lends_no_place_to_a_tied_name() -> None:
    def make() -> nn.Module:
        return Blocks(tied=True)

    first, second, third, _ = names_of(4)
    sent = state_of(make())
    check_refused(exchange(clipped(), personal_first(make), sent | {first: sent[third].clone()}))
    found = held_by(exchange(DefenseMod("noise", std=0.5), personal_first(make), sent))
    assert torch.equal(found[first], found[second])


def test_a_trial_in_bfloat16_rounds_no_base_of_what_comes_back_in_float32() -> None:
    def reply(received: State) -> State:
        in_bfloat16(received)
        return best_of(Pair)(received)

    sent = state_of(Pair())
    rounded = {name: value.bfloat16().float() for name, value in sent.items()}
    found = held_by(exchange(DefenseMod("pruning", ratio=0.5), reply, rounded))
    assert not any(torch.equal(found[name], sent[name]) for name in sent)
    found = held_by(exchange(DefenseMod("pruning", ratio=0.95), reply, sent))
    kept = sum(int((found[name] == sent[name]).sum()) for name in sent)
    assert kept > 0.9 * sum(value.numel() for value in sent.values())


def test_the_deltas_of_running_statistics_pass() -> None:
    sent = state_of(TEMPLATE)

    def app(received: State) -> State:
        return {name: value - received[name] for name, value in plain(Normed)(received).items()}

    found = held_by(exchange(DefenseMod("noise", std=0.5, update="delta"), app, sent))
    expected = app(sent)
    bare = [name for name in sent if torch.equal(found[name], expected[name])]
    assert bare == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


@pytest.mark.parametrize("layer", [nn.LSTM(4, 6), nn.GRU(4, 6)], ids=["lstm", "gru"])
def test_every_bias_of_a_recurrent_layer_is_truncated(layer: nn.Module) -> None:
    values = np.random.default_rng(1)
    update = {
        name: torch.from_numpy(values.normal(size=value.shape).astype(np.float32))
        for name, value in layer.named_parameters()
    }
    defense: Any = DEFENSES["truncated-svd"]
    found = defense(energy=0.5).protect(update, {}, ProtectContext())
    assert not any(torch.allclose(found[name], update[name], atol=1e-3) for name in update)


class Wide(nn.Module):
    """Statistics of so many channels that they could follow a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.one, self.norm, self.two = nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.norm(self.one(x)).relu())
        return y


def test_the_statistics_of_wide_layers_follow_no_weight() -> None:
    """Of a fresh model they begin as the weight and the bias of their layer do."""
    sent = state_of(Wide())
    for _ in range(3):
        found = held_by(exchange(DefenseMod("noise", std=0.5), plain(Wide), sent))
        expected = plain(Wide)(sent)
        bare = [name for name in sent if torch.equal(found[name], expected[name])]
        assert bare == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
        sent = {name: value.clone() for name, value in expected.items()}


def test_a_delta_is_no_other_parameters() -> None:
    """A second copy of the model lends no place to the second name of a tied weight."""

    def reply(received: State) -> State:
        own = Blocks(tied=True)
        own.load_state_dict(received)
        fit(own, lr=0.05)
        return deltas(lambda: Blocks(tied=True))(received)

    first, _, third, _ = names_of(4)
    sent = state_of(Blocks(tied=True))
    check_refused(exchange(clipped(update="delta"), reply, sent | {first: sent[third].clone()}))


@pytest.mark.parametrize("kind", ["evaluate", "query"])
def test_a_model_leaves_in_no_other_answer(kind: str) -> None:
    app = ClientApp(mods=[clipped()])

    @app.query()
    @app.evaluate()
    def answer(message: Any, context: Any) -> Any:
        metrics = MetricRecord({"num-examples": 40, "loss": 0.5})
        config = ConfigRecord({"model": b"1234"})
        return Message(RecordDict({"metrics": metrics, "c": config}), reply_to=message)

    grid = clients_of(app)
    content = RecordDict(
        {"arrays": ArrayRecord(state_of(Pair())), "config": ConfigRecord({"server-round": 1})}
    )
    (found,) = grid.send_and_receive([grid.create_message(content, kind, 1, "1")])
    check_refused(found)
