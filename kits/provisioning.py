"""Make the start-up kits of a federation: one for each party, without another party's secrets."""

from __future__ import annotations

import contextlib
import datetime
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

import bract
from bract.certificates.authority import (
    Authority,
    certificate_pem,
    fingerprint,
    header_key,
    key_pem,
    new_key,
)
from bract.config import FederationConfig, dump_config
from bract.config.config import SiteConfig
from bract.config.deployment import DeploymentConfig
from bract.disk.files import replacing, write_bytes, write_failed, write_text
from bract.disk.permissions import make_private_folder
from bract.errors import BractError
from bract.installed.versions import release
from bract.kits import kit as kits
from bract.kits import kubernetes
from bract.kits.kit import (
    Kit,
)
from bract.kits.rendering import project, render
from bract.kits.requests import SiteRequest
from bract.kits.run_keys import Secrets, with_secrets
from bract.kits.site_file import (
    SiteFile,
)
from bract.kits.sites import Issued, Sites

AUTHORITY, OPERATOR = "authority", "operator"
"""Folders of the kits that are no site's."""

FEDERATION = "federation.yaml"
CA_KEY = "ca.key"
POLICY = "policy.yaml"

_CA_LIFETIMES = 10
"""How many times as long as the certificates that it signs the CA is valid."""


def provision(
    config: FederationConfig,
    out: Path,
    *,
    source: Path,
    requests: Mapping[str, SiteRequest] | None = None,
) -> None:
    """Write a kit a party below ``out``: all of them, or nothing.

    Parameters
    ----------
    source
        The federation's file; policies of sites are named from its folder.
    requests
        Of sites that made their keys themselves, by name: their kits hold no private key.

    Raises
    ------
    BractError
        If the configuration names no sites, ``out`` is there already, or a policy cannot be read.
    """
    deployment = deployment_of(config, source)
    config.check_chosen_clients([site.name for site in deployment.sites], str(source))
    if out.exists() or out.is_symlink():
        raise BractError(
            f"{out}: exists already, and keys that are in use must not be replaced; name another "
            "folder, or add a site to these kits with `bract site add`",
            code="file-taken",
        )
    policies = {site.name: read_policy(site, source) for site in deployment.sites}
    authority = Authority.create(config.name, deployment.days * _CA_LIFETIMES)
    config, secrets = with_secrets(config, requests or {}, fingerprint(authority.certificate))
    with replacing(out) as made:
        make_private_folder(made, private=True)
        issued: dict[str, Issued] = {}
        for number, site in enumerate(deployment.sites):
            issued[site.name] = Issued(
                public_key=secrets[site.name].public_key,
                partition=number,
                issued=today(),
                identity=secrets[site.name].identity,
            )
            write_site(
                made / site.name,
                config,
                authority,
                site,
                number,
                policy=policies[site.name],
                secrets=secrets[site.name],
            )
        sites = Sites(sites=issued)
        write_operator(made / OPERATOR, config, authority, sites)
        write_authority(made / AUTHORITY, config, authority, sites)


def deployment_of(config: FederationConfig, source: Path) -> DeploymentConfig:
    """Return the section that names the sites."""
    if config.deployment is None:
        raise BractError(
            f"{source}: has no deployment section, so it names no site to make a kit for; add "
            "`deployment: {server: HOST, sites: [NAME, ...]}` with one name a client",
            code="config-key",
        )
    return config.deployment


def read_policy(site: SiteConfig, source: Path) -> bytes | None:
    """Return the text of the policy that a site begins with, once it was checked."""
    from bract.client.policy import load_policy

    if site.policy is None:
        return None
    path = source.parent / site.policy
    load_policy(path)
    return path.read_bytes()


