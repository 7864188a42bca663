"""A SuperNode that the SuperLink or its gateway refuses: it asks again, and says why it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from bract.runtime import admission
from bract.runtime.admission import Admission, exit_code


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were slept, on a clock of their own."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(admission, "time", clock)
    monkeypatch.setattr(Admission, "refused", False)
    return slept


class SuperLink:
    """Answers in turn with a status, or raises what stands in its place; the last one for ever."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = list(answers)
        self.said: list[str] = []

    def _sign_and_send(self, context: Any) -> httpx.Response:
        assert "signature" not in context.request.headers
        context.request.headers["signature"] = "of the time"
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer)

    def ask(self, method: str = "/flwr.proto.Fleet/ActivateNode") -> int:
        made = Admission(self.said.append)
        request = httpx.Request("POST", "https://localhost/v1/fleet")
        context = SimpleNamespace(rpc_method=method, request=request)
        return made.intercept(context, self._sign_and_send).status_code


def test_a_killed_site_asks_less_and_less_often_until_its_heartbeat_has_lapsed(
    pauses: list[float],
) -> None:
    superlink = SuperLink(412, 412, 412, 412, 412, 200)
    assert superlink.ask() == 200
    assert pauses == [2.0, 4.0, 8.0, 15.0, 15.0]
    assert len(superlink.said) == 1 and "until" not in superlink.said[0]
    assert "counts as connected for up to 60 s" in superlink.said[0]
    assert exit_code(0) == 0


def test_a_site_that_is_never_taken_is_given_up_with_cause_and_remedy(
    pauses: list[float],
) -> None:
    superlink = SuperLink(412)
    assert superlink.ask() == 412
    assert admission.PATIENCE <= sum(pauses) <= admission.PATIENCE + admission.LONGEST_PAUSE
    assert len(superlink.said) == 2
    assert "not registered there, or was revoked" in superlink.said[1]
    assert "bract site register" in superlink.said[1]
    assert exit_code(1) == 2


def test_a_site_that_is_revoked_while_it_runs_is_told_so_once() -> None:
    superlink = SuperLink(401)
    for _ in range(2):
        assert superlink.ask("/flwr.proto.Fleet/PullMessages") == 401
    assert len(superlink.said) == 1 and "revoked" in superlink.said[0]
    assert exit_code(0) == 2


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("certificate verify failed: certificate has expired (_ssl.c:1006)", "site renew"),
        ("certificate verify failed: unable to get local issuer certificate", "bract doctor"),
    ],
)
def test_a_gateway_s_bad_certificate_is_named(problem: str, said: str) -> None:
    superlink = SuperLink(httpx.ConnectError(f"[SSL: CERTIFICATE_VERIFY_FAILED] {problem}"))
    with pytest.raises(httpx.ConnectError):
        superlink.ask()
    assert len(superlink.said) == 1 and said in superlink.said[0]
    assert exit_code(1) == 2


def test_a_gateway_that_is_started_again_is_flower_s_to_wait_for(pauses: list[float]) -> None:
    for answer in (502, httpx.ConnectError("[Errno 111] Connection refused")):
        superlink = SuperLink(answer, 200)
        if isinstance(answer, int):
            assert superlink.ask() == answer
        else:
            with pytest.raises(httpx.ConnectError):
                superlink.ask()
        assert superlink.ask() == 200
        assert superlink.said == []
    assert not pauses and exit_code(0) == 0


def test_a_gateway_that_ends_in_a_handshake_is_asked_again() -> None:
    superlink = SuperLink(httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred"))
    with pytest.raises(httpx.ConnectError) as raised:
        superlink.ask()
    # What Flower takes for an error that no repetition removes.
    assert not any(word in str(raised.value).lower() for word in ("certificate", "ssl", "tls"))
    assert superlink.said == [] and exit_code(1) == 1


def test_a_good_answer_ends_a_refusal() -> None:
    superlink = SuperLink(httpx.ConnectError("certificate has expired"), 200)
    with pytest.raises(httpx.ConnectError):
        superlink.ask()
    superlink.ask()
    assert exit_code(0) == 0
