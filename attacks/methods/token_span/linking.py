"""Which tokens of several texts belong together, by the slopes of the loss at each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDS = 4
"""Times that a text's mean slope and its tokens follow from each other."""


@dataclass(frozen=True)
class Linked:
    """Tokens at positions, with the slopes of the loss at their outputs.

    Once the inputs X of the first layers are known, their gradients ``D^T X`` give the output
    gradients D. What the tokens of one text pass to its output is weighed by the same later
    gradients, so their rows of D point the same way; those of another text, another way.

    Attributes
    ----------
    tokens, positions
        int64 ``(N,)``.
    slopes
        Rows of unit norm, ``(N, outputs)``.
    """

    tokens: Tensor
    positions: Tensor
    slopes: Tensor

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        positions: Tensor,
        inputs: Tensor,
        gradients: Sequence[Tensor],
    ) -> Linked:
        """Solve for the slopes.

        Parameters
        ----------
        inputs
            What enters the layers at each token, ``(N, width)``.
        gradients
            ``(outputs, width)`` of each layer with these inputs.
        """
        joined = torch.cat([g.double() for g in gradients])
        slopes = torch.linalg.lstsq(inputs.double().T, joined.T, driver="gelsd").solution
        return cls(tokens, positions, slopes / slopes.norm(dim=1, keepdim=True).clamp_min(1e-30))

    def text(self, seed: int, ends: Sequence[int], special: Tensor) -> Tensor:
        """Return the tokens of the text that one of them is in, as far as slopes tell, int64.

        Parameters
        ----------
        seed
            Place of that token.
        ends
            Lengths that a text can have.
        special
            Tokens that end a text; without any, it is as long as the longest.
        """
        centre = self.slopes[seed]
        for _ in range(_ROUNDS):
            near = self.slopes @ centre
            near[seed] = 1.0
            ending = {length: self._ending(near, length, special) for length in ends}
            length = max(ending, key=lambda one: ending[one])
            chosen = [
                int(places[near[places].argmax()])
                for position in range(length)
                if len(places := (self.positions == position).nonzero().flatten())
            ]
            # The median: tokens that several texts share have the sum of their slopes.
            centre = self.slopes[chosen].median(dim=0).values
            centre = centre / centre.norm().clamp_min(1e-30)
        found = self.tokens[chosen].clone()
        if len(special) and not bool(torch.isin(found[-1:], special)):
            last = (self.positions == length - 1) & torch.isin(self.tokens, special)
            if bool(last.any()):
                found[-1] = self.tokens[last][0]
        return found

    def _ending(self, near: Tensor, length: int, special: Tensor) -> float:
        last = (self.positions == length - 1) & torch.isin(self.tokens, special)
        return float(near[last].max()) if bool(last.any()) else -1.0
