"""Health of one party's part of a federation, for `bract site status` and Prometheus."""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bract.certificates import authority as certificates
from bract.certificates.authority import read_certificate
from bract.certificates.validity import WARN_DAYS, expiry
from bract.errors import BractError, one_line
from bract.kits import gateway
from bract.kits import kit as kits
from bract.kits.expiry import RENEWAL, certificates_of
from bract.kits.kit import Kit, read_kit
from bract.kits.metrics import Sample
from bract.kits.site_file import SiteFile, read_site
from bract.kits.starting import RUNS, SOCKETS, STATE
from bract.runtime import contact, sockets

Level = Literal["ok", "WARN", "FAIL"]

LONGEST_SILENCE = 60.0
"""Seconds without an answer of the SuperLink after which a site counts as cut off; a SuperNode asks
every few seconds."""

LEAST_FREE = 1 << 30
"""Bytes of a disk below which it counts as full."""

MOST_RUNS = 20
"""Runs that are measured, the latest."""


@dataclass
class Health:
    """Findings about one party, one line each, and the measurements."""

    kit: Kit
    findings: list[tuple[str, Level, str]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Number of findings that are failures."""
        return sum(level == "FAIL" for _, level, _ in self.findings)

    def note(self, what: str, level: Level, detail: str) -> None:
        """Add a finding."""
        self.findings.append((what, level, detail))

    def measure(self, name: str, value: float, **labels: str) -> None:
        """Add a sample."""
        self.samples.append(Sample(name, value, labels))

    @contextmanager
    def looking_at(self, what: str) -> Iterator[None]:
        """Turn an error of the block into a finding."""
        try:
            yield
        except BractError as error:
            self.note(what, "FAIL", str(error))
        except OSError as error:
            self.note(what, "FAIL", f"{error.filename or what}: {one_line(error, 200)}")

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--format json`` prints."""
        return {
            "party": self.kit.name,
            "role": self.kit.role,
            "federation": self.kit.federation,
            "healthy": not self.failed,
            "checks": [
                {"check": what, "status": level, "detail": detail}
                for what, level, detail in self.findings
            ],
            "metrics": [
                {"name": one.name, "value": one.value, "labels": dict(one.labels)}
                for one in self.samples
            ],
        }


def examine(folder: Path) -> Health:
    """Look at the party whose kit this is; nothing is changed.

    Raises
    ------
    BractError
        If the folder is no kit of a site or an operator.
    """
    folder = folder.absolute()
    kit = read_kit(folder)
    if kit.role == "authority":
        raise kits.KitError(
            f"{folder}: runs nothing; name the kit of a site or of the operator", code="usage"
        )
    health = Health(kit)
    (_site if kit.role == "site" else _operator)(health, folder)
    health.measure("bract_status_time_seconds", time.time())
    return health


def _site(health: Health, folder: Path) -> None:
    with health.looking_at(kits.SITE_FILE):
        site = read_site(folder, health.kit)
        _supernode(health, folder, site)
        _record(health, folder, site)
        _disk(health, "state", folder / site.state)
    _certificates(health, folder)
    _gateway(health, folder)


def _operator(health: Health, folder: Path) -> None:
    place = health.kit.socket(folder / SOCKETS)
    up = sockets.is_healthy(place)
    health.measure("bract_up", up, process="superlink")
    words = "answers" if up else "does not answer"
    health.note("SuperLink", "ok" if up else "FAIL", f"{words} on {place}")
    if up:
        with health.looking_at("sites"):
            _sites(health, place)
    with health.looking_at("runs"):
        _runs(health, folder / RUNS)
    for what in (STATE, RUNS):
        if (folder / what).is_dir():
            _disk(health, what, folder / what)
    _certificates(health, folder)
    # The gateway is on the SuperLink's machine; the server's name may lead elsewhere from here.
    _gateway(health, folder, at="127.0.0.1")


def _supernode(health: Health, folder: Path, site: SiteFile) -> None:
    where = folder / STATE / SOCKETS
    up = sockets.is_healthy(where / f"{site.port}.sock")
    health.measure("bract_up", up, process="supernode")
    health.note("SuperNode", "ok" if up else "FAIL", "runs" if up else f"does not run: {where}")
    age = contact.contact_age(where)
    if age is None:
        health.note("SuperLink", "FAIL", "has not answered this SuperNode yet")
        return
    health.measure("bract_contact_age_seconds", age)
    level: Level = "ok" if age <= LONGEST_SILENCE else "FAIL"
    health.note("SuperLink", level, f"answered {age:.0f} s ago")


def _record(health: Health, folder: Path, site: SiteFile) -> None:
    """Report the site's answers, refusals and spent privacy."""
    from bract.client.accounting import account
    from bract.client.answered import Answered
    from bract.client.policy import load_policy
    from bract.client.refusals import read_refusals
    from bract.disk import read_private

    state = folder / site.state
    with health.looking_at("answers"):
        text = read_private(state / f"{site.name}-answered.json")
        source = str(state / f"{site.name}-answered.json")
        answered = Answered() if text is None else Answered.parse(text, source=source)
        for kind, count in answered.totals.items():
            health.measure("bract_answers_total", count, kind=kind)
        words = f"{sum(answered.totals.values())}"
        if answered.runs:
            run, latest = list(answered.runs.items())[-1]
            words += f"; of run {run} " + ", ".join(
                f"{kind} of round {last.round}" for kind, last in latest.kinds.items()
            )
        health.note("answers", "ok", words)
        policy = load_policy(None if site.policy is None else folder / site.policy)
        found = account(answered.spent(), policy.delta)
        spent, how = found.epsilon, f" ({found.note})" if found.note else ""
        health.measure("bract_epsilon_spent", spent)
        health.measure("bract_updates_without_guarantee_total", answered.without_guarantee)
        allowed = "" if policy.max_epsilon is None else f" of {policy.max_epsilon:g}"
        health.note(
            "privacy",
            "WARN" if policy.max_epsilon is not None and spent >= policy.max_epsilon else "ok",
            f"epsilon {spent:.4g}{allowed} spent at delta {policy.delta:g}{how}; "
            f"{answered.without_guarantee} updates left without a guarantee",
        )
    with health.looking_at("refusals"):
        refused = read_refusals(state, site.name)
        health.measure("bract_refusals_total", refused.count)
        words = f"{refused.count}"
        if refused.last is not None:
            words += f", the last on {refused.last}: {refused.reason}"
        health.note("refusals", "ok", words)


def _sites(health: Health, place: Path) -> None:
    from bract.kits.registration import online

    found = online(place)
    away = [name for name, is_online in found.items() if not is_online]
    for name, is_online in found.items():
        health.measure("bract_site_online", is_online, site=name)
    words = f"{len(found) - len(away)} of {len(found)} connected"
    if away:
        words += f"; away: {', '.join(away)}"
    health.note("sites", "WARN" if away or not found else "ok", words)


def _runs(health: Health, folder: Path) -> None:
    from bract.rundir import RunDirectory

    if not folder.is_dir():
        return
    found = [path for path in folder.iterdir() if (path / "run.json").is_file()]
    found.sort(key=lambda path: (path / "run.json").stat().st_mtime)
    for path in found[-MOST_RUNS:]:
        with health.looking_at(f"run {path.name}"):
            run = RunDirectory(path)
            state, rows = run.true(run.state()), run.metrics()
            number = max((row.round for row in rows), default=0)
            failures = sum(len(row.failures) for row in rows)
            health.measure("bract_run_round", number, run=path.name)
            health.measure("bract_run_client_failures_total", failures, run=path.name)
            active = state.status in ("starting", "running")
            health.measure("bract_run_active", active, run=path.name)
            words = f"{state.status}, round {number}, {failures} client failures"
            health.note(f"run {path.name}", "ok", words)


def _disk(health: Health, what: str, path: Path) -> None:
    with health.looking_at("disk"):
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
        health.measure("bract_disk_free_bytes", free, folder=what)
        level: Level = "ok" if free >= LEAST_FREE else "FAIL"
        health.note("disk", level, f"{free / 2**30:.1f} GiB free in {path}")


def _certificates(health: Health, folder: Path) -> None:
    for name in certificates_of(folder):
        with health.looking_at(name):
            found = read_certificate(folder / name)
            _measure_end(health, name, found.not_valid_after_utc)
            soon = expiry(found, name, fix=RENEWAL[name])
            health.note(name, "WARN" if soon else "ok", soon or _days(found.not_valid_after_utc))


def _gateway(health: Health, folder: Path, *, at: str | None = None) -> None:
    with health.looking_at("gateway"):
        health.measure("bract_up", 0.0, process="gateway")
        found = gateway.ask(health.kit, folder, at=at)
        health.samples[-1] = Sample("bract_up", 1.0, {"process": "gateway"})
        ends = found.certificate.not_valid_after_utc
        if not (folder / kits.GATEWAY).is_file():
            _measure_end(health, kits.GATEWAY, ends)
        words = found.soon or f"answers, release {found.version}, certificate {_days(ends)}"
        health.note("gateway", "WARN" if found.soon else "ok", words)


def _measure_end(health: Health, name: str, ends: datetime.datetime) -> None:
    left = (ends - certificates.now()).total_seconds()
    health.measure("bract_certificate_seconds_left", left, certificate=name)


def _days(ends: datetime.datetime) -> str:
    left = (ends - certificates.now()).days
    return f"valid for {left} days; you are warned from {WARN_DAYS} days before its end on"
