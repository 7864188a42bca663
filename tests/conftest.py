import sys
from pathlib import Path

import pytest
import torch

from bract.paillier import KeyShare, PrivateKey, deal, generate_keypair

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


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
