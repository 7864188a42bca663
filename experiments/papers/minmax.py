"""MinMax sampling of a vector, and the gradient that GLAUS makes of sampled ones.

MinMax sampling (Zhao et al., SIGMOD 2022) sends k coordinates of a client's gradient so that the
sum over clients is unbiased; GLAUS (Yang et al., TKDE 2023) attacks it. Neither text was at hand.
What is built here follows the code that the authors of GLAUS published: how coordinates are drawn,
and the attack, from ``main.py`` of their repository GLAUS; what is sent of a coordinate, from their
aggregator ``ugssa_aggregator.py`` in SecretFlow. AdaDefense's repository runs the same attack
(``GLAUS_test.py``). `threshold_of` and `readings` are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampled:
    """What one sampling lets out.

    Attributes
    ----------
    values
        As sent, 0 where a coordinate was not drawn; shape and type of the vector.
    kept
        bool, the coordinates that were drawn.
    threshold
        Score C of the first coordinate that was not drawn; 0 where all were.
    """

    values: Tensor
    kept: Tensor
    threshold: float


def keep_probability(values: Tensor, threshold: float) -> Tensor:
    """Return ``v^2 / (v^2 + C)``, the chance that a score is above the threshold C > 0.

    All coordinates then have one variance, ``v^2 (1 / p - 1) = C``: no choice of chances with as
    many coordinates in the mean has a smaller largest variance, hence the name.
    """
    square = values.square()
    return square / (square + threshold)


def sent_value(values: Tensor, threshold: float) -> Tensor:
    """Return ``v / p = v + C / v``: what is sent of a coordinate that is drawn; 0 for v = 0."""
    return torch.where(values == 0, 0.0, values + threshold / values)


def draw(values: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Draw coordinates: those of the largest scores ``(1 / u - 1) v^2``, u from U(0, 1).

    Given the scores of all others, a coordinate is drawn where its own is above the ``count``-th of
    theirs, so that `sent_value` is unbiased with ``count`` coordinates exactly.

    Parameters
    ----------
    values
        float ``(n,)``.
    count
        Coordinates to draw, 1 to n.

    Returns
    -------
    tuple
        bool ``(n,)``, and the threshold C.
    """
    drawn = torch.rand(len(values), generator=generator, dtype=torch.float64)
    scores = (1.0 / drawn.clamp_min(torch.finfo(torch.float64).tiny) - 1.0) * values.double() ** 2
    largest = scores.topk(min(count + 1, len(values)))
    kept = torch.zeros(len(values), dtype=torch.bool)
    kept[largest.indices[:count]] = True
    return kept, float(largest.values[count]) if count < len(values) else 0.0


def sample(values: Tensor, count: int, generator: torch.Generator) -> Sampled:
    """Draw ``count`` coordinates of a vector ``(n,)`` and return what is sent."""
    kept, threshold = draw(values, count, generator)
    return Sampled(torch.where(kept, sent_value(values, threshold), 0.0), kept, threshold)


def times_drawn(values: Tensor, count: int, times: int, generator: torch.Generator) -> Tensor:
    """Return how often each coordinate is drawn when one vector is sampled many times, int64."""
    found = torch.zeros(len(values), dtype=torch.int64)
    for _ in range(times):
        found += draw(values, count, generator)[0]
    return found


def glaus(times: Tensor, signs: Tensor, own: Tensor, aggregate: Tensor) -> Tensor:
    """Return the gradient that GLAUS puts in the place of the victim's.

    Larger coordinates are drawn more often, so the order of ``times`` stands for that of the
    magnitudes, and these are those of the attacker's own gradient in the same order. What was drawn
    has the sign that was sent, what was not that of the aggregate. Equal counts keep the order of
    the coordinates, which the published code leaves to its sort.

    Parameters
    ----------
    times
        How often each of the victim's coordinates was drawn, int64 ``(n,)``.
    signs
        Of what was sent, in -1, 0, 1; read where ``times`` is not 0.
    own
        Gradient of the attacker, who is a client with an image of the victim's class, ``(n,)``.
    aggregate
        Mean of all clients' gradients, ``(n,)``.
    """
    magnitudes = torch.empty_like(own)
    order = times.sort(descending=True, stable=True).indices
    magnitudes[order] = own.abs().sort(descending=True).values
    return magnitudes * torch.where(times > 0, signs, aggregate.sign())


def threshold_of(sent: Tensor) -> float:
    """Return C as one upload tells it: ``|v + C / v|`` is ``2 sqrt(C)`` at least.

    The bound is met at ``|v| = sqrt(C)``, where half the coordinates are drawn, so the smallest of
    many is near it. It is never below the true C.
    """
    return float((sent[sent != 0].abs().double().min() / 2) ** 2)


def readings(sent: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each coordinate most likely was, and the trust in it in [0, 1].

    ``u = v + C / v`` is quadratic in v, and its roots ``2 v = u +- sqrt(u^2 - 4 C)`` have the
    product C. Where magnitudes are spread evenly over orders of magnitude the larger root l is the
    likelier, by 1 to ``q = C / l^2``: it is taken, with trust ``1 - q``. What was not drawn has
    trust 0.
    """
    given = sent.double()
    root = (given.square() - 4.0 * threshold_of(sent)).clamp_min(0.0).sqrt()
    large = (given + given.sign() * root) / 2
    share = (given - large) / torch.where(large == 0, 1.0, large)
    return large.to(sent), torch.where(sent == 0, 0.0, 1.0 - share).to(sent)
