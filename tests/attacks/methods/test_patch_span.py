"""What entered a convolution, read off its gradient, and the image from that."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pack
import pytest
import torch
from observing import observed, one_step, returning, scores
from refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks import (
    ATTACKS,
    Budget,
    Determined,
    Entered,
    InvertingAttack,
    Outcome,
    Problem,
    ReadingBudget,
    Reconstruction,
    Run,
    attack,
    hard_labels,
    reconstruct,
)
from bract.attacks.methods import inverting
from bract.attacks.methods.patch_span import activations, patch_span
from bract.attacks.methods.patch_span.layers import Convolution, convolutions
from bract.attacks.methods.patch_span.patch_span import PatchSpan
from bract.attacks.methods.portfolio.halving import Contest
from bract.attacks.problem.case import Case, open_case
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.errors import BractError
from bract.models import create_model
from bract.process import clock


def layer_of(entering: Tensor, conv: nn.Conv2d, taken: int = 0) -> Convolution:
    """Return a convolution as it runs on maps ``(1, C, H, W)``."""
    height, width = conv(entering.float()).shape[2:]
    _, channels, *size = entering.shape
    kernel, stride, padding = (
        (int(v[0]), int(v[1])) for v in (conv.kernel_size, conv.stride, conv.padding)
    )
    whole = (channels, size[0], size[1])
    return Convolution("conv", whole, height * width, kernel, stride, padding, taken)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [(3, 1, 1, 4), (3, 2, 1, 8), (5, 2, 0, 9), (3, 2, 0, 9)],
)
def test_rectified_maps_are_read_to_rounding(
    batch_norm: bool, kernel: int, stride: int, padding: int, size: int
) -> None:
    torch.manual_seed(0)
    maps = torch.rand(1, 5, size, size, dtype=torch.float64).sub(0.4).relu()
    conv = nn.Conv2d(5, 20, kernel, stride=stride, padding=padding).double()
    norm = nn.BatchNorm2d(20).double() if batch_norm else nn.Identity()
    conv.float()
    layer = layer_of(maps, conv, taken=int(batch_norm))
    conv.double()
    behind = torch.randn(20, layer.positions, dtype=torch.float64).view_as(conv(maps)[0])
    loss = (torch.relu(norm(conv(maps)))[0] * behind).sum()
    (gradient,) = torch.autograd.grad(loss, [conv.weight])
    read = activations.solved(layer, gradient)
    assert float(read.distance(maps[0])) < 1e-9
    assert float(read.distance(-3.0 * maps[0])) < 1e-9
    assert float(read.distance(maps[0].flip(2))) > 0.1
    assert read.rank <= layer.positions + 20


def test_a_gradient_with_dead_units_determines_no_map() -> None:
    torch.manual_seed(0)
    maps = torch.rand(1, 3, 4, 4)
    conv = nn.Conv2d(3, 16, 3, padding=1)
    layer = layer_of(maps, conv)
    behind = torch.randn(1, 16, 4, 4)
    behind[:, :4] = 0.0
    (gradient,) = torch.autograd.grad((conv(maps) * behind).sum(), [conv.weight])
    with refused("attack-unsolved", "activations"):
        activations.solved(layer, gradient.double())


def test_noise_is_not_read_for_a_map() -> None:
    layer = Convolution("conv", (3, 4, 4), 16, (3, 3), (1, 1), (1, 1))
    noise = torch.randn(16, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    with refused("attack-unsolved", "activations"):
        activations.solved(layer, noise.double())


@pytest.fixture(scope="module")
def picture() -> Tensor:
    """A grey photograph of 32 pixels, ``(1, 1, 32, 32)``."""
    import skimage.data

    found = torch.from_numpy(skimage.data.retina()[500:756, 500:756]).float() / 255
    return F.interpolate(found.mean(dim=2)[None, None], size=(32, 32), mode="area")


@pytest.fixture(scope="module")
def seen(picture: Tensor) -> Any:
    """One step on it in training mode through a fresh ResNet-20 behind ReLU."""
    torch.manual_seed(3)
    return one_step(picture, torch.tensor([3]), activation="relu", model="resnet20")


@pytest.fixture(scope="module")
def small() -> Tensor:
    """A digit of 8 pixels, ``(1, 1, 8, 8)``, through whose ResNet-20 a step costs little."""
    return pack.held("lenet-strided-b1").images


@pytest.fixture(scope="module")
def cheap(small: Tensor) -> Any:
    """One step on it in training mode through a fresh ResNet-20 behind ReLU."""
    return one_step(small, torch.tensor([3]), activation="relu", model="resnet20")


@pytest.mark.thorough
def test_activations_of_a_resnet_are_read_behind_thirteen_layers(
    seen: Any, picture: Tensor
) -> None:
    case = open_case(seen, tier="oblivious", max_images=1, unroll=16)
    read = activations.read_activations(case)
    assert read.layer.name == "stages.2.0.conv1"
    state = case.target_model.captured(case.observation)
    true, _ = activations.entering(
        case.target_model, state, case.target_model.normalise(picture), read.layer.name
    )
    assert float(read.distance(true[0].double())) < 1e-5


@pytest.mark.slow
def test_noise_does_not_hide_the_dimension_that_normalisation_takes(
    seen: Any, picture: Tensor
) -> None:
    torch.manual_seed(0)
    size = torch.cat([v.flatten() for v in seen.update.values()]).square().mean().sqrt()
    update = {n: v + 1e-5 * size * torch.randn_like(v) for n, v in seen.update.items()}
    case = open_case(replace(seen, update=update), tier="oblivious", max_images=1, unroll=16)
    read = activations.read_activations(case)
    state = case.target_model.captured(case.observation)
    inputs = case.target_model.normalise(picture)
    true, _ = activations.entering(case.target_model, state, inputs, read.layer.name)
    assert float(read.distance(true[0].double())) < 1e-4
    gradient = case.evidence.target[read.layer.weight].double()
    with refused("attack-unsolved", "determine"):
        activations.solved(replace(read.layer, taken=0), gradient)


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_two_local_steps_on_an_image_are_read(small: Tensor, lr: float) -> None:
    """Of maps of 16 places behind 32 units; the greater rate leaves the second step nothing."""
    torch.manual_seed(0)
    network = create_model("resnet20", classes=10, channels=1, image_size=8, activation="relu")
    given: dict[str, Any] = {"steps": 2, "activation": "relu", "lr": lr}
    seen = returning(network, "resnet20", small, torch.tensor([3]), **given)
    case = open_case(seen, tier="oblivious", max_images=1, unroll=16)
    read = activations.read_activations(case)
    state = case.target_model.captured(case.observation)
    inputs = case.target_model.normalise(small)
    true, _ = activations.entering(case.target_model, state, inputs, read.layer.name)
    assert float(read.distance(true[0].double())) < 1e-8
    found = attack("patch-span")(seen, budget=Budget(iterations=60))
    assert scores(found.images, small)[0].psnr > 18


def test_steps_on_parts_of_the_images_are_refused(small: Tensor) -> None:
    images, labels = torch.cat([small, small.flip(3)]), torch.tensor([3, 4])
    network = create_model("resnet20", classes=10, channels=1, image_size=8, activation="relu")
    given: dict[str, Any] = {"steps": 2, "activation": "relu", "batch_size": 1}
    seen = returning(network, "resnet20", images, labels, **given)
    with refused("attack-unsuited", "patch-span"):
        attack("patch-span")(seen)


@pytest.mark.parametrize("seed", range(3))
def test_units_that_are_dead_under_running_statistics_are_not_read_past(
    picture: Tensor, seed: int
) -> None:
    torch.manual_seed(seed)
    network = create_model("resnet20", classes=10, channels=1, image_size=32, activation="relu")
    network.eval()
    declared: dict[str, Any] = {"norm_mode": "eval", "activation": "relu"}
    seen = observed(picture, torch.tensor([3]), model=network, name="resnet20", **declared)
    case = open_case(seen, tier="oblivious", max_images=1, unroll=16)
    try:
        read = activations.read_activations(case)
    except BractError as error:
        assert "dimensions beyond rounding" in str(error)
        return
    state = case.target_model.captured(case.observation)
    inputs = case.target_model.normalise(picture)
    true, _ = activations.entering(case.target_model, state, inputs, read.layer.name)
    assert float(read.distance(true[0].double())) < 1e-3


def test_activations_and_statistics_are_named_where_they_are_matched(cheap: Any) -> None:
    for seen, matched in ((cheap, True), (replace(cheap, returned_buffers={}), False)):
        (trial,) = attack("patch-span")(seen, budget=Budget(iterations=2)).trials
        assert "span of patches" in trial.components
        assert ("batch statistics" in trial.components) is matched


@pytest.mark.slow
def test_the_image_is_found_from_the_gradient_alone(seen: Any, picture: Tensor) -> None:
    alone = replace(seen, returned_buffers={})
    budget = Budget(iterations=150)
    found = attack("patch-span")(alone, budget=budget)
    both = attack("patch-span")(seen, budget=budget)
    statistics = attack("statistics")(seen, budget=budget)
    ours, more, theirs = (scores(r.images, picture) for r in (found, both, statistics))
    assert ours[0].ssim > 0.95
    assert more[0].psnr > 40 and more[0].psnr > theirs[0].psnr + 10
    assert "span of patches" in found.trials[0].components
    assert "batch statistics" not in found.trials[0].components
    assert "batch statistics" in both.trials[0].components


def test_reading_is_a_part_of_a_budget_in_seconds(
    cheap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, left = SimpleNamespace(now=0.0), list[float | None]()
    given: list[float | None] = []

    def reading(case: Any, *, seconds: float | None) -> Any:
        given.append(seconds)
        time.now += 30.0
        return activations.read_activations(case)

    def inverted(self: PatchSpan, problem: Problem, run: Run, read: Any) -> Any:
        left.append(run.seconds)
        return found(self, problem, run, read)

    found = PatchSpan.inverted
    monkeypatch.setattr(patch_span, "read_activations", reading)
    monkeypatch.setattr(PatchSpan, "inverted", inverted)
    with clock.timed_by(lambda: time.now):
        for budget in (40.0, 20.0):
            attack("patch-span")(cheap, budget=Budget(seconds=budget, iterations=1))
    assert given == pytest.approx([40.0, 20.0], abs=1.0)
    assert left == [10.0, inverting._LEAST_SHARE * 20.0]
    monkeypatch.undo()
    with refused("attack-unsolved", "activations"):
        attack("patch-span")(cheap, budget=Budget(seconds=1e-9))


def test_best_keeps_no_images_without_the_activations(
    cheap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatchSpan, "found_below", 1e-9)
    budget = Budget(iterations=20)
    assert attack("best")(cheap, budget=budget).method == "patch-span"  # nearer than others
    monkeypatch.setattr(PatchSpan, "nearer", 1e-9)
    assert attack("best")(cheap, budget=budget).method != "patch-span"


@dataclass(frozen=True, kw_only=True)
class Other(InvertingAttack):
    """A reading of another package, which makes grey images."""

    name: ClassVar[str] = "other"
    found_below: ClassVar[float | None] = 1.0
    equations: ClassVar[int] = 1
    rounding: ClassVar[float] = 0.0

    def entered(self, case: Case, budget: ReadingBudget) -> Entered:
        known = Determined(self.equations, 0.0, self.rounding)
        return replace(PatchSpan().entered(case, budget), certificate=known)

    def inverted(self, problem: Problem, run: Run, read: Any) -> Outcome:
        images = torch.full((problem.trials, *problem.image_shape), 0.5)
        return Outcome(images, hard_labels(problem), torch.zeros(problem.trials))


def test_best_takes_the_reading_that_the_update_determines_best(
    cheap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTACKS._entries, "other", Other)
    budget = Budget(iterations=20)
    assert attack("best")(cheap, budget=budget).method == "patch-span"
    monkeypatch.setattr(Other, "equations", 10**6)
    assert attack("best")(cheap, budget=budget).method == "other"
    monkeypatch.setattr(Other, "rounding", -1.0)  # more is left than rounding explains
    assert attack("best")(cheap, budget=budget).method == "patch-span"


def test_best_goes_on_where_the_update_hardly_determines_what_was_read(
    cheap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(iterations=20)
    assert attack("best")(cheap, budget=budget).method == "patch-span"
    sure = PatchSpan.entered

    def weak(self: PatchSpan, case: Case, budget: ReadingBudget) -> Entered:
        return replace(sure(self, case, budget), certificate=Determined(1, 1.0, 0.1))

    monkeypatch.setattr(PatchSpan, "entered", weak)
    assert attack("best")(cheap, budget=budget).method != "patch-span"


@pytest.mark.thorough
def test_best_takes_what_is_read_and_goes_on_where_nothing_is(cheap: Any) -> None:
    budget = Budget(iterations=20, restarts=2)
    assert attack("best")(cheap, budget=budget).method == "patch-span"
    dead = {name: torch.zeros_like(v) for name, v in cheap.update.items() if name.startswith("st")}
    other = replace(cheap, update=cheap.update | dead, returned_buffers={})
    budget = Budget(iterations=2)
    assert attack("best")(other, budget=budget).method == "grnn"


@pytest.mark.slow
def test_auto_takes_what_is_read_before_what_matches_better(seen: Any) -> None:
    found = attack("auto")(replace(seen, returned_buffers={}), budget=Budget(iterations=120))
    assert found.method == "patch-span"
    assert "activations" in found.settings["criterion"]


def test_a_contest_puts_what_is_read_before_what_matches_better() -> None:
    def trial(method: str, loss: float, distance: float, *known: float) -> Any:
        facts: dict[str, Any] = {"failed": False, "nats": None, "statistics": None}
        facts["residual"] = distance
        facts["determined"] = Determined(int(known[0]), *known[1:]) if known else None
        return SimpleNamespace(attack=method, method=method, loss=loss, distance=distance, **facts)

    sure, weak = (10, 0.01, 0.1), (10, 0.2, 0.1)
    matched, read = trial("ig", 0.01, 0.01), trial("patch-span", 0.03, 0.6, *sure)
    contest = Contest([], [matched, read, trial("patch-span", 0.05, 0.2, *sure)])
    assert contest.best() == 1 and "certificate" in contest.criterion
    assert Contest([], [read, trial("ig", 0.01, 1e-9)]).best() == 1  # explains the update exactly
    for loss in (0.6, math.inf, math.nan):  # images without the activations that were read
        assert Contest([], [matched, trial("patch-span", loss, 0.5, *sure)]).best() == 0
    # Without a certificate that holds, what is said to be read counts by its match.
    for known in (weak, ()):
        assert Contest([], [matched, trial("patch-span", 0.03, 0.6, *known)]).best() == 0
        assert Contest([], [matched, trial("patch-span", 0.03, 0.001, *known)]).best() == 1
    # Of two readings the one that the update determines better, whatever its loss.
    more = trial("maui", 5e-4, 0.7, 99, 0.01, 0.1)
    assert Contest([], [read, more, trial("patch-span", 1e-5, 0.1, *sure)]).best() == 1
    exact = trial("maui", 5e-4, 1e-9, 99, 0.01, 0.1)  # no farther than the match is
    assert Contest([], [trial("ig", 0.0, 1e-10), exact]).best() == 1


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size", "channels"), [(3, 2, 1, 8, 3), (3, 2, 0, 12, 6)]
)
def test_patches_that_overlap_too_little_are_refused(
    kernel: int, stride: int, padding: int, size: int, channels: int
) -> None:
    conv = nn.Conv2d(channels, 8, kernel, stride=stride, padding=padding)
    layer = layer_of(torch.rand(1, channels, size, size), conv)
    shape = (layer.positions + 8, channels, kernel, kernel)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with refused("attack-unsolved", "overlap"):
        activations.solved(layer, noise.double())


@pytest.mark.thorough
def test_observations_that_are_not_read_leave_the_others_to_themselves(
    cheap: Any, small: Tensor
) -> None:
    other = one_step(small.flip(3), torch.tensor([4]), activation="relu", model="resnet20")
    noise = replace(cheap, update={n: torch.randn_like(v) for n, v in cheap.update.items()})
    budget = Budget(iterations=20)
    found = reconstruct([cheap, noise, other], "best", budget=budget, device="cpu")
    first, second, third = found
    assert isinstance(first, Reconstruction) and isinstance(third, Reconstruction)
    assert isinstance(second, Reconstruction) and second.method != "patch-span"
    for result, image, others in (
        (first, small, small.flip(3)),
        (third, small.flip(3), small),
    ):
        assert result.method == "patch-span"
        own, foreign = (scores(result.images, each)[0].psnr for each in (image, others))
        assert own > foreign + 3


def test_a_norm_that_keeps_no_statistics_is_passed_over(cheap: Any) -> None:
    case = open_case(cheap, tier="oblivious", max_images=1, unroll=16)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    known = OwnStatistics.of(problem)
    assert known is not None
    read = [PatchSpan().entered(case, ReadingBudget())]
    run = Run(iterations=4)
    whole = PatchSpan().inverted(problem, run, read)
    with pytest.MonkeyPatch.context() as patch:
        fewer = OwnStatistics(dict(list(known.layers.items())[1:]), known.known)
        patch.setattr(OwnStatistics, "of", lambda _: fewer)
        without = PatchSpan().inverted(problem, run, read)
    assert not torch.equal(whole.images, without.images)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["convnet64", "vgg16"])
def test_wide_layers_are_read(picture: Tensor, model: str) -> None:
    torch.manual_seed(1)
    seen = one_step(picture, torch.tensor([3]), activation="relu", model=model)
    case = open_case(seen, tier="oblivious", max_images=1, unroll=16)
    read = activations.read_activations(case)
    state = case.target_model.captured(case.observation)
    inputs = case.target_model.normalise(picture)
    true, _ = activations.entering(case.target_model, state, inputs, read.layer.name)
    assert true.numel() > 7168 and float(read.distance(true[0].double())) < 1e-6


@pytest.mark.parametrize("centred", [True, False])
def test_the_form_and_its_null_space_are_those_of_a_matrix(centred: bool) -> None:
    torch.manual_seed(0)
    maps = torch.rand(1, 8, 6, 6, dtype=torch.float64)
    layer = layer_of(maps, nn.Conv2d(8, 32, 3, stride=2, padding=1))
    patches = layer.unfolded(maps[0]).flatten(1)
    held = patches - patches.mean(dim=0) if centred else patches
    basis = torch.linalg.svd(held)[2][: layer.positions - centred]
    form = activations.OutsideSpan(layer, basis, centred=centred)
    matrix = torch.stack([form(unit) for unit in torch.eye(8 * 36, dtype=torch.float64)])
    assert torch.allclose(matrix, matrix.T, atol=1e-12)

    weights = layer.folded(torch.ones(layer.positions, 8, 9, dtype=torch.float64)).sqrt()
    other = torch.randn(8, 6, 6, dtype=torch.float64)
    other -= other.mean(dim=(1, 2), keepdim=True)
    own = layer.unfolded(other).flatten(1)
    own = own - own.mean(dim=0) if centred else own
    outside = (own - own @ basis.T @ basis).square().sum()
    held_off = (form.constants * weights).flatten(1)
    weighted = (other * weights).flatten()
    beside = (torch.linalg.qr(held_off.T)[0].T @ weighted).square().sum() if centred else 0.0
    assert torch.isclose(weighted @ matrix @ weighted, outside + beside)

    values, vectors = torch.linalg.eigh(matrix)
    assert values[0].abs() < 1e-12 and values[-1] < 1 + 1e-12
    count = int((values < 1e-10).sum())
    found = form.null_space(1)
    exact = vectors[:, :count].T / weights.flatten()
    assert len(found) == count
    spans = [torch.linalg.qr(each.T)[0] for each in (found, exact)]
    assert torch.linalg.svdvals(spans[0].T @ spans[1]).min() > 1 - 1e-9


def test_maps_of_several_images_are_in_the_space_and_others_are_not() -> None:
    torch.manual_seed(0)
    maps = torch.rand(3, 8, 6, 6, dtype=torch.float64).sub(0.4).relu()
    conv, norm = nn.Conv2d(8, 32, 3, stride=2, padding=1).double(), nn.BatchNorm2d(32).double()
    layer = Convolution("conv", (8, 6, 6), 9, (3, 3), (2, 2), (1, 1), taken=1)
    behind = torch.randn(3, 32, 3, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((norm(conv(maps)).relu() * behind).sum(), [conv.weight])
    read = activations.solved(layer, gradient, 3)
    assert all(float(read.distance(each)) < 1e-9 for each in (*maps, maps[0] - 2.0 * maps[1]))
    assert float(read.distance(maps[0].flip(2))) > 0.05
    with refused("attack-unsolved", "determine"):
        activations.solved(layer, gradient, 2)


@pytest.mark.slow
def test_a_batch_through_a_deep_network_is_told_apart(picture: Tensor) -> None:
    torch.manual_seed(5)
    both = torch.cat([picture, picture.flip(3) ** 2])
    seen = one_step(both, torch.tensor([3, 4]), activation="relu", model="resnet18")
    case = open_case(seen, tier="oblivious", max_images=2, unroll=16)
    read = activations.read_activations(case)
    state = case.target_model.captured(case.observation)
    inputs = case.target_model.normalise(both)
    true, _ = activations.entering(case.target_model, state, inputs, read.layer.name)
    assert all(float(read.distance(maps.double())) < 1e-5 for maps in true)
    found = attack("patch-span")(seen, budget=Budget(iterations=120, max_images=2))
    flat = scores(both.mean(dim=(1, 2, 3), keepdim=True).expand_as(both), both)
    made = scores(found.images, both)
    assert all(one.psnr > mean.psnr for one, mean in zip(made, flat, strict=True))


def test_models_without_such_a_layer_are_refused(picture: Tensor) -> None:
    with refused("attack-unsuited", "patch-span"):
        attack("patch-span")(one_step(picture, torch.tensor([3]), activation="relu"))


def test_statistics_before_the_layer_are_those_of_hooks(seen: Any, picture: Tensor) -> None:
    case = open_case(seen, tier="oblivious", max_images=1, unroll=16)
    model = case.target_model
    state = model.captured(case.observation)
    inputs = model.normalise(picture)
    _, before = activations.entering(model, state, inputs, "stages.2.0.conv1")
    every = model.batch_statistics(
        {n: v[None] for n, v in state.items() if n in model.parameter_names}, {}, inputs[None]
    )
    assert list(before) == list(every)[: len(before)] and len(before) == 13
    for name, values in before.items():
        for value, wanted in zip(values, every[name], strict=True):
            assert torch.allclose(value, wanted[0], atol=1e-5)


def test_layers_of_the_model_that_qualify(seen: Any) -> None:
    case = open_case(seen, tier="oblivious", max_images=1, unroll=16)
    layers = convolutions(case)
    assert layers[0].name == "stages.2.0.conv1"
    assert all(layer.positions == 64 for layer in layers)
    assert layers[0].entering == (32, 16, 16) and layers[0].stride == (2, 2)


def test_a_dimension_lost_elsewhere_than_by_a_normalisation_is_not_left_out() -> None:
    """Padding on one side alone, and one dead unit: filtered maps would fit what is left."""
    torch.manual_seed(0)
    maps = torch.rand(1, 8, 8, 8, dtype=torch.float64).sub(0.4).relu()
    conv = nn.Conv2d(8, 16, 3, stride=2, padding=1).double()
    layer = Convolution("conv", (8, 8, 8), 16, (3, 3), (2, 2), (1, 1))
    behind = torch.randn(16, 4, 4, dtype=torch.float64)
    behind[0] = 0.0
    (gradient,) = torch.autograd.grad((conv(maps)[0] * behind).sum(), [conv.weight])
    with refused("attack-unsolved", "determine"):
        activations.solved(layer, gradient)


def test_an_image_of_a_faint_gradient_is_not_left_out_of_a_batch() -> None:
    torch.manual_seed(0)
    maps = torch.rand(2, 8, 3, 3).sub(0.4).relu().double()
    conv = nn.Conv2d(8, 20, 3, padding=1).double()
    layer = Convolution("conv", (8, 3, 3), 9, (3, 3), (1, 1), (1, 1))
    behind = torch.randn(2, 20, 3, 3, dtype=torch.float64)
    behind[1] *= 1e-4
    (gradient,) = torch.autograd.grad((conv(maps) * behind).sum(), [conv.weight])
    with refused("attack-unsolved", 1, 2):
        activations.solved(layer, gradient.float().double(), 2)


@pytest.mark.parametrize("images", [12, pytest.param(32, marks=pytest.mark.slow)])
def test_many_images_are_sought_at_once(images: int) -> None:
    torch.manual_seed(0)
    maps = torch.rand(images, images, 4, 4).sub(0.4).relu().double()
    conv = nn.Conv2d(images, 5 * images, 3, stride=2, padding=1).double()
    layer = Convolution("conv", (images, 4, 4), 4, (3, 3), (2, 2), (1, 1))
    behind = torch.randn(images, 5 * images, 2, 2, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((conv(maps) * behind).sum(), [conv.weight])
    read = activations.solved(layer, gradient, images)
    assert all(float(read.distance(each)) < 1e-9 for each in maps)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    layer = Convolution("conv", (3, 4, 4), 16, (3, 3), (1, 1), (1, 1))
    with refused("attack-evidence", "finite"):
        activations.solved(layer, torch.full((16, 3, 3, 3), float("nan"), dtype=torch.float64))


class Net(nn.Module):
    """Convolutions with and without a normalisation behind them, used once and otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.batch, self.images = (nn.Conv2d(c, 80, 3, padding=1) for c in (1, 80, 80))
        self.between, self.named, self.merged, self.first, self.second = (
            nn.Conv2d(80, 80, 3, padding=1) for _ in range(5)
        )
        self.second.weight = self.first.weight
        self.by_batch, self.after = nn.BatchNorm2d(80), nn.BatchNorm2d(80)
        self.by_image = nn.InstanceNorm2d(80)
        self.head = nn.Linear(80 * 16, 3)

    def forward(self, images: Tensor) -> Tensor:
        maps = F.relu(self.plain(images), inplace=True)
        maps = F.relu(self.by_batch(self.batch(maps)))
        maps = F.relu(self.by_image(self.images(maps)))
        maps = self.after(F.relu(self.between(maps)))
        maps = self.named(input=maps)
        maps = self.merged(maps[:1].expand(2 * len(maps), -1, -1, -1))[: len(maps)] + maps
        maps = self.second(F.relu(self.first(maps)))
        logits: Tensor = self.head(maps.flatten(1))
        return logits


