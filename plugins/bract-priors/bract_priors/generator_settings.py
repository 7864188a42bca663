"""Settings of ``bract prior train`` that few need."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bract.cli.settings import read_settings
from bract.errors import BractError
from bract.registry import unknown
from bract.schema.record import describe


class GeneratorSettings(BaseModel):
    """Settings that few need: the generator's size, its seed, and what of the images is taken."""

    model_config = ConfigDict(extra="forbid", strict=True)

    latent: int = Field(32, ge=1, le=1024)
    width: int = Field(24, ge=1, le=256)
    seed: int = Field(0, ge=0)
    channels: Literal[1, 3] | None = None
    labels: bool = True

    @classmethod
    def read(cls, options: list[str] | None) -> Self:
        """Return the settings of ``--set``."""
        found = read_settings(options)
        for key in found:
            if key not in cls.model_fields:
                raise BractError(
                    f"--set: {unknown('key', key, cls.model_fields)}", code="config-key"
                )
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            raise BractError(f"--set {describe(error)}", code="config-value") from None
