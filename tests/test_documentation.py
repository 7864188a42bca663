"""The examples of the documentation run as they stand."""

import ast
import importlib
import importlib.util
import logging
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from markdown.extensions.toc import slugify
from observing import observed
from rooms import written
from torch import nn

from bract import ObservationStore
from bract.inputs import INPUTS
from bract.models import create_model
from bract.models.keylock import key_locks
from bract.schema.description_text import parse_description
from bract.server import HonestButCurious
from bract.server.loopback import LoopbackGrid
from experiments import measured_text
from experiments.harness.result import committed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "guide"


def code_of(page: Any, name: Any) -> Any:
    """Run the block that follows a file's name, as a module."""
    text = (DOCS / page).read_text()
    found = re.search(rf"`{re.escape(name)}`.*?\n\n```python\n(.*?)```", text, re.DOTALL)
    assert found, f"{page} has no {name}"
    module = {"__name__": name.removesuffix(".py")}
    exec(compile(found[1], f"{page}:{name}", "exec"), module)
    return module


def test_fedboosting_works_in_somebody_s_own_apps(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_notebook_example_attacks_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = create_model("lenet-strided", classes=10, channels=1, image_size=8)
    seen = observed(
        torch.rand(1, 1, 8, 8),
        torch.tensor([3]),
        model=model,
        name="lenet-strided",
        normalised=False,
    )
    store = ObservationStore(tmp_path / "runs" / "demo" / "captures")
    store.save(replace(seen, client="good"))
    store.save(replace(seen, client="empty", update={}))
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "attacks.md").read_text(), re.DOTALL)
    exec(compile(code, "attacks.md", "exec"), {})
    said = capsys.readouterr().out
    assert "round-0001/good [3] (1, 1, 8, 8)" in said
    assert "round-0001/empty not attacked: " in said
    assert "s left" in said


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name
)
def test_no_table_was_left_to_be_filled_in(page: Any) -> None:
    assert re.findall(r"^[A-Z_]+_TABLE$", page.read_text(), re.MULTILINE) == []


def test_what_is_written_between_the_marks_is_made_from_the_committed_results() -> None:
    templates = sorted(measured_text.TEXTS.glob("*.md"))
    assert {"defense-accuracy", "guardian-cosines"} <= {path.stem for path in templates}
    for path in templates:
        document, text = measured_text.render(path)
        assert measured_text.written(document, path.stem, text) == document.read_text(), path.name


def test_the_snippets_of_an_extension_are_files_of_the_example() -> None:
    example = ROOT / "examples" / "plugin"
    text = (DOCS / "extending.md").read_text()
    blocks = re.findall(r"`bract_example/(\w+\.py)`.*?\n\n```python\n(.*?)```", text, re.DOTALL)
    lines = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    kinds = {path.name for path in (example / "bract_example").glob("*.py")} - {"__init__.py"}
    assert {name for name, _ in blocks} == kinds
    assert len(lines) == len(blocks)
    for name, code in blocks:
        assert (example / "bract_example" / name).read_text() == code
    for entry in lines:
        assert entry in (example / "pyproject.toml").read_text()


def test_what_the_page_about_ones_own_app_shows_is_read_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "your-own-app.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    described = parse_description(shown)
    assert described.clients["node-123"].local_steps == 5 and described.guessed
    # Each block of Python runs in an app's functions, whose names stand here.
    message = object()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        known: dict[str, Any] = {
            "strategy": FedAvg(),
            "trainloader": [],
            "train": lambda net, loader: None,
            "msg": message,
            "context": Context(1, 7, {}, RecordDict(), {}),
            "ClientApp": ClientApp,
            "net": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
        }
        if "keep(" in code or "witness(" in code:
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
            config = ConfigRecord({"server-round": 1})
            known["msg"] = Message(RecordDict({"c": config}), dst_node_id=7, message_type="train")
        exec(compile(code, "your-own-app.md", "exec"), known)
        if "HonestButCurious" in code and "def " not in code:
            assert isinstance(known["strategy"], HonestButCurious)
        if "keylock" in code:
            assert key_locks(known["net"])


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("README.md", r"^\| models \|.*\n\| data \|.*$"),
        ("docs/guide/first-day.md", r"(?s)## What can be audited\n(.*?)\n## "),
        ("docs/guide/your-own-app.md", r"(?s)\A(.*?)\n## "),
    ],
)
def test_what_can_be_audited_is_every_kind_of_input(page: str, section: str) -> None:
    found = re.search(section, (ROOT / page).read_text(), re.MULTILINE)
    assert found, page
    refusals = [part for part in re.split(r"[.;|]\s", found[0]) if re.search("refus|not ", part)]
    for kind in (name for name in INPUTS if not INPUTS[name].third_party):
        assert re.search(rf"\b{kind}s?\b", found[0]), f"{page} does not name {kind}"
        assert not any(re.search(rf"\b{kind}s?\b", part) for part in refusals), (page, refusals)


