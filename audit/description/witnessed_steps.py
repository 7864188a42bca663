"""Describe an optimizer's steps by what a witness saw of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bract.attacks.problem.step_rules import BETAS, EPS
from bract.audit.description.said import Said, number, plain, same
from bract.audit.description.truth_check import REPLAYED_STEPS
from bract.config.work import MOST_FACTORS
from bract.errors import listed, one_line
from bract.schema.work import ClipSeen, GroupSeen, OptimizerSeen, Settings, Work

_SIMULATED: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"dampening": 0.0, "maximize": False},
    "Adam": {"maximize": False},
    "AdamW": {"maximize": False},
    "RMSprop": {"alpha": 0.99, "centered": False, "maximize": False},
}
"""Settings of PyTorch's optimizers with which attacks simulate them, besides those described."""

_OF_MOMENTS = ("Adam", "AdamW")


def lockstep(work: Work) -> int:
    """Return the steps of the training: those of one optimizer, where several step together."""
    return max((one.steps for one in work.optimizers), default=0)


def say_optimizer(said: Said, work: Work, scale: float | None) -> None:
    """Say the optimizer, its rates and how it clips; name what no attack simulates.

    Parameters
    ----------
    scale
        What multiplies the mean loss over the examples of a step; None where it is not known.
    """
    optimizers = work.optimizers
    if not optimizers:
        said.causes.append("no optimizer of PyTorch made a step")
        return
    first = optimizers[0]
    for other in optimizers[1:]:
        if not _alike(first, other):
            names = listed(sorted({one.name for one in optimizers}))
            said.causes.append(f"{len(optimizers)} optimizers ({names}) train the model")
            return
    if optimizers[1:] and len(work.examples) > lockstep(work):
        said.causes.append(
            f"{len(optimizers)} optimizers step by turns, each on passes of its own, as of a head "
            "and then a body"
        )
    if first.resumed:
        said.causes.append("the optimizer began with moments of earlier rounds")
    groups = [group for group in first.groups if group.names] or list(first.groups)
    settings = groups[0].settings if groups else {}
    for key in sorted({k for group in groups for k in group.settings}):
        if any(not same(group.settings.get(key), settings.get(key)) for group in groups[1:]):
            said.causes.append(f"groups of parameters have different values of {key}")
    if first.name not in _SIMULATED or not first.module.startswith("torch.optim"):
        said.values["training.optimizer"] = one_line(first.name.lower(), 64)
        said.causes.append(f"the optimizer is {one_line(first.name, 64)}")
        return
    for key, usual in _SIMULATED[first.name].items():
        held = settings.get(key, usual)
        if not same(held, usual) and not (key == "dampening" and not settings.get("momentum")):
            said.causes.append(f"{first.name} has {key} {held}")
    name = first.name.lower()
    if name == "sgd" and settings.get("nesterov"):
        name = "nesterov"
    rates = _say_changes(said, first, groups, settings)
    _say_moments(said, first.name, settings, scale)
    _say_rate(said, work, settings, name, rates, scale)


def _say_rate(
    said: Said,
    work: Work,
    settings: Settings,
    name: str,
    rates: Sequence[float],
    scale: float | None,
) -> None:
    """Say learning rate, momentum and decay, as they are for the mean loss over a step."""
    momentum = number(settings.get("momentum", 0.0))
    rate, decay = number(settings.get("lr")), number(settings.get("weight_decay", 0.0))
    if rates:
        rate = max(rates)
        said.values["training.lr_factors"] = tuple(plain(one / rate) for one in rates)
        if work.steps > REPLAYED_STEPS and (name != "sgd" or momentum):
            said.causes.append(f"lr changes within a round of {len(rates)} steps")
    shown = f": {rate:g}"
    if scale is not None and not same(scale, 1.0) and scale > 0.0:
        shown += f", times {scale:.4g} by which the loss is that of a mean over the step"
        rate = rate * scale if name in ("sgd", "nesterov") else rate
        decay = decay if name == "adamw" else decay / scale
    clipping = _clipping(said, work, scale)
    if clipping < 1.0:
        shown += f", times {clipping:.4g} by which the gradient was clipped"
    rate *= clipping
    said.values |= {
        "training.optimizer": name,
        "training.momentum": momentum if 0.0 <= momentum < 1.0 else 0.0,
        "training.weight_decay": max(0.0, decay),
    }
    if rate > 0.0 and math.isfinite(rate):
        said.values["training.lr"] = plain(rate)
        if shown.count(","):
            said.notes["training.lr"] = shown


