"""Leakage under each defense: oblivious and adaptive attacker.

    python -m experiments.audit --resume rows.jsonl [--panel "batch 4"] [--data digits] [--json]

Every upload comes from a client of its own, which trains the model on images of its own and sends
what the real defense makes of its update; the clients of a row take turns over four networks
(`experiments.harness.clients`). Tiers: ``plain`` is the same update at the same parameters before
the defense, ``oblivious`` takes the upload at face value, ``adaptive`` knows the defense and its
hyper-parameters (against noise and pruning he is the Bayes adversary), ``discounting`` trusts noisy
or pruned coordinates less. ``both known`` also holds what FedKL keeps secret. Restarts are chosen
blindly by the attacker's own loss. Means are over images, with 95 % intervals over images and
networks (`experiments.harness.crossed`). ``short`` is the mean in dB by which a row stays below its
reference, image by image the best of the undefended attacks (`REFERENCES`) and of the row itself:
an image that was made from the defended update is one that the undefended update tells too, and
beyond `ALIKE_DB` images count as alike.
``verdict`` tests it for equivalence within `EQUIVALENCE_DB`. ``leaked`` counts the images that the
audit's leak rule names, among all images of the row.
``accuracy`` is what a federation reaches under the defense with the same model, where
``defended_accuracy.py`` measured it. Where the adaptive attacker cannot undo it he
takes the upload at face value, which is counted; uploads that no attack can use are counted, not
scored. Images, networks and settings were not used to choose anything; candidates for
identification are other images of the same kind.

A file given by ``--resume`` keeps finished rows with the versions and a digest of the code that
made them. Rows of other code are measured anew, or kept and marked with ``--keep-older``.
"""

import argparse
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from bract.attacks import (
    Budget,
    Refusal,
    attack,
)
from bract.inputs import Truth
from bract.schema.audit import EXACT_DB
from bract.scores.image import score_images
from experiments.audit_picture import draw
from experiments.audit_plan import ITERATIONS, TIERS, Setting, Situation, standard_plan
from experiments.harness import mnist_package
from experiments.harness.attacking import attack_uploads
from experiments.harness.clients import images_of, trained_accuracy, uploads
from experiments.harness.command import Finished, emit, note, parser
from experiments.harness.crossed import ALIKE_DB, equivalence
from experiments.harness.images import IMAGE_SETS
from experiments.harness.leaks import judged, leaked
from experiments.harness.operating_points import POINTS
from experiments.harness.result import Row, committed
from experiments.harness.scores import columns, mean, of_score, without_gradient

COLUMNS = (
    *("panel", "data", "model", "trained", "defense", "round", "batch", "steps", "tier"),
    *("psnr", "psnr_low", "psnr_high", "short", "verdict", "ssim", "ssim_low", "ssim_high"),
    *("leaked", "undecided", "label_accuracy", "cosine", "accuracy", "resolved", "refused"),
    "at_face_value",
    "seconds_per_upload",
)
NOTES = ("resolved", "scalars_apart")
"""What an attacker's evidence says of itself that is kept."""


TOGETHER = 4
"""Uploads that are attacked as one batch and kept at once: an interrupted row goes on there."""


def run(setting: Setting, options: argparse.Namespace, clients: range) -> Row:
    """Attack some of one row's uploads; return every upload's scores."""
    situation = setting.situation.clients
    images = images_of(situation, options.split)
    captured = uploads(situation, split=options.split, secret=options.secret, clients=clients)
    begun = time.process_time()
    outcomes, fallen_back = attack_uploads(
        attack(setting.attack),
        captured,
        setting.tier,
        budget=Budget(iterations=setting.iterations, restarts=setting.restarts),
        seed=options.seed,
        device=options.device,
    )
    seconds = time.process_time() - begun
    found = []
    for number, (outcome, client) in enumerate(zip(outcomes, captured, strict=True)):
        row: Row = {"network": client.network, "source": client.source, "cosine": client.cosine}
        row["at_face_value"] = fallen_back.get(number)
        if isinstance(outcome, Refusal):
            found.append(row | {"refused": outcome.reason})
            continue
        scored = score_images(
            outcome.images,
            Truth(client.truth, client.labels),
            recovered=outcome.labels,
            candidates=images.candidates,
            perceptual=False,
        )
        evidence = outcome.settings["evidence"]
        found.append(
            row
            | {
                "psnr": [score.psnr for score in scored.rows],
                "ssim": [score.ssim for score in scored.rows],
                "rank": [score.rank for score in scored.rows],
                "label_accuracy": scored.label_accuracy,
                "judged": judged(
                    setting.situation.data,
                    images,
                    outcome.images,
                    Truth(client.truth, client.labels),
                    scored,
                ),
                "loss": outcome.pick.loss,
                "notes": {
                    name: evidence[name]
                    for name in ("resolved", "scalars_apart")
                    if name in evidence
                },
            }
        )
    return {
        "secret": str(options.secret),
        "seconds": seconds,
        "network_accuracy": trained_accuracy(situation, options.split),
        "uploads": found,
    }


