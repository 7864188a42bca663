import gc
import logging
import multiprocessing.process
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from bract.paillier import PrivateKey, deal, generate_keypair
from bract.paillier.sharing import KeyShare

HERE = Path(__file__).parent
# Tests of faults use what the tests of the launcher define, also when run alone.
sys.path[:0] = [str(HERE), str(HERE / "cli" / "launch")]
sys.path.append(str(HERE.parent))  # experiments, which no wheel holds
sys.path[:0] = map(str, HERE.parent.glob("plugins/*"))  # of this checkout
torch.set_num_threads(1)
# The same examples every time, and no clock that decides about them.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
# Whoever started the tests in the background may have ignored it, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections of garbage, which audits ask for."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin every test alike, whatever ran before: what is drawn, and what is logged."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    logger = logging.getLogger("bract")  # commands set it up
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(autouse=True)
def _written_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave written files to the operating system: a test ends before power fails."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def _own_signal_handlers() -> Iterator[None]:
    """Put back handlers that a command set: `KeyboardInterrupt` means another thing under them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


MARKS_OF_PROCESSES = ("processes", "faults", "slow")


@pytest.fixture(autouse=True)
def _no_unmarked_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a quick test that starts a Python process, whose imports alone take seconds."""
    if any(request.node.get_closest_marker(mark) for mark in MARKS_OF_PROCESSES):
        return
    start = subprocess.Popen.__init__

    def refuse() -> None:
        pytest.fail("a test that starts a Python process needs a mark: pytest.mark.processes")

    def started(self: Any, args: Any, *more: Any, **options: Any) -> None:
        program = args if isinstance(args, str | Path) else args[0]
        if Path(program).name.startswith(("python", "bract", "flower-", "flwr")):
            refuse()
        start(self, args, *more, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda self: refuse())


@pytest.fixture(scope="module", autouse=True)
def _few_prior_steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let audits of their own rooms take 3 steps for a prior-only baseline, in this process.

    In modules that compare them with those of real processes they take the 200 of those.
    """
    with pytest.MonkeyPatch.context() as patched:
        room = request.path.relative_to(HERE).parts[0]
        if room in ("audit", "cli") and request.node.get_closest_marker("processes") is None:
            patched.setattr("bract.audit.questions.reconstruction.baselines.PRIOR_ITERATIONS", 3)
        yield


@pytest.fixture(scope="session")
def whole_key() -> PrivateKey:
    """One private key of 2048 bits that all clients share."""
    return generate_keypair(2048)


@pytest.fixture(scope="session")
def another_key() -> PrivateKey:
    """A key of some other run."""
    return generate_keypair(2048)


@pytest.fixture(scope="session")
def two_of_three() -> list[KeyShare]:
    """Three shares of which two decrypt together."""
    return deal(2, 3, 2048)


@pytest.fixture
def public_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients of masked sums train in the order of a plain run, to compare the two."""
    from bract.client.sealing import MaskedSealing

    monkeypatch.setattr(MaskedSealing, "sums", False)
