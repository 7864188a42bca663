"""EncryptedClientApp and Encrypted: a third-party app's updates are summed, and never seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from refusals import refused
from safetensors.torch import load_file
from torch import nn

from bract import Observation, ObservationStore
from bract.client import DefenseMod, EncryptedClientApp, witness
from bract.config.encryption import EncryptionConfig
from bract.errors import BractError, RunFailedError
from bract.runtime.key_files import write_keys
from bract.schema import read_work
from bract.server import HonestButCurious
from bract.server.loopback import LoopbackGrid
from bract.strategies import Encrypted

CLIENTS, ROUNDS = 3, 2
EXAMPLES = (10, 20, 30)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def own_app(
    app: ClientApp, seen: list[dict[str, torch.Tensor]] | None = None, truth: Path | None = None
) -> ClientApp:
    """Let an app train that knows nothing of encryption, under a witness if it has ``truth``."""

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        part = int(context.node_config["partition-id"])
        model = net()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        torch.manual_seed(part)
        lr = msg.content.config_records["config"]["lr"]
        assert isinstance(lr, float)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        rows, labels = torch.rand(8, 6), torch.randint(3, (8,))
        with witness(model, msg, context, truth):
            nn.functional.cross_entropy(model(rows), labels).backward()
            optimizer.step()
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": EXAMPLES[part], "train_loss": 1.25}),
            }
        )
        return Message(content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        if seen is not None:
            seen.append(msg.content.array_records["arrays"].to_torch_state_dict())
        metrics = MetricRecord({"num-examples": 40, "accuracy": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


class Watched(LoopbackGrid):
    """Keeps every answer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.answers: list[Message] = []

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        # The strategy lets go of a reply's arrays once they are in the sum.
        kept = Message(reply.content, reply_to=message) if reply.has_content() else reply
        self.answers.append(kept)
        return reply


def grid(app: ClientApp, **node: Any) -> Watched:
    return Watched(app, [{"partition-id": i, **node} for i in range(CLIENTS)])


def start(strategy: Any, on: LoopbackGrid, rounds: int = ROUNDS, **options: Any) -> Any:
    return strategy.start(
        on,
        ArrayRecord(net().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": 0.1}),
        **options,
    )


def captures(hook: HonestButCurious) -> list[Observation]:
    assert isinstance(hook.recorder.store, ObservationStore)
    return list(hook.recorder.store)


IN_BAND: dict[str, Any] = {"clients": CLIENTS, "keys": "in-band"}


def test_a_witness_sees_a_training_whose_update_is_encrypted(tmp_path: Path) -> None:
    """The sum is the same with it."""
    found = []
    for truth in (None, tmp_path):
        on = grid(own_app(EncryptedClientApp(**IN_BAND), truth=truth))
        strategy = Encrypted(FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS), **IN_BAND)
        found.append(start(strategy, on, rounds=1).arrays.to_torch_state_dict())
    plain, watched = found
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    files = sorted(tmp_path.rglob("*.work.json"))
    assert len(files) == CLIENTS
    for path in files:
        work = read_work(path)
        assert (work.round, work.steps, work.examples, work.distinct) == (1, 1, (8,), 8)
        assert [(o.name, o.groups[0].settings["lr"]) for o in work.optimizers] == [("SGD", 0.1)]


def test_the_final_model_is_that_of_the_plain_run_to_the_quantisation(tmp_path: Path) -> None:
    plain = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    wanted = start(plain, grid(own_app(ClientApp()))).arrays.to_torch_state_dict()
    seen: list[dict[str, torch.Tensor]] = []
    wrapped = Encrypted(FedAvg(min_available_nodes=CLIENTS), **IN_BAND)
    strategy = HonestButCurious(wrapped, store=str(tmp_path / "captures"))
    on = grid(own_app(EncryptedClientApp(**IN_BAND), seen))
    called: list[int] = []
    result = start(strategy, on, evaluate_fn=lambda n, _: called.append(n))
    assert not called and not len(result.arrays)
    assert len(seen) == CLIENTS
    step = 1.0 / (2**15 - 1)
    for name, value in wanted.items():
        for client in seen:
            if not value.is_floating_point() or name.endswith("tracked"):
                # Flower's own average of whole numbers is rounded down.
                assert int(client[name]) == ROUNDS
                continue
            assert float((client[name] - value).double().abs().max()) <= ROUNDS * step, name
    assert set(wrapped.final) == {f"client-{i}" for i in range(CLIENTS)}
    assert wrapped.final["client-1"]["accuracy"] == 0.5

    captured = captures(strategy)
    assert len(captured) == CLIENTS * ROUNDS
    assert all(o.ciphertexts and not o.update and not o.returned_buffers for o in captured)
    assert {o.declaration.encryption for o in captured} == {"paillier"}
    assert not any(o.provenance["flags"] for o in captured)
    replies = [a for a in on.answers if a.has_content() and "ciphertexts" in str(a.content)]
    assert len(replies) >= CLIENTS * ROUNDS
    names = set(net().state_dict())
    for answer in on.answers:
        assert not any(names & set(record) for record in answer.content.array_records.values())
        for record in answer.content.metric_records.values():
            assert record.get("train_loss") != 1.25, "a loss of training left"


