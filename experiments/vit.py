"""Images through vision transformers: each defense ignored and known, and batches undefended.

    OMP_NUM_THREADS=1 python -m experiments.vit [--split choose] [--resume FILE] [--json]

Each row is photographs through fresh networks of up to four seeds, one gradient each, with
the client's real defense. *oblivious* takes the upload at face value, *adaptive* knows the defense;
``refused`` counts uploads that it refuses, whose images are none. ``vit`` has patches of 4 pixels,
width 192 and 6 blocks; ``vit_b_16`` is torchvision's. PSNR is capped at 100 dB. Which weights of
smooth images are tried was decided on photographs that are not among these; the attack chooses
among them without the truth. Rows of several images an upload are batches under `april` by 100
steps of L-BFGS from grey, labels read from the last layer, images paired by assignment. CPU seconds
are the process' own on one thread, an image, evidence included.
"""

import time
from dataclasses import dataclass
from typing import Any

from bract.attacks import Budget, Refusal
from bract.attacks.registry import attack
from bract.inputs import Truth
from bract.scores.image import score_images
from experiments.harness.attacking import Tier, attack_uploads
from experiments.harness.clients import Situation, uploads
from experiments.harness.command import Finished, emit, note, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean, of_score

COLUMNS = (
    *("model", "size", "defense", "tier", "attack", "batch", "images", "refused"),
    *("psnr", "psnr_low", "psnr_high"),
    *("ssim", "recognisable", "cosine", "cpu_seconds"),
)
DEFENSES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "adadefense": {"name": "adadefense"},
    "guardian": {"name": "guardian"},
    "fedkl": {"name": "fedkl"},
    "noise 1e-4": {"name": "noise", "std": 1e-4, "clip": 1.0},
    "noise 1e-3": {"name": "noise", "std": 1e-3, "clip": 1.0},
    "pruning 20 %": {"name": "pruning", "ratio": 0.2},
    "pruning 90 %": {"name": "pruning", "ratio": 0.9},
}
SECRET = 20261123
SMALL = "vit(width=96,depth=2)"
"""For Guardian, whose inversion takes minutes on a larger one."""
RECOGNISABLE = 0.5
UPLOADS, STEPS = 2, 100
"""Of each row of batches, and of L-BFGS."""


@dataclass(frozen=True)
class Setting:
    """One row."""

    defense: str
    tier: Tier
    model: str = "vit"
    size: int = 32
    images: int = 4
    attack: str = "patch-embedding"
    batch: int = 1


BOTH: tuple[Tier, ...] = ("oblivious", "adaptive")
SETTINGS = (
    Setting("none", "plain"),
    *(Setting(defense, tier) for defense in ("fedkl", "adadefense") for tier in BOTH),
    Setting("none", "plain", "vit_b_16", 224, images=2),
    *(
        Setting(defense, tier)
        for defense in ("noise 1e-4", "noise 1e-3", "pruning 20 %", "pruning 90 %")
        for tier in BOTH
    ),
    Setting("none", "plain", SMALL),
    *(Setting("guardian", tier, SMALL, images=2) for tier in BOTH),
    *(
        Setting("none", "plain", SMALL, images=UPLOADS * batch, attack="april", batch=batch)
        for batch in (2, 4, 8)
    ),
)


def row_of(setting: Setting, split: str) -> Row:
    """Attack the images of a setting one by one."""
    entry = DEFENSES[setting.defense]
    situation = Situation(
        data="photos",
        model=setting.model,
        defenses=() if entry is None else (entry,),
        uploads=setting.images // setting.batch,
        batch=setting.batch,
        size=setting.size,
    )
    using, budget = attack(setting.attack), Budget()
    if setting.attack == "april":
        using, budget = attack("april", quasi_newton=True), Budget(iterations=STEPS)
    scored, used, cosines, spent, refused = [], [], [], 0.0, 0
    for client in range(situation.uploads):
        (upload,) = uploads(
            situation, split=split, secret=SECRET, clients=range(client, client + 1)
        )
        begun = time.process_time()
        (found,), reasons = attack_uploads(
            using, [upload], setting.tier, budget=budget, seed=0, device="cpu"
        )
        spent += time.process_time() - begun
        cosines.append(upload.cosine)
        for reason in [*reasons.values(), *([found.reason] if isinstance(found, Refusal) else [])]:
            note(reason)
        if reasons or isinstance(found, Refusal):
            refused += 1
            continue
        truth = Truth(upload.truth, upload.labels)
        used.append(upload)
        scored.append(score_images(found.images, truth, perceptual=False))
    ssim = of_score(scored, "ssim")
    return {
        **vars(setting),
        "refused": refused,
        **columns(
            "psnr",
            of_score(scored, "psnr"),
            [u.source for u in used for _ in range(setting.batch)],
            [u.network for u in used for _ in range(setting.batch)],
        ),
        "ssim": mean(ssim),
        "recognisable": mean([float(one >= RECOGNISABLE) for one in ssim]),
        "cosine": mean(cosines),
        "cpu_seconds": spent / setting.images,
    }


def main() -> None:
    """Measure; print the table or JSON."""
    made = parser(__doc__, "split", "resume")
    made.add_argument(
        "--finished",
        action="store_true",
        help="only what --resume holds, measured by older code too",
    )
    options = parse(made)
    done = Finished(options.resume, "experiments.vit", keep_older=options.finished)
    rows: list[Row] = []
    for setting in SETTINGS:
        row = done.get(vars(setting))
        if row is None and not options.finished:
            row = done.add(vars(setting), row_of(setting, options.split))
        if row is not None:
            rows.append(note_row(row, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
