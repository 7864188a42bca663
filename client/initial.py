"""The first global model, compared with the one that the run's seed gives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bract.client.policy import PolicyError
from bract.config import FederationConfig
from bract.data.views import DataSpec
from bract.defenses.configured import configured_model
from bract.models.initialise import initialise
from bract.seeds import derive_seed


def check_initial(config: FederationConfig, spec: DataSpec, sent: Mapping[str, Tensor]) -> None:
    """Refuse a first model that is not drawn from ``config.seed`` as bract's server draws it."""
    model = initialise(
        configured_model(config, spec), config.model.init, derive_seed(config.seed, "model")
    )
    expected = model.state_dict()
    wrong = sorted(set(expected) ^ set(sent)) or [
        name for name, value in expected.items() if not _same(value, sent[name])
    ]
    if wrong:
        raise PolicyError(
            f"this site's policy sets initial_model: from-seed, but the first model is not what "
            f"seed {config.seed} gives ({', '.join(wrong[:3])} differ); another "
            "one may be made to show images. Start from the seed, or ask the site"
        )


def _same(expected: Tensor, found: Tensor) -> bool:
    # The last bits may differ between machines; what fits in there shows no image.
    return expected.shape == found.shape and torch.allclose(
        expected.double(), found.double(), rtol=1e-4, atol=1e-6
    )
