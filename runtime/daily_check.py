"""A check that a serving process runs once a day: a command, whose lines go to its log."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from subprocess import DEVNULL, PIPE, Popen  # as it is before a rule restricts it

from bract.errors import one_line

COMMAND = "BRACT_DAILY_CHECK"
"""Environment variable with the command, a JSON list of its arguments."""

_DAY = 86_400.0

_log = logging.getLogger(__name__)


def set_daily_check(command: list[str]) -> None:
    """Let the process that this one becomes run a command once a day."""
    os.environ[COMMAND] = json.dumps(command)


def start_daily_check() -> None:
    """Run the command that the environment names once a day, while this process lives."""
    if os.environ.get(COMMAND):
        command = json.loads(os.environ[COMMAND])
        threading.Thread(target=_check_daily, args=(command,), daemon=True).start()


def _check_daily(command: list[str]) -> None:
    while True:
        time.sleep(_DAY)
        check(command)


def check(command: list[str]) -> None:
    """Run the command, and log each line that it prints as a warning."""
    try:
        with Popen(command, stdin=DEVNULL, stdout=PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                _log.warning("%s", line.rstrip())
    except OSError as error:
        _log.warning("the daily check could not be started: %s", one_line(error, 300))
