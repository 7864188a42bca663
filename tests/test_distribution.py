"""What is published works where there is no checkout: wheel, sdist, version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from environments import ROOT, build_wheel, install, without_checkout
from rooms import packages

pytestmark = pytest.mark.slow  # builds distributions

PYTHONS = ("3.11", "3.12", "3.13")
PLUG_INS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))


def interpreter(number: str) -> Path | None:
    """Find an interpreter of this version that starts."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{number}"), *sorted(home.glob(f"{number}.*/bin/python"))]
    if sysconfig.get_python_version() == number:
        found.insert(0, sys.executable)
    for path in [str(each) for each in found if each is not None]:
        done = subprocess.run([path, "-V"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.startswith(f"Python {number}."):
            return Path(path)
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run("-m", "build", "--sdist", "--no-isolation", "-o", folder, ROOT)
    (made,) = folder.glob("*.tar.gz")
    return made


def run(*arguments: Any, cwd: Path | None = None, python: Any = sys.executable, **more: Any) -> str:
    done = subprocess.run(
        [python, *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=cwd, env=without_checkout(**more),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_from_the_sdist_holds_what_the_checkout_s_holds(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
        names = archive.getnames()
    (sources,) = tmp_path.iterdir()
    assert any(name.endswith("/docs/measured/method.md") for name in names)
    assert not any("/tests/" in name or name.endswith(".jsonl") for name in names)
    run("-m", "build", "--wheel", "--no-isolation", "-o", tmp_path / "dist", sources)
    (again,) = (tmp_path / "dist").glob("*.whl")
    assert again.name == wheel.name, "an unpacked sdist knows its version"
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()
    assert "bract/cli/demo.yaml" in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_the_packages_of_the_product_alone(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    modules = {
        Path(name).parent.as_posix().replace("/", ".") for name in names if name[-3:] == ".py"
    }
    assert modules == packages()
    assert not [name for name in names if "experiments" in name or "papers" in name]
    # Templates and styles, and the digits; no results.
    assert {Path(name).suffix for name in names} <= {
        ".py",
        ".pyi",
        ".typed",
        ".yaml",
        ".gz",
        ".j2",
        ".css",
    }


def test_what_would_be_published_passes_the_release_s_own_checks(wheel: Path, sdist: Path) -> None:
    assert "PASSED" in run("-m", "twine", "check", "--strict", wheel, sdist)
    run("-m", "check_wheel_contents", "--no-config", "--toplevel", "bract", wheel)


def test_the_sdist_holds_what_its_pages_link_to_and_what_make_demo_runs(
    sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = tmp_path.iterdir()
    pages = [*sources.glob("*.md"), *(sources / "docs").rglob("*.md"),
             *(sources / "examples").rglob("*.md")]  # fmt: skip
    assert len(pages) > 100
    astray = {
        f"{page.relative_to(sources)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
        # Other links are to other hosts, or to pages that the site makes.
        and (ROOT / page.relative_to(sources).parent / target).exists()
    }
    assert astray == set()
    planned = subprocess.run(
        ["make", "-n", "demo"], cwd=sources, capture_output=True, text=True, check=False
    )
    assert planned.returncode == 0, planned.stderr


def described(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return archive.read(name).decode().partition("\n\n")[2]


def test_what_an_index_shows_of_the_package_leads_nowhere_but_to_other_hosts(wheel: Path) -> None:
    """A page of the repository is not there."""
    text = described(wheel)
    assert "'bract[audit]'" in text
    links = re.findall(r"\]\(([^)\s]+)", text)
    assert [link for link in links if "://" not in link] == []


@pytest.mark.parametrize("folder", PLUG_INS, ids=lambda folder: folder.name)
def test_a_plug_in_s_wheel_and_sdist_bring_licence_and_types(folder: Path, tmp_path: Path) -> None:
    run("-m", "build", "--no-isolation", "-o", tmp_path, folder)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    name = folder.name.replace("-", "_")
    licence = (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        assert f"{name}/py.typed" in archive.namelist()
        (there,) = [each for each in archive.namelist() if each.endswith("/licenses/LICENSE")]
        assert archive.read(there) == licence
    with tarfile.open(sdist) as archive:
        (inside,) = [each for each in archive.getmembers() if each.name.endswith("/LICENSE")]
        read = archive.extractfile(inside)
        assert read is not None and read.read() == licence
    run("-m", "check_wheel_contents", "--no-config", "--toplevel", name, wheel)
    assert "PASSED" in run("-m", "twine", "check", "--strict", wheel, sdist)


@pytest.mark.parametrize("number", PYTHONS)
def test_the_wheel_can_be_installed(wheel: Path, number: str, tmp_path: Path) -> None:
    python = interpreter(number)
    if python is None:
        pytest.skip(f"no Python {number} here")
    target = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary", ":all:", "--python-version", number, "--target", target,
        wheel)  # fmt: skip
    # Every module is Python of this version, and what needs no dependency runs.
    run("-m", "compileall", "-q", target, python=python)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import bract, bract.installed.flower; "
    )
    said = run("-c", f"{code}print(bract.__version__)", python=python, cwd=tmp_path)
    assert f"bract-{said.strip()}-" in wheel.name


@pytest.mark.processes
@pytest.mark.deployment
def test_the_demo_runs_where_only_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    """Dependencies come from this environment; its .pth files, and with them the checkout, do not.

    `make stranger` takes them from an index, in environments of other Pythons.
    """
    packages = sysconfig.get_path("purelib")
    environment = tmp_path / "environment"
    run("-m", "venv", "--without-pip", environment)
    site = next((environment / "lib").glob("python*/site-packages"))
    install(wheel, site)
    (site / "dependencies.pth").write_text(f"{packages}\n")
    for name in ("flwr", "flower-superlink", "flower-supernode", "flower-superexec",
                 "flwr-clientapp", "flwr-serverapp"):  # fmt: skip
        (environment / "bin" / name).symlink_to(Path(packages).parents[2] / "bin" / name)
    done = subprocess.run(
        [environment / "bin" / "python", "-P", "-m", "bract.cli.main", "demo", "--quick"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env=without_checkout(PATH=f"{environment / 'bin'}:{os.environ['PATH']}"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "done: runs/demo/report.html" in done.stderr
    page = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert "<img" in page
    assert str(ROOT) not in page


def test_the_changelog_is_in_the_usual_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "https://keepachangelog.com" in text
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    for heading in headings[1:]:
        found = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", heading)
        assert found, heading
        date.fromisoformat(found[2])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
