"""How much each attack recovers from one gradient, and how fast, against a plain loop.

Without options the table of the standard plan; ``--quick`` shortens it to a smoke test. Scores are
means over images of the blind pick, with 95 % t intervals; the oracle pick and the baselines that
see no gradient are reported as well. ``--split choose``, on which settings are chosen, has other
images and other networks than ``score``. ``--device cuda --speed-only`` holds 64 restarts
together against a loop over them on a GPU. Models are freshly initialised, images are not
normalised, labels are not given to any attack.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from bract.attacks import Budget, Engine, Reconstruction, Refusal, attack, reconstruct
from bract.attacks.base import Attacker
from bract.attacks.methods.baselines import prior_only
from bract.captures.observation import Observation
from bract.inputs import Truth
from bract.schema.audit import at_cap
from bract.scores.base import ScoredImages
from bract.scores.image import (
    oracle,
    score_images,
)
from experiments.harness.command import Finished, emit, note, parse, parser
from experiments.harness.images import ImageSet, image_set
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean, of_score, without_gradient
from experiments.harness.splits import first_seed
from experiments.harness.uploads import gradient_upload, network_for, plain_spec

COLUMNS = (
    "attack",
    "model",
    "init",
    "data",
    "batch",
    "iterations",
    "images",
    "psnr",
    "psnr_low",
    "psnr_high",
    "psnr_at_cap",
    "psnr_worst",
    "psnr_oracle",
    "ssim",
    "label_accuracy",
    "top1",
    "top5",
    "failed",
    "seconds_per_image",
    "cpu_seconds_per_image",
    "loop_ratio",
)

BOTH = ("digits", "photos")
INITS = ("default", "uniform")


@dataclass(frozen=True)
class Setting:
    """One row: an attack on some images through one model."""

    attack: str
    model: str
    init: str
    data: str
    iterations: int | None
    batch: int = 1
    restarts: int = 1


def standard_plan() -> list[Setting]:
    """Every combination that the documentation speaks of."""
    plan = []
    for init in INITS:
        for data in BOTH:
            for model in ("lenet-strided", "lenet"):
                plan.append(Setting("grnn", model, init, data, 2000))
                plan.append(Setting("best", model, init, data, 2000))
            plan.append(Setting("ig", "lenet-strided", init, data, 4800))
            plan.append(Setting("dlg", "lenet-strided", init, data, 300))
        plan.append(Setting("grnn", "lenet-strided", init, "digits", 2000, batch=8))
    return plan


def observe(
    images: Tensor, labels: Tensor, *, model: str, init: str, network_seed: int, client: str
) -> Observation:
    """Return what a server captures of one batch's gradient."""
    network = network_for(plain_spec(images.shape[1:]), model, network_seed, init=init)
    return gradient_upload(network, images, labels, client=client, model=model)


def observations_of(
    images: ImageSet, setting: Setting, split: str
) -> list[tuple[Observation, Tensor, Tensor]]:
    """Cut images into batches, one observation each, with its truth."""
    found = []
    for start in range(0, len(images.images) - setting.batch + 1, setting.batch):
        part = slice(start, start + setting.batch)
        truth, labels = images.images[part], images.labels[part]
        seen = observe(
            truth,
            labels,
            model=setting.model,
            init=setting.init,
            network_seed=first_seed(split),
            client=f"image-{start}",
        )
        found.append((seen, truth, labels))
    return found


def run(setting: Setting, options: argparse.Namespace) -> Row:
    """Attack every image of a setting and score it."""
    images = image_set(setting.data, options.images, options.split)
    cases = observations_of(images, setting, options.split)
    results, wall, own = timed(attack(setting.attack), setting, cases, options, trials=None)
    row = describe(setting, results, cases, images)
    row["seconds_per_image"] = wall / len(images.images)
    row["cpu_seconds_per_image"] = own / len(images.images)
    return row


