"""A start-up kit: one folder with what one party needs to take part in one federation.

``kit.json`` names its party, ``SHA256SUMS`` has its files as issued. What a party may change
(its site file, policy, how its processes are started) is separate from what it must not: keys,
certificates and `Kit` itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field

import bract
from bract.disk import open_named
from bract.disk.files import write_bytes, write_text
from bract.errors import BractError, one_line, shown
from bract.schema.record import Line, VersionedRecord

KIT = "kit.json"
SUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
"""The CA's signature of the checksums as they were issued (ECDSA, SHA-384)."""
CA = "ca.crt"
SITE_FILE = "site.yaml"
NODE_KEY = "node.key"
NODE_PUBLIC = "node.pub"
PAILLIER_KEY = "paillier.pem"
PAILLIER_SEALED = "paillier.sealed"
IDENTITY_KEY = "identity.pem"
PEERS = "peers.txt"
SITES = "sites.json"
SUPERLINK = "superlink.crt"
SUPERLINK_KEY = "superlink.key"
GATEWAY = "gateway.crt"
GATEWAY_KEY = "gateway.key"
NGINX = "nginx.conf"
STATE = "state"
"""Folder of a kit for what survives a restart; empty in a new one."""

SECRETS = frozenset({NODE_KEY, PAILLIER_KEY, IDENTITY_KEY, SUPERLINK_KEY, GATEWAY_KEY, "ca.key"})
"""Files that their owner alone may read."""

FIXED = SECRETS | {KIT, CA, NODE_PUBLIC, SUPERLINK, GATEWAY, PEERS, PAILLIER_SEALED}
"""Files that must not change: a kit that has others was damaged, or mixed with another kit."""

LARGEST = 1 << 22
"""Bytes of the largest text of a kit that is read."""

_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._-]*)")


Port = Annotated[int, Field(ge=1, le=65535)]


class KitError(BractError):
    """A kit that cannot be used as it is."""

    code = "kit-faulty"


class Kit(VersionedRecord):
    """``kit.json``: whose kit this is, and of which federation.

    Attributes
    ----------
    role
        Which party it is for.
    name
        The site's name; of the others their role.
    federation
        The federation's name.
    authority
        SHA-256 of the public key of the federation's CA, in hexadecimal.
    made_by
        The bract that made the kit; the operator's is the one that every party runs.
    server, port
        Address of the gateway for the sites.
    superlink_port
        Where, on the loopback interface, the gateway reaches the SuperLink.
    issued
        When, ISO 8601, UTC.
    """

    kind: ClassVar[str] = "start-up kit"
    remedy: ClassVar[str] = "use the bract that made the kit, or have a new one made"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    role: Literal["authority", "operator", "site"]
    name: Line
    federation: Line
    authority: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    made_by: Line
    server: Line
    port: Port
    superlink_port: Port
    issued: Line

    @property
    def superlink(self) -> str:
        """The SuperLink's ``host:port``, which the gateway alone reaches, on the same machine."""
        return f"127.0.0.1:{self.superlink_port}"

    def socket(self, folder: Path) -> Path:
        """Return the socket of the SuperLink whose sockets are in ``folder``."""
        return folder / f"{self.superlink_port}.sock"

    @property
    def address(self) -> str:
        """The gateway's ``host:port``."""
        return (
            f"[{self.server}]:{self.port}" if ":" in self.server else f"{self.server}:{self.port}"
        )


@dataclass(frozen=True)
class Files:
    """Differences of a kit's files from their state when issued."""

    changed: list[str] = field(default_factory=list)
    """Changed, permitted to the kit's owner."""

    broken: list[str] = field(default_factory=list)
    """The faults, in words."""


def read_kit(folder: Path) -> Kit:
    """Read ``kit.json``.

    Raises
    ------
    KitError
        If the folder is no kit.
    BractError
        If the kit is of another schema, or damaged.
    """
    path = folder / KIT
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise KitError(
            f"{folder}: no start-up kit, for it has no {KIT}; name the folder of one party, such "
            "as kits/operator",
            code="file-missing",
        ) from None
    return Kit.parse_text(text, source=str(path))


def open_kit(folder: Path, role: str) -> Kit:
    """Return the kit in ``folder``, which must be of one party."""
    kit = read_kit(folder)
    if kit.role != role:
        raise KitError(
            f"{folder}: this is the kit of the {_party(kit)}, expected one of {_of(role)}",
            code="usage",
        )
    return kit


def check_version(kit: Kit, folder: Path) -> None:
    """Refuse an operator's kit that was made for another version of bract than this one."""
    if kit.made_by != bract.__version__:
        raise KitError(
            f"{folder}: made for bract {kit.made_by}, and {bract.__version__} is installed here; "
            f"install bract {kit.made_by}, or upgrade every party and run `bract site renew`",
            code="bract-version",
        )


def sums(folder: Path) -> str:
    """Return the text of ``SHA256SUMS`` for the files in a folder, as sha256sum has it."""
    lines = [
        f"{_digest(path)}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in (SUMS, SIGNATURE)
    ]
    return "".join(lines)


