"""Faults of a certificate: it ends, is another CA's, or not its key's."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from bract.certificates import authority as certificates
from bract.certificates.authority import CertificateError, read_certificate, read_file

WARN_DAYS = 30
"""Days before its end from which on a certificate is warned of."""

_log = logging.getLogger(__name__)


def check_certificate(
    path: Path, *, fix: str, now: datetime.datetime | None = None
) -> x509.Certificate:
    """Return the certificate in a file that is valid now, and log where it ends soon.

    Parameters
    ----------
    fix
        The fix if it has expired, and by whom.

    Raises
    ------
    CertificateError
        If it is none, has expired, or is not valid yet.
    """
    certificate = read_certificate(path)
    soon = expiry(certificate, f"{path}", fix=fix, now=now)
    if soon is not None:
        _log.warning("%s", soon)
    return certificate


def expiry(
    certificate: x509.Certificate, what: str, *, fix: str, now: datetime.datetime | None = None
) -> str | None:
    """Return a warning that a certificate ends within `WARN_DAYS`, None if it is good for longer.

    Raises
    ------
    CertificateError
        If it has expired, or is not valid yet.
    """
    now = now or certificates.now()
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        raise CertificateError(
            f"{what}: valid from {begins:%Y-%m-%d %H:%M} UTC on, and it is {now:%Y-%m-%d %H:%M} "
            "UTC by this machine's clock; set the clock"
        )
    if now > ends:
        raise CertificateError(
            f"{what}: expired on {ends:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M} UTC by "
            f"this machine's clock; {fix}"
        )
    left = (ends - now).days
    if left >= WARN_DAYS:
        return None
    return f"{what}: expires in {left} days, on {ends:%Y-%m-%d}; {fix}"


def check_signed(path: Path, authority_path: Path) -> None:
    """Refuse a certificate that a CA did not sign."""
    certificate, authority = read_certificate(path), read_certificate(authority_path)
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CertificateError(
            f"{path}: signed by another CA than {authority_path}, so it belongs to another "
            "federation; take both from one kit"
        ) from error


def check_key(path: Path, key_path: Path) -> None:
    """Refuse a private key that is not a certificate's."""
    try:
        key = serialization.load_pem_private_key(read_file(key_path), None)
    except (ValueError, UnsupportedAlgorithm, TypeError) as error:
        raise CertificateError(f"{key_path}: no private key in PEM") from error
    if _public(key.public_key()) != _public(read_certificate(path).public_key()):
        raise CertificateError(f"{key_path}: is not the key of {path}; take both from one kit")


def _public(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
