"""The compose file: who sees what, and its commands from a federation to a report."""

import json
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml
from containers import CLIENTS, COMPOSE, FOLDER, ROOT, SERVICES, BareContainers, mounts
from flwr.common.config import parse_config_args
from rooms import ROOMS
from safetensors.torch import load_file

from bract.cli.main import app
from bract.client.site import Site
from bract.config import load_config
from bract.rundir import RunDirectory

DOCKERFILE = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
GPU = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text())["services"]


def copied() -> list[str]:
    """Everything that the Dockerfile copies or mounts from the build's folder."""
    found = re.findall(r"--mount=type=bind,source=([^,]+)", DOCKERFILE)
    for line in DOCKERFILE.splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            found += line.split()[1:-1]
    return found


def node_config(client: str) -> dict[str, Any]:
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


@pytest.mark.parametrize("service", list(SERVICES))
def test_bract_takes_every_command_line(service: Any) -> None:
    group: Any = typer.main.get_command(app)
    commands = bract_commands(SERVICES[service]["command"])
    expected = {"superlink": ["superlink"], "federation": ["run"], "audit": ["audit", "report"]}
    assert [c[0] for c in commands] == expected.get(service, ["supernode"])
    for name, *arguments in commands:
        # Parsing refuses what the command does not know; nothing is run.
        group.commands[name].make_context(name, arguments, click.Context(group))


def test_a_site_runs_the_installed_app_and_the_control_api_is_on_the_operator_s_socket_alone() -> (
    None
):
    for client in CLIENTS:
        command = SERVICES[client]["command"]
        assert command[:2] == ["bract", "supernode"]
        assert command[command.index("--app") + 1] == "bract.client.app:app"
    captures = SERVICES["superlink"]["environment"]["BRACT_CAPTURES"]
    assert who_mounts("runs")["superlink"] == "rw" and captures == "/runs"
    server = SERVICES["superlink"]["command"]
    assert server[:2] == ["bract", "superlink"]
    folder = server[server.index("--sockets") + 1]
    assert who_mounts("operator") == {"superlink": "rw", "federation": "rw"}
    run = SERVICES["federation"]["command"]
    assert run[run.index("--superlink") + 1] == f"{folder}/8000.sock"
    assert SERVICES["federation"]["network_mode"] == "none"


def test_clients_share_nothing_and_the_server_holds_nothing_of_theirs() -> None:
    server = {"superlink": "rw", "federation": "rw", "audit": "ro"}
    operator = {"superlink": "rw", "federation": "rw"}
    expected = {"runs": server, "operator": operator, "results": {"audit": "rw"}}
    for client in CLIENTS:
        number = client.removeprefix("client-")
        expected[f"state-{number}"] = {client: "rw"}
        expected[f"truth-{number}"] = {client: "rw", "audit": "ro"}
    assert {volume: who_mounts(volume) for volume in COMPOSE["volumes"]} == expected
    files = {m.source for s in SERVICES for m in mounts(s)} - set(COMPOSE["volumes"])
    assert files == {"./federation.yaml"}
    assert who_mounts("./federation.yaml") == {"federation": "ro"}
    assert not any("secrets" in service or "configs" in service for service in SERVICES.values())


def test_what_a_client_keeps_lies_in_its_own_volumes_under_the_name_that_the_audit_expects() -> (
    None
):
    for client in CLIENTS:
        config = node_config(client)
        known = {f.name.replace("_", "-") for f in fields(Site)}
        assert set(config) <= known | {"partition-id", "num-partitions"}
        site = Site.from_node_config(config)
        assert site.name == client
        number = client.removeprefix("client-")
        targets = {mount.source: mount.target for mount in mounts(client)}
        assert str(site.state_dir) == targets[f"state-{number}"]
        assert str(site.truth_dir) == targets[f"truth-{number}"]
        audited = {mount.source: mount.target for mount in mounts("audit")}
        assert audited[f"truth-{number}"] == f"/truth/{client}"
        assert site.private_seed is None, "a seed in this file is a key that everybody has"


def test_the_server_app_and_the_launcher_have_the_run_at_the_same_path() -> None:
    (run,) = bract_commands(SERVICES["federation"]["command"])
    folder = run[run.index("--runs") + 1]
    for service in ("superlink", "federation", "audit"):
        assert [m.target for m in mounts(service) if m.source == "runs"] == [folder]
    name = load_config(FOLDER / "federation.yaml").name
    assert f"cp -a {folder}/{name} /results/{name}" in SERVICES["audit"]["command"][2]


def test_the_federation_has_as_many_clients_as_there_are_containers() -> None:
    config = load_config(FOLDER / "federation.yaml")
    assert config.clients == len(CLIENTS) == 3
    assert [node_config(client)["partition-id"] for client in CLIENTS] == [0, 1, 2]
    assert {node_config(client)["num-partitions"] for client in CLIENTS} == {3}


def test_no_port_is_published_but_on_loopback_and_no_network_leads_out() -> None:
    for service in SERVICES.values():
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service.get("network_mode", "none") == "none"
        assert set(service.get("networks", [])) <= set(COMPOSE["networks"])
    # Nor to the engine's machine, which has no address on them.
    closed = {
        "internal": True,
        "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"},
    }
    assert all(network == closed for network in COMPOSE["networks"].values())
    assert SERVICES["audit"]["network_mode"] == "none"
    of_clients = [set(SERVICES[client]["networks"]) for client in CLIENTS]
    assert len(set.union(*of_clients)) == sum(map(len, of_clients)), "clients share a network"
    for networks in of_clients:
        assert networks <= set(SERVICES["superlink"]["networks"])


