"""Which releases work together: those of one protocol number."""

from __future__ import annotations

import pytest

import bract
from bract.errors import BractError
from bract.versions import PROTOCOL, check_release, release


def test_releases_of_one_protocol_number_work_together() -> None:
    assert release() == f"{bract.__version__}/{PROTOCOL}"
    check_release(release())
    check_release(f"9.9.9/{PROTOCOL}")


@pytest.mark.parametrize(
    ("theirs", "older"),
    [
        (f"9.9.9/{PROTOCOL + 1}", "upgrade this client"),
        (f"0.0.1/{PROTOCOL - 1}", "upgrade the server"),
        ("0.1.0", "upgrade the server"),
        ("0.1.0/x", "upgrade the server"),
        ("/" + "9" * 5000, "upgrade the server"),
        ("None", "upgrade the server"),
    ],
)
def test_another_is_refused_by_both_versions_and_the_side_to_upgrade(
    theirs: str, older: str
) -> None:
    with pytest.raises(BractError, match=older) as raised:
        check_release(theirs)
    said = str(raised.value)
    assert theirs.partition("/")[0] in said and bract.__version__ in said
    assert "\n" not in said and len(said) < 400
