"""Defenses that change the model, by one line in somebody's own app."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.attacks.problem.target_model import target_model_of
from bract.attacks.task import AttackTask, open_cases
from bract.client import DefenseMod
from bract.defenses import keylock
from bract.defenses.own_model import defended
from bract.models.keylock import Lock, key_locks
from bract.models.own_loss import auxiliary_loss, own_losses
from bract.schema import ClientDeclaration
from bract.server import HonestButCurious
from bract.server.loopback import LoopbackGrid


class Net(nn.Module):
    """A model that bract did not build."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.second = nn.BatchNorm2d(3)
        self.head = nn.Linear(3 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        # Not a ReLU after the lock: where the key draws every shift low, it would pass no gradient.
        features = torch.relu(self.second(torch.tanh(self.norm(self.first(x)))))
        logits: Tensor = self.head(features.flatten(1))
        return logits


TRAINED: list[nn.Module] = []


def client_app(prepare: Any, *mods: Any) -> ClientApp:
    app = ClientApp(mods=list(mods))

    def received(message: Message) -> nn.Module:
        net: nn.Module = prepare(Net())
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        TRAINED.append(net)
        return net

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = received(message)
        generator = torch.Generator().manual_seed(context.node_id)
        images, labels = torch.rand(4, 1, 8, 8, generator=generator), torch.arange(4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net.train()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        content: Any = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": 4}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        received(message)
        metrics = MetricRecord({"num-examples": 4})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def run(
    prepare: Any,
    *mods: Any,
    store: Path,
    rounds: int = 2,
    server: Any = None,
    nodes: Any = ({}, {}),
    **declared: Any,
) -> list[Observation]:
    TRAINED.clear()
    own = ObservationStore(store)
    strategy = HonestButCurious(FedAvg(), own, declaration=ClientDeclaration(**declared))
    grid = LoopbackGrid(client_app(prepare, *mods), list(nodes))
    arrays = ArrayRecord((server or prepare)(Net()).state_dict())
    strategy.start(grid, arrays, num_rounds=rounds)
    return list(ObservationStore(store))


def test_a_strangers_model_is_locked_in_one_line_and_the_key_stays(tmp_path: Path) -> None:
    captures = tmp_path / "captures"
    nodes = [{"state-dir": str(tmp_path / name), "name": name} for name in ("a", "b")]
    found = run(keylock, DefenseMod("fedkl"), store=captures, nodes=nodes)
    assert len(found) == 4
    for observation in found:
        assert "norm.weight" not in observation.parameters
        assert {"second.weight", "head.bias"} <= set(observation.update)
        # Nobody declared a model, so the client's word on its defense stands.
        assert [d["name"] for d in observation.declaration.defenses] == ["fedkl"]
    locks = [Lock.of(net) for net in TRAINED]
    assert len(locks) == 8  # two clients train and evaluate in two rounds
    by_key: dict[tuple[float, ...], list[Lock]] = {}
    for lock in locks:
        by_key.setdefault(tuple(lock.key.tolist()), []).append(lock)
    assert [len(mine) for mine in by_key.values()] == [4, 4]
    # The lock layers went on where the round before left them, and were trained.
    for mine in by_key.values():
        scales = [pair.layers["norm"][0].weight for pair in mine]
        assert torch.equal(scales[0], scales[1]) and torch.equal(scales[2], scales[3])
        assert not torch.equal(scales[1], scales[2])
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.glob("[ab]/*.safetensors"))


def test_the_state_dict_and_the_names_list_no_secret_but_the_optimizer_gets_them() -> None:
    plain, locked = Net(), keylock(Net())
    assert set(plain.state_dict()) - set(locked.state_dict()) == {"norm.weight", "norm.bias"}
    # A server has no mod: nothing is drawn there.
    assert all(module.lock is None for module in key_locks(locked).values())
    assert len(list(locked.parameters())) == len(list(locked.named_parameters()))


def test_a_locked_model_can_be_copied(tmp_path: Path) -> None:
    run(keylock, DefenseMod("fedkl"), store=tmp_path, rounds=1, nodes=[{}, {}])
    net = TRAINED[0]
    names = len(list(net.named_parameters()))
    assert len(list(net.parameters())) == names + 4
    twin = copy.deepcopy(net)
    assert len(list(twin.parameters())) == names + 4
    assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in net.parameters())


