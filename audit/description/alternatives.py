"""Other descriptions of a client that explain its update on what it kept, the nearest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bract.attacks.problem.client_model import (
    ORDERS,
    LocalTraining,
    local_training,
    loss_gradient,
)
from bract.attacks.problem.dropout import read_dropout
from bract.attacks.problem.step_rules import mean_step
from bract.attacks.problem.target_model import target_model_of
from bract.audit.description.search_time import SearchTime
from bract.audit.description.truth_check import Repeated, compare
from bract.captures.observation import ClientDeclaration
from bract.errors import BractError
from bract.models.losses import label_rows
from bract.updates.step_law import LINEAR
from bract.updates.update import Tensors

MOMENTUM = 0.9
"""The momentum that is tried where another one is described."""

DECAY = 0.01
"""Weight decay of PyTorch's AdamW."""

SMOOTHING = (0.1, 0.05, 0.2)
NORMS = (1.0, 0.1, 0.5, 2.0, 5.0, 10.0)
"""Usual label smoothing and norms of clipped gradients."""

_OF_GRADIENTS: dict[str, Any] = {
    **{"lr": 1.0, "lr_factors": (), "optimizer": "sgd", "momentum": 0.0, "momenta": ()},
    **{"weight_decay": 0.0, "max_grad_norm": None, "max_grad_value": None},
}
"""A client that sends its gradient takes no step of its own."""

RATES = (1.0, 0.1, 10.0, 0.01, 100.0)
"""Learning rates from which another one is sought, as multiples of the described one."""

SECANTS = 8
"""Most values of a term that are tried."""

CONFIRMED = 0.9999
"""Cosine from which on a simulated update is the captured one."""

SCALE = 0.01
"""Most that its length may differ, as a share."""

ALIKE = 0.7
"""Cosine of another optimizer's update from which on a learning rate is sought for it."""

NEAR = 0.9999
"""Cosine from which on a direction is taken for the right one, whatever its length."""


@dataclass(frozen=True)
class Alternative:
    """Another description, and how well it gives the captured update.

    Attributes
    ----------
    words
        What it has otherwise.
    changes
        Fields of the declaration; empty where no declaration says it, as of a summed loss.
    """

    words: str
    changes: dict[str, Any]
    cosine: float
    scale: float | None


def explains(cosine: float, scale: float | None) -> bool:
    """Return whether a simulated update is the captured one."""
    return cosine > CONFIRMED and scale is not None and abs(scale - 1.0) < SCALE


def rounded_to(made: Repeated, arithmetic: torch.dtype) -> Tensors:
    """Return the simulated update of a client that computes in float32, or in bfloat16.

    bfloat16 is that of `torch.autocast`: forward passes in it, and the rest in float32.
    """
    search = Search(made)
    raw = search.simulate(search.p, arithmetic=arithmetic)
    scale = search.unit(search.p)
    return {n: v.double() / scale for n, v in raw.items() if n in made.simulated}


