"""What each defense leaves to an attacker who ignores it and to one who knows it.

    python benchmarks/audit.py [--data digits] [--model lenet] [--defense adadefense] [--json]

Every image belongs to a client of its own, which sends the gradient of that one image through the
real defense, round after round: in round r client i trains on image i + r - 1, and the server
steps by what it received. Each row attacks all clients' uploads of one round. Tiers: ``plain`` is
the same gradient at the same parameters before the defense, ``oblivious`` takes the upload at face
value, ``adaptive`` knows the defense and its hyper-parameters; ``key known`` also holds FedKL's
scale and shift, which bounds what regressing them can reach. Scores are means over images of the
blind pick, with 95 % bootstrap intervals over images; ``to_plain`` is the paired difference in dB,
``accuracy`` what a federation of LeNet-BN on digits reaches under the defense, as
``defended_accuracy.py`` measured it. Refused uploads are counted, not scored. Images, models and
settings were not used to choose anything; candidates for identification are other digits, or other
crops of the same photographs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from attack_images import ImageSet, image_set
from results_io import emit, note, parser
from torch import Tensor, nn

from bract.attacks import Budget, Engine, Reconstruction, Refusal, attack, reconstruct
from bract.attacks.adaptive.fedkl import key_known
from bract.attacks.baselines import class_mean, random_image
from bract.attacks.metrics import bootstrap_interval, score
from bract.client.defenses import ProtectContext, build_defenses
from bract.client.training import train_locally
from bract.config import TrainingConfig
from bract.data import DataSpec
from bract.models import create_model, initialise
from bract.models.keylock import Lock
from bract.observation import Observation, Protocol
from bract.update import Tensors, buffers_of, parameters_of

DEFENSES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "adadefense": [{"name": "adadefense"}],
    "adadefense, eps outside": [{"name": "adadefense", "eps_placement": "outside"}],
    "guardian": [{"name": "guardian"}],
    "fedkl": [{"name": "fedkl"}],
    "noise": [{"name": "noise", "std": 1e-3}],
    "pruning": [{"name": "pruning"}],
    "soteria": [{"name": "soteria"}],
    "precode": [{"name": "precode"}],
}
PLAIN_MODELS = ("lenet-strided", "lenet")
NORM_MODELS = ("lenet-strided-bn", "lenet-bn")
LATER_ROUNDS = (2, 5)
LEARNING_RATE = 0.1

COLUMNS = (
    "data",
    "model",
    "defense",
    "round",
    "tier",
    "attack",
    "psnr",
    "psnr_low",
    "psnr_high",
    "to_plain",
    "ssim",
    "ssim_low",
    "ssim_high",
    "label_accuracy",
    "top1",
    "accuracy",
    "resolved",
    "refused",
    "seconds_per_image",
)


@dataclass(frozen=True)
class Setting:
    """One row."""

    data: str
    model: str
    defense: str
    round: int
    tier: str
    attack: str = "grnn"
    iterations: int = 2000
    restarts: int = 1


@dataclass(frozen=True)
class Upload:
    """What a server captured of one client, and what only the scorer knows.

    Attributes
    ----------
    captured
        As the defense let it out.
    plain
        As it would have been without one.
    history
        The same client's earlier captures.
    coefficients
        Scale and shift of each locked layer; empty without FedKL.
    """

    captured: Observation
    plain: Observation
    history: tuple[Observation, ...]
    truth: Tensor
    label: Tensor
    coefficients: Tensors


def standard_plan(iterations: int) -> list[Setting]:
    """Every row of the table, those that decide first."""
    rows = []
    for data in ("digits", "photos"):
        for model in PLAIN_MODELS:
            rows.append(Setting(data, model, "none", 1, "plain"))
            for defense in ("adadefense", "adadefense, eps outside", "guardian"):
                for tier in ("oblivious", "adaptive"):
                    rows.append(Setting(data, model, defense, 1, tier))
        for model in NORM_MODELS:
            for tier in ("key known", "adaptive", "oblivious"):
                restarts = 2 if tier == "adaptive" else 1
                rows.append(Setting(data, model, "fedkl", 1, tier, restarts=restarts))
        for defense in ("noise", "pruning", "soteria", "precode"):
            for tier in ("oblivious", "adaptive"):
                rows.append(Setting(data, "lenet-strided", defense, 1, tier))
        for model in NORM_MODELS:
            rows.append(Setting(data, model, "none", 1, "plain"))
    for model in PLAIN_MODELS:
        for number in LATER_ROUNDS:
            for defense in ("adadefense", "adadefense, eps outside"):
                for tier in ("adaptive", "plain"):
                    rows.append(Setting("digits", model, defense, number, tier))
    return [replace(row, iterations=iterations) for row in rows]


def uploads(setting: Setting, images: ImageSet) -> list[Upload]:
    """Run the clients up to the setting's round."""
    return [upload(setting, images, client) for client in range(len(images.images))]


