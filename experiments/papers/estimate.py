"""What a row costs, before it starts: by a probe of a few seconds, or by a stated rule.

Seconds are of the processor on a CPU, so that other programs do not count, and wall time on a
device. Nothing here decides a result.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bract.models import create_model
from experiments.harness.clients import uploads
from experiments.harness.points import SETTINGS, Points, network
from experiments.harness.reviews import REVIEWS
from experiments.papers.runners.base import Context, Settings
from experiments.papers.runners.defense_time import TimeRunner, TimeSettings
from experiments.papers.runners.federation import FederationRunner, FederationSettings
from experiments.papers.runners.gaussians import GaussiansSettings
from experiments.papers.runners.generator import ALONE, GeneratorSettings, generator
from experiments.papers.runners.guardian_steps import StepsSettings
from experiments.papers.runners.locked_features import FeaturesRunner, FeaturesSettings
from experiments.papers.runners.reconstruction import BASELINES, ReconstructionSettings, attack_all
from experiments.papers.runners.sampled import SampledRunner, SampledSettings
from experiments.papers.runners.sentences import SentenceSettings, SentencesRunner
from experiments.papers.runners.text import RENDERED, TextRunner, TextSettings

_PROBED = 5
_PATIENCE = 4.0
"""Seconds of one iteration above which no further one is timed."""

_BASE = 5e8
"""Bytes of Python, torch and the data sets."""

_TRAINING = 20.0
"""Seconds for which a LeNet is trained on other images, where a row wants trained networks."""


_SCENE_TEXT = 5_650_000
"""Words of a client: 6.5 million of Synth90K at one, 4.8 of SynthText at the other (4.3.2)."""


@dataclass(frozen=True)
class Cost:
    """What a row costs: seconds, and bytes of memory of the device that holds its tensors."""

    seconds: float
    memory: float


def cost(settings: Settings, context: Context) -> Cost:
    """Estimate one row."""
    if isinstance(settings, GeneratorSettings):
        return _generator(settings, context)
    if isinstance(settings, ReconstructionSettings):
        return _reconstruction(settings, context)
    if isinstance(settings, SampledSettings):
        return _sampled(settings, context)
    if isinstance(settings, FederationSettings):
        once = settings.model_copy(update={"rounds": 1, "judged": 1, "watched": ()})
        each = _timed(lambda: FederationRunner().run(once, 0, context), context)
        size = _sizes(settings.model, settings.size)[0]
        memory = _BASE + 4.0 * size * 4 * (settings.clients + 4)
        return Cost(each * settings.rounds * settings.seeds, memory)
    if isinstance(settings, FeaturesSettings):
        short = settings.model_copy(update={"rounds": 1})
        each = _timed(lambda: FeaturesRunner().run(short, 0, context), context)
        return Cost(each * settings.rounds * settings.seeds, 2 * _BASE)
    if isinstance(settings, GaussiansSettings):
        return _gaussians(settings, context)
    if isinstance(settings, TextSettings):
        return _text(settings, context)
    if isinstance(settings, SentenceSettings):
        return _sentences(settings, context)
    if isinstance(settings, TimeSettings):
        first = settings.model_copy(update={"steps": 1, "repeats": 1, "defenses": ()})
        each = _timed(lambda: TimeRunner().run(first, 0, context), context)
        # Soteria differentiates every feature before the last layer.
        slow = 100.0 if any(d.get("name") == "soteria" for d in settings.defenses) else 2.0
        return Cost(each * settings.steps * settings.repeats * slow, 2 * _BASE)
    assert isinstance(settings, StepsSettings)
    return Cost(1.0 * settings.uploads, _BASE)  # nothing is differentiated


def processor_seconds() -> float:
    """Return the processor time of this process so far; of a device it says nothing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _timed(work: Callable[[], Any], context: Context) -> float:
    now = processor_seconds if context.device == "cpu" else time.perf_counter
    begun = now()
    work()
    return now() - begun


def _reconstruction(settings: ReconstructionSettings, context: Context) -> Cost:
    if settings.attack in BASELINES:
        return Cost(0.1 * settings.uploads, _BASE)
    parameters, activations = _sizes(settings.model, settings.size)
    trials = min(settings.uploads, settings.together) * settings.restarts
    # Captured, simulated and their derivatives of each parameter; a graph of twice the depth.
    memory = 4.0 * trials * (8 * parameters + 40 * activations * settings.batch) + _BASE
    alike = {"uploads": 1, "iterations": 1, "restarts": 1, "trained": False, "round": 1,
             "recogniser": None}  # fmt: skip
    given = settings.model_copy(update=alike)
    first, each = _attacked(given.model_copy(update={"tier": "plain"}).model_dump_json(), context)
    seconds = each * settings.iterations * settings.restarts
    if settings.tier not in ("plain", "oblivious"):
        # The adaptive attacker works on the evidence first, once an upload.
        knowing, _ = _attacked(given.model_dump_json(), context, iterations=False)
        seconds += max(0.0, knowing - first)
    if settings.trained:
        seconds += _TRAINING
    if settings.recogniser is not None:
        seconds += _TRAINING * settings.recogniser.steps / 1500
    return Cost(seconds * settings.uploads + 2.0, memory)


