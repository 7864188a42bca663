"""How a description of an upload stands up to what was captured: the check of `bract.audit`."""

from __future__ import annotations

from typing import Literal

from bract.schema.record import Number, Public, Record

CheckState = Literal["confirmed", "contradicted", "open"]
"""``confirmed``: the described client, simulated on what the client kept, sends this update.
``contradicted``: it sends another one. ``open``: neither can be shown."""


class TensorCheck(Record):
    """One tensor of an upload, compared with the simulated one.

    ``scale`` is the factor from simulated to captured along their common direction, ``share`` that
    of the whole squared difference which is this tensor's.
    """

    name: Public[str]
    cosine: Public[Number] = None
    scale: Public[Number] = None
    share: Public[Number] = None


class DescriptionCheck(Record):
    """Whether an upload is what its description says.

    ``cosine`` and ``scale`` compare the simulated update with the captured one, over all tensors;
    None where nothing was simulated, as where the client kept nothing. ``alternative`` is another
    description that gives the captured update, in words, and ``alternative_cosine`` how well.
    ``failing`` are invariants that every upload of such a client has and this one has not. Of
    ``tensors`` those that differ most come first. ``reason`` is one line.
    """

    state: Public[CheckState]
    cosine: Public[Number] = None
    scale: Public[Number] = None
    alternative: Public[str | None] = None
    alternative_cosine: Public[Number] = None
    failing: Public[list[str]] = []
    tensors: Public[list[TensorCheck]] = []
    reason: Public[str] = ""
