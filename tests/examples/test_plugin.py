"""The example of a package that extends bract, installed and used as its author would."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from environments import ROOT, build_wheel, install, without_checkout

pytestmark = pytest.mark.processes

EXAMPLE = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("installed")
    install(build_wheel(folder), folder / "site")
    install(EXAMPLE, folder / "site")
    return folder / "site"


def bract(site: Any, folder: Any, *arguments: Any, code: Any = 0) -> Any:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bract.cli.main", *arguments],
        cwd=folder,
        env=without_checkout(PYTHONPATH=site, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_the_command_line_the_config_and_the_report_know_what_a_package_adds(
    site: Any, tmp_path: Path
) -> None:
    shutil.copy(EXAMPLE / "federation.yaml", tmp_path)
    bract(site, tmp_path, "run", "federation.yaml")
    bract(site, tmp_path, "audit", "runs/stripes")
    found = json.loads(
        bract(
            site, tmp_path, "audit", "runs/stripes", "--attack", "from-grey", "--attack", "labels",
            "--tier", "adaptive", "--budget", "20", "--format", "json",
        ).stdout
    )  # fmt: skip
    attacked = {facts["attack"]: facts["refused"] for facts in found if "attack" in facts}
    assert attacked["from-grey"] is None and "attacks for it: from-grey" in attacked["labels"]
    bract(site, tmp_path, "report", "runs/stripes")
    written = json.loads((tmp_path / "runs" / "stripes" / "report.json").read_text())
    rows = [row for row in written["attacks"] if row["attack"] == "from-grey"]
    assert {row["tier"] for row in rows} == {"oblivious", "adaptive"}
    assert all(row["scored"] for row in rows)
    page = (tmp_path / "runs" / "stripes" / "report.html").read_text()
    for name in ("from-grey", "half", "capped", "perceptron", "stripes", "Size of the updates"):
        assert name in page
    (asked,) = written["questions"]
    assert (asked["question"], asked["level"]) == ("loudness", "measured")
    assert len(asked["table"]["rows"]) == 4, "two clients, two tiers"
    assert all("even_grey" in o["baselines"] for o in written["observations"] if o["scored"])


def test_an_input_that_an_attack_does_not_handle_is_refused_by_name(
    site: Any, tmp_path: Path
) -> None:
    shutil.copy(EXAMPLE / "federation.yaml", tmp_path)
    bract(site, tmp_path, "run", "federation.yaml")
    done = bract(site, tmp_path, "audit", "runs/stripes", "--attack", "gauss-newton", code=4)
    assert "on 'stripes'" in done.stderr
    bract(site, tmp_path, "report", "runs/stripes")
    assert "trains on &#39;stripes&#39;" in (tmp_path / "runs/stripes/report.html").read_text()
    options = ["--attack", "from-grey", "--budget", "2", "--fail-on"]
    gate = [*options, "loudness.norm>1000000"]
    bract(site, tmp_path, "audit", "runs/stripes", *gate)
    crossed = bract(site, tmp_path, "audit", "runs/stripes", *options, "loudness.norm>0", code=3)
    assert "loudness.norm>0" in crossed.stderr


def test_a_wrong_setting_of_a_package_s_extension_is_named(site: Any, tmp_path: Path) -> None:
    text = (EXAMPLE / "federation.yaml").read_text()
    (tmp_path / "key.yaml").write_text(text.replace("cap: 0.5", "cup: 0.5"))
    said = bract(site, tmp_path, "run", "key.yaml", code=2).stderr
    assert "unknown key 'strategy.cup'. Did you mean 'strategy.cap'?" in said
    (tmp_path / "range.yaml").write_text(text.replace("share: 0.25", "share: 2"))
    assert (
        "defense 'half': share: found 2;"
        in bract(site, tmp_path, "run", "range.yaml", code=2).stderr
    )


def test_the_doctor_lists_what_packages_add(site: Any, tmp_path: Path) -> None:
    said = bract(site, tmp_path, "doctor").stderr
    (line,) = [line for line in said.splitlines() if "plugins: " in line]
    groups = dict(group.split(" ", 1) for group in line.partition("plugins: ")[2].split("; "))
    for group, entry in {
        "attacks": "from-grey",
        "defenses": "half",
        "strategies": "capped",
        "models": "perceptron",
        "inputs": "stripes",
        "questions": "loudness",
    }.items():
        assert f"{entry} (bract-example 0.1.0)" in groups[group]
