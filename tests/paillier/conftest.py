import pytest

from bract.paillier import PrivateKey, deal, generate_keypair
from bract.paillier.sharing import KeyShare

SMALL = 512


@pytest.fixture(scope="session")
def djn_key() -> PrivateKey:
    return generate_keypair(SMALL, insecure=True)


@pytest.fixture(scope="session")
def other_key() -> PrivateKey:
    return generate_keypair(SMALL, insecure=True)


@pytest.fixture(scope="session")
def standard_key() -> PrivateKey:
    return generate_keypair(SMALL, randomness="standard", insecure=True)


@pytest.fixture(scope="session")
def shares() -> list[KeyShare]:
    return deal(3, 5, SMALL, insecure=True)
