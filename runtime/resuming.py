"""A SuperNode goes on with an upload that the SuperLink no longer takes parts of.

Flower's SuperNode sends the list of a message's parts, is told which of them the SuperLink lacks,
and then sends those, each again and again while the link is away. A part is refused where the
SuperLink has it already, as where the link went before its answer, and where the upload has rested
for three minutes, after which the SuperLink forgets it. Flower's gives up then: the update
is lost, and the round waits for it. Here the SuperNode sends the list again, under which the
SuperLink names what it still lacks, and goes on with that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

from bract.installed.flower import SUPERNODE, is_of_flower
from bract.runtime import transfers
from bract.runtime.rule import Rule

AGAIN = 5
"""How often the list of one message is sent again before the upload fails."""

_PAUSE = 0.1

_log = logging.getLogger(__name__)

Send = Callable[[Any, Any, float], tuple[set[str], str]]
Push = Callable[[int, str, str, bytes], None]


class Upload:
    """One message's upload: Flower's two functions, and what to do where a part is refused.

    Parameters
    ----------
    send
        Sends a message's list of parts; returns the ids of those that the SuperLink lacks, and the
        id of a session under which it takes them.
    push
        Sends one part, by run, session and part id; raises an error of Flower's if it is refused.
    content
        Returns a part by its id, nothing where its ClientApp has not handed it over yet.
    """

    def __init__(self, send: Send, push: Push, content: Callable[[str], bytes]) -> None:
        self._send, self._push, self._content = send, push, content
        self._lock = threading.Lock()
        self._message: tuple[Any, Any, float] | None = None
        self._session = ""
        self._left = AGAIN

    def send(self, message: Any, tree: Any, runtime: float) -> tuple[set[str], str]:
        """Send the list of a message's parts."""
        self._message, self._left = (message, tree, runtime), AGAIN
        missing, self._session = self._send(message, tree, runtime)
        return missing, self._session

    def push(self, run_id: int, session: str, part: str, content: bytes) -> None:
        """Send one part; where it is refused, send all that the SuperLink lacks.

        Raises
        ------
        Exception
            Flower's, if parts are refused under every session.
        """
        with self._lock:
            # Another part was refused meanwhile, and all that lacked was sent.
            if session != self._session:
                return
        try:
            self._push(run_id, session, part, content)
        except Exception as error:
            if not is_of_flower(error):
                raise
            with self._lock:
                if session == self._session:
                    self._go_on(run_id)

    def _go_on(self, run_id: int) -> None:
        assert self._message is not None
        while True:
            self._left -= 1
            missing, session = self._send(*self._message)
            _log.warning("the SuperLink refused a part of an update; it lacks %d", len(missing))
            if not missing and self._left > 0:
                # It has this part, or takes no other list of a message that it has handed on.
                return
            try:
                self._push_all(partial(self._push, run_id, session), missing)
            except Exception as error:
                if self._left <= 0 or not is_of_flower(error):
                    raise
            else:
                self._session = session
                return

    def _push_all(self, push: Callable[[str, bytes], None], parts: set[str]) -> None:
        """Send parts, several at once; the first that is refused ends it."""
        with ThreadPoolExecutor(transfers.MOST) as several:
            sent = [several.submit(push, *part) for part in self._contents(parts)]
            try:
                for part in as_completed(sent):
                    part.result()
            finally:
                several.shutdown(wait=False, cancel_futures=True)

    def _contents(self, parts: set[str]) -> Iterator[tuple[str, bytes]]:
        for part in parts:
            while not (content := self._content(part)):
                time.sleep(_PAUSE)
            yield part, content


def _go_on(inner: Callable[..., None]) -> Callable[..., None]:
    def push_messages(*, object_store: Any, send: Send, push_object: Push, **others: Any) -> None:
        upload = Upload(send, push_object, object_store.get)
        inner(**others, object_store=object_store, send=upload.send, push_object=upload.push)

    return push_messages


_UPLOADS = f"{SUPERNODE}:_push_messages"

RULE = Rule(
    name="resumed uploads",
    kind="reliability",
    commands=("flower-supernode",),
    needs=(f"{_UPLOADS}(object_store, send, push_object)",),
    does="An upload goes on where the SuperLink refuses a part that it has, or forgot the upload.",
    without="The update of a site whose link broke off is lost, and the round waits for it.",
    put=lambda _: {_UPLOADS: _go_on},
)
