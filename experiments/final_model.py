"""Who is recognised in the final global model, beside LeakPro's and Privacy Meter's own code.

    git clone https://github.com/aidotse/LeakPro
    git clone https://github.com/privacytrustlab/ml_privacy_meter
    OMP_NUM_THREADS=1 python -m experiments.final_model [--part PART] [--resume FILE] [--json]
        [--leakpro LeakPro --privacy-meter ml_privacy_meter]

Federations of three clients on scikit-learn's digits, breast-cancer and wine, as
`experiments.membership` trains them, with as many held-out records as members; bract's question
`membership` of the final model alone. ``sites``: bract's attackers and the peers' are given the
same model, candidates, shadow models and public records, and each tool's own code turns them into
scores. LeakPro: ``AttackLiRA`` and ``AttackRMIA``, both online, else with their defaults. Privacy
Meter: ``run_rmia`` with the ``offline_a`` of its ``tune_offline_a``, and the loss. ``auc`` and
``tpr_1`` are means over clients with 95 % t intervals over them; ``behind`` is by how much the area
of an attacker is below that of ``stacked`` on the same client, ``behind_tpr_1`` the same of true
positives. Without a tool's folder its rows are left out. ``null``: federations whose "members" were
not trained on; ``alarms`` counts those in which any observer is reported to recognise a client.
``influence``: a client's influence on the final model, in federations whose "members" were not
trained on, and in half as many whose members were; ``alarms`` counts those whose first client has
a chance below 0.05, ``clients_below`` all clients.
"""

import logging
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bract.attacks.membership import LocalModel, ModelView, logits_of
from bract.audit.audit import Audit
from bract.audit.captures import Capture
from bract.audit.observations import Observations
from bract.audit.questions.membership.candidates import Candidates, load_candidates
from bract.audit.questions.membership.influence import influences
from bract.audit.questions.membership.models import ModelScorer
from bract.audit.questions.membership.public import PublicModels
from bract.audit.questions.membership.score import Array, Flags, auc, threshold
from bract.config.config import AuditRequest
from bract.schema.membership import MembershipAnswer
from bract.updates.update import Tensors
from experiments.harness.command import Finished, emit, note, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import columns
from experiments.membership import Setting, federation

COLUMNS = (
    *("name", "tool", "attacker", "clients", "auc", "auc_low", "auc_high", "tpr_1", "tpr_1_low"),
    *("tpr_1_high", "behind", "behind_low", "behind_high", "behind_tpr_1", "behind_tpr_1_low"),
    *("behind_tpr_1_high", "accuracy", "runs", "alarms", "judged", "clients_below", "cpu_seconds"),
)
COMPARED = "stacked"
REVISIONS = {"LeakPro": "c47752fa", "Privacy Meter": "e384af8"}
"""Commits of the two repositories that the committed rows are of."""

_SITES = (
    Setting("digits", "lenet-strided", 100, 100, 20, 5, size=8, data="digits"),
    Setting("breast-cancer", "mlp-100", 60, 60, 20, 5, data="breast-cancer", input="table", lr=0.1),
    Setting("wine", "mlp-100", 20, 20, 20, 5, data="wine", input="table", lr=0.1),
)
_NULL = Setting(
    "null", "lenet-strided", 30, 40, 1, 1, size=8, data="digits", trained=False, final=True
)
_INFLUENCE = (
    Setting(
        *("influence, null", "lenet-strided", 30, 40, 10, 5),
        size=8,
        data="digits",
        trained=False,
    ),
    Setting(*("influence, trained on", "lenet-strided", 30, 40, 10, 5), size=8, data="digits"),
)
_SEEDS = 4


