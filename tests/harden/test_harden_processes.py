"""``bract harden`` in this process, and its recommendation through real processes."""

import importlib.util
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bract.cli.main import app, main
from bract.pool import Here
from bract.report.facts import gather
from bract.rundir import RunDirectory
from bract_harden import configuration

pytest.importorskip("optuna")

CONFIG = """
name: small
truth: true
rounds: 1
clients: 2
data: {image_size: 8, validation: 0.0, partition: {kind: sizes, sizes: [40, 2]}}
model: {name: lenet-strided, activation: sigmoid}
training: {batch_size: 2, lr: 0.1}
audit: {attacks: [ig], clients: [client-1], rounds: [1], iterations: 20}
"""

SPACE = """
space: {}
defenses: [[], [{name: pruning, ratio: {low: 0.5, high: 0.95}}]]
constraints: {accuracy_loss: 0.5, leak: null}
search:
  {trials: 3, seeds: 2, points: 2, cheap: {iterations: 5}, middle: {iterations: 10}}
"""


def command(*words: Any) -> Any:
    program = Path(sys.executable).with_name("bract")
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=500)


def written(folder: Path, config: str = CONFIG, space: str = SPACE) -> tuple[Path, ...]:
    """Write the files of a search; return the words of its command."""
    (folder / "small.yaml").write_text(config)
    (folder / "space.yaml").write_text(space)
    return (
        *(Path("harden"), folder / "small.yaml", Path("--space"), folder / "space.yaml"),
        *(Path("--runs"), folder),
    )


def typed(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search through real processes, to be read only."""
    folder = tmp_path_factory.mktemp("searched")
    found = command(*written(folder))
    assert found.returncode == 0, found.stderr
    return folder / "small-harden"


@pytest.mark.thorough
def test_a_search_leaves_the_page_the_facts_and_the_files_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "Processes", lambda do, _: nullcontext(Here(do)))
    quick = CONFIG.replace("iterations: 20", "iterations: 3")
    few = "{trials: 1, seeds: 2, points: 1, cheap: {iterations: 1}, middle: {iterations: 2}}"
    space = SPACE.partition("search:")[0] + f"search: {few}"
    done = typed(*written(tmp_path, quick, space))
    assert done.exit_code == 0, done.output
    searched = tmp_path / "small-harden"
    facts = json.loads((searched / "harden.json").read_text())
    named = {c["name"]: c for c in facts["candidates"]}
    assert facts["frontier"]
    for name in facts["frontier"]:
        assert named[name]["stage"] == "full"
        assert len(named[name]["measures"]) == 2
        assert (searched / "candidates" / name / "seed-1" / "audit").is_dir()
    page = (searched / "harden.html").read_text()
    assert "data:image/png" in page
    assert "impact assessment" in page
    checked = typed("policy", "check", searched / "policy.yaml", "--against",
                    searched / "recommended.yaml")  # fmt: skip
    assert checked.exit_code == 0, checked.output


def test_bad_input_ends_with_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = written(tmp_path, space="defenses: [[fedkl]]")
    monkeypatch.setattr(sys, "argv", ["bract", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        main()
    said = capfd.readouterr().err
    assert left.value.code == 2
    assert "no candidate of the space can run" in said
    assert "Traceback" not in said
    assert not (tmp_path / "small-harden").exists()


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_workers_of_a_cluster_find_what_this_machines_find(searched: Path, tmp_path: Path) -> None:
    found = command(
        *written(tmp_path),
        *("--ray", "auto"),
    )
    assert found.returncode == 0, found.stderr
    assert "workers: " in found.stderr + found.stdout
    here, there = (
        json.loads((root / "harden.json").read_text())
        for root in (searched, tmp_path / "small-harden")
    )
    first, second = ({c["name"]: c for c in found["candidates"]} for found in (here, there))
    assert set(first) == set(second)
    assert here["frontier"] and there["frontier"]
    # Which candidate is attacked harder depends on what others had come to by then.
    same = [name for name in first if first[name]["stage"] == second[name]["stage"]]
    assert here["control"] in same
    for name in same:
        for key in ("setting", "accuracy", "leaks", "error"):
            assert first[name][key] == second[name][key]


@pytest.mark.processes
def test_real_processes_reproduce_what_was_recommended(searched: Path, tmp_path: Path) -> None:
    facts = json.loads((searched / "harden.json").read_text())
    (best,) = [c for c in facts["candidates"] if c["name"] == facts["recommended"]]
    ran = command("run", searched / "recommended.yaml", "--runs", tmp_path)
    assert ran.returncode == 0, ran.stderr
    root = tmp_path / "small-hardened"
    audited = command("audit", root, "--yes")
    assert audited.returncode == 0, audited.stderr
    (own,) = [m for m in best["measures"] if m["seed"] == 0]
    last = RunDirectory(root).metrics()[-1].evaluation
    assert last is not None
    assert last.accuracy == pytest.approx(own["accuracy"], abs=0.02)
    means = [a.ssim.mean for a in gather(root).attacks if a.client is None]
    assert None not in means
    found = max(mean for mean in means if mean is not None)
    low, high = best["leaks"][0]["low"], best["leaks"][0]["high"]
    inside = low is not None and low <= found <= high
    assert inside or found == pytest.approx(own["leaks"][0]["value"], abs=0.05)
