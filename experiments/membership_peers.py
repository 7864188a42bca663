"""The membership attackers of this project compared with LeakPro's and FedMIA's, on equal models.

    git clone https://github.com/aidotse/LeakPro && git clone https://github.com/Liar-Mask/FedMIA
    python -m experiments.membership_peers --leakpro LeakPro --fedmia FedMIA [--json]

Federations as in `experiments.membership`, of ten clients. Every attacker is given the same models,
candidates, reference models and public records, as the question ``membership`` measures them; each
tool's own code turns them into scores. LeakPro: ``AttackRMIA`` with its defaults (offline, gamma 2,
a 0.33, temperature 2), of the client's last model, as it attacks finished models, and averaged over
rounds. FedMIA: ``lira_attack_ldh_cosine`` of ``mia_attack_auto.py`` in its mode for clients that
are alike, averaged over rounds as there; its log prints the 505th candidate, so candidates are
repeated up to as many, which changes no score of any. ``auc`` and ``tpr_1`` are means over clients
with 95 % t intervals over them; ``behind`` is by how much the area of an attacker is below that of
``gradient-regression`` on the same client. Without a tool's folder its rows are left out.
"""

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bract.attacks.membership import RoundView, combine
from bract.audit.audit import Audit
from bract.audit.observations import Observations
from bract.audit.questions.membership.candidates import load_candidates
from bract.audit.questions.membership.rounds import Scorer
from bract.audit.questions.membership.score import Array, auc, threshold
from bract.config.config import AuditRequest
from experiments.harness.command import emit, note, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import columns
from experiments.membership import Setting, federation, register

COLUMNS = (
    *("model", "rounds", "tool", "attacker", "clients", "auc", "auc_low", "auc_high"),
    *("tpr_1", "behind", "behind_low", "behind_high", "accuracy", "cpu_seconds"),
)
COMPARED = "gradient-regression"
SETTINGS = (
    Setting("site of 50", held_out=200, epochs=1, clients=10, seed=40),
    Setting("site of 1000", images=1000, held_out=1000, rounds=5, epochs=1, clients=4, seed=41),
)
_PRINTED = 505
REVISIONS = {"LeakPro": "c47752fa", "FedMIA": "7ee1af2"}
"""Commits of the two repositories that the committed rows are of."""


class _Kept(Scorer):
    """Keeps what attackers are given."""

    views: dict[str, list[RoundView]]

    def _view(self, own: Any, others: Any, candidates: Any, shares: Tensor) -> RoundView:
        view = super()._view(own, others, candidates, shares)
        client = next(c for c, held in self._candidates.items() if held is candidates)
        self.views[client].append(view)
        return view


