"""What several rounds of one client tell together, and what a curious client sees of the others.

    OMP_NUM_THREADS=1 python -m experiments.over_rounds [--row NAME] [--split choose] [--json]

Federations of FedSGD on fresh networks, each of clients that send their whole data in every round,
through the real defense, which keeps its state from round to round. The attacker matches 1, 3 or 10
rounds (``rounds``) together, from round ``first`` on (`reconstruct_over_rounds`), blind, one start;
what it knows of the defense it works out from earlier rounds too. ``observer`` says who attacks:
the server, which holds a client's own uploads, or a client, which holds the global models alone and
takes their differences, less its own updates, for the upload of one client that holds the others'
images (`bract.attacks.problem.global_models`). Scores are means over federations of the mean over
images, with 95 % t intervals over federations, of which each has another network and other images.
``gain`` is the paired difference to one round. ``cpu_seconds`` are those of one attack.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bract.attacks import Budget, Engine, attack
from bract.attacks.base import Attacker
from bract.attacks.problem.global_models import observe_global_models
from bract.attacks.registry import reconstruct_over_rounds
from bract.attacks.result import SeedBudget
from bract.captures.observation import Observation
from bract.client.defenses import DefenseChain, ProtectContext, build_defenses
from bract.config.config import TrainingConfig
from bract.errors import BractError
from bract.inputs import Truth
from bract.scores.image import score_images
from bract.updates.update import Tensors, parameters_of
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.images import image_set
from experiments.harness.operating_points import POINTS
from experiments.harness.result import Row as Figures
from experiments.harness.scores import columns, ends, mean
from experiments.harness.splits import first_seed
from experiments.harness.uploads import network_for, plain_spec, trained_upload

ROUNDS = 11
FEDERATIONS = 4
LR = 0.1
"""Server learning rate of gradients; what AdaDefense makes of them is stepped as it is."""

SIZE = 16
GIVEN = (1, 3, 10)
MOST_PARTS = 3
"""Rounds of parts of a client's images that are put together; ten take minutes a federation."""

COLUMNS = (
    *("name", "model", "defense", "clients", "batch", "observer", "rounds"),
    *(
        "psnr",
        "psnr_low",
        "psnr_high",
        "gain",
        "gain_low",
        "gain_high",
        "ssim",
        "ssim_low",
        "ssim_high",
        "cpu_seconds",
        "refused",
    ),
)

DEFENSES = {
    "none": [],
    "noise": [{"name": "noise", "std": 1e-3}],
    "adadefense": POINTS["adadefense"],
    "eps outside": POINTS["adadefense, eps outside"],
}


@dataclass(frozen=True)
class Row:
    """One federation and one attacker, who began to look in round ``first``.

    ``held`` are a client's images where a round's batch is a random part of them; 0 is the batch.
    """

    name: str
    model: str = "lenet-strided"
    activation: str = "relu"
    defense: str = "none"
    clients: int = 1
    batch: int = 1
    held: int = 0
    observer: str = "server"
    first: int = 1
    attack: str = "ig"
    iterations: int = 150

    @property
    def tier(self) -> Any:
        """Return what the attacker knows."""
        return "oblivious" if self.defense == "none" else "adaptive"


ROWS = (
    Row("strided, batch", batch=4),
    Row("noise", activation="sigmoid", defense="noise"),
    Row("adadefense", batch=4, defense="adadefense"),
    Row("eps outside, from round 2", batch=4, defense="eps outside", first=2),
    Row("two clients, one curious", clients=2, batch=4, observer="client"),
    Row("parts", batch=4, held=8, attack="multi-round"),
)


@dataclass(frozen=True)
class Federation:
    """One federation: uploads by client, the images of each, by round, and more.

    ``used`` are positions in ``images``; ``last`` is the last global model.
    """

    uploads: list[list[Observation]]
    used: list[list[list[int]]]
    images: Tensor
    labels: Tensor
    last: Tensors

    def truth(self, clients: range, rounds: slice) -> Truth:
        """Return the images that these clients used in these rounds, each once."""
        at = sorted({i for c in clients for part in self.used[c][rounds] for i in part})
        return Truth(self.images[at], self.labels[at])


def federation(row: Row, number: int, split: str) -> Federation:
    """Run one federation; its network goes by its number."""
    held = row.held or row.batch
    count = row.clients * held
    found = image_set("digits", FEDERATIONS * count, split, size=SIZE)
    own = [
        range(number * count + i * held, number * count + (i + 1) * held)
        for i in range(row.clients)
    ]
    seed = first_seed(split) + number
    spec = plain_spec((1, SIZE, SIZE))
    network = network_for(spec, row.model, seed, activation=row.activation)
    chains: list[DefenseChain] = [
        build_defenses([dict(e) for e in DEFENSES[row.defense]]) for _ in own
    ]
    states: list[Tensors] = [{} for _ in own]
    uploads: list[list[Observation]] = [[] for _ in own]
    used: list[list[list[int]]] = [[] for _ in own]
    drawn = torch.Generator().manual_seed(seed)
    training = TrainingConfig(algorithm="fedsgd", batch_size=row.batch, lr=LR)
    averaged = row.defense in ("adadefense", "eps outside")
    for turn in range(1, ROUNDS + 1):
        sent = parameters_of(network)
        for client, (chain, state, at) in enumerate(zip(chains, states, own, strict=True)):
            part = torch.randperm(held, generator=drawn)[: row.batch].tolist()
            used[client].append([at[i] for i in part])
            at_hand = used[client][-1]
            sent_by = trained_upload(
                network,
                found.images[at_hand],
                found.labels[at_hand],
                training=training,
                spec=spec,
                chain=chain,
                state=state,
                context=ProtectContext(round=turn, seed=seed + 1000 * client),
                seed=seed,
                client=f"client-{client}",
                model=row.model,
                activation=row.activation,
            )
            uploads[client].append(sent_by.captured)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                mean = sum(mine[-1].update[name] for mine in uploads) / len(uploads)
                parameter.copy_(sent[name] - (1.0 if averaged else LR) * mean)
    return Federation(uploads, used, found.images, found.labels, parameters_of(network))