def test_a_service_waits_for_what_it_needs_to_be_healthy() -> None:
    for service in SERVICES.values():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                check = SERVICES[needed]["healthcheck"]["test"]
                port = 8000 if needed == "superlink" else 9094
                assert f"http://127.0.0.1:{port}/health" in check[-1]
                assert any(str(port) in word for word in SERVICES[needed]["command"])


IMAGES = {"superlink": "server", "federation": "server", "audit": "audit"}


def test_every_service_runs_the_image_of_its_part_without_privileges() -> None:
    for name, service in SERVICES.items():
        part = IMAGES.get(name, "client")
        assert service["image"] == f"bract-{part}:${{BRACT_VERSION:?see docker/.env}}"
        if "build" in service:
            assert service["build"]["target"] == part
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        # What Flower writes in its home, and a process for a moment, is gone with the container.
        assert {entry.split(":")[0] for entry in service["tmpfs"]} == {"/tmp", "/app"}
        assert not {"user", "privileged", "cap_add", "devices"} & set(service)
        assert service["mem_limit"] == "${BRACT_MEMORY:-4g}" and service["pids_limit"] == 512
    built = [name for name, service in SERVICES.items() if "build" in service]
    assert built == ["superlink", "client-0", "audit"]


def stage(name: str) -> str:
    """What the Dockerfile says from one ``FROM`` to the next."""
    (found,) = re.findall(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    return str(found)


@pytest.mark.parametrize("part", ["client", "server", "audit"])
def test_an_image_is_the_shared_one_with_its_rooms_a_label_and_no_root(part: Any) -> None:
    lines = stage(part).strip().splitlines()
    assert lines[0] == f"COPY --from=rooms /rooms/{part} /opt/bract"
    assert lines[-2] == "USER 49999:49999"
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=", stage(part))
    assert labels == ["title", "description", "licenses", "version", "revision"]
    (licence,) = re.findall(r'licenses="(.*?)"', stage(part))
    assert licence == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]


def test_the_images_hold_the_whole_package_at_pinned_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {
        "constraints.txt",
        "docker/roles.py",
        "docker/trim_torch.py",
        "pyproject.toml",
        project["project"]["readme"],
    }
    needed |= set(project["project"]["license-files"])
    needed |= set(ROOMS)
    assert set(copied()) == needed
    assert all((ROOT / source).exists() for source in copied())
    for layer in ("runtime", "server-runtime", "audit-runtime"):
        assert re.search(r"--constraint (/build/)?constraints\.txt", stage(layer))
        assert stage(layer).count("uv pip install") == 1
        assert "--override /opt/bract/left-out.txt" in stage(layer)
        # Else every process would compile what it imports, since the root file system is read-only.
        assert stage(layer).count("--compile-bytecode") == 1
    assert "--constraint constraints.txt uv" in stage("installer")
    assert "--build-constraints constraints.txt" in stage("wheel")
    assert stage("runtime").count("$uv ") == 4


def test_nothing_but_what_is_copied_enters_the_build() -> None:
    rules = [r for r in (ROOT / ".dockerignore").read_text().splitlines() if not r.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied())
    build = SERVICES["superlink"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_the_folders_of_the_volumes_are_the_user_s() -> None:
    (made,) = re.findall(r"install --directory (.*)", DOCKERFILE)
    assert "--owner app --group app --mode 0700" in " ".join(made.split())
    for service in SERVICES:
        for volume in SERVICES[service].get("volumes", []):
            # Mounted elsewhere, a volume that is new would belong to root.
            if isinstance(volume, str) and not volume.startswith("."):
                assert volume.split(":")[1] in made.split()
            elif not isinstance(volume, str):
                assert volume["volume"] == {"nocopy": True}


def test_torch_leaves_out_what_a_gpu_needs_unless_it_is_asked_for() -> None:
    defaults = dict(re.findall(r"^ARG (TORCH\w*)=(.*)$", DOCKERFILE, re.MULTILINE))
    assert defaults == {"TORCH": "cpu", "TORCH_WHEELS": ""}
    args = SERVICES["superlink"]["build"]["args"]
    for name, default in defaults.items():
        assert args[name] == f"${{{name}:-{default}}}"
    for task in ("requirements", "trim"):
        wanted = f'if [ "$TORCH" = cpu ]; then /opt/bract/bin/python trim_torch.py {task}'
        assert wanted in stage("runtime")


def test_the_tag_of_the_images_is_the_version_that_kits_ask_for() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"BRACT_VERSION={version}" in (FOLDER / ".env").read_text().splitlines()
    gateway = yaml.safe_load((FOLDER / "compose.gateway.yaml").read_text())["services"]["gateway"]
    assert gateway["image"] == "bract-gateway:${BRACT_VERSION:?see docker/.env}"


def test_the_gpu_file_gives_the_gpus_to_clients_and_audit() -> None:
    assert set(GPU) == {*CLIENTS, "audit"}
    for name in GPU:
        (device,) = GPU[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.processes
def test_commands_to_a_report(tmp_path: Path) -> None:
    """From a federation to a page, and the server's containers hold no truth.

    The name is short because sockets below the test's folder have paths of at most 107 bytes.
    """
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
    assert set(run.metrics()[-1].clients) == set(CLIENTS)
    facts = [json.loads(path.read_text()) for path in run.audit.rglob("*client-2.json")]
    assert facts and all(found["scored"] for found in facts), containers.log("audit")

    kept = load_file(volumes / "truth-2" / "round-0001.safetensors")
    pixels = kept["images"][0].numpy().tobytes()
    for path, data in before[0].items():
        assert pixels[:512] not in data, path
        assert path.suffix != ".png"
    assert not (volumes / "runs" / "docker" / "truth").exists()
