"""The same image under every variant: its original once, and each variant's reconstruction."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bract.report.order import natural
from bract.schema import Report
from bract.schema.comparison import ComparedImage, VariantRow
from bract.schema.report_rows import ImageFacts

Key = tuple[int, str, str, int]
"""Round, client, content of the original, and how often that occurred before."""


def align(
    root: Path, rows: Sequence[VariantRow], reports: Mapping[str, Report]
) -> list[ComparedImage]:
    """Return one entry for each attacked image, best reconstruction under any variant first.

    Every variant is represented by its strongest attack. The runs share seeds, so a client used
    the same images in the same round of each; an attack may have matched others of them, so
    images are paired by the content of the original. Without originals they are paired by their
    position in the result, which means little for batches: ``paired`` is False.

    Parameters
    ----------
    root
        Folder of the run directories; picture paths become relative to it.
    rows
        Rows of the comparison.
    reports
        By variant.
    """
    first: dict[Key, ComparedImage] = {}
    found: dict[Key, dict[str, list[ImageFacts]]] = {}
    for row in rows:
        for key, image in _images(root / row.variant, row, reports.get(row.variant)):
            below = image.model_copy(
                update={
                    "original": _below(row.variant, image.original),
                    "reconstruction": _below(row.variant, image.reconstruction),
                }
            )
            if key not in first:
                first[key] = ComparedImage(
                    round=key[0],
                    client=key[1],
                    index=image.index,
                    original=below.original,
                    true_label=image.true_label,
                    paired=image.original is not None,
                )
            found.setdefault(key, {}).setdefault(row.variant, []).append(below)
    whole = [entry.model_copy(update={"variants": found[key]}) for key, entry in first.items()]
    return sorted(whole, key=_rank)


def _images(folder: Path, row: VariantRow, report: Report | None) -> list[tuple[Key, ImageFacts]]:
    """Return the images of a variant's strongest attack."""
    found = []
    for o in report.observations if report and row.attack else ():
        if row.attack is None or o.row_key != row.attack.row_key:
            continue
        seen: Counter[str] = Counter()
        for image in () if o.refused else o.images:
            mark = _fingerprint(folder, image)
            seen[mark] += 1
            found.append(((o.round, o.client, mark, seen[mark]), image))
    return found


def _fingerprint(folder: Path, image: ImageFacts) -> str:
    if image.original:
        try:
            content = (folder / image.original).read_bytes()
        except OSError:
            return f"position {image.index}"
        return hashlib.sha256(content).hexdigest()
    return f"position {image.index}"


def _below(variant: str, name: str | None) -> str | None:
    return f"{variant}/{name}" if name else None


def _rank(entry: ComparedImage) -> tuple[float, int, list[tuple[int, int, str]], int]:
    shown = [images[0].scores for images in entry.variants.values()]
    known = [scores.ssim for scores in shown if scores and scores.ssim is not None]
    return -max(known, default=-math.inf), entry.round, natural(entry.client), entry.index