def seen_by(row: Row, held: Federation) -> list[Observation]:
    """Return what the row's observer attacks, by round.

    The curious client is the last one, and takes its own update out of the mean.
    """
    if row.observer == "server":
        return held.uploads[0]
    sent = [seen.parameters for seen in held.uploads[0]] + [held.last]
    return [
        observe_global_models(
            sent[i],
            sent[i + 1],
            [mine[i].declaration for mine in held.uploads[:-1]],
            number=i + 1,
            client="others",
            server_lr=LR,
            known=[(1.0 / row.clients, held.uploads[-1][i].update)],
        )
        for i in range(ROUNDS)
    ]


def run(row: Row, rounds: int, federations: Sequence[Federation], seed: int) -> Figures:
    """Attack the last rounds of every federation; score the reconstructions."""
    using: Attacker = attack(row.attack)
    psnr: list[float] = []
    ssim: list[float] = []
    seconds: list[float] = []
    refused: list[str] = []
    sizes: list[int] = []
    for held in federations:
        observed = seen_by(row, held)
        clients = range(1 if row.observer == "server" else row.clients - 1)
        truth = held.truth(clients, slice(row.first - 1, row.first - 1 + rounds))
        begun = time.process_time()
        try:
            found = reconstruct_over_rounds(
                observed[row.first - 1 :][:rounds],
                using,
                budget=Budget(
                    iterations=row.iterations,
                    max_images=16,
                    weak_seeds=SeedBudget(candidates=1),
                ),
                seed=seed,
                tier=row.tier,
                engine=Engine(device="cpu"),
                history=observed[: row.first - 1],
            )
        except BractError as error:
            refused.append(str(error))
            continue
        seconds.append(time.process_time() - begun)
        # An original without a reconstruction counts as a grey image.
        missing = max(0, len(truth.images) - len(found.images))
        images = torch.cat([found.images, torch.full_like(truth.images[:missing], 0.5)])
        sizes.append(len(found.images))
        rows = score_images(images, truth, perceptual=False).rows
        psnr.append(fmean(float(r.psnr or 0.0) for r in rows))
        ssim.append(fmean(float(r.ssim or 0.0) for r in rows))
    return asdict(row) | {
        "rounds": rounds,
        "federations": len(federations),
        "refused": len(refused),
        "reason": refused[0] if refused else None,
        "found": sizes,
        # Each federation has another network and other images.
        **columns("psnr", psnr, *[range(len(psnr))] * 2),
        **columns("ssim", ssim, *[range(len(ssim))] * 2),
        "cpu_seconds": mean(seconds),
    }


def compare(rows: Sequence[Figures]) -> None:
    """Add the paired gain over one round of the same images, in dB, with its interval."""
    alone = {row["name"]: row for row in rows if row["rounds"] == 1 and not row["held"]}
    for row in rows:
        before = alone.get(row["name"])
        if before is None or row is before or len(before["psnr_each"]) != len(row["psnr_each"]):
            continue
        each = [a - b for a, b in zip(row["psnr_each"], before["psnr_each"], strict=True)]
        row |= {"gain": mean(each), **ends("gain", each, *[range(len(each))] * 2)}


def main() -> None:
    """Run the rows."""
    options_parser = parser(__doc__, "split", "seed", "resume")
    options_parser.add_argument("--row", action="append", choices=[row.name for row in ROWS])
    options_parser.add_argument("--rounds", type=int, action="append", choices=GIVEN)
    options_parser.add_argument("--federations", type=int, default=FEDERATIONS)
    options = parse(options_parser)
    rows = []
    done = Finished(options.resume, "experiments.over_rounds")
    for row in ROWS:
        if options.row and row.name not in options.row:
            continue
        held = [federation(row, i, options.split) for i in range(options.federations)]
        for rounds in options.rounds or GIVEN:
            if row.held and rounds > MOST_PARTS:
                continue
            about = [asdict(row), rounds, options.split, options.federations, options.seed]
            measured = done.row(about, partial(run, row, rounds, held, options.seed))
            rows.append(note_row(measured, ("name", "rounds", "psnr", "ssim", "reason")))
    compare(rows)
    emit([row | {"size": SIZE} for row in rows], COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
