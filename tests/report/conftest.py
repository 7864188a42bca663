"""A run directory as a federation and its audit leave it, with real digits for images."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from bract import Observation, ObservationStore
from bract.attacks import ATTACKS
from bract.config import build_config
from bract.disk import write_text
from bract.parse import dump_json
from bract.report import depends
from bract.rundir import RunDirectory
from bract.schema import AuditResult, ClientDeclaration
from bract.schema.metrics import ClientRow, GlobalRow, MetricsRow

Pixels = NDArray[np.float64]
MakeRun = Callable[..., Path]


class Writers(NamedTuple):
    """The functions that write single files of a run directory."""

    audit: Callable[..., Path]
    capture: Callable[..., None]
    metrics: Callable[..., None]
    run: Callable[..., None]
    membership: Callable[..., None]


class Page(HTMLParser):
    """What a reader of the page gets: images, links, ids, text and table headers."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.images: list[dict[str, str]] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.tags.append(tag)
        self._open.append(tag)
        if tag == "img":
            self.images.append(found)
        if tag == "th":
            self.headers.append(found)
        if "id" in found:
            self.ids.append(found["id"])
        self.references += [found[key] for key in ("src", "href", "srcset") if key in found]

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text = " ".join((self.text + " " + data).split())


@lru_cache
def digits() -> tuple[Pixels, NDArray[np.int64]]:
    """Return the first 200 digits as ``(200, 32, 32)`` in [0, 1], and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images[:200] / 16.0)[:, None]
    large = torch.nn.functional.interpolate(images, size=(32, 32), mode="bilinear")
    return large[:, 0].clamp(0, 1).numpy(), found.target[:200]


def score(original: Pixels, baseline: Pixels) -> dict[str, Any]:
    from skimage.metrics import structural_similarity

    mse = float(np.mean((original - baseline) ** 2))
    return {
        "mse": mse,
        "psnr": 10 * float(np.log10(1 / mse)) if mse else 100.0,
        "ssim": float(structural_similarity(original, baseline, data_range=1.0)),
        "lpips_alex": None,
        "lpips_vgg": None,
        "identified_top1": mse < 0.04,
        "identified_top5": mse < 0.06,
    }


def write_png(path: Path, pixels: Pixels) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels * 255).round().astype(np.uint8)).save(path)


def write_audit(
    root: Path,
    number: int,
    client: str,
    *,
    images: int = 3,
    attack: str = "ig",
    tier: str = "oblivious",
    noise: float = 0.2,
    truth: bool = True,
    first: int = 0,
    **changes: Any,
) -> Path:
    """Write one attack on one observation; the reconstruction is the original and noise."""
    folder = root / "audit" / attack
    stem = f"round-{number:04d}--{client}"
    pool, labels = digits()
    rng = np.random.default_rng([number, first, images])
    results = []
    for i in range(images):
        original = pool[first + i]
        grain = rng.normal(size=original.shape)
        found = np.clip(original * (1 - noise / 2) + noise * grain * (0.6 + 0.4 * i), 0, 1)
        names = {kind: f"{stem}--{i:02d}-{kind}.png" for kind in ("reconstruction", "original")}
        write_png(folder / names["reconstruction"], found)
        if truth:
            write_png(folder / names["original"], original)
        results.append(
            {
                "index": i,
                "label": int(labels[first + i]) if noise < 0.5 or i else 8,
                "label_confidence": 0.97,
                "true_label": int(labels[first + i]) if truth else None,
                "reconstruction": names["reconstruction"],
                "original": names["original"] if truth else None,
                "scores": score(original, found) if truth else None,
                "oracle": None,
            }
        )
        if truth:
            near = float(np.mean((original - found) ** 2)) < 0.04
            results[-1]["retrieval"] = {
                "chance": 1e-7 if near else 0.6,
                "least": 1e-9,
                "nearest": near,
                "references": 36,
                "choices": images,
            }
    mine = pool[first : first + images]
    made = {
        "class_mean": [pool[labels == labels[first + i]].mean(0) for i in range(images)],
        "random_image": [pool[190 - i] for i in range(images)],
        "prior_only": [np.full((32, 32), 0.5)] * images,
    }
    baselines = {}
    for name, baseline in made.items():
        scores = [score(o, g) for o, g in zip(mine, baseline, strict=True)]
        baselines[name] = scores and {
            key: float(np.mean([s[key] for s in scores])) for key in ("psnr", "ssim", "mse")
        }
    content: dict[str, Any] = {
        "round": number,
        "client": client,
        "attack": attack,
        "tier": tier,
        "defenses": [],
        "encryption": "none",
        "chosen_attack": attack,
        "method": attack,
        "components": ["cosine matching", "pixels", "labels analytic"],
        "settings": {"tv": 1e-4, "labels": "inferred"},
        "budget": {"iterations": 4000, "restarts": 1},
        "seed": 7,
        "device": "cpu",
        "titles": {n: ATTACKS[n].title or n for n in ATTACKS if "image" in ATTACKS[n].inputs},
        "families": families(),
        "portfolio": attack in ATTACKS and ATTACKS[attack].portfolio,
        "adaptive": len(changes.get("defenses", ())) == 1,
        "seconds": 12.3,
        "loss_curve": [[100 * i, 0.9 * 0.8**i + noise / 10] for i in range(40)],
        "gradient_cosine": round(1 - noise / 12, 4),
        "refused": None,
        "scored": images if truth else 0,
        "selection": "blind",
        "images": results,
        "label_accuracy": (1.0 if noise < 0.5 else 1 - 1 / images) if truth else None,
        "baselines": baselines if truth and images else {},
        "notes": ["LPIPS not available: lpips is not installed"],
        **changes,
    }
    path = folder / f"{stem}.json"
    return write_text(path, dump_json(AuditResult(**content).to_dict()), private=True)


def families() -> dict[str, list[str]]:
    """Return the attacks on images by their family."""
    found: dict[str, list[str]] = {}
    for name in ATTACKS:
        if ATTACKS[name].family and "image" in ATTACKS[name].inputs:
            found.setdefault(ATTACKS[name].family, []).append(name)
    return found


def write_metrics(root: Path, clients: list[str], rounds: int) -> None:
    run = RunDirectory(root)
    run.metrics_path.unlink(missing_ok=True)
    for number in range(rounds + 1):
        accuracy = 0.1 + 0.85 * (1 - 0.45**number)
        metrics = {"train_loss": 2.3 * 0.5**number, "local_steps": 54.0}
        trained = {
            name: ClientRow.of(
                metrics
                | {"seconds": 1.2 + 0.2 * i, "validation_accuracy": accuracy - 0.03 * (i - 1)},
                num_examples=430 + i,
                weight=1 / len(clients),
            )
            for i, name in enumerate(clients)
        }
        run.append_metrics(
            MetricsRow(
                round=number,
                seconds=0.4 if number == 0 else 3.1,
                time=1_772_000_000.0 + number,
                evaluation=GlobalRow(loss=2.3 * 0.5**number, accuracy=accuracy),
                clients=trained if number else {},
            )
        )


def write_capture(root: Path, number: int, client: str, **declared: Any) -> None:
    declaration = ClientDeclaration(
        model="lenet", image_shape=(1, 32, 32), classes=10, mean=(0.3,), std=(0.35,), lr=0.1,
        local_steps=54, batch_size=8, num_examples=430,
    ).updated(declared)  # fmt: skip
    weight = {"fc.weight": torch.ones(2, 2)}
    ObservationStore(root / "captures").save(
        Observation(
            round=number, client=client, parameters=weight, update=weight, declaration=declaration
        )
    )


def write_run(root: Path, *, clients: list[str], rounds: int, **changes: Any) -> None:
    run = RunDirectory(root)
    config = {"name": "digits-demo", "seed": 7, "clients": len(clients), "rounds": rounds}
    run.create(build_config({**config, "truth": True}))
    state: dict[str, Any] = {
        "name": "digits-demo",
        "versions": {"bract": "0.1.0", "flwr": "1.41.0", "torch": "2.14.1", "python": "3.11.9"},
        "flower_run_id": "1234567890123",
        "started": 1_772_000_000.0,
        "finished": 1_772_000_060.5,
        "status": "finished",
        "device": "cpu",
        "command": "bract run federation.yaml",
    }
    run.update_state(**(state | changes))


@pytest.fixture(autouse=True)
def _day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every page be written two months after the run: no examination is due."""
    monkeypatch.setattr(depends, "today", lambda: date(2026, 4, 25))


