import json
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import check_named

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


def error_of(done: subprocess.CompletedProcess[str], code: str, *values: object) -> None:
    """Check that a command ended as bad input: its error in JSON and on stderr, no traceback."""
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"] == code, error
    check_named(error["message"], *values)
    check_named(done.stderr, *values)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ("clients: 0", ("config-value", "clients", "0")),
        ("clients: 5000", ("data-partition", "5000", "1437")),
        ("data: {name: mnist, path: nowhere}", ("file-missing", "'mnist'", "nowhere")),
        ("data: {name: minst}", ("unknown-name", "minst", "'mnist'")),
        ("data: {name: folder, path: nowhere}", ("data-empty", "data.path", "nowhere")),
        ("model: {name: lenett}", ("unknown-name", "lenett", "'lenet'")),
        ("wrong: 1", ("config-key", "wrong")),
        (
            "{model: {name: resnet18}, training: {algorithm: fedsgd, batch_size: 1}}",
            ("config-conflict", "training.batch_size", "client 0", "432", "layer4.0.bn1"),
        ),
    ],
)
def test_bad_config_is_one_line_and_exit_2_with_nothing_written(
    tmp_path: Path, config: str, error: tuple[str, ...]
) -> None:
    (tmp_path / "f.yaml").write_text(config)
    error_of(bract(tmp_path, "run", "f.yaml", "--format", "json"), *error)
    assert not (tmp_path / "runs").exists()


def test_init_writes_a_file_once(tmp_path: Path) -> None:
    assert bract(tmp_path, "init").returncode == 0
    again = bract(tmp_path, "init")
    assert again.returncode == 2
    check_named(again.stderr, "federation.yaml", "--force")


def test_a_taken_run_directory_names_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("name: mine")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "something").write_text("")
    done = bract(tmp_path, "run", "f.yaml", "--format", "json")
    error_of(done, "file-taken", "mine", "--resume", "--overwrite")


def test_a_run_of_an_older_schema_is_refused_with_found_and_wanted(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: old")
    (run / "run.json").write_text(json.dumps({"schema": 1}))
    done = bract(tmp_path, "audit", "runs/old", "--format", "json")
    error_of(done, "schema-version", 1, 2)


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    error_of(bract(tmp_path, "report", "nowhere", "--format", "json"), "file-missing", "nowhere")


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
