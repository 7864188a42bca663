"""Keys that a site makes itself: a request goes out, a kit without private keys is returned.

A request holds the public halves of a SuperNode's key (P-384) and of an X25519 identity, and is
signed with the former: who sends it has the private key. Who provisions seals what only the site
may read, its Paillier key or share, to the identity.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field

from bract.certificates.authority import (
    fingerprint,
    new_key,
    node_key_text,
    node_public_text,
    read_certificate,
    read_node_key,
)
from bract.config.client_names import check_name
from bract.disk.files import replacing, write_bytes, write_text
from bract.disk.named import unreadable
from bract.errors import one_line, shown
from bract.kits import kit as kits
from bract.kits.kit import KitError, check_files, open_kit
from bract.kits.site_file import SiteFile, read_site
from bract.schema.record import VersionedRecord

if TYPE_CHECKING:
    from bract.paillier.exchange import Context

REQUEST = "request.json"

_PUBLIC_BYTES = 32


class SiteRequest(VersionedRecord):
    """``request.json``: what a site asks to be provisioned for; nothing in it is secret.

    Attributes
    ----------
    name
        The site's name in the federation.
    public_key
        Of its SuperNode, one line as OpenSSH writes it.
    identity
        Its X25519 public key, in hexadecimal.
    signature
        Of all the other fields, by the SuperNode's key (ECDSA, SHA-384), in base64.
    """

    kind: ClassVar[str] = "request for a kit"
    remedy: ClassVar[str] = "have the site make it with the bract that is installed here"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str
    public_key: Annotated[str, Field(max_length=1000)]
    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(max_length=400)] = ""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public halves, for two people to compare by another way."""
        digest = hashlib.sha256(_signed_part(self)).hexdigest()[:40]
        return "-".join(digest[at : at + 5] for at in range(0, len(digest), 5))

    def check(self, source: str) -> None:
        """Refuse a request whose keys no site could use, or that its key did not sign.

        Raises
        ------
        KitError
            Naming the field.
        """
        from bract.paillier.errors import SealError
        from bract.paillier.exchange import require_usable

        check_name(self.name)
        try:
            key = serialization.load_ssh_public_key(self.public_key.encode())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise KitError(f"{source}: public_key is no public key of OpenSSH's") from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
            key.curve, ec.SECP384R1
        ):
            raise KitError(
                f"{source}: public_key is no key on P-384, as `bract site request` makes"
            )
        if node_public_text(key) != self.public_key:
            raise KitError(f"{source}: public_key holds more than a key, such as a comment; cut it")
        try:
            require_usable(bytes.fromhex(self.identity))
            signature = base64.b64decode(self.signature, validate=True)
            key.verify(signature, _signed_part(self), ec.ECDSA(hashes.SHA384()))
        except SealError as error:
            raise KitError(f"{source}: the site {self.name} {error}") from error
        except (InvalidSignature, binascii.Error) as error:
            raise KitError(
                f"{source}: its signature is not that of its key, so it was changed on the way; "
                "have the site send it again"
            ) from error


def make_request(name: str, folder: Path) -> SiteRequest:
    """Make a site's keys in a new folder, and the request to the provisioner.

    Parameters
    ----------
    name
        The site's name in the federation's file.
    folder
        Folder to make, mode 0700: ``node.key`` and ``identity.pem`` never leave it.
    """
    from bract.paillier.exchange import make_identity
    from bract.paillier.keyfile import dump_identity

    check_name(name)
    if folder.exists() or folder.is_symlink():
        raise KitError(
            f"{folder}: exists already; keys in use must not be replaced, name another",
            code="file-taken",
        )
    key, identity = new_key(), make_identity()
    public = node_public_text(key.public_key())
    blank = SiteRequest(name=name, public_key=public, identity=identity.public.hex())
    signature = key.sign(_signed_part(blank), ec.ECDSA(hashes.SHA384()))
    request = blank.model_copy(update={"signature": base64.b64encode(signature).decode()})
    with replacing(folder) as made:
        made.mkdir(mode=0o700, parents=True)
        write_bytes(made / kits.NODE_KEY, node_key_text(key), private=True)
        write_bytes(made / kits.IDENTITY_KEY, dump_identity(identity), private=True)
        write_text(made / REQUEST, request.to_text() + "\n")
    return request


