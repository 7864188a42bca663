"""A picture of words, each with the reading of a network."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from experiments.harness.readers import Reading, WordSet

_SCALE = 2
_MARGIN = 4
_RIGHT, _WRONG = (20, 90, 20), (170, 20, 20)


def picture(sets: Mapping[str, WordSet], readings: Mapping[str, Reading], count: int) -> str:
    """Return a PNG in base64: the first words of every set, what was read of each to its right.

    Green is right, red is wrong; nothing read is a dash.

    Parameters
    ----------
    sets, readings
        By the same names; the words of a set in the order that they were read in.
    count
        Words over all sets.
    """
    rows = []
    for name, words in sets.items():
        few = range(min(len(words), max(1, count // len(sets))))
        ((images, _),) = words.batches([few])
        found = readings[name]
        rows += [(images[i, 0].numpy(), found.said[i], found.words[i]) for i in few]
    height, width = (_SCALE * side for side in rows[0][0].shape)
    letters = max(1, max(len(said) for _, said, _ in rows))
    font = ImageFont.load_default(size=0.75 * height)
    line = height + _MARGIN
    page = Image.new("RGB", (width + 2 * _MARGIN + letters * height, line * len(rows)), "white")
    drawn = ImageDraw.Draw(page)
    for number, (pixels, said, word) in enumerate(rows):
        shown = Image.fromarray((255 * np.clip(pixels, 0.0, 1.0)).round().astype(np.uint8))
        page.paste(shown.resize((width, height)), (0, number * line))
        colour = _RIGHT if said == word else _WRONG
        drawn.text((width + _MARGIN, number * line), said or "-", fill=colour, font=font)
    stream = io.BytesIO()
    page.save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode("ascii")