def write_site(
    folder: Path,
    config: FederationConfig,
    authority: Authority,
    site: SiteConfig,
    partition: int,
    *,
    policy: bytes | None,
    secrets: Secrets,
) -> None:
    """Write the kit of one site."""
    assert config.deployment is not None
    scheme = config.encryption.scheme
    file = SiteFile(
        name=site.name,
        partition=partition,
        device=site.device,
        data=site.data,
        policy=POLICY if policy is not None else None,
        require_encryption=False if scheme == "none" else scheme,
        paillier_key=_given(secrets, kits.PAILLIER_KEY, kits.PAILLIER_SEALED),
        identity_key=kits.IDENTITY_KEY if secrets.identity is not None else None,
        peers=kits.PEERS if secrets.peers is not None else None,
    )
    kit = _kit(config, authority, "site", site.name)
    facts = {
        "name": site.name,
        "federation": config.name,
        "project": project(f"{config.name}-{site.name}"),
        "address": kit.address,
        "version": kit.made_by,
        "tag": _tag(kit.made_by),
        "what": f"the site {site.name} of {config.name}",
        "done": f"{site.name}: the SuperNode answers; what it logs: sh start.sh logs --follow",
        "folders": "state",
        "commands": "supernode",
        "data": site.data,
        "data_mount": _mount(site.data),
        "cuda": site.device.startswith("cuda"),
    }
    with _kit_folder(folder, kit, authority) as made:
        write_text(made / kits.NODE_PUBLIC, secrets.public_key + "\n")
        for name, content in secrets.files.items():
            _write_secret(made / name, content)
        if secrets.peers is not None:
            write_text(made / kits.PEERS, secrets.peers)
        if policy is not None:
            write_bytes(made / POLICY, policy)
        write_text(made / kits.SITE_FILE, _site_text(file))
        render(made / "compose.yaml", "compose-site.yaml.j2", facts)
        render(made / "bract-site.service", "supernode.service.j2", facts)
        render(made / "start.sh", "start.sh.j2", facts)
        render(made / "README.md", "README-site.md.j2", facts)
        kubernetes.write_for_site(made, facts, config.deployment)
        make_private_folder(made / "state", private=True)


def write_operator(
    folder: Path, config: FederationConfig, authority: Authority, sites: Sites
) -> None:
    """Write the operator's kit, with new certificates for the SuperLink and the gateway.

    What an earlier one keeps in folders of its own (the SuperLink's state) stays.
    """
    deployment = config.deployment
    assert deployment is not None
    kit = _kit(config, authority, "operator", OPERATOR)
    facts = {
        "federation": config.name,
        "project": project(f"{config.name}-operator"),
        "port": deployment.port,
        "superlink_port": kit.superlink_port,
        "version": kit.made_by,
        "tag": _tag(kit.made_by),
        "run": config.name,
        "what": f"the server of {config.name}",
        "done": f"{config.name}: SuperLink, server apps and gateway answer; next: README.md",
        "folders": "state sockets runs",
        "commands": "operator|audit",
    }
    superlink, gateway = new_key(), new_key()
    local = ["superlink", "localhost", "127.0.0.1"]
    with _kit_folder(folder, kit, authority) as made:
        _write_secret(made / kits.SUPERLINK_KEY, key_pem(superlink))
        certificate = authority.issue("superlink", superlink, hosts=local, days=deployment.days)
        write_bytes(made / kits.SUPERLINK, certificate_pem(certificate))
        _write_secret(made / kits.GATEWAY_KEY, key_pem(gateway))
        certificate = authority.issue(
            "gateway", gateway, hosts=[deployment.server], days=deployment.days, client=True
        )
        write_bytes(made / kits.GATEWAY, certificate_pem(certificate))
        write_text(made / kits.SITES, sites.to_text() + "\n")
        write_text(made / FEDERATION, dump_config(config))
        write_gateway(made, kit, sites)
        render(made / "compose.yaml", "compose-operator.yaml.j2", facts)
        render(made / "superlink.service", "superlink.service.j2", facts)
        render(made / "superexec.service", "superexec.service.j2", facts)
        render(made / "gateway.service", "gateway.service.j2", facts)
        render(made / "gateway.logrotate", "gateway.logrotate.j2", facts)
        render(made / "register.sh", "register.sh.j2", facts)
        render(made / "start.sh", "start.sh.j2", facts)
        render(made / "README.md", "README-operator.md.j2", facts)
        kubernetes.write_for_operator(made, facts)
        for name in ("state", "sockets", "runs"):
            make_private_folder(made / name, private=True)


