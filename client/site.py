"""Settings of one client's operator: name, device, folders and place in the partition."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bract.config import FederationConfig
from bract.config.client_names import check_name
from bract.config.config import IidPartition
from bract.disk import read_named
from bract.errors import BractError, one_line, shown
from bract.installed.references import check_reference

UNNAMED = "site"
"""Name under which a site without a name or a ``partition-id`` keeps its records in ``state-dir``:
its node id is another one after each restart."""

MOST_SEED_DIGITS = 1000
"""Of a private seed; 256 random bits are 77."""

LEAST_SEED = 2**64
"""Smaller private seeds can be tried one by one. What is made of a federation's seed and a client's
number is smaller."""

_MEND = "write one with `python -c 'import secrets; print(secrets.randbits(256))'`"


@dataclass(frozen=True)
class Site:
    """The node configuration of a SuperNode, checked.

    Attributes
    ----------
    name
        The client's name; ``client-<partition-id>`` if the operator gave none.
    partition
        Which part of the training data is this client's, from 0.
    device
        ``auto``, ``cpu`` or ``cuda:N``; None leaves the choice to the federation's config.
    data_path
        Folder of this site's own data, in place of the run's ``data.path`` and all of it this
        site's; None takes this site's part of what the run names.
    models
        References ``package.module:callable`` that a run's ``model.name`` may name here, as
        ``models`` holds them with spaces between. Any other is refused, registered names are not.
    data_paths
        Folders in or below which a run's ``data.path`` may be, as ``data-paths`` holds them with
        colons between.
    download
        Whether a run may let torchvision download a data set here.
    truth_dir
        Where to keep what was trained on, for scoring an audit; None keeps nothing.
    state_dir
        Where the state of defenses survives a restart of the SuperNode.
    policy
        YAML file that names the defenses that must be on.
    private_seed
        Seed of this client's keys and noise, for experiments that must repeat, as
        ``private-seed-file`` holds it. None, as it should be in earnest, draws them from the
        operating system: an attacker who knows or guesses the seed undoes the defense.
    paillier_key
        File of the private key or key share with which encrypted runs are decrypted.
    public_test
        Whether the test split is public and stored here, so that this client may judge the global
        model on it where the server cannot.
    """

    name: str
    partition: int
    device: str | None = None
    data_path: Path | None = None
    truth_dir: Path | None = None
    state_dir: Path | None = None
    policy: Path | None = None
    private_seed: int | None = None
    paillier_key: Path | None = None
    public_test: bool = False
    models: tuple[str, ...] = ()
    data_paths: tuple[Path, ...] = ()
    download: bool = False

    @classmethod
    def from_node_config(cls, node_config: Mapping[str, object]) -> Site:
        """Read ``flower-supernode --node-config``.

        Raises
        ------
        BractError
            If ``partition-id`` is missing or no whole number from 0, ``models`` holds what is no
            reference, or a private seed is in the node config itself or in a file that others
            may read.
        """
        found = node_config.get("partition-id")
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise BractError(
                f"node config: partition-id is {shown(found)}, expected a whole number from 0; "
                "start the SuperNode with --node-config 'partition-id=0'",
                code="config-value",
            )

        if "private-seed" in node_config:
            raise BractError(
                "node config: private-seed is on a command line, which every user of the "
                "machine can read; leave it out to draw keys and noise from the operating system, "
                "or write the seed to a file of mode 0600 and set private-seed-file",
                code="config-value",
            )

        def path(key: str) -> Path | None:
            return Path(str(node_config[key])) if node_config.get(key) else None

        seed_file = path("private-seed-file")
        return cls(
            name=check_name(site_name(node_config)),
            partition=found,
            device=str(node_config["device"]) if node_config.get("device") else None,
            data_path=path("data-path"),
            truth_dir=path("truth-dir"),
            state_dir=path("state-dir"),
            policy=path("policy"),
            private_seed=read_private_seed(seed_file) if seed_file else None,
            paillier_key=path("paillier-key"),
            public_test=bool(node_config.get("public-test", False)),
            models=_references(node_config.get("models")),
            data_paths=_folders(node_config.get("data-paths")),
            download=node_config.get("download") is True,
        )

    def local(self, config: FederationConfig) -> FederationConfig:
        """Return the run's configuration with this site's own data, where it has a folder of it."""
        if self.data_path is None:
            return config
        data = config.data.model_copy(
            update={"path": self.data_path, "download": False, "partition": IidPartition()}
        )
        return config.model_copy(update={"data": data, "clients": 1})

    @property
    def part(self) -> int:
        """Return which part of the data of `local` is this site's."""
        return self.partition if self.data_path is None else 0


def site_name(node_config: Mapping[str, object]) -> str:
    """Return the name of a site, whichever app answers there; its records are kept under it.

    Returns
    -------
    str
        ``name``, else ``client-<partition-id>``, else `UNNAMED`.
    """
    if node_config.get("name"):
        return str(node_config["name"])
    partition = node_config.get("partition-id")
    return UNNAMED if partition is None else f"client-{partition}"


def _references(found: object) -> tuple[str, ...]:
    try:
        return tuple(check_reference(name) for name in str(found or "").split())
    except ValueError as error:
        raise BractError(f"node config: models: {error}", code="config-value") from None


def _folders(found: object) -> tuple[Path, ...]:
    return tuple(Path(path) for path in str(found or "").split(os.pathsep) if path)


def read_private_seed(path: Path) -> int:
    """Return the whole number, from `LEAST_SEED`, that a file of mode 0600 holds."""
    try:
        mode = path.stat().st_mode & 0o777
        text = read_named(path).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise BractError(
            f"{one_line(path, 200)}: the private seed cannot be read: {one_line(error, 200)}",
            code="file-unreadable",
        ) from error
    if mode & 0o077:
        raise BractError(
            f"{path}: other users may read this private seed (mode {mode:o}); "
            f"run `chmod 600 {path}` and choose another seed",
            code="file-exposed",
        )
    if not text.isdecimal() or len(text) > MOST_SEED_DIGITS:
        # What the file holds may be a secret of another kind: the message does not repeat it.
        raise BractError(
            f"{path}: expected a whole number of at most {MOST_SEED_DIGITS} digits as the "
            f"private seed; {_MEND}",
            code="config-value",
        )
    seed = int(text)
    if seed < LEAST_SEED:
        raise BractError(
            f"{path}: this private seed has {seed.bit_length()} bits, expected more than 64, or "
            f"the server can try them all; {_MEND}",
            code="config-value",
        )
    return seed


def pick_device(wanted: str) -> torch.device:
    """Turn ``auto``, ``cpu`` or ``cuda:N`` into a device that exists here."""
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise BractError(
            f"device {shown(wanted)}: expected auto, cpu or cuda:N", code="config-value"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BractError(
            f"device {shown(wanted)}: this machine has {torch.cuda.device_count()} CUDA devices; "
            "use auto or cpu",
            code="device-missing",
        )
    return device
