"""bract's own ClientApp, and a fault in the next message of a kind, where a test has asked for one.

A test writes ``<folder>/<partition>-<message type>`` with the name of a fault in it; the file is
gone once the fault has begun.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import psutil
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import bract.client.session
from bract.client.app import app as whole

FOLDER = "BRACT_TEST_FAULTS"
KILLED = "killed before it answers"
MEMORY = "no memory"


def greedy(*_: object, **__: object) -> torch.Tensor:
    """Train on a batch that needs 4 GiB."""
    return torch.empty(1 << 30)


class Faulty(ClientApp):
    """Does what `whole` does, but for the fault."""

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        place = Path(os.environ[FOLDER]) / f"{context.node_config['partition-id']}-{kind}"
        fault = place.read_text() if place.is_file() else ""
        place.unlink(missing_ok=True)
        if fault == MEMORY:
            most = psutil.Process().memory_info().vms + (1 << 29)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            setattr(bract.client.session, "train_locally", greedy)  # noqa: B010
        reply = whole(message, context)
        if fault == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return reply


app = Faulty()
