"""The capture hook: the records of an honest-but-curious operator of the server.

Wrap any Flower strategy, of the Message API or of the older one::

    strategy = HonestButCurious(FedAvg(...), store="captures")
    strategy.start(grid, initial_arrays, ...)

Nothing that the strategy computes changes: messages and replies pass through untouched, and a
capture that cannot be written is logged and listed in ``missed.jsonl``, never raised.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from bract.config.config import CaptureConfig
from bract.errors import BractError, contained, one_line
from bract.protocol.node_names import ClientNames
from bract.schema.capture import UpdateKind
from bract.server.listening import Declared, Listener, Store
from bract.server.older import (
    evaluations_of,
    holds_sums,
    is_older,
    reason_of,
    replies_of,
    requests_of,
    run_of,
)

_log = logging.getLogger(__name__)


class HonestButCurious(Strategy):
    """Run ``strategy`` unchanged and store one observation per client and round.

    Parameters
    ----------
    strategy
        Any strategy: Flower's, bract's or a third-party one, of the Message API
        (``flwr.serverapp.strategy``) or of the older one (``flwr.server.strategy``, which goes into
        ``ServerAppComponents`` or ``start_server`` as before).
    store
        Folder for the captures, in which each run has a folder of its own, ``captures/RUN_ID``
        (``captures/latest`` leads to the last one); a URL of fsspec's such as
        ``s3://bucket/folder``; or an `ObservationStore`, which is taken as it is. A relative folder
        is in the app's own, or, where the server's operator has set ``BRACT_CAPTURES``, below that.
    declaration
        The protocol's declaration (`bract.captures.observation.ClientDeclaration`, or a dict of
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
        If the strategy, the declaration, a round, ``capture``, ``audit`` or ``every`` is none, or
        the captures would be outside the operator's folder or in one of another run or app; where
        the process does not know its run, the latter is raised by `start`. Nothing is raised after
        that.
    """

    def __init__(
        self,
        strategy: Any,
        store: Store,
        *,
        declaration: Declared | Callable[[int], Declared] = None,
        rounds: Collection[int] | None = None,
        capture: CaptureConfig | Mapping[str, Any] | None = None,
        seed: int = 0,
        audit: str | Sequence[str] | None = None,
        every: int = 1,
        update: UpdateKind | None = None,
    ) -> None:
        self.older = is_older(strategy)
        new = hasattr(strategy, "configure_train") and hasattr(strategy, "start")
        if isinstance(strategy, type) or not (new or self.older):
            kind = strategy if isinstance(strategy, type) else type(strategy)
            raise BractError(
                f"HonestButCurious: strategy is {'the class' if kind is strategy else 'a'} "
                f"{kind.__module__}.{kind.__qualname__}, expected a strategy such as "
                "FedAvg() of flwr.serverapp.strategy, or of flwr.server.strategy in Flower's older "
                "API; a loop without a strategy uses bract.listen(grid, store=...)",
                code="config-value",
            )
        if self.older:
            # Where an app asks whether it is a strategy of that API.
            from flwr.server.strategy import Strategy as OlderStrategy

            OlderStrategy.register(type(self))
        self.strategy = strategy
        # A strategy of bract's binds names to nodes itself; both must come to the same names.
        names = getattr(strategy, "names", None)
        self._listener = Listener(
            store,
            declaration=declaration,
            rounds=rounds,
            capture=capture,
            seed=seed,
            audit=audit,
            every=every,
            update=update,
            names=names if isinstance(names, ClientNames) else None,
            update_dtype=str(getattr(strategy, "update_dtype", "float32")),
            preferred=getattr(strategy, "arrayrecord_key", None),
            older=self.older,
            strategy=strategy,
        )
        self.recorder = self._listener.recorder
        weakref.finalize(self, self._listener.end_unused)

    def __getattr__(self, name: str) -> Any:
        """Delegate what else an app asks of its strategy."""
        if name.startswith("__") or name == "strategy":
            raise AttributeError(f"HonestButCurious has no attribute {name!r}")
        return getattr(self.strategy, name)

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
            result: Result = self.strategy.start(*args, **kwargs)
            return result
        finally:
            self._listener.end()

    def listen(self, grid: Grid) -> Grid:
        """Return a grid whose train messages and replies are captured.

        `start` does the same for the loop of the strategy.
        """
        return self._listener.listen(grid)

    # The phases below serve where another strategy wraps this one and calls them itself.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate, and remember the messages."""
        self._listener.begin()
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.recorder.connected = grid.get_node_ids
        self.recorder.sent(messages)
        self._listener.account.sent(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Store the replies, then delegate."""
        replies = list(replies)
        self.recorder.received(replies)
        self._listener.account.came(replies)
        arrays: tuple[ArrayRecord | None, MetricRecord | None]
        arrays = self.strategy.aggregate_train(server_round, replies)
        return arrays

    def configure_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate."""
        return self.strategy.configure_evaluate(*args, **kwargs)

    def aggregate_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """List what the replies hold, then delegate."""
        if self.older:
            self._older("evaluations", self._scored, *args[:2])
        elif len(args) > 1:
            replies = list(args[1])
            self._listener.account.came(replies)
            args = (args[0], replies, *args[2:])
        return self.strategy.aggregate_evaluate(*args, **kwargs)

    def summary(self) -> None:
        """Delegate."""
        self.strategy.summary()

    # Of the older API.

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate."""
        return self.strategy.initialize_parameters(*args, **kwargs)

    def configure_fit(self, server_round: int, *args: Any, **kwargs: Any) -> Any:
        """Delegate, and remember the instructions."""
        instructions = self.strategy.configure_fit(server_round, *args, **kwargs)
        self._older("instructions", self._configured, server_round, instructions)
        return instructions

    def aggregate_fit(
        self, server_round: int, results: Any, failures: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Store the results, then delegate."""
        self._older("results", self._came, server_round, results, failures)
        return self.strategy.aggregate_fit(server_round, results, failures, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate."""
        return self.strategy.evaluate(*args, **kwargs)

    def _older(self, what: str, capture: Callable[..., None], number: int, *args: Any) -> None:
        try:
            with contained():
                capture(number, *args)
        except Exception as error:  # noqa: BLE001 - around a third-party strategy nothing may raise
            _log.error("round %s: the %s are not captured: %s", number, what, one_line(error, 500))

    def _configured(self, server_round: int, instructions: Any) -> None:
        self._listener.begin(run_of(instructions))
        requests = requests_of(server_round, instructions)
        self.recorder.sent(requests)
        self._listener.account.sent(requests)

    def _came(self, server_round: int, results: Any, failures: Any) -> None:
        if holds_sums(results):
            raise BractError(
                "every client's result is the same sum, as under secure aggregation, so no "
                "client's update reached the strategy",
                code="update-refused",
            )
        replies = replies_of(server_round, results)
        self.recorder.received(replies, reason=reason_of(failures))
        self._listener.account.came(replies)

    def _scored(self, server_round: int, results: Any) -> None:
        self._listener.account.came(evaluations_of(server_round, results))