def main() -> None:
    """Score by every tool; then print the table or JSON."""
    register()
    arguments = parser(__doc__, "threads")
    arguments.add_argument("--leakpro", type=Path, help="folder of LeakPro's repository")
    arguments.add_argument("--fedmia", type=Path, help="folder of FedMIA's repository")
    arguments.add_argument("--settings", type=int, nargs="+", default=[0])
    options = parse(arguments)
    rows = []
    for setting in (SETTINGS[i] for i in options.settings):
        for row in compared(setting, options.leakpro, options.fedmia):
            rows.append(note_row(row, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json, more_versions=REVISIONS)


def compared(setting: Setting, leakpro: Path | None, fedmia: Path | None) -> Iterator[Row]:
    """Train one federation, and yield a row for each tool and attacker."""
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run, accuracy = federation(setting, Path(folder) / "run")
        request = AuditRequest(questions=["membership"], device="cpu", seed=setting.seed)
        captures = Audit(run, request).plan()[0].captures
        seen = Observations(run, request)
        candidates = {
            c.client: load_candidates(seen.truth_folder, c.client, c.declaration) for c in captures
        }
        scorer = _Kept(seen, candidates, begun=time.perf_counter())
        scorer.views = defaultdict(list)
        scored = scorer.score(captures)
    members = {client: one.members for client, one in scored.items()}
    found: dict[tuple[str, str], dict[str, Array]] = defaultdict(dict)
    for client, one in scored.items():
        for name, values in one.over_rounds.items():
            found["bract", name][client] = values
    own = {c: s.over_rounds for c, s in scored.items()}
    for client, values in combine(own, members).items():
        found["bract", "combined"][client] = values
    note(f"{setting.name}: {len(scored)} clients, accuracy {accuracy:.2f}")
    for client, views in scorer.views.items():
        if leakpro is not None:
            each = [leakpro_scores(view, leakpro, setting.seed) for view in views]
            found["LeakPro", "RMIA, last model"][client] = each[-1]
            found["LeakPro", "RMIA, mean over rounds"][client] = np.mean(each, axis=0)
        if fedmia is not None:
            for name, mode in (("FedMIA-I, loss", "loss"), ("FedMIA-II, gradient", "cos")):
                each = [fedmia_scores(view, members[client], fedmia, mode) for view in views]
                found["FedMIA", name][client] = np.mean(each, axis=0)
    best = {c: _auc(v, members[c]) for c, v in found["bract", COMPARED].items()}
    for (tool, name), by_client in found.items():
        areas = {c: _auc(values, members[c]) for c, values in by_client.items()}
        yield {
            "name": setting.name,
            "model": setting.model,
            "images": setting.images,
            "held_out": setting.held_out,
            "rounds": setting.rounds,
            "epochs": setting.epochs,
            "tool": tool,
            "attacker": name,
            "clients": len(areas),
            "references": len(scorer.public.states),
            **columns("auc", list(areas.values())),
            "tpr_1": float(np.mean([_tpr(v, members[c]) for c, v in by_client.items()])),
            **columns("behind", [best[c] - areas[c] for c in areas]),
            "accuracy": accuracy,
            "cpu_seconds": time.process_time() - begun,
        }


def leakpro_scores(view: RoundView, folder: Path, seed: int) -> Array:
    """Return the scores of LeakPro's own RMIA, ``(N,)``."""
    count, public = len(view.labels), len(view.population_labels)
    everything = np.arange(count + public)
    audited = {"in_members": everything[:count], "out_members": everything[:0]}
    base = _module(folder, "leakpro.attacks.mia_attacks.rmia").AttackRMIA
    attack_type: Any = type("RMIA", (base,), {"audit_dataset": audited})
    labels = torch.cat([view.labels, view.population_labels]).numpy()

    def logits(own: Tensor, of_public: Tensor) -> Any:
        return torch.cat([own, of_public]).double().numpy()

    attack = object.__new__(attack_type)
    for name, value in attack_type.AttackConfig().model_dump().items():
        setattr(attack, name, value)
    attack.epsilon, attack.load_for_optuna = 1e-6, True  # of its constructor; as with kept logits
    attack.handler = SimpleNamespace(
        train_indices=everything,
        test_indices=everything[:0],
        get_labels=lambda chosen: labels[chosen],
        target_model=None,
    )
    attack.attack_data_indices = everything[count:]
    attack.ground_truth_indices = labels[:count]
    attack.logits_theta = logits(view.local, view.population)
    attack.logits_shadow_models = [
        logits(own, of_public)
        for own, of_public in zip(view.references, view.population_references, strict=True)
    ]
    attack.shadow_models = [None] * len(view.references)
    attack.out_indices = np.ones((len(view.references), count), dtype=bool)
    np.random.seed(seed)
    attack.prepare_attack()
    attack._run_attack()
    return np.asarray(attack.in_member_signals, dtype=np.float64)[:, 0]


def fedmia_scores(view: RoundView, members: Any, folder: Path, mode: str) -> Array:
    """Return the scores of FedMIA's own code, ``(N,)``."""
    code = _module(folder, "mia_attack_auto")
    chosen = torch.from_numpy(members)

    def repeated(part: Tensor) -> Tensor:
        return part.repeat(-(-_PRINTED // len(part)), *(1,) * (part.dim() - 1))

    def kept(outputs: Tensor, cosines: Tensor) -> dict[str, Any]:
        made: dict[str, Any] = {"test_acc": 0.0}
        for name, what, part in (("train", "tarin", chosen), ("test", "test", ~chosen)):
            made[f"{name}_res"] = {
                "logit": repeated(outputs[part]),
                "labels": repeated(view.labels[part]),
            }
            made[f"{what}_cos"] = repeated(cosines[part].double())
        return made

    with tempfile.TemporaryDirectory() as place:
        every = [(view.local, view.alignment)]
        every += list(zip(view.others, view.others_alignment, strict=True))
        for i, (outputs, cosines) in enumerate(every):
            torch.save(kept(outputs, cosines), f"{place}/client_{i}_losses_epoch1.pkl")
        code.MODE, code.SAVE_DIR, code.SEED = "test", place, 0  # type: ignore[attr-defined]
        code.select_mode, code.select_method = 0, "none"  # type: ignore[attr-defined]
        code.SHADOW_NUM = len(view.others)  # type: ignore[attr-defined]
        files = place + "/client_{}_losses_epoch{}.pkl"
        *_, (yes, no) = code.lira_attack_ldh_cosine(files, 1, len(every), place, attack_mode=mode)
    values = np.empty(len(members))
    values[members], values[~members] = yes[: members.sum()], no[: (~members).sum()]
    return values


def _module(folder: Path, name: str) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return import_module(name)


def _auc(values: Array, members: Any) -> float:
    return auc(values[members], values[~members])


def _tpr(values: Array, members: Any) -> float:
    at = threshold(values[~members], 0.01)
    assert at is not None
    return float((values[members] > at[0]).mean())


if __name__ == "__main__":
    main()
