"""Whether an attacker's own signal tells that he undid Guardian, or found FedKL's lock.

    OMP_NUM_THREADS=1 python -m experiments.blind_signals guardian [--init default] [--json]
    OMP_NUM_THREADS=1 python -m experiments.blind_signals fedkl [--batch 2] [--steps 3] [--json]

Grey crops of the pictures that score attacks, at other places than the audit's rows have them,
on four networks of their own seeds. ``guardian``: scalars, readings and image before they settle
(``rough``) and after, and the blind signal of either. ``fedkl``: who holds key and lock, a search
from one start, one from three, and one that halves eight.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.attacks import Budget, Engine, attack
from bract.attacks import base as attack_base
from bract.attacks.adaptive.guardian import guardian
from bract.attacks.adaptive.guardian.guardian_settling import settle
from bract.attacks.base import Attack
from bract.attacks.problem.case import open_case
from bract.attacks.problem.evidence import Evidence
from bract.attacks.solve import refinement
from bract.attacks.solve.start_search import from_best_start
from bract.client.defenses import ProtectContext, build_defenses
from bract.config.config import TrainingConfig
from bract.inputs import Truth
from bract.scores.image import psnr, score_images
from bract.updates.update import flatten
from experiments.harness.command import emit, note_row, parser
from experiments.harness.images import GREY_PICTURES, PHOTOGRAPHS, SIZE, picture
from experiments.harness.known_secrets import known
from experiments.harness.uploads import network_for, plain_spec, trained_upload

CROP, NETWORKS, LR = 128, 4, 0.1
NAMES = (*GREY_PICTURES["score"], *PHOTOGRAPHS["score"])
COLUMNS = {
    "guardian": (
        *("picture", "init", "rough_apart", "rough_agree", "rough_off", "rough_psnr"),
        *("starts", "apart", "readings_off", "agree", "off", "psnr", "seconds"),
    ),
    "fedkl": ("picture", "attacker", "psnr", "residual", "lock_off", "found", "seconds"),
}


def crops(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return grey images ``(count, 1, 32, 32)`` and labels drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        whole = picture(NAMES[index % len(NAMES)])[:3].mean(0, keepdim=True)
        top, left = (
            int(torch.randint(0, side - CROP, (1,), generator=generator))
            for side in whole.shape[1:]
        )
        crop = whole[None, :, top : top + CROP, left : left + CROP]
        size = (SIZE, SIZE)
        found.append(F.interpolate(crop, size=size, mode="bilinear", antialias=True)[0])
    return torch.stack(found).clamp(0, 1), torch.randint(0, 10, (count,), generator=generator)


def uploads(options: Any, model: str, batch: int) -> Iterator[tuple[Any, ...]]:
    """Yield name, capture, undefended gradient, images, labels and lock of every upload."""
    images, labels = crops(options.count * batch, options.seed)
    spec = plain_spec((1, SIZE, SIZE))
    training = TrainingConfig(
        algorithm="fedavg" if options.steps else "fedsgd",
        batch_size=batch,
        local_steps=options.steps or None,
        lr=LR,
    )
    for number in range(options.count):
        part = slice(number * batch, (number + 1) * batch)
        chain = build_defenses([{"name": options.defense}])
        seed = 5000 + 10 * options.seed + number % NETWORKS
        secret = sha256(f"{12345 + options.seed} {number}".encode()).digest()
        sent = trained_upload(
            network_for(spec, model, seed, init=options.init, chain=chain),
            images[part],
            labels[part],
            training=training,
            spec=spec,
            chain=chain,
            state={},
            context=ProtectContext(round=1, seed=int.from_bytes(secret)),
            seed=seed,
            client=f"client-{number}",
            model=model,
        )
        plain = flatten(replace(sent.captured, update=sent.update).gradient())
        name = NAMES[number % len(NAMES)]
        yield name, sent.captured, plain, images[part], labels[part], sent.lock


def settling(options: Any) -> Iterator[dict[str, Any]]:
    """Yield what Guardian's readings are before and after they settle, upload by upload."""
    rough: list[Evidence] = []
    images: list[Tensor] = []
    sharpen = refinement._Fitting.sharpen

    def watched(hyper: Any, groups: Any, evidence: Evidence, *rest: Any, **named: Any) -> Any:
        rough.append(evidence)
        return settle(hyper, groups, evidence, *rest, **named)

    def seen_by(self: Any, evidence: Evidence, labels: Any, start: Tensor, steps: int) -> Any:
        found = sharpen(self, evidence, labels, start, steps)
        if steps == 0:
            begun.append(start)
        elif found is not None:
            images.append(found[0])
        return found

    patch.object(guardian, "settle", watched).start()
    patch.object(refinement._Fitting, "sharpen", seen_by).start()
    for name, seen, truth, image, _, _ in uploads(options, options.model, 1):
        begun: list[Tensor] = []
        started = time.process_time()
        case = open_case(seen, tier="adaptive", max_images=1, refine=Engine().refine)
        seconds = time.process_time() - started

        def off(evidence: Evidence, truth: Tensor = truth) -> float:
            return float((flatten(evidence.target) - truth).norm() / truth.norm())

        notes = case.evidence.notes
        yield {
            "picture": name,
            "init": options.init,
            "rough_apart": rough[-1].notes["scalars_apart"],
            "rough_agree": rough[-1].notes["scalars_agree"],
            "rough_off": off(rough[-1]),
            "rough_psnr": float(psnr(begun[0][0].float(), image)[0]),
            "starts": len(begun),
            "apart": notes["scalars_apart"],
            "readings_off": notes["readings_off"],
            "agree": notes["scalars_agree"],
            "off": off(case.evidence),
            "psnr": float(psnr(images[-1][0].float(), image)[0]),
            "seconds": seconds,
        }


