"""Certificates of a federation: its CA, and the certificates that it signs.

Keys are elliptic (P-384, the curve that Flower recommends for SuperNodes), signatures ECDSA with
SHA-384. Nothing here starts a process.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bract.disk.named import read_named, unreadable
from bract.errors import BractError

_EARLIER = datetime.timedelta(hours=1)
"""How long before it is issued a certificate is valid: clocks differ."""


class CertificateError(BractError):
    """A certificate that must not be used."""

    code = "certificate-faulty"


@dataclass(frozen=True)
class Authority:
    """A CA: its certificate and the private key that signs with it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(
        cls, federation: str, days: int, key: ec.EllipticCurvePrivateKey | None = None
    ) -> Authority:
        """Make a CA that signs for one federation, for ``days``.

        With the key of an earlier one, what that one signed stays good.
        """
        key = key or new_key()
        common = f"bract CA of {federation}"[:64]
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
        builder = (
            _builder(name, name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        return cls(builder.sign(key, hashes.SHA384()), key)

    def issue(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        hosts: Iterable[str],
        days: int,
        client: bool = False,
    ) -> x509.Certificate:
        """Sign a certificate of a server.

        Parameters
        ----------
        name
            Its name.
        hosts
            Host names and IP addresses at which it is reached.
        days
            How long it is valid; not longer than the CA's own.
        client
            Whether it may also authenticate clients.
        """
        issuer = self.certificate.subject
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH]
        usages += [ExtendedKeyUsageOID.CLIENT_AUTH] if client else []
        builder = (
            _builder(subject, issuer, key.public_key(), days, self.certificate.not_valid_after_utc)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
        )
        return builder.sign(self.key, hashes.SHA384())


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a private key on P-384."""
    return ec.generate_private_key(ec.SECP384R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as unencrypted PKCS #8 in PEM, as TLS servers read it."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def node_key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key in OpenSSH's format, as ``--auth-supernode-private-key`` reads it."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )


def node_public_text(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key as one line of OpenSSH's, as ``flwr supernode register`` reads it."""
    return key.public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    ).decode()


def header_key(text: str) -> str:
    """Return a public key of OpenSSH's as Flower's requests carry it: PEM in base64."""
    pem = serialization.load_ssh_public_key(text.encode()).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return base64.b64encode(pem).decode()


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a SuperNode's private key.

    Raises
    ------
    CertificateError
        If it cannot be read, or is no elliptic key in OpenSSH's format.
    """
    key = _private_key(path, serialization.load_ssh_private_key, "OpenSSH's format")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{path}: no elliptic key; Flower takes P-256, P-384 and P-521")
    return key


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the private key of a CA.

    Raises
    ------
    CertificateError
        If it cannot be read, or is no elliptic key in PEM.
    """
    key = _private_key(path, serialization.load_pem_private_key, "PEM")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{path}: no elliptic key")
    return key


def _private_key(path: Path, load: Callable[[bytes, bytes | None], object], form: str) -> object:
    try:
        return load(read_file(path), None)
    except (ValueError, UnsupportedAlgorithm, TypeError) as error:
        raise CertificateError(f"{path}: no private key in {form}") from error


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate.

    Raises
    ------
    CertificateError
        If it cannot be read, or is none.
    """
    try:
        return x509.load_pem_x509_certificate(read_file(path))
    except ValueError as error:
        raise CertificateError(f"{path}: no certificate in PEM") from error


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate in PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of a CA's public key, in hexadecimal; it outlives a renewal."""
    public = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public)
    return digest.finalize().hex()


def now() -> datetime.datetime:
    """Return the time by this machine's clock."""
    return datetime.datetime.now(datetime.UTC)


def read_file(path: Path) -> bytes:
    """Return a file's content; `CertificateError` if it cannot be read."""
    try:
        return read_named(path)
    except OSError as error:
        raise unreadable(path, error, CertificateError) from error


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    begins = now()
    ends = begins + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - _EARLIER)
        .not_valid_after(min(ends, latest) if latest else ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
