"""Initialisation of the first global model."""

from __future__ import annotations

import torch
from torch import nn

from bract.errors import BractError

INITIALISERS = ("default", "uniform")


def initialise(model: nn.Module, how: str, seed: int) -> nn.Module:
    """Draw the parameters of ``model`` anew, in place.

    Parameters
    ----------
    how
        ``default``: PyTorch's own initialisation, which deployments use. ``uniform``: every
        parameter from U(-0.5, 0.5), the setting of the GRNN paper (thesis, section 3.3).
    seed
        The draw depends on this alone; the global generator is left as it was.

    Returns
    -------
    nn.Module
        The same model.
    """
    if how not in INITIALISERS:
        raise BractError(
            f"unknown model.init {how!r}; expected one of {', '.join(INITIALISERS)}",
            code="unknown-name",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if how == "default":
            _reset(model)
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.uniform_(-0.5, 0.5)
    return model


def _reset(module: nn.Module) -> None:
    """Reset a module and what it holds, unless it resets that itself (``resets_children``)."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    if not getattr(module, "resets_children", False):
        for child in module.children():
            _reset(child)
