from dataclasses import replace
from typing import Any

import pytest
import torch
from defended_clients import capture
from observing import scores
from refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks import Budget, Refusal, attack, reconstruct
from bract.attacks.methods.patch_embedding.linear_system import OpenSystem, solve_patches
from bract.attacks.methods.patch_embedding.patch_embedding import PatchEmbedding
from bract.attacks.problem.linear_layers import Projection, patch_layers
from bract.attacks.problem.target_model import target_model_of
from bract.models import MODELS

WIDE = "vit(patch=4,width=192,depth=2,heads=3)"
SMALL = "vit(patch=4,width=48,depth=1,heads=2)"


class Handmade(nn.Module):
    """Two patches of two pixels each, side by side, two values a token, position behind a factor.

    The layers' names say nothing.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.Parameter(0.1 * torch.randn(3, 4))
        self.c = nn.Linear(3, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.a(images.flatten(1).view(-1, 2, 2)) + 2.0 * self.b.T[1:3]
        logits: Tensor = self.c((tokens.sigmoid() * torch.tensor([[1.0], [2.0]])).sum(dim=1))
        return logits


def photo(size: int, seed: int = 0, count: int = 1) -> Tensor:
    """Smooth images in colour."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, size=size, mode="bilinear", align_corners=False)


def test_the_equations_of_a_handmade_patch_embedding_are_solved() -> None:
    # G^T X = W for two tokens of three values: by hand, X = [[1, 2], [3, 4]].
    slopes = torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, -1.0]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 2.0], [6.0, 8.0], [-2.0, -2.0]], dtype=torch.float64)
    found = solve_patches(slopes, weight)
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(found.patches, expected)
    assert (found.rank, found.unknowns, found.equations) == (2, 2, 3)
    assert found.determined and found.residual < 1e-28
    # G G^T = [[2, -1], [-1, 5]] has eigenvalues (7 +- sqrt 13) / 2.
    assert found.condition == pytest.approx(((7 + 13**0.5) / (7 - 13**0.5)) ** 0.5)


def test_patches_without_an_equation_of_their_own_are_not_determined() -> None:
    slopes = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
    found = solve_patches(slopes, torch.ones(2, 1, dtype=torch.float64))
    assert found.rank == 1 and not found.determined
    square = solve_patches(torch.eye(2, dtype=torch.float64), torch.ones(2, 1).double())
    assert not square.determined and square.error == float("inf")


def test_an_open_system_is_the_dense_least_squares_solution() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    pixels = torch.arange(16).view(4, 4).view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)
    projection = Projection(name="a", weight="a.weight", bias=None, pixels=pixels)
    system = OpenSystem(
        slopes=normal(4, 3),
        weight=normal(3, 4),
        slope_variance=normal(4, 3).square(),
        weight_variance=normal(3, 4).square(),
        mean=torch.full((4,), 0.3, dtype=torch.float64),
        std=torch.full((4,), 0.4, dtype=torch.float64),
        projection=projection,
        shape=(1, 4, 4),
    )
    counted = system.counted()
    found = system.solve(0.1, counted)

    def equations(image: Tensor) -> Tensor:
        return (counted.sqrt() * (system.slopes.T @ system.patches(image))).flatten()

    zero = torch.zeros(1, 4, 4, dtype=torch.float64)
    units = torch.eye(16, dtype=torch.float64).view(16, 1, 4, 4)
    matrix = torch.stack([equations(u) - equations(zero) for u in units], dim=1)
    rough = torch.stack(
        [torch.cat([u.diff(dim=-1).flatten(), u.diff(dim=-2).flatten()]) for u in units], dim=1
    )
    blocks = matrix.T @ matrix
    held = 0.1 * float(blocks.trace()) / 16
    right = matrix.T @ ((counted.sqrt() * system.weight).flatten() - equations(zero))
    dense = torch.linalg.solve(blocks + held * rough.T @ rough, right)
    torch.testing.assert_close(found.flatten(), dense, rtol=1e-6, atol=1e-8)


def test_layers_are_found_by_probes_and_not_by_name(
    observe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS._entries, "test-handmade", Handmade)
    torch.manual_seed(0)
    image = torch.rand(1, 1, 2, 2)
    seen = observe(image, torch.tensor([3]), model=Handmade(), name="test-handmade")
    layers = patch_layers(target_model_of(seen), seen)
    assert layers.projection.weight == "a.weight" and layers.projection.bias == "a.bias"
    assert layers.projection.pixels.tolist() == [[0, 1], [2, 3]]
    assert layers.position.name == "b" and layers.position.factor == pytest.approx(2.0, rel=1e-5)
    # Column 1 and 2 of a parameter (3, 4), value by value.
    assert layers.position.places.tolist() == [[1, 5, 9], [2, 6, 10]]
    torch.testing.assert_close(PatchEmbedding()(seen).images, image, rtol=0.0, atol=1e-3)


def test_overlapping_patches_with_padding_are_put_back_in_their_places(observe: Any) -> None:
    class Overlapping(nn.Module):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 40, 4, stride=2, padding=1, bias=False)
            self.place = nn.Parameter(0.1 * torch.randn(1, 40, 4, 4))
            self.head = nn.Linear(40, 10)

        def forward(self, images: Tensor) -> Tensor:
            places = torch.linspace(0.5, 1.5, 16).view(4, 4)
            tokens = self.stem(images) + self.place
            logits: Tensor = self.head((tokens.sigmoid() * places).mean(dim=(2, 3)))
            return logits

    MODELS._entries["test-overlapping"] = Overlapping
    try:
        torch.manual_seed(0)
        image = photo(8)
        seen = observe(image, torch.tensor([3]), model=Overlapping(), name="test-overlapping")
        found = PatchEmbedding()(seen)
    finally:
        del MODELS._entries["test-overlapping"]
    assert scores(found.images, image)[0].psnr > 60


