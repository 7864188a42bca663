"""A strategy: FedAvg in which no client's weight exceeds a cap."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bract.config import StrategySection
from bract.protocol.records import Contribution
from bract.strategies import FedAvg


class CappedConfig(StrategySection):
    """The ``strategy`` section of a federation's configuration."""

    implementation: ClassVar[str] = "bract_example.strategy:Capped"

    name: Literal["capped"]
    cap: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5


class Capped(FedAvg):
    """Average by number of examples, with weights of at most ``cap`` before they are rescaled."""

    def __init__(self, *, cap: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.cap = cap

    def weigh(self, contributions: tuple[Contribution, ...]) -> list[float]:
        """Return the weights, which sum to 1."""
        capped = [min(weight, self.cap) for weight in super().weigh(contributions)]
        return [weight / sum(capped) for weight in capped]
