"""The record in a prior's file: its origin, and its number of public images."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from bract.errors import one_line
from bract.schema import Number, VersionedRecord

PRIOR_SCHEMA: Literal[2] = 2

PriorKind = Literal["autoencoder", "flow"]
"""Kinds of generators: the decoder of a variational autoencoder, or a flow from noise."""

MOST_LATENT = 1024
"""Longest latent of an autoencoder."""

Side = Annotated[int, Field(ge=8, le=256)]


class PriorFacts(VersionedRecord):
    """A generator that was trained on public images.

    ``generator`` is its kind (``kind`` in the file). ``image_shape`` is channels, height and width
    of what it makes, in ``pixel_range``; ``latent`` the length of its standard normal latent, of a
    flow the values of an image, ``width`` the channels before its last layer and ``classes`` the
    labels that it is conditioned on, 0 for none. ``source`` names what it was
    trained on, ``images`` counts it, and ``digest`` is the SHA-256 of those images' fingerprints,
    which the file holds. ``held_out_psnr`` measures how it reproduces public images of the same
    source that it was not trained on, in dB: of an autoencoder about the most that a search in its
    latent can give; of a flow, which makes every image of some noise, how it restores images to
    which as much noise was added.
    """

    kind: ClassVar[str] = "prior"
    remedy: ClassVar[str] = "train it again with `bract prior train`"

    schema_version: Literal[2] = Field(default=PRIOR_SCHEMA, alias="schema")
    generator: PriorKind = Field(default="autoencoder", alias="kind")
    image_shape: tuple[Literal[1, 3], Side, Side]
    pixel_range: tuple[float, float] = (0.0, 1.0)
    latent: Annotated[int, Field(ge=1, le=3 * 256**2)]
    width: Annotated[int, Field(ge=1, le=256)]
    classes: Annotated[int, Field(ge=0, le=10_000)] = 0
    source: Annotated[str, Field(max_length=200), AfterValidator(one_line)]
    images: Annotated[int, Field(ge=1, le=2_000_000)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    epochs: Annotated[int, Field(ge=0)] = 0
    seed: int = 0
    held_out_psnr: Number = None

    @classmethod
    def parse(cls, content: object, *, source: str) -> Self:
        """Check decoded JSON; of version 1, in which every generator was an autoencoder's, too."""
        version = content.get("schema") if isinstance(content, dict) else None
        if isinstance(content, dict) and type(version) is int and version == 1:
            content = content | {"schema": PRIOR_SCHEMA, "kind": "autoencoder"}
        return super().parse(content, source=source)

    @model_validator(mode="after")
    def _check_latent(self) -> Self:
        if self.generator == "flow" and self.latent != math.prod(self.image_shape):
            raise ValueError(f"a flow's latent has {math.prod(self.image_shape)} values")
        if self.generator == "autoencoder" and self.latent > MOST_LATENT:
            raise ValueError(f"an autoencoder's latent has at most {MOST_LATENT} values")
        return self