def write_membership(root: Path) -> None:
    """Write that anyone was asked whose records the final model knows, and that nobody can tell."""
    score = {"attacker": "loss", "title": "Loss", "auc": 0.5, "auc_low": 0.4, "auc_high": 0.6}
    of = {"client": "client-0", "observer": "public", "members": 20, "non_members": 20}
    of |= {"chance": 0.8, "detectable": {"auc": 0.7}, "scores": [score]}
    answer = {"schema": 1, "question": "membership", "models": [of]}
    write_text(root / "audit" / "questions" / "membership" / "run.json", json.dumps(answer))


@pytest.fixture
def writers() -> Writers:
    return Writers(write_audit, write_capture, write_metrics, write_run, write_membership)


@pytest.fixture
def parse() -> type[Page]:
    return Page


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return ``make(clients=[...], rounds=3, audit=True, truth=True)``, which writes a whole run.

    client-2 leaks in round 1; noise grows with the round, and with the distance from client-2.
    """

    def make(
        clients: list[str] | None = None,
        rounds: int = 3,
        *,
        audit: bool = True,
        truth: bool = True,
        images: int = 3,
    ) -> Path:
        root = tmp_path / "runs" / "digits-demo"
        names = ["client-0", "client-1", "client-2"] if clients is None else clients
        write_run(root, clients=names, rounds=rounds)
        write_metrics(root, names, rounds)
        for number in range(1, rounds + 1):
            for i, name in enumerate(names):
                write_capture(root, number, name)
                if audit:
                    noise = 0.06 + 0.25 * (number - 1) + 0.3 * (len(names) - 1 - i)
                    write_audit(
                        root, number, name, images=images, noise=noise, truth=truth, first=20 * i
                    )
        return root

    return make
