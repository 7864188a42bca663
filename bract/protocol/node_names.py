"""Names of clients, bound to Flower's node ids for a run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable

from bract.config.client_names import check_name
from bract.errors import BractError

_log = logging.getLogger(__name__)

_OF_NODE = re.compile(r"node-(?P<id>\d+)", re.IGNORECASE)


class ClientNames:
    """Names bound to Flower's node ids for a run.

    The first node that claims a name has it until it has left the federation; a node that has a
    name keeps it. Names that differ in case only are the same name, because some file systems
    hold them to be. ``node-<id>`` belongs to the node of that id.

    Attributes
    ----------
    by_node
        Node id to name, in the order in which the names were claimed.
    registered
        Node id to the name under which the operator registered its key. No other node may claim
        that name, though it be the first.
    """

    def __init__(self) -> None:
        self.registered: dict[int, str] = {}
        self.by_node: dict[int, str] = {}

    def of(self, node_id: int) -> str:
        """Return a node's name, or ``node-<id>`` where it has none."""
        return self.by_node.get(node_id, node_name(node_id))

    def claimed(self, node_id: int, name: object) -> bool:
        """Return whether a node may bear the name in an error of its own; binds nothing."""
        try:
            wanted = check_name(name)
        except BractError:
            return False
        own = _OF_NODE.fullmatch(wanted)
        if own and int(own["id"]) != node_id:
            return False
        return (
            self.by_node.get(node_id, wanted) == wanted
            and self._holder(wanted) in (None, node_id)
            and self._registrant(node_id, wanted) is None
        )

    def claim(
        self, node_id: int, name: object, connected: Callable[[], Iterable[int]] | None = None
    ) -> str:
        """Bind a name to a node and return it.

        Parameters
        ----------
        connected
            Returns the ids of the nodes that are connected now; asked only where another node
            has the name. None: no node has left.
        """
        wanted = check_name(name)
        own = _OF_NODE.fullmatch(wanted)
        if own and int(own["id"]) != node_id:
            raise BractError(
                f"claims the name {wanted!r}, which stands for another node",
                code="identity-refused",
            )
        mine = self.by_node.get(node_id)
        if mine is not None and mine != wanted:
            raise BractError(
                f"claims the name {wanted!r}, but has called itself {mine!r} before",
                code="identity-refused",
            )
        registrant = self._registrant(node_id, wanted)
        if registrant is not None:
            raise BractError(
                f"claims the name {wanted!r}, under which node {registrant} is registered; set its "
                "own `name` in its node config",
                code="identity-refused",
            )
        holder = self._holder(wanted)
        if holder is not None and holder != node_id:
            if connected is None or holder in set(connected()):
                raise BractError(
                    f"claims the name {wanted!r}, which is node {holder}'s; give every client a "
                    "`name` of its own in its node config",
                    code="identity-refused",
                )
            _log.warning("%s is node %d from now on; node %d has left", wanted, node_id, holder)
            del self.by_node[holder]
        self.by_node[node_id] = wanted
        return wanted

    def _registrant(self, node_id: int, name: str) -> int | None:
        """Return the node that is registered under a name, where this one is not."""
        same = [n for n, held in self.registered.items() if held.casefold() == name.casefold()]
        return None if not same or node_id in same else same[0]

    def _holder(self, name: str) -> int | None:
        same = (n for n, held in self.by_node.items() if held.casefold() == name.casefold())
        return next(same, None)


def node_name(node_id: int) -> str:
    """Return what the node of this id is called where its client gives no name."""
    return f"node-{node_id}"