def upload(setting: Setting, images: ImageSet, client: int) -> Upload:
    """Run one client and a server that steps by its uploads; return the last round's."""
    channels, size, _ = images.images.shape[1:]
    spec = DataSpec((channels, size, size), 10, (0.0,) * channels, (1.0,) * channels)
    chain = build_defenses(DEFENSES[setting.defense])
    model = create_model(setting.model, classes=10, channels=channels, image_size=size)
    network = initialise(chain.prepare_model(model), "default", 0)
    stand_in = setting.defense.startswith("adadefense")
    state: Tensors = {}
    history: list[Observation] = []
    for number in range(1, setting.round + 1):
        position = (client + number - 1) % len(images.images)
        truth, label = images.images[[position]], images.labels[[position]]
        context = ProtectContext(round=number, seed=1000 * client + number)
        chain.attach(network, state, context)
        coefficients = lock_of(state)
        parameters, buffers = parameters_of(network), buffers_of(network)
        found = train_locally(
            network,
            truth,
            label,
            config=TrainingConfig(algorithm="fedsgd", batch_size=1, lr=LEARNING_RATE),
            spec=spec,
            seed=0,
            device=torch.device("cpu"),
        )
        context = replace(context, model=network, images=truth, labels=label)
        sent = chain.protect(found.update, state, context)
        protocol = Protocol(
            algorithm="fedsgd",
            model=setting.model,
            image_shape=(channels, size, size),
            classes=10,
            mean=spec.mean,
            std=spec.std,
            batch_size=1,
            num_examples=1,
            defenses=tuple(chain.public()),
        )
        captured = Observation(
            round=number,
            client=f"client-{client}",
            parameters=parameters,
            buffers=buffers,
            update=sent,
            protocol=protocol,
        )
        history.append(captured)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.sub_(sent[name], alpha=1.0 if stand_in else LEARNING_RATE)
            for name, buffer in network.named_buffers():
                buffer.copy_(found.buffers[name])
    plain = replace(captured, update=found.update, protocol=replace(protocol, defenses=()))
    return Upload(captured, plain, tuple(history[:-1]), truth[0], label[0], coefficients)


def lock_of(state: Tensors) -> Tensors:
    """Return scale and shift of each locked layer from a client's state; nothing without FedKL."""
    own = {n.removeprefix("fedkl."): v for n, v in state.items() if n.startswith("fedkl.")}
    return (
        {n: v.detach().clone() for n, v in Lock.load(own, relu=True).coefficients().items()}
        if own
        else {}
    )


