"""What a client does to its images, and that what is kept is what was trained on."""

import copy
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.transforms import functional as V

from bract.client.augmentation import AUGMENTATIONS, PADDING, augment
from bract.client.training import train_locally
from bract.config.config import TrainingConfig
from bract.config.sections import Augmentation
from bract.data.views import DataSpec

SPEC = DataSpec((1, 6, 5), 3, (0.2,), (0.5,))
CPU = torch.device("cpu")


def images(count: int, seed: int = 1) -> torch.Tensor:
    """Images that are not square, so that no axis can be taken for the other."""
    return torch.rand(count, 1, 6, 5, generator=torch.Generator().manual_seed(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(30, 3))


def test_every_augmentation_of_the_configuration_is_known() -> None:
    assert set(AUGMENTATIONS) == set(get_args(Augmentation))


@pytest.mark.parametrize(
    ("name", "mirror"), [("horizontal-flip", V.hflip), ("vertical-flip", V.vflip)]
)
def test_about_half_of_the_images_are_mirrored_and_the_others_stay(name: Any, mirror: Any) -> None:
    given = images(200)
    found = augment(given, [name], generator())
    mirrored = (found == mirror(given)).flatten(1).all(1)
    same = (found == given).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert 70 < int(mirrored.sum()) < 130


def test_a_crop_is_a_shift_of_at_most_the_padding_with_black_behind_it() -> None:
    given = images(300)
    found = augment(given, ["random-crop"], generator())
    padded, seen = F.pad(given, (PADDING,) * 4), set()
    for i, image in enumerate(found):
        shifts = [
            (top, left)
            for top in range(2 * PADDING + 1)
            for left in range(2 * PADDING + 1)
            if torch.equal(image, padded[i, :, top : top + 6, left : left + 5])
        ]
        assert shifts
        seen.add(shifts[0])
    assert len(seen) > 60  # of the 81 places
    assert found.shape == given.shape


def test_draws_follow_from_the_seed_and_leave_the_given_images_alone() -> None:
    given = images(50)
    before = given.clone()
    names: list[Any] = ["horizontal-flip", "random-crop"]
    first, again, other = (augment(given, names, generator(s)) for s in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(given, before)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_what_one_step_is_scored_against_is_the_image_that_was_trained_on(algorithm: Any) -> None:
    given, labels, network = images(4), torch.tensor([0, 1, 2, 1]), model()
    config = TrainingConfig(
        algorithm=algorithm,
        batch_size=3,
        local_steps=1,
        lr=0.5,
        augmentation=["horizontal-flip", "random-crop"],
    )
    start = copy.deepcopy(network)
    done = train_locally(network, given, labels, config=config, spec=SPEC, seed=5, device=CPU)
    kept = done.trained_on(given)
    assert kept.shape == (3, 1, 6, 5) and not torch.equal(kept, given[done.used])
    loss = F.cross_entropy(start(SPEC.normalise(kept)), labels[done.used])
    wanted = torch.autograd.grad(loss, list(start.parameters()))
    scale = 1.0 if algorithm == "fedsgd" else 0.5
    for value, gradient in zip(done.update.values(), wanted, strict=True):
        torch.testing.assert_close(value, scale * gradient, rtol=1e-4, atol=1e-6)
    assert torch.equal(done.trained_on(given, 2), kept[:2])


def test_every_epoch_draws_anew_and_the_first_use_is_kept() -> None:
    seen: list[torch.Tensor] = []
    network = model()
    network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    given = images(4)
    config = TrainingConfig(batch_size=4, local_epochs=6, augmentation=["random-crop"])
    done = train_locally(
        network, given, torch.tensor([0, 1, 2, 1]), config=config, spec=SPEC, seed=5, device=CPU
    )
    torch.testing.assert_close(SPEC.normalise(done.trained_on(given)), seen[0])
    sums = {tuple(sorted(batch.sum(dim=(1, 2, 3)).tolist())) for batch in seen}
    assert len(sums) == 6


def test_augmentation_leaves_the_order_of_the_examples_as_it_is() -> None:
    given, labels = images(9), torch.tensor([0, 1, 2] * 3)
    used = []
    for names in ([], ["horizontal-flip"]):
        config = TrainingConfig(batch_size=2, augmentation=names)
        done = train_locally(model(), given, labels, config=config, spec=SPEC, seed=5, device=CPU)
        used.append(done.used)
    assert used[0] == used[1]
