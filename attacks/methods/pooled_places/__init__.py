"""Places that max pooling took, and the maps and the image behind them."""

from bract.attacks.methods.pooled_places.blocks import Block
from bract.attacks.methods.pooled_places.cooling import Cooling, cooled
from bract.attacks.methods.pooled_places.equations import Equations
from bract.attacks.methods.pooled_places.smoothness import Roughness, Tied
from bract.attacks.methods.r_gap.activations import ACTIVATIONS

__all__ = ["ACTIVATIONS", "Block", "Cooling", "Equations", "Roughness", "Tied", "cooled"]
