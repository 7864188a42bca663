"""Adding one example changes the sum of a noisy step by at most `max_grad_norm`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bract.client import accounting, augmentation, private_training
from bract.client import training as plain_training
from bract.config import build_config, text
from bract.crypto import SecretStream
from bract.data import tokens
from bract.defenses import DEFENSES
from bract.errors import BractError
from bract.models import create_model, dropout, losses

pytest.importorskip("opacus")

BOUND, BATCH, COUNT = 0.5, 8, 6
CPU = torch.device("cpu")


class Functional(nn.Module):
    """Draws from torch's generator, as layers of other packages may."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden = nn.functional.dropout(self.hidden(x.flatten(1)).relu(), 0.5, self.training)
        found: Tensor = self.last(hidden + 0.1 * torch.randn(hidden.shape))
        return found


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(144, 10)
    )


def dense(outputs: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs))


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)
    )


PRECODE = DEFENSES["precode"].model_validate({"latent": 8})
MODELS: dict[str, Any] = {
    "convolution": conv,
    "dense": dense,
    "its own dropout": lambda: dropout.with_dropout(dropping(), 0.3, classes=10),
    "dropout of the training": lambda: dropout.with_dropout(dense(), 0.5, classes=10),
    "dropout of a third party": Functional,
    "bottleneck": lambda: PRECODE.prepare_model(dense()),
}


def scaled(build: Any, scale: float) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model


def training(**changes: Any) -> Any:
    private = {"noise_multiplier": 1e-9, "max_grad_norm": BOUND} | changes.pop("private", {})
    section = {"private": private, "batch_size": BATCH, "algorithm": "fedsgd", **changes}
    return build_config({"training": section}).training


def images(count: int = COUNT) -> Tensor:
    return torch.rand(COUNT, 1, 8, 8, generator=torch.Generator().manual_seed(1))[:count]


def trained(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    config: Any,
    loss: str = "cross_entropy",
    steps: int = 1,
    mu: float = 0.0,
) -> Tensor:
    spec: Any = SimpleNamespace(normalise=lambda x: x, loss=loss)
    update = private_training.train_privately(
        model,
        inputs,
        labels,
        config=config,
        spec=spec,
        device=CPU,
        # Every example in every step, and all but no noise.
        mechanism=accounting.Mechanism("sampled", 1e-9, 1.0, steps),
        stream=SecretStream.derived(2**70, "neighbours"),
        proximal_mu=mu,
    ).update
    return torch.cat([value.double().flatten() for value in update.values()])


def change(build: Any, inputs: Tensor, labels: Tensor, config: Any, **more: Any) -> Any:
    """Return by how much the last example moves the sum of a step, in units of the bound."""
    scale = more.pop("scale", 1.0)
    least = len(inputs) - more.pop("without", 1)
    config = config.model_copy(update={"batch_size": 1})  # the same divisor with and without
    one = trained(scaled(build, scale), inputs, labels, config, **more)
    other = trained(scaled(build, scale), inputs[:least], labels[:least], config, **more)
    return float((one - other).norm()) / BOUND


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize(
    "names",
    [(), *((name,) for name in augmentation.AUGMENTATIONS), tuple(augmentation.AUGMENTATIONS)],
)
@pytest.mark.parametrize("model", MODELS)
def test_one_example_moves_the_sum_of_a_step_by_the_bound(
    model: str, names: tuple[str, ...], scale: float
) -> None:
    clipping = "auto" if names else "each"
    config = training(augmentation=names, private={"clipping": clipping})
    labels = torch.arange(COUNT) % 10
    assert change(MODELS[model], images(), labels, config, scale=scale) < 1.0001


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("loss", [n for n, loss in losses.LOSSES.items() if loss.values])
def test_every_loss_keeps_to_the_bound(loss: str, scale: float) -> None:
    def build() -> nn.Module:
        return nn.Sequential(dropout.with_dropout(dense(1), 0.5, classes=1), nn.Sigmoid())

    labels = torch.arange(COUNT).float() % 2
    assert change(build, images(), labels, training(), loss=loss, scale=scale) < 1.0001


@pytest.mark.parametrize("task", ["classification", "token-classification", "language-model"])
def test_texts_keep_to_the_bound(task: Any) -> None:
    pytest.importorskip("transformers")
    tags = 3 if task == "token-classification" else 0
    schema = text.TextSchema(vocabulary=60, length=8, special=(0, 1, 2), task=task, tags=tags)
    ids = torch.randint(3, 60, (COUNT, 8), generator=torch.Generator().manual_seed(0))
    labels = ids % 3 if tags else torch.arange(COUNT) % 3
    name = "text-decoder(width=16,depth=1,heads=2)"
    names = {"classification": "cross_entropy", "token-classification": "token_cross_entropy"}

    def build() -> nn.Module:
        shape: dict[str, Any] = {"channels": 8, "image_size": 1, "activation": ""}
        found: nn.Module = create_model(name, classes=schema.outputs or 4, text=schema, **shape)
        for layer in found.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.5
        return found

    loss = names.get(task, "language_model")
    for scale in (1.0, 30.0):
        found = change(
            build, tokens.as_example(ids, schema), labels, training(), loss=loss, scale=scale
        )
        assert found < 1.0001