def read_request(path: Path) -> SiteRequest:
    """Read and check one request."""
    try:
        text = kits.read_text(path)
    except OSError as error:
        raise unreadable(path, error, KitError) from error
    request = SiteRequest.parse_text(text, source=str(path))
    request.check(str(path))
    return request


def read_requests(folder: Path, names: list[str]) -> dict[str, SiteRequest]:
    """Read the requests (``*.json``) in a folder, one for each of the named sites.

    Raises
    ------
    KitError
        If a site has none or two, a request is of no such site, or two sites sent one key or
        identity.
    """
    found: dict[str, SiteRequest] = {}
    for path in sorted(folder.glob("*.json")):
        request = read_request(path)
        if request.name not in names:
            raise KitError(
                f"{path}: of {request.name}, expected one of {', '.join(names)}",
                code="identity-refused",
            )
        if request.name in found:
            raise KitError(
                f"{path}: a second request of {request.name}; keep the right one",
                code="identity-refused",
            )
        if request.public_key in {other.public_key for other in found.values()}:
            raise KitError(
                f"{path}: has the key of another site; each site makes its own",
                code="identity-refused",
            )
        owner = next((n for n, o in found.items() if o.identity == request.identity), None)
        if owner is not None:
            raise KitError(
                f"{path}: has the identity {request.identity} of {owner}; each site makes its own",
                code="identity-refused",
            )
        found[request.name] = request
    missing = [name for name in names if name not in found]
    if missing:
        raise KitError(
            f"{folder}: holds no request of {', '.join(missing)}; each site makes one with `bract "
            f"site request NAME --out DIR` and sends its {REQUEST}",
            code="file-missing",
        )
    return found


def seal_for(request: SiteRequest, secret: bytes, federation: str, authority: str) -> bytes:
    """Return a secret that only the site that made a request can open.

    Parameters
    ----------
    authority
        `fingerprint` of the federation's CA; box, federation and site belong together.
    """
    from bract.paillier.exchange import make_identity, seal

    sender = make_identity()
    place = _context(federation, authority, request.name)
    return sender.public + seal(secret, bytes.fromhex(request.identity), place, sender=sender)


def accept_kit(folder: Path, keys: Path) -> str:
    """Put a site's own keys into the kit that was returned; return the CA's fingerprint.

    Parameters
    ----------
    folder
        The kit, without private keys.
    keys
        Folder that `make_request` made.

    Raises
    ------
    KitError
        If the kit was made for another request, is damaged, or would use another identity than the
        site's own.
    """
    kits.check_only_files(folder)  # before any of them is opened
    kit = open_kit(folder, "site")
    kits.check_signature(folder)
    request = read_request(keys / REQUEST)
    issued = _text(folder / kits.NODE_PUBLIC).decode(errors="replace").strip()
    if (kit.name, issued) != (request.name, request.public_key):
        raise KitError(
            f"{folder}: the kit of {kit.name} was not made for the request in {keys}, of "
            f"{request.name}; take the kit and the keys that belong together",
            code="identity-refused",
        )
    authority = fingerprint(read_certificate(folder / kits.CA))
    if authority != kit.authority:
        raise KitError(
            f"{folder}: {kits.CA} is another federation's; ask for the kit again",
            code="identity-refused",
        )
    broken = [text for text in check_files(folder).broken if not text.startswith(kits.NODE_KEY)]
    if broken:
        raise KitError(f"{folder}: {'; '.join(broken)}; ask for the kit again")
    site = read_site(folder, kit)
    _check_identity(folder, site, request)
    secrets = {kits.NODE_KEY: _text(keys / kits.NODE_KEY)}
    if node_public_text(read_node_key(keys / kits.NODE_KEY).public_key()) != request.public_key:
        raise KitError(
            f"{keys}: {kits.NODE_KEY} is not the key of {REQUEST}; make a new request",
            code="key-mismatch",
        )
    if site.identity_key is not None:
        secrets[kits.IDENTITY_KEY] = _own_identity(keys, request)
    if (folder / kits.PAILLIER_SEALED).is_file():
        place = _context(kit.federation, authority, kit.name)
        secrets[kits.PAILLIER_KEY] = _open(folder, keys, place)
    for name, content in secrets.items():
        write_bytes(folder / name, content, private=True)
    kits.reissue(folder, list(secrets))
    (folder / kits.SIGNATURE).unlink()
    return authority


