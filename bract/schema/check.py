"""How a description of an upload stands up to what was captured: the check of `bract.audit`."""

from __future__ import annotations

from typing import Literal

from bract.schema.record import Number, Public, Record

CheckState = Literal["confirmed", "contradicted", "open"]
"""``confirmed``: the described client, simulated on what the client kept, sends this update.
``contradicted``: it sends another one. ``open``: neither can be shown."""

Unjudged = Literal["misdescribed", "unconfirmed"]
"""Why that nothing was found of an upload shows nothing. ``misdescribed``: the client, repeated on
what it kept, sends another update. ``unconfirmed``: nothing was kept, and an invariant fails."""


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
    ``doubted`` says that repeating the client's steps gave another update, and that what is not
    known of them, such as the order of later passes, may be why. ``noise`` is the standard
    deviation of a coordinate of what no declaration explains; None where nothing was found beyond
    arithmetic. ``failing`` are invariants that every upload of such a client has and this one has
    not. Of ``tensors`` those that differ most come first. ``reason`` is one line.
    """

    state: Public[CheckState]
    cosine: Public[Number] = None
    scale: Public[Number] = None
    alternative: Public[str | None] = None
    alternative_cosine: Public[Number] = None
    doubted: Public[bool] = False
    noise: Public[Number] = None
    failing: Public[list[str]] = []
    tensors: Public[list[TensorCheck]] = []
    reason: Public[str] = ""

    @property
    def unjudged(self) -> Unjudged | None:
        """Return why the upload may not be judged; None where it may."""
        if self.state == "contradicted":
            return "misdescribed"
        return "unconfirmed" if self.state == "open" and self.failing else None


class UploadCheck(DescriptionCheck):
    """The check of one client's upload of a round."""

    round: Public[int]
    client: Public[str]
