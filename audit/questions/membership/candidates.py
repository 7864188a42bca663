"""Read the candidates that a consenting client kept: its members, and records it held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bract.audit.questions.membership.rates import CLASS
from bract.config.client_names import check_name
from bract.errors import BractError, one_line
from bract.inputs.base import Input, input_of
from bract.schema import ClientDeclaration

CANDIDATES = "candidates.safetensors"
"""In a client's truth folder: ``images`` or ``inputs``, ``labels`` and ``first_round``, int64
``(N,)``: the first round that a record was trained in, 0 for one that was held out."""

MOST_GROUPS = 20
"""Groups of an attribute whose shares are estimated; of more, too few records are known of each."""


@dataclass(frozen=True)
class Candidates:
    """Records of one client of which some were trained on.

    Attributes
    ----------
    images, labels
        As `bract.inputs.Truth`.
    first_round
        int64 ``(N,)``.
    notes
        What was left out of the file, and why.
    features
        What a classifier that sees no model is given; None is the images.
    groups
        The group of each record by attribute, int64 ``(N,)``: ``class``, and those of the input.
    """

    images: Tensor
    labels: Tensor
    first_round: Tensor
    notes: tuple[str, ...] = ()
    features: Tensor | None = None
    groups: Mapping[str, Tensor] = field(default_factory=dict)

    def take(self, chosen: Tensor) -> Candidates:
        """Return those of these positions, or for which a bool ``(N,)`` is True."""
        return replace(
            self,
            images=self.images[chosen],
            labels=self.labels[chosen],
            first_round=self.first_round[chosen],
            features=None if self.features is None else self.features[chosen],
            groups={name: groups[chosen] for name, groups in self.groups.items()},
        )

    def members_by(self, number: int) -> Tensor:
        """Return whether each was trained on in a round up to this one, bool ``(N,)``."""
        return (self.first_round > 0) & (self.first_round <= number)


def candidates_file(folder: Path, client: str) -> Path:
    """Return where the candidates of a client are."""
    return folder / check_name(client) / CANDIDATES


def load_candidates(folder: Path, client: str, declaration: ClientDeclaration) -> Candidates:
    """Read and check one client's candidates.

    A record that is both a member and held out is left out, and counted in ``notes``.

    Raises
    ------
    BractError
        In one line, if there are none, the file is not readable, shapes differ from what the
        capture declares, or one of the two kinds is missing.
    """
    path = candidates_file(folder, client)
    if not path.is_file():
        raise BractError(
            f"{path}: not there; the client keeps members and held-out records with truth-dir "
            "set and data.validation above 0, an app with keep(..., held_out=LOADER)",
            code="truth-lacking",
        )
    try:
        content = load_file(path)
        first = content.pop("first_round")
        kind = input_of(declaration)
        truth = kind.read(content, declaration)
    except (OSError, KeyError, TypeError, ValueError, BractError, SafetensorError) as error:
        raise BractError(
            f"{path}: not readable ({one_line(error, 200)})", code="truth-unusable"
        ) from error
    if (
        first.dtype != torch.int64
        or first.shape != truth.labels.shape[:1]
        or bool((first < 0).any())
    ):
        raise BractError(
            f"{path}: first_round is {first.dtype} {tuple(first.shape)}, expected int64 from 0 of "
            f"({len(truth.labels)},)",
            code="truth-unusable",
        )
    classes = None if truth.labels.is_floating_point() else declaration.classes
    if classes is not None and bool((truth.labels >= classes).any()):
        raise BractError(
            f"{path}: a label is not below the {classes} classes", code="truth-unusable"
        )
    kept, both = _apart(truth.images, first)
    found = Candidates(
        truth.images[kept],
        truth.labels[kept],
        first[kept],
        (f"{path}: {both} records are members and held out at once; left out",) if both else (),
        kind.features(truth.images[kept]),
        _groups(kind, truth.images[kept], truth.labels[kept]),
    )
    for what, count in (
        ("members", int((found.first_round > 0).sum())),
        ("held-out records", int((found.first_round == 0).sum())),
    ):
        if count < 2:
            raise BractError(f"{path}: {count} {what}, expected at least 2", code="truth-unusable")
    return found


def join(parts: Sequence[Candidates]) -> Candidates:
    """Return the candidates of several clients, who share a declaration, as one."""
    features = [p.images if p.features is None else p.features for p in parts]
    common = set.intersection(*(set(p.groups) for p in parts))
    return Candidates(
        torch.cat([p.images for p in parts]),
        torch.cat([p.labels for p in parts]),
        torch.cat([p.first_round for p in parts]),
        tuple(note for p in parts for note in p.notes),
        torch.cat(features),
        {name: torch.cat([p.groups[name] for p in parts]) for name in sorted(common)},
    )


def pool(candidates: Mapping[str, Candidates]) -> tuple[Candidates, list[str]]:
    """Return the candidates of clients, who share a declaration, as one, and whose each is.

    Of a model that all of them trained, a record that one client held out and another trained on is
    no non-member: it is left out, as is a second copy of a record.
    """
    whole = join(list(candidates.values()))
    owners = [client for client, one in candidates.items() for _ in one.labels]
    kept, _ = _apart(whole.images, whole.first_round)
    return whole.take(kept), [owners[position] for position in kept.tolist()]


def _groups(kind: Input, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    found = dict(kind.attributes(images))
    if labels.dim() == 1 and bool((labels == labels.round()).all()) and int(labels.min()) >= 0:
        found[CLASS] = labels.long()
    return {name: groups for name, groups in found.items() if 0 < int(groups.max()) < MOST_GROUPS}


def _apart(images: Tensor, first: Tensor) -> tuple[Tensor, int]:
    """Return the positions of records of one kind alone, each once, and how many were of both."""
    kinds: dict[bytes, set[bool]] = {}
    keys = [image.numpy().tobytes() for image in images]
    for key, member in zip(keys, (first > 0).tolist(), strict=True):
        kinds.setdefault(key, set()).add(member)
    seen: set[bytes] = set()
    kept = []
    for position, key in enumerate(keys):
        if len(kinds[key]) == 1 and key not in seen:
            seen.add(key)
            kept.append(position)
    return torch.tensor(kept, dtype=torch.int64), sum(len(k) == 2 for k in kinds.values())
