"""A request that a SuperLink failed to answer is sent again."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from bract.runtime import retrying


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were slept, on a clock of their own."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(retrying, "time", clock)
    return slept


def ask(*answers: int) -> tuple[int, int]:
    """Return the status in the end, and how often the SuperLink was asked."""
    given: list[int] = []

    def sign_and_send(context: Any) -> httpx.Response:
        assert "signature" not in context.request.headers
        context.request.headers["signature"] = "of the time"
        given.append(answers[min(len(given), len(answers) - 1)])
        return httpx.Response(given[-1])

    request = httpx.Request("POST", "https://localhost/v1/fleet")
    context = SimpleNamespace(rpc_method="/flwr.proto.Fleet/PushMessages", request=request)
    return retrying.Retries().intercept(context, sign_and_send).status_code, len(given)


def test_an_internal_error_is_asked_again_less_and_less_often(pauses: list[float]) -> None:
    assert ask(500, 500, 500, 200) == (200, 4)
    assert pauses == [0.5, 1.0, 2.0]


def test_one_that_stays_is_given_up(pauses: list[float]) -> None:
    status, asked = ask(500)
    assert status == 500 and asked > 5
    assert sum(pauses) == retrying.PATIENCE


@pytest.mark.parametrize("status", [200, 400, 401, 403, 412, 413, 502, 503])
def test_another_answer_is_flower_s_to_judge(status: int, pauses: list[float]) -> None:
    assert ask(status, 200) == (status, 1)
    assert not pauses
