"""How many connections a SuperNode uses for the parts of a message."""

import importlib
import threading
import time
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from ruling import put

from bract.installed import flower
from bract.runtime import transfers
from bract.runtime.transfers import FAST, FEWEST, MOST, Connections

PART = 1 << 20


def move(
    connections: Connections,
    monkeypatch: pytest.MonkeyPatch,
    *,
    seconds: float,
    up: int = PART,
    down: int = 0,
    method: str = "PushObject",
    status: int = 200,
) -> int:
    """Let a part move in so many seconds; return the number of connections afterwards."""
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    request = httpx.Request("POST", "http://superlink", content=bytes(up))
    context = SimpleNamespace(rpc_method=f"/flwr.proto.Fleet/{method}", request=request)

    def answer(_: object) -> httpx.Response:
        now[0] += seconds
        return httpx.Response(status, content=bytes(down))

    connections.intercept(context, answer)
    return connections.number(2)


def test_a_supernode_uses_many_connections_until_its_link_was_seen_to_be_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections, slow, fast = Connections(), 2 * PART / FAST, 0.5 * PART / FAST
    assert connections.number(2) == MOST
    assert move(connections, monkeypatch, seconds=slow) == MOST
    assert move(connections, monkeypatch, seconds=fast) == FEWEST
    assert move(connections, monkeypatch, seconds=slow, up=10, method="PushMessages") == FEWEST
    assert move(connections, monkeypatch, seconds=slow, up=1000) == FEWEST, "a small part"
    assert move(connections, monkeypatch, seconds=slow, status=502) == FEWEST, "nothing moved"
    assert move(connections, monkeypatch, seconds=slow) == MOST, "the link became slow"
    pull = partial(move, connections, monkeypatch, up=100, down=PART, method="PullObject")
    assert pull(seconds=fast) == FEWEST
    assert pull(seconds=slow) == MOST


def test_as_many_parts_move_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = importlib.import_module(flower.OBJECTS)
    put(monkeypatch, "flower-supernode", transfers.RULE)
    together = threading.Barrier(MOST, timeout=20)
    parts = [(str(number), b"") for number in range(MOST)]
    objects.push_object_contents_from_iterable(parts, lambda *_: together.wait())
