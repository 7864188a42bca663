"""What the sum of k clients' updates still reveals: reconstruction and membership.

    OMP_NUM_THREADS=1 python -m experiments.sums [--part reconstruction] [--seeds 3] [--json]

The server of masked sums holds the mean of k updates and no single one. ``reconstruction``: one
image a client, one gradient each, on fresh networks; the attack looks for all k images. ``leaked``
are images that the audit's own rule decides on, of ``images``; ``missed`` is the largest share
that may leak where none was found (95 %, Clopper and Pearson), ``high`` the upper end where some
were. ``membership``: clients of 20 digits and 20 held out, five local epochs, one round; ``auc``
is of the best attacker over all records of the k clients, ``missed`` the least area under the
curve that would have shown in four audits of five.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from bract.attacks import Budget, attack
from bract.attacks.problem.global_models import joint_declaration
from bract.audit.audit import Audit
from bract.audit.questions.membership.score import share_limits
from bract.captures.observation import Observation, ObservationStore
from bract.client.candidates import keep_candidates
from bract.client.defenses import ProtectContext, build_defenses
from bract.config import build_config
from bract.config.config import AuditRequest, TrainingConfig
from bract.errors import BractError
from bract.inputs import Truth
from bract.rundir import RunDirectory
from bract.schema.membership import MembershipAnswer
from bract.scores.image import score_images
from bract.seeds import derive_seed
from bract.updates.update import weighted_sum
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.federation import Clients
from experiments.harness.images import image_set
from experiments.harness.leaks import judged, leaked
from experiments.harness.result import Row
from experiments.harness.scores import mean
from experiments.harness.splits import first_seed
from experiments.harness.uploads import network_for, plain_spec, trained_upload
from experiments.membership import observed

COLUMNS = (
    *("name", "k", "attack", "images", "leaked", "missed", "high", "psnr", "ssim"),
    *("auc", "auc_low", "auc_high", "found", "attacker", "runs", "cpu_seconds", "refused"),
)
SUMS = (1, 2, 4, 8, 16, 32)
SIDE = 16


def main() -> None:
    """Run a part; then print the table or JSON."""
    arguments = parser(__doc__, "threads", "split")
    arguments.add_argument("--part", choices=("reconstruction", "membership"),
                           default="reconstruction")  # fmt: skip
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--iterations", type=int, default=300)
    options = parse(arguments)
    rows = []
    for k in SUMS:
        if options.part == "reconstruction":
            row = reconstructed(k, options.seeds, options.split, options.iterations)
        else:
            row = membership(k, options.seeds)
        rows.append(note_row(row, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def summed(uploads: list[Observation]) -> Observation:
    """Return the mean of uploads of equal weight as one observation."""
    weights = [1.0 / len(uploads)] * len(uploads)
    return replace(
        uploads[0],
        client="sum",
        update=weighted_sum([u.update for u in uploads], weights),
        returned_buffers={},
        declaration=joint_declaration([u.declaration for u in uploads]),
    )


def reconstructed(k: int, seeds: int, split: str, iterations: int) -> Row:
    """Attack the mean gradient of k clients of one image each, on so many networks."""
    images = image_set("digits", seeds * k, split, size=SIDE)
    spec = plain_spec((1, SIDE, SIDE))
    begun, psnr, ssim, results, refused = time.process_time(), [], [], [], []
    for number in range(seeds):
        seed = first_seed(split) + number
        network = network_for(spec, "lenet-strided", seed, activation="relu")
        at = range(number * k, (number + 1) * k)
        uploads = [
            trained_upload(
                network,
                images.images[[i]],
                images.labels[[i]],
                training=TrainingConfig(algorithm="fedsgd", batch_size=1),
                spec=spec,
                chain=build_defenses([]),
                state={},
                context=ProtectContext(round=1, seed=seed),
                seed=seed,
                client=f"client-{i}",
                model="lenet-strided",
                activation="relu",
            ).captured
            for i in at
        ]
        truth = Truth(images.images[list(at)], images.labels[list(at)])
        try:
            found = attack("ig")(
                summed(uploads),
                budget=Budget(iterations=iterations, restarts=1, max_images=64),
                seed=seed,
                tier="oblivious",
            )
        except BractError as error:
            refused.append(str(error))
            continue
        scored = score_images(found.images, truth, perceptual=False)
        psnr += [float(row.psnr or 0.0) for row in scored.rows]
        ssim += [float(row.ssim or 0.0) for row in scored.rows]
        results.append(judged("digits", images, found.images, truth, scored))
    flags, _ = leaked(results) if results else ([], 0)
    _, high = share_limits(sum(flags), len(flags), 0.05) if flags else (0.0, 1.0)
    return {
        "name": "reconstruction",
        "k": k,
        "attack": f"ig, {iterations} iterations",
        "images": len(flags),
        "leaked": sum(flags),
        "missed": None if any(flags) else round(high, 3),
        "high": round(high, 3),
        "psnr": mean(psnr),
        "ssim": mean(ssim),
        "runs": seeds,
        "cpu_seconds": round(time.process_time() - begun, 1),
        "refused": refused[0] if refused else None,
    }


def membership(k: int, seeds: int) -> Row:
    """Ask of the records of k clients who was in their mean update."""
    begun, answers = time.process_time(), []
    for seed in range(seeds):
        config = build_config(
            {
                "seed": seed,
                "clients": max(SUMS),
                "rounds": 1,
                "data": {
                    "image_size": SIDE,
                    "validation": 0.5,
                    "partition": {"kind": "sizes", "sizes": [40] * max(SUMS)},
                },
                "model": {"name": "lenet-strided", "activation": "relu"},
                "training": {"batch_size": 10, "lr": 0.05, "local_epochs": 5},
            }
        )
        with tempfile.TemporaryDirectory() as folder:
            run = RunDirectory(Path(folder) / "run")
            run.create(config)
            run.update_state(status="finished")
            clients = Clients(config)
            names = [name for name, _ in clients.model().named_parameters()]
            sent, clients.number = dict(clients.arrays), 1
            # Not always the same clients: which ones are summed goes by the seed.
            drawn = torch.Generator().manual_seed(derive_seed(seed, "summed"))
            chosen = torch.randperm(max(SUMS), generator=drawn)[:k].tolist()
            uploads = [observed(clients, sent, names, clients.answer(i)) for i in chosen]
            ObservationStore(run.captures).save(summed(uploads))
            data = [clients.data[i] for i in chosen]
            keep_candidates(
                run.truth / "sum",
                1,
                1,
                (torch.cat([d.images for d in data]), torch.cat([d.labels for d in data])),
                (
                    torch.cat([d.validation_images for d in data]),
                    torch.cat([d.validation_labels for d in data]),
                ),
            )
            audit = Audit(run, AuditRequest(questions=["membership"], device="cpu", seed=seed))
            (answer,) = audit.execute(audit.plan())
            assert isinstance(answer, MembershipAnswer)
            answers.append(answer)
    found = [client for answer in answers for client in answer.clients]
    best = [
        max((s for s in c.scores if s.auc is not None), key=lambda s: s.auc or 0.0) for c in found
    ]
    refused = [answer.refused for answer in answers if answer.refused]
    return {
        "name": "membership",
        "k": k,
        "images": mean([float(c.members) for c in found]),
        "auc": mean([float(s.auc or 0.0) for s in best]),
        "auc_low": min((float(s.auc_low or 0.0) for s in best), default=None),
        "auc_high": max((float(s.auc_high or 0.0) for s in best), default=None),
        "found": sum(c.found for c in found),
        "missed": mean([float(c.detectable.auc) for c in found if c.detectable.auc]),
        "attacker": ", ".join(sorted({s.attacker for s in best})),
        "runs": seeds,
        "cpu_seconds": round(time.process_time() - begun, 1),
        "refused": refused[0] if refused else None,
    }


if __name__ == "__main__":
    main()
