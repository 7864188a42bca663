"""A client's state of an encrypted run between messages: key, identity, global model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bract.client.defenses import DefenseState
from bract.files import write_tensors
from bract.paillier.exchange import Identity, make_identity
from bract.protocol.update import Tensors

_log = logging.getLogger(__name__)

_MODEL = "model."


class EncryptedState:
    """Private state of one client in one run.

    Parameters
    ----------
    store
        Its storage between messages. State of another run in it is dropped.
    session
        Identity of the run.
    """

    def __init__(self, store: DefenseState, session: str) -> None:
        self._store = store
        self._state = store.load()
        if _from(self._state.get("session")) != session.encode():
            self._state = {"session": _to(session.encode())}

    @property
    def model_round(self) -> int:
        """The round after which `model` is the global model; -1 where there is none yet."""
        return int(self._state.get("round", torch.tensor(-1)))

    @property
    def model(self) -> Tensors:
        """The plain global model."""
        return {n.removeprefix(_MODEL): v for n, v in self._state.items() if n.startswith(_MODEL)}

    def keep_model(self, model: Mapping[str, Tensor], model_round: int) -> None:
        """Keep the model of a round."""
        held = {f"{_MODEL}{name}": value for name, value in model.items()}
        self._keep(round=torch.tensor(model_round), **held)

    @property
    def key(self) -> bytes:
        """Text of the key that came through the server; empty where none did."""
        return _from(self._state.get("key"))

    def keep_key(self, text: bytes, *, unconfirmed: bool) -> None:
        """Keep a key, and whether the run has not used it yet."""
        self._keep(key=_to(text), unconfirmed=torch.tensor(unconfirmed))

    @property
    def unconfirmed(self) -> bool:
        """Whether this client generated `key` and the run has not used it yet."""
        return bool(self._state.get("unconfirmed", torch.tensor(False)))

    def confirm_key(self) -> None:
        """Note that the run uses `key`."""
        self._keep(unconfirmed=torch.tensor(False))

    @property
    def identity(self) -> Identity | None:
        """The X25519 key pair for which others seal boxes."""
        both = _from(self._state.get("identity"))
        return Identity(both[:32], both[32:]) if both else None

    def new_identity(self) -> Identity:
        """Make a key pair and keep it."""
        identity = make_identity()
        self._keep(identity=_to(identity.private + identity.public))
        return identity

    def write_model(self, folder: Path | None, name: str) -> Path | None:
        """Write the model to ``<folder>/<name>-final.safetensors``, mode 0600."""
        if folder is None:
            _log.warning("no state-dir in the node config: the final model is not kept")
            return None
        return write_tensors(folder / f"{name}-final.safetensors", self.model, private=True)

    def _keep(self, **tensors: Tensor) -> None:
        self._state = {**self._state, **tensors}
        self._store.save(self._state)


def _to(text: bytes) -> Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def _from(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.numpy().tobytes()
