"""What a result depends on beyond attack, seed and budget; an audit resumes what still holds.

Each part is a short text; parts that differ are named in the log, and the result is made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from bract.attacks import ATTACKS
from bract.attacks.problem.evidence import ADAPTIVE
from bract.attacks.problem.public_prior import load_prior
from bract.audit.captures import Capture
from bract.audit.observations import Observations
from bract.audit.truth import truth_path
from bract.data import DATASETS
from bract.defenses import DEFENSES
from bract.inputs import INPUTS
from bract.installed.plugins import deciding_packages
from bract.installed.versions import (
    RESULT_CODE,
    audit_code,
    code_digest,
    library_versions,
    package_versions,
)
from bract.models import MODELS
from bract.registry import Registry

_NAMES = {
    "code": "the attacks' or the scorer's code",
    "plugins": "the code of other packages' attacks, defenses, models or data",
    "libraries": "the libraries",
    "declaration": "what the capture declares",
    "capture": "the captured tensors",
    "history": "the client's earlier captures",
    "truth": "the truth",
    "data": "the configuration's data section",
    "images": "the data set's files",
    "aggregates": "the run's aggregates or the colluding client's key",
    "observer": "the global models or the observer's own updates",
    "weak_seeds": "audit.weak_seeds",
    "prior": "the prior's file",
    "candidates": "the candidates",
    "final": "the final model",
}


class Basis:
    """What the results of one audit depend on.

    The device is none of it: another one changes the last bits, as another processor does.

    Parameters
    ----------
    seen
        The observations of the audit, with the attacker's and the scorer's files.
    """

    def __init__(self, seen: Observations) -> None:
        request, data = seen.request, seen.data
        self._seen, self._request = seen, request
        self._observer = seen.observer
        self._run, self._config = seen.run, seen.config
        self._captures, self._truth = seen.captures, seen.truth_folder
        self._sums = seen.sums
        self._tests = data is not None
        installed = package_versions()
        dataset = None if data is None else DATASETS.get(data.name)
        self._common = {
            "bract": installed["bract"],
            "torch": installed["torch"],
            "libraries": library_versions(),
            "code": audit_code(),
            "plugins": code_digest(*_foreign(request.models)),
            "data": _digest("kept" if data is None else data.model_dump_json()),
            "images": _listing((data and data.path) or getattr(dataset, "folder", None)),
        }
        if request.tier != "oblivious":
            self._common["weak_seeds"] = str(request.weak_seeds)
        if request.prior is not None:
            self._common["prior"] = load_prior(request.prior).digest
        if request.estimate:
            self._common["estimate"] = "made"
        self._read: dict[tuple[Path, int, int, int], str] = {}

    def of(self, capture: Capture) -> dict[str, str]:
        """Return every part for one observation; ``truth`` only where some was kept."""
        members = self._members(capture)
        found = self._common | {
            "declaration": _declared(members),
            "capture": self._files(self._captured(members)),
        }
        if self._request.tier != "oblivious":
            first = {c.client: c for c in reversed(members)}.values()
            earlier = [one for c in first for one in self._captures.before(c)]
            found["history"] = self._files(self._captured(earlier))
        if capture.members and self._sums is not None:
            found["aggregates"] = self._files(
                [path for one in capture.rounds for path in self._sums.files(one.round)]
            )
        elif self._request.tier == "colluding" and self._request.key is not None:
            lr = self._config.strategy.server_lr
            last = f"round-{capture.round:04d}.safetensors"
            kept = [
                path
                for path in sorted(self._run.aggregates.glob("*"))
                if not path.name.startswith("round-") or path.name <= last
            ]
            found["aggregates"] = _digest(f"{lr} {self._files([self._request.key, *kept])}")
        if self._observer is not None:
            seen = [path for one in capture.rounds for path in self._observer.files(one.round)]
            own = [
                path
                for one in capture.rounds
                for c in self._captures.of_round(one.round)
                if c.client == self._observer.name
                for path in c.files
            ]
            means = " ".join(self._observer.described(one.round) for one in capture.rounds)
            found["observer"] = _digest(f"{means} {self._files([*seen, *own])}")
        kept = [truth_path(self._truth, c.client, c) for c in members]
        if all(path.is_file() for path in kept):
            found["truth"] = self._files(kept)
            if not self._tests:
                # References are what other clients kept.
                folder = kept[0].parents[1]
                found["truth"] = self._files(sorted(folder.glob("*/round-*.safetensors")))
        return found

    def of_all(self, captures: Iterable[Capture]) -> dict[str, str]:
        """Return the parts of an answer that several observations were asked for together."""
        each = {capture.key: self.of(capture) for capture in captures}
        return self._common | {"captures": _digest(json.dumps(each, sort_keys=True))}

    def digest(self, paths: Iterable[Path]) -> str:
        """Return a digest of files' contents, whether or not they are there."""
        return self._files(paths)

    @property
    def state(self) -> str:
        """Name of what every observation's half-made state depends on."""
        return _digest(json.dumps(self._common, sort_keys=True))

    def _members(self, capture: Capture) -> list[Capture]:
        found = []
        for one in capture.rounds:
            of_round = {c.client: c for c in self._captures.of_round(one.round)}
            names = one.members or (one.client,)
            found += [of_round[client] for client in names if client in of_round]
        return found

    def _captured(self, captures: Iterable[Capture]) -> list[Path]:
        """Return every file of captures: one of them holds what they declare."""
        return [path for capture in captures for path in capture.files]

    def _files(self, paths: Iterable[Path]) -> str:
        """Return a digest of files' contents; each is read once while it is the same."""
        whole = sha256()
        for path in paths:
            try:
                known = path.stat()
                at = (path, known.st_ino, known.st_size, known.st_mtime_ns)
                if at not in self._read:
                    with path.open("rb") as file:
                        self._read[at] = file_digest(file, "sha256").hexdigest()
                content = self._read[at]
            except OSError:
                content = "not readable"
            whole.update(f"{path.parent.name}/{path.name} {content}\n".encode())
        return whole.hexdigest()[:16]


def changes(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Say what a result depends on that is not as it was."""
    said = []
    for part, value in wanted.items():
        before = found.get(part)
        if before == value:
            continue
        name = _NAMES.get(part, part)
        shown = before is not None and part in ("bract", "torch", "libraries", "weak_seeds")
        said.append(f"{name} was {before}, is {value}" if shown else f"{name} changed")
    return said


def _foreign(models: Iterable[str]) -> list[str]:
    """Return the top packages, other than bract's, that bring attacks, defenses, models or data."""
    modules = deciding_packages()
    registries: tuple[Registry[Any], ...] = (ATTACKS, ADAPTIVE, DEFENSES, MODELS, INPUTS)
    for registry in registries:
        modules += [str(getattr(registry[name], "__module__", "")) for name in registry]
    modules += [str(getattr(DATASETS[name].open, "__module__", "")) for name in DATASETS]
    modules += [reference.partition(":")[0] for reference in models]
    return sorted({module.partition(".")[0] for module in modules} - {"bract", "", *RESULT_CODE})


def _declared(members: Iterable[Capture]) -> str:
    return _digest(json.dumps([c.declaration.to_dict() for c in members], sort_keys=True))


def _listing(folder: Path | None) -> str:
    """Return a digest of names, sizes and times of the files below a folder."""
    if folder is None or not folder.is_dir():
        return "none"
    lines = []
    for path in folder.rglob("*"):
        if path.is_file():
            known, name = path.stat(), path.relative_to(folder).as_posix()
            lines.append(f"{name} {known.st_size} {known.st_mtime_ns}")
    return _digest("\n".join(sorted(lines)))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
