"""Each image's commands need only what it holds; checked without an engine."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from audited import SETTINGS, captured_run, upload_gradient
from containers import COMPOSE, ROOT, free_port
from image_parts import PARTS, ROLES, Ended, Part, held

from bract.config import build_config
from bract.kits.provisioning import provision

SITE = "hospital-a"
IMAGE = re.compile(r"bract-(client|server|audit):")


def service_commands(service: dict[str, Any]) -> list[list[str]]:
    """Return the command lines in a service of a compose file that bract or Python runs."""
    whole = [*service.get("entrypoint", []), *service.get("command", [])]
    if whole[:2] == ["sh", "-ec"]:
        found = [shlex.split(line) for line in whole[2].splitlines()]
    else:
        found = [whole]
    found.append(service.get("healthcheck", {}).get("test", ["CMD"])[1:])
    # A health check that only opens a URL imports nothing of bract.
    return [c for c in found if c[:1] == ["bract"] or "bract." in " ".join(c[:3])]


def kit_commands(kit: Path) -> Iterator[tuple[str, list[str]]]:
    """Return part and command line of a kit's services, README and Kubernetes files."""
    services = yaml.safe_load((kit / "compose.yaml").read_text())["services"]
    parts = {
        name: found[1]
        for name, service in services.items()
        if (found := IMAGE.search(service["image"]))
    }
    for name, part in parts.items():
        for command in service_commands(services[name]):
            if command != ["bract"]:
                yield part, command
    run = re.compile(r"sh start\.sh run --rm (\w+) ([^\n`]+)")
    for service, line in run.findall((kit / "README.md").read_text()):
        command = shlex.split(line.replace("RUN_ID", "1"))
        yield parts[service], [*services[service].get("entrypoint", []), *command]
    for path in kit.rglob("*.yaml"):
        if "kubernetes" not in str(path):
            continue
        for part, command in kubernetes(list(yaml.safe_load_all(path.read_text()))):
            yield part, command


def kubernetes(content: Any) -> Iterator[tuple[str, list[str]]]:
    """Return part and command line of every container in Kubernetes' objects."""
    if isinstance(content, list):
        for item in content:
            yield from kubernetes(item)
    elif isinstance(content, dict):
        found = IMAGE.search(str(content.get("image", "")))
        if found and "command" in content:
            for command in service_commands(content):
                yield found[1], command
        for item in content.values():
            yield from kubernetes(item)


def in_place(command: list[str], places: dict[str, Path]) -> list[str]:
    """Replace the folders of a container by those of this machine."""
    tops = "|".join(places)
    here = [
        re.sub(rf"(?<![\w.:/])/({tops})\b", lambda found: str(places[found[1]]), word)
        for word in command
    ]
    return [word.replace("0.0.0.0:8000", f"127.0.0.1:{free_port()}") for word in here]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """The command lines of each part: of the demo's containers, of two kits, and a few by hand."""
    folder = tmp_path_factory.mktemp("roles")
    short = SETTINGS | {"audit": {"attacks": ["ig"], "iterations": 2, "restarts": 1}}
    run, config, model = captured_run(folder / "results" / "docker", short)
    upload_gradient(run, config, model, 0)
    found: dict[str, list[list[str]]] = {"client": [["bract", "doctor"]], "server": [], "audit": []}
    tops = ("runs", "operator", "results", "state", "truth", "etc", "kit")
    places = {name: folder / name for name in tops} | {"truth": run.truth}
    (folder / "etc" / "bract").mkdir(parents=True)
    (folder / "etc" / "bract" / "federation.yaml").write_bytes(
        (ROOT / "docker" / "federation.yaml").read_bytes()
    )
    for service in COMPOSE["services"].values():
        (part,) = IMAGE.findall(service["image"])
        found[part] += [in_place(command, places) for command in service_commands(service)]
    study = build_config(
        {
            "name": "study",
            "clients": 2,
            "model": {"name": "lenet-strided", "activation": "relu"},
            "encryption": {"scheme": "paillier", "threshold": 2, "clip": 0.5},
            "deployment": {"server": "127.0.0.1", "port": 9, "sites": [SITE, "hospital-b"]},
        }
    )
    provision(study, folder / "kits", source=folder / "federation.yaml")
    for name in ("operator", SITE):
        kit = folder / "kits" / name
        own = places | {"kit": kit, "runs": kit / "runs"}
        for part, command in kit_commands(kit):
            if command not in found[part]:
                found[part].append(in_place(command, own))
    found["client"] += [["bract", "keygen", str(folder / "key"), "--identity"]]
    pack = ["bract", "pack", str(run.root), "--out", str(folder / "pack.tar")]
    found["server"] += [pack, ["bract", "doctor"]]
    for part in PARTS:
        found[part] = [list(words) for words in dict.fromkeys(map(tuple, found[part]))]
    return found


