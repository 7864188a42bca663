"""The command lines of the documents run, on a run or an app of the kind that they name.

What needs processes, another machine or minutes is parsed in `tests/test_site.py`, and listed here
with the reason, so that a new line of a document is either run or excused.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import foreign_models
import pytest
from audited import audited_run
from environments import ROOT
from own_apps import own_app
from typer.testing import CliRunner

from bract.cli.main import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = {
    r"^bract (run|demo|compare|superlink|superexec|supernode|follow|stop|watch)\b": "processes",
    r"^bract (fetch|export .*mlflow)": "another machine",
    r"^bract .*--ray\b": "a cluster",
    r"^bract .*--kit\b": "a kit at its own site",
    r"^bract (provision|site)\b": "a federation's sites; tests/kits/test_provisioning.py",
    r"^bract harden\b": "minutes of searching; tests/cli/test_harden_processes.py",
    r"^bract prior train\b": "minutes of training; tests/cli/test_prior_command.py",
    r"^bract audit .*--question membership\b": "a client's held-out records",
    r"^bract .*--fail-on .*membership": "an audit of membership",
    r"^bract .*--fail-on .*@adaptive": "a defended run; tests/cli/test_gate.py",
    r"^bract .*--(install|show)-completion\b": "the user's own shell",
}

MODEL_OF_APP = "from foreign_models import relu_mlp as Net\n"
KNOWN = (
    "--set input.shape=[1,8,8] --set input.mean=[0] --set input.std=[1] --set training.lr=0.1 "
    "--set training.optimizer=sgd"
)
POLICY = "min_training_images: 1\n"
ROWS = "age,colour,income,outcome\n" + "".join(
    f"{30 + i},{'red' if i % 2 else 'blue'},{1000 + 7 * i},{'yes' if i % 3 else 'no'}\n"
    for i in range(60)
)


def lines() -> Iterator[tuple[str, str]]:
    """Yield the page and the text of every `bract` command line, each text once."""
    seen = set()
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = " ".join(line.partition(" # ")[0].split())
                if line.startswith("bract ") and line not in seen:
                    seen.add(line)
                    yield page.name, line


def is_run(line: str) -> bool:
    return not any(re.search(pattern, line) for pattern in NOT_RUN)


RUN = [pair for pair in lines() if is_run(pair[1])]


def test_most_kinds_of_commands_are_run() -> None:
    kinds = {line.split()[1] for _, line in RUN}
    assert {"init", "audit", "report", "describe", "schema", "policy", "export", "doctor"} <= kinds
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line) for _, line in lines()), (
            f"excused for nothing: {pattern}"
        )


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three clients, to be copied."""
    root = tmp_path_factory.mktemp("audited") / "run"
    audited_run(root, 3)
    CliRunner().invoke(app, ["audit", str(root), "--attack", "ig", "--budget", "5"])
    return root


@pytest.fixture
def here(audited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which everything lies that a document names."""
    for name in ("federation", "demo", "clinic"):
        shutil.copytree(audited, tmp_path / "runs" / name)
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "rows.csv").write_text(ROWS)
    for package in ("my_app", "quickstart"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "task.py").write_text(MODEL_OF_APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(foreign_models.__file__).parent))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def typed(line: str) -> str:
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exception is None or isinstance(done.exception, SystemExit), (line, done.exception)
    # A limit that is exceeded, and a lack of something on this machine, are answers.
    answers = (0, 3) if "--fail-on" in line else (0, 1, 2) if " doctor" in line else (0,)
    assert done.exit_code in answers, (line, done.output)
    return done.output


@pytest.mark.parametrize(("page", "line"), RUN, ids=[f"{p}: {line}" for p, line in RUN])
def test_a_documented_command_runs(page: str, line: str, here: Path) -> None:
    line = line.partition(" > ")[0].replace("runs/federation", str(here / "runs" / "federation"))
    words = line.split()
    if words[1] == "policy":
        typed("bract init federation.yaml")
    if words[1] in ("describe", "audit", "report") and words[2] in (".", "captures-folder"):
        where = own_app(here if words[2] == "." else here / "captures-folder")
        line = line.replace("captures-folder", str(where)).replace("--truth truth", "")
        if words[1] == "describe":
            line = f"{line} {KNOWN} --set training.batch_size=1 --set training.local_epochs=1"
        else:
            model = next((w for w in words if ":" in w), "my_app.task:Net")
            typed(
                f"bract describe {where} --model {model} {KNOWN} --set training.momentum=0 "
                "--set training.batch_size=1 --set training.local_epochs=1"
            )
    if words[1] == "audit" and "--help" not in words:
        line = re.sub(r"--budget \S+|--restarts \d+", "", line) + " --budget 3 --attack ig"
        line = line.replace("client-7", "client-1")
    typed(line)
