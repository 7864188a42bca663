"""Where secrets come from: every bit of a private seed, and no seed that others can see."""

from typing import Any

import pytest
import torch
from refusals import refused

from bract.client.defenses import Noise, ProtectContext, build_defenses
from bract.client.site import Site, read_private_seed
from bract.models import create_model

LOW, HIGH = 5, (5 + 2**32, 5 + 2**60, 5 + 2**200)


def secret(purpose: Any, seed: Any) -> Any:
    """What a client of this private seed draws, as one tuple of numbers."""
    context = ProtectContext(seed=seed)
    if purpose in ("gaussian", "laplace"):
        defense = Noise(kind=purpose, std=1.0)
        return tuple(defense.protect({"w": torch.zeros(20)}, {}, context)["w"].tolist())
    model = create_model("lenet-bn", classes=10, channels=1, image_size=32, activation="relu")
    torch.manual_seed(0)
    chain = build_defenses([{"name": purpose}])
    state: dict[str, Any] = {}
    model = chain.prepare_model(model)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    chain.attach(model, state, context)
    if purpose == "precode":
        return tuple(model(torch.ones(3, 1, 32, 32)).flatten().tolist())
    return tuple(v for name in sorted(state) for v in state[name].flatten().tolist())


@pytest.mark.parametrize("purpose", ["gaussian", "laplace", "fedkl", "precode"])
def test_high_bits_of_the_seed_matter_for_every_secret(purpose: Any) -> None:
    assert secret(purpose, LOW) == secret(purpose, LOW)
    assert len({secret(purpose, seed) for seed in (LOW, *HIGH)}) == 4


@pytest.mark.parametrize("purpose", ["gaussian", "laplace", "fedkl", "precode"])
def test_no_secret_comes_from_torchs_generators(purpose: Any, monkeypatch: Any) -> None:
    def refuse(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("a secret was drawn from torch")

    for name in ("rand", "randn", "randint", "normal"):
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr(torch, "Generator", refuse)
    assert secret(purpose, None) != secret(purpose, None)


def node(**settings: Any) -> Any:
    return {"partition-id": 0, **settings}


def test_a_seed_comes_from_a_file_that_its_owner_alone_reads(tmp_path: Any) -> None:
    file = tmp_path / "seed"
    file.write_text(f"{2**200 + 1}\n")
    file.chmod(0o600)
    assert (
        Site.from_node_config(node(**{"private-seed-file": str(file)})).private_seed == 2**200 + 1
    )
    assert Site.from_node_config(node()).private_seed is None
    file.chmod(0o640)
    with refused("file-exposed", tmp_path):
        read_private_seed(file)


@pytest.mark.parametrize("short", [0, 7, 2**31 - 1, 100 * (2**31 - 1) + 99, 2**64 - 1])
def test_a_seed_that_can_be_tried_such_as_one_made_of_the_federations_is_refused(
    tmp_path: Any, short: Any
) -> None:
    file = tmp_path / "seed"
    file.write_text(str(short))
    file.chmod(0o600)
    with refused("config-value", short.bit_length(), "secrets.randbits"):
        Site.from_node_config(node(**{"private-seed-file": str(file)}))
    file.write_text(str(2**64))
    assert read_private_seed(file) == 2**64


def test_a_seed_on_the_command_line_is_refused() -> None:
    with refused("config-value", "private-seed") as raised:
        Site.from_node_config(node(**{"private-seed": 1234567}))
    assert "1234567" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "secret words", "-987654", "1.987654", "9" * 5000])
def test_what_is_no_seed_is_refused_without_being_repeated(tmp_path: Any, text: Any) -> None:
    file = tmp_path / "seed"
    file.write_text(text)
    file.chmod(0o600)
    with refused("config-value", tmp_path) as raised:
        read_private_seed(file)
    assert not text or text not in str(raised.value)
    with refused("file-unreadable", tmp_path):
        read_private_seed(tmp_path / "none")
