"""Start-up kits in containers: an operator and three hospitals, each on a network of its own."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine import Party, build_images, docker, inspect, why_not

from bract.config import build_config
from bract.kits.provisioning import provision
from bract.rundir import RunDirectory

SITES = ("hospital-a", "hospital-b", "hospital-c")
SERVER = "bract.test"
PORT = 8443
OWNER = 12345

pytestmark = [
    pytest.mark.processes,
    pytest.mark.containers,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(os.getuid() != 0, reason="gives the kits to another user, which root may"),
]


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    build_images()


ENCRYPTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "encrypted": {"encryption": {"scheme": "paillier", "threshold": 2, "clip": 0.5}},
}


class Hospitals:
    """A provisioned federation whose parties are Compose projects.

    Parameters
    ----------
    folder
        Folder that holds ``kits``.
    name
        Prefix of projects and networks.
    encryption
        What its runs say of encryption, in the words of a federation's file.
    """

    def __init__(self, folder: Path, name: str, encryption: dict[str, Any]) -> None:
        self.kits = folder / "kits"
        self.name = name
        self.encryption = encryption
        self.runs = self.kits / "operator" / "runs"
        for site in SITES:
            docker("network", "create", "--internal", self.network(site))
        at = {site: {"aliases": [SERVER]} for site in SITES}
        # No port of this machine: sites reach the operator's container by its name.
        self.operator = self._party("operator", "network", at, {"ports": Overridden([])})
        self.sites = {site: self._party(site, "supernode", {site: {}}, {}) for site in SITES}

    def _party(
        self, kit: str, service: str, networks: dict[str, Any], more: dict[str, Any]
    ) -> Party:
        joined = {site: {"external": True, "name": self.network(site)} for site in networks}
        over = {"services": {service: {"networks": networks, **more}}, "networks": joined}
        return Party(self.kits / kit, f"{self.name}-{kit}", over)

    def network(self, site: str) -> str:
        """Return the name of a site's own network."""
        return f"{self.name}-{site}"

    def start(self) -> None:
        """Start every party, and register the sites."""
        self.operator.run()
        self.operate("site", "register", "--kit", "/kit")
        for party in self.sites.values():
            party.run()

    def operate(self, *command: str) -> str:
        """Run one of the operator's commands as the kit's compose file has it."""
        done = self.operator.compose("run", "--rm", "-T", "operator", *command, timeout=500)
        return done.stdout + done.stderr

    def submit(self, name: str, **changes: Any) -> subprocess.Popen[str]:
        """Start a run of this name."""
        content = {
            "name": name,
            "clients": len(SITES),
            "rounds": 4,
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"local_steps": 1},
            "strategy": {"timeout": 60},
            **self.encryption,
        }
        path = self.runs / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        path.chmod(0o644)
        command = self.operator.command(
            *("run", "--rm", "-T", "operator", "run", f"/runs/{name}.yaml", "--runs", "/runs"),
            *("--superlink", "/kit/sockets/8000.sock"),
        )
        return subprocess.Popen(
            command,
            env=self.operator.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def round_of(self, name: str) -> int:
        """Return the last finished round of a run, -1 before the first line."""
        root = self.runs / name
        if not root.is_dir():
            return -1
        return max((row.round for row in RunDirectory(root).metrics()), default=-1)

    def state_of(self, name: str) -> str:
        """Return what the run directory says of a run; empty where there is none yet."""
        root = self.runs / name
        return RunDirectory(root).state().status if (root / "run.json").is_file() else ""

    def logs(self) -> str:
        """Return the end of what each container said."""
        parties = {"operator": self.operator, **self.sites}
        return "\n".join(
            f"== {name}\n{party.compose('logs', '--tail', '25', check=False).stdout}"
            for name, party in parties.items()
        )

    def end(self) -> None:
        """Remove every container and network."""
        for party in (*self.sites.values(), self.operator):
            party.end()
        for site in SITES:
            docker("network", "rm", self.network(site), check=False)


class Overridden(list[Any]):
    """A list that replaces the compose file's own."""


yaml.SafeDumper.add_representer(
    Overridden, lambda dumper, data: dumper.represent_sequence("!override", list(data))
)


def wait_for(done: Callable[[], bool], what: Callable[[], str], seconds: float = 240) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def hospitals(
    request: pytest.FixtureRequest, images: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hospitals]:
    """Every party up, as the kits' compose files have it, under a user without rights."""
    folder = tmp_path_factory.mktemp("kits")
    scheme = getattr(request, "param", "plain")
    config = build_config(
        {
            "name": "study",
            "clients": len(SITES),
            "model": {"name": "lenet-strided", "activation": "relu"},
            "deployment": {"server": SERVER, "port": PORT, "sites": list(SITES)},
            **ENCRYPTION[scheme],
        }
    )
    provision(config, folder / "kits", source=folder / "federation.yaml")
    for path in (folder / "kits", *(folder / "kits").rglob("*")):
        os.chown(path, OWNER, OWNER)
    issued = yaml.safe_load((folder / "kits" / "operator" / "federation.yaml").read_text())
    encryption = {name: issued[name] for name in ENCRYPTION[scheme]}
    made = Hospitals(folder, f"bract-kits-{os.getpid()}", encryption)
    try:
        made.start()
        yield made
    finally:
        made.end()


def finished(hospitals: Hospitals, name: str, run: subprocess.Popen[str]) -> list[Any]:
    """Wait for a run, expect success, and return its rows."""
    said, _ = run.communicate(timeout=400)
    assert run.returncode == 0, said + hospitals.logs()
    directory = RunDirectory(hospitals.runs / name)
    assert directory.state().status == "finished"
    return directory.metrics()


def test_three_hospitals_train_and_the_operator_audits(hospitals: Hospitals) -> None:
    rows = finished(hospitals, "first", hospitals.submit("first", rounds=2))
    assert [row.round for row in rows] == [0, 1, 2]
    assert set(rows[-1].clients) == set(SITES)
    audit = ("run", "--rm", "-T", "audit")
    chosen = ("--attack", "ig", "--budget", "3", "--rounds", "1", "--clients", SITES[0])
    hospitals.operator.compose(*audit, "audit", "/runs/first", *chosen, "--yes", timeout=500)
    hospitals.operator.compose(*audit, "report", "/runs/first", timeout=300)
    assert (hospitals.runs / "first" / "report.html").is_file()
    # What the operator's containers write is the owner's of the kit.
    assert {path.stat().st_uid for path in (hospitals.runs / "first").rglob("*")} == {OWNER}


REACH = """
import socket, ssl, sys, urllib.error, urllib.request
for place in sys.argv[1:]:
    host, port = place.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print(place, "yes")
    except OSError:
        print(place, "no")
trusted = ssl.create_default_context(cafile="/kit/ca.crt")
for path in ("/v1/control/start-run", "/v1/runtime/pull-task", "/v1/fleet/register-node", "/"):
    try:
        urllib.request.urlopen("https://bract.test:8443" + path, data=b"x", context=trusted)
        print(path, "served")
    except urllib.error.HTTPError as error:
        print(path, error.code)
"""


def test_a_hospital_reaches_the_gateway_and_nothing_else(hospitals: Hospitals) -> None:
    other = next(
        iter(inspect(
            hospitals.sites[SITES[1]].container("supernode"), "{{json .NetworkSettings.Networks}}"
        ).values())
    )["IPAddress"]  # fmt: skip
    asked = [f"{SERVER}:{PORT}", f"{SERVER}:8000", f"{other}:9094", "1.1.1.1:443"]
    answers = hospitals.sites[SITES[0]].inside("supernode", "python3", "-c", REACH, *asked)
    assert answers.splitlines() == [
        f"{SERVER}:{PORT} yes",
        *(f"{place} no" for place in asked[1:]),
        "/v1/control/start-run 404",
        "/v1/runtime/pull-task 404",
        "/v1/fleet/register-node 404",
        "/ 404",
    ]


def test_a_container_holds_no_other_party_s_secret(hospitals: Hospitals) -> None:
    for service, files in (
        ("superlink", {"ca.crt", "kit.json", "superlink.crt", "superlink.key"}),
        ("gateway", {"ca.crt", "gateway.crt", "gateway.key", "nginx.conf"}),
    ):
        held = hospitals.operator.inside(service, "sh", "-c", "cd /kit && find . -type f")
        names = {line.removeprefix("./").split("/")[-1] for line in held.split()}
        assert files <= names
        assert not {n for n in names - files if n.endswith((".key", ".pem"))}
    site = hospitals.sites[SITES[0]].inside("supernode", "ls", "/kit").split()
    assert not {"superlink.key", "gateway.key", "ca.key"} & set(site)


def paused(party: Party, service: str) -> None:
    container = party.container(service)
    docker("pause", container)
    time.sleep(8)
    docker("unpause", container)


def restarted(party: Party, service: str) -> None:
    docker("restart", "--time", "2", party.container(service))


def unplugged(hospitals: Hospitals, site: str) -> None:
    container = hospitals.sites[site].container("supernode")
    docker("network", "disconnect", "--force", hospitals.network(site), container)
    time.sleep(8)
    docker("network", "connect", hospitals.network(site), container)


FAULTS: dict[str, Callable[[Hospitals], None]] = {
    "superlink killed": lambda h: h.operator.killed("superlink"),
    "superlink paused": lambda h: paused(h.operator, "superlink"),
    "superlink restarted": lambda h: restarted(h.operator, "superlink"),
    "gateway killed": lambda h: h.operator.killed("gateway"),
    "gateway paused": lambda h: paused(h.operator, "gateway"),
    "hospital killed": lambda h: h.sites[SITES[1]].killed("supernode"),
    "hospital paused": lambda h: paused(h.sites[SITES[1]], "supernode"),
    "hospital unplugged": lambda h: unplugged(h, SITES[1]),
}


PHASES: dict[str, Callable[[Hospitals, str], bool]] = {
    "the server app starts": lambda h, name: h.state_of(name) == "running",
    "after round 1": lambda h, name: h.round_of(name) >= 1,
    "before the last round": lambda h, name: h.round_of(name) >= 3,
}


@pytest.mark.deployment
@pytest.mark.parametrize("hospitals", ENCRYPTION, indirect=True)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_goes_on_after(fault: str, phase: str, hospitals: Hospitals) -> None:
    name = re.sub(r"\W", "-", f"{fault} {phase}")
    run = hospitals.submit(name, strategy={"timeout": 60, "tolerate_failures": True})
    wait_for(lambda: PHASES[phase](hospitals, name) or run.poll() is not None, hospitals.logs)
    started = time.monotonic()
    FAULTS[fault](hospitals)
    rows = finished(hospitals, name, run)
    assert [row.round for row in rows] == [0, 1, 2, 3, 4]
    if phase != "before the last round":
        assert set(rows[-1].clients) == set(SITES), "who was away is back"
    scheme = "encrypted" if hospitals.encryption else "plain"
    print(f"{scheme}, {phase}, {fault}: finished {time.monotonic() - started:.1f} s after")


@pytest.mark.deployment
def test_a_run_whose_server_app_is_killed_fails_at_once_and_resumes(hospitals: Hospitals) -> None:
    run = hospitals.submit("superexec")
    wait_for(lambda: hospitals.round_of("superexec") >= 1 or run.poll() is not None, hospitals.logs)
    started = time.monotonic()
    hospitals.operator.killed("superexec")
    said, _ = run.communicate(timeout=300)
    seconds = time.monotonic() - started
    assert run.returncode == 1, said
    assert "Traceback" not in said
    print(f"superexec killed: {seconds:.1f} s, {said.splitlines()[-1]}")
    assert seconds < 60, said
    hospitals.operate("run", "/runs/superexec.yaml", "--runs", "/runs", "--resume",
                      "--superlink", "/kit/sockets/8000.sock")  # fmt: skip
    assert [row.round for row in RunDirectory(hospitals.runs / "superexec").metrics()] == [
        *range(5)
    ]