def _say_moments(said: Said, name: str, settings: Settings, scale: float | None) -> None:
    """Say what Adam and RMSprop divide by, where it is not PyTorch's own.

    Of gradients that are ``scale`` times those of the mean loss an ``eps`` counts as much less.
    """
    if name == "SGD":
        return
    eps = number(settings.get("eps", EPS)) / (scale if scale is not None and scale > 0.0 else 1.0)
    if eps > 0.0 and not same(eps, EPS):
        said.values["training.eps"] = plain(eps)
    elif not eps:
        said.causes.append(f"{name} has an eps of 0")
    betas = settings.get("betas")
    if isinstance(betas, tuple) and len(betas) == 2 and not same(betas, BETAS):
        said.values["training.betas"] = betas
    if settings.get("amsgrad") and name in _OF_MOMENTS:
        said.values["training.amsgrad"] = True


def _say_changes(
    said: Said, first: OptimizerSeen, groups: Sequence[GroupSeen], settings: Settings
) -> list[float]:
    """Say the momentum of each step where it changes; return the learning rates where they do.

    Any other change is named.
    """
    momentum = "betas" if first.name in _OF_MOMENTS else "momentum"
    found: dict[str, list[float]] = {}
    for key in sorted({k for change in first.changes for k in change.settings}):
        tracks = _tracks(first, groups, key)
        known = not first.left_out and first.steps <= MOST_FACTORS
        known = known and all(same(track, tracks[0]) for track in tracks)
        if key == "lr" and known:
            found[key] = [number(value) for value in tracks[0]]
            if max(found[key]) > 0.0:
                continue
        elif key == momentum and known and first.steps <= REPLAYED_STEPS:
            momenta = _momenta(tracks[0])
            if momenta is not None:
                said.values["training.momenta"] = momenta
                continue
        last = [c.settings[key] for c in first.changes if key in c.settings][-1]
        ending = (
            ""
            if all(same(track, tracks[0]) for track in tracks)
            else (", and differs between parameters")
        )
        said.causes.append(
            f"{key} changes within a round, from {settings.get(key)} to {last}{ending}"
        )
        found.pop(key, None)
    return found.get("lr", [])


def _tracks(first: OptimizerSeen, groups: Sequence[GroupSeen], key: str) -> list[list[Any]]:
    """Return the value of a setting at each step, of each group that moves a parameter."""
    tracks = []
    for place, group in enumerate(first.groups):
        if group not in groups:
            continue
        value, track = group.settings.get(key), []
        mine = {
            c.step: c.settings[key] for c in first.changes if c.group == place and key in c.settings
        }
        for step in range(min(first.steps, MOST_FACTORS)):
            value = mine.get(step, value)
            track.append(value)
        tracks.append(track)
    return tracks


def _momenta(track: Sequence[Any]) -> tuple[float, ...] | None:
    """Return the momentum of each step, of Adam the first of betas whose second one stays."""
    if all(isinstance(value, tuple) and len(value) == 2 for value in track):
        if any(not same(value[1], track[0][1]) for value in track):
            return None
        track = [value[0] for value in track]
    found = tuple(plain(number(value)) for value in track)
    return found if all(0.0 <= value < 1.0 for value in found) else None


def _clipping(said: Said, work: Work, scale: float | None) -> float:
    """Return the factor by which clipping shortened the only step; name what is not simulated.

    Of several steps the norm is described, and of any the largest value.
    """
    first = work.optimizers[0]
    reached = [clip for clip in work.clips if clip.reached]
    if work.steps == 1 and not reached:
        return 1.0
    plain_step = first.name == "SGD" and not number(first.groups[0].settings.get("weight_decay"))
    if work.steps == len(reached) == 1 and reached[0].kind == "norm" and plain_step:
        return reached[0].least or 1.0
    if len(work.clips) == 1 and len(work.optimizers) == 1 and scale is not None and scale > 0.0:
        clip = work.clips[0]
        if _clips_all(clip, first, work.steps):
            said.values[f"training.max_grad_{clip.kind}"] = plain(clip.bound / scale)
            if not reached or work.steps <= REPLAYED_STEPS:
                return 1.0
    for clip in reached:
        said.causes.append(f"gradients are clipped to a {clip.kind} of {clip.bound:g}")
    return 1.0


def _clips_all(clip: ClipSeen, first: OptimizerSeen, steps: int) -> bool:
    """Return whether every step's whole gradient was clipped, by its value or Euclidean norm."""
    tensors = sum(len(group.names) for group in first.groups)
    usual = clip.kind == "value" or clip.norm_type == 2.0
    return usual and clip.tensors in (0, tensors) and clip.steps == steps and clip.bound > 0.0


def _alike(one: OptimizerSeen, other: OptimizerSeen) -> bool:
    def settings(seen: OptimizerSeen) -> list[Any]:
        return [dict(group.settings) for group in seen.groups if group.names]

    return (one.name, one.steps, one.changes) == (other.name, other.steps, other.changes) and all(
        a == b for a in settings(one) for b in settings(other)
    )
