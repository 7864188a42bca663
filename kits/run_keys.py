"""Secrets of each site: its node key, and of encrypted runs its Paillier key, share or identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bract.certificates.authority import new_key, node_key_text, node_public_text
from bract.config import FederationConfig
from bract.config.encryption import EncryptionConfig
from bract.kits import kit as kits
from bract.kits.requests import SiteRequest, seal_for


@dataclass(frozen=True)
class Secrets:
    """Keys of one site.

    Attributes
    ----------
    public_key
        Of its SuperNode, one line as OpenSSH writes it.
    files
        Texts of its key files, by name; none that the site made itself is among them.
    peers, identity
        Of encrypted runs: all sites' public identities, and its own.
    """

    public_key: str
    files: Mapping[str, bytes]
    peers: str | None = None
    identity: str | None = None


def node_secrets(request: SiteRequest | None = None) -> Secrets:
    """Make a SuperNode's key, or take the public one of a request."""
    if request is not None:
        return Secrets(request.public_key, {})
    key = new_key()
    return Secrets(node_public_text(key.public_key()), {kits.NODE_KEY: node_key_text(key)})


def with_secrets(
    config: FederationConfig, requests: Mapping[str, SiteRequest], authority: str
) -> tuple[FederationConfig, dict[str, Secrets]]:
    """Make every site's secrets, and return the configuration that names their public part.

    Parameters
    ----------
    requests
        Of the sites that made their keys themselves, by name.
    authority
        Fingerprint of the federation's CA.
    """
    assert config.deployment is not None
    names = [site.name for site in config.deployment.sites]
    secrets = {name: node_secrets(requests.get(name)) for name in names}
    encryption = config.encryption
    if not encryption.enabled:
        return config, secrets
    from bract.protocol.ciphertexts import readable

    with readable():
        # Of every scheme: an identity decides whose a seat is, whatever boxes are sealed for it.
        identities = {name: _identity(requests.get(name)) for name in names}
        public = tuple(identity for identity, _ in identities.values())
        peers = "".join(f"{identity}\n" for identity in public)
        update: dict[str, object] = {"identities": public}
        for name, (identity, files) in identities.items():
            secrets[name] = replace(
                secrets[name],
                files={**secrets[name].files, **files},
                peers=peers,
                identity=identity,
            )
        if encryption.uses_key_files:
            key_id, texts = _paillier_keys(encryption, names)
            update["key_id"] = key_id
            for name, text in texts.items():
                request = requests.get(name)
                file = (
                    {kits.PAILLIER_KEY: text}
                    if request is None
                    else {kits.PAILLIER_SEALED: seal_for(request, text, config.name, authority)}
                )
                secrets[name] = replace(secrets[name], files={**secrets[name].files, **file})
    encryption = encryption.model_copy(update=update)
    return config.model_copy(update={"encryption": encryption}), secrets


def _identity(request: SiteRequest | None) -> tuple[str, dict[str, bytes]]:
    """Return a site's public identity, and its key file where it is made here."""
    from bract.paillier.exchange import make_identity
    from bract.paillier.keyfile import dump_identity

    if request is not None:
        return request.identity, {}
    identity = make_identity()
    return identity.public.hex(), {kits.IDENTITY_KEY: dump_identity(identity)}


def _paillier_keys(encryption: EncryptionConfig, names: list[str]) -> tuple[str, dict[str, bytes]]:
    """Deal shares, or make one key for all sites; return the key's id and each site's text."""
    from bract.paillier import deal, generate_keypair
    from bract.paillier.keyfile import dump_private
    from bract.paillier.sharefile import dump_share

    if encryption.threshold is None:
        key = generate_keypair(encryption.key_bits, randomness=encryption.randomness)
        return key.public.key_id, dict.fromkeys(names, dump_private(key))
    shares = deal(
        encryption.threshold,
        len(names),
        encryption.key_bits,
        degree=encryption.degree,
        randomness=encryption.randomness,
    )
    texts = {name: dump_share(share) for name, share in zip(names, shares, strict=True)}
    return shares[0].public.key_id, texts
