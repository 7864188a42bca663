"""Which models of the registry a test of images can make."""

from __future__ import annotations

import inspect

from bract.inputs import INPUTS
from bract.models import MODELS


def image_models() -> list[str]:
    """Return bract's own models of images: another input's model takes its schema by its name."""
    return [name for name in MODELS if _of_images(MODELS[name])]


def _of_images(factory: object) -> bool:
    assert callable(factory)
    schemas = set(INPUTS) & set(inspect.signature(factory).parameters)
    return factory.__module__.startswith("bract.models.") and not schemas