def joined(parts: Sequence[Row]) -> Row:
    """Return the parts of a row as one."""
    found = [upload for part in parts for upload in part["uploads"]]
    seconds = sum(part["seconds"] for part in parts)
    return parts[0] | {"uploads": found, "seconds_per_upload": seconds / len(found)}


def summary(setting: Setting, measured: Row) -> Row:
    """Return a row of the table: means over images, intervals over clients."""
    done = [u for u in measured["uploads"] if "refused" not in u]
    sources = [u["source"] for u in done for _ in u["psnr"]]
    networks = [u["network"] for u in done for _ in u["psnr"]]
    psnr = [value for u in done for value in u["psnr"]]
    ssim = [value for u in done for value in u["ssim"]]
    leaks, undecided = leaked([u["judged"] for u in done])
    ranks = [value for u in done for value in u["rank"] if value is not None]
    resolved = [u["notes"]["resolved"] for u in done if "resolved" in u["notes"]]
    refused = [u["refused"] for u in measured["uploads"] if "refused" in u]
    fallen_back = [u["at_face_value"] for u in measured["uploads"] if u["at_face_value"]]
    return {
        "panel": setting.panel,
        **asdict(setting.situation),
        "tier": setting.tier,
        "attack": setting.attack,
        "iterations": setting.iterations,
        "restarts": setting.restarts,
        "images": len(psnr),
        **columns("psnr", psnr, sources, networks),
        "at_cap": sum(value >= EXACT_DB for value in psnr),
        **columns("ssim", ssim, sources, networks),
        "sources_each": sources,
        "networks_each": networks,
        "leaked": sum(leaks),
        "leaked_each": leaks,
        "undecided": undecided,
        "label_accuracy": mean([u["label_accuracy"] for u in done]),
        "top1": mean([float(rank <= 1) for rank in ranks]),
        "top5": mean([float(rank <= 5) for rank in ranks]),
        "cosine": mean([u["cosine"] for u in measured["uploads"]]),
        "resolved": mean(resolved),
        "scalars_apart_each": [
            u["notes"]["scalars_apart"] for u in done if "scalars_apart" in u["notes"]
        ],
        "refused": len(refused),
        "at_face_value": len(fallen_back),
        "reason": next(iter(refused + fallen_back), None),
        "network_accuracy": measured["network_accuracy"],
        "seconds_per_upload": measured["seconds_per_upload"],
        "secret": measured["secret"],
        "code": measured["code"],
        "torch": measured["torch"],
    }


def compare_to_reference(rows: list[Row]) -> None:
    """Add how far each defended row stays below what the undefended updates tell."""
    for row in rows:
        plain = [
            r["psnr_each"]
            for r in rows
            if r["panel"] == row["panel"]
            and r["tier"] == "plain"
            and r["code"] == row["code"]
            and len(r["psnr_each"]) == len(row["psnr_each"])
        ]
        if row["tier"] == "plain" or not plain or not row["psnr_each"]:
            continue
        best = [max(*each) for each in zip(row["psnr_each"], *plain, strict=True)]
        each = [
            min(a, ALIKE_DB) - min(b, ALIKE_DB) for a, b in zip(best, row["psnr_each"], strict=True)
        ]
        sources, networks = row["sources_each"], row["networks_each"]
        row |= columns("short", each, sources, networks)
        row["verdict"] = equivalence(each, sources, networks)
        row["references"] = len(plain)


def add_accuracy(rows: list[Row]) -> None:
    """Add what each defense leaves of a federation's accuracy with the same model."""
    measured = {
        (found["model"], found["defense"]): found["accuracy"]
        for found in committed("defended-accuracy")
        if found.get("activation", "relu") == "sigmoid"
    }
    for row in rows:
        where = (row["model"], row["defense"])
        row["accuracy"] = measured.get(where) if row["data"] == "digits" else None


