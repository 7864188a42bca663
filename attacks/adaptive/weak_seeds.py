"""Against noise from torch's CPU generator: try its seeds.

`torch.Generator` on a CPU is a Mersenne Twister that takes the low 32 bits of its seed, so noise
from it is one of 2^32 sequences. A candidate's noise is compared with the update: the right one
correlates with it as noise of that size does, and what is left after subtracting it has a norm
within the clip; with a wrong one the correlation is that of chance. Nothing but the capture and the
declaration is used. A search that finds nothing reports how many seeds it tried, and nothing about
the others, nor about other generators (CUDA's, numpy's).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bract.attacks.result import SeedBudget
from bract.captures.observation import Observation
from bract.defenses.noise import Noise
from bract.process import clock
from bract.seeds import derive_seed
from bract.updates.update import Tensors, flatten, unflatten

_Words = NDArray[np.uint32]
_Real = NDArray[np.floating[Any]]

_CHUNK = 1 << 13
_MOST = 224
"""Words of a seed's sequence that many seeds' screens use at once; the next need more state."""

_SLOW = 32
"""Seeds tried together in the time of one that needs torch itself."""

_LIKELY = 8.0
"""Standard deviations that the right seed's first values are to correlate with, on average."""

_PASS = 4.5
"""Standard deviations that they must reach; of 150,000 wrong seeds one does."""

_CERTAIN = 7.5
"""Standard deviations for the whole vector: of 2^32 wrong seeds 0.0003 reach that."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A way of drawing noise with torch: number type, and one vector or one tensor at a time."""

    dtype: torch.dtype
    layout: Literal["one vector", "tensor by tensor"]

    def noise(self, kind: str, seed: int, update: Tensors) -> Tensor:
        """Return noise of deviation 1 for a whole update, float64 ``(D,)``."""
        generator = torch.Generator().manual_seed(seed)
        sizes = [v.numel() for v in update.values()]
        if self.layout == "one vector":
            sizes = [sum(sizes)]
        return torch.cat([_torch_noise(kind, n, self.dtype, generator) for n in sizes])

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, {self.layout}"


@dataclass(frozen=True, kw_only=True)
class SeedFinding:
    """What a search found: a seed and the update without its noise, or how far it got."""

    tried: int
    seed: int | None = None
    drawn: Drawn | None = None
    update: Tensors | None = None

    def notes(self) -> dict[str, Any]:
        """Return what becomes part of a reconstruction's settings, JSON-ready."""
        search: dict[str, Any] = {"generator": "torch, CPU", "tried": self.tried}
        if self.drawn is not None:
            search["drawn"] = str(self.drawn)
        return {"weak_seed": self.seed, "weak_seed_search": search}


def likely_seeds(
    observation: Observation, budget: SeedBudget, purpose: str, most: int
) -> Iterator[int]:
    """Yield up to ``most`` seeds that secrets of a purpose (``noise``) may come from, likely first.

    Small numbers, then ones made of dates, round and client, then the rest up to 2^32; or what
    the budget names.
    """
    for block in _blocks(_candidates(observation, budget, purpose), most):
        yield from block.tolist()


def find_noise_seed(observation: Observation, hyper: Noise, budget: SeedBudget) -> SeedFinding:
    """Search the seed under which torch's CPU generator made an update's noise.

    Tried are draws in float32 and float64, for all parameters as one vector in their order or
    tensor by tensor, added or subtracted.
    """
    begun = clock.now()
    update = {name: observation.update[name] for name in observation.parameters}
    values = flatten(update).detach().cpu().to(torch.float64)
    screens = _screens(values, next(iter(update.values())).numel(), hyper)
    tried, slow_left = 0, budget.candidates // _SLOW
    needed = max((screen.words for screen in screens), default=0)
    for seeds in _blocks(_candidates(observation, budget, "noise"), budget.candidates):
        words = first_words(seeds, needed)
        for screen in screens:
            some = seeds if screen.fast else seeds[:slow_left]
            for seed in some[screen.scores(some, words) > _PASS].tolist():
                for drawn in screen.ways:
                    found = _confirmed(drawn, seed, update, values, hyper)
                    if found is not None:
                        return SeedFinding(
                            tried=tried + len(seeds), seed=seed, drawn=drawn, update=found
                        )
        fast = any(screen.fast for screen in screens)
        tried += len(seeds) if fast else min(len(seeds), slow_left) if screens else 0
        slow_left = max(0, slow_left - len(seeds))
        late = budget.seconds is not None and clock.now() - begun > budget.seconds
        if late or not (fast or slow_left):
            break
    return SeedFinding(tried=tried)


