"""Models of which a head is trained and the rest is frozen: transfer learning."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bract.errors import BractError
from bract.models.third_party_texts import freeze


def with_frozen_backbone(model: nn.Module, trained: Sequence[str]) -> nn.Module:
    """Freeze all parameters but those of some layers, in place; return the model.

    Frozen parameters become buffers that no state dict holds: they are neither sent nor updated,
    so every party makes the same model, pre-trained weights included, from the same callable.

    Parameters
    ----------
    trained
        Names of the modules that are trained, such as ``("fc",)`` of torchvision's ResNets.

    Raises
    ------
    BractError
        If a name is not that of a module with parameters, or nothing is left to freeze.

    Examples
    --------
    >>> def model():  # doctest: +SKIP
    ...     return with_frozen_backbone(torchvision.models.resnet18(weights="DEFAULT"), ["fc"])
    """
    modules = dict(model.named_modules())
    known = [
        name
        for name, module in modules.items()
        if name and next(module.parameters(), None) is not None
    ]
    for name in trained:
        if name not in known:
            raise BractError(
                f"the model has no layer {name!r} with parameters; expected one of "
                f"{', '.join(known[-8:])}",
                code="unknown-name",
            )
    kept = tuple(f"{name}." for name in trained)
    frozen = [name for name, _ in model.named_parameters() if not name.startswith(kept)]
    if not frozen:
        raise BractError(
            f"every parameter lies in {', '.join(trained)}; nothing is left to freeze",
            code="model-unsuited",
        )
    for name in frozen:
        freeze(model, name)
    return model
