"""Picture of the audit: mean PSNR of each defense and attacker, one axis a panel of rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.audit_plan import TIERS
from experiments.harness.pictures import canvas, save

COLOURS = {
    "plain": "#6b7280",
    "oblivious": "#2563eb",
    "adaptive": "#dc2626",
    "discounting": "#9333ea",
    "both known": "#0d9488",
}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the panels that hold a defense: a dot an attacker, its interval as a line."""
    scored = [r for r in rows if r["tier"] in COLOURS and r["psnr"] is not None]
    defended = {r["panel"] for r in scored if r["defense"] != "none"}
    panels = [p for p in dict.fromkeys(r["panel"] for r in scored) if p in defended]
    if not panels:
        return
    wide = min(3, len(panels))
    high = -(-len(panels) // wide)
    figure, grid = canvas(high, wide, 4.8 * wide, 3.2 * high, squeeze=False)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(grid.flat, panels, strict=False):
        here = [r for r in scored if r["panel"] == panel]
        names = list(dict.fromkeys(r["defense"] for r in here))
        tiers = [tier for tier in COLOURS if any(r["tier"] == tier for r in here)]
        for r in here:
            shift = 0.1 * (tiers.index(r["tier"]) - (len(tiers) - 1) / 2)
            place, colour = names.index(r["defense"]) + shift, COLOURS[r["tier"]]
            if r["psnr_low"] is not None:
                axis.plot([r["psnr_low"], r["psnr_high"]], [place] * 2, color=colour)
            axis.plot(r["psnr"], place, "o", color=colour, label=TIERS[r["tier"]])
        without = [
            r["psnr"] for r in rows if r["tier"] == "no gradient" and r["data"] == here[0]["data"]
        ]
        if without:
            axis.axvline(
                max(without), color="#9ca3af", linestyle="--", label="best guess without gradient"
            )
        axis.set(title=panel, xlabel="PSNR [dB]", yticks=range(len(names)))
        axis.set_yticklabels(names)
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
    handles: dict[str, Any] = {}
    for axis in grid.flat[: len(panels)]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles.keys()), loc="lower center", ncols=4, fontsize=8
    )
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    save(figure, path, dpi=90)