def sign(folder: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Sign the checksums of a kit with the CA's key."""
    signature = key.sign(read_text(folder / SUMS), ec.ECDSA(hashes.SHA384()))
    write_bytes(folder / SIGNATURE, signature)


def check_only_files(folder: Path) -> None:
    """Refuse a new kit with anything but regular files and an empty folder for state.

    Nothing is opened: a link could lead to any file, and a pipe would be waited for.

    Raises
    ------
    KitError
        Naming what is there besides.
    """
    wrong: list[str] = []

    def unreadable(error: OSError) -> None:
        if Path(error.filename) != folder:
            wrong.append(f"{Path(error.filename).relative_to(folder)} (cannot be listed)")

    for place, folders, files in os.walk(folder, onerror=unreadable):
        for path in (Path(place, name) for name in sorted(folders + files)):
            name, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode
            if stat.S_ISREG(mode) and "/" not in name:
                continue
            if not stat.S_ISDIR(mode):
                kind = "link" if stat.S_ISLNK(mode) else "file" if stat.S_ISREG(mode) else "device"
                wrong.append(f"{name} ({kind})")
            elif name != STATE and os.access(path, os.R_OK) and not any(path.iterdir()):
                wrong.append(f"{name} (folder)")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise KitError(
            f"{folder}: {', '.join(wrong[:3])}{more} cannot be in a new kit, expected the files of "
            f"{SUMS} and an empty {STATE}; ask for the kit again"
        )


def check_signature(folder: Path) -> None:
    """Hold every file of a returned kit to the signature of the CA in it.

    The fingerprint of that CA is what site and provisioner compare.

    Raises
    ------
    KitError
        If a file was changed, added or removed since the provisioner made the kit.
    """
    check_only_files(folder)
    issued = _issued(folder)
    try:
        authority = x509.load_pem_x509_certificate(read_text(folder / CA)).public_key()
        assert isinstance(authority, ec.EllipticCurvePublicKey)
        signature = read_text(folder / SIGNATURE)
        authority.verify(signature, read_text(folder / SUMS), ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, AssertionError, ValueError, OSError) as error:
        raise KitError(
            f"{folder}: {SUMS} is not signed by the CA in {CA}, so the kit was changed on the way; "
            "ask for it again"
        ) from error
    files = {path.name for path in folder.iterdir() if not path.is_dir()} - {SUMS, SIGNATURE}
    wrong = [name for name in sorted(files | set(issued)) if not _as_issued(folder, name, issued)]
    if wrong:
        raise KitError(
            f"{folder}: {', '.join(wrong[:3])} is not as the provisioner made it; ask for the kit "
            "again"
        )


def _as_issued(folder: Path, name: str, issued: Mapping[str, str]) -> bool:
    file = folder / name
    return file.is_file() and not file.is_symlink() and _digest(file) == issued.get(name)


def reissue(folder: Path, names: Collection[str]) -> None:
    """Write the checksums of some files of a kit anew; the others stay as they were issued.

    Raises
    ------
    KitError
        If the checksums cannot be read.
    """
    issued = _issued(folder) | {name: _digest(folder / name) for name in names}
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(issued.items()))
    write_text(folder / SUMS, text)


def _issued(folder: Path) -> dict[str, str]:
    path = folder / SUMS
    try:
        lines = read_text(path).decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KitError(
            f"{path}: the checksums cannot be read ({one_line(error, 200)}); have the kit made "
            "anew",
            code="file-unreadable",
        ) from error
    found = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            raise KitError(f"{path}: {shown(line)} is no line of checksums; have the kit made anew")
        found[match[2]] = match[1]
    return found


def check_files(folder: Path) -> Files:
    """Compare the files of a kit with how they were issued.

    Raises
    ------
    KitError
        If there are no checksums, or they cannot be read.
    """
    found = Files()
    issued = _issued(folder)
    if NODE_PUBLIC in issued and NODE_KEY not in issued:
        found.broken.append(
            f"{NODE_KEY} is not in it yet, because the site made its keys: `bract site accept "
            f"{folder} --keys DIR` puts them here"
        )
    for name, digest in issued.items():
        file = folder / name
        try:
            if file.is_symlink() and name in FIXED:
                found.broken.append(f"{name} is a link")
            elif not stat.S_ISREG(file.stat().st_mode):
                found.broken.append(f"{name} is no regular file")
            elif _digest(file) != digest:
                (found.broken if name in FIXED else found.changed).append(
                    f"{name} is not the file that was issued" if name in FIXED else name
                )
            elif name in SECRETS and stat.S_IMODE(file.stat().st_mode) & 0o077:
                mode = stat.S_IMODE(file.stat().st_mode)
                found.broken.append(
                    f"other users may read {name} (mode {mode:04o}): chmod 600 {file}"
                )
        except FileNotFoundError:
            found.broken.append(f"{name} is missing")
        except OSError as error:
            found.broken.append(f"{name} cannot be read: {one_line(error, 200)}")
    return found


def read_text(path: Path) -> bytes:
    """Return the text of a file of a kit; `KitError` where it is too large for one."""
    with open_named(path) as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise KitError(f"{path}: has more than {LARGEST} bytes; have the kit made anew")
    return text


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _party(kit: Kit) -> str:
    return f"site {kit.name}" if kit.role == "site" else kit.role


def _of(role: str) -> str:
    return "a site" if role == "site" else f"the {role}"
