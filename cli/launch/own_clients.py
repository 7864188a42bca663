"""Node configs and keys of the clients that are started on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bract.config import FederationConfig
from bract.config.sections import named_folders
from bract.crypto.randomness import SecretStream
from bract.disk.files import utf8, write_text
from bract.installed.references import is_reference
from bract.rundir import RunDirectory
from bract.runtime.key_files import (
    PEERS,
    client_identity,
    client_key,
    write_identities,
    write_keys,
)


@dataclass(frozen=True)
class OwnClients:
    """Clients of the person at the keyboard, who also wrote the configuration.

    Attributes
    ----------
    private
        Folder that no other user reads, for files that end with the run.
    """

    config: FederationConfig
    run: RunDirectory
    private: Path

    def keys(self) -> list[Path]:
        """Return each client's Paillier key file, after making the keys that the run lacks."""
        encryption = self.config.encryption
        if encryption.uses_identities and not (self.run.keys / PEERS).is_file():
            write_identities(self.run.keys, self.config.clients)
        if not encryption.uses_key_files:
            return []
        files = [
            client_key(self.run.keys, client, encryption.threshold)
            for client in range(self.config.clients)
        ]
        if not all(file.is_file() for file in files):
            write_keys(self.run.keys, encryption, self.config.clients)
        return files

    def node_config(
        self,
        client: int,
        *,
        key: Path | None = None,
        device: str | None = None,
        private_seed: int | None = None,
    ) -> dict[str, str | int]:
        """Return a client's own node config: its name, folders, keys and device, and its app.

        Code and data of the configuration are the operator's, whose clients these are.

        Parameters
        ----------
        key
            The client's Paillier key file, one of `keys`.
        device
            The client's device; the configuration's where None.
        private_seed
            Seed of all clients that this one's secret randomness is derived from.
        """
        name = f"client-{client}"
        node: dict[str, str | int] = {
            "partition-id": client,
            "num-partitions": self.config.clients,
            "state-dir": utf8(self.run.root / "state" / name),
        }
        if is_reference(self.config.model.name):
            node["models"] = str(self.config.model.name)
        folders = named_folders(self.config.data)
        if folders:
            node["data-paths"] = os.pathsep.join(utf8(folder) for folder in folders)
        if self.config.data.download:
            node["download"] = True
        if private_seed is not None:
            node["private-seed-file"] = utf8(self._private_seed(client, private_seed))
        if self.config.encryption.uses_identities:
            node["identity-key"] = utf8(client_identity(self.run.keys, client))
            if self.config.encryption.uses_paillier or self.config.encryption.consistency:
                # Who pins its peers does not rely on the server, and refuses a run that does.
                node["peers"] = utf8(self.run.keys / PEERS)
        if self.config.encryption.uses_paillier:
            # The test split is on this machine anyway, and the server has no model to judge.
            node["public-test"] = True
        if key is not None:
            node["paillier-key"] = utf8(key)
        if device is not None:
            node["device"] = device
        if self.config.truth:
            node["truth-dir"] = utf8(self.run.truth / name)
        if self.config.canaries.count:
            # The sites of this machine are the operator's own, and so is their word.
            policy = f"canaries: {self.config.canaries.count}\n"
            node["policy"] = utf8(write_text(self.private / "policy.yaml", policy, private=True))
        return node

    def _private_seed(self, client: int, seed: int) -> Path:
        """Write one client's private seed where other users cannot read it."""
        own = int.from_bytes(SecretStream.derived(seed, "client", client).bytes(32), "big")
        return write_text(self.private / f"client-{client}", f"{own}\n", private=True)
