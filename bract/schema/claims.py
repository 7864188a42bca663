"""``claims.jsonl``: protection that a server's strategy or an app's code claims."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bract.schema.record import Line, Number, VersionedRecord

CLAIMS = "claims.jsonl"
"""Next to the captures: one `ProtectionClaim` a line."""


class ProtectionClaim(VersionedRecord):
    """The claim of one mechanism.

    Attributes
    ----------
    by
        Name of the class, such as ``LocalDpMod``.
    where
        ``server``, or file and line of the app's code.
    place
        Where it acts: on each update before it is sent (``client``), or on their mean (``server``).
    unit
        Whose change it covers.
    period
        How long one epsilon is for.
    epsilon, delta
        As claimed; None where only noise is.
    noise_multiplier
        Standard deviation of the noise over the clipping norm.
    clip
        Norm to which an update is clipped.
    sensitivity
        Largest change that the noise is for, where that is claimed apart.
    clients
        Updates in the mean.
    """

    kind: ClassVar[str] = "claims"
    remedy: ClassVar[str] = "use the bract version that wrote it"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    by: Line
    where: Line
    place: Literal["client", "server"]
    unit: Literal["example", "client"] = "client"
    period: Literal["round", "run"] = "round"
    epsilon: Number = None
    delta: Number = None
    noise_multiplier: Number = None
    clip: Number = None
    sensitivity: Number = None
    clients: int | None = None
