"""Identify and write checkpoints."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

import bract
from bract.attacks.problem.case import Case
from bract.captures.observation import Observation
from bract.disk.files import write_bytes
from bract.installed.plugins import deciding_packages
from bract.installed.versions import RESULT_CODE, code_digest
from bract.updates.update import Tensors


def write_atomically(path: Path, content: Any) -> None:
    """Save with `torch.save`, as `write_bytes` does."""
    held = io.BytesIO()
    torch.save(content, held)
    write_bytes(path, held.getvalue())


def made_by() -> tuple[str, str, str]:
    """Versions of bract and torch, and a digest of the attacks' code: what state belongs to.

    Attacks of plug-ins are among those.
    """
    code = code_digest(*RESULT_CODE, *deciding_packages())
    return bract.__version__, str(torch.__version__), code


def content_of(case: Case) -> str:
    """Everything of a case that the result depends on."""
    evidence = case.evidence
    settled = (
        case.images,
        evidence.unknown_factor,
        repr(evidence.likelihood),
        case.observation.declaration.to_dict(),
        repr(case.forward),
    )
    groups: dict[str, Tensors] = {
        "target": evidence.target,
        "weights": evidence.weights or {},
        "alternatives": evidence.alternatives or {},
        "nuisance": evidence.nuisance or {},
        "bounds": evidence.bounds or {},
        "known buffers": evidence.buffers,
        "labels": {} if evidence.labels is None else {"": evidence.labels},
    }
    return digest_of(settled, captured(case.observation) | groups)


def captured(seen: Observation) -> dict[str, Tensors]:
    """Tensors that the server sent and those returned with the update."""
    return {
        "parameters": seen.parameters,
        "buffers": seen.buffers,
        "returned buffers": seen.returned_buffers,
    }


def digest_of(settled: object, groups: dict[str, Tensors]) -> str:
    """Hexadecimal digest of plain values and of every tensor, by group and name."""
    digest = hashlib.sha256(repr(settled).encode())
    for group, tensors in groups.items():
        for name, value in tensors.items():
            digest.update(f"{group}/{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