def _check_identity(folder: Path, site: SiteFile, request: SiteRequest) -> None:
    """Refuse a site file by which the site would be known by an identity that it did not make."""
    listed = (folder / kits.PEERS).is_file() or site.peers is not None
    # What demands encryption and pins nobody would let the server answer for every other site.
    pinned = listed or bool(site.require_encryption)
    allowed = (kits.IDENTITY_KEY,) if pinned else (None, kits.IDENTITY_KEY)
    if site.identity_key not in allowed:
        raise KitError(
            f"{folder / kits.SITE_FILE}: identity_key is {shown(site.identity_key)}, expected "
            f"{kits.IDENTITY_KEY}, where this site's own identity is put; ask for the kit again",
            code="identity-refused",
        )
    if not pinned:
        return
    if site.peers != kits.PEERS:
        raise KitError(
            f"{folder / kits.SITE_FILE}: peers is {shown(site.peers)}, expected {kits.PEERS}, with "
            "the identities of all sites; ask for the kit again",
            code="identity-refused",
        )
    lines = _text(folder / kits.PEERS).decode(errors="replace").splitlines()
    if request.identity not in {line.partition("#")[0].strip() for line in lines}:
        raise KitError(
            f"{folder / kits.PEERS}: has no line {request.identity}, the identity of this site's "
            f"{REQUEST}, so the others would take another one for it; ask for the kit again",
            code="identity-refused",
        )


def _own_identity(keys: Path, request: SiteRequest) -> bytes:
    from bract.paillier.keyfile import read_identity

    text = _text(keys / kits.IDENTITY_KEY)
    if read_identity(keys / kits.IDENTITY_KEY).public.hex() != request.identity:
        raise KitError(
            f"{keys}: {kits.IDENTITY_KEY} is not the identity of {REQUEST}; make a new request",
            code="key-mismatch",
        )
    return text


def _text(path: Path) -> bytes:
    try:
        return kits.read_text(path)
    except OSError as error:
        raise KitError(
            f"{path}: cannot be read ({one_line(error, 200)}); expected a kit and keys that are "
            "whole, ask for the kit again",
            code="file-unreadable",
        ) from error


def _open(folder: Path, keys: Path, place: Context) -> bytes:
    from bract.paillier.errors import SealError
    from bract.paillier.exchange import open_sealed
    from bract.paillier.keyfile import read_identity

    box = kits.read_text(folder / kits.PAILLIER_SEALED)
    sender, sealed = box[:_PUBLIC_BYTES], box[_PUBLIC_BYTES:]
    try:
        identity = read_identity(keys / kits.IDENTITY_KEY)
        return open_sealed(sealed, identity, place, sender_public=sender)
    except (SealError, ValueError) as error:
        raise KitError(
            f"{folder / kits.PAILLIER_SEALED}: does not open with {keys / kits.IDENTITY_KEY}; it "
            "was changed, or sealed for another request: ask for the kit again",
            code="key-mismatch",
        ) from error


def _context(federation: str, authority: str, site: str) -> Context:
    from bract.paillier.exchange import Context

    return Context(f"{federation}/{authority}", "authority", site, "Paillier key of a kit")


def _signed_part(request: SiteRequest) -> bytes:
    fields: dict[str, Any] = request.to_dict()
    del fields["signature"]
    return json.dumps(fields, sort_keys=True).encode()
