"""The same image under every variant: its original once, and what came back from each upload."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bract.report.facts.summary import natural

Facts = dict[str, Any]


def align(root: Path, rows: Sequence[Facts], runs: Mapping[str, Facts]) -> list[Facts]:
    """Return one entry for each attacked image, best reconstruction under any variant first.

    Every variant is represented by its strongest attack. The runs share seeds, so a client used
    the same images in the same round of each; an attack may have matched others of them, so
    images are paired by the content of the original. Without originals they are paired by their
    position in the result, which says little for batches: ``paired`` is False. Of an attack that
    was repeated with other seeds the first is shown, and ``seeds`` holds the scores of each.

    Parameters
    ----------
    root
        Folder of the run directories; picture paths become relative to it.
    rows
        Rows of the comparison.
    runs
        What `gather` found for each variant.
    """
    found: dict[tuple[Any, ...], Facts] = {}
    for row in rows:
        if row["attack"] is None:
            continue
        wanted = (row["attack"]["attack"], row["attack"]["tier"])
        for o in runs[row["variant"]]["observations"]:
            if (o["attack"], o["tier"]) != wanted or o["refused"]:
                continue
            seen: Counter[str] = Counter()
            for image in o["images"]:
                mark = _fingerprint(root / row["variant"], image)
                seen[mark] += 1
                key = (o["round"], o["client"], mark, seen[mark])
                entry = found.setdefault(key, _entry(o, row["variant"], image))
                shown = entry["variants"].setdefault(row["variant"], _result(row["variant"], image))
                for name, values in shown["seeds"].items():
                    values.append((image["scores"] or {}).get(name))
    return sorted(found.values(), key=_rank)


def _fingerprint(folder: Path, image: Facts) -> str:
    if image["original"]:
        try:
            content = (folder / image["original"]).read_bytes()
        except OSError:
            return f"position {image['index']}"
        return hashlib.sha256(content).hexdigest()
    return f"position {image['index']}"


def _entry(observation: Facts, variant: str, image: Facts) -> Facts:
    return {
        "round": observation["round"],
        "client": observation["client"],
        "index": image["index"],
        "original": _below(variant, image["original"]),
        "true_label": image["true_label"],
        "paired": image["original"] is not None,
        "variants": {},
    }


def _result(variant: str, image: Facts) -> Facts:
    scores = image["scores"] or {}
    return {
        "reconstruction": _below(variant, image["reconstruction"]),
        "ssim": scores.get("ssim"),
        "psnr": scores.get("psnr"),
        "identified_top1": scores.get("identified_top1"),
        "label": image["label"],
        "leaked": image["leaked"],
        "seeds": {"ssim": [], "psnr": []},
    }


def _below(variant: str, name: str | None) -> str | None:
    return f"{variant}/{name}" if name else None


def _rank(entry: Facts) -> tuple[Any, ...]:
    scores = [v["ssim"] for v in entry["variants"].values() if v["ssim"] is not None]
    best = max(scores, default=-math.inf)
    return -best, entry["round"], natural(entry["client"]), entry["index"]