def run(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Attack one row's uploads and score what came back."""
    images = image_set(setting.data, options.images, options.split)
    captured = uploads(setting, images)
    begun = time.perf_counter()
    outcomes = attack_all(setting, captured, options)
    seconds = time.perf_counter() - begun
    scored, resolved = [], []
    for outcome, known in zip(outcomes, captured, strict=True):
        if isinstance(outcome, Refusal):
            continue
        scored.append(
            score(
                outcome.images,
                known.truth[None],
                guessed_labels=outcome.labels,
                labels=known.label[None],
                candidates=images.candidates,
            )
        )
        share = outcome.settings["evidence"].get("resolved")
        if share is not None:
            resolved.append(float(share))
    psnr = [s.psnr[0] for s in scored]
    ssim = [s.ssim[0] for s in scored]
    low, high = bootstrap_interval(psnr) if psnr else (None, None)
    return {
        **asdict(setting),
        "images": len(images.images),
        "psnr": mean(psnr),
        "psnr_low": low,
        "psnr_high": high,
        "psnr_each": psnr,
        "ssim": mean(ssim),
        "ssim_each": ssim,
        "label_accuracy": mean([s.label_accuracy for s in scored if s.label_accuracy is not None]),
        "top1": mean([float(s.rank[0] <= 1) for s in scored if s.rank]),
        "top5": mean([float(s.rank[0] <= 5) for s in scored if s.rank]),
        "resolved": mean(resolved),
        "refused": sum(isinstance(o, Refusal) for o in outcomes),
        "reason": next((o.reason for o in outcomes if isinstance(o, Refusal)), None),
        "seconds_per_image": seconds / len(captured),
    }


def attack_all(
    setting: Setting, captured: Sequence[Upload], options: argparse.Namespace
) -> list[Reconstruction | Refusal]:
    """Run the attacker of the setting's tier on every upload."""
    shown = {u.captured.key: u for u in captured}
    observations = [u.plain if setting.tier == "plain" else u.captured for u in captured]
    using = attack(setting.attack)
    if setting.tier == "key known":
        using = key_known(using, {u.captured.key: u.coefficients for u in captured})
    return reconstruct(
        observations,
        using,
        budget=Budget(iterations=setting.iterations, restarts=setting.restarts),
        seed=options.seed,
        tier="adaptive" if setting.tier == "adaptive" else "oblivious",
        engine=Engine(device=options.device),
        history=lambda observation: shown[observation.key].history,
    )


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing."""
    return statistics.fmean(values) if values else None


def compare_to_plain(rows: list[dict[str, Any]]) -> None:
    """Add each row's paired difference in dB to the undefended gradient of the same images."""
    plain = {
        (r["data"], r["model"], r["defense"], r["round"], r["attack"]): r
        for r in rows
        if r["tier"] == "plain"
    }
    for row in rows:
        where = (row["data"], row["model"], row["defense"], row["round"], row["attack"])
        same = plain.get(where)
        if same is None and row["round"] == 1:
            same = plain.get((row["data"], row["model"], "none", 1, row["attack"]))
        if same is None or len(same["psnr_each"]) != len(row["psnr_each"]):
            continue
        each = [a - b for a, b in zip(row["psnr_each"], same["psnr_each"], strict=True)]
        row["to_plain"] = statistics.fmean(each)
        row["to_plain_low"], row["to_plain_high"] = bootstrap_interval(each)


def add_accuracy(rows: list[dict[str, Any]]) -> None:
    """Add what each defense leaves of a federation's accuracy, where that was measured."""
    measured = {
        found["defense"]: found["accuracy"]
        for path in sorted((Path(__file__).parent / "results").glob("defended-accuracy-*.json"))
        for found in json.loads(path.read_text())["rows"]
    }
    for row in rows:
        row["accuracy"] = measured.get(row["defense"].split(",")[0])


def baselines(data: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows of guesses that see no gradient."""
    images = image_set(data, options.images, options.split)
    guesses = {
        "class mean": class_mean(images.candidates, images.candidate_labels, images.labels),
        "random image": random_image(images.candidates, options.images, seed=options.seed),
    }
    for name, made in guesses.items():
        scored = [
            score(made[i : i + 1], images.images[i : i + 1], candidates=images.candidates)
            for i in range(len(made))
        ]
        psnr = [s.psnr[0] for s in scored]
        ssim = [s.ssim[0] for s in scored]
        low, high = bootstrap_interval(psnr)
        yield {
            **asdict(Setting(data, "-", "-", 0, "no gradient", name, 0, 0)),
            "images": len(made),
            "psnr": mean(psnr),
            "psnr_low": low,
            "psnr_high": high,
            "psnr_each": psnr,
            "ssim": mean(ssim),
            "ssim_each": ssim,
            "top1": mean([float(s.rank[0] <= 1) for s in scored if s.rank]),
        }


def main() -> None:
    """Run the plan, or the part of it that was asked for."""
    options_parser = parser(__doc__ or "", "audit")
    add = options_parser.add_argument
    add("--data", action="append", choices=("digits", "photos"))
    add("--model", action="append")
    add("--defense", action="append", choices=tuple(DEFENSES))
    add("--tier", action="append", choices=("plain", "oblivious", "adaptive", "key known"))
    add("--round", action="append", type=int)
    add("--attack", default="grnn")
    add("--images", type=int, default=16)
    add("--iterations", type=int, default=2000)
    add("--split", choices=("score", "choose"), default="score")
    add("--device", default="cpu")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--resume", type=Path, help="file of finished rows: read first, appended to")
    options = options_parser.parse_args()
    torch.set_num_threads(options.threads)
    done = read(options.resume)
    rows = []
    for setting in standard_plan(options.iterations):
        row = replace(setting, attack=options.attack)
        if (
            (options.data and row.data not in options.data)
            or (options.model and row.model not in options.model)
            or (options.defense and row.defense not in options.defense)
            or (options.tier and row.tier not in options.tier)
            or (options.round and row.round not in options.round)
        ):
            continue
        key = json.dumps([asdict(row), options.images, options.split, options.seed])
        if key not in done:
            done[key] = run(row, options)
            if options.resume is not None:
                with options.resume.open("a") as file:
                    file.write(json.dumps({"key": key, "row": done[key]}) + "\n")
        found = done[key]
        rows.append(found)
        shown = "refused" if found["psnr"] is None else f"{found['psnr']:.1f} dB"
        note(
            f"{row.data} {row.model} {row.defense} round {row.round} {row.tier}: {shown}, "
            f"{found['seconds_per_image']:.1f} s/image"
        )
    compare_to_plain(rows)
    add_accuracy(rows)
    for data in sorted({row["data"] for row in rows}):
        rows += baselines(data, options)
    for row in rows:
        row["ssim_low"], row["ssim_high"] = (
            bootstrap_interval(row["ssim_each"]) if row["ssim_each"] else (None, None)
        )
    draw(rows, options.picture)
    emit(rows, COLUMNS, as_json=options.json)


def read(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the finished rows of a file by their key."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["key"]: line["row"] for line in lines}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the first round's mean PSNR: one panel a data set and model, one dot a tier."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = [r for r in rows if r["round"] == 1 and r["psnr"] is not None]
    panels = list(dict.fromkeys((r["data"], r["model"]) for r in first))
    if not panels:
        return
    colours = {
        "plain": "#6b7280",
        "oblivious": "#2563eb",
        "adaptive": "#dc2626",
        "key known": "#d97706",
    }
    wide = min(3, len(panels))
    high = -(-len(panels) // wide)
    figure, grid = pyplot.subplots(high, wide, figsize=(4.6 * wide, 3.2 * high), squeeze=False)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (data, model) in zip(grid.flat, panels, strict=False):
        here = [r for r in first if (r["data"], r["model"]) == (data, model)]
        names = list(dict.fromkeys(r["defense"] for r in here))
        for r in here:
            place = names.index(r["defense"])
            axis.plot([r["psnr_low"], r["psnr_high"]], [place] * 2, color=colours[r["tier"]])
            axis.plot(r["psnr"], place, "o", color=colours[r["tier"]], label=r["tier"])
        guess = max(
            (r["psnr"] for r in rows if r["data"] == data and r["tier"] == "no gradient"),
            default=0.0,
        )
        axis.axvline(guess, color="#9ca3af", linestyle="--", label="best guess without gradient")
        axis.set(title=f"{data}, {model}", xlabel="PSNR [dB]", yticks=range(len(names)))
        axis.set_yticklabels(names)
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
    handles: dict[str, nn.Module] = {}
    for axis in grid.flat[: len(panels)]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
