"""Check a federation's gateway, its certificate and clock, before a site connects."""

from __future__ import annotations

import datetime
import http.client
import socket
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509

from bract.certificates.validity import (
    expiry,
)
from bract.errors import BractError, one_line
from bract.installed.versions import check_release
from bract.kits.kit import (
    CA,
    Kit,
)

TIMEOUT = 10.0
"""Seconds for connecting, and again for an answer."""

MOST_AHEAD, MOST_BEHIND = 5.0, 300.0
"""Seconds by which a site's clock may differ from the SuperLink's: what Flower 1.41 accepts of the
time that a SuperNode signs (``SYSTEM_TIME_TOLERANCE``, ``TIMESTAMP_TOLERANCE``)."""

VERSION_HEADER = "X-Bract-Version"

_RENEW = "the operator renews it with `bract site renew`"

_EXPIRED, _NOT_YET, _OTHER_HOST, _OTHER_ADDRESS = 10, 9, 62, 64
"""Results of OpenSSL's verification, ``X509_V_ERR_...``."""


class UnreachableError(BractError):
    """Nothing answers, or not yet: this may be fixed without a change at the site."""

    code = "gateway-unreachable"


@dataclass(frozen=True)
class Gateway:
    """A gateway's answer.

    Attributes
    ----------
    certificate
        Its certificate, which the kit's CA signed and which is valid for its name.
    ahead
        Seconds by which the clock here is ahead of the gateway's; negative where it is behind.
    version
        The operator's `release`; empty if the gateway does not report it.
    """

    certificate: x509.Certificate
    ahead: float
    version: str

    @property
    def soon(self) -> str | None:
        """The warning on its certificate within 30 days of its end."""
        return expiry(self.certificate, "the gateway's certificate", fix=_RENEW)


def ask(kit: Kit, folder: Path, *, at: str | None = None) -> Gateway:
    """Connect to the gateway of a kit as a SuperNode does, and check its answer.

    Parameters
    ----------
    at
        Address to connect to in the place of the server's name, for which its certificate is
        checked all the same.

    Raises
    ------
    UnreachableError
        If its name is unknown here, nothing answers, or the SuperLink behind it does not.
    BractError
        If its certificate is expired, foreign or another host's, the clock here is off by more
        than Flower accepts, or the operator's bract has another protocol number.
    """
    try:
        gateway = _answer(kit, _trusting(folder / CA), at)
    except ssl.SSLCertVerificationError as error:
        raise _refused(kit, folder, error) from error
    check_clock(gateway.ahead, kit)
    if gateway.version:
        check_release(gateway.version, at=f"the operator of {kit.address}")
    return gateway


def check_clock(ahead: float, kit: Kit) -> None:
    """Refuse a clock that is off by more than Flower accepts."""
    if -MOST_BEHIND <= ahead <= MOST_AHEAD:
        return
    direction = "ahead of" if ahead > 0 else "behind"
    raise BractError(
        f"the clock here is {datetime.timedelta(seconds=round(abs(ahead)))} {direction} that of "
        f"{kit.address}, and Flower accepts at most {MOST_AHEAD:.0f} s ahead and {MOST_BEHIND:.0f} "
        "s behind; set the clock here (timedatectl set-ntp true), or ask the operator to",
        code="clock-wrong",
    )


def _refused(kit: Kit, folder: Path, error: ssl.SSLCertVerificationError) -> BractError:
    """Return what is wrong with a gateway's certificate, or first with the clock."""
    code = error.verify_code
    if code in (_OTHER_HOST, _OTHER_ADDRESS):
        return BractError(
            f"the certificate of {kit.address} is not for {kit.server}; the operator sets "
            "deployment.server to the name by which sites reach the gateway",
            code="certificate-faulty",
        )
    if code not in (_EXPIRED, _NOT_YET):
        return BractError(
            f"the certificate of {kit.address} was not signed by the CA of this kit ({folder / CA}"
            f", federation {kit.federation}): either this is the kit of another federation, or "
            "another server answers there; ask the operator for a new kit",
            code="certificate-faulty",
        )
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname = False
    careless.verify_mode = ssl.CERT_NONE
    try:
        # Nothing but the time is taken from an unverified answer.
        answer = _answer(kit, careless)
        check_clock(answer.ahead, kit)
        expiry(answer.certificate, f"the certificate of {kit.address}", fix=_RENEW)
        return _by_code(kit, code)
    except BractError as problem:
        return problem
    except ssl.SSLError:
        return _by_code(kit, code)


def _by_code(kit: Kit, code: int) -> BractError:
    what = "has expired" if code == _EXPIRED else "is not valid yet"
    return BractError(
        f"the certificate of {kit.address}, or its CA's, {what}; {_RENEW}",
        code="certificate-faulty",
    )


def _trusting(ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise BractError(
            f"{ca}: cannot be read as a certificate: {one_line(error)}", code="certificate-faulty"
        ) from error
    return context


def _answer(kit: Kit, context: ssl.SSLContext, at: str | None = None) -> Gateway:
    connection = http.client.HTTPSConnection(kit.server, kit.port, timeout=TIMEOUT, context=context)
    try:
        plain = socket.create_connection((at or kit.server, kit.port), TIMEOUT)
        try:
            connection.sock = context.wrap_socket(plain, server_hostname=kit.server)
        except BaseException:
            plain.close()
            raise
        sock = connection.sock
        certificate = sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket) else b""
        connection.request("GET", "/health", headers={"Accept": "*/*"})
        answer = connection.getresponse()
        now = datetime.datetime.now(datetime.UTC)
        answer.read(1 << 16)
    except ssl.SSLCertVerificationError:
        raise
    except socket.gaierror as error:
        raise UnreachableError(
            f"the name {kit.server} is not known here ({error.strerror}); check this machine's "
            "DNS, or name it in /etc/hosts"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(
            f"{kit.address} does not answer ({one_line(error, 200) or type(error).__name__}); is "
            "the gateway started, and do the firewalls let this site connect to it?"
        ) from error
    finally:
        connection.close()
    date = _date(answer.getheader("Date"))
    if date is None or certificate is None:
        raise BractError(
            f"{kit.address}: what answers there is no gateway of bract", code="gateway-unreachable"
        )
    if answer.status != 200:
        # The clock is judged all the same: it is this site's to fix.
        check_clock((now - date).total_seconds(), kit)
        raise UnreachableError(
            f"{kit.address} answers, but not the SuperLink behind it (status {answer.status}); the "
            "operator starts it: `bract superlink --kit DIR`"
        )
    return Gateway(
        x509.load_der_x509_certificate(certificate),
        (now - date).total_seconds(),
        one_line(answer.getheader(VERSION_HEADER) or "", 40),
    )


def _date(text: str | None) -> datetime.datetime | None:
    try:
        found = parsedate_to_datetime(text or "")
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
