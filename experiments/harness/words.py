"""Two differently distributed sets of word images, rendered on the fly with Pillow.

``clean``: dark words on a light ground, upright. ``scene``: light words on a dark, textured
ground, sheared, turned, waved and noisy. They stand for Synth90K and SynthText, of which each
client of the thesis (4.3.2) held one. Fonts are the ones that matplotlib ships.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
STYLES = ("clean", "scene")
_FONTS = {
    "clean": ("DejaVuSans.ttf", "DejaVuSerif.ttf"),
    "scene": ("DejaVuSans-Bold.ttf", "DejaVuSansMono-Bold.ttf", "DejaVuSerif-BoldItalic.ttf"),
}

Image2d = npt.NDArray[np.float64]


def word_set(
    style: str, count: int, *, seed: int, height: int, width: int, characters: int, longest: int
) -> tuple[Tensor, list[str]]:
    """Render ``count`` random words.

    Parameters
    ----------
    style
        ``clean`` or ``scene``.
    characters
        Number of different characters, the first of `CHARACTERS`.
    longest
        Words have 3 to ``longest`` characters.

    Returns
    -------
    Images float32 ``(count, 1, height, width)`` in [0, 1], and the words.
    """
    rng = np.random.default_rng(seed)
    draw = random.Random(seed)
    folder = _font_folder()
    fonts = [ImageFont.truetype(str(folder / name), int(height * 0.75)) for name in _FONTS[style]]
    alphabet = CHARACTERS[:characters]
    words = ["".join(draw.choices(alphabet, k=draw.randint(3, longest))) for _ in range(count)]
    images = [_render(word, draw.choice(fonts), style, height, width, rng) for word in words]
    return torch.tensor(np.stack(images)[:, None], dtype=torch.float32), words


def _font_folder() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def _render(
    word: str,
    font: ImageFont.FreeTypeFont,
    style: str,
    height: int,
    width: int,
    rng: np.random.Generator,
) -> Image2d:
    left, top, right, bottom = font.getbbox(word)
    ink = Image.new("L", (int(right - left) + 4, int(bottom - top) + 4), 0)
    ImageDraw.Draw(ink).text((2 - left, 2 - top), word, font=font, fill=255)
    if style == "scene":
        shear, turn = rng.uniform(-0.35, 0.35), rng.uniform(-6.0, 6.0)
        ink = ink.transform(
            (int(ink.width * 1.1), ink.height),
            Image.Transform.AFFINE,
            (1, shear, -shear * ink.height / 2, 0, 1, 0),
            Image.Resampling.BILINEAR,
        ).rotate(turn, Image.Resampling.BILINEAR, expand=True)
    mask = np.asarray(ink.resize((width, height), Image.Resampling.BILINEAR)) / 255.0
    if style == "clean":
        ground, stroke = rng.uniform(0.8, 1.0), rng.uniform(0.0, 0.25)
        noise = 0.02 * rng.standard_normal((height, width))
        image = ground + (stroke - ground) * mask + noise
    else:
        shift = np.rint(rng.uniform(0, 1.5) * np.sin(np.arange(width) / rng.uniform(3, 9)))
        rows = (np.arange(height)[:, None] - shift[None].astype(int)) % height
        mask = np.take_along_axis(mask, rows, axis=0)
        texture = _texture(height, width, rng)
        stroke = rng.uniform(0.7, 1.0)
        noise = 0.08 * rng.standard_normal((height, width))
        image = texture + (stroke - texture) * mask + noise
    clipped: Image2d = np.clip(image, 0.0, 1.0)
    return clipped


def _texture(height: int, width: int, rng: np.random.Generator) -> Image2d:
    """Smooth random blotches between 0 and 0.5."""
    coarse = (255 * rng.random((4, 9))).astype(np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    blotches: Image2d = np.asarray(smooth) / 255.0 * 0.5
    return blotches
