"""Train a generator on public images: the decoder of a variational autoencoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks.problem.fingerprints import fingerprints
from bract.attacks.problem.trained_prior import Decoder, TrainedPrior, make_prior
from bract.errors import BractError
from bract.schema.prior import PriorFacts

FEWEST = 16
"""Images below which nothing is trained."""

_HELD_OUT = 0.05
_LEAST_EPOCHS = 20
_LEAST_BATCHES = 3000
_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class PriorSettings:
    """Size of a generator, and how long it is trained.

    Attributes
    ----------
    latent, width
        See `bract.attacks.problem.trained_prior.Decoder`.
    epochs
        Passes over the images; None takes 20, and more where they are fewer than 3,000 batches.
    lr
        Of Adam, falling along half a cosine.
    """

    latent: int = 32
    width: int = 24
    epochs: int | None = None
    lr: float = 2e-3
    seed: int = 0
    device: str = "cpu"


def train_prior(
    images: Tensor,
    labels: Tensor | None,
    settings: PriorSettings,
    *,
    source: str,
    classes: int = 0,
    progress: Callable[[float, float], None] | None = None,
) -> TrainedPrior:
    """Train a variational autoencoder (Kingma and Welling 2014); its decoder is the generator.

    The decoder's noise is Gaussian of the likeliest deviation (Rybkin et al. 2021, eq. 8), so that
    no weight is between the two terms: with D pixels, mean squared error M over the batch and KL
    the divergence of the encoder's normal from N(0, I), ``D / 2 log M + KL``. One image in 20 is
    left out, to measure how well such images are reproduced; fingerprints are of all of them.

    Parameters
    ----------
    images
        float32 ``(N, C, H, W)`` in [0, 1], H = W.
    labels
        int64 ``(N,)`` that the generator is to be conditioned on, or None.
    source
        Names the images, for a report.
    progress
        Called after each epoch with the share that is done and the loss in nats an image.
    """
    if len(images) < FEWEST:
        raise BractError(f"{source}: {len(images)} images; a prior takes {FEWEST} at least")
    settings = replace(settings, epochs=settings.epochs or _epochs(len(images)))
    classes = 0 if labels is None else classes
    device = torch.device(settings.device)
    shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        decoder = Decoder(shape, latent=settings.latent, width=settings.width, classes=classes).to(
            device
        )
        encoder = _Encoder(shape, settings, classes).to(device)
        order = torch.randperm(len(images))
        held = order[: max(1, round(_HELD_OUT * len(images)))]
        kept = order[len(held) :]
        _fit(encoder, decoder, images, labels, kept, settings, progress)
        psnr = _reproduced(encoder, decoder, images[held], None if labels is None else labels[held])
    facts = PriorFacts(
        image_shape=shape,
        latent=settings.latent,
        width=settings.width,
        classes=classes,
        source=source[:200],
        images=len(images),
        digest="0" * 64,
        epochs=settings.epochs or 0,
        seed=settings.seed,
        held_out_psnr=psnr,
    )
    return make_prior(facts, decoder, fingerprints(images))


def _epochs(images: int) -> int:
    return max(_LEAST_EPOCHS, math.ceil(_LEAST_BATCHES / math.ceil(images / _BATCH)))


class _Encoder(nn.Module):
    """Mean and log variance of the latent of an image."""

    def __init__(self, shape: tuple[int, int, int], settings: PriorSettings, classes: int) -> None:
        super().__init__()
        self.classes = classes
        width = max(8, settings.width // 2)
        self.features = nn.Sequential(
            nn.Conv2d(shape[0], width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            size = self.features(torch.zeros(1, *shape)).shape[1]
        self.last = nn.Linear(size + classes, 2 * settings.latent)

    def forward(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        if labels is not None:
            features = torch.cat([features, labels], dim=1)
        mean, spread = self.last(features).chunk(2, dim=1)
        return mean, spread.clamp(-10.0, 10.0)

    def rows(self, labels: Tensor | None, like: Tensor) -> Tensor | None:
        """Return one-hot rows of labels, or None."""
        return None if labels is None else F.one_hot(labels, self.classes).to(like)


def _fit(
    encoder: _Encoder,
    decoder: Decoder,
    images: Tensor,
    labels: Tensor | None,
    kept: Tensor,
    settings: PriorSettings,
    progress: Callable[[float, float], None] | None,
) -> None:
    device, epochs = torch.device(settings.device), settings.epochs or 0
    batches = (len(kept) + _BATCH - 1) // _BATCH
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=settings.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs * batches))
    for epoch in range(epochs):
        total = 0.0
        shuffled = kept[torch.randperm(len(kept))]
        for picks in shuffled.split(_BATCH):
            batch = images[picks].to(device)
            rows = encoder.rows(None if labels is None else labels[picks].to(device), batch)
            mean, spread = encoder(batch, rows)
            latent = mean + (0.5 * spread).exp() * torch.randn_like(mean)
            error = (decoder(latent, rows) - batch).square().mean()
            divergence = 0.5 * (mean.square() + spread.exp() - spread - 1.0).sum(dim=1).mean()
            loss = 0.5 * batch[0].numel() * error.clamp_min(1e-8).log() + divergence
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        if progress is not None:
            progress((epoch + 1) / epochs, total / batches)


@torch.no_grad()
def _reproduced(
    encoder: _Encoder, decoder: Decoder, images: Tensor, labels: Tensor | None
) -> float:
    """Return the mean PSNR in dB of images that go through the mean of their latent."""
    device = next(encoder.parameters()).device
    found: list[Tensor] = []
    for start in range(0, len(images), _BATCH):
        part = slice(start, start + _BATCH)
        batch = images[part].to(device)
        rows = encoder.rows(None if labels is None else labels[part].to(device), batch)
        made = decoder(encoder(batch, rows)[0], rows)
        found.append((made - batch).square().flatten(1).mean(dim=1).cpu())
    return float((-10.0 * torch.cat(found).clamp_min(1e-10).log10()).mean())
