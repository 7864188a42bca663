"""R-GAP: a single image by linear equations, layer by layer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from observing import one_step
from refusals import refused
from torch import Tensor, nn

from bract.attacks import Budget, Engine, Reconstruction, Refusal, reconstruct
from bract.attacks.methods.portfolio.best import Best
from bract.attacks.methods.r_gap.activations import ACTIVATIONS
from bract.attacks.methods.r_gap.chain import chain_of
from bract.attacks.methods.r_gap.least_squares import conjugate_gradients
from bract.attacks.methods.r_gap.r_gap import RGAP
from bract.models import MODELS, create_model
from bract.models.initialise import initialise
from bract.scores import psnr
from experiments.harness.images import image_set


def decibels(found: Tensor, original: Tensor) -> float:
    return float(psnr(found, original)[0])


@pytest.fixture
def seen_by(observe: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make observations of a network that is registered as ``test-chain``."""

    def make(network: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> Any:
        monkeypatch.setitem(MODELS._entries, "test-chain", lambda **_: network)
        seen = observe(images, labels, model=network, **settings)
        declared = seen.declaration.updated({"model": "test-chain", "activation": "relu"})
        return replace(seen, declaration=declared)

    return make


def lenet(activation: nn.Module, *, channels: int = 1, size: int = 16, seed: int = 0) -> Any:
    made: Any = create_model(
        "lenet-strided", classes=10, channels=channels, image_size=size, activation="relu"
    )
    for name, module in list(made.features.named_children()):
        if isinstance(module, nn.ReLU):
            setattr(made.features, name, activation)
    return initialise(made, "default", seed)


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(), nn.LeakyReLU(0.2), nn.Sigmoid(), nn.Tanh(), nn.ELU(), nn.Softplus()],
    ids=lambda one: type(one).__name__,
)
def test_one_digit_is_exact_behind_every_activation(
    seen_by: Any, tiny: Any, activation: Any
) -> None:
    images, labels = tiny[0][3:4], tiny[1][3:4]
    found = RGAP()(seen_by(lenet(activation, size=8), images, labels))
    assert decibels(found.images, images) > 80
    assert found.final_loss < 1e-10
    assert found.labels.tolist() == labels.tolist()
    assert {"closed form", "layer by layer"} <= set(found.components)


def test_a_colour_image_is_exact_where_no_activation_hides(seen_by: Any) -> None:
    images = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = RGAP()(seen_by(lenet(nn.Tanh(), channels=3, size=8), images, torch.tensor([4])))
    assert decibels(found.images, images) > 60


@pytest.mark.slow
def test_gaps_that_zeros_leave_are_filled_by_what_was_cut_off(seen_by: Any) -> None:
    photo = image_set("photos", 2, "choose").images[1:2].float()
    network = lenet(nn.ReLU(), channels=3, size=32, seed=1001)
    found = RGAP()(seen_by(network, photo, torch.tensor([1])))
    assert any("bounds and total variation" in part for part in found.components)
    assert decibels(found.images, photo) > 40


def test_fixed_normalisation_and_average_pooling_belong_to_the_affine_maps(seen_by: Any) -> None:
    torch.manual_seed(0)
    network: Any = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2, stride=2),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.3),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.Conv2d(24, 24, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.AvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24 * 2 * 2, 10),
    ).eval()
    network[1].running_mean.uniform_(-0.1, 0.1)
    network[1].running_var.uniform_(0.5, 2.0)
    images = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = seen_by(network, images, torch.tensor([4]), norm_mode="eval")
    assert decibels(RGAP()(seen).images, images) > 60


def test_a_forward_of_functions_is_traced_like_one_of_modules(seen_by: Any) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Conv2d(1, 12, 5, padding=2, stride=2)
            self.last = nn.Linear(12 * 4 * 4, 10)

        def forward(self, images: Tensor) -> Tensor:
            hidden = torch.nn.functional.leaky_relu(self.first(2.0 * images - 1.0), 0.1)
            logits: Tensor = self.last(hidden.reshape(len(images), -1))
            return logits

    images = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = RGAP()(seen_by(Functional(), images, torch.tensor([4])))
    assert decibels(found.images, images) > 60


