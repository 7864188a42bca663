import math
from typing import Any

import pytest
import torch
from refusals import refused

from bract.client.defenses import AdaDefense, DefenseChain, ProtectContext

HERE = ProtectContext()

# Worked by hand for beta1 = beta2 = 1/2, eps = 1/4 and the updates (2, 0), (0, -2), (2, 2):
#   m = (1, 0), (.5, -1), (1.25, .5)      v = (2, 0), (1, 2), (2.5, 3)
#   m / (1 - 2^-r) = (2, 0), (2/3, -4/3), (10/7, 4/7)
#   v / (1 - 2^-r) = (4, 0), (4/3, 8/3), (20/7, 24/7)
UPDATES = [[2.0, 0.0], [0.0, -2.0], [2.0, 2.0]]
INSIDE = [
    [2 / math.sqrt(4.25), 0.0],
    [2 / 3 / math.sqrt(4 / 3 + 0.25), -4 / 3 / math.sqrt(8 / 3 + 0.25)],
    [10 / 7 / math.sqrt(20 / 7 + 0.25), 4 / 7 / math.sqrt(24 / 7 + 0.25)],
]
OUTSIDE = [
    [2 / 2.25, 0.0],
    [2 / 3 / (math.sqrt(4 / 3) + 0.25), -4 / 3 / (math.sqrt(8 / 3) + 0.25)],
    [10 / 7 / (math.sqrt(20 / 7) + 0.25), 4 / 7 / (math.sqrt(24 / 7) + 0.25)],
]
UNCORRECTED = [
    [2 * math.sqrt(0.5) / (math.sqrt(2) + 0.25), 0.0],
    [
        2 / 3 * math.sqrt(0.75) / (1 + 0.25),
        -4 / 3 * math.sqrt(0.75) / (math.sqrt(2) + 0.25),
    ],
    [
        10 / 7 * math.sqrt(0.875) / (math.sqrt(2.5) + 0.25),
        4 / 7 * math.sqrt(0.875) / (math.sqrt(3) + 0.25),
    ],
]


def uploads(defense: Any, updates: Any = UPDATES) -> Any:
    state: dict[str, Any] = {}
    sent = []
    for values in updates:
        # Two tensors, so that the names' order matters.
        update = {"a": torch.tensor(values[:1]), "b": torch.tensor([values[1:]])}
        protected = defense.protect(update, state, HERE)
        assert protected["b"].shape == (1, 1)
        sent.append([float(protected["a"]), float(protected["b"])])
    return sent, state


def toy(**parameters: Any) -> Any:
    return AdaDefense(beta1=0.5, beta2=0.5, epsilon=0.25, alpha=1.0, **parameters)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("inside", INSIDE), ("outside", OUTSIDE), ("uncorrected", UNCORRECTED)],
)
def test_three_rounds_of_two_parameters_give_the_numbers_worked_by_hand(
    placement: Any, expected: Any
) -> None:
    sent, state = uploads(toy(eps_placement=placement))
    torch.testing.assert_close(torch.tensor(sent), torch.tensor(expected))
    assert int(state["round"]) == 3


def test_without_bias_correction_the_moments_are_used_as_they_are() -> None:
    sent, _ = uploads(toy(bias_correction=False))
    assert sent[0][0] == pytest.approx(1 / math.sqrt(2.25))
    assert sent[2][1] == pytest.approx(0.5 / math.sqrt(3.25))


def test_adagrad_adds_squares_up_and_corrects_them_as_adam_does() -> None:
    # v = (4, 0), (4, 4), (8, 8)
    sent, _ = uploads(toy(variant="adagrad"))
    expected = [
        [2 / math.sqrt(4 / 0.5 + 0.25), 0.0],
        [2 / 3 / math.sqrt(4 / 0.75 + 0.25), -4 / 3 / math.sqrt(4 / 0.75 + 0.25)],
        [10 / 7 / math.sqrt(8 / 0.875 + 0.25), 4 / 7 / math.sqrt(8 / 0.875 + 0.25)],
    ]
    torch.testing.assert_close(torch.tensor(sent), torch.tensor(expected))
    # The published formula: scale sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).
    sent, _ = uploads(toy(variant="adagrad", eps_placement="uncorrected"))
    assert sent[2][1] == pytest.approx(math.sqrt(0.875) / 0.875 * 0.5 / (math.sqrt(8) + 0.25))
    sent, _ = uploads(
        AdaDefense(variant="adagrad", eps_placement="uncorrected", alpha=1.0), [[0.5, -3.0]]
    )
    torch.testing.assert_close(
        torch.tensor(sent), torch.tensor([[0.0316227766, -0.0316227766]]), rtol=1e-5, atol=0
    )
    sent, _ = uploads(toy(variant="adagrad", bias_correction=False))
    assert sent[0][0] == pytest.approx(1 / math.sqrt(4.25))


