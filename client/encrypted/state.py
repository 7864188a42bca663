"""A client's state of an encrypted run between messages: key, identity, global model.

It belongs to one run, by Flower's run id and the digest of the whole configuration. A resumed run
has another run id and the same session: it states the runs that it continues, and a client goes on
in it with the state of the last of them, where the configuration is the same but for what ``bract
run --resume`` may change. In a run that it has left, it answers nothing more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bract.client.defenses import DefenseState
from bract.config.agreed import FREE_ON_RESUME, AgreedRun
from bract.disk.tensor_files import write_tensors
from bract.errors import BractError
from bract.paillier.exchange import Identity, make_identity
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)

_MODEL = "model."


class EncryptedState:
    """Private state of one client in one run.

    Parameters
    ----------
    store
        Its storage between messages. State of another session in it is dropped.
    run
        The run of the message.
    continues
        Flower's ids of the runs that it states to continue.

    Raises
    ------
    BractError
        If the state is that of a run of the same session which this one does not continue, or
        under another configuration.
    """

    def __init__(self, store: DefenseState, run: AgreedRun, continues: Collection[str]) -> None:
        self._store = store
        self._state = store.load()
        if _text(self._state, "session") != run.session:
            self._state = {}
        runs, own = _text(self._state, "runs").split(), str(run.run_id)
        if runs and _text(self._state, "run") != run.identity:
            _check_continues(runs, own, continues, _text(self._state, "kept") == run.kept)
        named = [*runs, own] if own not in runs else runs
        self._about = {
            "session": run.session,
            "run": run.identity,
            "kept": run.kept,
            "runs": " ".join(named),
        }

    def hold(self) -> None:
        """Keep to this run from now on, before anything is answered in it."""
        if any(_text(self._state, name) != text for name, text in self._about.items()):
            self._keep()

    @property
    def model_round(self) -> int:
        """The round after which `model` is the global model; -1 where there is none yet."""
        return int(self._state.get("round", torch.tensor(-1)))

    @property
    def model(self) -> Tensors:
        """The plain global model, in the order of the arrays that were received."""
        held = {n.removeprefix(_MODEL): v for n, v in self._state.items() if n.startswith(_MODEL)}
        # A file of tensors has an order of its own, and apps may read arrays one after the other.
        order = _text(self._state, "order")
        return {name: held[name] for name in json.loads(order)} if order else held

    def keep_model(self, model: Mapping[str, Tensor], model_round: int) -> None:
        """Keep the model of a round."""
        held = {f"{_MODEL}{name}": value for name, value in model.items()}
        order = _to(json.dumps(list(model)).encode())
        self._keep(round=torch.tensor(model_round), order=order, **held)

    @property
    def unchecked(self) -> bool:
        """Return whether the model goes back to a start that the site has still to compare."""
        return bool(self._state.get("unchecked", torch.tensor(False)))

    def mark_start(self, *, unchecked: bool) -> None:
        """Note whether the site has still to compare the start."""
        if self.unchecked != unchecked:
            self._keep(unchecked=torch.tensor(unchecked))

    @property
    def key(self) -> bytes:
        """Text of the key that came through the server; empty where none did."""
        return _from(self._state.get("key"))

    def keep_key(self, text: bytes, *, unconfirmed: bool) -> None:
        """Keep a key, and whether the run has not used it yet."""
        self._keep(key=_to(text), unconfirmed=torch.tensor(unconfirmed))

    @property
    def unconfirmed(self) -> bool:
        """Return whether this client generated `key` and the run has not used it yet."""
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
        about = {name: _to(text.encode()) for name, text in self._about.items()}
        self._state = {**self._state, **about, **tensors}
        self._store.save(self._state)


def _check_continues(runs: list[str], own: str, continues: Collection[str], same: bool) -> None:
    """Refuse to go on in run ``own`` with the state of the last of ``runs``."""
    held = runs[-1]
    if own == held:
        why = "it has another configuration than when this client joined it"
    elif own in runs:
        why = "this client has left it"
    elif held not in continues:
        why = "it does not state that it continues that run"
    elif not same:
        why = f"of the configuration, only {', '.join(FREE_ON_RESUME)} may change on resume"
    else:
        return
    raise BractError(
        f"holds the state of run {held}, and was asked in run {own} of the same session: {why}; "
        "resume with the configuration of before, or start a new run",
        code="request-refused",
    )


def _text(state: Mapping[str, Tensor], name: str) -> str:
    return _from(state.get(name)).decode()


def _to(text: bytes) -> Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def _from(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.numpy().tobytes()