MISSING = re.compile(
    r"error: this installation has no|No module named|Traceback|is not installed; pip install"
)


@pytest.mark.processes
@pytest.mark.parametrize("part", PARTS)
def test_every_command_of_an_image_finds_what_it_imports(
    part: str, commands: dict[str, list[list[str]]], tmp_path: Path
) -> None:
    absent = ["bract", "audit", "/nothing"]
    *ended, refused, sklearn = Part(part, tmp_path).run([*commands[part], absent], ["sklearn"])
    assert [e.command for e in ended] == commands[part]
    broken = [e for e in ended if MISSING.search(e.output)]
    assert not broken, broken
    by_name: dict[str, Ended] = {}
    for one in ended:
        by_name.setdefault(one.command[1], one)
    assert ("this installation has no bract.audit" in refused.output) == (part != "audit")
    assert ("No module named 'sklearn'" in sklearn.output) == (part == "client")
    if part == "client":
        assert "starts flower-supernode" in by_name["supernode"].output
    if part == "server":
        assert "starts flower-superlink" in by_name["superlink"].output
        assert by_name["run"].code == 2
        assert "8000.sock: expected the socket of a `bract superlink`" in by_name["run"].output
    if part == "audit":
        assert by_name["audit"].code == 0, by_name["audit"].output
        assert by_name["report"].code == 0, by_name["report"].output


def test_an_image_holds_less_than_the_whole() -> None:
    assert held("client") < held("server") < held("audit")
    assert not {"uv", "triton", "ray", "pytest", "nvidia-cublas"} & held("audit")
    assert "scikit-learn" in held("server") - held("client")


MARK = "no part of a client's image"


def file_of(module: str) -> Path | None:
    """Return the file of a module of bract; None where there is none."""
    path = ROOT / Path(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


class Imports(ast.NodeVisitor):
    """Collects imports, but for type checkers' and those whose absence is handled."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.found = lines, set[str]()

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test) or "find_spec" in ast.dump(node.test):
            return
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        caught = " ".join(ast.dump(h.type) for h in node.handlers if h.type is not None)
        if "ModuleNotFoundError" not in caught:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {name.name for name in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and MARK not in self.lines[node.lineno - 1]:
            self.found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}


def parsed(module: str) -> ast.Module:
    """Return a module's code."""
    path = file_of(module)
    assert path is not None
    return ast.parse(path.read_text())


def imports(code: ast.AST, module: str) -> set[str]:
    """Return the modules of bract that a module's code imports, also inside functions."""
    path = file_of(module)
    assert path is not None
    visitor = Imports(path.read_text().splitlines())
    visitor.visit(code)
    return {name for name in visitor.found if name.split(".")[0] == "bract"}


def at_the_top(module: str) -> set[str]:
    """Return what a module imports outside functions and classes."""
    code = parsed(module)
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    code.body = [node for node in code.body if not isinstance(node, definitions)]
    return imports(code, module)


START = {
    "client": {
        "bract.client.app",
        "bract.client.mod",
        "bract.runtime.flower",
        "bract.runtime.fork_server",
    },
    "server": {"bract.server.app", "bract.runtime.flower", "bract.runtime.fork_server"},
}


@pytest.mark.parametrize("part", START)
def test_no_import_inside_a_function_leads_to_what_an_image_lacks(
    part: str, commands: dict[str, list[list[str]]]
) -> None:
    lacking = tuple(f"bract.{room}" for room in ROLES.LEFT_OUT[part])
    lines = [command for command in commands[part] if command[0] == "bract"]
    # A command and what is below it, such as `site register`; `doctor` reports what it lacks.
    names = {"main"} | {word for line in lines for word in line[1:3]} - {"doctor"}
    registered = {
        name for name in at_the_top("bract.cli.main") if name.startswith("bract.cli.")
    } | {"bract.cli.main"}
    waiting = {(module, part) for module in START[part]} | {("bract.cli.main", part)}
    seen: dict[str, str] = {}
    while waiting:
        module, user = waiting.pop()
        if module in seen or file_of(module) is None:
            continue
        seen[module] = user
        # A guard, which a site's policy sets, refuses by name where an image lacks its packages.
        if module.startswith((*lacking, "bract.client.guard_attack")):
            continue
        found = at_the_top(module)
        for node in parsed(module).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                module not in registered or node.name in names
            ):
                found |= imports(node, module)
        waiting |= {(name, module) for name in found}
    assert "bract.config" in seen and len(seen) > 100
    reached = {module: user for module, user in seen.items() if module.startswith(lacking)}
    assert not reached