def searching(options: Any) -> Iterator[dict[str, Any]]:
    """Yield what each attacker makes of FedKL, upload by upload."""
    using = attack("grnn")
    assert isinstance(using, Attack)
    for name, seen, _, pictures, labels, lock in uploads(options, options.model, options.batch):
        own = lock.coefficients()
        for attacker in ("both known", "one start", "three starts", "halved starts"):
            halved = attacker == "halved starts"
            begin: Any = from_best_start if halved else lambda solve, *rest: solve(*rest)
            patch.object(attack_base, "from_best_start", begin).start()
            who = known(using, {seen.key: lock}) if attacker == "both known" else using
            restarts = 3 if attacker == "three starts" else 1
            started = time.process_time()
            budget = Budget(iterations=options.iterations, restarts=restarts)
            found = who(seen, budget=budget, tier="adaptive")
            seconds = time.process_time() - started
            truth = Truth(pictures, labels)
            scored = score_images(found.images, truth, recovered=found.labels, perceptual=False)
            values = [row.psnr for row in scored.rows if row.psnr is not None]
            apart = [found.unknowns[n] - v for n, v in own.items() if n in found.unknowns]
            yield {
                "picture": name,
                "attacker": attacker,
                "psnr": sum(values) / len(values),
                "residual": found.gradient_residual,
                "lock_off": float(torch.cat(apart).square().mean().sqrt()) if apart else None,
                "found": found.settings["evidence"].get("lock_found"),
                "seconds": seconds,
            }


def main() -> None:
    """Run one of the two."""
    options_parser = parser(__doc__)
    add = options_parser.add_argument
    add("defense", choices=tuple(COLUMNS))
    add("--init", choices=("uniform", "default"))
    add("--model")
    add("--count", type=int, default=8)
    add("--seed", type=int, default=11, help="of the crops; networks are drawn from others")
    add("--batch", type=int, default=2, help="images of an upload against fedkl")
    add("--steps", type=int, default=0, help="local steps against fedkl; 0 sends a gradient")
    add("--iterations", type=int, default=600)
    options = options_parser.parse_args()
    against_guardian = options.defense == "guardian"
    options.init = options.init or ("uniform" if against_guardian else "default")
    options.model = options.model or ("lenet-strided" if against_guardian else "lenet-strided-bn")
    torch.set_num_threads(1)
    rows = []
    for row in settling(options) if against_guardian else searching(options):
        rows.append(note_row(row, COLUMNS[options.defense]))
    emit(rows, COLUMNS[options.defense], as_json=options.json)


if __name__ == "__main__":
    main()
