"""Train a generator on public images: a variational autoencoder's decoder, or a flow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.errors import BractError
from bract_priors.fingerprints import fingerprints
from bract_priors.flow import Flow
from bract_priors.prior_facts import PriorFacts, PriorKind
from bract_priors.trained_prior import Decoder, TrainedPrior, make_prior

FEWEST = 16
"""Images below which nothing is trained."""

_HELD_OUT = 0.05
_LEAST_EPOCHS = 20
_LEAST_BATCHES = 3000
_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class PriorSettings:
    """Kind and size of a generator, and how long it is trained.

    Attributes
    ----------
    kind
        ``autoencoder`` or ``flow``.
    latent, width
        See `bract_priors.trained_prior.Decoder`, and of a flow, whose latent is as long
        as an image, `bract_priors.flow.Flow`.
    epochs
        Passes over the images; None takes 20, and more where they are fewer than 3,000 batches.
    lr
        Of Adam, falling along half a cosine.
    """

    kind: PriorKind = "autoencoder"
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
    """Train a variational autoencoder (Kingma and Welling 2014), or a flow, as the generator.

    Of the autoencoder the decoder is kept. Its noise is Gaussian of the likeliest deviation (Rybkin
    et al. 2021, eq. 8), so that no weight is between the two terms: with D pixels, mean squared
    error M over the batch and KL the divergence of the encoder's normal from N(0, I),
    ``D / 2 log M + KL``. A flow is trained by the mean squared error of its velocity (Liu, Gong and
    Liu, ICLR 2023, equation 1), at times uniform in [0, 1]. One image in 20 is left out, to measure
    how well such images are reproduced; fingerprints are of all of them.

    Parameters
    ----------
    images
        float32 ``(N, C, H, W)`` in [0, 1], H = W.
    labels
        int64 ``(N,)`` that the generator is to be conditioned on, or None.
    source
        Names the images, for a report.
    progress
        Called after each epoch with the share that is done and the loss: nats an image of the
        autoencoder, the error of a flow.
    """
    if len(images) < FEWEST:
        raise BractError(
            f"{source}: {len(images)} images; a prior takes {FEWEST} at least", code="data-empty"
        )
    settings = replace(settings, epochs=settings.epochs or _epochs(len(images)))
    classes = 0 if labels is None else classes
    device = torch.device(settings.device)
    shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
    made: Decoder | Flow
    model: _Autoencoder | _Straight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if settings.kind == "flow":
            held, kept = _split(len(images))
            made = Flow(shape, width=settings.width, classes=classes)
            model = _Straight(made)
        else:
            made = Decoder(shape, latent=settings.latent, width=settings.width, classes=classes)
            model = _Autoencoder(_Encoder(shape, settings, classes), made)
            held, kept = _split(len(images))
        model.to(device)
        rows = None if labels is None else F.one_hot(labels, classes).float()
        _fit(model, images, rows, kept, settings, progress)
        psnr = _reproduced(model, images[held], None if rows is None else rows[held])
    facts = PriorFacts(
        generator=settings.kind,
        image_shape=shape,
        latent=math.prod(shape) if settings.kind == "flow" else settings.latent,
        width=settings.width,
        classes=classes,
        source=source[:200],
        images=len(images),
        digest="0" * 64,
        epochs=settings.epochs or 0,
        seed=settings.seed,
        held_out_psnr=psnr,
    )
    return make_prior(facts, made, fingerprints(images))


def _split(count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of images that are held out, and of those that are trained on."""
    order = torch.randperm(count)
    held = max(1, round(_HELD_OUT * count))
    return order[:held], order[held:]


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


class _Autoencoder(nn.Module):
    """The loss of an encoder and a decoder, and how they reproduce images."""

    def __init__(self, encoder: _Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, images: Tensor, rows: Tensor | None) -> Tensor:
        mean, spread = self.encoder(images, rows)
        latent = mean + (0.5 * spread).exp() * torch.randn_like(mean)
        error = (self.decoder(latent, rows) - images).square().mean()
        divergence = 0.5 * (mean.square() + spread.exp() - spread - 1.0).sum(dim=1).mean()
        loss: Tensor = 0.5 * images[0].numel() * error.clamp_min(1e-8).log() + divergence
        return loss

    def reproduced(self, images: Tensor, rows: Tensor | None) -> Tensor:
        """Return what images become through the mean of their latent."""
        made: Tensor = self.decoder(self.encoder(images, rows)[0], rows)
        return made


class _Straight(nn.Module):
    """The loss of a flow along straight lines, and how it restores images."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, images: Tensor, rows: Tensor | None) -> Tensor:
        ends, noise = 2.0 * images - 1.0, torch.randn_like(images)
        times = torch.rand(len(images), device=images.device)
        points = torch.lerp(noise, ends, times.view(-1, 1, 1, 1))
        return (self.flow.velocity(points, times, rows) - (ends - noise)).square().mean()

    def reproduced(self, images: Tensor, rows: Tensor | None) -> Tensor:
        """Return the likeliest mean of images that were mixed with as much noise, at t = 1/2."""
        times = torch.full((len(images),), 0.5, device=images.device)
        points = 0.5 * (2.0 * images - 1.0) + 0.5 * torch.randn_like(images)
        ends = points + 0.5 * self.flow.velocity(points, times, rows)
        return (0.5 * (ends + 1.0)).clamp(0.0, 1.0)


def _fit(
    model: _Autoencoder | _Straight,
    images: Tensor,
    rows: Tensor | None,
    kept: Tensor,
    settings: PriorSettings,
    progress: Callable[[float, float], None] | None,
) -> None:
    device, epochs = torch.device(settings.device), settings.epochs or 0
    batches = (len(kept) + _BATCH - 1) // _BATCH
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs * batches))
    for epoch in range(epochs):
        total = 0.0
        shuffled = kept[torch.randperm(len(kept))]
        for picks in shuffled.split(_BATCH):
            loss = model(images[picks].to(device), None if rows is None else rows[picks].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        if progress is not None:
            progress((epoch + 1) / epochs, total / batches)


@torch.no_grad()
def _reproduced(model: _Autoencoder | _Straight, images: Tensor, rows: Tensor | None) -> float:
    """Return the mean PSNR in dB of images as the model reproduces them."""
    device = next(model.parameters()).device
    found: list[Tensor] = []
    for start in range(0, len(images), _BATCH):
        part = slice(start, start + _BATCH)
        batch = images[part].to(device)
        made = model.reproduced(batch, None if rows is None else rows[part].to(device))
        found.append((made - batch).square().flatten(1).mean(dim=1).cpu())
    return float((-10.0 * torch.cat(found).clamp_min(1e-10).log10()).mean())
