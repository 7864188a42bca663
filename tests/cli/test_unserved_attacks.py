"""An attack that no update of the model can serve is refused before a run begins."""

import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from bract.cli.main import main
from bract.cli.run import check_feasible
from bract.config import build_config

NOTES = {
    "data": {"name": "clinical-notes", "input": "text", "text": {"length": 16}},
    "model": {"name": "text-encoder(width=16, depth=1, heads=2)"},
}
TAGS = {
    "data": {
        "name": "clinical-notes",
        "input": "text",
        "text": {"length": 16, "task": "token-classification"},
    },
    "model": {"name": "text-encoder(width=16, depth=1, heads=2)"},
}
FROZEN = {**NOTES, "model": {"name": "text-encoder(width=16, depth=2, heads=2, trained=last)"}}
LANGUAGE = {
    "data": {
        "name": "clinical-notes",
        "input": "text",
        "text": {"length": 16, "task": "language-model"},
    },
    "model": {"name": "text-decoder(width=16, depth=1, heads=2)"},
}
LENET = {"model": {"name": "lenet"}}
WIDE = {"model": {"name": "resnet20"}}
ROWS = {"data": {"name": "breast-cancer", "input": "table"}, "model": {"name": "logistic"}}


def _with(config: dict[str, Any], *attacks: str) -> Any:
    return build_config({**config, "audit": {"attacks": list(attacks)}})


@pytest.mark.parametrize(
    ("config", "attack", "reason"),
    [
        (LENET, "maui", "the backbone"),
        (LENET, "analytic", "no fully connected layer"),
        (LENET, "patch-embedding", "no learned parameter"),
        (LENET, "spear", "begins with Conv2d"),
        (LENET, "token-span", "handles the input text"),
        (LENET, "row-span", "handles the input table"),
        (WIDE, "r-gap", "a residual or dense connection"),
        (ROWS, "spear", "no ReLU"),
        (ROWS, "ig", "handles the input image"),
        (FROZEN, "token-span", "no trained linear layer sees single tokens"),
        (TAGS, "lamp", "one label a text"),
        (TAGS, "labels", "one label a text"),
    ],
)
def test_an_attack_without_its_layer_is_refused_by_name(
    config: dict[str, Any], attack: str, reason: str
) -> None:
    with refused("attack-unsuited") as error:
        check_feasible(_with(config, attack))
    assert str(error.value).startswith(f"audit.attacks: {attack} cannot attack this federation: ")
    assert reason in str(error.value)
    assert "probe" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "attacks"),
    [
        (LENET, ["ig", "grnn", "labels", "gauss-newton", "multi-round", "statistics"]),
        (WIDE, ["ig", "best", "ggl"]),
        (ROWS, ["analytic", "row-span", "tableak"]),
        (NOTES, ["token-span", "tag", "lamp", "labels"]),
        (LANGUAGE, ["token-span", "tag"]),
        (TAGS, ["token-span", "auto"]),
        (FROZEN, ["auto", "tag"]),
    ],
)
def test_attacks_that_the_model_serves_pass(config: dict[str, Any], attacks: list[str]) -> None:
    check_feasible(_with(config, *attacks))


def test_an_encoder_is_refused_as_a_language_model() -> None:
    with refused("model-unsuited", "text-encoder", "model.name"):
        check_feasible(_with({**LANGUAGE, "model": NOTES["model"]}, "auto"))


def test_a_run_without_captures_is_not_held_up_by_its_audit() -> None:
    check_feasible(build_config({"capture": {"enabled": False}, "audit": {"attacks": ["maui"]}}))


def test_the_command_ends_with_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.yaml").write_text("{model: {name: lenet}, audit: {attacks: [ig, maui]}}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bract", "run", "f.yaml", "--cold"])
    with pytest.raises(SystemExit) as left:
        main()
    said = capfd.readouterr().err.strip()
    assert left.value.code == 2
    assert said.startswith("error: audit.attacks: maui cannot attack this federation")
    assert "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["f.yaml"]
