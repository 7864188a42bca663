import random

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as FixedClipping
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx

from bract.observation import ObservationStore, Protocol
from bract.server.hook import HonestButCurious
from bract.server.loopback import LoopbackGrid

STRANGERS_APP = ClientApp()


@STRANGERS_APP.train()
def _train(message: Message, context: Context) -> Message:
    """A client that knows nothing of bract: it moves each weight by a step of its own."""
    step = 0.25 * (int(context.node_config["id"]) + 1)
    arrays = message.content["arrays"]
    moved = ArrayRecord()
    for name, array in arrays.items():
        value = array.numpy()
        change = np.float32(-step) if value.dtype == np.float32 else 1
        moved[name] = Array(np.asarray(value + change))
    metrics = MetricRecord({"num-examples": 10 + int(context.node_config["id"]), "loss": step})
    return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)


@STRANGERS_APP.evaluate()
def _evaluate(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 5, "accuracy": 0.5})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def strangers_grid() -> LoopbackGrid:
    random.seed(0)  # Flower shuffles the nodes, and with them the order of floating point sums
    return LoopbackGrid(STRANGERS_APP, [{"id": i} for i in range(3)])


def initial() -> ArrayRecord:
    generator = torch.Generator().manual_seed(0)
    return ArrayRecord(
        {
            "conv.weight": Array(torch.randn(2, 1, 3, 3, generator=generator).numpy()),
            "bn.running_mean": Array(np.zeros(2, np.float32)),
            "bn.num_batches_tracked": Array(np.array(0, np.int64)),
        }
    )


def as_bytes(record: ArrayRecord) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in record.items()}


@pytest.mark.parametrize("make", [FedAvg, FedAdam, lambda: FedProx(proximal_mu=0.1)])
def test_a_wrapped_strategy_ends_with_the_same_bits(make, tmp_path):
    plain = make().start(strangers_grid(), initial(), num_rounds=3)
    wrapped = HonestButCurious(make(), tmp_path / "captures").start(
        strangers_grid(), initial(), num_rounds=3
    )
    assert as_bytes(wrapped.arrays) == as_bytes(plain.arrays) != as_bytes(initial())
    assert {r: dict(m) for r, m in wrapped.train_metrics_clientapp.items()} == {
        r: dict(m) for r, m in plain.train_metrics_clientapp.items()
    }


def test_a_strangers_update_is_what_was_sent_minus_what_came_back(tmp_path):
    protocol = Protocol(model="their.module:Net", lr=0.25, local_steps=1)
    HonestButCurious(FedAvg(), tmp_path, protocol=protocol).start(
        strangers_grid(), initial(), num_rounds=2
    )
    observations = list(ObservationStore(tmp_path))
    assert [(o.round, o.client) for o in observations] == [
        (r, f"node-{n}") for r in (1, 2) for n in (1, 2, 3)
    ]
    first = observations[0]
    sent = initial()
    torch.testing.assert_close(
        first.parameters["conv.weight"], torch.from_numpy(sent["conv.weight"].numpy())
    )
    torch.testing.assert_close(first.update["conv.weight"], torch.full((2, 1, 3, 3), 0.25))
    torch.testing.assert_close(first.gradient()["conv.weight"], torch.ones(2, 1, 3, 3))
    assert set(first.buffers) == {"bn.running_mean", "bn.num_batches_tracked"}
    assert first.returned_buffers["bn.num_batches_tracked"] == 1
    assert first.protocol.model == "their.module:Net"
    assert first.protocol.num_examples == 10
    assert first.provenance["metrics"]["loss"] == 0.25


def test_only_the_asked_rounds_are_captured(tmp_path):
    HonestButCurious(FedAvg(), tmp_path, rounds=[2]).start(
        strangers_grid(), initial(), num_rounds=3
    )
    assert {o.round for o in ObservationStore(tmp_path)} == {2}


def test_the_hook_sees_the_clients_also_inside_another_wrapper(tmp_path):
    def strategy(inner):
        return FixedClipping(inner, noise_multiplier=0.0, clipping_norm=1e9, num_sampled_clients=3)

    inner = HonestButCurious(FedAvg(), tmp_path)
    wrapped = strategy(inner).start(strangers_grid(), initial(), num_rounds=1)
    plain = strategy(FedAvg()).start(strangers_grid(), initial(), num_rounds=1)
    assert as_bytes(wrapped.arrays) == as_bytes(plain.arrays)
    assert len(list(ObservationStore(tmp_path))) == 3


def test_a_store_that_cannot_be_written_does_not_stop_training(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    result = HonestButCurious(FedAvg(), blocked / "captures").start(
        strangers_grid(), initial(), num_rounds=1
    )
    assert "conv.weight" in result.arrays
    assert "was not captured" in caplog.text


def test_evaluation_messages_are_not_captured(tmp_path):
    strategy = HonestButCurious(FedAvg(fraction_train=0.0), tmp_path)
    strategy.start(strangers_grid(), initial(), num_rounds=1, train_config=ConfigRecord())
    assert list(ObservationStore(tmp_path)) == []
