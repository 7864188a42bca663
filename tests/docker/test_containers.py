"""The three images and the demo on a real engine: who holds what, and who reaches whom."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from containers import CLIENTS, FOLDER, ROOT
from engine import TAG, Project, build_images, gateway_of, inspect, run_image, what_runs, why_not
from image_parts import PARTS, ROLES, TRIM

LACKS = ROLES.LEFT_OUT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.containers,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    build_images()


@pytest.mark.parametrize("part", PARTS)
def test_an_image_holds_its_own_rooms_and_no_others(part: Any) -> None:
    listed = run_image(
        part, ["python3", "-c", "import bract, os; print(*os.listdir(bract.__path__[0]))"]
    )
    assert listed.returncode == 0, listed.stderr
    held = set(listed.stdout.split())
    assert {"client", "cli", "runtime", "kits", "defenses", "protocol"} <= held
    assert not held & set(LACKS[part])
    assert set(LACKS["client"]) - set(LACKS[part]) <= held


@pytest.mark.parametrize("part", PARTS)
def test_an_image_runs_without_root_without_pip_and_says_what_it_is(part: Any) -> None:
    assert inspect(f"bract-{part}:{TAG}", "{{json .Config.User}}") == "49999:49999"
    labels = inspect(f"bract-{part}:{TAG}", "{{json .Config.Labels}}")
    assert labels["org.opencontainers.image.title"] == f"bract {part}"
    assert labels["org.opencontainers.image.version"] == TAG
    ran = run_image(
        part, ["sh", "-c", "id -u; touch /opt/bract/x; python3 -m pip --version; bract --version"]
    )
    assert ran.stdout.splitlines()[0] == "49999"
    assert "Read-only file system" in ran.stderr
    assert "No module named pip" in ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("bract ")


INSTALLED = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"


@pytest.mark.parametrize("part", PARTS)
def test_an_image_holds_no_installer_and_no_library_of_a_gpu(part: Any) -> None:
    listed = run_image(part, ["python3", "-c", INSTALLED])
    found = set(listed.stdout.lower().split())
    assert "torch" in found
    assert not {"pip", "uv", "triton"} & found
    allowed = {"nvidia-cuda-runtime", "nvidia-cuda-cupti"}
    assert {name for name in found if name.startswith("nvidia-")} <= allowed
    assert inspect(f"bract-{part}:{TAG}", "{{json .Size}}") < 2.2e9


CACHED = """
import importlib.util, pathlib, flwr, torch, bract.cli.main
for module in (flwr, torch, bract.cli.main):
    print(pathlib.Path(importlib.util.cache_from_source(module.__file__)).is_file())
