"""Per-example privacy: clipped per-example gradients, Opacus' epsilon, and what is refused."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from encrypted_runs import small, small_grid, train
from refusals import refused
from torch import nn

from bract import ObservationStore
from bract.client.accounting import Mechanism, total_epsilon
from bract.client.private_training import check_layers, private_mechanism, train_privately
from bract.client.training import train_locally
from bract.config import build_config
from bract.config.config import TrainingConfig
from bract.crypto import SecretStream
from bract.data.spec import DataSpec
from bract.data.views import data_spec
from bract.errors import BractError, RunFailedError
from bract.models import create_model

pytest.importorskip("opacus")

PRIVATE = {"noise_multiplier": 1.0, "max_grad_norm": 0.5}
STREAM = 2**70


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def training(**changes: Any) -> TrainingConfig:
    section = {"private": PRIVATE, "batch_size": 4, "local_steps": 1, "lr": 0.1, **changes}
    return build_config({"training": section}).training


def spec() -> DataSpec:
    return data_spec(build_config({"data": {"image_size": 8}}).data)


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(108, 10))


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def data(count: int = 12) -> Any:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 1, 8, 8, generator=generator)
    return images, torch.arange(count) % 10


def private(model: nn.Module, config: TrainingConfig, mechanism: Mechanism, **options: Any) -> Any:
    images, labels = data()
    return train_privately(
        model,
        images,
        labels,
        config=config,
        spec=spec(),
        device=torch.device("cpu"),
        mechanism=mechanism,
        stream=SecretStream.derived(STREAM, "test"),
        **options,
    )


def clipped_sum(model: nn.Module, images: Any, labels: Any, bound: float) -> list[torch.Tensor]:
    """Slow reference: one backward pass an example."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for image, label in zip(images, labels, strict=True):
        loss = nn.functional.cross_entropy(model(spec().normalise(image[None])), label[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        factor = min(1.0, bound / (norm + 1e-6))
        total = [t + factor * g for t, g in zip(total, gradients, strict=True)]
    return total


@pytest.mark.parametrize("build", [conv, dense])
@pytest.mark.parametrize("bound", [0.05, 50.0])
def test_a_step_is_the_sum_of_gradients_clipped_one_by_one(build: Any, bound: float) -> None:
    section = {"noise_multiplier": 1e-9, "max_grad_norm": bound}
    config = training(private=section, algorithm="fedsgd", local_steps=None, batch_size=12)
    result = private(build(), config, Mechanism("sampled", 1e-9, 1.0, 1))
    images, labels = data()
    wanted = clipped_sum(build(), images, labels, bound)
    for found, total in zip(result.update.values(), wanted, strict=True):
        assert torch.allclose(found, total / 12, atol=1e-6)


def test_without_clipping_and_noise_it_is_plain_training() -> None:
    images, labels = data()
    section = {"noise_multiplier": 1e-9, "max_grad_norm": 1e4}
    config = training(private=section, batch_size=12, local_steps=5)
    found = private(conv(), config, Mechanism("sampled", 1e-9, 1.0, 5), proximal_mu=0.3)
    wanted = train_locally(
        conv(),
        images,
        labels,
        config=config,
        spec=spec(),
        seed=1,
        device=torch.device("cpu"),
        proximal_mu=0.3,
    )
    for name, value in wanted.update.items():
        assert torch.allclose(found.update[name], value, atol=2e-4)


def test_the_noise_has_the_deviation_that_is_accounted_for() -> None:
    config = training(local_steps=None, algorithm="fedsgd", batch_size=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 400))
    model = nn.Sequential(model, nn.Linear(400, 10))
    # Of an empty sample noise is all there is.
    result = private(model, config, Mechanism("sampled", 3.0, 1e-12, 1))
    values = torch.cat([value.flatten() for value in result.update.values()])
    assert not result.used
    assert result.num_examples == 12
    wanted = 3.0 * 0.5 / 4
    assert float(values.std()) == pytest.approx(wanted, rel=6 / math.sqrt(2 * len(values)))
    assert abs(float(values.mean())) < 6 * wanted / math.sqrt(len(values))


def test_every_example_is_drawn_with_the_same_probability_by_itself() -> None:
    from bract.client.private_training import _samples

    rate, count, steps = 0.25, 40, 2000
    stream = SecretStream.derived(STREAM, "samples")
    drawn = torch.zeros(steps, count)
    for step, batch in enumerate(_samples(count, Mechanism("sampled", 1.0, rate, steps), stream)):
        drawn[step, batch] = 1.0
    spread = math.sqrt(rate * (1 - rate) / steps)
    assert float((drawn.mean(0) - rate).abs().max()) < 5 * spread
    # The size of a sample is binomial, which no fixed batch has.
    assert float(drawn.sum(1).var()) == pytest.approx(count * rate * (1 - rate), rel=0.15)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_is_opacus_own_for_the_same_schedule(accountant: Any) -> None:
    from opacus.accountants import create_accountant

    spent = total_epsilon({Mechanism("sampled", 1.1, 0.05, 20, accountant): 7}, 1e-5)
    theirs = create_accountant(accountant)
    for _ in range(140):
        theirs.step(noise_multiplier=1.1, sample_rate=0.05)
    assert spent == theirs.get_epsilon(1e-5)


def test_a_configured_epsilon_is_what_the_whole_run_spends() -> None:
    config = build_config({"rounds": 6, "training": {"batch_size": 8, "private": {"epsilon": 3.0}}})
    mechanism = private_mechanism(config, 400)
    assert mechanism is not None
    assert (mechanism.rate, mechanism.steps) == (0.02, 50)
    assert 2.98 < total_epsilon({mechanism: 6}, 1e-5) <= 3.0
    assert total_epsilon({mechanism: 7}, 1e-5) > 3.0


def test_a_mechanism_reads_back_the_same_and_composes_with_noise_on_updates() -> None:
    sampled = Mechanism("sampled", 1.1, 0.05, 20, "prv")
    assert Mechanism.from_text(sampled.to_text()) == sampled
    both = {sampled: 3, Mechanism("gaussian", 10.0): 2, Mechanism("laplace", 4.0): 1}
    assert total_epsilon(both, 1e-5) > total_epsilon({sampled: 3}, 1e-5)
    for text in ("sampled:1.0", "sampled:1.0:2.0:3:rdp", "gaussian:1.0:0.5:1:rdp"):
        with pytest.raises(ValueError, match=r"mechanism|unpack"):
            Mechanism.from_text(text)


def test_batch_normalisation_is_refused_with_its_name_and_replacement() -> None:
    model = create_model("resnet20", classes=10, channels=3, image_size=32).train()
    with pytest.raises(BractError) as caught:
        check_layers(model)
    text = str(caught.value)
    assert "BatchNorm2d): replace it by GroupNorm(" in text
    assert "more layers" in text
    check_layers(conv().train())


@pytest.mark.parametrize(
    ("section", "found"),
    [
        (
            {"max_grad_norm": 0.0, "epsilon": 3},
            ("config-value", "training.private.max_grad_norm", "0.0"),
        ),
        ({"epsilon": 3, "noise_multiplier": 1}, ("config-value", "epsilon", "noise_multiplier")),
        ({}, ("config-value", "noise_multiplier")),
        # Its batches round as the other examples make them, and a server chooses the option.
        (
            {"epsilon": 3, "clipping": "ghost"},
            ("config-value", "training.private.clipping", "ghost"),
        ),
        (
            {"epsilon": 3, "accountant": "gdp"},
            ("config-value", "training.private.accountant", "gdp"),
        ),
    ],
)
def test_wrong_settings(section: Any, found: tuple[str, ...]) -> None:
    with refused(*found):
        build_config({"training": {"private": section}})


def test_it_is_no_defense_after_training_and_covers_no_scores() -> None:
    with refused("config-value", "training", "private"):
        build_config({"defenses": [{"name": "per-example", "noise_multiplier": 1.0}]})
    with refused("config-value", "fedboosting"):
        build_config({"training": {"private": PRIVATE}, "strategy": {"name": "fedboosting"}})


def federation(folder: Path, policy: str = "", **changes: Any) -> Any:
    section = {"lr": 0.1, "batch_size": 8, "private": {"epsilon": 8.0}, **changes}
    config = small(training=section, rounds=2)
    grid = small_grid(folder, config)
    if policy:
        (folder / "policy.yaml").write_text(policy)
        grid.contexts[1].node_config["policy"] = str(folder / "policy.yaml")
    return train(folder, config, grid)


@pytest.mark.thorough
def test_a_federation_trains_privately_and_each_site_counts_what_it_spent(tmp_path: Path) -> None:
    run = federation(tmp_path)
    first, second = (row.clients for row in run.metrics()[1:])
    for name, row in second.items():
        assert 7.9 < row.other["epsilon_spent"] <= 8.0
        assert first[name].other["epsilon_spent"] < row.other["epsilon_spent"]
        assert row.train_loss is None
    assert {c: row.num_examples for c, row in second.items()} == {
        "client-0": 60,
        "client-1": 30,
        "client-2": 10,
    }
    for observation in ObservationStore(run.captures):
        (entry,) = observation.declaration.defenses
        assert entry["name"] == "per-example"
        assert entry["noise_multiplier"] > 0.5
        assert not observation.provenance["flags"]


def test_a_site_holds_a_run_to_its_largest_epsilon(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with refused("run-failed", "max_epsilon", 4, 8):
        federation(tmp_path / "a", "max_epsilon: 4.0")
    (tmp_path / "b").mkdir()
    section = {"noise_multiplier": 0.8}
    with refused("run-failed", "client-0"):
        federation(tmp_path / "b", "max_epsilon: 2.0", private=section)


@pytest.mark.thorough
def test_a_restarted_client_goes_on_with_what_it_spent(tmp_path: Path) -> None:
    config = small(training={"private": {"epsilon": 8.0}}, rounds=1)
    spent = []
    for number in range(2):
        grid = small_grid(tmp_path, config)
        run = train(tmp_path / str(number), config, grid)
        so_far = run.metrics()[1].clients["client-0"].other["epsilon_spent"]
        assert so_far is not None
        spent.append(so_far)
    assert spent[1] > spent[0] > 7.9


def test_the_account_of_an_audit_is_that_of_the_client() -> None:
    from bract.defenses import PerExample

    declared = PerExample(noise_multiplier=1.1, max_grad_norm=1.0)
    wanted = total_epsilon({Mechanism("sampled", 1.1, 0.05, 20): 7}, 1e-5)
    assert declared.spent(140, 0.05) == wanted


def test_noise_in_sums_is_opacus_account_of_the_sum() -> None:
    from opacus.accountants import RDPAccountant

    from bract.defenses import Noise

    noise = Noise(std=0.5, clip=1.0)
    accountant = RDPAccountant()
    accountant.history = [(0.5 * math.sqrt(16), 0.2, 30)]
    assert noise.spent_in_sums(30, 16, 0.2) == accountant.get_epsilon(1e-5)
    alone = noise.spent_in_sums(30, 16)
    own = Noise(std=0.5, clip=1.0, accountant="opacus").spent(30)
    assert alone is not None and own is not None
    assert noise.spent_in_sums(30, 16, 0.2) < alone < own  # type: ignore[operator]
    assert Noise(kind="laplace", std=0.5).spent_in_sums(30, 16) is None


def overflowing(build: Any, first: int, last: int) -> nn.Module:
    """Parameters of a server at which bright images alone have no finite gradient."""
    model: nn.Module = build()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        weight = model.get_parameter(f"{first}.weight")
        weight[0] = 2.5e38 / weight[0].numel() / 0.55
        rows = torch.linspace(-1e-30, 1e-30, 10)[:, None]
        model.get_parameter(f"{last}.weight")[:] = rows
    return model


@pytest.mark.parametrize(("build", "first", "last"), [(conv, 0, 3), (dense, 1, 3)])
def test_an_example_without_a_finite_gradient_adds_nothing(
    build: Any, first: int, last: int
) -> None:
    """One that made the update NaN would be told from no such example, whatever the noise."""

    def update(images: Any) -> Any:
        model = overflowing(build, first, last)
        if build is conv:
            model.set_submodule("1", nn.Identity())
        _, labels = data()
        return train_privately(
            model,
            images,
            labels,
            config=training(algorithm="fedsgd", local_steps=None, batch_size=12),
            spec=spec(),
            device=torch.device("cpu"),
            mechanism=Mechanism("sampled", 1.0, 1.0, 1),
            stream=SecretStream.derived(STREAM, "test"),
        ).update

    images = data()[0] * 0.5
    images[3] = 1.0
    found = update(images)
    assert all(bool(value.isfinite().all()) for value in found.values())
    nothing = update(torch.ones_like(images))
    noise = SecretStream.derived(STREAM, "test")
    noise.uniform((12,), dtype=torch.float64)
    for value in nothing.values():
        wanted = 0.5 * noise.normal(value.shape) / 12
        assert torch.allclose(value, wanted, atol=1e-6)


class Tied(nn.Module):
    """Uses a layer's weight a second time outside of the layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 10), nn.Linear(10, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = x.flatten(1)
        found: torch.Tensor = self.b(self.a(x))
        return found + 100 * nn.functional.linear(x[:, :10], self.b.weight)


def sequences() -> nn.Module:
    """Eight vectors an image enter a linear layer; what they add to its gradient cancels."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, 16), nn.Flatten(), nn.Linear(128, 10))
    with torch.no_grad():
        signs = torch.tensor([1.0, -1.0] * 4).repeat_interleave(16)
        model.get_parameter("3.weight")[:] = 1e5 * signs * torch.randn(10, 16).repeat(1, 8)
    return model


def repeated() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(64, 10))


@pytest.mark.parametrize("build", [Tied, sequences, repeated])
def test_no_example_adds_more_than_the_bound(build: Any) -> None:
    section = {"noise_multiplier": 1e-9, "max_grad_norm": 0.05}
    config = training(private=section, algorithm="fedsgd", local_steps=None, batch_size=1)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.rand(1, 1, 1, 8, generator=generator).expand(1, 1, 8, 8)
        image = rows * 0.9 + 1e-4 * torch.rand(1, 1, 8, 8, generator=generator)
        update = train_privately(
            build(),
            image,
            torch.tensor([1]),
            config=config,
            spec=spec(),
            device=torch.device("cpu"),
            mechanism=Mechanism("sampled", 1e-9, 1.0, 1),
            stream=SecretStream.derived(STREAM, "test"),
        ).update
        assert math.sqrt(sum(float(v.double().square().sum()) for v in update.values())) < 0.0501


@pytest.mark.parametrize("name", ["soteria", "censor"])
def test_defenses_that_read_the_examples_again_are_refused(name: str, tmp_path: Path) -> None:
    config = small(training={"private": PRIVATE}, defenses=[{"name": name}])
    with pytest.raises((BractError, RunFailedError), match="reads the examples again"):
        train(tmp_path, config, small_grid(tmp_path, config))