def test_an_example_that_overflows_moves_nothing_of_the_others() -> None:
    """Dropout of the others was drawn once more without it."""
    inputs = images().clone()
    inputs[COUNT - 1] = 3e38
    found = change(MODELS["its own dropout"], inputs, torch.arange(COUNT), training(), scale=1e4)
    assert found < 1e-6


def cancelling() -> nn.Module:
    """Makes logits of rounding alone: sums that are zero, and would round as the batch is large."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48, bias=False), nn.Linear(48, 10))
    half = torch.randn(32, generator=torch.Generator().manual_seed(2))
    rows = [torch.cat([half.roll(k), -half.roll(k)]) for k in range(48)]
    with torch.no_grad():
        model.get_parameter("1.weight")[:] = torch.stack(rows)
        model.get_parameter("2.weight").mul_(1e12)
    return model


@pytest.mark.parametrize("count", [2, 4])
def test_parameters_that_amplify_rounding_keep_to_the_bound(count: int) -> None:
    half = images(count)[:, :, :4]
    inputs = torch.cat([half, half], 2)
    assert change(cancelling, inputs, torch.arange(count), training()) < 1.0001


@pytest.mark.parametrize(
    ("changes", "mu"),
    [
        ({"optimizer": "sgd"}, 0.0),
        ({"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}, 0.7),
        ({"optimizer": "adam"}, 0.0),
        ({"optimizer": "adam", "weight_decay": 0.1}, 0.7),
    ],
)
def test_an_optimizer_sees_nothing_but_the_noisy_sum(changes: Any, mu: float) -> None:
    """It is a function of the gradient that `fedsgd` sends, of which the bound is tested above."""
    labels = torch.arange(COUNT) % 10
    build = MODELS["dropout of the training"]
    gradient = trained(scaled(build, 1.0), images(), labels, training())
    config = training(algorithm="fedavg", local_steps=1, lr=0.05, **changes)
    found = trained(scaled(build, 1.0), images(), labels, config, mu=mu)
    model = scaled(build, 1.0)
    sizes = [p.numel() for p in model.parameters()]
    for p, g in zip(model.parameters(), gradient.split(sizes), strict=True):
        p.grad = g.view_as(p).to(p)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    decay = config.weight_decay
    optimizer: torch.optim.Optimizer = torch.optim.Adam(
        model.parameters(), lr=0.05, weight_decay=decay
    )
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=config.momentum, weight_decay=decay
        )
    optimizer.step()
    moved = before - nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.allclose(found.float(), moved, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_later_steps_draw_for_each_example_anew_and_keep_to_the_bound(momentum: float) -> None:
    """Steps so small that the parameters stay: every step's sum may move by the bound."""
    config = training(
        algorithm="fedavg",
        local_steps=3,
        lr=1e-4,
        momentum=momentum,
        augmentation=["random-crop", "horizontal-flip"],
    )
    labels = torch.arange(COUNT) % 10
    moved = change(MODELS["its own dropout"], images(), labels, config, steps=3) / 1e-4
    assert moved < 1.02 * sum(1.0 + (s > 0) * momentum + (s > 1) * momentum**2 for s in range(3))


def test_each_step_of_an_example_draws_otherwise() -> None:
    seen = []

    class Kept(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().clone())
            return super().forward(x)

    build = nn.Sequential(
        nn.Flatten(), dropout.with_dropout(nn.Dropout(0.5), 0.5, classes=2), Kept(64, 10)
    )
    config = training(algorithm="fedavg", local_steps=2, augmentation=["random-crop"])
    trained(build, images(2), torch.arange(2), config, steps=2)
    masks = {tuple((x == 0).flatten().tolist()) for x in seen}
    assert len(seen) == len(masks) == 4


def test_a_buffer_that_training_changes_is_refused() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 10)
            self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("calls").add_(1)
            return super().forward(x)

    model = nn.Sequential(nn.Flatten(), Counting())
    with pytest.raises(BractError) as caught:
        trained(model, images(), torch.arange(COUNT), training())
    assert caught.value.code == "model-unsuited"
    assert "1.calls" in str(caught.value)


def test_the_sources_of_a_model_are_its_own_again_afterwards() -> None:
    model = MODELS["its own dropout"]()
    before = torch.random.get_rng_state()
    trained(model, images(), torch.arange(COUNT), training())
    assert torch.equal(before, torch.random.get_rng_state())
    config, spec = training(), SimpleNamespace(normalise=lambda x: x, loss="cross_entropy")
    plain: Any = {"config": config, "spec": spec, "device": CPU}
    plain_training.train_locally(model, images(), torch.arange(COUNT), seed=1, **plain)
