"""The quickstart: what is edited, and its commands from captures to a scored page."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from environments import ROOT

from bract.captures.stores import runs_in
from bract.cli.launch.launcher import Launch, LocalFederation
from bract.cli.launch.reaper import MARK, end_processes
from bract.config import build_config
from bract.rundir import RunDirectory

EXAMPLE = ROOT / "examples" / "quickstart-pytorch"
APP = EXAMPLE / "quickstart"
CLIENTS = 3


def commands(page: Path) -> list[str]:
    """Return the bract commands of a page's first blocks of shell."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [line for line in lines if re.match(r"bract (describe|audit|report) ", line)]
    return found[:3]


def test_every_line_about_bract_is_an_edit_that_the_readme_counts() -> None:
    edits = set()
    for path in APP.glob("*.py"):
        for line in path.read_text().splitlines():
            marked = re.search(r"# edit (\d)$", line)
            ours = re.search(r"bract|HonestButCurious|\bkeep\(", line)
            assert bool(ours) == bool(marked), f"{path.name}: {line}"
            edits |= {marked[1]} if marked else set()
    assert edits == {"1", "2"}
    counted = re.findall(r"^\| (\d) \|", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    assert counted == ["1", "2", "3"]


def test_the_page_about_ones_own_app_shows_the_examples_lines() -> None:
    text = (ROOT / "docs" / "guide" / "your-own-app.md").read_text()
    assert commands(ROOT / "docs" / "guide" / "your-own-app.md") == commands(EXAMPLE / "README.md")
    assert len(commands(EXAMPLE / "README.md")) == 3
    for file in ("server_app.py", "client_app.py"):
        for line in (APP / file).read_text().splitlines():
            if "# edit" in line:
                shown = line.partition("  # edit")[0].strip()
                assert shown in text, shown


class Quickstart(LocalFederation):
    """Real processes with the example's files instead of bract's app."""

    def _write_app(self) -> None:
        bundle = self.processes.folder / "app"
        shutil.copytree(APP, bundle / "quickstart", ignore=shutil.ignore_patterns("__pycache__"))
        manifest = (EXAMPLE / "pyproject.toml").read_text()
        shorter = manifest.replace("num-server-rounds = 3", "num-server-rounds = 1")
        assert shorter != manifest
        (bundle / "pyproject.toml").write_text(shorter)

    def finish(self) -> str:
        """Run the app to its end."""
        self.run_id = self._submit()
        deadline = time.monotonic() + 240
        while not (status := self._flower_status()).startswith("finished"):
            assert time.monotonic() < deadline, "the run did not end"
            self.processes.check_alive()
            time.sleep(0.5)
        return status


def bract(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run one documented command in the app's folder, with a short budget."""
    words = command.replace("--budget 60s", "--budget 4").split()
    return subprocess.run(
        [sys.executable, "-P", "-m", "bract.cli.main", *words[1:]],
        cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An app's folder that is the working directory of every process."""
    home = tmp_path / "home"
    shutil.copytree(EXAMPLE, home, ignore=shutil.ignore_patterns("__pycache__", "build"))
    monkeypatch.chdir(home)
    earlier = os.environ.get("PYTHONPATH", "")
    paths = [os.path.abspath(p) for p in earlier.split(os.pathsep) if p]  # noqa: PTH100
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(home), *paths]))
    return home


def check_page(folder: Path) -> None:
    """Run the documented commands, and look at what they leave."""
    said = []
    for command in commands(EXAMPLE / "README.md"):
        done = bract(folder, command)
        assert done.returncode == 0, done.stderr
        said.append(done.stderr)
    assert "lr 0.1 explains the updates' size" in said[0], said[0]
    (home,) = runs_in(folder / "captures")
    assert (folder / "captures" / "latest").resolve() == home
    written = json.loads((home / "report.json").read_text())
    assert written["verdict"]["level"] in ("leaked", "none-leaked", "undecided")
    scored = [o for o in written["observations"] if o["scored"]]
    assert len(scored) == CLIENTS == len(written["observations"])
    for observation in scored:
        if observation["signals"]["steps"]["declared"] == 1:
            # What was described is what the client did, to the rounding of its numbers.
            assert observation["signals"]["truth_check"]["cosine"] > 1 - 1e-5
    page = (home / "report.html").read_text()
    assert "Guessed from the captures" in page and "training.optimizer sgd" in page


@pytest.mark.processes
@pytest.mark.deployment
def test_from_real_processes_to_a_scored_page(folder: Path, tmp_path: Path) -> None:
    config = build_config({"clients": CLIENTS, "name": "quickstart"})
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    with Quickstart(config, run, Launch(client_app="quickstart.client_app:app")) as federation:
        status = federation.finish()
    assert status == "finished:completed", (run.logs / "superlink.log").read_text()[-3000:]
    assert len(list(folder.glob("captures/latest/round-0001/*/observation.json"))) == CLIENTS
    assert len(list(folder.glob("truth/*/*/round-0001.safetensors"))) == CLIENTS
    check_page(folder)


@pytest.mark.processes
@pytest.mark.deployment
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Flower's simulation engine needs ray"
)
def test_from_the_simulation_engine_to_captures(folder: Path, tmp_path: Path) -> None:
    # Relative folders are those of Flower's processes, so the test names its own.
    for name, relative in (("server_app.py", '"captures"'), ("client_app.py", '"truth"')):
        path = folder / "quickstart" / name
        text = path.read_text()
        absolute = repr(str(folder / relative.strip('"')))
        assert relative in text
        path.write_text(text.replace(relative, absolute))
    mark = uuid.uuid4().hex
    flwr = Path(sys.executable).with_name("flwr")
    own = {"FLWR_HOME": str(tmp_path / "flwr"), "OMP_NUM_THREADS": "1", MARK: mark}
    own["PATH"] = f"{flwr.parent}{os.pathsep}{os.environ['PATH']}"
    try:
        done = subprocess.run(
            [flwr, "run", ".", "--stream", "--run-config", "num-server-rounds=1"],
            cwd=folder, capture_output=True, text=True, check=False, env=os.environ | own,
            timeout=280,
        )  # fmt: skip
    finally:
        # Flower leaves its local SuperLink running.
        end_processes(mark)
    found = list(folder.glob("captures/latest/round-0001/*/observation.json"))
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list(folder.glob("truth/*/*/round-0001.safetensors"))) == len(found)
