"""``bract keygen``: Paillier keys as files, for the provisioner of the clients."""

from __future__ import annotations

from pathlib import Path

from bract.cli.console import print_json, say, working
from bract.config.encryption import EncryptionConfig
from bract.errors import BractError
from bract.files import write_text
from bract.permissions import make_private_folder

PUBLIC = "public.pem"
PRIVATE = "private.pem"
IDENTITY = "identity.pem"
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
    # gmpy2 and phe are loaded by this command only.
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
            f"{folder}: cannot be written ({error.strerror or error})", code="file-unwritable"
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
            f"{folder}: cannot be written ({error.strerror or error})", code="file-unwritable"
        ) from error


def keygen(folder: Path, config: EncryptionConfig, clients: int, *, as_json: bool = False) -> None:
    """Write the files and print the purpose of each."""
    with working(f"generating a key of {config.key_bits} bits, which can take a minute"):
        public, *secret = write_keys(folder, config, clients)
    from bract.paillier.keyfile import read_public

    key_id = read_public(public).key_id
    if as_json:
        print_json({"key_id": key_id, "public": str(public), "secret": [str(p) for p in secret]})
    say(f"{public}: the public key, key id {key_id}")
    if config.threshold is None:
        say(
            f"{secret[0]}: the private key, the same for every client; bring it to them by a way "
            "that the server cannot read"
        )
    else:
        say(
            f"{secret[0]} to {secret[-1].name}: one share for each client; {config.threshold} of "
            f"{clients} decrypt together. Give no client two, and keep no copies"
        )
    say("done; next: start each SuperNode with --node-config 'paillier-key=\"FILE\"'")


def keygen_identity(folder: Path, *, as_json: bool = False) -> None:
    """Write a site's own X25519 key pair, mode 0600, and print its public half."""
    from bract.paillier.exchange import make_identity
    from bract.paillier.keyfile import save_identity
    from bract.protocol.ciphertexts import readable

    identity, path = make_identity(), folder / IDENTITY
    try:
        make_private_folder(folder, private=True)
        with readable():
            save_identity(identity, path)
    except OSError as error:
        raise BractError(
            f"{folder}: cannot be written ({error.strerror or error})", code="file-unwritable"
        ) from error
    if as_json:
        print_json({"identity": str(path), "public": identity.public.hex()})
    say(f"{path}: this site's identity, which stays here; its public half is")
    say(identity.public.hex())
    say(
        f"done; next: start the SuperNode with --node-config 'identity-key=\"{path}\"', and bring "
        "the public half to the other sites (node config: peers, dealer) by a way that the server "
        "cannot alter"
    )
