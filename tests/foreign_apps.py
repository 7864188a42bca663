"""Clients of an app that knows nothing of bract, in this process."""

from __future__ import annotations

from flwr.clientapp import ClientApp

from bract.server.loopback import LoopbackGrid


def clients_of(app: ClientApp, count: int = 1) -> LoopbackGrid:
    """Return a grid of clients with an ``id`` from 0."""
    return LoopbackGrid(app, [{"id": number} for number in range(count)], run_id=1)
