"""DefenseMod around a ClientApp that knows nothing of bract, in this process."""

import json
import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from refusals import check_named, refused
from safetensors.torch import load_file
from torch import nn

from bract.client import NO_MEMORY, REFUSED, DefenseMod
from bract.client.answers import RECORD
from bract.client.defenses import AdaDefense, DefenseChain, ProtectContext
from bract.errors import BractError
from bract.server.loopback import LoopbackGrid
from bract_papers.defenses.soteria import Soteria


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(fc=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), out=nn.Linear(3, 2))
    )


def quickstart(
    mods: Any,
    *,
    tamper: Any = lambda arrays: arrays,
    fail: Any = None,
    metrics: Any = None,
    scored: Any = 8,
) -> Any:
    """An app as Flower's quickstart writes it."""
    app = ClientApp(mods=mods)
    calls: list[str] = []
    vars(app)["calls"] = calls

    @app.train()
    def train(msg: Any, context: Any) -> Any:
        calls.append("train")
        if fail:
            raise fail
        model = network()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(1)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        content: dict[str, Any] = {
            "arrays": ArrayRecord(tamper(model.state_dict())),
            "metrics": MetricRecord({"num-examples": 8, "loss": 0.1, **(metrics or {})}),
        }
        return Message(RecordDict(content), reply_to=msg)

    @app.evaluate("fused")
    @app.evaluate()
    def evaluate(msg: Any, context: Any) -> Any:
        calls.append("evaluate")
        if fail:
            raise fail
        metrics = MetricRecord({"num-examples": scored, "accuracy": 1.0, "error": 1234.56})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    @app.query()
    def query(msg: Any, context: Any) -> Any:
        calls.append("query")
        if fail:
            raise fail
        return Message(RecordDict({"metrics": MetricRecord({"rows": 8})}), reply_to=msg)

    return app


def exchange(
    mods: Any,
    *,
    node_config: Any = None,
    run_config: Any = None,
    kind: Any = "train",
    numbers: Any = (1,),
    **options: Any,
) -> Any:
    app = quickstart(mods, **options)
    grid = LoopbackGrid(app, [node_config or {}], run_config, run_id=1)
    for number in numbers:
        content = RecordDict(
            {
                "arrays": ArrayRecord(network().state_dict()),
                "config": ConfigRecord({"server-round": number}),
            }
        )
        message = grid.create_message(content, kind, 1, "1")
        (reply,) = grid.send_and_receive([message])
    return reply, app, grid


def states(reply: Any) -> Any:
    returned = reply.content["arrays"].to_torch_state_dict()
    plain, _, _ = exchange([])
    return network().state_dict(), plain.content["arrays"].to_torch_state_dict(), returned


PARAMETERS = ["fc.weight", "fc.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"]


def test_the_update_is_defended_and_any_averaging_server_can_read_it() -> None:
    reply, _, _ = exchange([DefenseMod("adadefense", alpha=0.5)])
    sent, local, returned = states(reply)
    update = {name: sent[name] - local[name] for name in PARAMETERS}
    expected = AdaDefense(alpha=0.5).protect(update, {}, ProtectContext())
    assert list(returned) == list(sent)
    for name in PARAMETERS:
        torch.testing.assert_close(sent[name] - returned[name], expected[name])
        assert not torch.allclose(returned[name], local[name])


@pytest.mark.parametrize(
    ("policy", "switch", "withheld"),
    [
        (None, "on", True),
        (None, "off", False),
        ("train_metrics: always", "on", False),
        ("train_metrics: never", "off", True),
    ],
)
def test_what_an_app_measured_in_training_is_withheld_beside_a_defended_update(
    tmp_path: Path, policy: Any, switch: Any, withheld: Any
) -> None:
    node: dict[str, Any] = {"bract-defense": switch}
    if policy:
        (tmp_path / "policy.yaml").write_text(policy)
        node["policy"] = str(tmp_path / "policy.yaml")
    measured = {"steps": 3, "losses": [0.5, 0.25]}
    reply, _, _ = exchange([DefenseMod("adadefense")], node_config=node, metrics=measured)
    found = dict(reply.content["metrics"])
    assert (found["num-examples"], found["steps"]) == (8, 3)
    assert [math.isnan(v) for v in (found["loss"], *found["losses"])] == [withheld] * 3


def test_fedboostings_score_passes_the_mod_rounded_and_not_of_few_images(tmp_path: Path) -> None:
    def score(**changes: Any) -> Any:
        measured = {"trained_accuracy": 0.12345, **changes}
        reply, _, _ = exchange([DefenseMod("adadefense")], metrics=measured)
        return reply.content["metrics"]["trained_accuracy"]

    assert score(**{"num-examples": 10}) == 0.12
    assert math.isnan(score(**{"num-examples": 9}))