@pytest.mark.parametrize(
    "settings",
    [
        "",
        ",pool=mean",
        ",norm=post,hidden=60",
        ",embedding=linear",
        ",pool=mean,norm=post,embedding=linear",
    ],
)
def test_one_image_is_computed_whatever_the_transformer(observe: Any, settings: str) -> None:
    image = photo(16)
    # Behind one block whose attention sees raw tokens, the class token alone shows few directions.
    name = f"{SMALL[:-1]}{settings})".replace("depth=1", "depth=2")
    found = PatchEmbedding()(observe(image, torch.tensor([3]), model=name))
    assert scores(found.images, image)[0].psnr > 60
    assert found.final_loss < 1e-11 and found.labels.tolist() == [3]
    assert "rank 16 of 16" in " ".join(found.components)
    assert "condition" in " ".join(found.components)


@pytest.mark.thorough
def test_few_directions_are_reported_and_filled_with_a_smooth_image(observe: Any) -> None:
    seen = observe(photo(16), torch.tensor([3]), model=f"{SMALL[:-1]},norm=post)")
    found = PatchEmbedding()(seen)
    assert "rank 16 of 16" not in " ".join(found.components)
    assert "smooth image" in found.components
    assert scores(found.images, photo(16))[0].psnr > 14


def test_one_image_is_computed_from_any_number_of_sgd_steps(observe: Any) -> None:
    image = photo(16)
    seen = observe(image, torch.tensor([3]), model=SMALL, steps=20, lr=0.05, momentum=0.5)
    assert scores(PatchEmbedding()(seen).images, image)[0].psnr > 40


@pytest.mark.parametrize("tier", ["oblivious", "adaptive"])
def test_a_locked_layer_normalisation_hides_nothing(tier: Any) -> None:
    image, label = photo(16), torch.tensor([3])
    seen = capture(image, label, {"name": "fedkl"}, model=SMALL).seen
    assert "blocks.0.norm1.weight" not in seen.parameters
    for using in ("patch-embedding", "auto") if tier == "oblivious" else ("patch-embedding",):
        found = reconstruct(seen, using, tier=tier)[0]
        assert not isinstance(found, Refusal)
        assert scores(found.images, image)[0].psnr > 60


@pytest.mark.thorough
def test_who_knows_adadefense_sees_the_image_and_who_does_not_sees_none() -> None:
    image, label = photo(16), torch.tensor([3])
    seen = capture(image, label, {"name": "adadefense"}, model=WIDE).seen
    known, ignored = (PatchEmbedding()(seen, tier=tier) for tier in ("adaptive", "oblivious"))
    assert scores(known.images, image)[0].psnr > 35
    assert scores(ignored.images, image)[0].psnr < 15
    assert "descent on the whole update" in known.components
    assert known.final_loss < ignored.final_loss


@pytest.mark.parametrize(
    ("entry", "least"),
    [({"name": "noise", "std": 1e-5, "clip": 1.0}, 20.0), ({"name": "pruning", "ratio": 0.9}, 8.0)],
)
def test_noise_and_pruning_leave_an_image_that_matches_best(entry: Any, least: float) -> None:
    image, label = photo(16), torch.tensor([3])
    seen = capture(image, label, entry, model=SMALL).seen
    assert scores(PatchEmbedding()(seen, tier="adaptive").images, image)[0].psnr > least


def test_what_has_no_learned_positions_is_refused(observe: Any) -> None:
    image, label = photo(16), torch.tensor([3])
    fixed = observe(image, label, model=f"{SMALL[:-1]},positions=sinusoidal)")
    with refused("attack-unsuited", "parameter"):
        PatchEmbedding()(fixed)
    with refused("attack-unsuited", "mlp"):
        PatchEmbedding()(observe(image, label, model="mlp"))


def test_batches_and_updates_without_a_gradient_are_refused(observe: Any) -> None:
    images, labels = photo(16, count=2), torch.tensor([3, 4])
    seen = observe(images, labels, model=SMALL)
    with refused("attack-unsuited", 2):
        PatchEmbedding()(seen)
    alone = observe(images[:1], labels[:1], model=SMALL)
    gone = torch.zeros_like(alone.update["positions"])
    gone[:, 0] = alone.update["positions"][:, 0]  # that of the class token alone is left
    zero = dict(alone.update) | {"positions": gone}
    with refused("attack-evidence", "positions"):
        PatchEmbedding()(replace(alone, update=zero))
    adam = observe(images[:1], labels[:1], model=SMALL, steps=2, optimizer="adam")
    with refused("attack-unsuited", "steps", "adam"):
        PatchEmbedding()(adam)


def test_l_bfgs_matches_fixed_positions_closer_in_as_many_steps(observe: Any) -> None:
    images = photo(8)
    seen = observe(
        images,
        torch.tensor([3]),
        model="vit(patch=4,width=48,depth=1,heads=2,positions=sinusoidal)",
    )
    found = {}
    for quasi_newton in (False, True):
        (one,) = reconstruct(
            [seen], attack("april", quasi_newton=quasi_newton), budget=Budget(iterations=60)
        )
        assert not isinstance(one, Refusal)
        found[quasi_newton] = one.trials[one.chosen].loss
    assert found[True] < 0.5 * found[False]
