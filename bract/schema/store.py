"""``store.json``: the run that a folder of captures is of."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bract.schema.record import VersionedRecord

STORE_SCHEMA: Literal[1] = 1

RunId = Annotated[str, Field(pattern=r"^[0-9]{1,20}$")]


class StoreOwner(VersionedRecord):
    """The one run whose captures a folder holds.

    ``app`` is the name of its manifest, None where the process that wrote it has none. ``started``
    is in seconds since the epoch.
    """

    kind: ClassVar[str] = "store"
    remedy: ClassVar[str] = "use the bract version that wrote it"

    schema_version: Literal[1] = Field(default=STORE_SCHEMA, alias="schema")
    run_id: RunId
    app: str | None = None
    started: float
