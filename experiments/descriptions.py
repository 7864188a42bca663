"""How often the check of a description finds planted errors, and how often it errs itself.

    python -m experiments.descriptions --json > experiments/results/descriptions-DEVICE.json

Clients train in plain PyTorch on the embedded digits, as apps of others do, and each upload is
checked against a declaration, with what the client kept (``with truth``) and without. ``planted``
are 40 uploads of ten kinds of error over four networks; one is found where the check contradicts
the declaration, without truth where an invariant fails. ``well-formed`` are 200 uploads that are
declared as they were made, by clients with declared noise, gradients that were clipped far above
their norm, dropout, augmented images, arithmetic in bfloat16, momentum, Nesterov's momentum, Adam,
weight decay or long training; there every contradiction and every failing invariant is an error.
No threshold was chosen on these uploads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks.task import AttackTask
from bract.audit.description.check import check_upload
from bract.captures.observation import ClientDeclaration, Observation
from bract.config import DataConfig
from bract.data.views import test_data
from bract.inputs import Truth
from bract.installed.references import own_word
from bract.models import create_model
from bract.models.initialise import initialise
from bract.updates.update import buffers_of, difference, parameters_of
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.result import Row

COLUMNS = ("what", "kind", "model", "seed", "state", "failing", "alternative", "seconds")


def perceptron() -> nn.Module:
    """Return a network of two linear layers, as apps of tables have it, on flattened digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


MODELS = ("lenet-strided", "lenet-strided-bn", "resnet20", "perceptron")


@dataclass(frozen=True)
class Work:
    """The training of one client; the defaults are declared as they are."""

    lr: float = 0.05
    batch: int = 4
    count: int = 8
    epochs: int = 1
    optimizer: str = "sgd"
    momentum: float = 0.0
    decay: float = 0.0
    half: bool = False
    clip: float | None = None
    dropout: float = 0.0
    augmented: bool = False
    noise: float = 0.0
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    train: bool = True


def network(name: str, seed: int) -> nn.Module:
    """Return a network of this name, initialised by a seed."""
    if name == "perceptron":
        made = perceptron()
    else:
        made = create_model(name, classes=10, channels=1, image_size=8, activation="relu")
    return initialise(made, "default", seed)


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images ``(count, 1, 8, 8)`` and their labels."""
    images, labels = test_data(DataConfig(name="digits", image_size=8))
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:count]
    return images[drawn], labels[drawn]


def optimizer_of(work: Work, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a client."""
    p = list(model.parameters())
    if work.optimizer == "adam":
        return torch.optim.Adam(p, lr=work.lr, weight_decay=work.decay)
    return torch.optim.SGD(
        p,
        lr=work.lr,
        momentum=work.momentum,
        nesterov=work.optimizer == "nesterov",
        weight_decay=work.decay,
    )


