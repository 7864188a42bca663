"""What the operator of one client decides: its name, device, folders and place in the partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bract.errors import BractError

NODE_KEYS = (
    "name",
    "partition-id",
    "num-partitions",
    "device",
    "truth-dir",
    "state-dir",
    "policy",
    "private-seed",
    "paillier-key",
    "public-test",
)


@dataclass(frozen=True)
class Site:
    """The node configuration of a SuperNode, checked.

    Attributes
    ----------
    name
        What the client calls itself; ``client-<partition-id>`` where the operator gave no name.
    partition
        Which part of the training data is this client's, from 0.
    device
        ``auto``, ``cpu`` or ``cuda:N``; None leaves the choice to the federation's config.
    truth_dir
        Where to keep what was trained on, for scoring an audit; None keeps nothing.
    state_dir
        Where the state of defenses survives a restart of the SuperNode.
    policy
        YAML file that names the defenses that must be on.
    private_seed
        Seed of this client's keys and noise, for experiments that must repeat. None, as it should
        be in earnest, draws them from the operating system: who knows the seed undoes the defense.
    paillier_key
        File of the private key or key share with which encrypted runs are decrypted.
    public_test
        Whether the test split is public and lies here, so that this client may judge the global
        model on it where the server cannot.
    """

    name: str
    partition: int
    device: str | None = None
    truth_dir: Path | None = None
    state_dir: Path | None = None
    policy: Path | None = None
    private_seed: int | None = None
    paillier_key: Path | None = None
    public_test: bool = False

    @classmethod
    def from_node_config(cls, node_config: Mapping[str, object]) -> Site:
        """Read ``flower-supernode --node-config``.

        Raises
        ------
        BractError
            If ``partition-id`` is missing or no whole number from 0, or ``private-seed`` is no
            whole number.
        """
        found = node_config.get("partition-id")
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise BractError(
                f"node config: partition-id is {found!r}, expected a whole number from 0; "
                "start the SuperNode with --node-config 'partition-id=0'"
            )

        seed = node_config.get("private-seed")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise BractError(
                f"node config: private-seed is {seed!r}, expected a whole number; "
                "leave it out to draw keys and noise from the operating system"
            )

        def path(key: str) -> Path | None:
            return Path(str(node_config[key])) if node_config.get(key) else None

        return cls(
            name=str(node_config.get("name") or f"client-{found}"),
            partition=found,
            device=str(node_config["device"]) if node_config.get("device") else None,
            truth_dir=path("truth-dir"),
            state_dir=path("state-dir"),
            policy=path("policy"),
            private_seed=seed,
            paillier_key=path("paillier-key"),
            public_test=bool(node_config.get("public-test", False)),
        )


def pick_device(wanted: str) -> torch.device:
    """Turn ``auto``, ``cpu`` or ``cuda:N`` into a device that exists here.

    Raises
    ------
    BractError
        If the name is none of these, or the GPU is not there.
    """
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise BractError(f"device {wanted!r}: expected auto, cpu or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BractError(
            f"device {wanted!r}: this machine has {torch.cuda.device_count()} CUDA devices; "
            "use auto or cpu"
        )
    return device
