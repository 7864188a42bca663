"""Chains of two defenses, of which one prunes, or clips and adds noise."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from bract.attacks import IG, Budget, Known, Problem
from bract.attacks.adaptive.guardian.guardian_turning import Turn
from bract.attacks.problem.case import open_case
from bract.attacks.problem.evidence import CHAINS, read_evidence
from bract.attacks.result import SeedBudget
from bract.attacks.task import evidence_for
from bract.client.defenses import Guardian, ProtectContext, build_defenses
from bract.defenses import DEFENSES, Stage
from bract.defenses.base import DefenseError
from bract.errors import BractError
from bract.models import create_model
from bract.scores import psnr
from bract.updates.update import flatten, parameters_of, unflatten

SETTINGS: dict[str, dict[str, Any]] = {
    "noise": {"std": 1e-4, "clip": 0.5},
    "pruning": {"ratio": 0.5},
    "adadefense": {"alpha": 0.1},
}

PAIRS = {tuple(chain.split(" then ")) for chain in CHAINS}


def entry(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, **SETTINGS.get(name, {}), **settings}


def defended(clean: Any, *entries: Any, **context: Any) -> Any:
    chain = build_defenses(entries)
    update = chain.protect(clean.update, {}, ProtectContext(seed=3, **context))
    declaration = replace(clean.declaration, defenses=tuple(chain.public()))
    return replace(clean, update=update, declaration=declaration)


def chains_that_clients_run() -> set[tuple[str, str]]:
    def runs(names: tuple[str, str]) -> bool:
        try:
            build_defenses([entry(name) for name in names])
        except BractError:
            return False
        return not {"noise", "pruning"}.isdisjoint(names)

    # Per-example privacy protects no finished update: `training.private` trains with it.
    names = [name for name in DEFENSES if name != "per-example"]
    return {pair for pair in product(names, names) if runs(pair)}


def test_each_chain_with_noise_or_pruning_that_clients_run_has_an_attacker() -> None:
    own = {pair for pair in chains_that_clients_run() if pair != ("noise", "pruning")}
    assert own == PAIRS
    transforms = {n for n in DEFENSES if DEFENSES[n].stage is Stage.TRANSFORM}
    assert {(p, t) for p in ("noise", "pruning") for t in transforms} <= own


@pytest.mark.parametrize("hyper", [{}, {"scope": "tensor"}, {"length": "bound"}, {"beta": 1000.0}])
def test_guardian_is_simulated_as_clients_compute_it(hyper: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    update = {
        "weight": 0.05 * torch.randn(40, 30, generator=generator),
        "bias": 0.01 * torch.randn(40, generator=generator),
    }
    guardian = Guardian(**hyper)
    expected = guardian.protect(update, {}, ProtectContext())
    trials = {n: 2.0 * torch.stack([v, -v]) for n, v in update.items()}
    found = Turn(guardian, 2.0)(trials)
    for name, value in expected.items():
        torch.testing.assert_close(found[name][0] / 2.0, value, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found[name][1] / 2.0, -value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "names",
    [
        pair
        for pair in sorted(PAIRS)
        if not {"fedkl", "precode", "censor"} & set(pair) and pair not in (("noise", "guardian"),)
    ],
    ids="-".join,
)
def test_the_true_image_explains_an_upload_of_the_chain(
    observe: Any, digits: Any, names: Any
) -> None:
    """The distance at the truth is that of the noise; another image's is far larger."""
    images, labels = digits[0][:1], digits[1][:1]
    torch.manual_seed(0)
    clean = observe(images, labels, init="uniform")
    context = {}
    if "soteria" in names:
        model = create_model("lenet-strided", classes=10, channels=1, image_size=16)
        model.load_state_dict(clean.parameters)
        context = {"model": model, "images": (images - 0.3) / 0.4, "labels": labels}
    seen = defended(clean, *(entry(name) for name in names), **context)
    case = open_case(seen, tier="adaptive", known=Known(), max_images=1)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    rows = torch.nn.functional.one_hot(labels, 10).float()[None]

    def misfit(candidate: Any) -> float:
        made = problem.simulate(candidate[None], rows, {})
        read = problem.reading(made)
        weights = problem.weights or {}
        apart = {n: (made[n] - read[n]).square() * weights.get(n, 1.0) for n in read}
        size = {n: read[n].square() * weights.get(n, 1.0) for n in read}
        return float(sum(v.sum() for v in apart.values()) / sum(v.sum() for v in size.values()))

    # The clipping of an upload that Soteria changed is a little other than the candidate's.
    assert misfit(images) < (0.05 if "soteria" in names else 0.02)
    assert misfit(digits[0][5:6]) > (3 if "soteria" in names else 10) * misfit(images)


