"""The capture pack: uploads that were computed once, with what the attacks reach on them.

``tests/captures`` holds them as a run directory does: an `ObservationStore`, and the truth that
clients kept. ``make captures`` computes it anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import foreign_models
import torch
from observing import scores
from safetensors.torch import load_file
from torch import Tensor

from bract import Observation, ObservationStore
from bract.attacks import ATTACKS, Budget, Case, Engine, Reconstruction, Refusal
from bract.attacks.problem.case import open_case
from bract.attacks.result import SeedBudget
from bract.attacks.task import AttackTask
from bract.data.tokens import ids_of
from bract.inputs import Truth
from bract.installed import is_of_bract
from bract.rundir import RunDirectory
from bract.scores.signal import SignalScorer
from bract.scores.table import RowScorer
from bract_priors.trained_prior import TrainedPrior

ROOT = Path(__file__).parent / "captures"
CAPTURES, TRUTH, PRIORS = ROOT / "captures", ROOT / "truth", ROOT / "priors"
EXPECTED = ROOT / "expected.json"

STEPS = 150
"""Steps of an attack in `reached`, but for those of `ITERATIONS`."""

ITERATIONS = {
    **{"auto": 10, "best": 10, "dlg": 20, "flow": 20, "gauss-newton": 8, "ggl": 15, "gias": 40},
    **{"grnn-polish": 5, "idlg": 20, "lamp": 40, "learned-inverter": 15, "patch-span": 60},
    **{"row-span": 12, "sim": 150, "tableak": 100, "tag": 200},
}

STANDARD = {
    "image": ("lenet-strided-b1", "mlp-100-relu-b4", "returned-statistics-b2", "vit-b1"),
    "table": ("wine-b1", "diabetes-b4"),
    "text": ("encoder-b1", "decoder-b1"),
    "signal": ("signal-mlp-b1", "signal-conv1d-b1", "signal-lstm-b1"),
}
"""Uploads on which every attack of their input is run, the simplest first."""

OWN = {
    "analytic": "mlp-100-b1",
    "feature-regression": "returned-statistics-b2",
    "maui": "frozen-backbone-b1",
    "patch-embedding": "vit-b1",
    "pooled-places": "lenet-b1",
    "spear": "mlp-100-relu-b4",
    "statistics": "returned-statistics-b1",
}
"""An upload of images that an attack reconstructs, where it refuses the simplest one."""

SPECIAL = {
    "analytic": ("linear-b1", "linear-b4", "mlp-100-b1", "wine-fedavg-b8"),
    "auto": ("linear-b1", "relu-mlp-b1"),
    "best": ("lenet-strided-b2", "linear-b1"),
    "coarse-to-fine": ("tanh-cnn-b1",),
    "gauss-newton": (
        *("lenet-strided-b2", "lenet-strided-b4", "lenet-strided-default-b1", "tanh-cnn-b1"),
        *("linear-b1", "linear-b4", "mlp-100-b1", "returned-statistics-b1"),
        *("fedavg-step-b1", "fedavg-steps-b1", "fedavg-proximal-b1", "fedavg-momentum-b1"),
        *("fedavg-decay-b1", "fedavg-epochs-b2"),
        *("defended-adadefense-b1", "defended-fedkl-b1", "defended-precode-b1"),
        *("defended-pruning-b1", "defended-pruning-fedavg-b1", "defended-soteria-b1"),
        *("defended-truncated-svd-b1", "defended-censor-b1"),
    ),
    "ig": (
        *("defended-clipped-noise-b1", "defended-laplace-b1", "defended-per-example-b1"),
        *("fedavg-adam-b1", "fedavg-step-b1", "lenet-b1", "lenet-strided-b2", "tanh-cnn-b1"),
    ),
    "maui": ("frozen-backbone-b1",),
    "patch-span": ("residual-cnn-b1", "lenet-strided-b2", "returned-statistics-resnet-b1"),
    "r-gap": ("lenet-strided-relu-b1", "linear-b1", "mlp-100-b1", "tanh-cnn-b1"),
    "row-span": ("wine-b6", "wine-logistic-b2", "wine-fedavg-b8", "diabetes-embedding-b4"),
    "spear": ("relu-mlp-b1", "linear-b4", "mlp-100-b1", "wine-b6", "wine-logistic-b2"),
    "statistics": ("returned-statistics-resnet-b1",),
    "tableak": ("wine-b6",),
    "token-span": ("encoder-b2", "language-model-b1"),
}
"""Further uploads by attack; ``labels`` is run on all of its inputs but behind Guardian."""

WEAK = 16.0
"""PSNR in dB below which a score of an image holds nothing."""

FEW = 0.5
"""Share of a text's words below which a score holds nothing."""

