"""Which replies are captured, in what precision, and what gives way to them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from bract.captures.observation import Observation
from bract.captures.storing import CaptureStore
from bract.config.config import CaptureConfig
from bract.config.faults import first_problem
from bract.disk.files import readable_size
from bract.errors import BractError, shown
from bract.seeds import derive_seed
from bract.updates.rounding import rounded

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturePlan:
    """The plan of what a run captures.

    Attributes
    ----------
    config
        The section ``capture`` of a configuration; its ``store`` is not looked at.
    seed
        Draws with round and client the replies where ``config.fraction`` is below 1.
    """

    config: CaptureConfig = field(default_factory=CaptureConfig)
    seed: int = 0

    def takes_round(self, number: int) -> bool:
        """Return whether anything of a round, counted from 1, is captured."""
        config = self.config
        listed = config.rounds is None or number in config.rounds
        return config.enabled and listed and (number - 1) % config.every == 0

    def takes(self, number: int, client: str) -> bool:
        """Return whether a client's reply is; the same for the same seed, round and name."""
        if not self.takes_round(number):
            return False
        clients = self.config.clients
        if clients is not None and client not in clients:
            return False
        draw = derive_seed(self.seed, "capture", number, client) / 2**31
        return draw < self.config.fraction

    def missing(self, seen: Iterable[str]) -> list[str]:
        """Return the clients to capture that are none of those seen."""
        return sorted(set(self.config.clients or ()) - set(seen))

    def stored(self, observation: Observation) -> Observation:
        """Return an observation with its update in the precision to store."""
        if observation.rounded is not None:
            return observation  # by its client, to the half of its bytes
        update, loss = rounded(observation.update, self.config.dtype)
        return replace(observation, update=update, rounded=loss)

    def make_room(self, store: CaptureStore, number: int) -> None:
        """Remove the rounds that give way to a captured round; what fails is logged alone."""
        if self.config.keep_rounds is None:
            return
        try:
            for gone in store.retire(self.config.keep_rounds - 1, number):
                _log.warning(
                    "round %d was removed (captures: %d, %s) for round %d, by "
                    "capture.keep_rounds %d",
                    gone.round,
                    gone.captures,
                    readable_size(gone.size),
                    number,
                    self.config.keep_rounds,
                )
        except BractError as error:
            _log.warning("earlier rounds stay: %s", error)


def checked_plan(
    capture: CaptureConfig | Mapping[str, Any] | None,
    rounds: Collection[int] | None,
    seed: object,
) -> CapturePlan:
    """Return what `HonestButCurious` was configured to capture."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise BractError(
            f"HonestButCurious: seed is {shown(seed)}, expected a whole number", code="config-value"
        )
    if isinstance(capture, CaptureConfig):
        config = capture
    elif capture is None or isinstance(capture, Mapping):
        try:
            config = CaptureConfig.model_validate(dict(capture or {}))
        except ValidationError as error:
            raise BractError(
                f"HonestButCurious: capture: {first_problem(error)}", code="config-value"
            ) from None
    else:
        raise BractError(
            f"HonestButCurious: capture is {shown(capture)}, expected a CaptureConfig or a dict of "
            "its fields such as {'every': 5, 'dtype': 'float16'}",
            code="config-value",
        )
    if config.store is not None:
        raise BractError(
            "HonestButCurious: capture holds a store; give it as the argument store",
            code="config-conflict",
        )
    if rounds is None:
        return CapturePlan(config, seed)
    if config.rounds is not None:
        raise BractError(
            "HonestButCurious: rounds are in capture too; give them once", code="config-conflict"
        )
    strange = [r for r in rounds if not isinstance(r, int) or isinstance(r, bool) or r < 1]
    if strange:
        raise BractError(
            f"HonestButCurious: rounds holds {strange[0]!r}, expected numbers from 1",
            code="config-value",
        )
    return CapturePlan(config.model_copy(update={"rounds": sorted(set(rounds))}), seed)
