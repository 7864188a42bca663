"""``bract keygen``, ``provision`` and ``site``: keys, start-up kits, a federation's sites."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bract.cli.console import print_json, say
from bract.cli.examples import epilog
from bract.cli.groups import command_group
from bract.cli.options import DEVICE, Format, FormatOption
from bract.cli.settings import SetOption
from bract.errors import BractError, RunFailedError

if TYPE_CHECKING:
    from bract.kits.administration import Provisioned

KitsOption = Annotated[
    Path, typer.Option("--kits", help="Folder that `bract provision` made, with the CA's key.")
]

site = command_group(
    no_args_is_help=True,
    help="Sites of a provisioned federation: keys, certificates, state, and who may connect.",
)


def keygen(
    folder: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder for the key files.")],
    bits: Annotated[int, typer.Option("--bits", help="2048 or 3072.")] = 2048,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Number of key shares.")] = 3,
    threshold: Annotated[
        int | None,
        typer.Option("--threshold", help="Deal shares of which this many decrypt together."),
    ] = None,
    settings: SetOption = None,
    identity: Annotated[
        bool,
        typer.Option("--identity", help="Write one site's own identity key, and nothing else."),
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Write Paillier keys to OUT_DIR, for clients of encrypted runs.

    --set encryption.randomness and encryption.degree are those of the federation's configuration.
    """
    from bract.cli.keygen import keygen as write
    from bract.cli.keygen import keygen_identity
    from bract.cli.settings import read_section
    from bract.config import build_config

    if identity:
        keygen_identity(folder, as_json=output.is_json)
        return
    section = {
        "scheme": "paillier",
        "key_bits": bits,
        "threshold": threshold,
        "max_weight_sum": max(31, clients),
        **read_section("encryption", settings, ("randomness", "degree")),
    }
    config = build_config({"clients": clients, "encryption": section}, source="keygen")
    write(folder, config.encryption, clients, as_json=output.is_json)


def provision(
    config: Annotated[Path, typer.Argument(help="YAML configuration with a deployment section.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to make, one kit a party in it.")],
    requests: Annotated[
        Path | None,
        typer.Option(
            "--requests",
            help="Folder with one request a site, from `bract site request`: sites keep their "
            "private keys, and kits hold none.",
        ),
    ] = None,
) -> None:
    """Make one start-up kit for the operator, one for each site, and one for the provisioner."""
    from bract.config import load_config
    from bract.kits.kit import read_kit
    from bract.kits.provisioning import deployment_of
    from bract.kits.provisioning import provision as make
    from bract.kits.requests import read_requests

    federation = load_config(config)
    names = [site.name for site in deployment_of(federation, config).sites]
    taken = {} if requests is None else read_requests(requests, names)
    make(federation, out, source=config, requests=taken)
    for name, request in taken.items():
        say(f"{name}: compare with the site, by telephone: {request.fingerprint}")
    if taken:
        authority = read_kit(out / "operator").authority
        say(f"CA, which the sites compare with what `bract site accept` prints: {authority}")
    assert federation.deployment is not None
    count = len(federation.deployment.sites)
    say(f"{out / 'authority'}: the CA's key; it stays with you, and is no part of any machine here")
    say(f"{out / 'operator'}: for the server, at {federation.deployment.server}")
    say(f"{out}: {count} kits of sites; bring each to its site by a confidential way")
    say("then: docs/guide/deployment.md")