SLOW = "defended-guardian-b1"
"""An upload whose adaptive attacker takes seconds, for slow references."""


@dataclass(frozen=True)
class Upload:
    """An upload of the pack, and what its client held."""

    name: str
    seen: Observation
    truth: Truth

    @property
    def images(self) -> Tensor:
        """The client's examples, ``(N, *declaration.image_shape)``."""
        return self.truth.images

    @property
    def labels(self) -> Tensor:
        """Their labels, ``(N,)``."""
        return self.truth.labels


def names(kind: str | None = None) -> list[str]:
    """Return the names of the uploads of a kind of input, or of all."""
    return [name for name, found in _index().items() if kind in (None, found)]


def held(name: str, server_round: int = 1) -> Upload:
    """Return an upload and its truth, as tensors of the caller's own."""
    found = _read(name, server_round)
    groups = ("parameters", "buffers", "update", "returned_buffers")
    own: dict[str, Any] = {
        group: {n: v.clone() for n, v in getattr(found.seen, group).items()} for group in groups
    }
    seen = replace(found.seen, **own)
    return Upload(name, seen, Truth(found.images.clone(), found.labels.clone()))


def opened(name: str) -> Case:
    """Return an upload as the adaptive adversary opens it."""
    return open_case(upload(name), tier="adaptive", max_images=8)


def upload(name: str, server_round: int = 1) -> Observation:
    """Return an observation, whose tensors are the caller's own."""
    return held(name, server_round).seen


def uploads(kind: str | None = None) -> Iterator[Upload]:
    """Yield every upload of a kind of input, or all."""
    for name in names(kind):
        yield held(name)


@lru_cache
def prior(kind: str = "autoencoder") -> TrainedPrior:
    """Return a generator of 8-pixel digits, none of them attacked."""
    return TrainedPrior.load(PRIORS / f"{kind}.safetensors")


def pairs() -> Iterator[tuple[str, str]]:
    """Yield each attack of bract with the uploads that `expected` has its results on."""
    for attack in sorted(name for name in ATTACKS if is_of_bract(ATTACKS[name])):
        kinds = ATTACKS[attack].inputs
        if attack == "labels":
            found = [name for kind in kinds for name in names(kind) if name != SLOW]
        else:
            found = [name for kind in kinds for name in STANDARD.get(kind, ())]
            found += [OWN[attack]] if attack in OWN else []
            found += SPECIAL.get(attack, ())
        yield from ((attack, name) for name in dict.fromkeys(found))


def whole(attack: str, kind: str) -> str | None:
    """Return the upload of an input on which all is checked of an attack; None without any."""
    if kind == "image" and attack in OWN:
        return OWN[attack]
    return next(iter(STANDARD.get(kind, ())), None)


def scored(attack: str, name: str) -> bool:
    """Return whether the pack holds a score of an attack on an upload, and not its success alone.

    Searches are scored on the simplest upload of an input, and on those of their own.
    """
    kind = ATTACKS[attack]
    return (
        name in (whole(attack, kind) for kind in STANDARD)
        or name in SPECIAL.get(attack, ())
        or kind.closed_form
        or kind.portfolio
        or "image" not in kind.inputs
        or attack == "labels"
    )


