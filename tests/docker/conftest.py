import pytest
from containers import ROOT
from engine import Project, build_gateway


@pytest.fixture(scope="session")
def images() -> None:
    """Build the images once; the cache answers where nothing changed."""
    Project("bract-test", ROOT).compose("build", timeout=1700)
    build_gateway()
