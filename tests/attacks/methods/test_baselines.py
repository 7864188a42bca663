from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused

from bract.attacks import ATTACKS, Budget, attack
from bract.attacks.methods.baselines import prior_only
from bract.attacks.methods.portfolio.auto import Auto
from bract.attacks.registry import attacks_only_for
from bract.models import create_model
from bract.updates.update import buffers_of
from bract_priors.prior_training import PriorSettings, train_prior

WITHOUT_PRIOR = {
    *(
        "analytic",
        "gauss-newton",
        "labels",
        "patch-embedding",
        "patch-span",
        "pooled-places",
        "r-gap",
        "row-span",
        "spear",
    ),
    *("feature-regression", "maui", "statistics"),
}
OF_IMAGES = {name for name in ATTACKS if "image" in ATTACKS[name].inputs}


def prior_image(name: Any, seen: Any, **settings: Any) -> Any:
    budget = Budget(iterations=4)
    public = None
    if name in attacks_only_for("surrogate"):
        size = seen.declaration.image_shape[-1]
        kind: Any = ATTACKS[name].generator or "autoencoder"
        public = train_prior(
            torch.linspace(0, 1, 16).view(16, 1, 1, 1).expand(16, 1, size, size),
            None,
            PriorSettings(kind=kind, width=2, epochs=1),
            source="noise",
        )
    return prior_only(attack(name, **settings))(seen, budget=budget, seed=3, public=public)


WITH_PRIOR = [
    (name, size)
    for name in sorted(OF_IMAGES - WITHOUT_PRIOR)
    for size in (8, 9)  # the generator makes powers of two
    if size == 8 or not name.startswith("grnn")
]


@pytest.mark.parametrize(("name", "size"), WITH_PRIOR)
def test_the_image_of_the_prior_alone_does_not_depend_on_the_update(
    observe: Any, name: Any, size: Any
) -> None:
    seen = observe(torch.rand(1, 1, size, size), torch.tensor([4]))
    other = replace(seen, update={n: v.flip(0) for n, v in seen.update.items()})
    one, two = (prior_image(name, o) for o in (seen, other))
    assert torch.equal(one.images, two.images)
    assert float(one.images.std()) > 0


@pytest.mark.parametrize("name", ["ig", "grnn"])
def test_the_prior_alone_does_not_see_returned_batch_statistics(
    observe: Any, tiny: Any, name: Any
) -> None:
    torch.manual_seed(0)
    network = create_model("lenet-strided-bn", classes=10, channels=1, image_size=8).train()
    seen = observe(tiny[0][:2], tiny[1][:2], model=network)
    seen = replace(
        seen,
        declaration=seen.declaration.updated({"model": "lenet-strided-bn"}),
        returned_buffers=buffers_of(network),
    )
    other = replace(
        seen,
        returned_buffers={
            n: v * 3 if v.is_floating_point() else v for n, v in seen.returned_buffers.items()
        },
    )
    one, two = (prior_image(name, o, bn=1.0) for o in (seen, other))
    assert torch.equal(one.images, two.images)


@pytest.mark.parametrize("name", sorted(WITHOUT_PRIOR))
def test_an_attack_without_a_prior_is_refused_by_name(name: Any) -> None:
    with refused("config-value", name):
        prior_only(attack(name))


def test_best_and_auto_show_the_generators_prior_where_it_can_make_the_size(
    observe: Any, tiny: Any
) -> None:
    seen = observe(tiny[0][:1], tiny[1][:1])
    wanted = prior_image("grnn", seen).images
    for name in ("best", "auto", "grnn-polish"):
        assert torch.equal(prior_image(name, seen).images, wanted), name
    assert prior_only(Auto(pool=("gauss-newton", "ig"))).name == "ig"
    with refused("config-value", "auto"):
        prior_only(Auto(pool=("gauss-newton",)))
