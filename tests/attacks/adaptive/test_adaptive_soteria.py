from dataclasses import replace
from typing import Any

import torch
from refusals import refused

from bract.attacks import IG, Budget
from bract.attacks.task import evidence_for
from bract.client.defenses import ProtectContext, build_defenses
from bract.models import create_model
from bract.models.initialise import initialise
from bract.scores import psnr

WEIGHT = "classifier.1.weight"


def defended(clean: Any, images: Any, labels: Any, *, init: Any = "default", **hyper: Any) -> Any:
    chain = build_defenses([{"name": "soteria", **hyper}])
    channels, size, _ = images.shape[1:]
    model = create_model("lenet-strided", classes=10, channels=channels, image_size=size)
    context = ProtectContext(
        seed=0, model=initialise(model, init, 0), images=(images - 0.3) / 0.4, labels=labels
    )
    return replace(
        clean,
        update=chain.protect(clean.update, {}, context),
        declaration=replace(clean.declaration, defenses=tuple(chain.public())),
    )


def test_exactly_what_the_client_changed_is_muted(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    clean = observe(images, labels)
    seen = defended(clean, images, labels, ratio=0.3)
    found = evidence_for(seen, "adaptive")
    assert found.weights is not None and list(found.weights) == [WEIGHT]
    assert torch.equal(found.weights[WEIGHT] == 0, seen.update[WEIGHT] != clean.update[WEIGHT])
    features = clean.update[WEIGHT].shape[1]
    assert len(found.notes["pruned"]) == int(0.3 * features)
    assert bool((seen.update[WEIGHT][:, found.notes["pruned"]] == 0).all())


def test_fewer_pruned_features_than_declared_are_flagged(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    seen = defended(observe(images, labels), images, labels, ratio=0.2)
    wrong = replace(seen.declaration, defenses=({"name": "soteria", "ratio": 0.5},))
    with refused("declaration-wrong", 96, "declaration"):
        evidence_for(replace(seen, declaration=wrong), "adaptive")


def test_muting_the_pruned_features_beats_matching_zeros(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    seen = defended(observe(images, labels), images, labels, ratio=0.5)
    scores = [
        float(psnr(IG()(seen, tier=tier, budget=Budget(iterations=150)).images, images)[0])
        for tier in ("oblivious", "adaptive")
    ]
    assert scores[1] > scores[0] + 3
