"""Which releases work together: those of one protocol number."""

from __future__ import annotations

import pytest
from refusals import refused

import bract
from bract.installed import PROTOCOL, check_release, release


def test_releases_of_one_protocol_number_work_together() -> None:
    assert release() == f"{bract.__version__}/{PROTOCOL}"
    check_release(release())
    check_release(f"9.9.9/{PROTOCOL}")


@pytest.mark.parametrize(
    ("theirs", "older"),
    [
        (f"9.9.9/{PROTOCOL + 1}", ("bract-version",)),
        (f"0.0.1/{PROTOCOL - 1}", ("bract-version",)),
        ("0.1.0", ("bract-version", "0.1.0")),
        ("0.1.0/x", ("bract-version",)),
        ("/" + "9" * 5000, ("bract-version",)),
        ("None", ("bract-version",)),
    ],
)
def test_another_is_refused_by_both_versions_and_the_side_to_upgrade(
    theirs: str, older: tuple[str, ...]
) -> None:
    with refused(*older) as raised:
        check_release(theirs)
    said = str(raised.value)
    assert theirs.partition("/")[0] in said and bract.__version__ in said
    assert "\n" not in said and len(said) < 400
