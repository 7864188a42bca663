import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # a process each


def bract(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bract.cli.main", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("clients: 0", "clients: found 0"),
        ("clients: 5000", "5000 clients for 1437 training examples"),
        ("data: {name: mnist, path: nowhere}", "data.name 'mnist': not found below nowhere"),
        ("data: {name: minst}", "Did you mean 'mnist'?"),
        ("data: {name: folder, path: nowhere}", "holds no images in class folders"),
        ("model: {name: lenett}", "Did you mean 'lenet'?"),
        ("wrong: 1", "unknown key 'wrong'"),
        (
            "{model: {name: resnet18}, training: {algorithm: fedsgd, batch_size: 1}}",
            "training.batch_size 1 leaves client 0, which has 432 training images, a batch of one "
            "image, and at 32 pixels layer4.0.bn1 of model 'resnet18'",
        ),
    ],
)
def test_bad_config_is_one_line_and_exit_2_with_nothing_written(
    tmp_path: Path, config: Any, message: Any
) -> None:
    (tmp_path / "f.yaml").write_text(config)
    done = bract(tmp_path, "run", "f.yaml")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_init_writes_a_file_once(tmp_path: Path) -> None:
    assert bract(tmp_path, "init").returncode == 0
    again = bract(tmp_path, "init")
    assert again.returncode == 2
    assert "exists already; pass --force" in again.stderr


def test_a_taken_run_directory_names_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("name: mine")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "something").write_text("")
    done = bract(tmp_path, "run", "f.yaml")
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "--overwrite" in done.stderr


def test_a_run_of_an_older_schema_is_refused_with_found_and_wanted(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: old")
    (run / "run.json").write_text(json.dumps({"schema": 1}))
    done = bract(tmp_path, "audit", "runs/old")
    assert done.returncode == 2
    assert "run schema 1, this version reads 2" in " ".join(done.stderr.split())


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    done = bract(tmp_path, "report", "nowhere")
    assert done.returncode == 2
    assert "nowhere: no such folder" in done.stderr


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_bad_configuration_is_told_without_importing_torch(command: str, tmp_path: Path) -> None:
    code = (
        "import sys; from bract.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, command, str(tmp_path / "missing.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "2 False\n", done.stderr