@pytest.mark.parametrize("images", [1, 5])
def test_whether_a_normalisation_follows_is_asked_layer_by_layer(images: int) -> None:
    torch.manual_seed(0)
    net = Net()
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    target = SimpleNamespace(
        model=net, captured=lambda _: state, buffer_names=tuple(buffers), image_shape=(1, 4, 4)
    )
    case: Any = SimpleNamespace(target_model=target, observation=None, images=images)
    found = {layer.name: layer.taken for layer in convolutions(case)}
    assert found == {"plain": 0, "batch": 1, "images": images, "between": 0, "named": 0}
    assert not any(p.grad is not None for p in net.parameters())
    assert all(torch.equal(state[name], value) for name, value in buffers.items())


def test_each_images_own_normalisation_takes_a_dimension_an_image() -> None:
    torch.manual_seed(0)
    maps = torch.rand(2, 8, 6, 6, dtype=torch.float64).sub(0.4).relu()
    conv, norm = nn.Conv2d(8, 32, 3, stride=2, padding=1).double(), nn.InstanceNorm2d(32).double()
    layer = Convolution("conv", (8, 6, 6), 9, (3, 3), (2, 2), (1, 1), taken=2)
    behind = torch.randn(2, 32, 3, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((norm(conv(maps)).relu() * behind).sum(), [conv.weight])
    read = activations.solved(layer, gradient, 2)
    assert all(float(read.distance(each)) < 1e-9 for each in maps)
    assert float(read.distance(maps[0].flip(2))) > 0.05