def upload(
    name: str, work: Work, seed: int, *, begun: int | None = None
) -> tuple[Observation, Truth]:
    """Train one client; return what it sends, declared as it was made, and what it trained on.

    Parameters
    ----------
    begun
        Seed of another network in which it begins; None begins with what was sent.
    """
    model = network(name, seed)
    sent, buffers = parameters_of(model), buffers_of(model)
    images, labels = digits(work.count, 10_000 + seed)
    if work.augmented:
        images = images.flip(-1).roll(1, -2)
    if begun is not None:
        model.load_state_dict(network(name, begun).state_dict())
    model.train(work.train)
    if work.dropout:
        last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        last.register_forward_pre_hook(lambda _, given: (F.dropout(given[0], work.dropout),))
    torch.manual_seed(seed)
    descent = optimizer_of(work, model)
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(work.epochs):
        for at in range(0, work.count, work.batch):
            taken = (images[at : at + work.batch] - 0.3) / 0.4
            descent.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=work.half):
                outputs = model(taken)
            work.loss(outputs.float(), labels[at : at + work.batch]).backward()
            if work.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), work.clip)
            descent.step()
    update = difference(sent, parameters_of(model))
    if work.noise:
        update = {
            n: v + work.noise * torch.randn(v.shape, generator=drawn) for n, v in update.items()
        }
    declaration = ClientDeclaration(
        model=own_word("experiments.descriptions:perceptron") if name == "perceptron" else name,
        activation="relu",
        image_shape=(1, 8, 8),
        classes=10,
        mean=(0.3,),
        std=(0.4,),
        optimizer=work.optimizer,
        lr=work.lr,
        momentum=work.momentum,
        weight_decay=work.decay,
        local_steps=work.epochs * -(-work.count // work.batch),
        batch_size=work.batch,
        num_examples=work.count,
        norm_mode="train" if work.train else "eval",
        dropout=work.dropout or None,
        augmentation=("horizontal-flip", "random-crop") if work.augmented else (),
        defenses=({"name": "noise", "std": work.noise},) if work.noise else (),
    )
    seen = Observation(1, f"client-{seed}", sent, update, declaration, buffers=buffers)
    return seen, Truth(images, labels)


PLAIN = Work()
WEIGHTS = torch.tensor([8.0, 1, 2, 0.5, 1, 4, 0.5, 1, 0.2, 2])

Planted = Callable[[str, int], tuple[Observation, Truth]]


def made(work: Work, **declared: Any) -> Planted:
    """Return a maker of uploads of one work, declared as plain SGD but for ``declared``."""

    def make(name: str, seed: int) -> tuple[Observation, Truth]:
        seen, truth = upload(name, work, seed)
        fields = {"optimizer": "sgd", "lr": PLAIN.lr, "momentum": 0.0, "weight_decay": 0.0}
        fields |= {"norm_mode": "train", "defenses": (), **declared}
        return replace(seen, declaration=seen.declaration.updated(fields)), truth

    return make


def other_record(name: str, seed: int) -> tuple[Observation, Truth]:
    """Return an upload in the place of which another record of the same shapes was read."""
    seen, truth = upload(name, PLAIN, seed)
    other = parameters_of(network(name, seed + 500))
    return replace(seen, update={n: seen.parameters[n] - v for n, v in other.items()}), truth


def own_start(name: str, seed: int) -> tuple[Observation, Truth]:
    """Return an upload that began in the client's own last layer."""
    seen, truth = upload(name, PLAIN, seed)
    names = list(seen.update)[-2:]
    own = parameters_of(network(name, seed + 500))
    moved = {
        n: v + seen.parameters[n] - own[n] if n in names else v for n, v in seen.update.items()
    }
    return replace(seen, update=moved), truth


def scaled(name: str, seed: int) -> tuple[Observation, Truth]:
    """Return an upload of the opposite sign, as trained minus received weights have it."""
    seen, truth = upload(name, PLAIN, seed)
    return replace(seen, update={n: -v for n, v in seen.update.items()}), truth


def pruned(name: str, seed: int) -> tuple[Observation, Truth]:
    """Return an upload of which the largest tenth is sent, and no defense declared."""
    seen, truth = upload(name, PLAIN, seed)
    whole = torch.cat([v.flatten().abs() for v in seen.update.values()])
    least = whole.kthvalue(int(0.9 * len(whole))).values
    kept = {n: v * (v.abs() > least) for n, v in seen.update.items()}
    return replace(seen, update=kept), truth


PLANTED: dict[str, Planted] = {
    "lr by 2": made(Work(lr=0.1)),
    "momentum": made(Work(momentum=0.9, count=16)),
    "loss": made(
        Work(loss=lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, 10).float()))
    ),
    "class weights": made(Work(loss=lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS))),
    "adam": made(Work(optimizer="adam", lr=0.01)),
    "record": other_record,
    "start": own_start,
    "sign": scaled,
    "noise": made(Work(noise=0.002)),
    "pruning": pruned,
}
"""Kinds of error; mode of normalisation takes the place of the weights where there is one."""

WELL_FORMED: dict[str, Work] = {
    "plain": PLAIN,
    "long": Work(count=32, epochs=1),
    "noise": Work(noise=0.01),
    "clipping": Work(clip=1000.0),
    "dropout": Work(dropout=0.25),
    "augmentation": Work(augmented=True),
    "bfloat16": Work(half=True),
    "momentum": Work(momentum=0.9, optimizer="nesterov"),
    "adam": Work(optimizer="adam", lr=0.001),
    "decay": Work(decay=0.05),
}
SEEDS = 5


def checked(seen: Observation, truth: Truth | None) -> Row:
    """Check one upload and take the time."""
    begun = time.perf_counter()
    found = check_upload(seen, truth, AttackTask())
    return {
        "truth": truth is not None,
        "state": found.state,
        "failing": len(found.failing),
        "alternative": found.alternative,
        "reason": found.reason,
        "seconds": time.perf_counter() - begun,
    }


def measure(what: str, kind: str, name: str, seed: int) -> list[Row]:
    """Check one upload with truth and without."""
    if what == "planted":
        maker = PLANTED[kind]
        if kind == "class weights" and name in ("resnet20", "lenet-strided-bn"):
            kind, maker = "mode", made(Work(train=False))
        seen, truth = maker(name, seed)
    else:
        seen, truth = upload(name, WELL_FORMED[kind], seed)
    about = {"what": what, "kind": kind, "model": name, "seed": seed}
    return [about | checked(seen, kept) for kept in (truth, None)]


def summary(rows: list[Row]) -> list[Row]:
    """Count what was found, and what was found wrongly."""
    found: list[Row] = []
    for what in ("planted", "well-formed"):
        for truth in (True, False):
            mine = [r for r in rows if r["what"] == what and r["truth"] is truth]
            wrong = (
                [r for r in mine if r["state"] == "contradicted"]
                if truth
                else [r for r in mine if r["failing"]]
            )
            found.append(
                {
                    "what": what,
                    "kind": "all",
                    "truth": truth,
                    "uploads": len(mine),
                    "found": len(wrong),
                }
            )
    return found


def main() -> None:
    """Check every upload."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=SEEDS, help="well-formed uploads of a kind")
    options = parse(arguments)
    rows: list[Row] = []
    for name in MODELS:
        for number, kind in enumerate(PLANTED):
            rows += measure("planted", kind, name, 100 + number)
        for kind in WELL_FORMED:
            for seed in range(options.seeds):
                rows += measure("well-formed", kind, name, seed)
        for row in summary([r for r in rows if r["model"] == name]):
            note(f"{name}: {row}")
    emit([*rows, *summary(rows)], COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