@pytest.mark.parametrize(
    ("prepare", "mod", "said"),
    [
        (lambda net: net, ("fedkl", {}), "write net = keylock(net) where the app makes it"),
        (lambda net: net, ("soteria", {}), "write net = defended(net, 'soteria')"),
        (keylock, ("guardian", {}), "give both the same defense"),
        (keylock, ("fedkl", {"key_length": 8}), "give both the same defense"),
    ],
)
def test_an_app_and_a_mod_that_do_not_go_together_send_nothing(
    tmp_path: Path, prepare: Any, mod: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, parameters = mod
    grid = LoopbackGrid(client_app(prepare, DefenseMod(name, **parameters)), [{}, {}])
    arrays = ArrayRecord(prepare(Net()).state_dict())
    sent = FedAvg().configure_train(1, arrays, ConfigRecord({}), grid)
    for reply in grid.send_and_receive(sent):
        assert reply.has_error() and said in str(reply.error.reason)


def test_precode_joins_the_apps_own_loss(tmp_path: Path) -> None:
    def prepare(net: nn.Module) -> nn.Module:
        torch.manual_seed(2)
        return defended(net, "precode", weight=10.0, latent=4)

    found = run(prepare, DefenseMod("precode", weight=10.0, latent=4), store=tmp_path, rounds=1)
    assert any("encoder" in name for name in found[0].update)
    (block,) = own_losses(TRAINED[0])
    assert block.adds_loss and block.stream is not None
    # The same gradient as a loop that adds the loss itself.
    images, labels = torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2])
    gradients = []
    for adds in (True, False):
        net = prepare(Net())
        (block,) = own_losses(net)
        block.adds_loss, block.noise = adds, torch.zeros(3, 4)
        loss = F.cross_entropy(net.train()(images), labels)
        loss = loss if adds else loss + auxiliary_loss(net)
        gradients.append(torch.autograd.grad(loss, list(net.parameters())))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_soteria_watches_the_first_batch_of_a_strangers_model(tmp_path: Path) -> None:
    def prepare(net: nn.Module) -> nn.Module:
        return defended(net, "soteria", ratio=0.5)

    found = run(prepare, DefenseMod("soteria", ratio=0.5), store=tmp_path, rounds=1)
    zero = (found[0].update["head.weight"] == 0).all(dim=0)
    assert int(zero.sum()) >= 54


def test_a_prepared_model_stays_as_it_is() -> None:
    torch.manual_seed(0)
    net = defended(keylock(Net()), "precode", latent=4)
    names = [name for name, _ in net.named_parameters()]
    again = defended(keylock(net), "precode", latent=4)
    assert [name for name, _ in again.named_parameters()] == names


def test_the_audit_builds_the_locked_model_of_a_stranger(tmp_path: Path) -> None:
    found = run(keylock, DefenseMod("fedkl"), store=tmp_path, rounds=1)
    observation = found[0]
    declared = observation.declaration.updated(
        {"model": f"{__name__}:Net", "image_shape": (1, 8, 8), "classes": 4, "lr": 0.1}
        | {"local_steps": 1, "batch_size": 4}
    )
    declared = declared.trusting([f"{__name__}:Net"])
    opened = Observation(**(vars(observation) | {"declaration": declared}))
    assert key_locks(target_model_of(opened).model)
    (case,), _ = open_cases([opened], AttackTask(tier="adaptive"), attack="ig")
    assert not hasattr(case, "reason"), case


def test_a_model_without_normalisation_is_refused_by_name() -> None:
    with refused("model-unsuited", "normalisation"):
        keylock(nn.Linear(2, 2))
