"""``sites.json``: which sites a federation has, with which keys, and which were revoked."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from bract.disk import read_named
from bract.disk.named import unreadable
from bract.errors import BractError
from bract.schema.record import Record, VersionedRecord

_MOST_BYTES = 64 << 20
"""Bytes of `sites.json` that are read."""


class Issued(Record):
    """The issued keys and names of one site.

    Attributes
    ----------
    public_key
        Of its SuperNode, one line as OpenSSH writes it.
    partition
        Its part of the data, from 0.
    issued, revoked
        When, ISO 8601, UTC; None where it was not revoked.
    identity
        Its public identity in encrypted runs whose keys come in-band, in hexadecimal.
    """

    public_key: str
    partition: int
    issued: str
    identity: str | None = None
    revoked: str | None = None


class Sites(VersionedRecord):
    """The sites by name; a name that was revoked and issued again has its new key here.

    Attributes
    ----------
    sites
        The last that was issued under each name.
    former
        Revoked public keys of names that were issued again.
    """

    kind: ClassVar[str] = "list of sites"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    sites: dict[str, Issued] = Field(default_factory=dict)
    former: list[str] = Field(default_factory=list)

    @property
    def active(self) -> dict[str, Issued]:
        """The sites that may connect."""
        return {name: site for name, site in self.sites.items() if site.revoked is None}

    @property
    def revoked_keys(self) -> list[str]:
        """The public keys that must not connect."""
        gone = [site.public_key for site in self.sites.values() if site.revoked is not None]
        return [*self.former, *gone]


def read_sites(path: Path) -> Sites:
    """Read ``sites.json``."""
    try:
        text = read_named(path, most=_MOST_BYTES)
    except OSError as error:
        raise unreadable(path, error, BractError) from error
    return Sites.parse_text(text, source=str(path))
