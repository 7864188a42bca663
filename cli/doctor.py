"""``bract doctor``: check this machine, and print how to install what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy

from bract.cli.console import print_json, say
from bract.errors import RunFailedError, missing_room, one_line
from bract.installed import flower

if TYPE_CHECKING:
    from bract.installed.plugins import PluginError
    from bract.registry import Registry

NEEDED = 3
"""GiB that `bract demo` takes at its peak."""

OLDEST = (1, 21)
"""The first Flower whose public API bract rests on."""

Level = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes
    ----------
    level
        ``note`` is something that a part of the work goes without, ``FAIL`` something that a
        federation cannot do without.
    fix
        The fix; empty if none is needed.
    """

    check: str
    level: Level
    found: str
    fix: str = ""


class _LackError(Exception):
    """A check found that an optional part is missing."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found)
        self.found, self.fix = found, fix


class _BrokenError(_LackError):
    """A check found that a part without which no federation runs is missing."""


def examine(*, as_json: bool = False) -> list[Finding]:
    """Print one line a check, and under it the fix if it failed.

    Raises
    ------
    RunFailedError
        If a check fails that a federation cannot do without.
    """
    findings = []
    for what, check in _CHECKS.items():
        finding = _finding(what, check)
        findings.append(finding)
        say(f"{finding.level:5} {what}: {finding.found}")
        if finding.fix:
            say(f"      fix: {finding.fix}")
    failed = [finding.check for finding in findings if finding.level == "FAIL"]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    if failed:
        raise RunFailedError(
            f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}",
            code="checks-failed",
        )
    if importlib.util.find_spec("bract.audit") is None:
        say("done: this machine can take part in federations, and has no bract.audit")
    else:
        say("done: this machine can run federations and audits; next: bract demo")
    return findings


def _finding(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "ok", check())
    except _BrokenError as failure:
        return Finding(what, "FAIL", failure.found, failure.fix)
    except _LackError as note:
        return Finding(what, "note", note.found, note.fix)
    except ModuleNotFoundError as error:
        if (room := missing_room(error)) is None:
            raise
        return Finding(
            what,
            "note",
            f"not checked: this installation has no {room}, as a site or a server needs none",
        )


def _python() -> str:
    return platform.python_version()


def _flower() -> str:
    found = flower.installed()
    if found is None:
        raise _BrokenError("not installed", f"pip install '{flower.REQUIREMENT}'")
    if _parts(found) < OLDEST:
        raise _BrokenError(
            f"{found}, and bract needs {'.'.join(map(str, OLDEST))} or newer",
            "pip install --upgrade flwr",
        )
    styles = ["the Message API (flwr.serverapp.strategy)", "loops of an app's own (bract.listen)"]
    if importlib.util.find_spec("flwr.server.strategy") is not None:
        styles.insert(1, "the older API (flwr.server.strategy, NumPyClient)")
    return f"{found}; hook, mod and audit support {', '.join(styles)}"


def _runtime() -> str:
    from bract.runtime.rule import named, report
    from bract.runtime.rules import RULES, lacking

    found, off = flower.installed(), lacking()
    rules = f"{len(RULES) - len(off)} of {len(RULES)} rules hold"
    unsafe = [missing for missing in off if missing.rule.kind == "security"]
    fix = f"pip install '{flower.REQUIREMENT}' where you deploy with bract, nothing otherwise"
    if unsafe:
        raise _LackError(
            f"{rules} with Flower {found}, and bract run, superlink, supernode and kits do not "
            f"start without those for security ({named(unsafe)}); hook, mod, audit and report "
            "work, and bract demo trains in one process",
            fix,
        )
    if lines := report(off):
        raise _LackError(f"{rules}. {'. '.join(lines)}", fix)
    return f"bract run, superlink and supernode start Flower {found}: {rules}"


def _parts(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _commands() -> str:
    from bract.installed.flower import COMMANDS
    from bract.runtime.fork_server import real_command

    missing = [name for name in COMMANDS if not shutil.which(real_command(name))]
    if missing:
        raise _BrokenError(f"{', '.join(missing)} not found", "install flwr into this environment")
    return "flower-superlink, flower-supernode and flwr are on the path"


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        named = ", ".join(f"{d.name} ({d.total_memory / 2**30:.0f} GiB)" for d in devices)
        return f"torch {torch.__version__}, {named}"
    raise _LackError(
        f"torch {torch.__version__}, no CUDA device: clients and attacks run on the CPU",
        "nothing for small models; attacks on ResNets and 32 x 32 colour images want a GPU and a "
        "torch with CUDA (https://pytorch.org/get-started/locally)",
    )


def _torchvision() -> str:
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        raise _BrokenError(
            f"cannot be imported ({error})", "install the torchvision made for this torch"
        ) from error
    return str(torchvision.__version__)


def _cores() -> str:
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    busy = os.getloadavg()[0]
    found = f"{usable} of {psutil.cpu_count() or 1} cores, load {busy:.1f}"
    if (usable or 1) < 2:
        raise _LackError(found, "a federation of several processes wants two cores or more")
    if busy > 2 * (usable or 1):
        raise _LackError(
            found, "other work keeps the cores busy; rounds may run into their time limit"
        )
    return found


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    free, whole = memory.available / 2**30, memory.total / 2**30
    found = f"{free:.1f} of {whole:.1f} GiB free"
    if free < 4:
        raise _LackError(
            found, f"a SuperLink and three clients take about {NEEDED} GiB; end other work"
        )
    return found


def _paillier() -> str:
    from bract.paillier import Layout, decrypt, encrypt, generate_keypair

    key = generate_keypair(2048)
    layout = Layout(length=3200, clip=1.0, max_weight=31)
    values = numpy.zeros(layout.length)
    # The tables of a key are made once.
    encrypt(key, values[:1], Layout(length=1, clip=1.0, max_weight=31))
    begun = time.perf_counter()
    sealed, _ = encrypt(key, values, layout)
    middle = time.perf_counter()
    decrypt(key, sealed)
    done = time.perf_counter()
    there, back = (1e6 * spent / layout.length for spent in (middle - begun, done - middle))
    lenet = 61706 * (there + back) / 1e6
    found = (
        f"{there:.0f} us to encrypt a value, {back:.0f} us to decrypt, 2048 bits; a LeNet takes a "
        f"client {lenet:.1f} s a round"
    )
    if lenet > 30:
        raise _LackError(found, "end other work, or set encryption.degree: 2 and a smaller model")
    return found


def _lpips() -> str:
    from bract.scores.perceptual import lpips_unavailable

    missing = lpips_unavailable("alex")
    if missing is not None:
        raise _LackError("weights of LPIPS are missing: reports go without that score", missing)
    return "weights of AlexNet are here"


def _docker() -> str:
    without = "only `make docker-demo` and docker/compose.yaml need it"
    if shutil.which("docker") is None:
        raise _LackError("not found", f"{without}; install Docker with Compose 2.27 or newer")
    try:
        done = subprocess.run(
            ["docker", "compose", "version", "--short"],
            capture_output=True, text=True, check=False, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _LackError(
            f"`docker compose` does not answer ({one_line(error, 200)})", without
        ) from error
    numbers = re.match(r"v?(\d+)\.(\d+)", done.stdout.strip())
    if done.returncode or numbers is None:
        raise _LackError(
            "there is no `docker compose`", f"{without}; install Compose 2.27 or newer"
        )
    if (int(numbers[1]), int(numbers[2])) < (2, 27):
        raise _LackError(
            f"Compose {done.stdout.strip()}", f"{without}; install Compose 2.27 or newer"
        )
    return f"Compose {done.stdout.strip()}"


def _loopback() -> str:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        raise _BrokenError(
            f"no port on 127.0.0.1 ({one_line(error, 200)})", "let programs listen on loopback"
        ) from error
    return "free ports on 127.0.0.1"


def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < 1:
        raise _BrokenError(f"{free:.1f} GiB free here", "make room for captures: at least 1 GiB")
    return f"{free:.0f} GiB free here"


def _plugins() -> str:
    from bract.installed.plugins import GROUPS, PluginError

    found, left_out = [], list[PluginError]()
    for group in GROUPS:
        used, faulty = _of_group(group)
        left_out += faulty
        if used:
            found.append(f"{group.removeprefix('bract.')} {', '.join(used)}")
    if left_out:
        raise _BrokenError("; ".join(map(str, left_out)), "fix or uninstall these packages")
    return "; ".join(found) or "none installed"


def _of_group(group: str) -> tuple[list[str], list[PluginError]]:
    """Return a group's entries with their packages, and why others are not used."""
    from bract.cli.plugged import PluggedCommand
    from bract.installed.plugins import PluginError, plugins

    if group == "bract.commands":
        used, faulty = [], []
        for plugin in plugins(group):
            try:
                PluggedCommand(plugin.name, plugin, help="").load()
                used.append(f"{plugin.name} ({plugin.package})")
            except PluginError as error:
                faulty.append(error)
        return used, faulty
    module, name = _REGISTRIES[group]
    try:
        registry: Registry[Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if missing_room(error) is None:
            raise
        # Images of a client or a server leave out the room, and so cannot import the entries.
        return [f"{plugin.name} ({plugin.package})" for plugin in plugins(group)], []
    used = [f"{name} ({package})" for name, package in registry.plugins().items()]
    return used, list(registry.refused().values())


_REGISTRIES = {
    "bract.attackers": ("bract.attacks.problem.evidence", "ADAPTIVE"),
    "bract.attacks": ("bract.attacks", "ATTACKS"),
    "bract.data": ("bract.data", "DATASETS"),
    "bract.defenses": ("bract.defenses", "DEFENSES"),
    "bract.disclosures": ("bract.server.disclosures", "RULES"),
    "bract.inputs": ("bract.inputs", "INPUTS"),
    "bract.invariants": ("bract.audit.description.invariants", "INVARIANTS"),
    "bract.models": ("bract.models", "MODELS"),
    "bract.priors": ("bract.attacks.problem.public_prior", "PRIORS"),
    "bract.questions": ("bract.audit.questions.base", "QUESTIONS"),
    "bract.strategies": ("bract.config.sections", "STRATEGY_SECTIONS"),
}
"""Module and name of the registry of each group."""


_CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "flower": _flower,
    "runtime": _runtime,
    "flower's commands": _commands,
    "device": _device,
    "torchvision": _torchvision,
    "cores": _cores,
    "memory": _memory,
    "paillier": _paillier,
    "lpips": _lpips,
    "docker": _docker,
    "loopback": _loopback,
    "disk": _disk,
    "plugins": _plugins,
}
