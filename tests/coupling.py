"""How far the tests are tied to words and to the inside of rooms; each number may only fall.

``python tests/coupling.py`` prints the places, ``python tests/coupling.py --write`` the numbers
into ``tests/coupling.json``, which `test_coupling` holds to the sources.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
NUMBERS = HERE / "coupling.json"
KINDS = {
    "inner imports": "names imported from a module below a room's package",
    "sentences": "`match=` and `assert ... in` with three words or more",
    "private patches": "names with an underscore, or of inner modules, that a test replaces",
}
"""What is counted."""

PLUG_INS = {path.parent.name for path in HERE.parent.glob("plugins/*/bract_*/__init__.py")}
"""Import names of the packages of ``plugins/``."""

_LETTERS = re.compile(r"[A-Za-z]{2}")


@lru_cache
def places(folder: Path = HERE) -> dict[str, list[str]]:
    """Return the places of each kind below a folder, as ``FILE:LINE: what``."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for kind, what in _found(node):
                place = f"{path.relative_to(folder)}:{getattr(node, 'lineno', 0)}"
                found[kind].append(f"{place}: {what}")
    return found


def counts(folder: Path = HERE) -> dict[str, int]:
    """Return the number of places of each kind."""
    return {kind: len(found) for kind, found in places(folder).items()}


def _found(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and is_inner(node.module or ""):
        yield from (("inner imports", f"{node.module}.{name.name}") for name in node.names)
    elif isinstance(node, ast.Import):
        yield from (("inner imports", n.name) for n in node.names if is_inner(n.name))
    elif isinstance(node, ast.keyword) and node.arg == "match" and is_sentence(node.value):
        yield "sentences", ast.unparse(node.value)
    elif isinstance(node, ast.Assert):
        yield from (("sentences", text) for text in _asserted(node.test))
    elif isinstance(node, ast.Call) and _is_private_patch(node):
        yield "private patches", ast.unparse(node)


def is_inner(module: str) -> bool:
    """Return whether a module is below a room, ``bract.attacks.solve``, or in a plug-in."""
    package, dot, inner = module.partition(".")
    return bool(dot) and ("." in inner if package == "bract" else package in PLUG_INS)


def is_sentence(node: ast.AST) -> bool:
    """Return whether a text has three words or more; what is formatted in counts as none."""
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    words = " ".join(text for text in texts if isinstance(text, str)).split()
    return sum(bool(_LETTERS.search(word)) for word in words) >= 3


def _asserted(test: ast.expr) -> Iterator[str]:
    """Yield the sentences that an assertion looks for in a text."""
    for node in ast.walk(test):
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], ast.In | ast.NotIn)
            and isinstance(node.left, ast.Constant | ast.JoinedStr)
            and is_sentence(node.left)
        ):
            yield ast.unparse(node.left)


def _is_private_patch(call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Attribute) and call.func.attr in ("setattr", "delattr")):
        return False
    names = [a.value for a in call.args[:2] if isinstance(a, ast.Constant)]
    texts = [name for name in names if isinstance(name, str)]
    return any(
        re.match(r"_(?!_)", text.rpartition(".")[2]) or is_inner(text.rpartition(".")[0])
        for text in texts
    )


if __name__ == "__main__":
    if "--write" in sys.argv:
        NUMBERS.write_text(json.dumps(counts(), indent=1) + "\n", encoding="utf-8")
    else:
        for kind, found in places().items():
            print(*found, f"{kind} ({KINDS[kind]}): {len(found)}", sep="\n")