@site.command(epilog=epilog("site add"))
def add(
    name: Annotated[str, typer.Argument(help="Name of the new site.")],
    kits: KitsOption = Path("kits"),
    device: Annotated[str, DEVICE] = "auto",
    data: Annotated[
        str | None, typer.Option("--data", help="Folder of the site's own data, at the site.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="Policy file that goes into the kit.")
    ] = None,
    request: Annotated[
        Path | None,
        typer.Option("--request", help="The site's request.json: it made its key itself."),
    ] = None,
) -> None:
    """Make the kit of one more site."""
    from pydantic import ValidationError

    from bract.config.config import SiteConfig
    from bract.kits.administration import add_site
    from bract.kits.requests import read_request

    asked = None if request is None else read_request(request)
    if asked is not None and asked.name != name:
        raise BractError(
            f"{request}: of {asked.name}, expected one of {name}", code="identity-refused"
        )
    try:
        wanted = SiteConfig(
            name=name, device=device, data=data, policy=None if policy is None else str(policy)
        )
    except ValidationError as error:
        raise BractError(
            "; ".join(problem["msg"] for problem in error.errors()), code="config-value"
        ) from None
    _change(kits, lambda provisioned: add_site(provisioned, wanted, request=asked))
    if asked is not None:
        say(f"{name}: compare with the site, by telephone: {asked.fingerprint}")


@site.command("request", epilog=epilog("site request"))
def make_request(
    name: Annotated[str, typer.Argument(help="This site's name in the federation.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to make, for this site's keys.")],
) -> None:
    """Make this site's keys here, and the request that the provisioner answers with a kit."""
    from bract.kits.requests import REQUEST
    from bract.kits.requests import make_request as make

    request = make(name, out)
    say(f"{out}: this site's private keys; keep them here, and back them up")
    say(f"{out / REQUEST}: send it to who provisions; it holds no secret")
    say(f"compare with who provisions, by telephone: {request.fingerprint}")


@site.command(epilog=epilog("site accept"))
def accept(
    kit: Annotated[Path, typer.Argument(help="Kit that was made for this site's request.")],
    keys: Annotated[Path, typer.Option("--keys", help="Folder that `bract site request` made.")],
) -> None:
    """Put this site's own keys into the kit that was returned for its request."""
    from bract.client.policy import load_policy
    from bract.kits.kit import SITE_FILE, read_kit
    from bract.kits.requests import accept_kit
    from bract.kits.site_file import read_site

    authority = accept_kit(kit, keys)
    chosen = read_site(kit, read_kit(kit))
    say(f"read before it starts, {kit / SITE_FILE}: {'; '.join(chosen.decisions())}")
    if chosen.policy is not None:
        policy = kit / chosen.policy
        say(f"read before it starts, {policy}: {'; '.join(load_policy(policy).decisions())}")
    say(f"read before it starts: {kit / 'start.sh'}")
    say(f"{kit}: complete; the federation's CA, to compare with who provisions: {authority}")
    say(f"next: bract doctor --kit {kit}")


@site.command(epilog=epilog("site revoke"))
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the site.")],
    kits: KitsOption = Path("kits"),
) -> None:
    """Note that a site may not connect any more; `bract site register` shuts its key out."""
    from bract.kits.administration import revoke_site

    _change(kits, lambda provisioned: revoke_site(provisioned, name))


@site.command(epilog=epilog("site renew"))
def renew(
    kits: KitsOption = Path("kits"),
    authority: Annotated[
        bool, typer.Option("--authority", help="Also the CA's certificate, for the key it has.")
    ] = False,
) -> None:
    """Make new certificates for the SuperLink and the gateway, for the installed bract."""
    from bract.kits.administration import renew as make

    _change(kits, lambda provisioned: make(provisioned, authority=authority))


@site.command("list", epilog=epilog("site list"))
def list_sites(
    kits: KitsOption = Path("kits"),
    output: FormatOption = Format.DEFAULT,
) -> None:
    """List the sites, and which of them were revoked."""
    from bract.kits.kit import (
        SITES,
    )
    from bract.kits.sites import read_sites

    folders = [kits / "authority", kits / "operator", kits]
    folder = next((folder for folder in folders if (folder / SITES).is_file()), kits)
    sites = read_sites(folder / SITES)
    if output.is_json:
        print_json({name: issued.to_dict() for name, issued in sites.sites.items()})
        return
    for name, issued in sites.sites.items():
        state = f"revoked {issued.revoked}" if issued.revoked else f"issued {issued.issued}"
        say(f"{name}: {state}, partition {issued.partition}")


