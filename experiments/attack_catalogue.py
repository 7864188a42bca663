"""Write the catalogue of attacks into a document, from what their classes say.

    python -m experiments.attack_catalogue docs/guide/attacks.md docs/guide/attacks/matching.md

renews the regions ``attacks`` and ``defaults`` of the documents that have them.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from bract.attacks import ATTACKS
from bract.attacks.base import Attacker
from bract.attacks.solve.defaults import ModelDefault
from bract.disk.files import write_text
from bract.installed.plugins import elsewhere, is_of_bract

_IMAGES = {"one": "one", "few": "`audit.max_images`", "any": "any number"}


def catalogue() -> str:
    """Return the attacks of bract and of its packages as a table, family by family."""
    rows = ["| name | method | images | iterations | cost |", "| --- " * 5 + "|"]
    for name, kind in sorted(_own().items(), key=lambda item: (item[1].family, item[0])):
        steps = "none" if kind.iterations == 1 else f"{kind.iterations:,}"
        steps = "those of its attacks" if kind.portfolio and kind.iterations == 1 else steps
        summary = (inspect.getdoc(kind) or "").splitlines()[0]
        summary += " Tier `surrogate`." if kind.tiers == ("surrogate",) else ""
        extra = elsewhere("bract.attacks").get(name)
        summary += f" `bract[{extra}]`." if extra else ""
        cells = (f"`{name}`", summary, _IMAGES[kind.batches], steps, kind.cost)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def defaults() -> str:
    """Return the defaults that depend on the model as a table."""
    rows = ["| attacks | setting | models | value | source |", "| --- " * 5 + "|"]
    users: dict[ModelDefault, list[str]] = {}
    for name, kind in _own().items():
        for default in kind.defaults:
            users.setdefault(default, []).append(f"`{name}`")
    for default, names in users.items():
        kinks = {None: "", True: ", with ReLU or the like", False: ", without ReLU or the like"}
        models = default.family + kinks[default.rectified]
        value = _short(default.value)
        cells = (", ".join(names), f"`{default.setting}`", models, value, default.source)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def with_tables(text: str) -> str:
    """Return a document with those of the two regions renewed that it has."""
    for region, table in (("attacks", catalogue()), ("defaults", defaults())):
        before, begun, rest = text.partition(f"<!-- {region} -->\n")
        if begun:
            text = f"{before}{begun}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def _short(value: float) -> str:
    """Return a number as people write it: 2e-3 rather than 0.002."""
    if 0.0 < value < 0.01:
        return re.sub(r"e-0*", "e-", f"{value:.0e}")
    return f"{value:g}"


def _own() -> dict[str, type[Attacker]]:
    kinds = {name: ATTACKS[name] for name in ATTACKS}
    return {n: kind for n, kind in kinds.items() if is_of_bract(kind)}


if __name__ == "__main__":
    for document in map(Path, sys.argv[1:]):
        write_text(document, with_tables(document.read_text(encoding="utf-8")))
