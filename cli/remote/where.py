"""The SuperLink that the command line names: an address, a socket, Flower's profile."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bract.certificates.validity import check_certificate
from bract.errors import BractError, one_line
from bract.runtime.control import output_to_stderr, socket_connection

if TYPE_CHECKING:
    from bract.installed.flower import SuperLinkConnection

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_PROFILE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Where:
    """A SuperLink's control API, as the command line names it.

    Attributes
    ----------
    superlink
        ``host:port``; a socket, ``FOLDER/8000.sock``; or a connection of Flower's configuration.
    root_certificates
        CA of the SuperLink at ``host:port``.
    insecure
        Whether ``host:port`` is asked without TLS.
    """

    superlink: str
    root_certificates: Path | None = None
    insecure: bool = False

    @property
    def is_socket(self) -> bool:
        """Return whether it is a Unix socket."""
        return self.superlink.endswith(".sock")

    @property
    def options(self) -> str:
        """The options for a command line."""
        words = ["--superlink", self.superlink]
        if self.root_certificates is not None:
            words += ["--root-certificates", str(self.root_certificates)]
        return shlex.join(words + (["--insecure"] if self.insecure else []))

    def connection(self) -> SuperLinkConnection:
        """Return it as Flower's own commands take it."""
        from bract.installed.flower import SuperLinkConnection, read_superlink_connection

        if self.is_socket:
            self._refuse_tls("a socket needs no TLS: the kernel identifies the user")
            return socket_connection(self._checked_socket())
        if ":" in self.superlink:
            return SuperLinkConnection(
                "remote",
                self._checked_address(),
                str(self.root_certificates.absolute()) if self.root_certificates else None,
                self.insecure,
            )
        self._refuse_tls("a connection of Flower's configuration sets how it is reached")
        if not _PROFILE.fullmatch(self.superlink):
            raise BractError(
                f"--superlink {one_line(self.superlink, 80)}: expected host:port, a socket such as "
                "FOLDER/8000.sock, or the name of a connection in Flower's config.toml",
                code="usage",
            )
        with output_to_stderr():
            try:
                found = read_superlink_connection(self.superlink)
            except click.ClickException as error:
                raise BractError(
                    f"--superlink {self.superlink}: {one_line(error.message, 300)} "
                    "`flwr config list` shows the known ones",
                    code="usage",
                ) from error
        if found.address is None or found.address.startswith(":"):
            raise BractError(
                f"--superlink {self.superlink}: this connection is a simulation on this machine; "
                "take one whose address is host:port, or leave --superlink out",
                code="usage",
            )
        if found.root_certificates:
            _check_authority(Path(found.root_certificates))
        return found

    def _refuse_tls(self, why: str) -> None:
        if self.root_certificates is not None or self.insecure:
            raise BractError(
                f"--superlink {self.superlink}: {why}; leave --root-certificates and "
                "--insecure out",
                code="usage",
            )

    def _checked_address(self) -> str:
        found = _ADDRESS.fullmatch(self.superlink)
        if found is None or not 0 < int(found[2]) < 65536:
            raise BractError(
                f"--superlink {one_line(self.superlink, 80)}: expected host:port, such as "
                "fl.example.org:8000",
                code="usage",
            )
        if self.insecure == (self.root_certificates is not None):
            raise BractError(
                f"--superlink {self.superlink}: pass --root-certificates FILE, the CA of the "
                "SuperLink, or --insecure on a connection that is private otherwise",
                code="usage",
            )
        if self.root_certificates is not None:
            _check_authority(self.root_certificates)
        return self.superlink

    def _checked_socket(self) -> Path:
        place = Path(self.superlink)
        if not place.is_socket() or not place.stem.isdecimal():
            raise BractError(
                f"--superlink {self.superlink}: expected the socket of a `bract superlink`, such "
                "as FOLDER/8000.sock",
                code="usage",
            )
        return place


def _check_authority(path: Path) -> None:
    check_certificate(path, fix="ask the server's operator for its new CA")
