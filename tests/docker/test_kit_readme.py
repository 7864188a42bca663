"""Kits used as their READMEs print it, in encrypted runs that two of three decrypt."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from containers import free_port
from engine import Party, build_images, gateway_of, inspect, why_not

from bract.config import build_config
from bract.kits.provisioning import provision
from bract.rundir import RunDirectory

SITES = ("hospital-a", "hospital-b", "hospital-c")
OWNER = 12345
NAME = f"study-{os.getpid()}"

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


def own(folder: Path, user: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user)


def copied(kit: Path, to: Path, owner: int = OWNER) -> Path:
    shutil.copytree(kit, to / kit.name)
    own(to / kit.name, owner)
    return to / kit.name


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kits of three hospitals, which reach the gateway at this machine's own bridge."""
    folder = tmp_path_factory.mktemp("readme")
    config = build_config(
        {
            "name": NAME,
            "clients": len(SITES),
            "rounds": 3,
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"local_steps": 1},
            "strategy": {"timeout": 60, "tolerate_failures": True},
            "encryption": {"scheme": "paillier", "threshold": 2, "clip": 0.5},
            "deployment": {
                "server": gateway_of("bridge"),
                "port": free_port(),
                "sites": list(SITES),
            },
        }
    )
    provision(config, folder / "kits", source=folder / "federation.yaml")
    return folder / "kits"


@pytest.fixture
def parties(kits: Path, tmp_path: Path) -> Iterator[dict[str, Party]]:
    """The parties, each with its kit as it was issued."""
    made = {name: Party(copied(kits / name, tmp_path)) for name in ("operator", *SITES)}
    try:
        yield made
    finally:
        for party in made.values():
            party.end()


def test_the_readmes_lead_to_an_audited_run_that_survives_a_killed_hospital(
    parties: dict[str, Party],
) -> None:
    operator = parties["operator"]
    start, register, train, audit, report = operator.readme()
    began = time.monotonic()
    operator.run(start)
    print(f"operator up after {time.monotonic() - began:.0f} s")
    assert "registered: hospital-a, hospital-b, hospital-c" in operator.run(register)
    for name in SITES:
        doctor, join = parties[name].readme()
        assert "FAIL" not in parties[name].run(doctor)
        parties[name].run(join)
        log = parties[name].compose("logs", "--no-log-prefix").stdout
        assert log.startswith(f"{name} of the federation {NAME}")
    print(f"all ready after {time.monotonic() - began:.0f} s")
    limits = inspect(parties[SITES[0]].container("supernode"), "{{json .HostConfig}}")
    assert limits["Memory"] == 4 << 30 and limits["PidsLimit"] == 512
    assert limits["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "5"}
    run = operator.begin(train)
    directory = RunDirectory(operator.kit / "runs" / NAME)
    while run.poll() is None and not rounds_of(directory):
        time.sleep(0.2)
    parties[SITES[1]].killed("supernode")
    said, _ = run.communicate(timeout=500)
    assert run.returncode == 0, said
    print(f"three rounds after {time.monotonic() - began:.0f} s")
    rows = directory.metrics()
    assert [row.round for row in rows] == [0, 1, 2, 3]
    operator.run(audit)
    operator.run(report)
    assert (directory.root / "report.html").is_file()
    print(f"audited after {time.monotonic() - began:.0f} s")
    accessed = operator.compose("logs", "--no-log-prefix", "gateway").stdout
    assert '"POST /v1/fleet/pull-messages HTTP/1.1" 200' in accessed
    # Compose's own commands work after the first start.
    assert "supernode" in parties[SITES[0]].run("docker compose up -d")
    for party in parties.values():
        party.run("sh start.sh down")


def rounds_of(directory: RunDirectory) -> int:
    if not directory.root.is_dir():
        return 0
    return max((row.round for row in directory.metrics()), default=0)


def test_a_kit_of_root_is_refused_by_name(kits: Path, tmp_path: Path) -> None:
    for name in ("operator", SITES[0]):
        kit = copied(kits / name, tmp_path, owner=0)
        said = Party(kit).run(code=2)
        assert "this folder is root's" in said and said.count("\n") == 1
        assert not (kit / ".env").exists()


def test_compose_alone_names_start_sh_until_it_ran(kits: Path, tmp_path: Path) -> None:
    party = Party(copied(kits / SITES[0], tmp_path))
    assert "sh start.sh" in party.run("docker compose up -d", code=1)


@pytest.mark.parametrize("command", ["sh start.sh", "sh start.sh run --rm supernode true"])
def test_an_image_that_is_missing_is_named_with_what_makes_it(
    kits: Path, tmp_path: Path, command: str
) -> None:
    party = Party(copied(kits / SITES[0], tmp_path))
    party.environment["BRACT_CLIENT_IMAGE"] = "bract-client:0.0.0"
    said = party.run(command, code=2)
    assert "the image bract-client:0.0.0 is not on this machine" in said and "make images" in said
    assert said.count("\n") == 1


def test_a_service_that_fails_is_one_line_with_its_last_words_and_starts_once_repaired(
    kits: Path, tmp_path: Path
) -> None:
    kit = copied(kits / SITES[2], tmp_path)
    issued = (kit / "ca.crt").read_bytes()
    (kit / "ca.crt").write_bytes(issued + b"\n")
    party = Party(kit, f"bract-broken-{os.getpid()}")
    try:
        said = party.run(code=1)
        assert "supernode does not start" in said and "ca.crt is not the file" in said
        assert said.count("\n") == 1
        (kit / "ca.crt").write_bytes(issued)
        party.run()  # the gateway that does not answer yet is waited for
    finally:
        party.end()


def test_no_image_of_a_kit_is_ever_pulled_and_every_service_has_a_health_check(kits: Path) -> None:
    for name in ("operator", SITES[0]):
        services = yaml.safe_load((kits / name / "compose.yaml").read_text())["services"]
        assert {service["pull_policy"] for service in services.values()} == {"never"}
        for service in services.values():
            assert "healthcheck" in service or service["profiles"] == ["commands"]
