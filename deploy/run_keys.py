"""What encrypted runs need of each site: its Paillier key or share, or its identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bract.config import FederationConfig
from bract.deploy import kit as kits


@dataclass(frozen=True)
class Secrets:
    """What encrypted runs need of one site: the texts of its key files, by name; all its own."""

    files: Mapping[str, bytes]
    peers: str | None = None
    identity: str | None = None


NONE = Secrets({})


def with_secrets(config: FederationConfig) -> tuple[FederationConfig, dict[str, Secrets]]:
    """Make what encrypted runs need, and return the configuration that names its public part."""
    assert config.deployment is not None
    names = [site.name for site in config.deployment.sites]
    encryption = config.encryption
    if not encryption.enabled:
        return config, dict.fromkeys(names, NONE)
    from bract.paillier import (
        deal,
        dump_private,
        dump_share,
        generate_keypair,
        make_identity,
    )
    from bract.paillier.keyfile import dump_identity
    from bract.protocol.ciphertexts import readable

    with readable():
        if encryption.keys == "in-band":
            identities = {name: make_identity() for name in names}
            public = tuple(identities[name].public.hex() for name in names)
            peers = "".join(f"{identity}\n" for identity in public)
            update = encryption.model_copy(update={"identities": public})
            secrets = {
                name: Secrets(
                    {kits.IDENTITY_KEY: dump_identity(identity)}, peers, identity.public.hex()
                )
                for name, identity in identities.items()
            }
        elif encryption.threshold is not None:
            shares = deal(
                encryption.threshold,
                len(names),
                encryption.key_bits,
                degree=encryption.degree,
                randomness=encryption.randomness,
            )
            update = encryption.model_copy(update={"key_id": shares[0].public.key_id})
            secrets = {
                name: Secrets({kits.PAILLIER_KEY: dump_share(share)})
                for name, share in zip(names, shares, strict=True)
            }
        else:
            key = generate_keypair(encryption.key_bits, randomness=encryption.randomness)
            update = encryption.model_copy(update={"key_id": key.public.key_id})
            secrets = dict.fromkeys(names, Secrets({kits.PAILLIER_KEY: dump_private(key)}))
    return config.model_copy(update={"encryption": update}), secrets
