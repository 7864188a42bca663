"""One client that sends garbage costs itself its contribution, under its own name."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from refusals import refused
from toy_clients import toy_app, toy_arrays, toy_grid, value_of

from bract.errors import BractError, RunFailedError
from bract.protocol.records import Contribution, to_arrays
from bract.strategies import FedAvg
from bract.strategies.aggregation import fedavg_weights
from bract.updates.shares import capped

ONE = torch.tensor([1.0], dtype=torch.float64)
DECLARED = {"client": "client-0", "bract-version": "1", "declaration": "{}"}


def array(data: bytes, stype: str = "numpy.ndarray") -> ArrayRecord:
    return ArrayRecord({"w": Array("float64", (1,), stype, data)})


def garbage(arrays: Any = None, examples: Any = 1, buffers: Any = None, **declared: Any) -> Any:
    """A reply in bract's form; what is given takes the place of what is right."""
    return RecordDict(
        {
            "update": to_arrays({"w": ONE}) if arrays is None else arrays,
            "metrics": MetricRecord({"num-examples": examples}),
            "declared": ConfigRecord(DECLARED | {"client": "liar"} | declared),
            **({} if buffers is None else {"buffers": buffers}),
        }
    )


def app_that_replies(content: Any) -> Any:
    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        return Message(content, reply_to=message)

    return app


def play(content: Any, *, clients: Any = 3, **options: Any) -> Any:
    """Node 2 replies with the content, the others move w by -1."""
    good = toy_app([1.0] * clients)
    bad = app_that_replies(content)
    strategy = FedAvg(min_nodes=clients, **options)
    grid = toy_grid(lambda node: bad if node == 1 else good(node), clients)
    result = strategy.start(grid, toy_arrays(0.0), num_rounds=1, timeout=10)
    return strategy, value_of(result.arrays)


