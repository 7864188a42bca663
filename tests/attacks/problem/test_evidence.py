import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from defended_clients import capture

from bract.attacks import ADAPTIVE, GRNN, IG, Budget, Case, Evidence, Problem
from bract.attacks.methods.portfolio.auto import Auto
from bract.attacks.problem.case import open_case
from bract.attacks.problem.objectives import SquaredError
from bract.attacks.problem.visibility import visible_share
from bract.attacks.task import AttackTask, open_cases
from bract.client.defenses import build_defenses
from bract.config.audit import Tier
from bract.errors import BractError
from bract_papers.dlg import DLG, IDLG
from experiments.harness.bayes_reading import discount_noise, match_survivors


@pytest.fixture
def reading(observe: Any, tiny: Any) -> Any:
    """What a problem reads for a simulated vector, given evidence of one tensor by hand."""
    case = open_case(observe(tiny[0][:1], tiny[1][:1]), tier="oblivious", max_images=1, unroll=1)

    def read(simulated: Any, target: Any, **kinds: Any) -> Any:
        given: dict[str, Any] = {
            k: v if v is True else {"w": torch.tensor(v)} for k, v in kinds.items()
        }
        evidence = Evidence(target={"w": torch.tensor(target)}, **given)
        problem = Problem.stack(
            [(replace(case, evidence=evidence), 0)], seed=0, device=torch.device("cpu")
        )
        return problem.reading({"w": torch.tensor([simulated])})["w"][0].tolist()

    return read


def test_evidence_that_leaves_nothing_open_reads_as_its_target(reading: Any) -> None:
    assert reading([9.0, 9.0], [1.0, 2.0]) == [1.0, 2.0]


def test_each_coordinate_reads_as_the_nearest_alternative(reading: Any) -> None:
    others = [[5.0, -2.0], [3.0, 2.0]]
    assert reading([4.4, -1.0], [1.0, 2.0], alternatives=others) == [5.0, -2.0]
    assert reading([2.1, 0.5], [1.0, 2.0], alternatives=others) == [3.0, 2.0]
    assert reading([0.0, 9.0], [1.0, 2.0], alternatives=others) == [1.0, 2.0]


def test_differences_along_unknown_directions_do_not_count(reading: Any) -> None:
    # (4, 1) - (1, 2) = (3, -1); its part along (0.6, 0.8) is 1.
    assert reading([4.0, 1.0], [1.0, 2.0], nuisance=[[0.6, 0.8]]) == pytest.approx([1.6, 2.8])
    both = [[0.6, 0.8], [0.8, -0.6]]
    assert reading([4.0, 1.0], [1.0, 2.0], nuisance=both) == pytest.approx([4.0, 1.0])


def test_an_unknown_factor_is_the_best_one_but_at_least_one(reading: Any) -> None:
    # (3, 6.5) . (1, 2) / 5 = 3.2
    assert reading([3.0, 6.5], [1.0, 2.0], unknown_factor=True) == pytest.approx([3.2, 6.4])
    assert reading([0.5, 1.0], [1.0, 2.0], unknown_factor=True) == [1.0, 2.0]
    weights = [0.0, 1.0]
    found = reading([3.0, 8.0], [1.0, 2.0], unknown_factor=True, weights=weights)
    assert found == pytest.approx([4.0, 8.0])


def defended(clean: Any, **entry: Any) -> Any:
    chain = build_defenses([entry])
    return replace(
        clean,
        update=chain.protect(clean.update, {}),
        declaration=replace(clean.declaration, defenses=tuple(chain.public())),
    )


def test_weights_keep_two_images_as_far_apart_as_undefended(observe: Any, tiny: Any) -> None:
    clean = observe(tiny[0][:1], tiny[1][:1])
    plain = open_case(clean, tier="oblivious", max_images=1, unroll=1)
    for share in (1.0, 0.25):
        weights = {n: torch.full_like(v, share) for n, v in clean.update.items()}
        evidence = Evidence(target=clean.update, weights=weights)
        found = visible_share(plain.target_model, clean, plain.forward, evidence, 1)
        assert found == pytest.approx(share)
    seen = defended(clean, name="pruning", ratio=0.9)
    case = open_case(seen, tier="adaptive", max_images=1, unroll=1, view=match_survivors)
    assert case.evidence.weights is not None
    kept = torch.cat([w.flatten() for w in case.evidence.weights.values()])
    assert float(kept.max()) == pytest.approx(1 / case.evidence.notes["visible"])
    assert case.evidence.notes["visible"] < 1