def test_yogi_moves_the_second_moment_by_the_sign_of_the_difference() -> None:
    # v1 = 0 - (0 - 4) / 2 = 2; g = 0 leaves it at 2; then 2 - 4 < 0, so v3 = 2 + 4 / 2 = 4.
    _, state = uploads(toy(variant="yogi"))
    torch.testing.assert_close(state["v"], torch.tensor([4.0, 4.0]))
    # A smaller square pulls it down by its own size: 4 - 1 / 2.
    _, state = uploads(toy(variant="yogi"), [*UPDATES, [1.0, 1.0]])
    torch.testing.assert_close(state["v"], torch.tensor([3.5, 3.5]))


def test_alpha_is_applied_at_the_client_or_left_to_the_server() -> None:
    at_client, _ = uploads(AdaDefense(alpha=0.01))
    at_server, _ = uploads(AdaDefense(alpha=0.01, alpha_at="server"))
    torch.testing.assert_close(torch.tensor(at_client), 0.01 * torch.tensor(at_server))
    assert AdaDefense(alpha=0.01).server_lr == 1.0
    assert AdaDefense(alpha=0.01, alpha_at="server").server_lr == 0.01


def test_the_first_defended_update_is_a_sign_whatever_the_size() -> None:
    sent, _ = uploads(AdaDefense(alpha=1.0), [[3e-2, -5.0]])
    torch.testing.assert_close(torch.tensor(sent), torch.tensor([[1.0, -1.0]]), atol=1e-4, rtol=0)


def test_each_client_has_moments_of_its_own() -> None:
    second: dict[str, Any]
    first: dict[str, Any]
    first, second = {}, {}
    defense = toy()
    for values, state in (([2.0], first), ([-2.0], second), ([2.0], first)):
        defense.protect({"a": torch.tensor(values)}, state, HERE)
    assert float(first["m"]) == 1.5
    assert float(second["m"]) == -1.0


def test_moments_of_another_model_are_refused() -> None:
    chain = DefenseChain([AdaDefense()])
    state: dict[str, Any] = {}
    chain.protect({"a": torch.ones(2), "b": torch.ones(3)}, state)
    with refused("defense-failed", "parameters"):
        chain.protect({"b": torch.ones(3), "a": torch.ones(2)}, state)


def test_secret_updates_are_drawn_per_client_and_move_the_moments_first() -> None:
    update = {"a": torch.tensor([2.0, -2.0]), "b": torch.tensor([[0.5]])}
    defense = toy(secret_updates=2)
    sent: list[Any] = []
    state: dict[str, Any] = {}
    for number in (1, 2):
        sent.append(defense.protect(update, state, ProtectContext(round=number, seed=7)))
    stream = ProtectContext(round=1, seed=7).stream("moments")
    m, v = torch.zeros(3), torch.zeros(3)
    for _ in range(2):
        secret = torch.cat([stream.normal((2,)) * 2.0, stream.normal((1, 1)).flatten() * 0.5])
        m, v = (m + secret) / 2, (v + secret.square()) / 2
    g = torch.tensor([2.0, -2.0, 0.5])
    for number, found in enumerate(sent, 3):
        m, v = (m + g) / 2, (v + g.square()) / 2
        unit = 1.0 - 0.5**number
        wanted = m / unit / (v / unit + 0.25).sqrt()
        torch.testing.assert_close(torch.cat([found["a"], found["b"].flatten()]), wanted)
    assert int(state["round"]) == 4
    other = defense.protect(update, {}, HERE)["a"]
    assert not torch.equal(other, defense.protect(update, {}, HERE)["a"])
