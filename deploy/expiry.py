"""Certificates that end soon: for status, and once a day in the log of a process that serves."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from bract.deploy import gateway
from bract.deploy import kit as kits
from bract.deploy.certificates import CertificateError, read_certificate
from bract.deploy.kit import Kit, read_kit
from bract.deploy.validity import expiry
from bract.errors import BractError

KIT = "BRACT_KIT"
"""Environment variable with the kit of the party whose process this is."""

RENEWAL = {
    kits.CA: "renew it: `bract site renew --authority`, and bring each site its new ca.crt",
    kits.SUPERLINK: "renew it: `bract site renew`",
    kits.GATEWAY: "renew it: `bract site renew`",
}
"""Certificates of a kit, and the steps before they end."""

_DAY = 86_400.0

_log = logging.getLogger(__name__)


def certificates_of(folder: Path) -> list[str]:
    """Return which certificates a kit holds."""
    return [name for name in RENEWAL if (folder / name).is_file()]


def ending(folder: Path, kit: Kit) -> list[str]:
    """Return one line for each certificate that has ended or ends within 30 days.

    A site's kit holds the CA's alone: its gateway is asked for its own, and for its release.
    """
    found = []
    for name in certificates_of(folder):
        try:
            found.append(
                expiry(read_certificate(folder / name), str(folder / name), fix=RENEWAL[name])
            )
        except CertificateError as error:
            found.append(str(error))
    if kit.role == "site":
        try:
            found.append(gateway.ask(kit, folder).soon)
        except gateway.UnreachableError:
            pass  # the SuperNode itself logs that, and tries again
        except BractError as error:
            found.append(str(error))
    return [line for line in found if line is not None]


def watch(folder: Path) -> None:
    """Log once a day, while this process lives, which certificates end soon."""
    kit = read_kit(folder)

    def look() -> None:
        while True:
            time.sleep(_DAY)
            for line in ending(folder, kit):
                _log.warning("%s", line)

    threading.Thread(target=look, name="certificates", daemon=True).start()


def watch_as_told() -> None:
    """Do so where the environment names a kit."""
    if os.environ.get(KIT):
        watch(Path(os.environ[KIT]))
