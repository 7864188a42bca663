from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

from bract.installed import own_word
from bract.models import MODELS, create_model
from bract.models.initialise import initialise


def make(name: Any, size: Any = 32, channels: Any = 1, activation: Any = "sigmoid") -> Any:
    return create_model(name, classes=10, channels=channels, image_size=size, activation=activation)


def test_lenets_have_the_published_sizes() -> None:
    assert sum(p.numel() for p in make("lenet").parameters()) == 61_706
    strided = make("lenet-strided")
    assert strided.classifier[1].in_features == 768
    assert [tuple(m.stride) for m in strided.features if hasattr(m, "stride")] == [
        (2, 2),
        (2, 2),
        (1, 1),
    ]


@pytest.mark.parametrize("name", ["lenet", "lenet-strided"])
@pytest.mark.parametrize("size", [28, 32, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_model_takes_other_sizes_and_colours(name: Any, size: Any, channels: Any) -> None:
    assert make(name, size, channels)(torch.zeros(2, channels, size, size)).shape == (2, 10)


@pytest.mark.parametrize("name", ["lenet", "lenet-strided"])
def test_gradients_can_be_differentiated_again(name: Any) -> None:
    model = make(name)
    image = torch.rand(1, 1, 32, 32, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(model(image), torch.tensor([3]))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    torch.stack([g.square().sum() for g in gradients]).sum().backward()
    assert image.grad is not None
    assert float(image.grad.abs().sum()) > 0


def test_the_seed_alone_decides_the_initial_model() -> None:
    first = initialise(make("lenet"), "uniform", 3)
    again = initialise(make("lenet"), "uniform", 3)
    other = initialise(make("lenet"), "uniform", 4)
    models: list[Any] = [first, again, other]
    weights = [m.classifier[1].weight for m in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert float(weights[0].detach().abs().max()) <= 0.5
    model = make("lenet")
    before = torch.get_rng_state()
    initialise(model, "default", 3)
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with refused("unknown-name", "lennet", "lenet"):
        make("lennet")
    with refused("unknown-name", "activation", "tanh"):
        make("lenet", activation="tanh")
    with refused("import-failed", "no.such.module:Net"):
        make(own_word("no.such.module:Net"))
    assert "lenet" in MODELS


def test_a_strangers_model_is_built_from_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Linear(2, 3)\ndef no():\n    return 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make(own_word("theirs:net")).out_features == 3
    with refused("model-faulty", "torch.nn.Module"):
        make(own_word("theirs:no"))
    with refused("code-untrusted", "theirs:net"):
        make("theirs:net")