def main() -> None:
    """Run a part; then print the table or JSON."""
    arguments = parser(__doc__, "threads", "resume")
    arguments.add_argument("--part", choices=("sites", "null", "influence"), default="sites")
    arguments.add_argument("--leakpro", type=Path, help="folder of LeakPro's repository")
    arguments.add_argument("--privacy-meter", type=Path, help="folder of Privacy Meter's")
    arguments.add_argument("--runs", type=int, default=200, help="of the nulls")
    arguments.add_argument("--settings", type=int, nargs="+", help="of the sites, from 0")
    options = parse(arguments)
    kept = Finished(options.resume, "bract.audit.questions", "experiments.final_model")
    rows: list[Row] = []
    if options.part == "null":
        each = [kept.row(["null", s], partial(null, s)) for s in range(options.runs)]
        rows.append(note_row(null_row(each), COLUMNS))
    elif options.part == "influence":
        for setting in _INFLUENCE:
            each = [
                kept.row([setting.name, s], partial(influence, with_seed(setting, s)))
                for s in range(options.runs // 2 if setting.trained else options.runs)
            ]
            rows.append(note_row(influence_row(setting, each), COLUMNS))
    else:
        chosen = range(len(_SITES)) if options.settings is None else options.settings
        for setting in (_SITES[i] for i in chosen):
            for row in compared(setting, options.leakpro, options.privacy_meter):
                rows.append(note_row(row, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json, more_versions=REVISIONS)


def null(seed: int) -> Row:
    """Audit one federation whose members were not trained on, as `bract audit` does."""
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run, accuracy = federation(with_seed(_NULL, seed), Path(folder) / "run")
        audit = Audit(run, AuditRequest(questions=["membership"], device="cpu", seed=seed))
        (answer,) = audit.execute(audit.plan())
    assert isinstance(answer, MembershipAnswer)
    return {
        "accuracy": accuracy,
        "judged": sum(c.chance is not None for c in answer.every),
        "found": [f"{c.client} {c.observer}" for c in answer.every if c.found],
        "observers": sorted({c.observer for c in answer.every}),
        "cpu_seconds": time.process_time() - begun,
    }


def null_row(each: list[Row]) -> Row:
    """Count the federations in which someone is reported to recognise a client."""
    return {
        "name": "null",
        "runs": len(each),
        "alarms": sum(bool(row["found"]) for row in each),
        "by_observer": {
            name: sum(any(f.endswith(name) for f in row["found"]) for row in each)
            for name in ("server", "client", "public")
        },
        "judged": sum(row["judged"] for row in each),
        "cpu_seconds": sum(row["cpu_seconds"] for row in each),
    }


def influence(setting: Setting) -> Row:
    """Return the chance of each client's influence in one federation."""
    begun = time.process_time()
    left: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        run, accuracy = federation(setting, Path(folder) / "run")
        captures, seen, candidates = opened(run, setting.seed)
        found = influences(seen, captures, dict(sorted(candidates.items())), left)
    return {
        "accuracy": accuracy,
        "chances": [one.chance for one in found],
        "areas": [one.auc for one in found],
        "left_out": left,
        "cpu_seconds": time.process_time() - begun,
    }


def influence_row(setting: Setting, each: list[Row]) -> Row:
    """Count the federations whose first client has a chance below 0.05, and all such clients."""
    chances = [row["chances"] for row in each]
    return {
        "name": setting.name,
        "images": setting.images,
        "held_out": setting.held_out,
        "rounds": setting.rounds,
        "epochs": setting.epochs,
        "runs": len(each),
        "alarms": sum(bool(own) and own[0] < 0.05 for own in chances),
        "clients": sum(map(len, chances)),
        "clients_below": sum(chance < 0.05 for own in chances for chance in own),
        "first_chances": [round(own[0], 4) for own in chances if own],
        "auc": float(np.mean([area for row in each for area in row["areas"]])),
        "left_out": sum(bool(row["left_out"]) for row in each),
        "accuracy": float(np.mean([row["accuracy"] for row in each])),
        "cpu_seconds": sum(row["cpu_seconds"] for row in each),
    }


class _Kept(ModelScorer):
    """Keeps what attackers are given, and what shadow models make of the public records."""

    view: ModelView
    of_public: list[Tensor]

    def _outputs(self, own: LocalModel, state: Tensors, inputs: Tensor) -> Tensor:
        self.of_public.append(logits_of(own.model, state, self._public.inputs))
        return super()._outputs(own, state, inputs)

    def _of_final(self, view: ModelView) -> dict[str, Array]:
        self.view = view
        return super()._of_final(view)


def compared(setting: Setting, leakpro: Path | None, meter: Path | None) -> Iterator[Row]:
    """Train a few federations, and yield a row for each tool and attacker."""
    begun = time.process_time()
    scores: dict[tuple[str, str], list[tuple[Array, Flags]]] = defaultdict(list)
    reached = []
    for seed in range(_SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            run, accuracy = federation(with_seed(setting, seed), Path(folder) / "run")
            reached.append(accuracy)
            found, owners, members = scored(run, seed, leakpro, meter)
        for key, values in found.items():
            for client in dict.fromkeys(owners.tolist()):
                mine = owners == client
                scores[key].append((values[mine], members[mine]))
        note(f"{setting.name}, seed {seed}: accuracy {accuracy:.2f}")
    areas = {key: [_auc(*pair) for pair in each] for key, each in scores.items()}
    rates = {key: [_tpr(*pair) for pair in each] for key, each in scores.items()}
    best = ("bract", COMPARED)
    for key in scores:
        yield {
            "name": setting.name,
            "model": setting.model,
            "images": setting.images,
            "held_out": setting.held_out,
            "rounds": setting.rounds,
            "epochs": setting.epochs,
            "tool": key[0],
            "attacker": key[1],
            "clients": len(areas[key]),
            **columns("auc", areas[key]),
            **columns("tpr_1", rates[key]),
            **columns("behind", _less(areas[best], areas[key])),
            **columns("behind_tpr_1", _less(rates[best], rates[key])),
            "accuracy": float(np.mean(reached)),
            "cpu_seconds": time.process_time() - begun,
        }


def scored(
    run: Any, seed: int, leakpro: Path | None, meter: Path | None
) -> tuple[dict[tuple[str, str], Array], Any, Flags]:
    """Return every tool's scores of one final model, whose each candidate is, and the members."""
    captures, seen, candidates = opened(run, seed)
    scorer = _Kept(seen, dict(sorted(candidates.items())), PublicModels(seen, []), lambda: False)
    scorer.of_public = []
    by_client = scorer.score(captures)["public"]
    owners = np.array([c for c, one in by_client.items() for _ in one.members])
    members = np.concatenate([one.members for one in by_client.values()])
    first = next(iter(by_client.values()))
    found = {
        ("bract", name): np.concatenate([one.over_rounds[name] for one in by_client.values()])
        for name in first.over_rounds
    }
    view, of_public = scorer.view, torch.stack(scorer.of_public)
    if leakpro is not None:
        found["LeakPro", "LiRA, online"] = leakpro_lira(view, leakpro)
        found["LeakPro", "RMIA, online"] = leakpro_rmia(view, of_public, leakpro, seed)
    if meter is not None:
        found["Privacy Meter", "RMIA"] = meter_rmia(view, of_public, meter)
        found["Privacy Meter", "loss"] = meter_loss(view, meter)
    return found, owners, members


def opened(run: Any, seed: int) -> tuple[list[Capture], Observations, dict[str, Candidates]]:
    """Return the captures that an audit of membership takes, and candidates by client."""
    request = AuditRequest(questions=["membership"], device="cpu", seed=seed)
    captures = list(Audit(run, request).plan()[0].captures)
    seen = Observations(run, request)
    candidates = {
        c.client: load_candidates(seen.truth_folder, c.client, c.declaration)
        for c in reversed(captures)
    }
    return captures, seen, candidates


def leakpro_lira(view: ModelView, folder: Path) -> Array:
    """Return the scores of LeakPro's own online LiRA, ``(N,)``."""
    base: Any = _module(folder, "leakpro.attacks.mia_attacks.lira").AttackLiRA
    attack = _bare(base, len(view.labels))
    labels = view.labels.numpy()
    attack.online, attack.fix_var_threshold = True, 32
    attack.num_shadow_models = len(view.shadows)
    attack.shadow_models_logits = np.array(
        [attack.rescale_logits(one.double().numpy(), labels) for one in view.shadows]
    )
    attack.target_logits = attack.rescale_logits(view.local.double().numpy(), labels)
    attack.out_indices = ~view.inside.numpy()
    _quietly(attack.run_attack)
    return np.asarray(attack.in_member_signals, dtype=np.float64)[:, 0]


def leakpro_rmia(view: ModelView, of_public: Tensor, folder: Path, seed: int) -> Array:
    """Return the scores of LeakPro's own online RMIA, ``(N,)``."""
    base: Any = _module(folder, "leakpro.attacks.mia_attacks.rmia").AttackRMIA
    count, public = len(view.labels), len(view.population_labels)
    attack = _bare(base, count)
    everything = np.arange(count + public)
    labels = torch.cat([view.labels, view.population_labels]).numpy()
    attack.online, attack.epsilon, attack.load_for_optuna = True, 1e-6, True
    attack.handler = SimpleNamespace(
        train_indices=everything,
        test_indices=everything[:0],
        get_labels=lambda chosen: labels[chosen],
        target_model=None,
    )
    attack.attack_data_indices = everything[count:]
    attack.ground_truth_indices = labels[:count]
    attack.logits_theta = torch.cat([view.local, view.population]).double().numpy()
    attack.logits_shadow_models = [
        torch.cat(pair).double().numpy() for pair in zip(view.shadows, of_public, strict=True)
    ]
    attack.shadow_models = [None] * len(view.shadows)
    np.random.seed(seed)
    attack.prepare_attack()
    attack._run_attack()
    return np.asarray(attack.in_member_signals, dtype=np.float64)[:, 0]


def meter_rmia(view: ModelView, of_public: Tensor, folder: Path) -> Array:
    """Return the scores of Privacy Meter's own RMIA, ``(N,)``: the target's pair is a shadow."""
    code = _meter(folder)
    models = torch.cat([view.local[None], view.shadows])
    population = torch.cat([view.population[None], of_public])
    unknown = torch.zeros(1, len(view.labels), dtype=torch.bool)
    memberships = torch.cat([unknown, view.inside]).T.numpy()
    signals = _probabilities(models, view.labels)
    of_population = _probabilities(population, view.population_labels)
    logger = logging.getLogger("privacy-meter")
    tuned, *_ = code.tune_offline_a(0, signals, of_population, memberships, logger)
    others = memberships[:, 2:]
    models_without = int((~others).sum(1).min())
    found = code.run_rmia(0, signals, of_population, memberships, models_without, tuned)
    return np.asarray(found, dtype=np.float64)


def meter_loss(view: ModelView, folder: Path) -> Array:
    """Return the scores of Privacy Meter's own loss attack, ``(N,)``, higher for members."""
    found = _meter(folder).run_loss(-_probabilities(view.local[None], view.labels))
    return np.asarray(found, dtype=np.float64)[:, 0]


def with_seed(setting: Setting, seed: int) -> Setting:
    """Return a setting with another seed, whose final model is kept."""
    return Setting(**{**vars(setting), "seed": seed, "final": True})


def _bare(base: Any, count: int) -> Any:
    """Return one of LeakPro's attacks with its defaults, of candidates that are all one kind."""
    audited = {"in_members": np.arange(count), "out_members": np.arange(0)}
    kind: Any = type(base.__name__, (base,), {"audit_dataset": audited})
    attack = object.__new__(kind)
    attack.configs = kind.AttackConfig()
    for name, value in kind.AttackConfig().model_dump().items():
        setattr(attack, name, value)
    return attack


def _quietly(run: Any) -> None:
    """Run an attack whose own summary fails on candidates of one kind, after its scores."""
    try:
        run()
    except (ValueError, ZeroDivisionError, IndexError) as error:
        note(f"LeakPro's summary: {error}")


def _probabilities(outputs: Tensor, labels: Tensor) -> Any:
    """Return the probability of each label by each model, ``(N, models)``."""
    each = outputs.double().softmax(-1)
    return each.gather(-1, labels.expand(each.shape[:-1])[..., None])[..., 0].T.numpy()


def _module(folder: Path, name: str) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return import_module(name)


def _meter(folder: Path) -> Any:
    """Load ``attacks.py`` by its file: bract has a package of that name."""
    spec = spec_from_file_location("privacy_meter_attacks", folder / "attacks.py")
    assert spec is not None and spec.loader is not None
    code = module_from_spec(spec)
    spec.loader.exec_module(code)
    return code


def _less(first: list[float], second: list[float]) -> list[float]:
    return [a - b for a, b in zip(first, second, strict=True)]


def _auc(values: Array, members: Flags) -> float:
    return auc(values[members], values[~members])


def _tpr(values: Array, members: Flags) -> float:
    """Return true positives at 1 % false ones; with fewer than 100 others, at none at all."""
    at = threshold(values[~members], 0.01)
    limit = float(values[~members].max()) if at is None else at[0]
    return float((values[members] > limit).mean())


if __name__ == "__main__":
    main()
