"""``bract doctor``: what is here, what is missing, and how to get it."""

from __future__ import annotations

import platform
import shutil
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bract.cli.console import say
from bract.errors import BractError, RunFailedError


def examine() -> None:
    """Print one line a check.

    Raises
    ------
    RunFailedError
        If a check fails that a federation cannot do without.
    """
    failed = 0
    for what, check in _CHECKS.items():
        try:
            say(f"ok    {what}: {check()}")
        except BractError as error:
            failed += 1
            say(f"FAIL  {what}: {error}")
    if failed:
        raise RunFailedError(f"{failed} of {len(_CHECKS)} checks failed")


def _python() -> str:
    if platform.python_version_tuple() < ("3", "11"):
        raise BractError(f"found {platform.python_version()}, expected 3.11 or newer")
    return platform.python_version()


def _flower() -> str:
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise BractError("not installed; pip install 'flwr>=1.41,<1.42'") from None
    if not found.startswith("1.41."):
        raise BractError(f"found {found}, tested with 1.41; pip install 'flwr>=1.41,<1.42'")
    return found


def _commands() -> str:
    from bract.cli.warm import COMMANDS, real_command

    missing = [name for name in COMMANDS if not shutil.which(real_command(name))]
    if missing:
        raise BractError(f"{', '.join(missing)} not found; install flwr into this environment")
    return "flower-superlink, flower-supernode and flwr are on the path"


def _torch() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__}, no CUDA device: clients and attacks run on the CPU"
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return (
        f"torch {torch.__version__}, {torch.cuda.device_count()} CUDA devices: {', '.join(names)}"
    )


def _torchvision() -> str:
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        raise BractError(
            f"cannot be imported ({error}); install the torchvision made for this torch"
        ) from error
    return str(torchvision.__version__)


def _loopback() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return "free ports on 127.0.0.1"


def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < 1:
        raise BractError(f"{free:.1f} GiB free here, expected at least 1 GiB for captures")
    return f"{free:.0f} GiB free here"


_CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "flower": _flower,
    "flower's commands": _commands,
    "torch": _torch,
    "torchvision": _torchvision,
    "loopback": _loopback,
    "disk": _disk,
}
