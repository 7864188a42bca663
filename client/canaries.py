"""Canaries of an audit of epsilon: included by coins that stay on this client's own disk."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bract.client.crafting import craft
from bract.client.defenses import DefenseChain
from bract.client.policy import SitePolicy
from bract.config.canaries import CanaryConfig
from bract.crypto.randomness import SecretStream
from bract.data.views import ClientData, DataSpec
from bract.defenses.noise import Noise
from bract.disk.permissions import make_private_folder
from bract.disk.tensor_files import write_tensors
from bract.errors import BractError, one_line
from bract.updates.canaries import canary_directions, canary_update
from bract.updates.update import Tensors, flatten, unflatten

CANARIES = "canaries.safetensors"
"""Beside the truth. Records: ``images``, ``labels`` and ``included``, uint8 ``(m,)``. Updates:
``included``, uint8 ``(rounds, m)``. The metadata name the run and the kind."""

BEYOND_CLIP = 4.0
"""Norm of a canary update over the bound to which it must be clipped, so that an update that is not
clipped shows."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Canaries:
    """One client's canaries in one run.

    Attributes
    ----------
    included
        The coins, bool ``(m,)``, of canary updates ``(rounds, m)``.
    images, labels
        Of records; empty of updates.
    """

    kind: str
    included: Tensor
    images: Tensor
    labels: Tensor

    def extend(self, data: ClientData) -> ClientData:
        """Return the client's data with the included records at the end of the training images.

        Records that canaries are made of leave the validation share.
        """
        if self.kind == "update":
            return data
        kept = len(data.validation_images)
        if self.kind == "mislabelled":
            kept -= len(self.images)
        return replace(
            data,
            images=torch.cat([data.images, self.images[self.included]]),
            labels=torch.cat([data.labels, self.labels[self.included]]),
            validation_images=data.validation_images[:kept],
            validation_labels=data.validation_labels[:kept],
            canaries=int(self.included.sum()),
        )

    def replace_update(
        self, update: Tensors, chain: DefenseChain, *, seed: int, client: str, number: int
    ) -> Tensors:
        """Return the canary update of a round in the place of the client's own."""
        if self.kind != "update" or not 1 <= number <= len(self.included):
            return update
        signs = self.included[number - 1].to(torch.float64) * 2.0 - 1.0
        size = flatten(update).numel()
        directions = canary_directions(size, len(signs), seed=seed, client=client, number=number)
        noise = next((d for d in chain.defenses if isinstance(d, Noise)), None)
        norm = float(flatten(update).norm())
        if noise is not None and noise.clip is not None:
            norm = BEYOND_CLIP * noise.clip
            if noise.kind == "laplace" and noise.epsilon is not None:
                norm = BEYOND_CLIP * noise.clip * size**0.5
        return unflatten(canary_update(directions, signs, norm), update)


def open_canaries(
    config: CanaryConfig,
    policy: SitePolicy,
    folder: Path | None,
    data: ClientData,
    spec: DataSpec,
    *,
    run: int,
    rounds: int,
    model: nn.Module,
) -> Canaries | None:
    """Return this client's canaries, drawn in its first round; None where it does not take part.

    It takes part where the site's policy allows as many, truth is kept, and enough records were
    held out. Otherwise the log says why, and training goes on without.

    Parameters
    ----------
    model
        The global model, for which canaries are crafted.
    """
    if not config.count:
        return None
    why = None
    if config.count > policy.canaries:
        why = f"the site's policy allows canaries: {policy.canaries}"
    elif folder is None:
        why = "no truth-dir is set, where the coins would be kept"
    elif config.kind == "mislabelled" and len(data.validation_images) < config.count:
        why = f"{len(data.validation_images)} records are held out; raise data.validation"
    if why is not None:
        _log.warning("the run asks for %d canaries; none is included: %s", config.count, why)
        return None
    assert folder is not None
    try:
        known = _read(folder / CANARIES, run, config)
        return known or _draw(folder, config, data, spec, model, run=run, rounds=rounds)
    except (OSError, RuntimeError, ValueError, BractError, SafetensorError) as error:
        _log.warning("no canary is included: %s", one_line(error, 300))
        return None


def _read(path: Path, run: int, config: CanaryConfig) -> Canaries | None:
    if not path.is_file():
        return None
    with safe_open(str(path), framework="pt") as file:
        about = file.metadata() or {}
        if (about.get("run"), about.get("kind")) != (str(run), config.kind):
            return None
        held = {name: file.get_tensor(name) for name in set(file.keys())}
    empty = torch.empty(0)
    return Canaries(
        config.kind, held["included"].bool(), held.get("images", empty), held.get("labels", empty)
    )


def _draw(
    folder: Path,
    config: CanaryConfig,
    data: ClientData,
    spec: DataSpec,
    model: nn.Module,
    *,
    run: int,
    rounds: int,
) -> Canaries:
    """Draw coins, and records, from the operating system's randomness, and write them."""
    stream = SecretStream.fresh()
    shape = (rounds, config.count) if config.kind == "update" else (config.count,)
    coins = stream.uniform(shape) < 0.5
    images, labels = torch.empty(0), torch.empty(0, dtype=torch.int64)
    if data.labels.dim() > 1 and config.kind != "update":
        raise BractError(
            f"canaries.kind is {config.kind}, whose records need one label each; the clients train "
            "on a label a token: set canaries.kind: update",
            code="config-conflict",
        )
    if config.kind == "mislabelled":
        images = data.validation_images[-config.count :]
        labels = _other_labels(data.validation_labels[-config.count :], data.labels, spec, stream)
    elif config.kind in ("random", "crafted"):
        images = stream.uniform((config.count, *spec.image_shape))
        drawn = stream.uniform((config.count,))
        labels = (drawn * spec.classes).long()
        if data.labels.is_floating_point():
            labels = data.labels[(drawn * len(data.labels)).long()]
    if config.kind == "crafted":
        images = craft(images, labels, model, data, spec)
    make_private_folder(folder)
    tensors = {"included": coins.to(torch.uint8)}
    if config.kind != "update":
        tensors |= {"images": images, "labels": labels}
    write_tensors(
        folder / CANARIES, tensors, private=True, about={"run": str(run), "kind": config.kind}
    )
    return Canaries(config.kind, coins, images, labels)


def _other_labels(labels: Tensor, known: Tensor, spec: DataSpec, stream: SecretStream) -> Tensor:
    """Return another class for each label; of numbers their mirror image in the client's range."""
    if labels.is_floating_point():
        return known.min() + known.max() - labels
    shift = 1 + (stream.uniform((len(labels),)) * (spec.classes - 1)).long()
    return (labels + shift) % spec.classes
