"""Key files of a federation whose clients are on one machine: Paillier keys, and identities."""

from __future__ import annotations

from pathlib import Path

from bract.config.encryption import EncryptionConfig
from bract.disk.files import write_text
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, one_line

PUBLIC = "public.pem"
PRIVATE = "private.pem"
PEERS = "peers.txt"


def client_key(folder: Path, client: int, threshold: int | None) -> Path:
    """Return the key file of client ``client`` (from 0) among those of `write_keys`."""
    return folder / (PRIVATE if threshold is None else f"share-{client}.pem")


def write_keys(folder: Path, config: EncryptionConfig, clients: int) -> list[Path]:
    """Generate a key pair, or with a threshold one share a client, and write the files.

    Secret files have mode 0600. The whole key of a threshold key is never written.

    Returns
    -------
    list of Path
        The public key's file, then the secret ones.
    """
    # gmpy2 and phe are loaded where keys are made only.
    from bract.paillier import deal, generate_keypair
    from bract.paillier.keyfile import save_private, save_public
    from bract.paillier.sharefile import save_share
    from bract.protocol.ciphertexts import readable

    count = 1 if config.threshold is None else clients
    secret = [client_key(folder, client, config.threshold) for client in range(count)]
    # Looked for first: generating a key takes seconds, and a half-written set would be worse.
    found = [path for path in (folder / PUBLIC, *secret) if path.exists()]
    if found:
        raise BractError(
            f"{found[0]}: exists already; a key that is in use must not be replaced, choose "
            "another folder or remove the old files",
            code="file-taken",
        )
    try:
        make_private_folder(folder, private=True)
        with readable():
            if config.threshold is None:
                key = generate_keypair(config.key_bits, randomness=config.randomness)
                save_private(key, secret[0])
                public = key.public
            else:
                shares = deal(
                    config.threshold,
                    clients,
                    config.key_bits,
                    degree=config.degree,
                    randomness=config.randomness,
                )
                for share, path in zip(shares, secret, strict=True):
                    save_share(share, path)
                public = shares[0].public
            save_public(public, folder / PUBLIC)
    except OSError as error:
        raise BractError(
            f"{folder}: cannot be written ({one_line(error, 200)})", code="file-unwritable"
        ) from error
    return [folder / PUBLIC, *secret]


def client_identity(folder: Path, client: int) -> Path:
    """Return the identity file of client ``client`` (from 0) among those of `write_identities`."""
    return folder / f"identity-{client}.pem"


def write_identities(folder: Path, clients: int) -> None:
    """Write an X25519 key pair a client, mode 0600, and the public halves as one file of peers."""
    from bract.paillier.exchange import make_identity
    from bract.paillier.keyfile import save_identity
    from bract.protocol.ciphertexts import readable

    identities = [make_identity() for _ in range(clients)]
    try:
        make_private_folder(folder, private=True)
        with readable():
            for client, identity in enumerate(identities):
                path = client_identity(folder, client)
                path.unlink(missing_ok=True)  # of an earlier start that was cut off
                save_identity(identity, path)
        write_text(folder / PEERS, "".join(f"{i.public.hex()}\n" for i in identities))
    except OSError as error:
        raise BractError(
            f"{folder}: cannot be written ({one_line(error, 200)})", code="file-unwritable"
        ) from error


def client_secrets(folder: Path, config: EncryptionConfig, clients: int) -> list[dict[str, str]]:
    """Make the keys of a federation, and return each client's own part of its node configuration.

    Returns
    -------
    list
        One a client: paths of its key files under the keys of a SuperNode's configuration. Empty
        where the configuration encrypts nothing.
    """
    if not config.enabled:
        return []
    secrets: list[dict[str, str]] = [{} for _ in range(clients)]
    if config.uses_identities:
        write_identities(folder, clients)
        for client, own in enumerate(secrets):
            own["identity-key"] = str(client_identity(folder, client))
            own["peers"] = str(folder / PEERS)
    if config.uses_key_files:
        write_keys(folder, config, clients)
        for client, own in enumerate(secrets):
            own["paillier-key"] = str(client_key(folder, client, config.threshold))
    return secrets
