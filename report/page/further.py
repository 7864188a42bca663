"""Scores of an attack beyond its first, and of every baseline: a line each of the further table."""

from __future__ import annotations

from dataclasses import dataclass

from bract.schema.report_rows import AttackRow


@dataclass(frozen=True)
class ScoreLine:
    """Scores of reconstructions, of the oracle's pick or of a baseline.

    Attributes
    ----------
    primary
        The input's primary score.
    difference
        Whether scores are differences from the best baseline of each image.
    """

    name: str
    primary: float | None = None
    psnr: float | None = None
    nrmse: float | None = None
    top5: float | None = None
    exact: float | None = None
    lpips_alex: float | None = None
    lpips_vgg: float | None = None
    stlpips: float | None = None
    difference: bool = False


def further(row: AttackRow) -> list[ScoreLine]:
    """Return the lines of one attack: its own, the oracle's, and each baseline's."""
    own = ScoreLine(
        "blind choice",
        primary=row.primary.mean,
        psnr=row.psnr.mean,
        nrmse=row.nrmse,
        top5=row.identified_top5,
        exact=row.exact,
        lpips_alex=row.lpips_alex,
        lpips_vgg=row.lpips_vgg,
        stlpips=row.stlpips,
    )
    lines = [own]
    if row.margin.ssim.mean is not None:
        above = ScoreLine(
            "over the best baseline of each image",
            primary=row.margin.ssim.mean,
            psnr=row.margin.psnr.mean,
            difference=True,
        )
        lines.append(above)
    if row.oracle.primary is not None:
        lines.append(ScoreLine("oracle choice", primary=row.oracle.primary, psnr=row.oracle.psnr))
    lines += [
        ScoreLine(name.replace("_", " "), primary=found.primary, psnr=found.psnr, nrmse=found.nrmse)
        for name, found in row.baselines.items()
    ]
    return lines
