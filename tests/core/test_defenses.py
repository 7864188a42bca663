from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn

from bract.client.defenses import build_defense, build_defenses
from bract.config import FederationConfig
from bract.data.spec import DataSpec
from bract.defenses import DEFENSES, Defense, ProtectContext, configured_model
from bract.defenses.entries import prepare_model, read_defense
from bract.models import create_model

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "defenses.md"


NOISE: dict[str, Any] = {"noise": {"std": 0.1}, "per-example": {"noise_multiplier": 1.0}}


def default(name: Any) -> Any:
    return {"name": name} | NOISE.get(name, {})


def model() -> Any:
    return create_model("lenet-strided-bn", classes=10, channels=1, image_size=8)


@pytest.mark.parametrize("name", sorted(set(DEFENSES) - {"per-example"}))
def test_a_defense_keeps_what_its_specification_says(name: Any) -> None:
    chain = build_defenses([default(name)])
    state: dict[str, Any]
    network, state = chain.prepare_model(model()), {}
    context = ProtectContext(
        seed=0, model=network, images=torch.rand(2, 1, 8, 8), labels=torch.tensor([0, 1])
    )
    chain.attach(network, state, context)
    kept_before_training = bool(state)
    update = {n: torch.randn_like(p) for n, p in network.named_parameters()}
    chain.protect(update, state, context)
    assert kept_before_training == (DEFENSES[name].keeps == "model")
    assert bool(state) == (DEFENSES[name].keeps != "nothing")


@pytest.mark.parametrize("name", list(DEFENSES))
def test_a_defense_that_changes_the_model_says_so(name: Any) -> None:
    before, after = model(), prepare_model(model(), [default(name)])
    same = [n for n, _ in before.named_modules()] == [n for n, _ in after.named_modules()] and all(
        type(a) is type(b) for a, b in zip(before.modules(), after.modules(), strict=True)
    )
    assert DEFENSES[name].changes_model() is not same


def test_noise_in_training_is_no_step_after_it() -> None:
    with refused("defense-failed", "training.private"):
        build_defense(default("per-example")).protect({}, {}, ProtectContext())


def test_declared_defenses_that_change_no_model_are_not_judged_by_prepare_model() -> None:
    entries: list[dict[str, Any]] = [{"name": "pruning", "ratio": 7.0}, {"name": "somebody-else-s"}]
    assert isinstance(prepare_model(model(), entries), nn.Module)
    with refused("config-value", "fedkl", "blocks", "none"):
        prepare_model(model(), [{"name": "fedkl", "blocks": "none"}])


def test_a_defense_of_other_inputs_is_refused_before_anything_trains() -> None:
    data: dict[str, Any] = {"name": "clinical-notes", "input": "text"}
    config = FederationConfig.model_validate({"data": data, "defenses": ["soteria"]})
    with refused("defense-unsuited", "soteria", "data.input"):
        configured_model(config, DataSpec((4, 1, 1), 2, (0.0,), (1.0,)))


def test_a_title_tells_the_settings_that_it_names() -> None:
    kind = DEFENSES["noise"]
    assert kind.title_with({"name": "noise"}) == "Gaussian noise"
    assert kind.title_with({"name": "noise", "kind": "laplace"}) == "Laplace noise"
    assert kind.in_title() == {"kind"}
    assert DEFENSES["precode"].title_with({}) == "PRECODE"


def test_the_documents_list_the_defenses_as_they_specify_themselves() -> None:
    rows = PAGE.read_text().split("| name | what is sent | stage |\n")[1].split("\n\n")[0]
    listed = [line.strip("| ").split(" | ") for line in rows.splitlines()[1:]]
    assert sorted(listed) == [
        [f"`{name}`", DEFENSES[name].summary, DEFENSES[name].stage.name.lower()]
        for name in DEFENSES
    ]


def test_a_package_that_a_client_lacks_stops_the_client_but_not_who_reads_the_declaration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    entry = {"name": "noise", "epsilon": 1.0, "accountant": "opacus"}
    with refused("package-missing", "noise"):
        build_defense(entry)
    assert isinstance(read_defense(entry), Defense)
