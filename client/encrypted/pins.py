"""The demands of a site's operator on encrypted runs, and the public keys that it trusts.

All of it is in the node config, which the server cannot change. Without it a client follows the
run's configuration, and takes the others' X25519 keys as the server passes them on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bract.client.private import OwnFileError, own_files
from bract.config import FederationConfig
from bract.crypto.x25519 import KEY_BYTES, key_problem
from bract.errors import BractError, one_line, shown

if TYPE_CHECKING:
    from bract.paillier.exchange import Identity

_log = logging.getLogger(__name__)

_SCHEMES = ("paillier", "masks")


@dataclass(frozen=True)
class Pins:
    """The keys of the node config that bind an encrypted run.

    Attributes
    ----------
    require_encryption
        ``require-encryption``: whether every run that is not encrypted is refused; the name of a
        scheme refuses runs of another one, too.
    key_id
        ``key-id``: the only key under which this client encrypts.
    identity_key
        ``identity-key``: file of this site's own X25519 key pair, from `bract keygen --identity`;
        None draws one for each run.
    dealer
        ``dealer``: public identity of the only client from which a key is taken in-band.
    peers
        ``peers``: public identities of the other clients, from a file of one a line. Keys and
        partial decryptions are sealed for these alone and taken from these alone.
    """

    require_encryption: bool | str = False
    key_id: str | None = None
    identity_key: Path | None = None
    dealer: bytes | None = None
    peers: frozenset[bytes] | None = None

    @classmethod
    def from_node_config(cls, node_config: Mapping[str, object]) -> Pins:
        """Read ``flower-supernode --node-config``."""
        required = node_config.get("require-encryption", False)
        if not isinstance(required, bool) and required not in _SCHEMES:
            raise BractError(
                f"node config: require-encryption is {shown(required)}, expected true or false, "
                f"or a scheme: {' or '.join(_SCHEMES)}",
                code="config-value",
            )
        texts = {
            key: _text(key, node_config[key])
            for key in ("key-id", "identity-key", "dealer", "peers")
            if key in node_config
        }
        return cls(
            require_encryption=required if isinstance(required, bool) else str(required),
            key_id=texts.get("key-id"),
            identity_key=Path(texts["identity-key"]) if "identity-key" in texts else None,
            dealer=_identity("dealer", texts["dealer"]) if "dealer" in texts else None,
            peers=_read_peers(Path(texts["peers"])) if "peers" in texts else None,
        )

    def identity(self) -> Identity | None:
        """Return this site's own X25519 key pair; None where the node config names no file.

        Raises
        ------
        BractError
            If it cannot be read.
        """
        if self.identity_key is None:
            return None
        # gmpy2 and phe are loaded by clients that seal boxes only.
        from bract.paillier.keyfile import read_identity
        from bract.protocol.ciphertexts import readable

        try:
            with own_files(), readable():
                return read_identity(self.identity_key)
        except OSError as error:
            raise OwnFileError(
                f"{self.identity_key}: the identity key cannot be read ({one_line(error, 200)})",
                code="file-unreadable",
            ) from error

    def check_run(self, config: FederationConfig, key_file: Path | None) -> None:
        """Refuse a run that would send updates in the clear, or bring another key."""
        if not config.encryption.enabled:
            if key_file is not None:
                raise BractError(
                    "this client was given a Paillier key, but the run would send updates "
                    "unencrypted; set encryption: paillier, or take paillier-key out of the node "
                    "config",
                    code="encryption-required",
                )
            if self.require_encryption or self.key_id is not None:
                raise BractError(
                    "this client's node config demands encryption, but the run would send updates "
                    "unencrypted; set encryption: paillier",
                    code="encryption-required",
                )
            return
        scheme = config.encryption.scheme
        if isinstance(self.require_encryption, str) and scheme != self.require_encryption:
            raise BractError(
                f"this client's node config has require-encryption: {self.require_encryption}, "
                f"the run has encryption.scheme: {scheme}; set one of them to the other's",
                code="encryption-required",
            )
        if config.encryption.uses_masks:
            if key_file is not None or self.key_id is not None:
                raise BractError(
                    "this client was given a Paillier key, but the run sums masked updates, and "
                    "its server learns the sum; set encryption: paillier, or take paillier-key and "
                    "key-id out of the node config",
                    code="encryption-required",
                )
            if self.peers is not None and not config.encryption.consistency:
                raise BractError(
                    "this client's node config pins its peers, so it does not rely on the server, "
                    "but the run has encryption.consistency: false; set it to true, or take peers "
                    "out of the node config",
                    code="encryption-required",
                )
        elif key_file is not None and config.encryption.keys != "provisioned":
            raise BractError(
                "this client was given a Paillier key file, but the run brings its keys in-band; "
                "set encryption.keys: provisioned, or take paillier-key out of the node config",
                code="encryption-required",
            )

    def warn_of_unpinned_help(self, config: FederationConfig) -> None:
        """Warn where the server chooses for whom this client helps to decrypt."""
        if config.encryption.uses_paillier and config.encryption.threshold and self.peers is None:
            _log.warning(
                "this client's node config has no peers: the server can name a key of its own "
                "among those for whom this client helps to decrypt, and read single updates; set "
                "peers, and the others' identity-key, as `bract provision` does"
            )

    def check_key(self, key_id: str) -> None:
        """Refuse every key but the pinned one."""
        if self.key_id is not None and key_id != self.key_id:
            raise BractError(
                f"holds Paillier key {key_id}, the node config's key-id is {self.key_id}",
                code="key-mismatch",
            )

    def check_dealer(self, identity: bytes) -> None:
        """Refuse a key that another client sealed than the pinned dealer."""
        if self.dealer is not None and identity != self.dealer:
            raise BractError(
                f"was sent a key by {identity.hex()}, the node config's dealer is "
                f"{self.dealer.hex()}: the server passes on another client's key",
                code="identity-refused",
            )
        self.check_peers([identity])

    def check_peers(self, identities: Iterable[bytes]) -> None:
        """Refuse to seal for, or to take from, any client but the pinned peers."""
        if self.peers is None:
            return
        unpinned = [identity for identity in identities if identity not in self.peers]
        if unpinned:
            raise BractError(
                f"identity {unpinned[0].hex()} is not among the peers of the node config: the "
                "server passes on an unknown client's key, or the client's identity-key is "
                "not used",
                code="identity-refused",
            )


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise BractError(
            f"node config: {key} is {shown(value)}, expected text in quotes", code="config-value"
        )
    return value


def _identity(key: str, text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    problem = key_problem(found)
    if problem is not None:
        raise BractError(
            f"{key}: {text[:80]!r} is no public identity ({problem}), expected the {2 * KEY_BYTES} "
            "hexadecimal digits that `bract keygen --identity` prints",
            code="config-value",
        )
    return found


def _read_peers(path: Path) -> frozenset[bytes]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise BractError(
            f"{one_line(path, 200)}: the peers cannot be read ({one_line(error, 100)})",
            code="file-unreadable",
        ) from error
    entries = [line.partition("#")[0].strip() for line in lines]
    return frozenset(_identity(str(path), entry) for entry in entries if entry)