class Search:
    """Simulates a client under other descriptions and compares it with what it sent."""

    def __init__(self, made: Repeated, clock: SearchTime | None = None) -> None:
        self.made, self.clock = made, clock
        self.observation = made.case.observation
        self.p = self.observation.declaration
        names = made.case.target_model.parameter_names
        self.sent = {n: self.observation.update[n].double() for n in names}
        self.averaging = made.case.law.averaging
        self.batch = min(self.p.batch_size or len(made.images), len(made.images))
        self.even = len(made.images) % self.batch == 0

    def unit(self, p: ClientDeclaration) -> float:
        """Factor from a gradient to an update, as `Observation.gradient` divides by it."""
        return (p.lr or 1.0) * self.made.steps if self.averaging and p.lr else 1.0

    def simulate(
        self,
        p: ClientDeclaration,
        *,
        arithmetic: torch.dtype = torch.float64,
        order: Tensor | None = None,
        summed: bool = False,
    ) -> Tensors:
        """Return the update that a client of this description sends.

        Parameters
        ----------
        arithmetic
            In which it computes: float64, float32, or bfloat16 as `torch.autocast` does.
        order
            int64 ``(epochs, N)``: a permutation of the examples for each pass; None where each is
            in the order of the first.
        summed
            Whether the loss of a step is the sum over its examples.
        """
        half = arithmetic is torch.bfloat16
        exact = torch.float32 if half else arithmetic
        observation = replace(self.observation, declaration=p)
        own = self.made.case.target_model
        target = own if p == self.p else target_model_of(observation)
        forward = local_training(self.made.case.forward)
        training = LocalTraining.of(
            p if self.averaging else replace(p, **_OF_GRADIENTS),
            images=len(self.made.images),
            steps=self.made.steps,
            frozen=forward.frozen if forward else (),
        )
        masks = read_dropout(observation, target).masks
        held = {n: v for n, v in observation.buffers.items() if n in target.buffer_names} | masks
        state = {n: (v.to(exact) if v.is_floating_point() else v)[None] for n, v in held.items()}
        start = {n: observation.parameters[n].to(exact)[None] for n in target.parameter_names}
        inputs = target.normalise(self.made.images.to(exact))[None]
        rows = label_rows(self.made.labels, p.classes or 0, target.loss).to(exact)[None]
        if order is not None:
            state[ORDERS] = order[None]
        batch, state = training.batches(inputs, rows, state)
        moving = [n for n in start if n not in training.frozen]

        def gradient(step: int, current: Tensors) -> Tensors:
            if self.clock is not None:
                self.clock.check()
            taken, labels = batch(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                found = loss_gradient(target, current, state, taken, labels, only=moving)
            return {n: g * taken.shape[1] for n, g in found.items()} if summed else found

        end = training.trajectory(start, gradient)
        return {n: (start[n] - end[n])[0].detach() for n in start}

    def compared(self, update: Tensors) -> tuple[float, float | None]:
        """Return cosine and scale of a simulated update and the captured one."""
        return compare(update, self.sent, None)

    def tried(
        self, words: str, changes: dict[str, Any], *, summed: bool = False
    ) -> Alternative | None:
        """Simulate one description; None where it cannot be."""
        if self.clock is not None:
            self.clock.tell(words)
        try:
            found = self.simulate(replace(self.p, **changes), summed=summed)
        except (BractError, RuntimeError, ValueError):
            return None
        cosine, scale = self.compared(found)
        return Alternative(words, {} if summed else changes, cosine, scale)

    def with_rate(self, words: str, changes: dict[str, Any]) -> Iterator[Alternative]:
        """Try a description with the described learning rate, then with the one that fits best."""
        one = self.tried(words, changes)
        if one is None:
            return
        if words:
            yield one
        if not self.averaging or not self.p.lr:
            return
        best = None
        if one.cosine > NEAR and one.scale and one.scale > 0:
            best = self._again(words, changes, self.p.lr * one.scale)
        if best is None and self.made.steps > 1:
            near, optimizer = self.p.lr, changes.get("optimizer", self.p.optimizer)
            if optimizer not in LINEAR:
                # Each step is about as long as the rate, whatever the gradient.
                near = self._step_length() / mean_step(optimizer, self.made.steps)
                one = self._again(words, changes, near) or one
            if words and one.cosine < ALIKE:
                return
            rate = self._fitted("lr", replace(self.p, **changes | {"lr": near}))
            best = None if rate is None else self._again(words, changes, rate)
            if best is not None and ALIKE < best.cosine < NEAR and optimizer not in LINEAR:
                # Where rounding to a sign turns steps, secants come near and no nearer.
                rate = self._fitted("lr", replace(self.p, **changes | {"lr": rate}))
                best = best if rate is None else self._again(words, changes, rate)
        elif best is None and self.made.steps == 1 and changes and one.scale and one.scale > 0:
            best = self._again(words, changes, self.p.lr * one.scale)
        if best is not None:
            yield best

    def _step_length(self) -> float:
        """Return the median distance that a step moved a coordinate that moved."""
        moved = torch.cat([v.flatten().abs() for v in self.sent.values()])
        moved = moved[moved > 0.0]
        return float(moved.median()) / self.made.steps if len(moved) else 1.0

    def _again(self, words: str, changes: dict[str, Any], rate: float) -> Alternative | None:
        rate = rounded(rate)
        named = f"lr {rate:g}" if not words else f"{words} with lr {rate:g}"
        return self.tried(named, changes | {"lr": rate})

    def other_rates(self) -> Iterator[Alternative]:
        """The learning rate, and what has the effect of another one."""
        for one in self.with_rate("", {}):
            yield self._explained_rate(one)
        if self.averaging and not self.even and self.batch > 1:
            summed = self.tried("a loss that is summed", {}, summed=True)
            if summed is not None:
                yield summed

    def _explained_rate(self, one: Alternative) -> Alternative:
        """Name what else than a learning rate makes an update longer or shorter."""
        ratio = float(one.changes.get("lr") or self.p.lr or 1.0) / (self.p.lr or 1.0)
        if self.batch > 1 and abs(ratio / self.batch - 1.0) < 1e-3:
            hint = f" (as of a loss that is summed over the {self.batch} examples of a step)"
            return replace(one, words=one.words + hint)
        norm = self._sent_norm()
        if ratio < 1.0 and self.made.steps == 1 and any(abs(norm / n - 1) < 1e-3 for n in NORMS):
            return replace(one, words=f"{one.words} (as of gradients clipped to {norm:.3g})")
        return one

    def _sent_norm(self) -> float:
        whole = float(sum(v.square().sum() for v in self.sent.values())) ** 0.5
        return float(whole / self.unit(self.p))

    def other_optimizers(self) -> Iterator[Alternative]:
        """Momentum, Nesterov's momentum, Adam, AdamW and plain SGD."""
        for words, changes in self.kinds() if self.averaging else ():
            yield from self.with_rate(words, changes)

    def kinds(self) -> list[tuple[str, dict[str, Any]]]:
        """Return other optimizers, in words and as fields of the declaration."""
        p = self.p
        kinds: list[tuple[str, dict[str, Any]]] = []
        if self.made.steps > 1:
            kinds += [
                ("momentum 0.9", {"optimizer": "sgd", "momentum": MOMENTUM}),
                ("Nesterov's momentum 0.9", {"optimizer": "nesterov", "momentum": MOMENTUM}),
            ]
        kinds += [
            ("SGD without momentum", {"optimizer": "sgd", "momentum": 0.0}),
            ("Adam", {"optimizer": "adam", "momentum": 0.0}),
            ("AdamW", {"optimizer": "adamw", "momentum": 0.0, "weight_decay": DECAY}),
            ("RMSprop", {"optimizer": "rmsprop", "momentum": 0.0}),
        ]
        return [
            (words, changes)
            for words, changes in kinds
            if any(getattr(p, key) != value for key, value in changes.items())
        ]

    def other_contexts(self) -> Iterator[Alternative]:
        """The mode of batch normalisation, and how pixels were normalised."""
        p = self.p
        modules = self.made.case.target_model.model.modules()
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules):
            other = "eval" if p.norm_mode == "train" else "train"
            yield from self.with_rate(f"norm_mode {other}", {"norm_mode": other})
        if p.input == "image" and (p.mean is not None or p.std is not None):
            yield from self.with_rate("pixels without normalisation", {"mean": None, "std": None})

    def other_terms(self) -> Iterator[Alternative]:
        """Terms of a step whose value is sought: weight decay, FedProx's, momentum."""
        if not self.averaging or not self.p.lr:
            return
        terms = ["weight_decay"]
        if self.made.steps > 1:
            terms += ["proximal_mu"]
            terms += ["momentum"] if self.p.optimizer in ("sgd", "nesterov") else []
        for name in terms:
            value = self._fitted(name, self.p)
            if value is not None:
                one = self.tried(f"{name} {rounded(value):g}", {name: rounded(value)})
                if one is not None:
                    yield one

    def other_losses(self) -> Iterator[Alternative]:
        """Label smoothing, class weights and clipped gradients."""
        if self.made.case.target_model.loss.of_classes:
            for share in SMOOTHING:
                yield from self._with_loss(
                    f"label smoothing {share:g}", {"label_smoothing": share, "class_weights": None}
                )
            for words, weights in self._class_weights():
                yield from self._with_loss(words, {"class_weights": weights})
        for norm in NORMS if self.averaging and self.made.steps > 1 else ():
            one = self.tried(f"gradients clipped to {norm:g}", {"max_grad_norm": norm})
            if one is not None:
                yield one

    def _with_loss(self, words: str, changes: dict[str, Any]) -> Iterator[Alternative]:
        """Try another loss with the described learning rate, and with the one that it would need.

        A rate that was read off the updates stands for the loss as well.
        """
        one = self.tried(words, changes)
        if one is None:
            return
        yield one
        if self.averaging and self.p.lr and one.cosine > NEAR and one.scale and one.scale > 0:
            again = self._again(words, changes, self.p.lr * one.scale)
            if again is not None:
                yield again

    def _class_weights(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Yield weights by the client's counts, and those that fit the update of one step best.

        What nothing shows, the weight of a class without an example, is the mean of the others.
        """
        classes, labels = self.p.classes or 0, self.made.labels
        if labels.is_floating_point():
            return
        counts = torch.bincount(labels, minlength=classes).double()
        if int((counts > 0).sum()) < 2:
            return
        if float(counts[counts > 0].min()) < float(counts.max()):
            inverse = tuple((1.0 / counts.clamp_min(1.0)).tolist())
            yield "class weights by counts", inverse
        present = [c for c in range(classes) if counts[c]]
        if self.made.steps > 1 or len(present) > 64:
            return
        # The gradient of one step is linear in the weights, normalised over the batch.
        columns = []
        for c in present:
            only = tuple(float(k == c) for k in range(classes))
            try:
                one = self.simulate(replace(self.p, class_weights=only))
            except (BractError, RuntimeError, ValueError):
                return
            columns.append(torch.cat([one[n].flatten() for n in self.sent]))
        sent = torch.cat([v.flatten() for v in self.sent.values()])
        shares = torch.linalg.lstsq(torch.stack(columns, 1), sent[:, None]).solution[:, 0]
        if float(shares.min()) <= 0.0 or not bool(shares.isfinite().all()):
            return
        found = {
            c: share / float(counts[c]) for c, share in zip(present, shares.tolist(), strict=True)
        }
        most = max(found.values())
        unseen = sum(found.values()) / len(found)
        weights = tuple(rounded(found.get(c, unseen) / most) for c in range(classes))
        named = ", ".join(f"{c}: {weights[c]:.3g}" for c in present[:10])
        yield f"class weights in the ratio of {named}", weights

    def _fitted(self, name: str, p: ClientDeclaration) -> float | None:
        """Return the value of a term that fits best, by the secant method; None without one."""

        def given(value: float) -> Tensors:
            changes: dict[str, Any] = {name: value}
            return self.simulate(replace(p, **changes))

        def apart(update: Tensors) -> float:
            return sum(float((self.sent[n] - v).square().sum()) for n, v in update.items())

        before = float(getattr(p, name) or 0.0)
        try:
            if name == "lr":
                starts = {rate * before: given(rate * before) for rate in RATES}
                before = min(starts, key=lambda rate: apart(starts[rate]))
                found, value = starts[before], before * 1.1
            else:
                found, value = given(before), before + (0.1 if name != "weight_decay" else 0.01)
            most = 0.999 if name == "momentum" else math.inf
            least = before / 1000.0 if name == "lr" else 0.0
            for _ in range(SECANTS):
                value = min(max(value, least), most)
                if value == before:
                    break
                again = given(value)
                slope = {n: (again[n] - found[n]) / (value - before) for n in again}
                square = sum(float(v.square().sum()) for v in slope.values())
                missing = sum(float((slope[n] * (self.sent[n] - again[n])).sum()) for n in slope)
                before, found = value, again
                if not square > 0.0 or not math.isfinite(missing):
                    break
                value += missing / square
        except (BractError, RuntimeError, ValueError):
            return None
        return before if math.isfinite(before) and before else None


def rounded(value: float) -> float:
    """Round to three digits where that is nearly the same, as people write numbers."""
    short = float(f"{value:.3g}")
    return short if abs(short - value) <= 2e-3 * abs(value) else value
