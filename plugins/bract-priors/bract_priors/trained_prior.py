"""A generator trained on public images: its network, its file, and what it was trained on.

The file is untrusted: it is one safetensors file of bounded size, whose shapes follow from the
record with the tensors, and nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks import PublicPrior
from bract.disk import tensors_as_bytes, write_tensors
from bract.errors import BractError, one_line
from bract.updates.update import Tensors
from bract_priors.fingerprints import SIDE, copies_among
from bract_priors.flow import Flow
from bract_priors.prior_facts import PriorFacts

MOST_BYTES = 1 << 28
"""Largest file that is read; the digits' takes a hundredth of it."""

MOST_HEADER_BYTES = 1 << 20
"""Largest header of a file; a prior's names about ten tensors."""

MOST_WEIGHT = 1e4
"""Largest magnitude of a weight; trained ones are below 100, and far larger ones make no image."""

_FACTS = "bract.prior"
_FINGERPRINTS = "fingerprints"


class Decoder(nn.Module):
    """Images from latents: a linear layer, blocks that double the side, a convolution, a sigmoid.

    The side doubles as often as it can be halved to whole numbers of at least 4, at most three
    times: in blocks of nearest-neighbour upsampling, a 3x3 convolution and SiLU, and at last by a
    convolution that makes four pixels of each place (Shi et al. 2016).

    Parameters
    ----------
    image_shape
        ``(C, H, W)`` with H = W.
    classes
        Classes whose one-hot rows are appended to the latent; 0 for none.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], *, latent: int, width: int, classes: int = 0
    ) -> None:
        super().__init__()
        channels, side, _ = image_shape
        doublings = 0
        while doublings < 3 and side % 2 == 0 and side // 2 >= 4:
            side, doublings = side // 2, doublings + 1
        self.side = side
        self.shuffle = 2 if doublings else 1
        widths = [width * 2**i for i in reversed(range(max(1, doublings)))]
        self.first = nn.Linear(latent + classes, widths[0] * side * side)
        self.blocks = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths))
        self.last = nn.Conv2d(width, channels * self.shuffle**2, 3, padding=1)

    def forward(self, latent: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map latents ``(N, latent)`` and label rows ``(N, classes)`` to images in (0, 1)."""
        rows = latent if labels is None else torch.cat([latent, labels], dim=1)
        features = F.silu(self.first(rows)).view(len(rows), -1, self.side, self.side)
        for block in self.blocks:
            features = F.silu(block(F.interpolate(features, scale_factor=2, mode="nearest")))
        return torch.sigmoid(F.pixel_shuffle(self.last(features), self.shuffle))


