"""A defense against no defense, image by image: what the same pictures lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bract.report.comparison.variants import UNDEFENDED
from bract.report.facts.summary import mean, spread

Facts = dict[str, Any]


def add_differences(rows: Sequence[Facts], pictures: Sequence[Facts]) -> None:
    """Add to each row how its images differ from the same images undefended.

    ``paired`` has ``images`` (how many both runs returned), and for ``ssim`` and ``psnr`` the mean
    of the differences with its interval over clients. Each run is represented by its strongest
    attack, each image by the mean over its seeds. It is None for the undefended run,
    and where no image is common to both.

    Parameters
    ----------
    pictures
        What `bract.report.comparison.alignment.align` returned; images without originals are left
        out, since nothing says that two of them are the same.
    """
    for row in rows:
        common = [
            (entry, entry["variants"][row["variant"]], entry["variants"][UNDEFENDED])
            for entry in pictures
            if entry["paired"] and {row["variant"], UNDEFENDED} <= set(entry["variants"])
        ]
        if row["variant"] == UNDEFENDED or not common:
            row["paired"] = None
            continue
        row["paired"] = {"images": len(common)}
        for name in ("ssim", "psnr"):
            differences = []
            for entry, defended, plain in common:
                one, other = mean(defended["seeds"][name]), mean(plain["seeds"][name])
                if one is not None and other is not None:
                    differences.append((entry["client"], one - other))
            row["paired"][name] = spread(differences, f"{name} difference")