def test_integer_buffers_and_running_statistics_pass_through() -> None:
    reply, _, _ = exchange([DefenseMod("adadefense")])
    _, local, returned = states(reply)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(returned[name], local[name])
        assert returned[name].dtype == local[name].dtype
    assert int(returned["norm.num_batches_tracked"]) == 1


def test_a_list_of_defenses_is_a_chain_and_is_declared_in_the_reply() -> None:
    entries = [{"name": "guardian", "beta": 2.0}, {"name": "pruning", "ratio": 0.5}]
    reply, _, _ = exchange([DefenseMod(entries)])
    sent, _, returned = states(reply)
    changed = torch.cat([(sent[n] - returned[n]).flatten() for n in PARAMETERS])
    # Which values clipping keeps from moving does not count towards the share.
    guarded, _, _ = exchange([DefenseMod(entries[:1])])
    before = states(guarded)[2]
    moved = sum(int((sent[n] != before[n]).sum()) for n in PARAMETERS)
    assert int((changed != 0).sum()) == moved - moved // 2
    declared = json.loads(reply.content["bract.defenses"]["chain"])
    assert [d["name"] for d in declared] == ["guardian", "pruning"]
    assert declared[0]["beta"] == 2.0
    # Flower's strategies take exactly one array record and one metric record a reply.
    assert len(reply.content.array_records) == len(reply.content.metric_records) == 1
    assert set(reply.content["metrics"]) == {"num-examples", "loss"}


def test_other_messages_pass_untouched() -> None:
    reply, app, grid = exchange([DefenseMod("adadefense")], kind="query")
    assert app.calls == ["query"]
    assert list(reply.content) == ["metrics"]
    assert list(grid.contexts[1].state) == [RECORD]


def test_moments_go_on_over_messages_though_every_message_has_a_fresh_mod() -> None:
    def app_of(partition: int) -> Any:
        return quickstart([DefenseMod("adadefense", alpha=1.0)])

    grid = LoopbackGrid(app_of, [{}])
    replies: list[Any] = []
    for number in (1, 2, 3):
        content = RecordDict(
            {
                "arrays": ArrayRecord(network().state_dict()),
                "config": ConfigRecord({"server-round": number}),
            }
        )
        replies += grid.send_and_receive([grid.create_message(content, "train", 1, "1")])
    sent, local, _ = states(replies[0])
    update = {name: sent[name] - local[name] for name in PARAMETERS}
    state: dict[str, Any]
    chain, state = DefenseChain([AdaDefense(alpha=1.0)]), {}
    for reply in replies:
        expected = chain.protect(update, state)
        returned = reply.content["arrays"].to_torch_state_dict()
        for name in PARAMETERS:
            torch.testing.assert_close(sent[name] - returned[name], expected[name])


def test_moments_survive_a_restart_of_the_supernode_where_a_folder_is_configured(
    tmp_path: Path,
) -> None:
    node = {"state-dir": str(tmp_path), "partition-id": 2}
    for turn in (1, 2):
        # A new grid is a new SuperNode: its context is empty.
        _, _, grid = exchange([DefenseMod("adadefense")], node_config=node, numbers=(turn,))
        assert not grid.contexts[1].state
        (file,) = tmp_path.glob("*.safetensors")
        assert int(load_file(file)["adadefense.round"]) == turn
        assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("run_config", "node_config", "defended"),
    [
        ({}, {}, True),
        ({"bract-defense": "on"}, {}, True),
        ({}, {"bract-defense": "on"}, True),
        ({"bract-defense": "off"}, {"bract-defense": "on"}, True),
        ({}, {"bract-defense": "off"}, False),
        ({}, {"bract-defense": False}, False),
        ({"bract-defense": "on"}, {"bract-defense": "off"}, False),
    ],
)
def test_it_is_switched_per_message_by_the_node_alone(
    run_config: Any, node_config: Any, defended: Any
) -> None:
    reply, _, _ = exchange(
        [DefenseMod("adadefense")], run_config=run_config, node_config=node_config
    )
    _, local, returned = states(reply)
    assert torch.allclose(returned["fc.weight"], local["fc.weight"]) is not defended
    assert ("bract.defenses" in reply.content) is defended