"""


def test_an_image_holds_compiled_modules_since_its_root_is_read_only() -> None:
    assert run_image("client", ["python3", "-c", CACHED]).stdout.split() == ["True"] * 3


def test_torch_computes_without_the_libraries_of_cuda() -> None:
    ran = run_image("audit", ["python3", "-c", TRIM.CHECK])
    assert ran.returncode == 0, ran.stderr


def test_a_client_cannot_be_asked_to_attack() -> None:
    ran = run_image("client", ["bract", "audit", "/nothing"])
    assert ran.returncode == 2
    assert "this installation has no bract.a" in ran.stderr
    assert "run this command in the audit image" in ran.stderr
    assert "Traceback" not in ran.stderr


SMALL = yaml.safe_load((FOLDER / "federation.yaml").read_text())
SMALL["rounds"] = 2
SMALL["data"]["partition"]["sizes"] = [40, 30, 2]
SMALL["audit"] |= {"attacks": ["ig"], "rounds": [1], "iterations": 5, "max_images": 2}


def test_make_docker_demo_leaves_the_page_and_nothing_running(tmp_path: Path) -> None:
    """The very command of the README, with a smaller federation laid over the demo's."""
    project = Project("bract", tmp_path, SMALL)
    over = tmp_path / "compose.over.yaml"
    page = ROOT / "runs" / "docker" / "report.html"
    page.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            ["make", "docker-demo", f"COMPOSE=docker compose -f docker/compose.yaml -f {over}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert what_runs("bract") == []
        assert page.is_file()
        facts = json.loads((page.parent / "report.json").read_text())
        assert facts["run"]["status"] == "finished"
        assert {seen["client"] for seen in facts["observations"]} == set(CLIENTS)
    finally:
        project.end()


def test_a_client_that_is_killed_ends_the_demo_by_its_name(tmp_path: Path) -> None:
    endless = SMALL | {"rounds": 500}
    project = Project("bract", tmp_path, endless)
    over = tmp_path / "compose.over.yaml"
    demo = subprocess.Popen(
        [FOLDER / "demo.sh", *f"docker compose -f docker/compose.yaml -f {over}".split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while "round 1/500" not in project.compose("logs", "federation", check=False).stdout:
            assert demo.poll() is None and time.monotonic() < deadline
            time.sleep(1)
        os.kill(project.state("client-1")["Pid"], signal.SIGKILL)
        said, _ = demo.communicate(timeout=120)
        assert demo.returncode == 1, said[-3000:]
        assert "docker-demo: client-1 ended with code 137" in said
        assert what_runs("bract") == []
    finally:
        demo.kill()
        project.end()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A SuperLink and three clients that wait for a run."""
    project = Project("bract-test", tmp_path_factory.mktemp("running"), SMALL)
    try:
        project.compose("up", "--detach", "--wait", "superlink", *CLIENTS)
        yield project
    finally:
        project.end()


REACH = """
import socket, sys
for place in sys.argv[1:]:
    host, port = place.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print(place, "yes")
    except OSError as error:
        print(place, "no")
"""


@pytest.fixture
def listening() -> Iterator[int]:
    """A port of every address of the engine's machine."""
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


def addresses_of_this_machine() -> list[str]:
    """The IPv4 addresses of its interfaces, and the one that a site's network would give it."""
    shown = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True)
    found = re.findall(r"inet ([0-9.]+)/", shown.stdout)
    return [ip for ip in found if ip != "127.0.0.1"] + [gateway_of("bract-test_site-0")]


def test_a_client_reaches_nothing_that_listens_on_the_engine_s_machine(
    running: Project, listening: int
) -> None:
    asked = [f"{address}:{listening}" for address in addresses_of_this_machine()]
    answers = running.inside("client-0", "python3", "-c", REACH, *asked).splitlines()
    assert answers == [f"{place} no" for place in asked]


def test_a_client_reaches_the_superlink_and_nothing_else(running: Project) -> None:
    addresses = {
        client: next(
            iter(inspect(running.container(client), "{{json .NetworkSettings.Networks}}").values())
        )["IPAddress"]
        for client in CLIENTS
    }
    others = [f"client-1:{port}" for port in (8000, 9094)]
    others += [f"{addresses['client-1']}:{port}" for port in (8000, 9094)]
    asked = ["superlink:8000", *others, "pypi.org:443", "1.1.1.1:443"]
    answers = running.inside("client-0", "python3", "-c", REACH, *asked).splitlines()
    assert answers == ["superlink:8000 yes", *(f"{place} no" for place in asked[1:])]


ASK = """
import sys, urllib.error, urllib.request
for path in sys.argv[1:]:
    try:
        print(urllib.request.urlopen("http://superlink:8000" + path, data=b"x", timeout=5).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


def test_a_client_reaches_no_control_api(running: Project) -> None:
    paths = [
        "/v1/control/start-run",
        "/v1/control/list-runs",
        "/v1/runtime/pull-task",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "//v1/control/start-run",
        "/V1/CONTROL/start-run",
        "/docs",
        "/openapi.json",
        "/",
    ]
    answers = running.inside("client-0", "python3", "-c", ASK, *paths).split()
    assert answers == ["404"] * len(paths)


@pytest.mark.parametrize("service", ["superlink", "client-0"])
def test_a_container_is_held_to_its_memory_and_processes(running: Project, service: Any) -> None:
    limits = inspect(running.container(service), "{{json .HostConfig}}")
    assert limits["Memory"] == 4 << 30 and limits["PidsLimit"] == 512


def test_a_container_sees_its_own_volumes_only(running: Project) -> None:
    folders = "/runs /operator /results /state /truth"
    seen = f"for d in {folders}; do mountpoint -q $d && echo $d; done; true"
    expected = {"superlink": ["/runs", "/operator"]} | {c: ["/state", "/truth"] for c in CLIENTS}
    for service, its_own in expected.items():
        assert running.inside(service, "sh", "-c", seen).split() == its_own
    names = {
        mount["Name"]
        for client in CLIENTS
        for mount in inspect(running.container(client), "{{json .Mounts}}")
    }
    assert len(names) == 2 * len(CLIENTS), "clients share a volume"