def test_what_is_encrypted_is_the_defended_update(tmp_path: Path) -> None:
    store = tmp_path / "captures"
    strategy = HonestButCurious(Encrypted(FedAvg(), **IN_BAND), store=str(store))
    start(strategy, grid(own_app(EncryptedClientApp(mods=[DefenseMod("pruning")], **IN_BAND))))
    captured = captures(strategy)
    assert {tuple(d["name"] for d in o.declaration.defenses) for o in captured} == {("pruning",)}


def test_models_that_are_kept_on_disk_are_summed_in_one_order(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", EncryptionConfig(scheme="paillier"), CLIENTS)
    (key, *_) = (tmp_path / "keys").glob("*.pem")
    nodes = [
        {"partition-id": i, "paillier-key": str(key), "state-dir": str(tmp_path / f"state-{i}")}
        for i in range(CLIENTS)
    ]
    received: list[list[str]] = []

    def noting(msg: Message, context: Context, call_next: Any) -> Message:
        received.extend(list(record) for record in msg.content.array_records.values())
        return call_next(msg, context)  # type: ignore[no-any-return]

    app = own_app(EncryptedClientApp(clients=CLIENTS, mods=[noting, DefenseMod("adadefense")]))
    strategy = Encrypted(FedAvg(), clients=CLIENTS)
    # No message of a round that the run does not declare reaches the mods.
    start(strategy, Watched(app, nodes, {"num-server-rounds": ROUNDS}))
    assert strategy.final["client-0"]["accuracy"] == 0.5
    assert received and all(names == list(net().state_dict()) for names in received)
    kept = [load_file(path) for path in sorted(tmp_path.rglob("*-final.safetensors"))]
    assert len(kept) == CLIENTS
    assert all(torch.equal(kept[0][n], other[n]) for other in kept for n in net().state_dict())


def test_a_server_without_encryption_gets_an_error_in_place_of_an_update() -> None:
    on = grid(own_app(EncryptedClientApp(**IN_BAND)))
    start(FedAvg(min_available_nodes=CLIENTS), on, 1)
    assert on.answers and all(answer.has_error() for answer in on.answers)


def test_an_app_that_is_not_encrypted_takes_no_part() -> None:
    on = grid(own_app(ClientApp()))
    with pytest.raises((RunFailedError, BractError)):
        start(Encrypted(FedAvg(), **IN_BAND), on, 1)
    assert all(answer.has_error() for answer in on.answers)


def test_a_failure_while_encrypting_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from bract.client.encrypted.client import EncryptedClient

    def fail(*_: object) -> None:
        raise RuntimeError("no entropy")

    monkeypatch.setattr(EncryptedClient, "encrypt", fail)
    on = grid(own_app(EncryptedClientApp(**IN_BAND)))
    with refused("run-failed", "nothing"):
        start(Encrypted(FedAvg(), **IN_BAND), on, 1)
    trained = [a for a in on.answers if a.has_error()]
    assert len(trained) == CLIENTS
    assert not any("entropy" in str(a.error.reason) for a in trained)


def test_other_plans_and_other_averages_are_refused(tmp_path: Path) -> None:
    with refused("config-conflict", "FedAdam", "aggregate_train"):
        Encrypted(FedAdam(), **IN_BAND)
    with refused("config-conflict", "weighted_by_key"):
        Encrypted(FedAvg(weighted_by_key="n"), **IN_BAND)
    on = grid(own_app(EncryptedClientApp(clients=CLIENTS, keys="in-band", clip=2.0)))
    with pytest.raises((RunFailedError, BractError), match="layout"):
        start(Encrypted(FedAvg(), **IN_BAND), on, 1)


def test_a_site_whose_policy_demands_a_defense_sends_nothing_without_it(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("require: [{name: pruning}]\n")
    on = grid(own_app(EncryptedClientApp(**IN_BAND)), policy=str(policy))
    with refused("run-failed", "pruning"):
        start(Encrypted(FedAvg(), **IN_BAND), on, 1)
    own = EncryptedClientApp(mods=[DefenseMod("pruning")], **IN_BAND)
    start(Encrypted(FedAvg(), **IN_BAND), grid(own_app(own), policy=str(policy)), 1)
    assert not any("ciphertexts" in str(a.content) for a in on.answers if a.has_content())


@pytest.mark.parametrize("mods", [[], [DefenseMod("pruning")]], ids=["bare", "mod"])
@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ("max_rounds_total: 1", "max_rounds_total"),
        ("max_rounds_per_run: 1", "max_rounds_per_run"),
        ("max_epsilon: 0.5", "max_epsilon"),
        ("min_training_images: 20", "min_training_images"),
        ("require: [{name: guardian}]", "guardian"),
    ],
)
def test_every_key_of_a_policy_is_enforced_or_refused(
    mods: list[Any], policy: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "policy.yaml").write_text(policy)
    site = {"policy": str(tmp_path / "policy.yaml"), "state-dir": str(tmp_path / "state")}
    on = grid(own_app(EncryptedClientApp(mods=mods, **IN_BAND)))
    on.contexts[1].node_config.update(site)
    with refused("run-failed", named):
        start(Encrypted(FedAvg(), **IN_BAND), on, 2)


def test_encryption_holds_to_a_policy_that_allows_no_plain_update(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("plain_updates: false")
    for mods in ([], [DefenseMod("pruning")]):
        own = own_app(EncryptedClientApp(mods=mods, **IN_BAND))
        start(Encrypted(FedAvg(), **IN_BAND), grid(own, policy=str(tmp_path / "policy.yaml")), 1)