@pytest.mark.parametrize(
    ("setting", "name"),
    [("guardian", "guardian"), ('[{"name": "noise", "std": 0.5}]', "noise"), ("on", "adadefense")],
)
def test_a_site_names_its_own_defense_in_place_of_the_apps(
    setting: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declared(**options: Any) -> list[str]:
        reply, _, _ = exchange([DefenseMod("adadefense")], **options)
        chain = json.loads(reply.content["bract.defenses"]["chain"])
        return [str(entry["name"]) for entry in chain]

    assert declared(node_config={"bract-defense": setting}) == [name]
    # Nodes of the simulation engine have no configuration; what a node has comes first.
    monkeypatch.setenv("BRACT_DEFENSE", setting)
    assert declared() == [name]
    assert declared(node_config={"bract-defense": "pruning"}) == ["pruning"]


def test_a_site_that_names_no_defense_sends_no_update() -> None:
    for setting in ("gardian", "[3]", "[not json", 7):
        node = {"bract-defense": setting}
        reply, app, _ = exchange([DefenseMod("adadefense")], node_config=node)
        assert reply.error.reason == REFUSED and app.calls == []


@pytest.mark.parametrize("setting", ["off", False])
def test_a_server_that_turns_the_defense_off_gets_no_update(setting: Any) -> None:
    reply, app, _ = exchange([DefenseMod("adadefense")], run_config={"bract-defense": setting})
    assert "only this site may turn its defense off" in reply.error.reason
    assert app.calls == []


def test_a_site_policy_refuses_before_the_app_trains(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("require: [{name: adadefense, maximum: {alpha: 0.01}}]")
    node = {"policy": str(policy)}
    reply, _, _ = exchange([DefenseMod("adadefense")], node_config=node)
    assert reply.has_content()
    run_config: dict[str, Any]
    for mods, run_config in (
        ([DefenseMod("adadefense", alpha=0.1)], {}),
        ([DefenseMod("guardian")], {}),
    ):
        reply, app, _ = exchange(mods, node_config=node, run_config=run_config)
        assert "this site's policy refuses the run" in reply.error.reason
        assert app.calls == []


def change(name: Any, value: Any) -> Any:
    return lambda arrays: {**arrays, name: value}


@pytest.mark.parametrize(
    ("tamper", "logged"),
    [
        (change("fc.bias", torch.tensor([0.0, float("nan"), 0.0])), "holds NaN"),
        (change("fc.bias", torch.zeros(4)), r"received as torch.float32 \(3,\)"),
        (change("fc.bias", torch.zeros(3).double()), "float64 and other arrays are not"),
        (change("extra", torch.zeros(3)), "extra"),
        (change("fc.bias", torch.zeros(3, dtype=torch.complex64)), "complex64"),
        (lambda arrays: {"other": arrays["fc.bias"]}, "returned other"),
    ],
)
def test_a_reply_that_cannot_be_protected_becomes_the_same_error(
    tamper: Any, logged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reply, _, _ = exchange([DefenseMod("adadefense")], tamper=tamper)
    assert not reply.has_content()
    assert reply.error.reason == REFUSED
    assert re.search(logged, caplog.text)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_defense_that_breaks_never_lets_the_bare_update_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Any
) -> None:
    def broken(self: Any, update: Any, state: Any, context: Any) -> None:
        raise error("broken on purpose")

    monkeypatch.setattr(AdaDefense, "protect", broken)
    reply, app, grid = exchange([DefenseMod("adadefense")])
    assert app.calls == ["train"]
    assert not reply.has_content()
    assert reply.error.reason == (NO_MEMORY if error is MemoryError else REFUSED)
    assert "broken on purpose" in caplog.text
    assert list(grid.contexts[1].state) == [RECORD]


def test_a_defense_that_hands_back_nan_never_lets_anything_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        AdaDefense, "protect", lambda *_: {n: torch.full((1,), float("nan")) for n in PARAMETERS}
    )
    reply, _, _ = exchange([DefenseMod("adadefense")])
    assert not reply.has_content()


def test_an_app_that_fails_stays_a_failure_and_costs_its_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply, app, grid = exchange([DefenseMod("adadefense")], fail=RuntimeError("no data"))
    assert reply.error.reason == REFUSED
    assert "no data" in caplog.text
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    (again,) = grid.send_and_receive([grid.create_message(content, "train", 1, "1")])
    assert "was answered" in again.error.reason
    assert app.calls == ["train"]


class _TextError(RuntimeError):
    def __str__(self) -> str:
        raise LookupError("patient 7")


class _CodeError(BractError):
    def __init__(self) -> None:
        """Do without a code."""

    @property
    def code(self) -> str:  # type: ignore[override]
        raise LookupError("patient 7")


class _NameError(ModuleNotFoundError):
    name = "patient 7".encode  # type: ignore[assignment]


@pytest.mark.parametrize(
    "error",
    [
        SystemExit("patient 7"),
        GeneratorExit("patient 7"),
        BaseExceptionGroup("patient 7", [SystemExit(7)]),
        _TextError(),
        _CodeError(),
        _NameError("patient 7"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_nothing_that_an_app_raises_leaves_with_its_text(error: BaseException, kind: str) -> None:
    reply, _, _ = exchange([DefenseMod("pruning", ratio=0.5)], kind=kind, fail=error)
    assert reply.error.reason == REFUSED


def test_what_a_mod_cannot_do_is_refused_when_the_app_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No app hands its labels to a mod.
    monkeypatch.setattr(Soteria, "needs", ("model", "images", "labels"))
    with refused("defense-unsuited", "soteria", "ClientApp"):
        DefenseMod("soteria")
    with refused("config-value", "alpha"):
        DefenseMod("adadefense", alpah=1)
    with refused("config-value", "inside"):
        DefenseMod([{"name": "guardian"}], beta=1)


def test_a_switch_that_is_neither_on_nor_off_is_refused() -> None:
    reply, app, _ = exchange([DefenseMod("adadefense")], run_config={"bract-defense": "maybe"})
    check_named(reply.error.reason, "on", "off")
    assert app.calls == []


def test_a_repeated_round_gets_the_same_bytes_or_nothing(tmp_path: Path) -> None:
    mods = [DefenseMod("noise", std=0.1)]
    reply, app, _ = exchange(mods)
    assert reply.has_content()
    grid = LoopbackGrid(app, [{}])

    def ask(lr: Any) -> Any:
        content = RecordDict(
            {
                "arrays": ArrayRecord(network().state_dict()),
                "config": ConfigRecord({"server-round": 1, "lr": lr}),
            }
        )
        (answer,) = grid.send_and_receive([grid.create_message(content, "train", 1, "1")])
        return answer

    assert ask(0.1).has_content()
    assert "was answered; a second answer would let" in ask(0.2).error.reason
    node = {"state-dir": str(tmp_path)}
    first, _, _ = exchange(mods, node_config=node)
    again, app, _ = exchange(mods, node_config=node)
    assert app.calls == []
    for name, array in first.content["arrays"].items():
        assert array.data == again.content["arrays"][name].data
    assert math.isnan(again.content["metrics"]["loss"])


def test_rounds_beyond_those_that_the_run_declares_are_refused() -> None:
    mods = [DefenseMod("noise", std=0.1)]
    reply, app, _ = exchange(mods, run_config={"num-server-rounds": 3}, numbers=(4,))
    check_named(reply.error.reason, 1, 3)
    assert app.calls == []


@pytest.mark.parametrize(("declared", "answered"), [({}, 20), ({"num-server-rounds": 58}, 58)])
def test_rounds_that_no_run_config_declares_are_answered_up_to_a_cap(
    declared: Any, answered: Any
) -> None:
    reply, app, _ = exchange(
        [DefenseMod("noise", std=0.1)], run_config=declared, numbers=range(1, 60)
    )
    assert app.calls == ["train"] * answered
    assert ("declare num-server-rounds" in reply.error.reason) is (not declared)


def test_without_a_policy_an_evaluation_of_few_images_or_of_a_round_again_is_refused() -> None:
    mods = [DefenseMod("adadefense")]
    reply, _, _ = exchange(mods, kind="evaluate", scored=1)
    assert reply.error.reason == REFUSED
    reply, app, _ = exchange(mods, kind="evaluate", scored=10, numbers=(1, 1))
    assert "was answered" in reply.error.reason
    assert app.calls == ["evaluate"]
    reply, _, _ = exchange(mods, kind="evaluate", scored=10.0)
    assert dict(reply.content["metrics"]) == {
        "num-examples": 10.0,
        "accuracy": 1.0,
        "error": 1230.0,
    }


def test_a_message_that_asks_for_many_scores_does_not_reach_the_app() -> None:
    app = quickstart([DefenseMod("adadefense")], scored=12)
    content = RecordDict({"config": ConfigRecord({"server-round": 1, "models": 400})})
    grid = LoopbackGrid(app, [{}])
    (reply,) = grid.send_and_receive([grid.create_message(content, "evaluate.fused", 1, "1")])
    assert "allows max_fused_models: 64" in str(reply.error)
    assert app.calls == []


def test_a_message_that_names_no_round_is_refused_unless_the_site_counts_messages(
    tmp_path: Path,
) -> None:
    (tmp_path / "policy.yaml").write_text("max_rounds_per_run: 2")
    node = {"policy": str(tmp_path / "policy.yaml")}

    def ask(grid: Any) -> Any:
        content = RecordDict({"arrays": ArrayRecord(network().state_dict())})
        (reply,) = grid.send_and_receive([grid.create_message(content, "train", 1, "")])
        return reply

    app = quickstart([DefenseMod("adadefense")])
    check_named(ask(LoopbackGrid(app, [{}])).error.reason, "server-round")
    grid = LoopbackGrid(app, [node])
    assert [ask(grid).has_content() for _ in range(3)] == [True, True, False]


def of_train_actions(policy: str, folder: Path, *actions: str, **run_config: Any) -> Any:
    """Return what asks an app of several actions of training for an update."""
    (folder / "policy.yaml").write_text(policy)
    app = ClientApp(mods=[DefenseMod("noise", std=0.1, seen=False)])

    def work(message: Any, context: Any) -> Any:
        arrays = message.content["arrays"]
        moved = {n: torch.from_numpy(a.numpy().copy()) + 0.1 for n, a in arrays.items()}
        content: dict[str, Any] = {"arrays": ArrayRecord(moved)}
        content["metrics"] = MetricRecord({"num-examples": 8})
        return Message(RecordDict(content), reply_to=message)

    for action in actions:
        app.train(action)(work)
    node = {"policy": str(folder / "policy.yaml"), "state-dir": str(folder / "state")}
    grid = LoopbackGrid(app, [node], run_config)

    def ask(kind: str, **config: Any) -> Any:
        arrays = ArrayRecord({"w": torch.rand(200)})
        content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
        (reply,) = grid.send_and_receive([grid.create_message(content, kind, 1, "")])
        return reply

    return ask


@pytest.mark.parametrize("policy", ["{}", "max_rounds_per_run: 100", "max_rounds_total: 100"])
@pytest.mark.parametrize("number", ["1", 1.0, True])
def test_a_round_that_is_no_whole_number_is_refused(
    number: Any, policy: str, tmp_path: Path
) -> None:
    ask = of_train_actions(policy, tmp_path, "default")
    check_named(ask("train", **{"server-round": number}).error.reason, "server-round", number)


def test_messages_that_name_no_round_are_no_more_than_the_run_declares(tmp_path: Path) -> None:
    ask = of_train_actions(
        "max_rounds_per_run: 100", tmp_path, "default", **{"num-server-rounds": 2}
    )
    assert [ask("train", i=i).has_content() for i in range(3)] == [True, True, False]
    assert not ask("train", **{"server-round": 2}).has_content()


@pytest.mark.parametrize("limit", ["max_rounds_total", "max_rounds_per_run"])
def test_all_actions_of_training_count_together(limit: str, tmp_path: Path) -> None:
    ask = of_train_actions(f"{limit}: 2", tmp_path, "default", "warmup", "final")
    kinds = ("train", "train.warmup", "train.final", "train.default")
    asked = [ask(kind, **{"server-round": 1}).has_content() for kind in kinds]
    assert asked == [True, True, False, False]


def test_under_a_policy_evaluations_are_held_to_it_as_well(tmp_path: Path) -> None:
    def evaluate(policy: Any, numbers: Any = (1,)) -> Any:
        (tmp_path / "policy.yaml").write_text(policy)
        node = {"policy": str(tmp_path / "policy.yaml")}
        mods = [DefenseMod("adadefense")]
        return exchange(mods, node_config=node, kind="evaluate", numbers=numbers)[0]

    assert evaluate("").error.reason == REFUSED
    rounded = evaluate("{min_validation_images: 8, metric_decimals: 0}").content["metrics"]
    assert dict(rounded) == {"num-examples": 8, "accuracy": 1.0, "error": 10.0}
    few = "{min_validation_images: 8, max_rounds_per_run: 2}"
    assert evaluate(few, (1, 2)).has_content()
    assert "max_rounds_per_run: 2" in evaluate(few, (1, 2, 3)).error.reason


def test_a_policy_that_a_mod_cannot_hold_an_app_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("{models: [lenet], data: {names: [digits]}}")
    node = {"policy": str(tmp_path / "policy.yaml")}
    reply, app, _ = exchange([DefenseMod("adadefense")], node_config=node)
    assert "policy sets models, data, which a mod cannot hold" in reply.error.reason
    assert app.calls == []


def test_a_bounded_epsilon_refuses_statistics_that_no_noise_covers(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("max_epsilon: 8")
    node = {"policy": str(tmp_path / "policy.yaml"), "state-dir": str(tmp_path / "state")}
    reply, _, _ = exchange([DefenseMod("noise", epsilon=1.0)], node_config=node)
    check_named(reply.error.reason, "norm.running_mean")