class Between(nn.Module):
    """Two convolutions and a linear layer, and what a test puts between them."""

    def __init__(self, forward: Any, *, bias: bool = True, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 16, 5, padding=2, stride=2, bias=bias)
        self.second = nn.Conv2d(16, 16, 3, padding=1, bias=bias)
        self.last = nn.Linear(16 * 4 * 4, 10)
        for name, value in more.items():
            setattr(self, name, value)
        self.between = forward

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.between(self, images)
        return logits


def plain(self: Any, images: Tensor) -> Tensor:
    hidden = torch.tanh(self.second(torch.tanh(self.first(images))))
    logits: Tensor = self.last(hidden.flatten(1))
    return logits


def in_place(self: Any, images: Tensor) -> Tensor:
    hidden = nn.functional.leaky_relu(self.first(images), 0.2)
    hidden *= 2.0
    hidden += 1.0
    logits: Tensor = self.last(self.second(hidden).tanh_().flatten(1))
    return logits


def twice(self: Any, images: Tensor) -> Tensor:
    hidden = torch.tanh(self.second(torch.tanh(self.first(images))))
    logits: Tensor = self.last(torch.tanh(self.second(hidden)).flatten(1))
    return logits


def scaled(self: Any, images: Tensor) -> Tensor:
    logits: Tensor = plain(self, images * self.scale)
    return logits


COLOURED = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
NOISY = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "network",
    [
        Between(plain, bias=False),
        Between(in_place),
        Between(scaled, scale=nn.Parameter(torch.tensor(1.5))),
    ],
    ids=["layers-without-bias", "in-place-arithmetic", "a-parameter-without-dimensions"],
)
def test_strangers_forwards_are_read(seen_by: Any, network: nn.Module) -> None:
    found = Best()(seen_by(network, NOISY, torch.tensor([4])))
    assert found.method == "r-gap"
    assert decibels(found.images, NOISY) > 60


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Between(twice, bias=False), "second.weight"),
        (
            Between(lambda self, images: torch.relu(plain(self, images))),
            "(relu)",
        ),
    ],
    ids=["tied-weights", "activation-last"],
)
def test_strangers_models_that_are_no_chains_are_refused(
    seen_by: Any, network: nn.Module, reason: str
) -> None:
    seen = seen_by(network, NOISY, torch.tensor([4]))
    with refused("attack-unsuited", reason):
        RGAP()(seen)
    assert Best()(seen, budget=Budget(iterations=2)).method != "r-gap"


def test_tracing_leaves_the_captured_buffers_alone() -> None:
    def counting(self: Any, images: Tensor) -> Tensor:
        self.calls += 1.0
        return plain(self, images * self.calls)

    network: Any = Between(counting)
    network.register_buffer("calls", torch.zeros(1))
    network.double()
    state = {name: value.detach().clone() for name, value in network.state_dict().items()}
    chain = chain_of(network, state, (1, 8, 8))
    chain.blocks[0](NOISY.double(), state)
    assert float(state["calls"]) == 0.0


@pytest.mark.parametrize("attack", ["r-gap", "best", "auto"])
def test_a_gradient_that_was_clipped_is_read_alike(seen_by: Any, attack: str) -> None:
    seen = seen_by(Between(plain), NOISY, torch.tensor([4]))
    clipped = replace(seen, update={name: 0.01 * value for name, value in seen.update.items()})
    (found,) = reconstruct(clipped, attack, budget=Budget(iterations=2), device="cpu")
    assert isinstance(found, Reconstruction) and found.method == "r-gap"
    assert decibels(found.images, NOISY) > 60
    assert found.final_loss < 1e-10


def test_a_recursion_whose_time_is_over_refuses(seen_by: Any, ticking: None) -> None:
    seen = seen_by(Between(plain), NOISY, torch.tensor([4]))
    with refused("budget-spent", "client-0", "budget.seconds"):
        RGAP()(seen, budget=Budget(seconds=20))
    assert decibels(RGAP()(seen, budget=Budget(seconds=1e6)).images, NOISY) > 60


