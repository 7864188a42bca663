import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

SPARE = 2 << 30
"""Bytes of address space above what the process has, so that a greedy parser fails by itself."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-examples",
        type=int,
        default=None,
        help="inputs a parser for tests/fuzz; without it each parser's own small number",
    )


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Give the process little more memory than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
