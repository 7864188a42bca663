"""Change a federation that was provisioned: add a site, revoke one, renew its certificates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bract.certificates.authority import Authority, certificate_pem, read_certificate, read_key
from bract.certificates.validity import check_certificate
from bract.config import FederationConfig, build_config, dump_config, load_config
from bract.config.config import SiteConfig
from bract.disk.files import write_bytes, write_text
from bract.disk.locks import lock
from bract.errors import BractError
from bract.kits import kit as kits
from bract.kits.kit import KitError, open_kit, read_kit
from bract.kits.provisioning import (
    AUTHORITY,
    CA_KEY,
    FEDERATION,
    OPERATOR,
    read_policy,
    today,
    write_authority,
    write_gateway,
    write_operator,
    write_site,
)
from bract.kits.requests import SiteRequest
from bract.kits.run_keys import node_secrets
from bract.kits.sites import Issued, Sites, read_sites

RENEW_CA = "renew the CA (`bract site renew --authority`), and bring each site its new ca.crt"

_AT_THE_OPERATOR = (
    f"bring {kits.SITES}, {FEDERATION}, {kits.NGINX} and {kits.SUMS} to the operator, have the "
    "gateway read them (systemctl reload gateway, or sh start.sh restart gateway) and run "
    "`bract site register --kit DIR`"
)


@dataclass(frozen=True)
class Provisioned:
    """The output of `provision` in a folder: the CA, the federation and its sites."""

    folder: Path
    authority: Authority
    config: FederationConfig
    sites: Sites


@contextlib.contextmanager
def open_kits(folder: Path, *, doing: str) -> Iterator[Provisioned]:
    """Open the kits in a folder to change them, under a lock against other changes."""
    own = folder / AUTHORITY
    if not own.is_dir():
        raise KitError(
            f"{folder}: holds no folder {AUTHORITY}; name the folder that `bract provision` made, "
            "where the CA's key is",
            code="file-missing",
        )
    open_kit(own, AUTHORITY)
    with lock(own / ".lock", what=str(folder), doing=doing):
        found = kits.check_files(own)
        if found.broken or found.changed:
            problems = "; ".join(
                [*found.broken, *(f"{name} was changed" for name in found.changed)]
            )
            raise KitError(f"{own}: {problems}; take the folder from a backup")
        authority = Authority(read_certificate(own / kits.CA), read_key(own / CA_KEY))
        config = load_config(own / FEDERATION)
        yield Provisioned(folder, authority, config, read_sites(own / kits.SITES))


def add_site(
    provisioned: Provisioned, site: SiteConfig, *, request: SiteRequest | None = None
) -> list[str]:
    """Make the kit of one more site; return the next steps.

    Parameters
    ----------
    request
        Of a site that made its key itself; its kit holds no private key.

    Raises
    ------
    BractError
        If there is a site of that name, or the keys of encrypted runs are dealt.
    """
    _check_operator(provisioned)
    config, sites = provisioned.config, provisioned.sites
    taken = {name.casefold(): name for name in sites.active}
    if site.name.casefold() in taken:
        raise BractError(
            f"there is a site {taken[site.name.casefold()]} in {config.name}; choose another "
            "name, or revoke it first",
            code="identity-refused",
        )
    if config.encryption.enabled:
        raise BractError(
            f"the keys of {config.name}'s encrypted runs were dealt to "
            f"{len(sites.active)} sites, and a new one has none; name all sites in the "
            "federation's file and run `bract provision` into another folder",
            code="key-missing",
        )
    folder = provisioned.folder / site.name
    if folder.exists():
        raise BractError(
            f"{folder}: is there already; move it away, then add the site", code="file-taken"
        )
    check_certificate(provisioned.folder / AUTHORITY / kits.CA, fix=RENEW_CA)
    policy = read_policy(site, Path(FEDERATION))
    secrets = node_secrets(request)
    if secrets.public_key in {*sites.revoked_keys, *(i.public_key for i in sites.active.values())}:
        raise BractError(
            f"the key of {site.name}'s request was issued before, and a revoked key is never taken "
            "again; have the site make a new request",
            code="identity-refused",
        )
    used = {issued.partition for issued in sites.active.values()}
    partition = next(number for number in range(len(used) + 1) if number not in used)
    issued = Issued(public_key=secrets.public_key, partition=partition, issued=today())
    former = [*sites.former]
    if site.name in sites.sites:
        former.append(sites.sites[site.name].public_key)
    changed = Sites(sites=sites.sites | {site.name: issued}, former=former)
    config = _with_sites(config, [*_kept(config, changed, without=site.name), site], changed)
    signer = provisioned.authority
    write_site(folder, config, signer, site, partition, policy=policy, secrets=secrets)
    _update_lists(provisioned, config, changed)
    return [
        f"{folder}: bring it to {site.name} by a confidential way",
        f"{provisioned.folder / OPERATOR}: {_AT_THE_OPERATOR}",
        f"federations now have {config.clients} clients",
    ]


def revoke_site(provisioned: Provisioned, name: str) -> list[str]:
    """Note that a site may not connect any more; return the steps for it to hold.

    Raises
    ------
    BractError
        If there is no such site, or it was revoked.
    """
    _check_operator(provisioned)
    config, sites = provisioned.config, provisioned.sites
    if name not in sites.active:
        state = "was revoked already" if name in sites.sites else "is not among the sites"
        known = ", ".join(sites.active) or "none"
        raise BractError(
            f"{name} {state} of {config.name}; active are {known}", code="unknown-name"
        )
    if len(sites.active) == 1:
        raise BractError(
            f"{name} is the last site of {config.name}; stop the SuperLink instead",
            code="config-conflict",
        )
    gone = sites.sites[name].model_copy(update={"revoked": today()})
    changed = Sites(sites=sites.sites | {name: gone}, former=sites.former)
    config = _with_sites(config, _kept(config, changed), changed)
    _update_lists(provisioned, config, changed)
    notes = [
        f"{name} is revoked; {provisioned.folder / OPERATOR}: {_AT_THE_OPERATOR}, which shuts its "
        "key out for good",
        f"federations now have {config.clients} clients",
    ]
    beyond = {
        site: i.partition for site, i in changed.active.items() if i.partition >= config.clients
    }
    notes += [
        f"where all sites hold the same data set: {site} has partition {part} of {config.clients}; "
        f"set another in its site.yaml, or add a site"
        for site, part in beyond.items()
    ]
    if config.encryption.uses_paillier:
        notes.append(
            f"{name} still holds its Paillier key or share; provision anew where it must not "
            "decrypt what others send"
        )
    if config.encryption.uses_identities:
        notes.append(
            f"{name}'s identity is among the other sites' peers; take it out of their files, or "
            "provision anew"
        )
    return notes


def renew(provisioned: Provisioned, *, authority: bool) -> list[str]:
    """Make new certificates for the SuperLink and the gateway; return the next steps.

    The operator's files are written as this version of bract writes them.

    Parameters
    ----------
    authority
        Whether the CA gets a new certificate too, for the key that it has.
    """
    folder, config, sites = provisioned.folder, provisioned.config, provisioned.sites
    assert config.deployment is not None
    signer = provisioned.authority
    notes = []
    if authority:
        signer = Authority.create(config.name, config.deployment.days * 10, signer.key)
        write_authority(folder / AUTHORITY, config, signer, sites)
        notes.append(
            f"{folder / OPERATOR / kits.CA}: bring it to every site, in the place of its ca.crt"
        )
        for name in sites.active:
            if (folder / name).is_dir():
                write_bytes(folder / name / kits.CA, certificate_pem(signer.certificate))
                kits.reissue(folder / name, [kits.CA])
                if (folder / name / kits.SIGNATURE).is_file():
                    kits.sign(folder / name, signer.key)
    else:
        check_certificate(folder / AUTHORITY / kits.CA, fix=RENEW_CA)
    write_operator(folder / OPERATOR, _operators(folder, config), signer, sites)
    return [
        f"{folder / OPERATOR}: bring it to the operator, and start the SuperLink and the gateway "
        "again; the sites need nothing",
        *notes,
    ]


def _check_operator(provisioned: Provisioned) -> None:
    """Refuse to change an operator's kit that is of another bract than the one installed here."""
    operator = provisioned.folder / OPERATOR
    if operator.is_dir():
        kits.check_version(read_kit(operator), operator)


