"""A defense against no defense, image by image: what the same pictures lost."""

from __future__ import annotations

from collections.abc import Sequence

from bract.report.comparison.variants import UNDEFENDED
from bract.report.order import mean
from bract.report.tables import spread
from bract.schema.comparison import ComparedImage, PairedDifferences, VariantRow
from bract.schema.report_rows import ImageFacts, Spread


def paired(rows: Sequence[VariantRow], pictures: Sequence[ComparedImage]) -> list[VariantRow]:
    """Return the rows with how their images differ from the same images undefended.

    Each run is represented by its strongest attack, each image by the mean over its seeds; the
    difference is the mean, with its interval over clients. It is None for the undefended run, and
    where no image is common to both.

    Parameters
    ----------
    pictures
        What `bract.report.comparison.alignment.align` returned; images without originals are left
        out, since nothing shows that two of them are the same.
    """
    return [row.model_copy(update={"paired": _paired(row.variant, pictures)}) for row in rows]


def _paired(variant: str, pictures: Sequence[ComparedImage]) -> PairedDifferences | None:
    common = [p for p in pictures if p.paired and {variant, UNDEFENDED} <= set(p.variants)]
    if variant == UNDEFENDED or not common:
        return None
    return PairedDifferences(
        images=len(common),
        ssim=_difference(variant, common, "ssim"),
        psnr=_difference(variant, common, "psnr"),
    )


def _difference(variant: str, common: Sequence[ComparedImage], score: str) -> Spread:
    pairs = [
        (p.client, _mean(p.variants[variant], score), _mean(p.variants[UNDEFENDED], score))
        for p in common
    ]
    known = [
        (client, one - other)
        for client, one, other in pairs
        if one is not None and other is not None
    ]
    return spread(known, f"{score} difference")


def _mean(seeds: Sequence[ImageFacts], score: str) -> float | None:
    return mean(getattr(image.scores, score) for image in seeds if image.scores)
