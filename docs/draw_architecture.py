"""Draw docs/architecture.svg: the rooms of bract, and which imports which.

    python docs/draw_architecture.py [--check]

Rooms are the packages below `bract`. The imports are those of the graph that import-linter checks
(grimp). An arrow that follows from others is left out.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from itertools import pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
WIDTH, FLOOR, BOX = 900, 74, 34
"""Width of the picture, height of a floor and height of a room, in pixels."""
SWEEPS = 12
"""Passes that order each floor by its neighbours; more change nothing here."""

Edge = tuple[str, str]


def purposes() -> dict[str, str]:
    """Return each room with the first line of its docstring."""
    found = {}
    for path in sorted((ROOT / "bract").glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.parent.name] = text.partition("\n")[0]
    return found


def imports(rooms: set[str]) -> dict[str, set[str]]:
    """Return the rooms that each room imports."""
    graph = grimp.build_graph("bract", cache_dir=None)
    found: dict[str, set[str]] = {room: set() for room in sorted(rooms)}
    for module in graph.modules:
        room = _room(module)
        if room in rooms:
            used = {_room(other) for other in graph.find_modules_directly_imported_by(module)}
            found[room] |= used & rooms - {room}
    return found


def _room(module: str) -> str:
    return [*module.split("."), ""][1]


def reduced(uses: dict[str, set[str]]) -> list[Edge]:
    """Return the imports that follow from no others."""

    def below(room: str) -> set[str]:
        return uses[room].union(*(below(other) for other in uses[room]))

    return [
        (room, other)
        for room in uses
        for other in sorted(uses[room])
        if not any(other in below(third) for third in uses[room] - {other})
    ]


def depths(rooms: set[str], edges: list[Edge]) -> dict[str, int]:
    """Return each room's floor, counted from the top: one below the lowest room that uses it."""

    def depth(room: str) -> int:
        return 1 + max((depth(user) for user, used in edges if used == room), default=-1)

    return {room: depth(room) for room in sorted(rooms)}


def laid_out(floors: dict[str, int], edges: list[Edge]) -> tuple[dict[str, float], list[list[str]]]:
    """Return the horizontal middle of each node, and each arrow's nodes from top to bottom.

    An arrow that passes a floor gets a node of its own there, so that it runs between the rooms.
    """
    rows: list[list[str]] = [[] for _ in range(max(floors.values()) + 1)]
    for room, floor in floors.items():
        rows[floor].append(room)
    paths = []
    for user, used in edges:
        between = [f"{user}>{used}@{f}" for f in range(floors[user] + 1, floors[used])]
        for node, floor in zip(between, range(floors[user] + 1, floors[used]), strict=True):
            rows[floor].append(node)
        paths.append([user, *between, used])
    near: dict[str, list[str]] = {node: [] for row in rows for node in row}
    for path in paths:
        for upper, lower in pairwise(path):
            near[upper].append(lower)
            near[lower].append(upper)
    at: dict[str, float] = {}
    for row in rows:
        at.update(_spread(row))
    for _ in range(SWEEPS):
        for row in rows:
            row.sort(key=lambda node: (sum(at[n] for n in near[node]) / len(near[node]), node))
            at.update(_spread(row))
    return at, paths


def _spread(row: list[str]) -> dict[str, float]:
    """Place a floor's nodes side by side over the whole width."""
    widths = [24 if "@" in node else _width(node) for node in row]
    gap = (WIDTH - sum(widths)) / (len(row) + 1)
    at, left = {}, gap
    for node, width in zip(row, widths, strict=True):
        at[node] = left + width / 2
        left += width + gap
    return at


def _width(room: str) -> int:
    return 24 + 8 * len(room)


def drawing() -> str:
    """Return the picture."""
    said = purposes()
    edges = reduced(imports(set(said)))
    floors = depths(set(said), edges)
    at, paths = laid_out(floors, edges)
    height = FLOOR * (max(floors.values()) + 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="14" role="img" aria-labelledby="t d">',
        '<title id="t">The rooms of bract</title>',
        '<desc id="d">An arrow leads from a room to one that it imports. Imports that follow from '
        "others are left out.</desc>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#475569"/></marker></defs>',
        "<style>rect.r{fill:#f8fafc;stroke:#475569}path.l{stroke:#94a3b8;fill:none;"
        "marker-end:url(#a)}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for path in paths:
        top = floors[path[0]]
        points = [(at[node], FLOOR * (top + i) + 20) for i, node in enumerate(path)]
        lines.append(f'<path d="{_line(points)}" class="l"/>')
    for room, floor in floors.items():
        x, y, width = at[room], FLOOR * floor + 20, _width(room)
        lines += [
            f"<g><title>{escape(said[room])}</title>"
            f'<rect x="{x - width / 2:.0f}" y="{y}" width="{width}" height="{BOX}" rx="5" '
            f'class="r"/><text x="{x:.0f}" y="{y + 22}" text-anchor="middle">{room}</text></g>'
        ]
    return "\n".join([*lines, "</svg>", ""])


def _line(points: list[tuple[float, int]]) -> str:
    """Return a path from the foot of the first node to the head of the last."""
    (x, y), *rest = points
    drawn = [f"M{x:.0f} {y + BOX}"]
    for number, (x, y) in enumerate(rest, 1):
        drawn.append(f"L{x:.0f} {y - 2}")
        if number < len(rest):
            drawn.append(f"V{y + BOX}")
    return "".join(drawn)


def main() -> None:
    """Write the picture, or exit with 1 if the one that is there differs."""
    text = drawing()
    if "--check" not in sys.argv[1:]:
        PICTURE.write_text(text, encoding="utf-8")
    elif text != PICTURE.read_text(encoding="utf-8"):
        sys.exit("docs/architecture.svg is not current; run python docs/draw_architecture.py")


if __name__ == "__main__":
    main()
