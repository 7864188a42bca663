"""Small federations of the real ClientApp without processes, plain and encrypted."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Message
from safetensors.torch import load_file
from torch import nn

import bract.client.app as client_app
from bract.config import FederationConfig, build_config, dump_config
from bract.paillier import PrivateKey
from bract.paillier.keyfile import dump_private, save_private
from bract.paillier.sharefile import save_share
from bract.paillier.sharing import KeyShare
from bract.rundir import RunDirectory
from bract.server.encrypted import EncryptedFederation
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid
from bract.updates.update import Tensors

SIZES = [60, 30, 10]


def tiny() -> nn.Module:
    """A model of 1,210 parameters, for tests in which only the ciphertexts matter."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def tied() -> nn.Module:
    """A model with one weight under two names, as language models have theirs."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[3].weight = model[1].weight
    return model.append(nn.Linear(64, 10))


class ListeningGrid(LoopbackGrid):
    """Keeps the answers too, in `answers`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.answers: list[Message] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers that are there, once each."""
        found = list(super().pull_messages(message_ids))
        self.answers += found
        return found


class TamperingGrid(LoopbackGrid):
    """Lets ``tamper(message, reply)`` change what a client answers, in place."""

    def __init__(
        self, *arguments: Any, tamper: Callable[[Message, Message], None], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._tamper = tamper

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if reply.has_content():
            self._tamper(message, reply)
        return reply


def small(**changes: Any) -> FederationConfig:
    """Three clients of a sixth, a third and a tenth, whose integer weights are exact."""
    return build_config(
        {
            "name": "small",
            "rounds": 1,
            "seed": 3,
            "data": {
                "image_size": 8,
                "validation": 0.0,
                "partition": {"kind": "sizes", "sizes": SIZES},
            },
            "model": {"name": "encrypted_runs:tiny"},
            "training": {"lr": 0.1},
            **changes,
        }
    ).as_own_word()


def key_files(folder: Path, keys: Sequence[PrivateKey | KeyShare]) -> list[Path]:
    """Write one key file a client."""
    folder.mkdir(parents=True)
    paths = []
    for client, key in enumerate(keys):
        path = folder / f"client-{client}.pem"
        save_share(key, path) if isinstance(key, KeyShare) else save_private(key, path)
        paths.append(path)
    return paths


def small_grid(
    folder: Path,
    config: FederationConfig,
    keys: Sequence[PrivateKey | KeyShare] = (),
    *,
    state: bool = True,
    kind: type[LoopbackGrid] = LoopbackGrid,
    **options: Any,
) -> LoopbackGrid:
    """One node a client, with its key, and its state in a folder or in memory."""
    files = key_files(folder / "keys", keys) if keys else []
    nodes = []
    for client in range(config.clients):
        node: dict[str, Any] = {"partition-id": client, "public-test": True}
        node["models"] = "encrypted_runs:tiny encrypted_runs:tied"
        if state:
            node["state-dir"] = str(folder / f"state-{client}")
        if files:
            node["paillier-key"] = str(files[client])
        nodes.append(node)
    return kind(client_app.app, nodes, {"federation": dump_config(config)}, **options)


def train(folder: Path, config: FederationConfig, grid: LoopbackGrid) -> RunDirectory:
    """Run the server's side, as the ServerApp does."""
    run = RunDirectory(folder / "run")
    run.create(config)
    kind = EncryptedFederation if config.encryption.uses_paillier else Federation
    kind(config, run).train(grid)
    return run


def key_secrets(key: PrivateKey) -> list[bytes]:
    """What would give the key away, in every form that it takes."""
    text = dump_private(key).splitlines()
    numbers = (key.p, key.q, key.order_p, key.order_q)
    raw = [n.to_bytes((n.bit_length() + 7) // 8, "big") for n in numbers]
    return [*raw, *(hex(n).encode() for n in numbers), *text[-6:-2], b"PRIVATE KEY-----"]


def final_model(folder: Path, client: int) -> Tensors:
    """What a client kept after an encrypted run."""
    name = f"small-client-{client}-final.safetensors"
    return load_file(folder / f"state-{client}" / name)


def phases(grid: LoopbackGrid) -> list[str]:
    """Message types in the order of the phases."""
    types = [message.metadata.message_type for message in grid.log]
    return [t for i, t in enumerate(types) if i == 0 or types[i - 1] != t]
