"""Capture what passes over a grid, whether a strategy or a loop of the app's own sends it."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeGuard

from flwr.app import Message
from flwr.serverapp import Grid

from bract.captures.observation import ClientDeclaration, ObservationStore
from bract.captures.remote import RemoteStore, local_folder
from bract.captures.stores import occupy
from bract.captures.storing import CaptureStore
from bract.config.config import CaptureConfig
from bract.disk.permissions import warn_if_open
from bract.errors import BractError, contained, one_line
from bract.inputs.base import what_is_audited
from bract.protocol.node_names import ClientNames
from bract.protocol.reading import checked_kind
from bract.schema.capture import UpdateKind
from bract.schema.claims import CLAIMS
from bract.schema.store import StoreOwner
from bract.server.account import LeftAccount
from bract.server.capture_folders import folder_of_run, owner_of_run, store_folder
from bract.server.capturing import checked_plan
from bract.server.claimed import claims_of
from bract.server.live_audit import AuditProcess, checked_attacks, checked_store
from bract.server.overhearing import heard, overhear, stop_overhearing
from bract.server.recorder import Recorder
from bract.strategies.polling import ForwardingGrid

_log = logging.getLogger(__name__)

Declared = ClientDeclaration | Mapping[str, Any] | None
"""An operator's declaration of every client's computation; None declares nothing."""

Store = ObservationStore | RemoteStore | Path | str
"""Where captures go: a folder, a URL of fsspec's, or a store that is taken as it is."""


def listen(
    grid: Grid,
    store: Store = "captures",
    *,
    declaration: Declared | Callable[[int], Declared] = None,
    rounds: Collection[int] | None = None,
    capture: CaptureConfig | Mapping[str, Any] | None = None,
    seed: int = 0,
    audit: str | Sequence[str] | None = None,
    every: int = 1,
    update: UpdateKind | None = None,
) -> ListeningGrid:
    """Return a grid whose train messages and replies are captured, for a loop without a strategy.

    Captured are the replies to messages of type ``train`` and of its actions, such as
    ``train.fit``; names and sizes of everything in every reply, whatever its type, are listed in
    ``left.jsonl``. A round is ``server-round`` in the message's config, or is counted. When the
    grid is closed, or no longer used, what was not captured is logged once, and a live audit ends.

    Examples
    --------
    ::

        @app.main()
        def main(grid, context):
            grid = listen(grid, store="captures")
            for server_round in range(1, 4):
                replies = grid.send_and_receive(messages(server_round))

    Parameters
    ----------
    grid
        The grid that Flower hands to the ServerApp.
    store, declaration, rounds, capture, seed, audit, every, update
        As `HonestButCurious` takes them.

    Raises
    ------
    BractError
        As `HonestButCurious` does, or if ``grid`` is none.
    """
    if not (hasattr(grid, "push_messages") and hasattr(grid, "send_and_receive")):
        kind = type(grid)
        raise BractError(
            f"listen: grid is a {kind.__module__}.{kind.__qualname__}, expected the "
            "flwr.serverapp.Grid that Flower hands to the ServerApp; a strategy goes into "
            "HonestButCurious",
            code="config-value",
        )
    listener = Listener(
        store,
        declaration=declaration,
        rounds=rounds,
        capture=capture,
        seed=seed,
        audit=audit,
        every=every,
        update=update,
    )
    return listener.listen(grid, end=True)