@dataclass(frozen=True, eq=False)
class TrainedPrior(PublicPrior):
    """A generator trained on public images, as its file holds it.

    Attributes
    ----------
    facts
        What it makes and what it was trained on.
    weights
        Of its `Decoder` or `Flow`, by name.
    known
        Fingerprints of its training images, uint8 ``(N, C * 64)``.
    """

    name: ClassVar[str] = "generator"

    facts: PriorFacts
    weights: Tensors
    known: Tensor

    @property
    def kind(self) -> str:
        """Kind of the generator."""
        return self.facts.generator

    @property
    def classes(self) -> int:
        """Labels that it is conditioned on; 0 for none."""
        return self.facts.classes

    @property
    def source(self) -> str:
        """Name of the images that it was trained on."""
        return self.facts.source

    @property
    def text(self) -> str:
        """Return what the attacker held, in words."""
        facts = self.facts
        what = "a flow" if facts.generator == "flow" else "a generator"
        return f"{what} trained on {facts.images:,} public images ({facts.source})"

    @cached_property
    def digest(self) -> str:
        """Digest of everything in the file."""
        whole = self.weights | {_FINGERPRINTS: self.known}
        record = self.facts.model_dump_json().encode()
        return hashlib.sha256(record + tensors_as_bytes(whole)).hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """Return its facts, JSON-ready."""
        return self.facts.to_dict()

    def decoder(self) -> Decoder | Flow:
        """Return its network, on the CPU in float32, with weights that are not trained."""
        made = _network(self.facts)
        made.load_state_dict(self.weights)
        return made.requires_grad_(False).eval()

    def sample(self, labels: Sequence[int], *, seed: int) -> Tensor:
        """Return one image a label ``(N, C, H, W)``, of latents drawn under a seed."""
        latent = torch.randn(
            len(labels), self.facts.latent, generator=torch.Generator().manual_seed(seed)
        )
        rows = None
        if self.facts.classes:
            rows = F.one_hot(torch.tensor(labels), self.facts.classes).float()
        with torch.no_grad():
            images: Tensor = self.decoder()(latent, rows)
        return images

    def trained_on(self, images: Tensor) -> Tensor:
        """Return which images ``(N, C, H, W)`` are copies of training images, bool ``(N,)``.

        The images themselves, mirrored, turned or shifted a little, as `copies_among` has it.
        """
        return copies_among(images, self.known)

    def check(self, image_shape: tuple[int, int, int] | None, classes: int | None) -> None:
        """Refuse what it was not made for."""
        facts = self.facts
        if image_shape != facts.image_shape:
            raise BractError(
                f"the prior makes images of {facts.image_shape}, the client's are {image_shape}; "
                "train one with `bract prior train` and --size, --set channels=1 or 3",
                code="prior-unsuited",
            )
        if facts.classes and classes != facts.classes:
            raise BractError(
                f"the prior knows {facts.classes} classes, the model has {classes}; train one of "
                "the same classes, or one with --no-labels",
                code="prior-unsuited",
            )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an untrusted file that `bract prior train` is to have written.

        Raises
        ------
        BractError
            If it is no such file, or holds anything else than its record describes.
        """
        facts, weights, known = _read(path)
        return cls(facts, weights, known)

    def save(self, path: Path) -> Path:
        """Write the file whole."""
        about = {_FACTS: self.facts.to_text()}
        return write_tensors(path, self.weights | {_FINGERPRINTS: self.known}, about=about)


def make_prior(facts: PriorFacts, decoder: Decoder | Flow, known: Tensor) -> TrainedPrior:
    """Return what was trained; ``facts`` need no digest yet."""
    digest = hashlib.sha256(known.contiguous().numpy().tobytes()).hexdigest()
    weights = {n: v.detach().cpu().float().clone() for n, v in decoder.state_dict().items()}
    return TrainedPrior(facts.model_copy(update={"digest": digest}), weights, known)


def _network(facts: PriorFacts) -> Decoder | Flow:
    """Return the network that a record describes, as it starts."""
    if facts.generator == "flow":
        return Flow(facts.image_shape, width=facts.width, classes=facts.classes)
    return Decoder(facts.image_shape, latent=facts.latent, width=facts.width, classes=facts.classes)


def _read(path: Path) -> tuple[PriorFacts, Tensors, Tensor]:
    """Return the facts, the weights and the fingerprints in an untrusted file."""
    try:
        _check_size(path)
        with safe_open(str(path), framework="pt") as file:
            record = (file.metadata() or {}).get(_FACTS)
            if record is None:
                raise BractError(
                    f"{path}: no prior; make one with `bract prior train`", code="file-missing"
                )
            facts = PriorFacts.parse_text(record, source=str(path))
            stored = {_current(name): name for name in file.keys()}  # noqa: SIM118
            shapes = {n: tuple(file.get_slice(s).get_shape()) for n, s in stored.items()}
            _check_shapes(path, facts, shapes)
            tensors = {name: file.get_tensor(stored[name]) for name in shapes}
    except (OSError, SafetensorError, ValueError) as error:
        raise BractError(
            f"{path}: the prior cannot be read ({one_line(error, 200)})", code="file-damaged"
        ) from error
    known = tensors.pop(_FINGERPRINTS)
    strange = [name for name, value in tensors.items() if not _is_usable(value)]
    if strange or known.dtype != torch.uint8:
        name = strange[0] if strange else _FINGERPRINTS
        raise BractError(
            f"{path}: {name} does not hold finite numbers of its type, of at most {MOST_WEIGHT:g}; "
            "train it again",
            code="file-damaged",
        )
    if hashlib.sha256(known.numpy().tobytes()).hexdigest() != facts.digest:
        raise BractError(
            f"{path}: the digest of the training images is not theirs; train it again",
            code="file-damaged",
        )
    return facts, tensors, known


def _current(name: str) -> str:
    """Return the name of a weight; files of 0.5 call a flow's conditioning layers ``told``."""
    return name.replace("told.", "condition.")


def _is_usable(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and bool((weight.abs() <= MOST_WEIGHT).all())


def _check_size(path: Path) -> None:
    """Refuse what is no file, or larger than a prior is, before any of it is read."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise BractError(
            f"{path}: is no file; name what `bract prior train` wrote", code="file-missing"
        )
    if found.st_size > MOST_BYTES:
        raise BractError(
            f"{path}: {found.st_size:,} bytes, a prior has at most {MOST_BYTES:,}; train a smaller "
            "one",
            code="file-unreadable",
        )
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > MOST_HEADER_BYTES:
        raise BractError(
            f"{path}: a header of {header:,} bytes, a prior's has at most {MOST_HEADER_BYTES:,}; "
            "train it again",
            code="file-damaged",
        )


def _check_shapes(path: Path, facts: PriorFacts, found: dict[str, tuple[int, ...]]) -> None:
    """Refuse tensors other than the record's, before any is read."""
    channels, height, width = facts.image_shape
    if height != width or facts.pixel_range != (0.0, 1.0):
        raise BractError(
            f"{path}: images of {facts.image_shape} in {facts.pixel_range}, expected squares in "
            "(0.0, 1.0)",
            code="file-damaged",
        )
    with torch.device("meta"):
        decoder = _network(facts)
    wanted = {name: tuple(value.shape) for name, value in decoder.state_dict().items()}
    wanted[_FINGERPRINTS] = (facts.images, channels * SIDE**2)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise BractError(
                f"{path}: {name} is {found.get(name)}, its record makes it {wanted.get(name)}; "
                "train it again",
                code="file-damaged",
            )
