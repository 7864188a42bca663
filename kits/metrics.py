"""Prometheus' text format, for the textfile collector of node_exporter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bract.disk.files import write_text

METRICS: Mapping[str, str] = {
    "bract_up": "Whether a process of this party answers on its socket.",
    "bract_contact_age_seconds": "Seconds since the SuperLink last answered this SuperNode.",
    "bract_site_online": "Whether a registered site is connected.",
    "bract_certificate_seconds_left": "Seconds until a certificate ends.",
    "bract_disk_free_bytes": "Free bytes of the disk that holds a folder.",
    "bract_answers_total": "Messages that this site has answered, by kind.",
    "bract_refusals_total": "Messages that this site has refused.",
    "bract_epsilon_spent": "Epsilon that all updates of this site spent, at its policy's delta.",
    "bract_updates_without_guarantee_total": "Updates of this site that no noise covers.",
    "bract_run_round": "Last finished round of a run.",
    "bract_run_client_failures_total": "Clients that did not answer usably, over a run's rounds.",
    "bract_run_active": "Whether a run trains.",
    "bract_status_time_seconds": "When this was measured, in seconds since 1970.",
}
"""The metrics; a name that ends in ``_total`` is a counter, every other one a gauge."""


@dataclass(frozen=True)
class Sample:
    """One measured value; ``name`` is one of `METRICS`."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def exposition(samples: Iterable[Sample]) -> str:
    """Return samples in Prometheus' text format, each metric with its help and type."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, found in by_name.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {METRICS[name]}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels(one.labels)} {_number(one.value)}" for one in found]
    return "".join(f"{line}\n" for line in lines)


def write_metrics(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples for node_exporter, whole or not at all.

    Every user may read the file: its readers are other users, and it holds no secret.
    """
    write_text(path, exposition(samples))
    path.chmod(0o644)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if not math.isnan(value) else "NaN"