class Listener:
    """The capture of one run: its store, its recorder, and a live audit of it.

    Parameters
    ----------
    store, declaration, rounds, capture, seed, audit, every, update
        As `HonestButCurious` takes them.
    names
        Names of the clients, where the strategy binds them to nodes itself.
    update_dtype, preferred
        As `Recorder` takes them.
    older
        Whether a strategy of the older API hands over what came, which then passes no grid.
    strategy
        Whose claims of protection are written down.
    """

    def __init__(
        self,
        store: Store,
        *,
        declaration: Declared | Callable[[int], Declared] = None,
        rounds: Collection[int] | None = None,
        capture: CaptureConfig | Mapping[str, Any] | None = None,
        seed: int = 0,
        audit: str | Sequence[str] | None = None,
        every: int = 1,
        update: UpdateKind | None = None,
        names: ClientNames | None = None,
        update_dtype: str = "float32",
        preferred: str | None = None,
        older: bool = False,
        strategy: object = None,
    ) -> None:
        by_round = _by_round(declaration)
        self._plan = checked_plan(capture, rounds, seed)
        self._asked = store
        self._owner = owner_of_run()
        self.recorder = Recorder(
            self._placed(),
            by_round(1),
            self._plan,
            names or ClientNames(),
            by_round,
            update_dtype,
            checked_kind("HonestButCurious", update),
            preferred,
        )
        config = self._plan.config
        self.account = LeftAccount(
            self.recorder.names,
            lambda: self.recorder.store,
            enabled=config.enabled,
            values=config.values,
        )
        if config.enabled and not older:
            overhear(self.account)
        self._strategy = strategy
        self._attacks = None if audit is None else checked_attacks(audit, every)
        self._every = every
        if self._attacks is not None:
            checked_store(_folder_of(self.recorder.store))
        self._live_audit: AuditProcess | None = None
        self._announced = False
        self._ended = False

    def _placed(self) -> ObservationStore | RemoteStore:
        placed = _placed(self._asked, self._owner)
        placed.quota = self._plan.config.quota or placed.quota
        placed.compression = self._plan.config.compression
        return placed

    def listen(self, grid: Grid, *, end: bool = False) -> ListeningGrid:
        """Return a grid whose train messages and replies are captured.

        Parameters
        ----------
        end
            Whether the run ends with the grid.
        """
        run = _run_of(grid)
        self.begin(run)
        self.account.of_run(run)
        return ListeningGrid(grid, self, end=end)

    def begin(self, run_id: int | None = None) -> None:
        """Log, once, where the captures go, make the run's folder, and start the live audit.

        Parameters
        ----------
        run_id
            The run, where the process does not know it.

        Raises
        ------
        BractError
            If the folder belongs to another run or app.
        """
        if not self._announced:
            self._announced = True
            if self._owner is None and run_id is not None:
                self._owner = owner_of_run(run_id)
                self.recorder.store = self._placed()
            self._announce()
            self._note_claims()
        if self._attacks is not None and not self._ended:
            if self._live_audit is None:
                model = self.recorder.declaration.model
                self._live_audit = AuditProcess(
                    checked_store(_folder_of(self.recorder.store)),
                    self._attacks,
                    self._every,
                    [model] if model and ":" in model else [],
                )
            self._live_audit.start()

    def _announce(self) -> None:
        store, log = self.recorder.store, logging.getLogger("flwr")
        log.info("bract: %s", what_is_audited())
        log.info("bract: captures go to %s", store.place)
        if self._owner is not None and _is_own(store, self._owner):
            try:
                occupy(store.root, self._owner)
            except (BractError, OSError) as error:
                log.warning("bract: %s cannot be made: %s", store.place, one_line(error, 300))

    def _note_claims(self) -> None:
        """Write down what the strategy and the app claim of their protection."""
        if not self._plan.config.enabled:
            return
        try:
            with contained():
                for claim in claims_of(self._strategy):
                    line = json.dumps(claim.to_dict(), allow_nan=False)
                    self.recorder.store.note(CLAIMS, line)
        except Exception as error:  # noqa: BLE001 - around a third-party strategy nothing may raise
            _log.warning("claims of protection are not noted: %s", one_line(error, 300))

    def end(self) -> None:
        """Log what was not captured, once, and end the live audit."""
        self.recorder.tell_missing()
        self.recorder.tell_uncaptured()
        if self._live_audit is not None:
            self._live_audit.stop()

    def end_unused(self) -> None:
        """End a run that nothing else ended; say so if no message was ever seen."""
        if self._ended:
            return
        self._ended = True
        stop_overhearing(self.account)
        if not self._announced:
            logging.getLogger("flwr").warning(
                "bract: nothing was captured: the strategy in HonestButCurious was not started; "
                "a loop of your own captures over grid = bract.listen(grid, store=...)"
            )
            return
        self.end()


