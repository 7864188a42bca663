"""Say in round 1, by the shapes of what is sent, what no audit will handle."""

from __future__ import annotations

from bract.captures.observation import Observation


def doubt_of(observation: Observation) -> str | None:
    """Return why an audit may not handle a model, and what to do; None where nothing shows it.

    Only shapes and names are looked at, since a server holds no code of the model. Models of texts
    begin with an embedding, which looks like any other matrix; nothing is said of them.
    """
    declared = observation.declaration
    weights = {n: v for n, v in observation.parameters.items() if v.dim() > 1}
    if not weights or declared.input != "image" or declared.text or declared.table:
        return None
    names, tensors = list(weights), list(weights.values())
    last_kernel = max((i for i, v in enumerate(tensors) if v.dim() >= 4), default=None)
    if declared.loss != "reconstruction" and last_kernel == len(tensors) - 1 and last_kernel > 0:
        return (
            f"it ends with a convolution ({names[-1]}): segmentation is not audited; if it is an "
            "autoencoder, declare that, HonestButCurious(..., declaration={'loss': "
            "'reconstruction'}); if it classifies images, all is well"
        )
    return None