def test_pruned_adadefense_comes_back_to_the_adaptive_attacker_alone(
    observe: Any, digits: Any
) -> None:
    images = digits[0][:1]
    clean = observe(images, digits[1][:1], init="uniform")
    seen = defended(clean, entry("adadefense"), entry("pruning"))
    scores = [
        float(psnr(IG()(seen, tier=tier, budget=Budget(iterations=150)).images, images)[0])
        for tier in ("oblivious", "adaptive")
    ]
    assert scores[1] > scores[0] + 3


def test_dropped_coordinates_of_adadefense_are_bounded_by_the_survivors(
    observe: Any, digits: Any
) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    seen = defended(clean, entry("adadefense"), entry("pruning"))
    found = evidence_for(seen, "adaptive")
    assert found.bounds is not None
    for name, value in seen.update.items():
        off = (clean.gradient()[name] - found.target[name]).abs()
        dropped = value == 0
        assert bool((off[dropped] <= found.bounds[name][dropped] * 1.001 + 1e-9).all())
        assert not bool(found.bounds[name][~dropped].any())


def test_a_weak_seed_of_noise_after_another_defense_is_subtracted(
    observe: Any, digits: Any
) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    bare = defended(clean, entry("guardian"))
    generator = torch.Generator().manual_seed(11)
    vector = flatten(bare.update)
    vector = vector + 0.05 * torch.randn(len(vector), generator=generator)
    declared = build_defenses([entry("guardian"), entry("noise", std=0.05, clip=None)]).public()
    seen = replace(
        bare,
        update=unflatten(vector, bare.update),
        declaration=replace(bare.declaration, defenses=tuple(declared)),
    )
    found = read_evidence(seen, "adaptive", Known(weak_seeds=SeedBudget(seeds=(range(11, 12),))))
    assert found.likelihood is None
    assert found.notes["defense"] == "guardian, noise"
    left = flatten(found.target) - flatten(bare.gradient())
    assert float(left.abs().max()) < 1e-4 * float(flatten(bare.gradient()).abs().max())


@pytest.mark.parametrize(
    "names", [pair for pair in sorted(PAIRS) if "censor" in pair], ids="-".join
)
def test_censor_in_a_chain_leaves_norms_and_orthogonality(
    observe: Any, digits: Any, names: Any
) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    clean = observe(images, labels, init="uniform")
    model = create_model("lenet-strided", classes=10, channels=1, image_size=16)
    model.load_state_dict(clean.parameters)
    context = {"model": model, "images": (images - 0.3) / 0.4, "labels": labels}
    entries = [entry(name, **({"step": 0.1} if name == "censor" else {})) for name in names]
    seen = defended(clean, *entries, **context)
    case = open_case(seen, tier="adaptive", known=Known(), max_images=1)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    rows = torch.nn.functional.one_hot(labels, 10).float()[None]
    assert problem.likelihood is not None
    made = problem.simulate(images[None], rows, {})
    at_truth = float(problem.distance(problem.likelihood, made))
    inverted = {n: 30.0 * v for n, v in problem.reading(made).items()}
    assert at_truth < 0.1 * float(problem.distance(problem.likelihood, inverted))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedkl", "precode"])
@pytest.mark.parametrize("last", ["noise", "pruning"])
def test_what_a_changed_model_keeps_is_searched_under_a_second_defense(
    observe: Any, tiny: Any, name: str, last: str
) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    chain = build_defenses([entry(name), entry(last)])
    model = chain.prepare_model(
        create_model("lenet-strided-bn", classes=10, channels=1, image_size=8)
    )
    chain.attach(model, {}, ProtectContext(seed=1))
    clean = observe(images, labels, model=model, name="lenet-strided-bn")
    names = parameters_of(
        chain.prepare_model(create_model("lenet-strided-bn", classes=10, channels=1, image_size=8))
    )
    clean = replace(
        clean,
        parameters={n: clean.parameters[n] for n in names},
        update={n: clean.update[n] for n in names},
    )
    try:
        sent = build_defenses([entry(last)]).protect(clean.update, {}, ProtectContext(seed=3))
    except DefenseError as error:
        pytest.fail(str(error))
    seen = replace(
        clean,
        update=sent,
        declaration=replace(clean.declaration, defenses=tuple(chain.public())),
    )
    found = IG()(seen, tier="adaptive", budget=Budget(iterations=1))
    assert found.settings["evidence"]["defense"] == f"{name}, {last}"
