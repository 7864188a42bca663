"""`bract policy check` reads a site's policy as a client does, without a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from refusals import check_named
from typer.testing import CliRunner

from bract.cli.main import app, main

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "site-policy.md").read_text()


def check(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["policy", "check", *map(str, arguments)])


def test_the_example_of_the_documents_can_be_used(tmp_path: Path) -> None:
    example, guard = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "policy.yaml"
    path.write_text(guard)
    assert check(path, "--format", "json").exit_code == 0
    path.write_text(example)
    done = check(path, "--format", "json")
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["batch_size"] == {"minimum": 8, "maximum": None}
    assert "min_training_images: 50\n" in done.stderr
    check_named(done.stderr, "max_rounds_total", "state-dir")
    assert "done: " in done.stderr


def test_what_is_left_out_is_shown_with_its_default(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("require: [{name: adadefense}]\n")
    said = check(path).stderr
    check_named(said, "min_validation_images", 10)
    assert "require: [{'name': 'adadefense'}]\n" in said
    check_named(said, "adadefense", "epsilon", "beta2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requires: []\n", "Did you mean 'require'"),
        ("require: [{name: adadefence}]\n", "Did you mean 'adadefense'"),
        ('plain_updates: "false"\n', "plain_updates"),
    ],
)
def test_a_mistake_is_named_and_ends_with_2(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    monkeypatch.setattr("sys.argv", ["bract", "policy", "check", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert str(path) in said


def test_a_federation_can_be_held_against_it(tmp_path: Path) -> None:
    policy, config = tmp_path / "policy.yaml", tmp_path / "federation.yaml"
    policy.write_text("require: [{name: adadefense}]\n")
    config.write_text("defenses: [adadefense]\n")
    assert "meets this policy" in check(policy, "--against", config).stderr
    config.write_text("defenses: [guardian]\n")
    done = check(policy, "--against", config)
    assert "'adadefense' must be on" in str(done.exception)