def reached(attack: str, name: str, *, iterations: int | None = None) -> dict[str, Any]:
    """Return what an attack reaches on an upload: a score, or the reason of a refusal.

    The score of images is the mean PSNR in dB, at most 60; of rows the mean share of features that
    are right, of texts the share of words that are found at their place, of signals the mean
    correlation over time; for the attack ``labels``
    the share of labels.

    Parameters
    ----------
    iterations
        Steps; None takes the pack's.
    """
    given = held(name)
    found = attacked(attack, given.seen, iterations=iterations)
    if isinstance(found, Refusal):
        return {"refused": found.reason.removeprefix(f"{given.seen.key}: ")}
    return {"score": round(score(given, found), 4)}


def attacked(
    attack: str, seen: Observation, *, iterations: int | None = None
) -> Reconstruction | Refusal:
    """Attack an upload as `reached` does."""
    (found,) = ATTACKS[attack]().attack([seen], task_of(attack, iterations=iterations))
    return found


def task_of(attack: str, *, iterations: int | None = None) -> AttackTask:
    """Return the task of `reached`."""
    kind = ATTACKS[attack]
    return AttackTask(
        budget=Budget(
            iterations=iterations or ITERATIONS.get(attack, STEPS),
            weak_seeds=SeedBudget(candidates=0),
        ),
        tier="surrogate" if kind.tiers == ("surrogate",) else "adaptive",
        engine=Engine(device="cpu"),
        public=prior(kind.generator) if kind.generator else None,
    )


def score(given: Upload, found: Reconstruction) -> float:
    """Return how near a reconstruction is to the truth; see `reached`."""
    declared = given.seen.declaration
    if found.attack == "labels":
        wanted = given.labels.flatten().tolist()
        got = found.targets.flatten().tolist()
        right = [value for value in got if any(abs(value - one) < 1e-2 for one in wanted)]
        return len(right) / len(wanted)
    if declared.table is not None:
        rows = RowScorer(declared.table, None).score(found.images, given.truth).rows
        return sum(row.features or 0.0 for row in rows) / len(rows)
    if declared.text is not None:
        texts = [ids_of(part, declared.text) for part in (found.images, given.images)]
        words = torch.isin(texts[1], torch.tensor(declared.text.special), invert=True)
        same = (texts[0][:, None] == texts[1][None]) & words
        return float((same.sum(dim=2) / words.sum(dim=1)).max(dim=0).values.mean())
    if declared.signal is not None:
        alike = SignalScorer(None).score(found.images, given.truth).rows
        return max(0.0, sum(row.correlation or 0.0 for row in alike) / len(alike))
    rows = scores(found.images, given.images)
    return sum(min(60.0, row.psnr or 0.0) for row in rows) / len(rows)


@lru_cache
def expected() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the pack's results: by attack and upload, as `reached`.

    Beside a ``score`` is its ``tolerance``; ``reconstructs`` where no score is held.
    """
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(EXPECTED.read_text())
    return found


def copied(run: RunDirectory, *chosen: str) -> RunDirectory:
    """Copy uploads and their truth into a run, all rounds of each."""
    for folder in sorted(CAPTURES.glob("round-*")):
        picked = [folder / name for name in chosen if (folder / name).is_dir()]
        for source in picked:
            shutil.copytree(source, run.captures / folder.name / source.name)
        if picked:
            shutil.copytree(folder / ".sent", run.captures / folder.name / ".sent")
    for name in chosen:
        shutil.copytree(TRUTH / name, run.truth / name)
    return run


@lru_cache
def _index() -> dict[str, str]:
    store = _store()
    first = [folder for folder in store.folders() if folder.parent.name == "round-0001"]
    return {folder.name: store.describe(folder).declaration.input for folder in first}


@cache
def _read(name: str, server_round: int) -> Upload:
    store = _store()
    seen = store.load(store.folder(server_round, name))
    kept = load_file(TRUTH / name / f"round-{server_round:04d}.safetensors")
    return Upload(name, seen, Truth(kept["images"], kept["labels"]))


def _store() -> ObservationStore:
    return ObservationStore(CAPTURES, models=[foreign_models.named(m) for m in _OWN_MODELS])


_OWN_MODELS = (*foreign_models.MODELS, foreign_models.frozen_backbone)