def _operators(folder: Path, config: FederationConfig) -> FederationConfig:
    """Return the federation as the operator has changed it, with the sites that there are."""
    path = folder / OPERATOR / FEDERATION
    if not path.is_file():
        return config
    theirs = load_config(path)
    return _checked(
        theirs.model_dump(mode="json")
        | {
            "clients": config.clients,
            "deployment": config.model_dump(mode="json")["deployment"],
            "encryption": config.model_dump(mode="json")["encryption"],
        }
    )


def _kept(config: FederationConfig, sites: Sites, without: str = "") -> list[SiteConfig]:
    assert config.deployment is not None
    active = sites.active
    return [
        site for site in config.deployment.sites if site.name in active and site.name != without
    ]


def _with_sites(
    config: FederationConfig, entries: list[SiteConfig], sites: Sites
) -> FederationConfig:
    """Return the configuration with other sites, checked as one that was read."""
    content = config.model_dump(mode="json")
    content["clients"] = len(entries)
    content["deployment"]["sites"] = [entry.model_dump(mode="json") for entry in entries]
    identities = [issued.identity for issued in sites.active.values() if issued.identity]
    content["encryption"]["identities"] = identities
    return _checked(content)


def _checked(content: dict[str, object]) -> FederationConfig:
    return build_config(content, source=FEDERATION)


def _update_lists(provisioned: Provisioned, config: FederationConfig, sites: Sites) -> None:
    folder = provisioned.folder
    configs = {AUTHORITY: config}
    if (folder / OPERATOR).is_dir():
        configs[OPERATOR] = _operators(folder, config)
    for role, written in configs.items():
        write_text(folder / role / kits.SITES, sites.to_text() + "\n")
        write_text(folder / role / FEDERATION, dump_config(written))
        changed = [kits.SITES, FEDERATION]
        if role == OPERATOR:
            write_gateway(folder / role, read_kit(folder / role), sites)
            changed.append(kits.NGINX)
        kits.reissue(folder / role, changed)
