import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from bract.attacks import DLG, GRNN, IG, Auto, Budget, Engine
from bract.attacks.evidence import ADAPTIVE, Evidence, evidence_for, remembered_evidence
from bract.attacks.objectives import SquaredError
from bract.attacks.problem import Problem, open_case
from bract.attacks.visibility import visible_share
from bract.client.defenses import build_defenses
from bract.errors import BractError


@pytest.fixture
def reading(observe, tiny):
    """What a problem reads for a simulated vector, given evidence of one tensor by hand."""
    case = open_case(observe(tiny[0][:1], tiny[1][:1]), tier="oblivious", max_images=1, unroll=1)

    def read(simulated, target, **kinds):
        given = {k: v if v is True else {"w": torch.tensor(v)} for k, v in kinds.items()}
        evidence = Evidence(target={"w": torch.tensor(target)}, **given)
        problem = Problem.stack(
            [(replace(case, evidence=evidence), 0)], seed=0, device=torch.device("cpu")
        )
        return problem.reading({"w": torch.tensor([simulated])})["w"][0].tolist()

    return read


def test_evidence_that_leaves_nothing_open_reads_as_its_target(reading):
    assert reading([9.0, 9.0], [1.0, 2.0]) == [1.0, 2.0]


def test_each_coordinate_reads_as_the_nearest_alternative(reading):
    others = [[5.0, -2.0], [3.0, 2.0]]
    assert reading([4.4, -1.0], [1.0, 2.0], alternatives=others) == [5.0, -2.0]
    assert reading([2.1, 0.5], [1.0, 2.0], alternatives=others) == [3.0, 2.0]
    assert reading([0.0, 9.0], [1.0, 2.0], alternatives=others) == [1.0, 2.0]


def test_differences_along_unknown_directions_do_not_count(reading):
    # (4, 1) - (1, 2) = (3, -1); its part along (0.6, 0.8) is 1.
    assert reading([4.0, 1.0], [1.0, 2.0], nuisance=[[0.6, 0.8]]) == pytest.approx([1.6, 2.8])
    both = [[0.6, 0.8], [0.8, -0.6]]
    assert reading([4.0, 1.0], [1.0, 2.0], nuisance=both) == pytest.approx([4.0, 1.0])


def test_an_unknown_factor_is_the_best_one_but_at_least_one(reading):
    # (3, 6.5) . (1, 2) / 5 = 3.2
    assert reading([3.0, 6.5], [1.0, 2.0], unknown_factor=True) == pytest.approx([3.2, 6.4])
    assert reading([0.5, 1.0], [1.0, 2.0], unknown_factor=True) == [1.0, 2.0]
    weights = [0.0, 1.0]
    found = reading([3.0, 8.0], [1.0, 2.0], unknown_factor=True, weights=weights)
    assert found == pytest.approx([4.0, 8.0])


def defended(clean, **entry):
    chain = build_defenses([entry])
    return replace(
        clean,
        update=chain.protect(clean.update, {}),
        protocol=replace(clean.protocol, defenses=tuple(chain.public())),
    )


def test_weights_keep_two_images_as_far_apart_as_undefended(observe, tiny):
    clean = observe(tiny[0][:1], tiny[1][:1])
    plain = open_case(clean, tier="oblivious", max_images=1, unroll=1)
    for share in (1.0, 0.25):
        weights = {n: torch.full_like(v, share) for n, v in clean.update.items()}
        evidence = Evidence(target=clean.update, weights=weights)
        found = visible_share(plain.victim, clean, plain.forward, evidence, 1)
        assert found == pytest.approx(share)
    seen = defended(clean, name="pruning", ratio=0.9)
    case = open_case(seen, tier="adaptive", max_images=1, unroll=1)
    assert case.evidence.weights is not None
    kept = torch.cat([w.flatten() for w in case.evidence.weights.values()])
    assert float(kept.max()) == pytest.approx(1 / case.evidence.notes["visible"])
    assert case.evidence.notes["visible"] < 1