def test_best_searches_where_the_recursion_breaks_off(
    seen_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("linalg.cholesky: not positive-definite")

    monkeypatch.setattr("bract.attacks.methods.r_gap.r_gap.recurse", broken)
    seen = seen_by(Between(plain), NOISY, torch.tensor([4]))
    assert Best()(seen, budget=Budget(iterations=2)).method != "r-gap"


def test_too_many_equations_to_factorise_are_refused(
    seen_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How far steps of conjugate gradients come depends on the processor's arithmetic: none here.
    monkeypatch.setattr("bract.attacks.methods.r_gap.block_equations.STEPS", 0)
    monkeypatch.setattr("bract.attacks.methods.r_gap.block_equations.MOST_ENTRIES", 1 << 14)
    seen = seen_by(lenet(nn.ReLU(), channels=3, seed=1001), COLOURED, torch.tensor([1]))
    with refused("attack-unsolved", "factorise"):
        RGAP()(seen)


def test_one_local_step_is_as_good_as_a_gradient(seen_by: Any, tiny: Any) -> None:
    images, labels = tiny[0][3:4], tiny[1][3:4]
    found = RGAP()(seen_by(lenet(nn.LeakyReLU(0.2), size=8), images, labels, steps=1, lr=0.5))
    assert decibels(found.images, images) > 50


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("lenet", "max_pool2d"),
        ("resnet20", "a path leads around the activation"),
    ],
)
def test_other_models_are_refused_with_what_they_have(model: Any, reason: str) -> None:
    images = torch.rand(1, 1, 32, 32)
    with refused("attack-unsuited", reason):
        RGAP()(one_step(images, torch.tensor([1]), model=model))


def test_batches_steps_and_models_without_a_last_bias_are_refused(
    seen_by: Any, digits: Any
) -> None:
    network = lenet(nn.ReLU())
    with refused("attack-unsuited", 2):
        RGAP()(seen_by(network, digits[0][:2], digits[1][:2]), budget=Budget(max_images=2))
    with refused("attack-unsuited", "SGD"):
        RGAP()(seen_by(network, digits[0][:1], digits[1][:1], steps=2, batch_size=1))
    network.classifier[1] = nn.Linear(192, 10, bias=False)
    with refused("attack-unsuited", "bias"):
        RGAP()(seen_by(network, digits[0][:1], digits[1][:1]))


def test_an_update_of_something_else_is_refused_by_its_biases(seen_by: Any, digits: Any) -> None:
    seen = seen_by(lenet(nn.ReLU()), digits[0][3:4], digits[1][3:4])
    generator = torch.Generator().manual_seed(0)
    noisy = {
        n: v + 0.3 * v.std() * torch.randn(v.shape, generator=generator) if v.numel() > 1 else v
        for n, v in seen.update.items()
    }
    with refused("attack-unsolved"):
        RGAP()(replace(seen, update=noisy))


def test_best_reads_off_what_can_be_read_and_searches_the_rest(seen_by: Any, tiny: Any) -> None:
    network = lenet(nn.ReLU(), size=8)
    single = seen_by(network, tiny[0][3:4], tiny[1][3:4])
    scaled = replace(single, client="other", update={n: v * 1.5 for n, v in single.update.items()})
    broken = dict(scaled.update)
    broken["features.0.bias"] = -broken["features.0.bias"]
    results = reconstruct(
        [replace(scaled, update=broken), single], "best", budget=Budget(iterations=5), device="cpu"
    )
    first, second = results
    assert isinstance(first, Reconstruction) and isinstance(second, Reconstruction)
    assert (first.method, second.method) == ("grnn", "r-gap")
    assert decibels(second.images, tiny[0][3:4]) > 80
    without = Best(closed_forms=False)(single, budget=Budget(iterations=5))
    assert without.method == "grnn"


def test_auto_is_done_with_it(seen_by: Any, tiny: Any) -> None:
    single = seen_by(lenet(nn.ReLU(), size=8), tiny[0][3:4], tiny[1][3:4])
    fractions: list[float] = []
    engine = Engine(progress=lambda progress: fractions.append(progress.fraction))
    (found,) = reconstruct(single, "auto", budget=Budget(iterations=50), engine=engine)
    assert fractions[-1] == 1.0
    assert not isinstance(found, Refusal)
    assert [trial.attack for trial in found.trials] == ["r-gap"]


def test_auto_spends_nothing_where_best_would_keep_what_was_read_off(seen_by: Any) -> None:
    seen = seen_by(lenet(nn.ReLU(), channels=3, size=16, seed=0), COLOURED, torch.tensor([4]))
    rounded = {name: value.half().float() for name, value in seen.update.items()}
    (found,) = reconstruct(replace(seen, update=rounded), "auto", budget=Budget(iterations=2))
    assert isinstance(found, Reconstruction)
    assert found.trials[0].residual is not None and found.trials[0].residual > 1e-5
    assert [trial.attack for trial in found.trials] == ["r-gap"]


