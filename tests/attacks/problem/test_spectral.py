"""Vectors of spectral norms that were not sent, where the weight gives none."""

from __future__ import annotations

import torch
from refusals import refused
from torch import nn

from bract.attacks.problem.spectral import take_converged

parametrizations = nn.utils.parametrizations


def test_a_weight_that_is_not_finite_is_refused() -> None:
    net = parametrizations.spectral_norm(nn.Linear(3, 2))
    sent = {n: torch.full_like(p, torch.nan) for n, p in net.named_parameters()}
    with refused("model-unsuited", "is not finite"):
        take_converged(net, sent, {})


def test_a_weight_that_another_parametrization_changes_first_is_refused() -> None:
    net = parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(3, 2)))
    with refused("model-unsuited", "another parametrization"):
        take_converged(net, dict(net.named_parameters()), {})
    nn.utils.parametrize.remove_parametrizations(net, "weight")
    once = parametrizations.spectral_norm(nn.Linear(3, 2))
    take_converged(once, dict(once.named_parameters()), {})
