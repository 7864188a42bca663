"""``bract doctor --kit``: whether one party's start-up kit works here, before a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from bract.certificates.authority import (
    fingerprint,
    read_certificate,
    read_node_key,
)
from bract.certificates.validity import (
    check_key,
    check_signed,
    expiry,
)
from bract.cli.console import print_json, say
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, one_line
from bract.kits import gateway
from bract.kits import kit as kits
from bract.kits.kit import (
    Kit,
    KitError,
    check_files,
    read_kit,
)
from bract.kits.site_file import (
    SiteFile,
    read_site,
)
from bract.runtime import sockets

Check = Callable[[], str]

_WARN = "WARN  "
"""What begins the words of a check that passed for now."""


def examine_kit(folder: Path, *, as_json: bool = False) -> None:
    """Print one line a check to stderr, and with ``as_json`` one document to stdout.

    Raises
    ------
    KitError
        If a check fails; the lines before name it, and the fix.
    """
    folder = folder.absolute()
    kit = read_kit(folder)
    say(f"kit of {kit.name} ({kit.role}) in the federation {kit.federation}, bract {kit.made_by}")
    found = [_outcome(what, check) for what, check in _checks(folder, kit)]
    if as_json:
        print_json(found)
    failed = sum(outcome["status"] == "FAIL" for outcome in found)
    if failed:
        raise KitError(f"{folder}: {failed} of {len(found)} checks failed", code="checks-failed")


def _outcome(what: str, check: Check) -> dict[str, str]:
    try:
        detail, status = check(), "ok"
        if detail.startswith(_WARN):
            detail, status = detail.removeprefix(_WARN), "WARN"
    except BractError as error:
        detail, status = str(error), "FAIL"
    say(f"{status:<5} {what}: {detail}")
    return {"check": what, "status": status, "detail": detail}


def _checks(folder: Path, kit: Kit) -> Iterator[tuple[str, Check]]:
    yield "files", lambda: _files(folder)
    if kit.role == "authority":
        yield "CA", lambda: _certificate(folder, kits.CA, _RENEW_CA, kit)
        return
    yield "CA", lambda: _certificate(folder, kits.CA, _NEW_CA, kit)
    if kit.role == "operator":
        yield "version", lambda: _version(folder, kit)
        for name, key in ((kits.SUPERLINK, kits.SUPERLINK_KEY), (kits.GATEWAY, kits.GATEWAY_KEY)):
            yield name, lambda name=name, key=key: _own(folder, name, key)  # type: ignore[misc]
        yield "nginx", lambda: _nginx(folder)
        yield "SuperLink", lambda: _superlink(folder, kit)
        yield "gateway", lambda: _gateway(folder, kit)
        return
    yield "key", lambda: _node_key(folder)
    yield "gateway", lambda: _gateway(folder, kit)
    try:
        site = read_site(folder, kit)
    except BractError as error:
        problem = str(error)

        def fail() -> str:
            raise KitError(problem)

        yield kits.SITE_FILE, fail
        return
    yield kits.SITE_FILE, lambda: f"{site.name}, partition {site.partition}, runs {site.app}"
    yield "device", lambda: _device(site)
    yield "policy", lambda: _policy(folder, site)
    yield "data", lambda: _data(folder, site)
    yield "state", lambda: _state(folder, site)
    if site.paillier_key is not None:
        yield "Paillier key", lambda: _paillier(folder, site)


_RENEW_CA = "renew it with `bract site renew --authority`"
_NEW_CA = "ask who provisions for the federation's new CA certificate"
_RENEW = "renew it with `bract site renew`, where the CA's key is"


def _files(folder: Path) -> str:
    found = check_files(folder)
    if found.broken:
        raise KitError("; ".join(found.broken))
    if found.changed:
        return f"as issued, but for {', '.join(found.changed)}, changed here since"
    return "as issued"


def _version(folder: Path, kit: Kit) -> str:
    kits.check_version(kit, folder)
    return kit.made_by


def _certificate(folder: Path, name: str, fix: str, kit: Kit) -> str:
    certificate = read_certificate(folder / name)
    if fingerprint(certificate) != kit.authority:
        raise KitError(
            f"{folder / name} is the CA of another federation than {kit.federation}, whose kit "
            "this is; take the kit from where it was issued",
            code="identity-refused",
        )
    return _ends(folder, name, fix)


def _own(folder: Path, name: str, key: str) -> str:
    check_signed(folder / name, folder / kits.CA)
    check_key(folder / name, folder / key)
    return _ends(folder, name, _RENEW)


def _ends(folder: Path, name: str, fix: str) -> str:
    certificate = read_certificate(folder / name)
    soon = expiry(certificate, str(folder / name), fix=fix)
    if soon is not None:
        return f"{_WARN}{soon}"
    return f"valid until {certificate.not_valid_after_utc:%Y-%m-%d}"


def _node_key(folder: Path) -> str:
    from bract.certificates.authority import (
        node_public_text,
    )

    public = node_public_text(read_node_key(folder / kits.NODE_KEY).public_key())
    if (folder / kits.NODE_PUBLIC).read_text(encoding="ascii").split()[:2] != public.split()[:2]:
        raise KitError(
            f"{kits.NODE_PUBLIC} is not the public half of {kits.NODE_KEY}", code="key-mismatch"
        )
    return "readable by this user alone"


def _gateway(folder: Path, kit: Kit) -> str:
    found = gateway.ask(kit, folder)
    if found.soon is not None:
        return f"{_WARN}{found.soon}"
    ends = found.certificate.not_valid_after_utc
    return (
        f"{kit.address} answers, certificate valid until {ends:%Y-%m-%d}, clocks differ by "
        f"{abs(found.ahead):.0f} s"
    )


def _superlink(folder: Path, kit: Kit) -> str:
    from bract.kits.starting import SOCKETS

    place = kit.socket(folder / SOCKETS)
    if not sockets.is_healthy(place):
        raise KitError(
            f"{place}: no SuperLink answers there; start it: bract superlink --kit {folder}",
            code="superlink-unreachable",
        )
    return f"answers on {place}"


def _nginx(folder: Path) -> str:
    if not (folder / "nginx.conf").is_file():
        raise KitError("nginx.conf is missing; `bract site renew` writes it", code="file-missing")
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    return found or "not on this machine's path; it runs in a container, or install it"


def _device(site: SiteFile) -> str:
    from bract.client.site import pick_device

    return str(pick_device(site.device))


def _policy(folder: Path, site: SiteFile) -> str:
    from bract.client.policy import load_policy

    if site.policy is None:
        return "none: this site demands nothing of a run"
    path = folder / site.policy
    cautions = load_policy(path).cautions()
    return f"{_WARN if cautions else ''}{'; '.join([str(path), *cautions])}"


def _data(folder: Path, site: SiteFile) -> str:
    if site.data is None:
        return "what the run names"
    path = folder / site.data
    if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        raise KitError(
            f"{path}: no folder that this user may read; set data in {kits.SITE_FILE} to where "
            "this site's images are",
            code="file-missing",
        )
    if not any(path.iterdir()):
        raise KitError(
            f"{path}: is empty; set data in {kits.SITE_FILE} to this site's images",
            code="data-empty",
        )
    return str(path)


def _state(folder: Path, site: SiteFile) -> str:
    path = folder / site.state
    try:
        make_private_folder(path, private=True)
    except OSError as error:
        raise KitError(
            f"{path}: cannot be made: {one_line(error, 200)}", code="file-unwritable"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise KitError(
            f"{path}: this user may not write there; chown it to who runs the SuperNode",
            code="file-unwritable",
        )
    free = shutil.disk_usage(path).free / 2**30
    if free < 1:
        raise KitError(
            f"{path}: {free:.1f} GiB free, expected at least 1 GiB", code="file-unwritable"
        )
    return f"{path}, {free:.0f} GiB free"


def _paillier(folder: Path, site: SiteFile) -> str:
    from bract.protocol.keyfiles import read_key_file

    assert site.paillier_key is not None
    key = read_key_file(folder / site.paillier_key)
    return f"{type(key).__name__} of key {key.public.key_id}"
