"""Certificates that end soon: for status, and for the daily check of a process that serves.

python -m bract.kits.expiry KIT      # a line for each
"""

from __future__ import annotations

import sys
from pathlib import Path

from bract.certificates.authority import CertificateError, read_certificate
from bract.certificates.validity import expiry
from bract.errors import BractError
from bract.kits import gateway
from bract.kits import kit as kits
from bract.kits.kit import Kit, read_kit

RENEWAL = {
    kits.CA: "renew it: `bract site renew --authority`, and bring each site its new ca.crt",
    kits.SUPERLINK: "renew it: `bract site renew`",
    kits.GATEWAY: "renew it: `bract site renew`",
}
"""Certificates of a kit, and the steps before they end."""


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


def daily_check(folder: Path) -> list[str]:
    """Return the command that prints what `ending` finds of a kit."""
    return [sys.executable, "-P", "-m", __name__, str(folder.absolute())]


def main() -> None:
    """Print which certificates of the kit that the argument names have ended or end soon."""
    folder = Path(sys.argv[1])
    for line in ending(folder, read_kit(folder)):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