def timed(
    using: Attacker,
    setting: Setting,
    cases: Sequence[tuple[Observation, Tensor, Tensor]],
    options: argparse.Namespace,
    *,
    trials: int | None,
) -> tuple[list[Reconstruction], float, float]:
    """Run an attack on all cases; return the results, the wall time and the processor's time."""
    begun, own = time.perf_counter(), time.process_time()
    outcomes = reconstruct(
        [seen for seen, _, _ in cases],
        using,
        budget=Budget(iterations=setting.iterations, restarts=setting.restarts),
        seed=options.seed,
        engine=Engine(device=options.device, trials=trials),
    )
    wall, own = time.perf_counter() - begun, time.process_time() - own
    for outcome in outcomes:
        if isinstance(outcome, Refusal):
            raise SystemExit(f"{setting}: {outcome.reason}")
    return [r for r in outcomes if isinstance(r, Reconstruction)], wall, own


def describe(
    setting: Setting,
    results: Sequence[Reconstruction],
    cases: Sequence[tuple[Observation, Tensor, Tensor]],
    images: ImageSet,
) -> Row:
    """Scores of the blind and the oracle pick."""
    blind, best = [], []
    for result, (_, truth, labels) in zip(results, cases, strict=True):
        blind.append(
            score_images(
                result.images,
                Truth(truth, labels),
                recovered=result.labels,
                candidates=images.candidates,
                perceptual=setting.batch == 1,
            )
        )
        restarts = [r.images for r in result.trials]
        chosen = restarts[oracle(restarts, truth)]
        best += score_images(chosen, Truth(truth, labels), perceptual=False).rows
    row = scores_row(setting, blind, images)
    row["psnr_oracle"] = statistics.fmean(s.psnr for s in best if s.psnr is not None)
    row["failed"] = sum(r.failed for r in results)
    row["residual"] = statistics.fmean(r.gradient_residual or 0.0 for r in results)
    for name in ("lpips_alex", "lpips_vgg", "stlpips"):
        if known := of_score(blind, name):
            row[name] = mean(known)
    return row


def scores_row(setting: Setting, scored: Sequence[ScoredImages], images: ImageSet) -> Row:
    """Means over images, with intervals over images of one network."""
    psnr = of_score(scored, "psnr")
    # Crops of one picture are no independent images; those of a batch share their upload.
    sources = [
        images.sources[upload] if setting.batch == 1 else upload
        for upload, one in enumerate(scored)
        for _ in one.rows
    ]
    ranks = of_score(scored, "rank")
    return {
        **vars(setting),
        "images": len(psnr),
        **columns("psnr", psnr, sources),
        "psnr_at_cap": at_cap(psnr),
        "psnr_worst": min(psnr),
        **columns("ssim", of_score(scored, "ssim"), sources),
        "sources_each": sources,
        "label_accuracy": mean([s.label_accuracy for s in scored if s.label_accuracy is not None]),
        "top1": mean([rank <= 1 for rank in ranks]),
        "top5": mean([rank <= 5 for rank in ranks]),
        "candidates": scored[0].candidates,
    }


def baselines(data: str, options: argparse.Namespace) -> list[Row]:
    """Rows of baselines that see no gradient."""
    images = image_set(data, options.images, options.split)
    rows = [
        scores_row(Setting(f"{name} (no gradient)", "-", "-", data, 0), scored, images)
        for name, scored in without_gradient(images, options.seed)
    ]
    for name in ("ig", "grnn"):
        setting = Setting(name, "lenet-strided", "default", data, 100)
        cases = observations_of(images, setting, options.split)
        results, _, _ = timed(prior_only(attack(name)), setting, cases, options, trials=None)
        row = describe(setting, results, cases, images)
        rows.append({**row, "attack": f"{name} prior (no gradient)", "label_accuracy": None})
    return rows