@dataclass(frozen=True, kw_only=True)
class _Screen:
    """Correlate the first ``count`` values of an update with what seeds would have drawn."""

    values: Tensor
    kind: str
    ways: tuple[Drawn, ...]
    fast: bool

    @property
    def words(self) -> int:
        """Return how many words of every seed's sequence it needs; 0 where torch draws the
        numbers.
        """
        return len(self.values) * (self.ways[0].dtype.itemsize // 4) if self.fast else 0

    def scores(self, seeds: _Words, words: _Words) -> _Real:
        """Return for each seed the correlation, in standard deviations of chance.

        ``words`` is what `first_words` gave for these seeds.
        """
        values = self.values / self.values.norm()
        way = self.ways[0]
        if self.fast:
            noise = prefixes(self.kind, words, len(values), way.dtype)
            scores: _Real = values.numpy().astype(np.float32) @ noise
            return np.abs(scores)
        drawn = (way.noise(self.kind, seed, {"": self.values}) for seed in seeds.tolist())
        return np.array([abs(float(values @ noise)) for noise in drawn])


def _screens(values: Tensor, first: int, hyper: Noise) -> list[_Screen]:
    """Return the screens that separate the right seed from chance; none where the noise is too
    small.

    Blocks of 16 normal numbers depend on 16 (float64: 32) words of the sequence, but the last
    block of a draw is made again where it is not whole: the first values stay clear of it.
    """
    energy = float(values[: min(len(values), 4096)].square().mean())
    if not energy:
        return []
    share = min(1.0, hyper.deviation**2 / energy)
    if share * len(values) < (_CERTAIN + 1.0) ** 2:
        return []
    count = 16 * math.ceil(_LIKELY**2 / share / 16)
    screens = []
    for dtype, words in ((torch.float32, 1), (torch.float64, 2)):
        ways = tuple(
            Drawn(dtype=dtype, layout=layout) for layout in ("one vector", "tensor by tensor")
        )
        clear = [
            way
            for way, whole in zip(ways, (len(values), first), strict=True)
            if hyper.kind == "laplace" or count + 16 <= whole
        ]
        if clear and count * words <= _MOST and count <= len(values):
            screens.append(
                _Screen(values=values[:count], kind=hyper.kind, ways=tuple(clear), fast=True)
            )
        else:
            # One vector only: the first tensor alone is too short.
            most = len(values) if count + 16 > len(values) else count
            screens.append(
                _Screen(values=values[:most], kind=hyper.kind, ways=ways[:1], fast=False)
            )
    return screens


def _confirmed(
    drawn: Drawn, seed: int, update: Tensors, values: Tensor, hyper: Noise
) -> Tensors | None:
    """Return the update without a seed's noise; None where it is not this seed's."""
    noise = drawn.noise(hyper.kind, seed, update)
    score = float(values @ noise) / float(values.norm())
    if abs(score) < _CERTAIN:
        return None
    rest = values - math.copysign(hyper.deviation, score) * noise
    order = 1 if hyper.kind == "laplace" and hyper.epsilon is not None else 2
    # Values that came as float32 are off by 2^-24 of themselves.
    rounding = 2.0**-22 * float(torch.linalg.vector_norm(values, ord=order))
    if hyper.clip is not None:
        norm = float(torch.linalg.vector_norm(rest, ord=order))
        if norm > hyper.clip * (1.0 + 1e-4) + rounding:
            return None
    return unflatten(rest, update)


def prefixes(kind: str, words: _Words, count: int, dtype: torch.dtype) -> _Real:
    """Return the first values that torch's CPU generator draws under each seed, ``(count, S)``.

    Parameters
    ----------
    kind
        ``gaussian``: of `torch.randn` for at least ``count + 16`` numbers; ``laplace``: of a
        Laplace distribution by inversion. Both of deviation 1, worked out in float32.
    words
        What `first_words` gave for the seeds: one row a number, for float64 two.
    count
        How many numbers; a multiple of 16 for ``gaussian``.
    """
    if dtype == torch.float32:
        uniform = _single(words[:count] & np.uint32(2**24 - 1)) * np.float32(2.0**-24)
    else:
        # The upper 21 of 53 bits are in the first word of two; 24 of them are enough for a screen.
        upper, lower = words[0 : 2 * count : 2], words[1 : 2 * count : 2]
        whole = ((upper & np.uint32(2**21 - 1)) << np.uint32(3)) | (lower >> np.uint32(29))
        uniform = _single(whole) * np.float32(2.0**-24)
    if kind == "laplace":
        return _laplace(uniform)
    blocks = uniform.reshape(count // 16, 2, 8, -1)
    radius = np.sqrt(np.float32(-2.0) * np.log(np.float32(1.0) - blocks[:, 0]))
    angle = np.float32(2.0 * math.pi) * blocks[:, 1]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.reshape(count, -1)


def first_words(seeds: _Words, count: int) -> _Words:
    """Return the first words of the Mersenne Twister under each seed, ``(count, S)``, at most 227.

    Matsumoto and Nishimura 1998, with the initialisation of 2002 that torch uses.
    """
    state = np.empty((2 * count + 1, len(seeds)), dtype=np.uint32)
    word = seeds.astype(np.uint32)
    shifted = np.empty_like(word)
    for i in range(397 + count):
        if i:
            np.right_shift(word, np.uint32(30), out=shifted)
            word ^= shifted
            word *= np.uint32(1812433253)
            word += np.uint32(i)
        if i <= count:
            state[i] = word
        if i >= 397:
            state[count + 1 + i - 397] = word
    low = state[1 : count + 1]
    mixed = (state[:count] & np.uint32(0x80000000)) | (low & np.uint32(0x7FFFFFFF))
    odd = (low & np.uint32(1)) * np.uint32(0x9908B0DF)
    y: _Words = state[count + 1 :] ^ (mixed >> np.uint32(1)) ^ odd
    y ^= y >> np.uint32(11)
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    y ^= y >> np.uint32(18)
    return y


def _single(whole: _Words) -> _Real:
    # Numbers below 2^24; signed ones convert faster.
    return whole.view(np.int32).astype(np.float32)


def _torch_noise(kind: str, count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if kind == "gaussian":
        return torch.randn(count, generator=generator, dtype=dtype).to(torch.float64)
    uniform = torch.rand(count, generator=generator, dtype=dtype).to(torch.float64)
    return torch.from_numpy(_laplace(uniform.numpy()))


def _laplace(uniform: _Real) -> _Real:
    centred = uniform - 0.5
    # A draw of exactly 0 would be infinite; it is as unlikely as it is useless.
    tail = np.log1p(-np.minimum(2.0 * np.abs(centred), 1.0 - np.finfo(uniform.dtype).eps / 2))
    noise: _Real = -np.sign(centred) * tail / uniform.dtype.type(math.sqrt(2.0))
    return noise


def _candidates(
    observation: Observation, budget: SeedBudget, purpose: str
) -> Iterator[range | list[int]]:
    """Yield seeds, the likeliest first."""
    if budget.seeds is not None:
        yield from budget.seeds
        return
    yield range(1 << 12)
    yield _made_up(observation, purpose)
    yield range(1 << 12, 1 << 32)


def _made_up(observation: Observation, purpose: str) -> list[int]:
    """Return seeds that people make of dates, or of a small seed, the round and the client."""
    dates = [
        year * 10_000 + month * 100 + day
        for year in range(2015, 2031)
        for month in range(1, 13)
        for day in range(1, 32)
    ]
    number = re.search(r"\d+$", observation.client)
    client = int(number[0]) if number else 0
    joined = [
        int(f"{a}{b:0{width}d}")
        for a, b in ((observation.round, client), (client, observation.round))
        for width in range(1, 7)
    ]
    # As bract itself derived them before it drew from a cipher.
    hashed = []
    for small in range(1024):
        for own in (small, derive_seed(small, "private", client)):
            digest = hashlib.sha256(f"{own}/{observation.round}/{purpose}".encode()).digest()
            hashed.append((int.from_bytes(digest[:8], "big") >> 1) % 2**32)
    return [seed % 2**32 for seed in (*hashed, *joined, *dates)]


def _blocks(groups: Iterable[range | list[int]], most: int) -> Iterator[_Words]:
    for group in groups:
        for start in range(0, len(group), _CHUNK):
            if most <= 0:
                return
            block = group[start : start + min(_CHUNK, most)]
            most -= len(block)
            yield np.array(block, dtype=np.uint32)