@cache
def _attacked(content: str, context: Context, iterations: bool = True) -> tuple[float, float]:
    """Return the seconds of a first iteration with all that comes before it, and of each further.

    The first run of all imports and compiles; it is not counted.
    """
    settings = ReconstructionSettings.model_validate_json(content)
    captured = uploads(settings.situation(context), split="choose", secret=0)
    first = 0.0
    for _ in range(2):
        first = _timed(lambda: attack_all(settings, captured, context), context)
    if first > _PATIENCE or not iterations:
        return first, first
    more = settings.model_copy(update={"iterations": 1 + _PROBED})
    several = _timed(lambda: attack_all(more, captured, context), context)
    return first, max((several - first) / _PROBED, 1e-4)


def _generator(settings: GeneratorSettings, context: Context) -> Cost:
    """Train the generator as the rows do, which share it, and probe the attack."""
    seconds = _timed(lambda: generator(settings, context), context)
    if settings.attack in (*BASELINES, ALONE):
        return Cost(seconds + 0.1 * settings.uploads, 2 * _BASE)
    alike = {"uploads": 1, "restarts": 1, "iterations": 1}
    given = settings.model_copy(update=alike)
    captured = uploads(given.situation(context), split="choose", secret=0)
    public = generator(settings, context)

    def attacked(iterations: int) -> float:
        probe = given.model_copy(update={"iterations": iterations})
        return _timed(lambda: attack_all(probe, captured, context, public=public), context)

    first = min(attacked(1), attacked(1))
    each = max((attacked(1 + _PROBED) - first) / _PROBED, 1e-4)
    images = settings.uploads * settings.restarts
    return Cost(seconds + images * (first + each * settings.iterations) + 2.0, 3 * _BASE)


def _sampled(settings: SampledSettings, context: Context) -> Cost:
    alike = {"uploads": 1, "restarts": 1}
    given = settings.model_copy(update=alike)

    def attacked(iterations: int) -> float:
        probe = given.model_copy(update={"iterations": iterations})
        return _timed(lambda: SampledRunner().run(probe, 0, context, split="train"), context)

    first = min(attacked(1), attacked(1))
    each = max((attacked(1 + _PROBED) - first) / _PROBED, 1e-4)
    images = settings.uploads * settings.restarts
    return Cost(images * (first + each * settings.iterations) + 2.0, 3 * _BASE)


def _gaussians(settings: GaussiansSettings, context: Context) -> Cost:
    few = max(200, settings.samples // 40)
    client = Points(settings.setting, 0, few, 1)
    start = network(0).state_dict()
    each = _timed(lambda: client.train(start, 1, 0.0), context) * settings.samples / few
    return Cost(each * len(SETTINGS[settings.setting]) * settings.rounds * settings.seeds, _BASE)


def _sentences(settings: SentenceSettings, context: Context) -> Cost:
    probe = settings.model_copy(
        update={"data": REVIEWS, "split": "choose", "restarts": 1, "words": None}
    )

    def attacked(iterations: int) -> float:
        given = probe.model_copy(update={"iterations": iterations})
        return _timed(lambda: SentencesRunner().run(given, 0, context), context)

    first = min(attacked(1), attacked(1))
    each = max((attacked(1 + _PROBED) - first) / _PROBED, 1e-4)
    seconds = first + each * settings.iterations * settings.restarts
    return Cost(seconds * settings.uploads, 4 * _BASE)


def _text(settings: TextSettings, context: Context) -> Cost:
    whole = settings.words if settings.data == RENDERED else _SCENE_TEXT
    few = min(whole, max(20, 8 * settings.batch))
    probe = {"data": RENDERED, "words": few, "test_words": 20, "rounds": 1, "watched": ()}
    plain = settings.model_copy(update={**probe, "encrypted": False})
    each = _timed(lambda: TextRunner().run(plain, 0, context), context)
    seconds = each * whole / few
    if settings.encrypted:
        sealed = settings.model_copy(update=probe)
        TextRunner().run(sealed, 0, context)  # draws the key
        seconds += max(0.0, _timed(lambda: TextRunner().run(sealed, 0, context), context) - each)
    memory = _BASE + 4.0 * whole * settings.height * settings.width * 2
    if settings.data != RENDERED:
        memory = 10 * _BASE
    return Cost(seconds * settings.rounds * settings.seeds, memory)


@cache
def _sizes(name: str, size: int) -> tuple[int, int]:
    """Return the parameters of a model, and the values that its layers put out for one image."""
    model = create_model(name, classes=10, channels=3, image_size=size).eval()
    put_out = 0

    def count(module: nn.Module, given: Any, found: Any) -> None:
        nonlocal put_out
        del module, given
        put_out += found.numel() if isinstance(found, Tensor) else 0

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    with torch.no_grad():
        model(torch.zeros(1, 3, size, size))
    return sum(p.numel() for p in model.parameters()), put_out
