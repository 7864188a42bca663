"""The network that reads words: convolutions, two bidirectional LSTM layers, CTC.

After Shi et al. 2017 (CRNN), which thesis section 4.3.2 trains. Here one convolution halves the
height at a time, so 32 pixels have five of them where CRNN has seven.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.updates.update import Tensors
from experiments.harness.words import CHARACTERS


@dataclass(frozen=True)
class Architecture:
    """Sizes of a network.

    Attributes
    ----------
    height, width
        Of the images, pixels; the height is a power of two of at least 4.
    characters
        Classes, the first of `CHARACTERS`.
    channels
        Of the first convolution; each further one has twice as many, at most eight times.
    hidden
        Units of an LSTM layer in one direction.
    """

    height: int = 32
    width: int = 100
    characters: int = 36
    channels: int = 64
    hidden: int = 256


class CRNN(nn.Module):
    """Convolutions down to height 1, two bidirectional LSTM layers, one linear layer.

    Maps ``(B, 1, height, width)`` in [0, 1] to log probabilities
    ``(width // 4, B, characters + 1)``; class 0 is CTC's blank.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        depth = architecture.height.bit_length() - 1
        sizes = [1, *(architecture.channels * min(2**i, 8) for i in range(depth))]
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(sizes)):
            layers.append(nn.Conv2d(before, after, 3, padding=1, bias=i < 2))
            if i >= 2:
                layers.append(nn.BatchNorm2d(after))
            layers += [nn.ReLU(), nn.MaxPool2d(2 if i < 2 else (2, 1))]
        self.features = nn.Sequential(*layers)
        self.recurrent = nn.LSTM(sizes[-1], architecture.hidden, 2, bidirectional=True)
        self.classifier = nn.Linear(2 * architecture.hidden, architecture.characters + 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images to log probabilities by frame."""
        columns = self.features(images - 0.5).squeeze(2).permute(2, 0, 1)
        frames, _ = self.recurrent(columns)
        scores: Tensor = self.classifier(frames)
        return scores.log_softmax(2)


def first(architecture: Architecture, seed: int) -> Tensors:
    """Return the parameters and buffers of a network as they are drawn under a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CRNN(architecture).state_dict()


def loaded(architecture: Architecture, arrays: Tensors, device: str) -> CRNN:
    """Return a network with these parameters and buffers."""
    model = CRNN(architecture)
    model.load_state_dict(arrays)
    return model.to(device)


def loss_of(log_probabilities: Tensor, words: list[str]) -> Tensor:
    """Return the CTC loss of a batch; a word that its frames cannot hold has none."""
    targets = torch.tensor([CHARACTERS.index(c) + 1 for word in words for c in word])
    frames, count, _ = log_probabilities.shape
    return F.ctc_loss(
        log_probabilities,
        targets.to(log_probabilities.device),
        torch.full((count,), frames),
        torch.tensor([len(word) for word in words]),
        zero_infinity=True,
    )


def decode(log_probabilities: Tensor) -> list[str]:
    """Best path: the likeliest class of every frame, repeats merged, blanks dropped."""
    found = []
    for classes in log_probabilities.argmax(2).T.tolist():
        kept = [c for c, before in zip(classes, [0, *classes], strict=False) if c and c != before]
        found.append("".join(CHARACTERS[c - 1] for c in kept))
    return found
