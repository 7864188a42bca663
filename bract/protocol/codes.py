"""What Flower's wire protocol has and does not export, and the fixed text of a refusal."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """Codes of the errors with which a node answers a message."""

    APP_RAISED = 2
    MESSAGE_UNAVAILABLE = 3
    NODE_UNAVAILABLE = 5
    MOD_FAILED_PRECONDITION = 6
    INVALID_BUNDLE = 7


RUN_ID_NOT_FOUND = 16
"""Code of the Control API's error for an unknown run."""

SUPERLINK_NODE = 1
"""Number of the SuperLink among the nodes, under which a ServerApp sends."""

SERVER_APP = "flwr-serverapp"
"""Task type of a run that consists of a ServerApp and ClientApps."""

REFUSED = (
    "nothing was sent, and the message counts as answered if this site's data were opened for it; "
    "the reason is in this client's own log alone (the output of its SuperNode; of a run on one "
    "machine logs/client-N.log in the run directory)"
)
"""In the place of every reason that may depend on the site's data, files or settings."""
