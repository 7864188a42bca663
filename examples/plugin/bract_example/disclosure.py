"""A rule of disclosure: flags what is called a postcode, which places people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bract.server import DisclosureRule
from bract.server.things import About, Thing


class Postcodes(DisclosureRule):
    """Looks at names alone: of a value, or of a key in a text that is JSON."""

    name = "postcodes"
    reason = "may hold postcodes, which place people"

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:
        """Return what is called so."""
        del about
        return [thing for thing in things if thing.words & {"zip", "postcode", "postcodes"}]