WHOLE = to_arrays({"w": ONE})["w"].data
BAD = {
    "an empty array": (garbage(array(b"")), "array 'w' cannot be decoded"),
    "no array": (garbage(ArrayRecord({})), "sent nothing for w"),
    "a parameter as an update and as a buffer": (
        garbage(to_arrays({"w": torch.zeros(3)}), buffers=to_arrays({"w": ONE})),
        "sent 'w' as an update and as a buffer",
    ),
    "a truncated array": (garbage(array(WHOLE[:-3])), "it holds 5"),
    "an unknown serialisation": (garbage(array(WHOLE, "x")), "serialisation is 'x'"),
    "objects": (
        garbage(array(WHOLE.replace(b"'<f8'", b"'|O' "))),
        "expected numbers",
    ),
    "a zip file": (garbage(array(b"PK\x03\x04" + bytes(90))), "cannot be decoded"),
    "another dtype": (garbage(to_arrays({"w": torch.ones(1)})), "torch.float32, expected"),
    "a huge value": (garbage(to_arrays({"w": ONE * -1.7e308})), "makes the model infinite"),
    "infinitely many examples": (garbage(examples=float("inf")), "found inf"),
    "no number of examples": (garbage(examples=float("nan")), "found nan"),
    "half an example": (garbage(examples=1.5), "found 1.5"),
    "fewer than no examples": (garbage(examples=-3), "found -3"),
    "2^62 examples": (garbage(examples=2**62), f"found {2**62}"),
    "a list of examples": (garbage(examples=[1, 2]), r"found \[1, 2\]"),
    "deep JSON": (garbage(declaration="[" * 10_000), "nested too deeply"),
    "long JSON": (garbage(declaration="[" + "1," * 10_000 + "1]"), "expected at most"),
    "no JSON": (garbage(declaration="{"), "no JSON"),
    "a list for a declaration": (garbage(declaration="[]"), "expected an object"),
    "bytes for a declaration": (garbage(declaration=b"{}"), "expected text"),
    "a missing record": (
        RecordDict({"update": to_arrays({"w": ONE}), "declared": ConfigRecord({**DECLARED})}),
        "lacks 'metrics'",
    ),
    "a record of another kind": (
        RecordDict({"update": MetricRecord({}), "declared": ConfigRecord({})}),
        "lacks",
    ),
    "nothing at all": (RecordDict({}), "0 array records"),
    "a thousand metrics": (
        RecordDict(
            {
                "update": to_arrays({"w": ONE}),
                "metrics": MetricRecord({"num-examples": 1, **{f"m{i}": 1.0 for i in range(999)}}),
                "declared": ConfigRecord({**DECLARED, "client": "liar"}),
            }
        ),
        "sent 999 metrics",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_garbage_reply_costs_its_client_its_own_contribution(
    case: Any, caplog: pytest.LogCaptureFixture
) -> None:
    content, words = BAD[case]
    options = {"server_lr": 2.0} if case == "a huge value" else {}
    strategy, w = play(content, tolerate_failures=True, **options)
    assert w == pytest.approx(-1.0 * options.get("server_lr", 1.0))
    (failure,) = strategy.outcome.failures
    assert failure.node_id == 2
    assert failure.client in ("liar", "client-0", "node-2")
    lines = [r.getMessage() for r in caplog.records if failure.reason in r.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    with pytest.raises(RunFailedError, match=words) as caught:
        play(content, **options)
    assert failure.client in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "aggregate", "node-1", "x" * 65])
def test_a_name_that_is_no_plain_word_is_refused_and_the_node_is_blamed(name: Any) -> None:
    strategy, w = play(garbage(client=name), tolerate_failures=True)
    assert w == pytest.approx(-1.0)
    assert [f.client for f in strategy.outcome.failures] == ["node-2"]


def named(name: Any, update: Any) -> Any:
    return app_that_replies(
        RecordDict(
            {
                "update": to_arrays({"w": ONE * update}),
                "metrics": MetricRecord({"num-examples": 1}),
                "declared": ConfigRecord(DECLARED | {"client": name}),
            }
        )
    )


def test_the_second_node_that_claims_a_name_loses_its_own_contribution_alone() -> None:
    apps = [named("client-0", 1.0), named("client-1", 2.0), named("client-0", 50.0)]
    strategy = FedAvg(min_nodes=3, tolerate_failures=True)
    grid = toy_grid(lambda node: apps[node], 3)
    result = strategy.start(grid, toy_arrays(0.0), num_rounds=2, timeout=10)
    assert value_of(result.arrays) == pytest.approx(-3.0)
    assert [c.client for c in strategy.outcome.contributions] == ["client-0", "client-1"]
    (failure,) = strategy.outcome.failures
    assert (failure.node_id, failure.client) == (3, "node-3")
    assert "which is node 1's" in failure.reason


def test_an_error_that_names_another_client_is_blamed_on_who_sent_it() -> None:
    def fails(node: Any) -> Any:
        app = ClientApp()

        @app.train()
        def train(message: Any, context: Any) -> Any:
            raise BractError("client-0: did something bad", code="usage")

        return app

    apps = [named("client-0", 1.0), named("client-1", 1.0)]
    strategy = FedAvg(min_nodes=3, tolerate_failures=True)
    grid = toy_grid(lambda node: apps[node] if node < 2 else fails(node), 3)
    strategy.start(grid, toy_arrays(0.0), num_rounds=2, timeout=10)
    assert [f.client for f in strategy.outcome.failures] == ["node-3"]


def contributions(*examples: Any) -> Any:
    return [Contribution(i, f"c{i}", {}, n) for i, n in enumerate(examples)]


def test_no_client_outweighs_what_it_may_whatever_it_claims(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = fedavg_weights(contributions(10**9, 10, 30), "examples", 0.5)
    assert weights == pytest.approx([0.5, 0.125, 0.375])
    assert "c0 claims 1000000000" in caplog.text


def test_a_claim_of_a_billion_examples_does_not_decide_the_model_alone() -> None:
    _, w = play(garbage(to_arrays({"w": ONE * 101}), examples=10**9))
    assert w == pytest.approx(-(0.75 * 101 + 0.25 * 1))


def test_at_their_word_the_examples_decide() -> None:
    assert fedavg_weights(contributions(80, 10, 10), "examples", 1.0) == pytest.approx(
        [0.8, 0.1, 0.1]
    )
    assert fedavg_weights(contributions(30, 10), "examples", 0.5) == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize("most", [0.01, 0.3, 0.5, 0.9, 1.0])
def test_capped_shares_sum_to_one_and_keep_their_order(most: Any) -> None:
    generator = np.random.default_rng(0)
    for count in (3, 4, 10):
        shares = generator.dirichlet(np.full(count, 0.2) + 1e-3)
        shares = (shares + 1e-9) / (shares + 1e-9).sum()
        limited = np.array(capped(list(shares), most))
        assert limited.sum() == pytest.approx(1.0)
        assert limited.max() <= max(most, 1 / count) * (1 + 1e-9)
        order = np.argsort(shares)
        assert (np.diff(limited[order]) >= -1e-12).all()


def test_a_share_that_no_weight_can_have_is_refused() -> None:
    for share in (0.0, 1.5, -1.0, float("nan")):
        with refused("config-value", "max_share"):
            FedAvg(max_share=share)


def test_a_second_answer_of_one_node_counts_once() -> None:
    class Twice(FedAvg):
        def aggregate_train(self, server_round: Any, replies: Any) -> Any:
            replies = list(replies)
            return super().aggregate_train(server_round, [*replies, replies[0]])

    strategy = Twice(min_nodes=2)
    result = strategy.start(toy_grid(toy_app([1.0, 3.0]), 2), toy_arrays(0.0), num_rounds=1)
    assert value_of(result.arrays) == pytest.approx(-2.0)
    assert len(strategy.outcome.contributions) == 2


def test_json_of_a_good_client_is_kept() -> None:
    content = garbage(declaration=json.dumps({"local_steps": 2}))
    strategy, _ = play(content, tolerate_failures=True)
    assert strategy.outcome.failures == ()
    (liar,) = [c for c in strategy.outcome.contributions if c.client == "liar"]
    assert liar.declaration == {"local_steps": 2}
