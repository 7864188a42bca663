"""Upper bound of what uploads reveal, compared with what the adaptive attacker reconstructed.

    python -m experiments.identifiability [--json]

The uploads are those of `experiments/bayes.py`: 16 digits, each of a client of its own, on four
networks of the strided LeNet that chose no setting. The reconstructions are those of the best
attack in its committed results. ``bound`` is the mean over uploads of
`bract.attacks.problem.identifiability.Identifiability.psnr`, which needs no attack; ``guess`` that
of a guess without the upload; ``hidden`` how many uploads are forecast as not worth trying.
"""

import statistics
import time
from typing import Any

from bract.attacks.problem.case import open_case
from bract.attacks.problem.identifiability import identifiability
from bract.schema.audit import InformationBound
from experiments.bayes import NETWORKS, Setting, uploads
from experiments.harness.bayes_reading import bayes_evidence
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.images import image_set
from experiments.harness.result import committed

COLUMNS = (
    *("init", "defense", "bound", "bound_low", "bound_high", "guess", "hidden", "images"),
    *("attack", "psnr", "ssim", "seconds"),
)
MEASURED = ("bayes-default", "bayes-uniform")
WITHOUT = ("ignoring", "prior")


def measured() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the best row of each initialisation and defense, by PSNR, of attackers who know it."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for name in MEASURED:
        for row in committed(name):
            at = (row["init"], row["defense"])
            known = row["attacker"] not in WITHOUT and row["psnr"] is not None
            if known and (at not in best or row["psnr"] > best[at]["psnr"]):
                best[at] = row
    return best


def row_of(init: str, defense: str, got: dict[str, Any], count: int) -> dict[str, Any]:
    """Bound one row's uploads."""
    setting = Setting(init, defense, got["attack"], got["attacker"], 0)
    begun = time.process_time()
    bounds = []
    for upload in uploads(setting, image_set("digits", count, "score"), NETWORKS["score"]):
        view = bayes_evidence if {"noise", "laplace", "pruning"} & set(defense.split()) else None
        found = identifiability(
            open_case(upload.captured, tier="adaptive", max_images=1, view=view)
        )
        bounds.append(
            InformationBound(
                psnr=found.psnr,
                prior_psnr=found.prior_psnr,
                numbers=found.numbers,
                pixels=found.pixels,
            )
        )
    return {
        "init": init,
        "defense": defense,
        "bound": statistics.fmean(one.psnr for one in bounds),
        "bound_low": min(one.psnr for one in bounds),
        "bound_high": max(one.psnr for one in bounds),
        "guess": bounds[0].prior_psnr,
        "hidden": sum(one.hides for one in bounds),
        "images": len(bounds),
        "attack": f"{got['attack']}, {got['attacker']}",
        "psnr": got["psnr"],
        "ssim": got["ssim"],
        "seconds": (time.process_time() - begun) / len(bounds),
    }


def main() -> None:
    """Bound every row that was measured."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--images", type=int, default=16)
    options = parse(options_parser)
    rows = []
    for (init, defense), got in measured().items():
        if defense == "precode":
            continue
        rows.append(row_of(init, defense, got, options.images))
        last = rows[-1]
        note(
            f"{init}, {defense}: at most {last['bound']:.1f} dB, got {last['psnr']:.1f} dB and "
            f"{last['ssim']:.2f}"
        )
    emit(rows, COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
