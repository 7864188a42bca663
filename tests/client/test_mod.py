"""DefenseMod around a ClientApp that knows nothing of bract, in this process."""

import json
import re
from collections import OrderedDict

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file
from torch import nn

from bract.client.defenses import AdaDefense, DefenseChain, ProtectContext
from bract.client.mod import DefenseMod
from bract.errors import BractError
from bract.server.loopback import LoopbackGrid


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(fc=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), out=nn.Linear(3, 2))
    )


def quickstart(mods, *, tamper=lambda arrays: arrays, fail=False):
    """An app as Flower's quickstart writes it."""
    app = ClientApp(mods=mods)
    app.calls = []

    @app.train()
    def train(msg, context):
        app.calls.append("train")
        if fail:
            raise RuntimeError("no data")
        model = network()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(1)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        content = {
            "arrays": ArrayRecord(tamper(model.state_dict())),
            "metrics": MetricRecord({"num-examples": 8, "loss": 0.1}),
        }
        return Message(RecordDict(content), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        app.calls.append("evaluate")
        metrics = MetricRecord({"num-examples": 8, "accuracy": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


def exchange(mods, *, node_config=None, run_config=None, kind="train", rounds=1, **options):
    app = quickstart(mods, **options)
    grid = LoopbackGrid(app, [node_config or {}], run_config)
    for _ in range(rounds):
        content = RecordDict(
            {
                "arrays": ArrayRecord(network().state_dict()),
                "config": ConfigRecord({"server-round": 1}),
            }
        )
        message = grid.create_message(content, kind, 1, "1")
        (reply,) = grid.send_and_receive([message])
    return reply, app, grid


def states(reply):
    returned = reply.content["arrays"].to_torch_state_dict()
    plain, _, _ = exchange([])
    return network().state_dict(), plain.content["arrays"].to_torch_state_dict(), returned


PARAMETERS = ["fc.weight", "fc.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"]


def test_the_update_is_defended_and_any_averaging_server_can_read_it():
    reply, _, _ = exchange([DefenseMod("adadefense", alpha=0.5)])
    sent, local, returned = states(reply)
    update = {name: sent[name] - local[name] for name in PARAMETERS}
    expected = AdaDefense(alpha=0.5).protect(update, {}, ProtectContext())
    assert list(returned) == list(sent)
    for name in PARAMETERS:
        torch.testing.assert_close(sent[name] - returned[name], expected[name])
        assert not torch.allclose(returned[name], local[name])


def test_integer_buffers_and_running_statistics_pass_through():
    reply, _, _ = exchange([DefenseMod("adadefense")])
    _, local, returned = states(reply)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(returned[name], local[name])
        assert returned[name].dtype == local[name].dtype
    assert int(returned["norm.num_batches_tracked"]) == 1


def test_a_list_of_defenses_is_a_chain_and_is_declared_in_the_reply():
    entries = [{"name": "guardian", "beta": 2.0}, {"name": "pruning", "ratio": 0.5}]
    reply, _, _ = exchange([DefenseMod(entries)])
    sent, _, returned = states(reply)
    changed = torch.cat([(sent[n] - returned[n]).flatten() for n in PARAMETERS])
    assert int((changed == 0).sum()) == len(changed) // 2
    declared = json.loads(reply.content["bract.defenses"]["chain"])
    assert [d["name"] for d in declared] == ["guardian", "pruning"]
    assert declared[0]["beta"] == 2.0
    # Flower's strategies take exactly one array record and one metric record a reply.
    assert len(reply.content.array_records) == len(reply.content.metric_records) == 1
    assert dict(reply.content["metrics"]) == {"num-examples": 8, "loss": 0.1}


def test_other_messages_pass_untouched():
    reply, app, grid = exchange([DefenseMod("adadefense")], kind="evaluate")
    assert app.calls == ["evaluate"]
    assert list(reply.content) == ["metrics"]
    assert not grid.contexts[1].state


def test_moments_go_on_over_messages_though_every_message_has_a_fresh_mod():
    app_of = lambda: quickstart([DefenseMod("adadefense", alpha=1.0)])  # noqa: E731
    grid = LoopbackGrid(lambda _: app_of(), [{}])
    replies = []
    for _ in range(3):
        content = RecordDict({"arrays": ArrayRecord(network().state_dict())})
        replies += grid.send_and_receive([grid.create_message(content, "train", 1, "1")])
    sent, local, _ = states(replies[0])
    update = {name: sent[name] - local[name] for name in PARAMETERS}
    chain, state = DefenseChain([AdaDefense(alpha=1.0)]), {}
    for reply in replies:
        expected = chain.protect(update, state)
        returned = reply.content["arrays"].to_torch_state_dict()
        for name in PARAMETERS:
            torch.testing.assert_close(sent[name] - returned[name], expected[name])


def test_moments_survive_a_restart_of_the_supernode_where_a_folder_is_configured(tmp_path):
    node = {"state-dir": str(tmp_path), "partition-id": 2}
    for turn in (1, 2):
        # A new grid is a new SuperNode: its context is empty.
        _, _, grid = exchange([DefenseMod("adadefense")], node_config=node)
        assert not grid.contexts[1].state
        (file,) = tmp_path.iterdir()
        assert int(load_file(file)["adadefense.round"]) == turn
        assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("run_config", "node_config", "defended"),
    [
        ({}, {}, True),
        ({"bract-defense": "off"}, {}, False),
        ({"bract-defense": False}, {}, False),
        ({"bract-defense": "on"}, {}, True),
        ({"bract-defense": "off"}, {"bract-defense": "on"}, True),
        ({"bract-defense": "on"}, {"bract-defense": "off"}, False),
    ],
)
def test_it_is_switched_per_message_and_the_node_has_the_last_word(
    run_config, node_config, defended
):
    reply, _, _ = exchange(
        [DefenseMod("adadefense")], run_config=run_config, node_config=node_config
    )
    _, local, returned = states(reply)
    assert torch.allclose(returned["fc.weight"], local["fc.weight"]) is not defended
    assert ("bract.defenses" in reply.content) is defended


def test_a_site_policy_refuses_before_the_app_trains(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("require: [{name: adadefense, maximum: {alpha: 0.01}}]")
    node = {"policy": str(policy)}
    reply, _, _ = exchange([DefenseMod("adadefense")], node_config=node)
    assert reply.has_content()
    for mods, run_config in (
        ([DefenseMod("adadefense", alpha=0.1)], {}),
        ([DefenseMod("guardian")], {}),
        ([DefenseMod("adadefense")], {"bract-defense": "off"}),
    ):
        reply, app, _ = exchange(mods, node_config=node, run_config=run_config)
        assert "this site's policy refuses the run" in reply.error.reason
        assert app.calls == []


def change(name, value):
    return lambda arrays: {**arrays, name: value}


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (change("fc.bias", torch.tensor([0.0, float("nan"), 0.0])), "holds NaN"),
        (change("fc.bias", torch.zeros(4)), r"received as torch.float32 \(3,\)"),
        (change("fc.bias", torch.zeros(3).double()), "returned as torch.float64"),
        (change("extra", torch.zeros(3)), "differing: extra"),
        (change("fc.bias", torch.zeros(3, dtype=torch.complex64)), "dtype complex64"),
        (lambda arrays: {"fc.bias": arrays["fc.bias"]}, "are not those the app received"),
    ],
)
def test_a_reply_that_cannot_be_protected_becomes_an_error(tamper, said):
    reply, _, _ = exchange([DefenseMod("adadefense")], tamper=tamper)
    assert not reply.has_content()
    assert "nothing was sent" in reply.error.reason
    assert re.search(said, reply.error.reason)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_defense_that_breaks_never_lets_the_bare_update_out(monkeypatch, error):
    def broken(self, update, state, context):
        raise error("broken on purpose")

    monkeypatch.setattr(AdaDefense, "protect", broken)
    reply, app, grid = exchange([DefenseMod("adadefense")])
    assert app.calls == ["train"]
    assert not reply.has_content()
    assert "broken on purpose" in reply.error.reason
    assert not grid.contexts[1].state


def test_a_defense_that_hands_back_nan_never_lets_anything_out(monkeypatch):
    monkeypatch.setattr(
        AdaDefense, "protect", lambda *_: {n: torch.full((1,), float("nan")) for n in PARAMETERS}
    )
    reply, _, _ = exchange([DefenseMod("adadefense")])
    assert not reply.has_content()


def test_an_app_that_fails_stays_a_failure():
    reply, _, _ = exchange([DefenseMod("adadefense")], fail=True)
    assert "no data" in reply.error.reason


def test_what_a_mod_cannot_do_is_refused_when_the_app_is_built():
    for name in ("fedkl", "precode", "soteria"):
        with pytest.raises(BractError, match=f"{name}.*run it with bract's own ClientApp"):
            DefenseMod(name)
    with pytest.raises(BractError, match="Did you mean 'alpha'"):
        DefenseMod("adadefense", alpah=1)
    with pytest.raises(BractError, match="inside the list"):
        DefenseMod([{"name": "guardian"}], beta=1)


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    reply, app, _ = exchange([DefenseMod("adadefense")], run_config={"bract-defense": "maybe"})
    assert "expected 'on' or 'off'" in reply.error.reason
    assert app.calls == []
