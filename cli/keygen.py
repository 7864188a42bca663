"""``bract keygen``: Paillier keys as files, for the provisioner of the clients."""

from __future__ import annotations

from pathlib import Path

from bract.cli.console import print_json, say, working
from bract.config.encryption import EncryptionConfig
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, one_line
from bract.runtime.key_files import write_keys

IDENTITY = "identity.pem"


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
            f"{folder}: cannot be written ({one_line(error, 200)})", code="file-unwritable"
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
