"""A page is written from records alone, by a process that loads neither torch nor an attack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loading import COMMAND, loaded

from bract.disk import write_text

pytestmark = pytest.mark.processes

UNWANTED = ("torch", "torchvision", "flwr", "scipy", "sklearn", "skimage", "transformers")

COMPARE = """
from pathlib import Path
from bract.report.comparison.comparison import write_comparison
from bract.report.comparison.variants import ExampleCounts, Variant
variants = [Variant("undefended"), Variant("pruning", ({"name": "pruning"},))]
write_comparison(Path(sys.argv[1]), variants, name="digits", tested=ExampleCounts(360))
"""


@pytest.fixture
def run(make_run: Any) -> Path:
    """A run of images with an answer to every question, and one to a question of no package."""
    root: Path = make_run()
    measured = {"client": "client-0", "kind": "update", "canaries": 10, "guesses": 10, "right": 9}
    answers: dict[str, dict[str, Any]] = {
        "epsilon": {"clients": [measured | {"low": 1.2, "most": 3.1}]},
        "membership-adaptive": {"tier": "adaptive", "refused": "no candidates"},
        "unheard-of": {},
    }
    for folder, answer in answers.items():
        text = json.dumps({"schema": 1, "tier": "oblivious"} | answer)
        write_text(root / "audit" / "questions" / folder / "run.json", text)
    return root


def of_bract(modules: list[str]) -> list[str]:
    return [name for name in modules if name.partition(".")[0] == "bract"]


def test_the_command_loads_no_torch_and_no_attack(run: Path) -> None:
    found = loaded(COMMAND.format(command="report"), run)
    assert not {name.partition(".")[0] for name in found} & set(UNWANTED)
    rooms = {".".join(name.split(".")[:2]) for name in of_bract(found)}
    assert not rooms & {"bract.attacks", "bract.models", "bract.data", "bract.defenses"}
    # 114 and 631 when this was written.
    assert len(of_bract(found)) <= 155
    assert len(found) < 750
    facts = json.loads((run / "report.json").read_text())
    assert [one["question"] for one in facts["questions"]] == ["membership", "epsilon"]
    assert len(facts["skipped"]) == 1 and "unheard-of" in facts["skipped"][0]["file"]


def test_a_comparison_loads_no_torch_and_no_attack(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["client-0"], rounds=1).parent
    for name in ("undefended", "pruning"):
        writers.run(root / name, clients=["client-0"], rounds=1, name=name)
        writers.capture(root / name, 1, "client-0")
        writers.audit(root / name, 1, "client-0")
    found = loaded(COMPARE, root)
    assert not {name.partition(".")[0] for name in found} & set(UNWANTED)
    assert "bract.attacks" not in found and "bract.defenses" not in found
    assert (root / "report.html").is_file()