def speed(name: str, model: str, options: argparse.Namespace) -> Row:
    """Many restarts together against a plain loop over the same attack, in turn.

    The ratio on a CPU is of the processor's own time, so that other programs count less.
    """
    restarts = options.trials or (8 if options.device == "cpu" else 64)
    setting = Setting(name, model, "default", "digits", options.speed_iterations, 1, restarts)
    images = image_set("digits", 1, options.split)
    cases = observations_of(images, setting, options.split)
    warm = Setting(name, model, "default", "digits", 2, 1, restarts)
    times: dict[int, list[tuple[float, float]]] = {restarts: [], 1: []}
    for trials in times:
        timed(attack(name), warm, cases, options, trials=trials)
    for _ in range(3):
        for trials, measured in times.items():
            _, wall, own = timed(attack(name), setting, cases, options, trials=trials)
            measured.append((wall, own if options.device == "cpu" else wall))
    together, alone = (min(own for _, own in measured) for measured in times.values())
    return {
        **vars(setting),
        "attack": f"{name}, {restarts} restarts together",
        "images": 1,
        "seconds_per_image": min(wall for wall, _ in times[restarts]) / restarts,
        "loop_seconds_per_image": min(wall for wall, _ in times[1]) / restarts,
        "loop_ratio": alone / together,
    }


def main() -> None:
    """Run the plan or one setting."""
    options_parser = parser(__doc__, "split", "seed", "device", "threads", "resume")
    add = options_parser.add_argument
    add("--attack", action="append", help="attacks to run (default: the standard plan)")
    add("--model", action="append", choices=("lenet", "lenet-strided"))
    add("--init", action="append", choices=INITS)
    add("--data", action="append", choices=BOTH)
    add("--images", type=int, default=16)
    add("--iterations", type=int)
    add("--restarts", type=int, default=1)
    add("--batch", type=int)
    add("--trials", type=int, help="restarts that run together in the speed rows")
    add("--speed-iterations", type=int, default=40)
    add("--no-speed", action="store_true")
    add("--speed-only", action="store_true", help="restarts together against a loop, no scores")
    add("--no-baselines", action="store_true")
    add("--quick", action="store_true", help="2 images and 50 iterations a setting")
    options = parse(options_parser)
    plan = [
        Setting(
            s.attack,
            s.model,
            s.init,
            s.data,
            options.iterations or (50 if options.quick else s.iterations),
            options.batch or s.batch,
            options.restarts,
        )
        for s in _plan(options)
        if (not options.model or s.model in options.model)
        and (not options.init or s.init in options.init)
        and (not options.data or s.data in options.data)
        and (not options.batch or s.batch == options.batch or options.attack)
    ]
    if options.quick:
        options.images = 2
        plan = [s for s in plan if s.batch <= options.images]
    if options.speed_only:
        plan, options.no_baselines = [], True
    rows: list[Row] = []
    done = Finished(options.resume, "experiments.attacks")
    for setting in plan:
        about = [vars(setting), options.images, options.split, options.seed]
        row = done.row(about, partial(run, setting, options))
        note(
            f"{row['attack']} {row['model']} {row['init']} {row['data']} batch {row['batch']}: "
            f"{row['psnr']:.1f} dB, SSIM {row['ssim']:.3f}, {row['seconds_per_image']:.1f} s/image"
        )
        rows.append(row)
    if not options.no_baselines:
        for data in options.data or BOTH:
            rows += baselines(data, options)
    if not options.no_speed:
        for name, model in (("ig", "lenet-strided"), ("grnn", "lenet-strided"), ("grnn", "lenet")):
            rows.append(speed(name, model, options))
            note(f"{rows[-1]['attack']} on {model}: {rows[-1]['loop_ratio']:.2f} times the loop")
    emit(rows, COLUMNS, as_json=options.json)


def _plan(options: argparse.Namespace) -> list[Setting]:
    if not options.attack:
        return standard_plan()
    return [
        Setting(name, model, init, data, attack(name).iterations, options.batch or 1)
        for name in options.attack
        for model in options.model or ("lenet-strided", "lenet")
        for init in options.init or INITS
        for data in options.data or BOTH
    ]


if __name__ == "__main__":
    main()
