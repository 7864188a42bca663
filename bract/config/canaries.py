"""Canaries: what an audit of epsilon asks consenting clients to include."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bract.config.work import Section


class CanaryConfig(Section):
    """Canaries that each consenting client includes by coins of its own, for an audit of epsilon.

    They cost accuracy, and the model has learned them: a run with canaries is for measuring. A
    client takes part only where its site's policy allows as many (``canaries``) and it keeps truth.

    Attributes
    ----------
    count
        Canaries of each client; of kind ``update`` in each round. 0 includes none.
    kind
        ``mislabelled``: held-out records of the site with another label. ``random``: noise with a
        label drawn at random. ``crafted``: such noise, changed until its gradient at the first
        model is nearly orthogonal to those of the client's records. ``update``: known
        directions in the place of the client's update, before it is clipped and noised; the
        client's own training then counts for nothing.
    """

    count: Annotated[int, Field(ge=0, le=10_000)] = 0
    kind: Literal["mislabelled", "random", "crafted", "update"] = "mislabelled"
