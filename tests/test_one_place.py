"""What one place answers, no other asks again."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest
from rooms import ROOT, written

from bract.attacks import ATTACKS

PAPERS = "plugins/bract-papers/bract_papers"
"""A package of attacks, which keeps what attacks of the core keep."""

Asked = Callable[[ast.AST], bool]


def compares_algorithm(node: ast.AST) -> bool:
    """Return whether a node compares an ``algorithm``."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    return any(isinstance(side, ast.Attribute) and side.attr == "algorithm" for side in sides)


def counts_steps(node: ast.AST) -> bool:
    """Return whether a node compares ``local_steps``, calculates with it, or takes a default."""
    inner: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        inner = [
            side
            for side in (node.left, *node.comparators)
            if not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
        ]
    elif isinstance(node, ast.BinOp):
        inner = [node.left, node.right]
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        inner = node.values
    return any(isinstance(one, ast.Attribute) and one.attr == "local_steps" for one in inner)


def reads_declared_shape(node: ast.AST) -> bool:
    """Return whether a node reads ``image_shape`` off a ``declaration``, which may be None."""
    if not isinstance(node, ast.Attribute) or node.attr != "image_shape":
        return False
    return isinstance(node.value, ast.Attribute) and node.value.attr == "declaration"


def lists_a_registry(node: ast.AST) -> bool:
    """Return whether a node says itself what a registry lacks, without who could bring it."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    registries = ("ATTACKS", "DATASETS", "DEFENSES", "INPUTS", "MODELS", "STRATEGY_SECTIONS")
    return node.func.id == "unknown" and ast.unparse(node.args[-1]) in registries


def hooks_a_module(node: ast.AST) -> bool:
    """Return whether a node registers a hook on a module's forward pass."""
    names = ("register_forward_hook", "register_forward_pre_hook")
    return isinstance(node, ast.Attribute) and node.attr in names


def decomposes(node: ast.AST) -> bool:
    """Return whether a node decides a rank, or takes the singular values that decide it."""
    names = ("svd", "svdvals", "matrix_rank", "svd_lowrank", "pca_lowrank")
    return isinstance(node, ast.Attribute) and node.attr in names


def asked(rooms: tuple[str, ...], question: Asked) -> Iterator[str]:
    """Yield where files of some rooms ask a question of a declaration."""
    for room in rooms:
        for path in written(room):
            for node in ast.walk(ast.parse(path.read_text())):
                if question(node):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("question", [compares_algorithm, counts_steps])
def test_the_law_of_a_step_alone_reads_algorithm_and_local_steps(question: Asked) -> None:
    """`bract.updates.step_law.StepLaw`: whether one gradient, how many steps, which factor."""
    places = [
        place
        for place in asked(("attacks", "audit", PAPERS), question)
        if not place.startswith("audit/description/steps.py")
    ]
    assert not places


LASTING = {
    f"{PAPERS}/text_matching/embedded.py": "a copy that takes embeddings for ids",
    "attacks/problem/target_model.py": "a copy whose output is checked",
}
"""Files of attacks whose hooks are a part of the model, and not a look into it."""


def test_the_tap_alone_hooks_into_a_model_that_is_attacked() -> None:
    """`bract.models.tap`: what enters modules, what leaves them, and what takes its place."""
    found = {
        place.rpartition(":")[0] for place in asked(("attacks", "audit", "plugins"), hooks_a_module)
    }
    assert found == set(LASTING)


def test_attacks_read_the_shape_of_an_input_off_the_target_model() -> None:
    """`TargetModel.image_shape`, which is there: a declaration may lack it."""
    found = {
        place.rpartition(":")[0] for place in asked(("attacks", "plugins"), reads_declared_shape)
    }
    assert found == {"attacks/problem/target_model.py"}


def test_a_registry_alone_says_what_it_lacks() -> None:
    rooms = ("attacks", "audit", "bract", "cli", "client", "plugins", "report", "server")
    assert not list(asked(rooms, lists_a_registry)), "raise or say `REGISTRY.missing(name)`"


DEFENDING = {
    f"{PAPERS}/adaptive/truncated_svd.py": "the defense itself, on a candidate's gradient",
    f"{PAPERS}/defenses/truncated_svd.py": "the defense, of an update",
    "attacks/problem/spectral.py": "the vectors to which a client's power iteration comes",
}
"""Files of attacks that decompose a matrix as a client does, and read no rank off it."""


def test_the_room_of_readings_alone_decides_how_many_singular_values_count() -> None:
    """`bract.attacks.reading.spectrum`: shares of the largest, edges of noise, complements."""
    found = {
        place.rpartition(":")[0]
        for place in asked(("attacks", "plugins"), decomposes)
        if not place.startswith("attacks/reading/")
    }
    assert found == set(DEFENDING)


def names_a_method(node: ast.AST) -> bool:
    """Return whether a node imports an attack's module, or holds an attack's registered name."""
    own = "bract.attacks.methods.portfolio."
    kinds = {name: ATTACKS[name] for name in ATTACKS}
    others = {name: kind for name, kind in kinds.items() if not kind.__module__.startswith(own)}
    if isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{alias.name}" for alias in node.names}
        modules = {kind.__module__ for kind in others.values()}
        return any(name.startswith(module) for name in names for module in modules)
    return isinstance(node, ast.Constant) and node.value in others


def test_a_portfolio_knows_no_method_by_module_or_name() -> None:
    """It ranks readings by their certificates; attacks say themselves in which stage they help."""
    assert not list(asked(("attacks/methods/portfolio",), names_a_method))
    assert list(asked(("attacks/methods/maui",), names_a_method))


def test_one_module_labels_the_axes_of_charts() -> None:
    """`bract.report.page.axis`: round ticks, places, grid lines."""
    sources = [
        path
        for room in ("report", "plugins")
        for kind in ("*.py", "*.j2")
        for path in written(room, kind)
    ]
    labelling = [path for path in sources if "text-anchor" in path.read_text()]
    assert labelling == [ROOT / "report" / "page" / "axis.py"]


def test_one_reader_takes_returned_statistics_apart() -> None:
    """`bract.attacks.problem.returned_buffers.RunningStatistics`: steps, shares, batches."""
    readers = {
        place.rpartition(":")[0]
        for place in asked(
            ("attacks", PAPERS),
            lambda node: isinstance(node, ast.Attribute) and node.attr == "returned_buffers",
        )
    }
    assert readers == {
        "attacks/problem/returned_buffers.py",
        "attacks/solve/own_statistics.py",  # the size of their rounding
        "attacks/solve/checkpoints.py",  # their digest
        "attacks/membership/measuring.py",  # the model that came back
    }
