import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from rooms import ROOMS

from bract.config import FederationConfig, dump_config
from bract.config.config import parse_config
from bract.installed import TrustedReference, import_reference, own_word, vouched
from bract.schema import ClientDeclaration

ROOT = Path(__file__).parents[2]
IMPORTERS = {
    "bract/installed/flower.py": "its own table of Flower's private names",
    "bract/lazy.py": "stubs of bract's own packages",
    "bract/installed/plugins.py": "entry points of what is installed",
    "bract/installed/references.py": "trusted references",
    "bract/registry.py": "every module of bract's own packages",
    "cli/export.py": "names in its source",
    "cli/doctor.py": "its own table of registries",
    "cli/launch/cluster.py": "ray",
    "runtime/fork_server.py": "its own list",
}
"""Modules that import by a computed name, and where that name comes from: never from a peer."""

LOADERS = {"import_module", "__import__", "eval", "exec", "run_path", "run_module", "entry_points"}


def test_no_other_module_imports_what_it_computes() -> None:
    found = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
                    # A method `eval` is a module's, which puts it in evaluation mode.
                    if name in LOADERS - {"eval"} or getattr(node.func, "id", None) == "eval":
                        found.add(path.relative_to(ROOT).as_posix())
    assert found == set(IMPORTERS)


def test_no_module_reads_objects_from_a_file() -> None:
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                called = ast.unparse(node.func)
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if called == "torch.load":
                    assert given["weights_only"] == "True", path
                if called in ("np.load", "numpy.load"):
                    assert given.get("allow_pickle", "False") == "False", path
                assert called not in ("pickle.load", "pickle.loads", "yaml.unsafe_load"), path


@pytest.mark.parametrize("name", ["os:abort", "ray:init", "os:getpid", "lenet:x", ":", "a b:c"])
def test_a_reference_that_nobody_lists_is_refused_with_the_place(name: str) -> None:
    with refused("code-untrusted", "THE-PLACE") as error:
        vouched(name, ["my_app:Net"], what="model.name", how="list it in THE-PLACE")
    assert repr(name) in str(error.value)


def test_what_is_listed_is_trusted_and_a_registered_name_is_not_imported() -> None:
    assert type(vouched("a:b", ["a:b"], what="model", how="")) is TrustedReference
    assert type(vouched("lenet", ["lenet"], what="model", how="")) is str
    assert type(own_word("lenet")) is str


def test_a_plain_name_cannot_be_imported_by_accident() -> None:
    plain: Any = "os:getpid"
    with pytest.raises(TypeError, match="not vouched for"):
        import_reference(plain, what="model")
    assert callable(import_reference(TrustedReference("os:getpid"), what="model"))


def test_trust_survives_no_text() -> None:
    config = FederationConfig.model_validate({"model": {"name": "os:getpid"}}).as_own_word()
    assert type(config.model.name) is TrustedReference
    assert type(parse_config(dump_config(config)).model.name) is str
    copied = FederationConfig.model_validate(config.model_dump())
    assert type(copied.model.name) is str


def test_a_declaration_keeps_trust_only_within_the_process() -> None:
    declared = ClientDeclaration(model="a:b")
    trusted = declared.trusting(["a:b"])
    assert type(declared.model) is str
    assert type(replace(trusted, classes=3).model) is TrustedReference
    assert type(trusted.updated({"classes": 3}).model) is TrustedReference
    assert type(declared.trusting(["a:c"]).model) is str
    assert trusted == declared
