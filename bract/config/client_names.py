"""Names that clients may have."""

from __future__ import annotations

import re

from bract.errors import BractError, one_line

MOST_CHARACTERS = 64
AGGREGATE = "aggregate"
"""Represents all clients' mean update in place of a client."""

RESERVED = frozenset({AGGREGATE})

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MOST_CHARACTERS - 1}}}")


def check_name(name: object) -> str:
    """Return a client's name that is safe as the name of a file or folder.

    Raises
    ------
    BractError
        If it is no text of letters, digits, ``_`` and ``-`` that begins with a letter or digit
        and has at most `MOST_CHARACTERS` characters, or is reserved.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() in RESERVED:
        raise BractError(
            f"the client name {one_line(repr(name), 80)} is not allowed; expected up to "
            f"{MOST_CHARACTERS} letters, digits, '_' and '-', the first a letter or digit, and not "
            f"{', '.join(sorted(RESERVED))}; set another `name` in the client's node config",
            code="config-value",
        )
    return name
