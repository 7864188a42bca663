"""What share of a client's data each group has, read from its update."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

RIDGE = 1e-3
"""Share of the mean squared norm that is added, so that groups alike do not divide by zero."""


def group_shares(rows: Tensor, groups: Tensor, count: int, update: Tensor) -> Tensor:
    """Return the estimated share of each group in a client's data, float64 ``(count,)``.

    The update is explained by the mean gradients of known records of each group, which the client
    did not train on, with coefficients that are not negative; these are scaled to a sum of 1. Where
    nothing is explained, or no record of a group is known, its share is 0.

    Parameters
    ----------
    rows
        Gradients of N known records, ``(N, D)``.
    groups
        Their groups, int64 ``(N,)`` in ``[0, count)``.
    update
        What the client moved by, ``(D,)``.
    """
    from scipy.optimize import nnls

    present = [g for g in range(count) if bool((groups == g).any())]
    means = torch.stack([rows[groups == g].to(torch.float64).mean(0) for g in present])
    gram = means @ means.T
    ridge = RIDGE * float(gram.diagonal().mean()) + 1e-30
    root = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
    wanted = torch.linalg.solve_triangular(
        root, (means @ update.to(torch.float64))[:, None], upper=False
    )
    found, _ = nnls(root.T.numpy(), wanted[:, 0].numpy())
    shares = torch.zeros(count, dtype=torch.float64)
    total = float(found.sum())
    if total > 0.0:
        shares[present] = torch.from_numpy(np.asarray(found / total))
    return shares


def apart(one: Tensor, other: Tensor) -> float:
    """Return the total variation distance of two lists of shares, in [0, 1]."""
    return float((one - other).abs().sum() / 2)
