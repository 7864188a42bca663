"""A real OpenSSH server on the loopback interface, for this user alone and one test."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def available() -> bool:
    """Whether this machine has OpenSSH's server and client."""
    return all((SSHD, shutil.which("ssh"), shutil.which("ssh-keygen")))


@contextlib.contextmanager
def ssh_server(folder: Path, port: int) -> Iterator[list[str]]:
    """Start a server; give the words of the `ssh` command that logs in, without its options."""
    folder.mkdir(mode=0o700)
    for name in ("host", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\n"
        f"AuthorizedKeysFile {folder / 'key.pub'}\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PermitRootLogin prohibit-password\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    login = [
        *("ssh", "-F", "/dev/null", "-i", str(folder / "key"), "-p", str(port)),
        *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
        *("-o", "LogLevel=ERROR", "-o", "ExitOnForwardFailure=yes"),
        f"{getpass.getuser()}@127.0.0.1",
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [str(SSHD), "-D", "-e", "-f", str(folder / "config")], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while subprocess.run([*login, "true"], capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield login
    finally:
        server.terminate()
        server.wait()
