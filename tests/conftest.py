import logging
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from bract.paillier import PrivateKey, deal, generate_keypair
from bract.paillier.sharing import KeyShare

HERE = Path(__file__).parent
# Tests of faults use what the tests of the launcher define, also when run alone.
sys.path[:0] = [str(HERE), str(HERE / "cli" / "launch")]
sys.path.append(str(HERE.parent))  # experiments, which no distribution holds
torch.set_num_threads(1)
# The same examples every time, and no clock that decides about them.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
# Whoever started the tests in the background may have ignored it, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