def test_every_extra_that_a_page_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").rglob("*.md")]
    named = {
        extra
        for page in pages
        for extras in re.findall(r"\bbract\[([\w,-]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert {"audit", "harden", "text"} <= named
    assert named <= set(project["optional-dependencies"])


def test_no_page_advises_a_weaker_attack_than_the_default() -> None:
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        assert "--attack ig" not in page.read_text(), page.name


def scale() -> dict[tuple[int, str], Any]:
    """Rows of the simulations of many clients, by clients and model."""
    return {(row["clients"], row["model"]): row for row in committed("scale")}


def test_a_thousand_clients_hold_no_more_memory_after_twenty_rounds() -> None:
    row = scale()[1000, "resnet20"]
    assert (row["rounds"], row["a round"]) == (20, 20)
    sums = [held["rss"] for held in row["held"]]
    assert len(sums) == 20
    # From the second round on: in the first one the processes import.
    assert max(sums[1:]) < 1.02 * min(sums[1:])
    assert row["MB late"] < 1.01 * row["MB early"]
    # Over a hundred rounds of the same growth it would still be less than a twentieth.
    growth = np.polyfit(range(19), sums[1:], 1)[0]
    assert 100 * growth < 0.05 * row["MB early"]


def test_the_formula_of_the_page_on_scale_predicts_the_run_that_it_was_not_made_from() -> None:
    rows = scale()
    few, main, many = (rows[n, "resnet20"]["held"][-1]["server"] for n in (100, 1000, 8000))
    a_client = (many - few) / 7900
    assert main == pytest.approx(few + 900 * a_client, rel=0.03)
    text = (DOCS.parent / "measured" / "scale.md").read_text()
    assert f"clients x {1000 * a_client:.1f} kB" in text
    rest, server, processes, total = re.findall(
        r"^\| `resnet20` \| 20 \| ([\d,]+) \+ ([\d,]+) \+ 2 × ([\d,]+) = ([\d.]+) GB",
        text,
        re.MULTILINE,
    )[0]
    terms = [float(term.replace(",", "")) for term in (rest, server, processes)]
    assert float(total) == pytest.approx((terms[0] + terms[1] + 2 * terms[2]) / 1000, abs=0.06)
    # A hundred thousand clients are those of the thousand and the cost of each further one.
    assert terms[1] == pytest.approx(main + 99_000 * a_client, rel=0.001)


def imported_by_authors() -> set[tuple[str, str]]:
    """Return what the examples and the pages for app authors import of bract, by module."""
    files = [*written("examples"), *written("plugins")]
    files.append(ROOT / "README.md")
    files += [DOCS / page for page in ("extending.md", "your-own-app.md", "fedboosting.md")]
    found = set()
    for path in files:
        text = path.read_text()
        for module, names in re.findall(
            r"^from (bract[\w.]*) import (\([^)]*\)|[^\n#]+)", text, re.MULTILINE
        ):
            if module.partition(".")[0] == "bract":
                found |= {(module, name) for name in re.findall(r"\w+", names)}
    return found


def site_builder() -> Any:
    spec = importlib.util.spec_from_file_location("docs_build", DOCS.parent / "build.py")
    assert spec and spec.loader
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*?)(?: *\{.*\})?$", text, re.MULTILINE)
    return {slugify(re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", each), "-") for each in headings}


def test_a_link_to_a_section_names_one_that_its_page_has() -> None:
    """In the sources, and in the pages that the site makes of them."""
    made = {ROOT / "docs" / path: text for path, text in site_builder().pages().items()}
    pages = {path: path.read_text() for path in (ROOT / "docs").rglob("*.md")} | made
    astray = set()
    for path, text in pages.items():
        for target, anchor in re.findall(r"\]\(([\w./-]*\.md|)#([\w-]+)\)", text):
            there = pages.get((path.parent / target).resolve() if target else path)
            if there is not None and anchor not in anchors(there):
                astray.add(f"{path.relative_to(ROOT)}: {target}#{anchor}")
    assert astray == set()


def test_the_reference_has_every_name_that_an_author_imports() -> None:
    build = site_builder()
    listed = {(module, name) for module in build.API for name in build.api_names(module)}
    imported = imported_by_authors()
    assert ("bract.attacks", "Outcome") in imported and len(imported) > 40
    assert imported - listed <= {("bract", "__version__")}
    for module, name in listed:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_the_first_day_shows_the_lines_of_the_readme() -> None:
    def lines(text: str, kind: str) -> set[str]:
        blocks = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
        return {line.strip() for block in blocks for line in block.splitlines() if line.strip()}

    first, readme = (DOCS / "first-day.md").read_text(), (ROOT / "README.md").read_text()
    own = (DOCS / "your-own-app.md").read_text()
    package = (ROOT / "docs" / "package.md").read_text()
    assert lines(package, "python") <= lines(first, "python")
    assert {line.partition("  ")[0] for line in lines(package, "sh")} - {
        "pip download --no-deps --no-binary bract bract"
    } <= lines(first, "sh")
    assert lines(first, "python") <= lines(readme, "python") | lines(own, "python")
    for command in ("describe . --model my_app.task:Net", "audit . --model my_app.task:Net"):
        assert any(line.startswith(f"bract {command}") for line in lines(first, "sh"))
        assert f"`bract {command}`" in readme
    assert "4 nothing could be attacked" in readme
