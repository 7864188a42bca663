"""Fixtures of the tests of clients."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def message() -> Message:
    """Return a train message of round 2 to one client."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
    config = ConfigRecord({"server-round": 2, "lr": 0.1})
    return Message(RecordDict({"config": config}), dst_node_id=7, message_type="train")
