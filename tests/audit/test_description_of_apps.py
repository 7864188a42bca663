"""Ten apps with everything described right raise no alarm, and each planted error is named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import foreign_models
import pytest
import torch
from foreign_models import named
from refusals import refused
from torch import Tensor
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.audit.captures import Captures
from bract.audit.description import size
from bract.audit.description.infer import Findings, complete
from bract.config import DataConfig
from bract.data.views import test_data as load_test_data
from bract.schema import ClientDeclaration
from bract.schema.description_text import build_description
from bract.updates.update import buffers_of, difference, parameters_of


@dataclass(frozen=True)
class Configured:
    """An app: its model, and what each of its two clients does in the captured round.

    ``learnt`` steps were trained before the round; ``classes`` is how many a client holds.
    """

    model: str
    optimizer: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    examples: int = 32
    batch_size: int = 16
    epochs: int = 1
    classes: int = 10
    learnt: int = 0


APPS = [
    Configured("relu_cnn", epochs=20),
    Configured("tanh_cnn", lr=0.1, momentum=0.0, examples=8, batch_size=8),
    Configured("gelu_cnn", lr=0.05, epochs=4, classes=2),
    Configured("batch_norm_cnn", lr=0.01, epochs=3),
    Configured("pooled_cnn", lr=0.01, epochs=20, classes=1),
    Configured("residual_cnn", lr=0.1, momentum=0.0, epochs=5, learnt=40),
    Configured("linear", lr=0.1, epochs=10),
    Configured("relu_mlp", optimizer="adam", lr=0.001, momentum=0.0, epochs=2),
    Configured("sigmoid_mlp", lr=0.1, epochs=20, classes=2),
    Configured("deep_mlp", lr=0.05, epochs=5, learnt=80),
]


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    return load_test_data(DataConfig(name="digits", image_size=foreign_models.SIZE))


def _train(app: Configured, model: Any, images: Tensor, labels: Tensor, epochs: int) -> None:
    if app.optimizer == "adam":
        descent: Any = torch.optim.Adam(model.parameters(), lr=app.lr)
    else:
        descent = torch.optim.SGD(model.parameters(), lr=app.lr, momentum=app.momentum)
    model.train()
    for _ in range(epochs):
        for at in range(0, len(images), app.batch_size):
            descent.zero_grad()
            part = (images[at : at + app.batch_size] - 0.5) / 0.5
            F.cross_entropy(model(part), labels[at : at + app.batch_size]).backward()
            descent.step()


def capture(root: Path, app: Configured, data: tuple[Tensor, Tensor]) -> None:
    """Write what a hook captures of a round of two clients, with nothing declared."""
    images, labels = data
    torch.manual_seed(5)
    model = getattr(foreign_models, app.model)()
    gentle = replace(app, lr=min(app.lr, 0.05), batch_size=32)
    _train(gentle, model, images[-96:], labels[-96:], app.learnt // 3)
    sent = {name: value.clone() for name, value in model.state_dict().items()}
    store = ObservationStore(root)
    for number in range(2):
        model.load_state_dict(sent)
        before, buffers = parameters_of(model), buffers_of(model)
        held = (labels >= number) & (labels < number + app.classes)
        own = held.nonzero().flatten()[number * 8 :][: app.examples]
        _train(app, model, images[own], labels[own], app.epochs)
        store.save(
            Observation(
                round=1,
                client=f"node-{number}",
                parameters=before,
                buffers=buffers,
                update=difference(before, parameters_of(model)),
                returned_buffers=buffers_of(model),
                declaration=ClientDeclaration(num_examples=len(own)),
            )
        )


def described(root: Path, app: Configured, *without: str, **other: Any) -> Findings:
    """Describe the app as it is, but for what is left out or said otherwise."""
    training = {
        "optimizer": app.optimizer,
        "lr": app.lr,
        "momentum": app.momentum,
        "batch_size": app.batch_size,
        "local_epochs": app.epochs,
    }
    training = {k: v for k, v in (training | other).items() if k not in without}
    side = foreign_models.SIZE
    content = {
        "model": named(getattr(foreign_models, app.model)),
        "input": {"shape": [1, side, side], "mean": [0.5], "std": [0.5]},
        "training": training,
    }
    description = build_description(content)
    return complete(Captures(root, [str(description.model)], description), description)


@pytest.mark.parametrize("app", APPS, ids=[app.model for app in APPS])
def test_an_app_described_right_raises_no_alarm_and_a_wrong_rate_is_named(
    app: Configured, tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    capture(tmp_path, app, data)
    found = described(tmp_path, app)
    assert found.doubts == [] and not found.description.guessed
    assert any("explains the updates' size" in line for line in found.confirmed)
    low = described(tmp_path, app, lr=app.lr / 300)
    assert any("training.lr of about" in doubt for doubt in low.doubts), low.confirmed


@pytest.mark.parametrize("app", [APPS[1], APPS[7]], ids=["sgd", "adam"])
def test_a_rate_that_is_too_high_is_named_while_the_model_is_new(
    app: Configured, tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    capture(tmp_path, app, data)
    assert any("training.lr" in doubt for doubt in described(tmp_path, app, lr=app.lr * 50).doubts)


def test_undeclared_momentum_is_a_guess_and_explains_what_a_rate_alone_does_not(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    app = Configured("sigmoid_mlp", lr=0.01, epochs=40, classes=1)
    capture(tmp_path, app, data)
    found = described(tmp_path, app, "momentum")
    assert "training.momentum" in found.description.guessed
    assert not any("training.lr" in doubt for doubt in found.doubts)
    one = Configured("relu_mlp", lr=0.1, examples=8, batch_size=8)
    (tmp_path / "one").mkdir()
    capture(tmp_path / "one", one, data)
    # A single step begins without any momentum, whatever it is.
    assert (
        "training.momentum" not in described(tmp_path / "one", one, "momentum").description.guessed
    )


def test_the_other_optimizer_is_named(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    app = APPS[7]
    capture(tmp_path, app, data)
    wrong = described(tmp_path, app, "lr", optimizer="sgd", momentum=0.0)
    assert any("training.optimizer is sgd" in doubt for doubt in wrong.doubts)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"batch_size": 4}, ("declaration-wrong", "training.batch_size")),
        (
            {"local_epochs": 7},
            ("declaration-wrong", "training.batch_size", "training.local_epochs"),
        ),
    ],
)
def test_steps_that_batch_normalisation_did_not_count_are_named(
    other: Any, said: tuple[str, ...], tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    app = APPS[3]
    capture(tmp_path, app, data)
    with refused(*said):
        described(tmp_path, app, **other)


@pytest.mark.parametrize(
    ("app", "alike"), [(Configured("relu_mlp", lr=0.1), "adam"), (APPS[7], "sgd")]
)
def test_an_undeclared_optimizer_is_the_one_that_explains_the_size_with_the_known_rate(
    app: Configured,
    alike: str,
    tmp_path: Path,
    data: tuple[Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the layers of the updates stray least from those of the other optimizer."""
    monkeypatch.setattr(size, "likeliest_optimizer", lambda _: (alike, 9.0))
    capture(tmp_path, app, data)
    found = described(tmp_path, app, "optimizer", "momentum")
    assert found.description.training.optimizer == app.optimizer != alike
    reason = found.description.guessed["training.optimizer"]
    assert reason == f"alone explains the updates' size with lr {app.lr:g}"
    assert found.doubts == []