def test_restarts_share_one_result(seen_by: Any, tiny: Any) -> None:
    seen = seen_by(lenet(nn.ReLU(), size=8), tiny[0][3:4], tiny[1][3:4])
    (found,) = reconstruct(seen, "r-gap", budget=Budget(restarts=2), device="cpu")
    assert isinstance(found, Reconstruction) and len(found.trials) == 2
    assert torch.equal(found.trials[0].images, found.trials[1].images)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_inverses_and_slopes_are_those_of_the_function(name: str) -> None:
    activation = ACTIVATIONS[name]()
    arguments = torch.linspace(-3, 3, 13, dtype=torch.float64)
    if activation.floor:
        arguments = arguments[arguments > 0]
    point = arguments.clone().requires_grad_()
    values = activation.forward(point)
    (slopes,) = torch.autograd.grad(values.sum(), point)
    assert torch.allclose(activation.inverse(values.detach()), arguments, atol=1e-6)
    assert torch.allclose(activation.slope(values.detach()), slopes, atol=1e-9)


def test_a_chain_computes_what_the_model_does() -> None:
    network = lenet(nn.LeakyReLU(0.2)).double()
    state = {name: value.detach() for name, value in network.named_parameters()}
    chain = chain_of(network, state, (1, 16, 16))
    images = torch.rand(1, 1, 16, 16, dtype=torch.float64)
    values = images
    for block in chain.blocks:
        values = block(values, state)
        values = block.activation.forward(values) if block.activation else values
    assert torch.allclose(values, network(images))
    assert [block.name for block in chain.blocks] == [
        *("features.0.weight", "features.2.weight", "features.4.weight"),
        "classifier.1.weight",
    ]


@pytest.mark.parametrize("bad", [0, -4096, 2.5, True, "many", None])
@pytest.mark.parametrize("kind", [RGAP, Best])
def test_a_bad_max_unknowns_is_refused_in_one_line(kind: Any, bad: Any) -> None:
    with refused("config-value", "max_unknowns") as caught:
        kind(max_unknowns=bad)
    assert "\n" not in str(caught.value)


def test_fewer_equations_than_unknowns_are_refused_without_a_search(
    seen_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    def counted(rows: Any, right: Any, start: Tensor, **settings: Any) -> Any:
        searched.append(start.numel())
        return conjugate_gradients(rows, right, start, **settings)

    module = "bract.attacks.methods.r_gap.block_equations"
    monkeypatch.setattr(f"{module}.conjugate_gradients", counted)
    photo = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    seen = seen_by(lenet(nn.ReLU(), channels=3, size=64), photo, torch.tensor([1]))
    with refused("attack-unsolved", "max_unknowns"):
        RGAP(max_unknowns=64)(seen)
    # The last layer's input of 12 x 16 x 16, and its gap; of the convolution before it, whose
    # outputs a ReLU cut off by half, nothing is searched.
    assert searched == [3072, 3072]


def test_errors_are_estimated_from_where_the_recursion_arrived(
    seen_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three recursions from gradients that other roundings moved, each sooner at its image."""
    steps: list[int] = []
    module = "bract.attacks.methods.r_gap.block_equations"

    def counted(*arguments: Any, **settings: Any) -> Any:
        found = conjugate_gradients(*arguments, **settings)
        steps.append(found.steps)
        return found

    photo = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = seen_by(lenet(nn.Sigmoid(), channels=3, size=16), photo, torch.tensor([1]))
    monkeypatch.setattr(f"{module}.conjugate_gradients", counted)
    found = RGAP()(seen).certificate
    assert len(steps) == 4 * 4
    assert sum(steps[4:]) < 3 * 0.75 * sum(steps[:4])

    def anew(rows: Any, right: Any, start: Tensor, **settings: Any) -> Any:
        return conjugate_gradients(rows, right, 0.0 * start, **settings | {"shrunk": 0.0})

    monkeypatch.setattr(f"{module}.conjugate_gradients", anew)
    slow = RGAP()(seen).certificate
    assert found is not None and slow is not None
    assert found.error == pytest.approx(slow.error, rel=0.05)