@site.command(epilog=epilog("site register"))
def register(
    kit: Annotated[Path, typer.Option("--kit", help="The operator's start-up kit.")],
    sockets: Annotated[
        Path | None, typer.Option("--sockets", help="Folder of the SuperLink's socket.")
    ] = None,
) -> None:
    """Register the sites that may connect at the running SuperLink, and shut out revoked ones."""
    from bract.kits.kit import (
        SITES,
        open_kit,
    )
    from bract.kits.registration import register as apply
    from bract.kits.sites import read_sites
    from bract.kits.starting import SOCKETS

    place = open_kit(kit, "operator").socket(sockets or kit / SOCKETS)
    done = apply(read_sites(kit / SITES), place)
    for what, names in (
        ("registered", done.added),
        ("registered before", done.there),
        ("shut out", done.removed),
        ("warning: registered, and not among the sites of this kit", done.unknown),
    ):
        if names:
            say(f"{what}: {', '.join(names)}")


PassphraseOption = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="File (mode 0600) with the passphrase; else asked for."),
]


@site.command("backup", epilog=epilog("site backup"))
def backup(
    kit: Annotated[Path, typer.Option("--kit", help="Start-up kit of a party.")],
    out: Annotated[Path, typer.Option("--out", help="File to make.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Write an encrypted copy of this party's keys and state."""
    from bract.kits.backup import back_up

    count = back_up(kit, out, _passphrase(passphrase_file, confirm=True))
    say(f"{out}: {count} files of {kit}, encrypted; keep the passphrase apart from it")


@site.command("restore", epilog=epilog("site restore"))
def restore(
    copy: Annotated[Path, typer.Argument(help="File that `bract site backup` made.")],
    kit: Annotated[Path, typer.Option("--kit", help="Kit to restore, or to make.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Restore a copy, unless the site has answered or spent anything since it was made."""
    from bract.kits.backup import restore as put_back

    done = put_back(copy, kit, _passphrase(passphrase_file, confirm=False))
    say(f"{kit}: restored as of {done.made}; what was answered and spent since is not in it")
    say(f"next: bract doctor --kit {kit}; end runs that began before {done.made}")


def _passphrase(file: Path | None, *, confirm: bool) -> str:
    from bract.disk import read_private

    if file is None:
        answer: str = typer.prompt(
            "passphrase", hide_input=True, confirmation_prompt=confirm, err=True
        )
        return answer
    text = read_private(file)
    if text is None:
        raise BractError(
            f"{file}: no such file; write the passphrase to it, mode 0600", code="file-missing"
        )
    return text.decode(errors="replace").strip()


@site.command("status", epilog=epilog("site status"))
def show_status(
    kit: Annotated[Path, typer.Option("--kit", help="Start-up kit of a site or the operator.")],
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics", help="File to write for Prometheus, such as node_exporter's bract.prom."
        ),
    ] = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Print the health of this party's part of the federation; exit with 1 where a check fails."""
    from bract.kits.health import examine
    from bract.kits.metrics import write_metrics

    health = examine(kit)
    for what, level, detail in health.findings:
        say(f"{level:<5} {what}: {detail}")
    if metrics is not None:
        write_metrics(metrics, health.samples)
    if output.is_json:
        print_json(health.to_dict())
    if health.failed:
        raise RunFailedError(
            f"{kit}: {health.failed} of {len(health.findings)} checks failed", code="checks-failed"
        )


def _change(kits: Path, change: Callable[[Provisioned], list[str]]) -> None:
    from bract.kits.administration import open_kits

    with open_kits(kits, doing=f"bract site, process {os.getpid()}") as provisioned:
        for line in change(provisioned):
            say(line)
