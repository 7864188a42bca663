"""The examples of the documentation run as they stand."""

import ast
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from bract.models import create_model
from bract.observation import Observation, ObservationStore, Protocol
from bract.server.loopback import LoopbackGrid
from bract.update import parameters_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def code_of(page, name):
    """Run the block that follows a file's name, as a module."""
    text = (DOCS / page).read_text()
    found = re.search(rf"`{re.escape(name)}`.*?\n\n```python\n(.*?)```", text, re.DOTALL)
    assert found, f"{page} has no {name}"
    module = {"__name__": name.removesuffix(".py")}
    exec(compile(found[1], f"{page}:{name}", "exec"), module)
    return module


def test_fedboosting_works_in_somebody_s_own_apps(capsys):
    logging.getLogger("flwr").setLevel(logging.ERROR)
    client = code_of("fedboosting.md", "client_app.py")["app"]
    server = code_of("fedboosting.md", "server_app.py")["app"]
    nodes = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    grid = LoopbackGrid(client, nodes)
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    kinds = [message.metadata.message_type for message in grid.log]
    assert kinds == (["train"] * 3 + ["evaluate.fused"] * 3) * 3
    found = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert sum(found["weights"]) == pytest.approx(1.0)
    assert all(score > 0.5 for row in found["V"] for score in row)
    assert all(score > 0.5 for score in found["T"])


def test_the_notebook_example_attacks_a_run(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    model = create_model("lenet-strided", classes=10, channels=1, image_size=8)
    loss = torch.nn.functional.cross_entropy(model(torch.rand(1, 1, 8, 8)), torch.tensor([3]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    protocol = Protocol(
        algorithm="fedsgd", model="lenet-strided", image_shape=(1, 8, 8), classes=10, batch_size=1
    )
    store = ObservationStore(tmp_path / "runs" / "demo" / "captures")
    for client, update in (("good", dict(zip(names, gradients, strict=True))), ("empty", {})):
        store.save(
            Observation(
                round=1,
                client=client,
                parameters=parameters_of(model),
                update=update,
                protocol=protocol,
            )
        )
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "attacks.md").read_text(), re.DOTALL)
    exec(compile(code, "attacks.md", "exec"), {})
    said = capsys.readouterr().out
    assert "round-0001/good [3] (1, 1, 8, 8)" in said
    assert "round-0001/empty not attacked: " in said
    assert "s left" in said


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name
)
def test_no_table_was_left_to_be_filled_in(page):
    assert re.findall(r"^[A-Z_]+_TABLE$", page.read_text(), re.MULTILINE) == []


def results(name):
    (path,) = (ROOT / "benchmarks" / "results").glob(f"{name}-*-cores.json")
    return json.loads(path.read_text())["rows"]


def test_the_costs_of_the_defenses_are_those_of_the_committed_runs():
    section = (DOCS / "defenses.md").read_text().split("## What they cost")[1]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if "|" in line]
    accuracies = {row[0]: row[1] for row in cells if "%" in row[1]}
    ratios = {
        row[0]: [float(cell.split()[0]) for cell in row[1:]] for row in cells if " to " in row[1]
    }
    assert accuracies == {
        row["defense"]: f"{row['accuracy']:.1%} ± {100 * row['accuracy_ci95']:.1f}".replace(
            "%", " %"
        )
        for row in results("defended-accuracy")
    }
    measured = {}
    for row in results("defenses"):
        measured.setdefault(row["defense"], []).append(row["ratio"])
    assert set(ratios) == set(measured)
    for name, found in measured.items():
        assert ratios[name] == pytest.approx([found[i] for i in range(4)], rel=0.02)