def labels_found_by(attack: Any, case: Any, task: Any) -> set[str]:
    (found,) = attack.run([case], task)
    return {part for part in found.pick.components if part.startswith("labels")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry",
    [
        {"name": "adadefense"},
        {"name": "guardian"},
        {"name": "fedkl"},
        {"name": "precode"},
        {"name": "soteria"},
        {"name": "noise", "std": 1e-1},
        {"name": "pruning", "ratio": 0.99},
    ],
    ids=lambda entry: entry["name"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_labels_are_found_alike_whatever_the_tier(
    observe: Any, tiny: Any, entry: Any, count: Any
) -> None:
    model = "lenet-strided-bn" if entry["name"] == "fedkl" else "lenet-strided"
    seen = capture(tiny[0][:count], tiny[1][:count], entry, model=model).seen
    plain = observe(tiny[0][:count], tiny[1][:count], model=model)
    task = AttackTask(budget=Budget(iterations=1))
    views: list[tuple[Any, Tier]]
    views = [(plain, "oblivious"), (seen, "oblivious"), (seen, "adaptive")]
    for observation, tier in views:
        (case,), left = open_cases([observation], replace(task, tier=tier), attack="labels")
        assert isinstance(case, Case)
        for attack, wanted in (
            (GRNN(width=4), "labels analytic" if count == 1 else "labels joint"),
            (GRNN(width=4, labels="branch"), "labels joint"),
            (IG(), "labels analytic"),
            (IG(labels="joint"), "labels joint"),
            (DLG(), "labels joint"),
            (IDLG(), "labels analytic"),
        ):
            assert labels_found_by(attack, case, left) == {wanted}, (attack.name, tier)


def test_a_label_that_the_evidence_knows_is_taken(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    seen = defended(observe(images, labels), name="adadefense")
    found = GRNN()(seen, tier="adaptive", budget=Budget(iterations=1))
    assert found.label_probabilities.max() == 1.0
    assert torch.equal(found.labels, labels)


def test_a_coordinate_within_bounds_is_read_as_what_is_simulated(reading: Any) -> None:
    bounds = [0.5, 0.25, 0.0]
    assert reading([0.375, -3.0, 2.5], [0.0, -1.0, 2.0], bounds=bounds) == [0.375, -1.25, 2.0]


def test_a_clipped_batch_is_matched_up_to_its_factor(observe: Any, tiny: Any) -> None:
    clean = observe(tiny[0][:2], tiny[1][:2])
    seen = defended(clean, name="noise", clip=0.01, std=1e-8)
    case = open_case(seen, tier="adaptive", max_images=2, unroll=1, view=discount_noise)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    assert case.evidence.unknown_factor
    truth = {n: v[None] for n, v in clean.update.items()}
    size = float(sum(v.square().sum() for v in truth.values()))
    assert float(problem.distance(SquaredError(), truth)) < 1e-5 * size


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rounds for which an adaptive attacker of a made-up defense was asked."""
    log = []

    def undo(observation: Any, known: Any) -> Any:
        log.append((observation.round, [seen.round for seen in known.history]))
        if observation.client == "strange":
            raise BractError("moments that no gradient makes", code="usage")
        return Evidence(target=dict(observation.update), notes={"round": observation.round})

    monkeypatch.setitem(ADAPTIVE._entries, "made-up", undo)
    return log


def declaring(observe: Any, tiny: Any, **changes: Any) -> Any:
    seen = observe(tiny[0][:1], tiny[1][:1])
    declaration = replace(seen.declaration, defenses=({"name": "made-up"},))
    return replace(seen, declaration=declaration, **changes)


def test_a_choice_among_attacks_works_out_each_observations_evidence_once(
    observe: Any, tiny: Any, asked: Any
) -> None:
    seen = [declaring(observe, tiny, round=number) for number in (2, 3)]
    first = declaring(observe, tiny)
    task = AttackTask(
        budget=Budget(iterations=2, restarts=2),
        tier="adaptive",
        history=lambda observation: Later([first]),
    )
    results: list[Any] = Auto(pool=("ig", "idlg")).attack(seen, task)
    assert [r.settings["evidence"]["round"] for r in results] == [2, 3]
    assert sorted(asked) == [(2, [1]), (3, [1])]


class Later(Sequence[Any]):
    """A sequence that is another object whenever it is asked for, as one read from disk."""

    def __init__(self, seen: Any) -> None:
        self._seen = seen

    def __len__(self) -> Any:
        return len(self._seen)

    def __getitem__(self, index: Any) -> Any:
        return self._seen[index]


def test_a_case_shares_its_evidence_however_the_client_is_simulated(
    observe: Any, tiny: Any, asked: Any
) -> None:
    seen = declaring(observe, tiny, round=2)
    ((case,), _) = open_cases([seen], AttackTask(tier="adaptive"), attack="ig")
    assert isinstance(case, Case)
    assert case.simulating(unroll=case.unroll) is case
    assert case.simulating(unroll=3).evidence.target is case.evidence.target
    assert case.simulating(unroll=64, max_images=1).unroll == 64
    assert len(asked) == 1


def test_nothing_outlives_the_case(observe: Any, tiny: Any, asked: Any) -> None:
    seen = declaring(observe, tiny)
    gone = weakref.ref(seen)
    opened = open_cases([seen], AttackTask(tier="adaptive"), attack="ig")
    del seen
    gc.collect()
    assert gone() is not None
    del opened
    gc.collect()
    assert gone() is None