def baselines(data: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of images that were made without a gradient: one for each original."""
    images = images_of(Situation(data, "-").clients, options.split)
    for name, scored in without_gradient(images, options.seed):
        yield {
            "panel": f"{data}, no gradient",
            **asdict(Situation(data, "-", "-", 0)),
            "tier": "no gradient",
            "attack": name,
            "images": len(scored),
            **columns("psnr", of_score(scored, "psnr")),
            **columns("ssim", of_score(scored, "ssim")),
            "top1": mean([float(rank == 1) for rank in of_score(scored, "rank")]),
        }


def main() -> None:
    """Run the plan, or the part of it that was asked for."""
    options_parser = parser(
        __doc__, "split", "seed", "device", "threads", "resume", picture="audit-cpu"
    )
    add = options_parser.add_argument
    add("--panel", action="append", help="a part of a panel's name")
    add("--data", action="append", choices=IMAGE_SETS)
    add("--model", action="append")
    add("--defense", action="append", choices=tuple(POINTS))
    add("--tier", action="append", choices=tuple(TIERS))
    add("--round", action="append", type=int)
    add("--attack", action="append", help="default: those of the plan")
    add("--uploads", type=int, help="fewer clients than the plan has")
    add("--iterations", type=int, help="instead of the plan's own")
    add("--secret", type=int, help="of the clients' private numbers; drawn if not given")
    add("--keep-older", action="store_true", help="keep finished rows of other code")
    add("--only-finished", action="store_true", help="leave out rows that are not in the file")
    options = options_parser.parse_args()
    if options.secret is None:
        options.secret = secrets.randbits(256)
    torch.set_num_threads(options.threads)
    done = Finished(options.resume, keep_older=options.keep_older)
    rows = []
    for setting in standard_plan(options.iterations or ITERATIONS):
        if not wanted(setting, options):
            continue
        if options.uploads:
            most = min(options.uploads, setting.situation.uploads)
            setting = replace(setting, situation=replace(setting.situation, uploads=most))
        found = measured(setting, done, options)
        if found is not None:
            rows.append(summary(setting, found))
            shown = "refused" if rows[-1]["psnr"] is None else f"{rows[-1]['psnr']:.1f} dB"
            note(f"{label(setting)}: {shown}, {found['seconds_per_upload']:.1f} s an upload")
    compare_to_reference(rows)
    add_accuracy(rows)
    for data in sorted({row["data"] for row in rows}):
        rows += baselines(data, options)
    draw(rows, options.picture)
    emit(rows, COLUMNS, as_json=options.json)


def wanted(setting: Setting, options: argparse.Namespace) -> bool:
    """Tell whether a row was asked for and can be run here."""
    there = setting.situation
    if (
        there.data == "mnist"
        and not mnist_package.available()
        and "mnist" not in (options.data or ())
    ):
        return False
    return (
        (not options.panel or any(part in setting.panel for part in options.panel))
        and (not options.data or there.data in options.data)
        and (not options.model or there.model in options.model)
        and (not options.defense or there.defense in options.defense)
        and (not options.tier or setting.tier in options.tier)
        and (not options.attack or setting.attack in options.attack)
        and (not options.round or there.round in options.round)
    )


def measured(setting: Setting, done: Finished, options: argparse.Namespace) -> Row | None:
    """Return a row from the file, or measure it and append it there."""
    about = asdict(replace(setting, panel=""))
    about |= {"split": options.split, "seed": options.seed}
    about["configuration"] = POINTS[setting.situation.defense]
    kept = done.get(about)
    if kept is not None:
        return kept
    count = setting.situation.uploads
    parts = [range(i, min(i + TOGETHER, count)) for i in range(0, count, TOGETHER)]
    keys = [about | {"clients": list(part)} for part in parts]
    if options.only_finished:
        found = [row for key in keys if (row := done.get(key)) is not None]
        return joined(found) if len(found) == len(parts) else None
    return joined(
        [
            done.row(key, partial(run, setting, options, part))
            for key, part in zip(keys, parts, strict=True)
        ]
    )


def label(setting: Setting) -> str:
    """Return a row's name in messages."""
    there = setting.situation
    return f"{setting.panel}: {there.defense}, {TIERS[setting.tier]}, {setting.attack}"


if __name__ == "__main__":
    main()
