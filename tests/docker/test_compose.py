"""The compose file: who sees what, and its commands from a federation to a report."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer
import yaml
from containers import CLIENTS, COMPOSE, FOLDER, ROOT, SERVICES, BareContainers, mounts
from flwr.common.config import parse_config_args
from flwr.superlink.cli import flower_superlink
from flwr.supernode.cli import flower_supernode
from safetensors.torch import load_file

from bract.cli.main import app
from bract.client.site import NODE_KEYS, Site
from bract.config import load_config
from bract.rundir import RunDirectory

DOCKERFILE = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
GPU = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text())["services"]


def copied() -> list[str]:
    """Everything that the Dockerfile copies into the image."""
    found = []
    for line in DOCKERFILE.splitlines():
        if line.startswith("COPY "):
            found += line.split()[1:-1]
    return found


def node_config(client: str) -> dict:
    command = SERVICES[client]["command"]
    return parse_config_args([command[command.index("--node-config") + 1]])


def who_mounts(volume: str) -> dict[str, str]:
    return {
        service: "rw" if mount.writable else "ro"
        for service in SERVICES
        for mount in mounts(service)
        if mount.source == volume
    }


def bract_commands(command: list[str]) -> list[list[str]]:
    """The `bract` command lines of a service, also those inside a shell script."""
    if command[:2] == ["sh", "-ec"]:
        return [c for line in command[2].splitlines() for c in bract_commands(shlex.split(line))]
    return [command[1:]] if command[:1] == ["bract"] else []


@pytest.mark.parametrize(
    ("service", "entry"),
    [("superlink", flower_superlink), *((client, flower_supernode) for client in CLIENTS)],
)
def test_flower_knows_every_option(service, entry, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flower", "--help"])
    with pytest.raises(SystemExit):
        entry()
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    options = [word for word in SERVICES[service]["command"] if word.startswith("--")]
    assert "--insecure" in options
    assert set(options) <= known


@pytest.mark.parametrize("service", ["federation", "audit"])
def test_bract_takes_every_command_line(service):
    group = typer.main.get_command(app)
    commands = bract_commands(SERVICES[service]["command"])
    assert [c[0] for c in commands] == (["run"] if service == "federation" else ["audit", "report"])
    for name, *arguments in commands:
        # Parsing refuses what the command does not know; nothing is run.
        group.commands[name].make_context(name, arguments, click.Context(group))


def test_clients_share_nothing_and_the_server_holds_nothing_of_theirs():
    server = {"superlink": "rw", "federation": "rw", "audit": "ro"}
    expected = {"runs": server, "results": {"audit": "rw"}}
    for client in CLIENTS:
        number = client.removeprefix("client-")
        expected[f"state-{number}"] = {client: "rw"}
        expected[f"truth-{number}"] = {client: "rw", "audit": "ro"}
    assert {volume: who_mounts(volume) for volume in COMPOSE["volumes"]} == expected
    files = {m.source for s in SERVICES for m in mounts(s)} - set(COMPOSE["volumes"])
    assert files == {"./federation.yaml"}
    assert who_mounts("./federation.yaml") == {"federation": "ro"}
    assert not any("secrets" in service or "configs" in service for service in SERVICES.values())


def test_what_a_client_keeps_lies_in_its_own_volumes_under_the_name_that_the_audit_expects():
    for client in CLIENTS:
        config = node_config(client)
        assert set(config) <= set(NODE_KEYS)
        site = Site.from_node_config(config)
        assert site.name == client
        number = client.removeprefix("client-")
        targets = {mount.source: mount.target for mount in mounts(client)}
        assert str(site.state_dir) == targets[f"state-{number}"]
        assert str(site.truth_dir) == targets[f"truth-{number}"]
        audited = {mount.source: mount.target for mount in mounts("audit")}
        assert audited[f"truth-{number}"] == f"/truth/{client}"
        assert site.private_seed is None, "a seed in this file is a key that everybody has"


def test_the_server_app_and_the_launcher_have_the_run_at_the_same_path():
    (run,) = bract_commands(SERVICES["federation"]["command"])
    folder = run[run.index("--runs") + 1]
    for service in ("superlink", "federation", "audit"):
        assert [m.target for m in mounts(service) if m.source == "runs"] == [folder]
    name = load_config(FOLDER / "federation.yaml").name
    assert f"cp -a {folder}/{name} /results/{name}" in SERVICES["audit"]["command"][2]


def test_the_federation_has_as_many_clients_as_there_are_containers():
    config = load_config(FOLDER / "federation.yaml")
    assert config.clients == len(CLIENTS) == 3
    assert [node_config(client)["partition-id"] for client in CLIENTS] == [0, 1, 2]
    assert {node_config(client)["num-partitions"] for client in CLIENTS} == {3}


def test_no_port_is_published_but_on_loopback_and_no_network_leads_out():
    for service in SERVICES.values():
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service.get("network_mode", "none") == "none"
        assert set(service.get("networks", [])) <= set(COMPOSE["networks"])
    assert all(network == {"internal": True} for network in COMPOSE["networks"].values())
    assert SERVICES["audit"]["network_mode"] == "none"
    of_clients = [set(SERVICES[client]["networks"]) for client in CLIENTS]
    assert len(set.union(*of_clients)) == sum(map(len, of_clients)), "clients share a network"
    for networks in (*of_clients, set(SERVICES["federation"]["networks"])):
        assert networks <= set(SERVICES["superlink"]["networks"])


def test_a_service_waits_for_what_it_needs_to_be_healthy():
    for service in SERVICES.values():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                check = SERVICES[needed]["healthcheck"]["test"]
                port = 8000 if needed == "superlink" else 9094
                assert f"http://127.0.0.1:{port}/health" in check[-1]
                assert str(port) in SERVICES[needed]["command"]


def test_every_service_runs_the_one_image_without_privileges():
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["49999:49999"]
    for service in SERVICES.values():
        assert service["image"] == "bract:local"
        assert service["cap_drop"] == ["ALL"]
        assert not {"user", "privileged", "cap_add", "devices"} & set(service)
    assert [name for name, service in SERVICES.items() if "build" in service] == ["superlink"]


def test_the_image_holds_the_whole_package_at_pinned_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"constraints.txt", "pyproject.toml", project["project"]["readme"]}
    needed |= set(project["project"]["license-files"])
    needed |= set(project["tool"]["setuptools"]["package-dir"].values())
    assert set(copied()) == needed
    assert all((ROOT / source).exists() for source in copied())
    installs = re.findall(r"pip install (.*?)(?:&&|$)", DOCKERFILE, re.MULTILINE)
    assert len(installs) == 4
    assert all("--constraint constraints.txt" in line for line in installs)


def test_nothing_but_what_is_copied_enters_the_build():
    rules = [r for r in (ROOT / ".dockerignore").read_text().splitlines() if not r.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied())
    build = SERVICES["superlink"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_the_folders_of_the_volumes_are_the_user_s():
    (made,) = re.findall(r"install --directory (.*)", DOCKERFILE)
    assert "--owner app --group app --mode 0700" in " ".join(made.split())
    for service in SERVICES:
        for volume in SERVICES[service].get("volumes", []):
            # Mounted elsewhere, a volume that is new would belong to root.
            if isinstance(volume, str) and not volume.startswith("."):
                assert volume.split(":")[1] in made.split()
            elif not isinstance(volume, str):
                assert volume["volume"] == {"nocopy": True}


def test_torch_is_the_build_without_cuda_unless_the_gpu_file_is_laid_over():
    (index,) = re.findall(r"^ARG TORCH_INDEX=(.*)$", DOCKERFILE, re.MULTILINE)
    args = SERVICES["superlink"]["build"]["args"]
    assert args["TORCH_INDEX"] == f"${{TORCH_INDEX:-{index}}}"
    assert set(GPU) == set(SERVICES)
    assert {service["image"] for service in GPU.values()} == {"bract:local-cuda"}
    assert GPU["superlink"]["build"]["args"]["TORCH_INDEX"] != index
    with_gpu = {name for name, service in GPU.items() if "deploy" in service}
    assert with_gpu == {*CLIENTS, "audit"}
    for name in with_gpu:
        (device,) = GPU[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.processes
def test_the_commands_lead_from_a_federation_to_a_report_that_the_server_never_sees(tmp_path):
    config = yaml.safe_load((FOLDER / "federation.yaml").read_text())
    config["rounds"] = 1
    config["data"]["partition"]["sizes"] = [4, 3, 2]
    config["audit"] |= {"attacks": ["ig"], "rounds": [1], "iterations": 5, "max_images": 2}
    containers = BareContainers(tmp_path, yaml.safe_dump(config))
    volumes = tmp_path / "volumes"
    try:
        containers.start("federation")
        containers.finish("federation")
        shown = [volumes / "runs", *(volumes / f"truth-{i}" for i in range(3))]
        before = [contents(folder) for folder in shown]
        containers.start("audit")
        containers.finish("audit")
    finally:
        containers.end()
    assert [contents(folder) for folder in shown] == before, "the audit only reads these"

    run = RunDirectory.open(volumes / "results" / "docker")
    assert (run.root / "report.html").is_file()
    assert set(run.metrics()[-1]["clients"]) == set(CLIENTS)
    facts = [path.read_text() for path in run.audit.rglob("*client-2.json")]
    assert facts and all('"scored": true' in text for text in facts), containers.log("audit")

    kept = load_file(volumes / "truth-2" / "round-0001.safetensors")
    pixels = kept["images"][0].numpy().tobytes()
    for path, data in before[0].items():
        assert pixels[:512] not in data, path
        assert path.suffix != ".png"
    assert not (volumes / "runs" / "docker" / "truth").exists()
