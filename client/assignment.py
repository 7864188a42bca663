"""The secret by which a site assigns its examples, where training claims an example's privacy.

The bound of `training.private` is on what one example changes. A split that is drawn over all
examples breaks it: one example more draws it again for every other one.
"""

from __future__ import annotations

import secrets
from contextlib import nullcontext

import torch
from flwr.app import RecordDict

from bract.client.defenses import DefenseState
from bract.client.site import Site
from bract.config import FederationConfig
from bract.crypto.randomness import SecretStream
from bract.disk import locked
from bract.errors import BractError, one_line

_SIZE = 32


def assignment_secret(config: FederationConfig, site: Site, state: RecordDict) -> bytes | None:
    """Return the secret for `bract.data.views.client_data`; None without `training.private`.

    It is kept in ``state-dir`` for all runs of the site, or else in ``state``, Flower's context of
    one run. A private seed gives the same one wherever it is used.

    Raises
    ------
    BractError
        If it cannot be read or written.
    """
    if config.training.private is None:
        return None
    if site.private_seed is not None:
        return bytes(SecretStream.derived(site.private_seed, "assignment").bytes(_SIZE))
    key = f".{site.name}-assignment"
    store = DefenseState(state, directory=site.state_dir, key=key, name="bract.assignment")
    lock = None if store.path is None else store.path.with_suffix(".lock")
    try:
        with nullcontext() if lock is None else locked(lock):
            held = store.load().get("secret")
            if held is None:
                held = torch.tensor(list(secrets.token_bytes(_SIZE)), dtype=torch.uint8)
                store.save({"secret": held})
    except OSError as error:
        raise BractError(
            f"{lock}: cannot be locked ({one_line(error)}); set state-dir in the node config to a "
            "folder this client may write",
            code="file-unwritable",
        ) from error
    if held.dtype != torch.uint8 or held.shape != (_SIZE,):
        raise BractError(
            f"{store.path}: no secret of {_SIZE} bytes; remove it", code="file-damaged"
        )
    return bytes(held.tolist())