def write_gateway(folder: Path, kit: Kit, sites: Sites) -> None:
    """Write the gateway's configuration, which admits the keys of the active sites alone."""
    facts = {
        "federation": kit.federation,
        "server": f"[{kit.server}]" if ":" in kit.server else kit.server,
        "by_name": _is_name(kit.server),
        "port": kit.port,
        "superlink": kit.superlink,
        "release": release(),
        "sites": [
            {"name": name, "key": header_key(issued.public_key)}
            for name, issued in sites.active.items()
        ],
    }
    render(folder / kits.NGINX, "nginx.conf.j2", facts)


def write_authority(
    folder: Path, config: FederationConfig, authority: Authority, sites: Sites
) -> None:
    """Write the kit that stays with the provisioner: the CA's key, and the list of issued kits."""
    kit = _kit(config, authority, "authority", AUTHORITY)
    with _kit_folder(folder, kit, authority) as made:
        _write_secret(made / CA_KEY, key_pem(authority.key))
        write_text(made / kits.SITES, sites.to_text() + "\n")
        write_text(made / FEDERATION, dump_config(config))


def _kit(config: FederationConfig, authority: Authority, role: str, name: str) -> Kit:
    assert config.deployment is not None
    return Kit.parse(
        {
            "schema": Kit.version(),
            "role": role,
            "name": name,
            "federation": config.name,
            "authority": fingerprint(authority.certificate),
            "made_by": bract.__version__,
            "server": config.deployment.server,
            "port": config.deployment.port,
            "superlink_port": config.deployment.superlink_port,
            "issued": today(),
        },
        source=kits.KIT,
    )


@contextlib.contextmanager
def _kit_folder(folder: Path, kit: Kit, authority: Authority) -> Iterator[Path]:
    """Write the files that every kit has, and checksums when the block has written the others.

    Where the folder is there, its files are replaced one by one, the checksums last; folders in it
    stay as they are.
    """
    with replacing(folder) if not folder.is_dir() else _next_to(folder) as made:
        make_private_folder(made, private=True)
        write_bytes(made / kits.CA, certificate_pem(authority.certificate))
        write_text(made / kits.KIT, kit.to_text() + "\n")
        yield made
        write_text(made / kits.SUMS, kits.sums(made))
        if (made / kits.NODE_PUBLIC).is_file() and not (made / kits.NODE_KEY).exists():
            # It is returned to a site that made its keys, over a way that may change it.
            kits.sign(made, authority.key)


@contextlib.contextmanager
def _next_to(folder: Path) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".kit-") as place:
            made = Path(place) / folder.name
            yield made
            for file in sorted(
                made.iterdir(), key=lambda path: path.name in (kits.SUMS, kits.SIGNATURE)
            ):
                if file.is_file():
                    file.replace(folder / file.name)
    except OSError as error:
        raise write_failed(folder, error) from error


def _site_text(site: SiteFile) -> str:
    comments = {
        "partition": "part of the data, where every site holds the same data set",
        "device": "auto, cpu or cuda:N",
        "data": "folder of this site's own data, in place of the run's data.path",
        "models": "code of this site's own that runs may name, as package.module:callable",
        "policy": "what this site demands of every run: docs/guide/site-policy.md",
        "state": "what survives a restart",
        "truth": "folder to keep what was trained on, for scoring an audit; null keeps nothing",
        "app": "the one installed ClientApp that runs here",
        "port": "what the SuperNode's socket is named for",
    }
    lines = ["# What this site decides for itself. Relative paths begin in this folder."]
    for key, value in site.model_dump(mode="json").items():
        text = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True).strip()
        lines.append(f"{text}  # {comments[key]}" if key in comments else text)
    return "\n".join(lines) + "\n"


def _mount(data: str | None) -> str:
    return yaml.safe_dump(f"{data}:{data}:ro", width=10_000).splitlines()[0] if data else ""


def _given(secrets: Secrets, name: str, sealed: str) -> str | None:
    return name if {name, sealed} & set(secrets.files) else None


def _write_secret(path: Path, content: bytes) -> None:
    write_bytes(path, content, private=True)


def _tag(version: str) -> str:
    """Return a version as an image's tag has it, which knows no plus."""
    return version.replace("+", "-")


def _is_name(server: str) -> bool:
    return re.fullmatch(r"[0-9.]+", server) is None and ":" not in server


def today() -> str:
    """Return the time as kits have it, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