class ListeningGrid(ForwardingGrid):
    """A grid that hands on every call, and captures train messages and their replies."""

    def __init__(self, grid: Grid, listener: Listener, *, end: bool) -> None:
        super().__init__(grid)
        self._listener = listener
        self._recorder = listener.recorder
        self._account = listener.account
        self._recorder.connected = grid.get_node_ids
        self._end = weakref.finalize(self, listener.end_unused) if end else listener.end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Log what was not captured, and end a live audit; a second call does nothing."""
        self._end()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send, receive and capture."""
        messages = list(messages)
        self._listener.begin()
        with heard():
            replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        self._recorder.sent(messages)
        self._recorder.received(replies)
        self._account.sent(messages)
        self._account.came(replies)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send, and remember the messages."""
        messages = list(messages)
        self._listener.begin()
        with heard():
            ids = self.grid.push_messages(messages)
        self._recorder.sent(messages)
        self._account.sent(messages)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive and capture."""
        with heard():
            replies = list(self.grid.pull_messages(message_ids))
        self._recorder.received(replies, all_came=False)
        self._account.came(replies)
        return replies


def _run_of(grid: Grid) -> int | None:
    """Return the run of a grid; None where it knows none."""
    try:
        with contained():
            return int(grid.run.run_id)
    except Exception:  # noqa: BLE001 - a third-party grid may have none, or know it later
        return None


def _placed(store: Store, owner: StoreOwner | None) -> ObservationStore | RemoteStore:
    """Return the store of this run, in the folder that the operator of the server named."""
    if isinstance(store, RemoteStore):
        return store
    if isinstance(store, ObservationStore):
        placed = store_folder(store.root, owner)
        warn_if_open(placed)
        if placed == store.root:
            return store
        return ObservationStore(placed, models=store.models, quota=store.quota)
    folder = local_folder(store)
    if folder is None:
        return RemoteStore(str(store) if owner is None else f"{store}/{owner.run_id}")
    placed = folder_of_run(folder, owner)
    warn_if_open(placed)
    return ObservationStore(placed)


def _is_own(store: CaptureStore, owner: StoreOwner) -> TypeGuard[ObservationStore]:
    """Return whether a store is the folder of this run among those of an app's runs."""
    return isinstance(store, ObservationStore) and store.root.name == owner.run_id


def _folder_of(store: CaptureStore) -> Path:
    if not isinstance(store, ObservationStore):
        raise BractError(
            f"HonestButCurious: store is {store.place}; audit= attacks captures in a folder: name "
            "one, or audit a copy later (bract fetch)",
            code="config-conflict",
        )
    return store.root


def _by_round(
    declaration: Declared | Callable[[int], Declared],
) -> Callable[[int], ClientDeclaration]:
    """Return the declaration as a function of the round."""
    if not callable(declaration):
        fixed = _checked(declaration)
        return lambda _: fixed
    return lambda server_round: _checked(declaration(server_round))


def _checked(declaration: object) -> ClientDeclaration:
    if declaration is None:
        return ClientDeclaration()
    if isinstance(declaration, ClientDeclaration):
        return declaration
    if isinstance(declaration, Mapping):
        return ClientDeclaration.from_dict(declaration)
    raise BractError(
        f"HonestButCurious: declaration is a {type(declaration).__name__}, expected a "
        "ClientDeclaration, a dict of its fields such as {'model': 'my_app.task:Net'}, or a "
        "function of the round that returns one",
        code="config-value",
    )
