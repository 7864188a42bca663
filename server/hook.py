"""The capture hook: the records of an honest-but-curious operator of the server.

Wrap any Flower Message-API strategy::

    strategy = HonestButCurious(FedAvg(...), store="captures")
    strategy.start(grid, initial_arrays, ...)

Nothing that the strategy computes changes: messages and replies pass through untouched, and a
capture that cannot be written is logged and listed in ``missed.jsonl``, never raised.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from bract.config.config import CaptureConfig
from bract.errors import BractError
from bract.inputs.base import what_is_audited
from bract.names import ClientNames
from bract.permissions import warn_if_open
from bract.protocol.observation import ClientDeclaration, ObservationStore
from bract.protocol.reading import checked_kind
from bract.protocol.remote import RemoteStore, local_folder
from bract.protocol.stores import occupy
from bract.protocol.storing import CaptureStore
from bract.schema.capture import UpdateKind
from bract.schema.store import StoreOwner
from bract.server.capturing import checked_plan
from bract.server.live_audit import AuditProcess, checked_attacks, checked_store
from bract.server.places import folder_of_run, owner_of_run, store_folder
from bract.server.recorder import Recorder
from bract.strategies.polling import ForwardingGrid

Declared = ClientDeclaration | Mapping[str, Any] | None
"""An operator's declaration of every client's computation; None declares nothing."""


class HonestButCurious(Strategy):
    """Run ``strategy`` unchanged and store one observation per client and round.

    Parameters
    ----------
    strategy
        Any Message-API strategy: Flower's, bract's or a third-party one.
    store
        Folder for the captures, in which each run has a folder of its own, ``captures/RUN_ID``
        (``captures/latest`` leads to the last one); a URL of fsspec's such as
        ``s3://bucket/folder``; or an `ObservationStore`, which is taken as it is. A relative folder
        is in the app's own, or, where the server's operator has set ``BRACT_CAPTURES``, below that.
    declaration
        The protocol's declaration (`bract.protocol.observation.ClientDeclaration`, or a dict of
        its fields): model, normalisation, learning rate, local steps and so on; or a function of
        the round that returns one, where a schedule decides the learning rate. Of a client's own
        claims only `bract.schema.ClientStatement` is taken; its other claims are compared
        and flagged in the observation's provenance. Names and shapes of parameters and buffers,
        the number of examples, and a train message's config for its client (``proximal-mu``,
        ``lr``, ``momentum``, ``weight-decay``, ``dropout``, ``batch-size``, ``local-steps``) are
        found out; declare 0 or another value where the app ignores it. What is not declared here
        can be declared afterwards, without training again: ``bract describe``.
    rounds
        Rounds to capture; None captures all.
    capture
        Which replies are captured, in what precision, and how much they may take: a
        `bract.config.CaptureConfig`, or a dict of its fields such as
        ``{"every": 5, "fraction": 0.2, "dtype": "float16", "quota": "2GB", "keep_rounds": 3}``.
    seed
        Draws the clients of ``capture``'s ``fraction``.
    audit
        Attack what is captured while training goes on: an attack's name such as ``"auto"``, or
        several. It runs in a process of its own that takes only idle processor time, ends with
        the run, and whose end, whatever its cause, the training does not notice.
    every
        Rounds from one that is attacked so to the next, from the first captured one on.
    update
        What the clients of an app of its own return: ``weights`` after training, a ``delta``
        (trained minus received weights), or the ``gradient``. None takes what resembles the weights
        that were sent for weights, and refuses everything else, in round 1.

    Raises
    ------
    BractError
        If the declaration, a round, ``capture``, ``audit`` or ``every`` is none, or the captures
        would be outside the operator's folder or in one of another run or app. Nothing is raised
        after that.
    """

    def __init__(
        self,
        strategy: Strategy,
        store: ObservationStore | RemoteStore | Path | str,
        *,
        declaration: Declared | Callable[[int], Declared] = None,
        rounds: Collection[int] | None = None,
        capture: CaptureConfig | Mapping[str, Any] | None = None,
        seed: int = 0,
        audit: str | Sequence[str] | None = None,
        every: int = 1,
        update: UpdateKind | None = None,
        protocol: ClientDeclaration | Mapping[str, Any] | None = None,
    ) -> None:
        if protocol is not None:
            if declaration is not None:
                raise BractError(
                    "HonestButCurious: protocol is declaration's old name; give one",
                    code="config-conflict",
                )
            warnings.warn(
                "HonestButCurious(protocol=...) is deprecated and leaves with the next release; "
                "call it declaration=...",
                DeprecationWarning,
                stacklevel=2,
            )
            declaration = protocol
        if not (hasattr(strategy, "configure_train") and hasattr(strategy, "start")):
            kind = type(strategy)
            raise BractError(
                f"HonestButCurious: strategy is a {kind.__module__}.{kind.__qualname__}, expected "
                "one of flwr.serverapp.strategy: apps of Flower's older API are not captured",
                code="config-value",
            )
        # A strategy of bract's binds names to nodes itself; both must come to the same names.
        names = getattr(strategy, "names", None)
        by_round = _by_round(declaration)
        self.strategy = strategy
        plan = checked_plan(capture, rounds, seed)
        self._owner = owner_of_run()
        placed = _placed(store, self._owner)
        placed.quota = plan.config.quota or placed.quota
        placed.compression = plan.config.compression
        self.recorder = Recorder(
            placed,
            by_round(1),
            plan,
            names if isinstance(names, ClientNames) else ClientNames(),
            by_round,
            str(getattr(strategy, "update_dtype", "float32")),
            checked_kind("HonestButCurious", update),
            getattr(strategy, "arrayrecord_key", None),
        )
        self._announced = False
        self._live_audit: AuditProcess | None = None
        if audit is not None:
            model = self.recorder.declaration.model
            self._live_audit = AuditProcess(
                checked_store(_folder_of(placed)),
                checked_attacks(audit, every),
                every,
                [model] if model and ":" in model else [],
            )

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the wrapped strategy's own loop over a grid that is listened to.

        All other arguments are handed on as they are given, also those that only the wrapped
        strategy, or a later Flower, knows.
        """
        if args:
            args = (self.listen(args[0]), *args[1:])
        elif "grid" in kwargs:
            kwargs["grid"] = self.listen(kwargs["grid"])
        try:
            return self.strategy.start(*args, **kwargs)
        finally:
            self.recorder.tell_missing()
            self.recorder.tell_nothing()
            if self._live_audit is not None:
                self._live_audit.stop()

    def listen(self, grid: Grid) -> Grid:
        """Return a grid whose train messages and replies are captured: for a loop of one's own.

        `start` does the same for the loop of the strategy.
        """
        self._announce()
        self._look_after_audit()
        return _ListeningGrid(grid, self.recorder, self._look_after_audit)

    def _announce(self) -> None:
        """Log, once, where the captures go, and make the run's folder."""
        if self._announced:
            return
        self._announced = True
        store, log = self.recorder.store, logging.getLogger("flwr")
        log.info("bract: %s", what_is_audited())
        log.info("bract: captures go to %s", store.place)
        if self._owner is not None and _is_own(store, self._owner):
            try:
                occupy(store.root, self._owner)
            except (BractError, OSError) as error:
                log.warning("bract: %s cannot be made: %s", store.place, error)

    def _look_after_audit(self) -> None:
        if self._live_audit is not None:
            self._live_audit.start()

    # The phases below serve where another strategy wraps this one and calls them itself.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate, and remember the messages."""
        self._announce()
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.recorder.connected = grid.get_node_ids
        self.recorder.sent(messages)
        self._look_after_audit()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Store the replies, then delegate."""
        replies = list(replies)
        self.recorder.received(replies)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Delegate."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Delegate."""
        self.strategy.summary()


class _ListeningGrid(ForwardingGrid):
    def __init__(self, grid: Grid, recorder: Recorder, sent: Callable[[], None]) -> None:
        super().__init__(grid)
        self._recorder = recorder
        self._sent = sent
        recorder.connected = grid.get_node_ids

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        self._sent()
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        self._recorder.sent(messages)
        self._recorder.received(replies)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self._sent()
        ids = self.grid.push_messages(messages)
        self._recorder.sent(messages)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(self.grid.pull_messages(message_ids))
        self._recorder.received(replies, all_came=False)
        return replies


def _placed(
    store: ObservationStore | RemoteStore | Path | str, owner: StoreOwner | None
) -> ObservationStore | RemoteStore:
    """Return the store of this run, in the folder that the operator of the server named."""
    if isinstance(store, RemoteStore):
        return store
    if isinstance(store, ObservationStore):
        placed = store_folder(store.root)
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
    """Whether a store is the folder of this run among those of an app's runs."""
    return isinstance(store, ObservationStore) and store.root.name == owner.run_id


def _folder_of(store: ObservationStore | RemoteStore) -> Path:
    if isinstance(store, RemoteStore):
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