@pytest.mark.parametrize("attack", [GRNN(), IG(labels="joint"), DLG()])
def test_labels_that_the_evidence_knows_are_not_searched_for(observe, tiny, attack):
    images, labels = tiny[0][:1], tiny[1][:1]
    seen = defended(observe(images, labels), name="adadefense")
    found = attack(seen, tier="adaptive", budget=Budget(iterations=1))
    assert found.label_probabilities.max() == 1.0
    assert torch.equal(found.labels, labels)


def test_a_clipped_batch_is_matched_up_to_its_factor(observe, tiny):
    clean = observe(tiny[0][:2], tiny[1][:2])
    seen = defended(clean, name="noise", clip=0.01, std=1e-8)
    case = open_case(seen, tier="adaptive", max_images=2, unroll=1)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    assert case.evidence.unknown_factor
    truth = {n: v[None] for n, v in clean.update.items()}
    size = float(sum(v.square().sum() for v in truth.values()))
    assert float(problem.distance(SquaredError(), truth)) < 1e-5 * size


@pytest.fixture
def asked(monkeypatch):
    """Rounds for which an adaptive attacker of a made-up defense was asked."""
    log = []

    def undo(observation, history):
        log.append((observation.round, [seen.round for seen in history]))
        if observation.client == "strange":
            raise BractError("moments that no gradient makes")
        return Evidence(target=dict(observation.update), notes={"round": observation.round})

    monkeypatch.setitem(ADAPTIVE._entries, "made-up", undo)
    return log


def declaring(observe, tiny, **changes):
    seen = observe(tiny[0][:1], tiny[1][:1])
    protocol = replace(seen.protocol, defenses=({"name": "made-up"},))
    return replace(seen, protocol=protocol, **changes)


def test_a_choice_among_attacks_works_out_each_observations_evidence_once(observe, tiny, asked):
    seen = [declaring(observe, tiny, round=number) for number in (2, 3)]
    first = declaring(observe, tiny)
    results = Auto(pool=("ig", "idlg")).run(
        seen,
        budget=Budget(iterations=2, restarts=2),
        seed=0,
        tier="adaptive",
        engine=Engine(),
        history=lambda observation: Later([first]),
    )
    assert [r.settings["evidence"]["round"] for r in results] == [2, 3]
    assert sorted(asked) == [(2, [1]), (3, [1])]


class Later(Sequence):
    """A sequence that is another object whenever it is asked for, as one read from disk."""

    def __init__(self, seen):
        self._seen = seen

    def __len__(self):
        return len(self._seen)

    def __getitem__(self, index):
        return self._seen[index]


def test_evidence_is_remembered_by_observation_tier_and_history(observe, tiny, asked):
    seen, first = declaring(observe, tiny, round=2), declaring(observe, tiny)
    with remembered_evidence():
        one = evidence_for(seen, "adaptive")
        assert evidence_for(seen, "adaptive", Later([])) is one
        with remembered_evidence():
            assert evidence_for(seen, "adaptive", []) is one
        assert evidence_for(seen, "adaptive", [first]) is not one
        assert evidence_for(seen, "adaptive", [first]) is evidence_for(seen, "adaptive", (first,))
        assert evidence_for(seen, "oblivious") is not one
        assert evidence_for(replace(seen), "adaptive") is not one
        assert asked == [(2, []), (2, [1]), (2, [])]
    assert evidence_for(seen, "adaptive") is not one


def test_a_refusal_is_remembered_too(observe, tiny, asked):
    strange = declaring(observe, tiny, client="strange")
    with remembered_evidence():
        for _ in range(2):
            with pytest.raises(BractError, match="no gradient makes"):
                evidence_for(strange, "adaptive")
    assert len(asked) == 1


def test_nothing_outlives_the_block(observe, tiny, asked):
    seen = declaring(observe, tiny)
    gone = weakref.ref(seen)
    with remembered_evidence():
        evidence_for(seen, "adaptive")
        del seen
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None
