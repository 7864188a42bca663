"""Losses of local training, the same at the client, the server and the attacker.

Outputs and labels of every function here are ``(..., B, K)``. A target that is a number, or the
second of two classes of a model with one output, has K = 1 and is its own label; one of several
numbers, as the next values of a series, has K of them, of whose errors the mean is taken. Where
every token of a text has a label, K is tokens times tags: outputs are log-probabilities, and the
row of a token without a label is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.errors import BractError, shown

CLOSE = 0.5
"""Standard deviations of the target up to which a predicted number counts as right in an accuracy
of training; only a summary of how training goes."""

RECONSTRUCTION = "reconstruction"
"""Loss of an autoencoder: the mean squared error between what it returns and its input."""


@dataclass(frozen=True)
class Loss:
    """One loss.

    Attributes
    ----------
    each
        Loss of each example, ``(..., B)``, of outputs and labels.
    label
        The label at which an output has a slope of the loss, of output and slope; None where the
        slope does not determine it.
    values
        Whether a label is a value of each output, rather than probabilities of classes.
    labelled
        Whether the loss depends on a label; otherwise the one output is the loss itself.
    per_token
        Whether every token of a text has a label, ``(B, T)``; those below 0 are none.
    several
        Whether a label may be several values, one an output.
    right
        How far a prediction is right, ``(B,)`` in [0, 1] of outputs ``(B, K)`` and labels: whether
        it is, or the share of the labels of a text.
    smoothing
        Share s of every label that is spread over all K classes: ``(1 - s) y + s / K``.
    class_weights
        What each class counts, as in PyTorch's cross entropy, divided by the mean weight of the
        labels of the examples of one call; empty where all count alike.
    soft
        Whether labels are probabilities of all classes, as of mixup, rather than one class.
    """

    each: Callable[[Tensor, Tensor], Tensor]
    right: Callable[[Tensor, Tensor], Tensor]
    values: bool = True
    labelled: bool = True
    per_token: bool = False
    several: bool = False
    label: Callable[[Tensor, Tensor], Tensor] | None = None
    smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    soft: bool = False

    @property
    def is_plain(self) -> bool:
        """Return whether every example counts alike, and its label is one class as it is."""
        return not self.smoothing and not self.class_weights and not self.soft

    def with_terms(
        self, smoothing: float, class_weights: tuple[float, ...], soft: bool = False
    ) -> Loss:
        """Return this loss with smoothed or soft labels and weights of classes.

        Raises
        ------
        BractError
            If the loss is not of classes, or weights are given of labels that are soft, which
            PyTorch divides by the number of examples.
        """
        if not smoothing and not class_weights and not soft:
            return self
        if soft and class_weights:
            raise BractError(
                "class_weights and soft_targets are declared; weights of labels that are one class "
                "are simulated: take one of them out",
                code="declaration-wrong",
            )
        if not self.of_classes:
            given = (
                "label_smoothing"
                if smoothing
                else "class_weights"
                if class_weights
                else "soft_targets"
            )
            raise BractError(
                f"{given} is declared with a loss that is not of classes; take it out, or declare "
                "loss cross_entropy",
                code="declaration-wrong",
            )
        each = partial(_with_terms, smoothing=smoothing, class_weights=class_weights)
        return replace(self, each=each, smoothing=smoothing, class_weights=class_weights, soft=soft)

    def targets(self, rows: Tensor) -> Tensor:
        """Return labels ``(..., K)`` as they enter cross entropy: smoothed."""
        return (1.0 - self.smoothing) * rows + self.smoothing / rows.shape[-1]

    def mean_slope(self, predicted: Tensor, shares: Tensor) -> Tensor:
        """Return the gradient of cross entropy at the logits ``(..., K)``, the mean of a batch.

        Parameters
        ----------
        predicted
            Probabilities ``(..., K)`` that all examples have alike.
        shares
            Share of each class among their labels, ``(..., K)``.
        """
        rows = self.targets(shares)
        if not self.class_weights:
            return predicted - rows
        weights = shares.new_tensor(self.class_weights)
        rows = rows * weights
        counted = (shares * weights).sum(dim=-1, keepdim=True).clamp_min(1e-30)
        return (rows.sum(dim=-1, keepdim=True) * predicted - rows) / counted

    @property
    def of_classes(self) -> bool:
        """Return whether outputs are logits of classes, of which each example has one."""
        return not self.values and not self.per_token

    def mean(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of outputs ``(B, K)`` and true labels ``(B,)`` or ``(B, T)``.

        Soft labels are probabilities ``(B, K)``.
        """
        if self.of_classes:
            weight = outputs.new_tensor(self.class_weights) if self.class_weights else None
            return F.cross_entropy(outputs, labels, weight, label_smoothing=self.smoothing)
        return self.each(outputs, label_rows(labels, outputs.shape[-1], self).to(outputs)).mean()


def loss_of(
    name: str,
    *,
    smoothing: float = 0.0,
    class_weights: tuple[float, ...] | None = None,
    soft: bool = False,
) -> Loss:
    """Return a loss by its name, with its terms (`Loss.with_terms`)."""
    if name not in LOSSES:
        raise BractError(
            f"loss {shown(name)} is declared; known are {', '.join(LOSSES)}", code="unknown-name"
        )
    return LOSSES[name].with_terms(smoothing, class_weights or (), soft)


def label_rows(labels: Tensor, classes: int, loss: Loss) -> Tensor:
    """Return true labels ``(..., B)`` as ``(..., B, K)``: one-hot rows, or the values.

    Values of several outputs are ``(..., B, K)`` already, and so are probabilities. Labels of
    tokens ``(..., B, T)`` are T one-hot rows in a line, those of tokens without one zero.
    """
    if loss.per_token:
        tags = classes // labels.shape[-1]
        there = (labels >= 0)[..., None]
        return (F.one_hot(labels.clamp_min(0), tags) * there).flatten(-2)
    if loss.values:
        return labels[..., None] if classes == 1 else labels
    return labels if labels.is_floating_point() else F.one_hot(labels, classes)


def drawn_labels(
    loss: Loss, shape: tuple[int, ...], *, outputs: int, tokens: int, generator: torch.Generator
) -> Tensor:
    """Return random labels of examples, int64 of this shape; of tokens ``(*shape, tokens)``,
    of several values ``(*shape, outputs)``.

    Parameters
    ----------
    outputs
        Outputs of the model for one example; of one output labels are 0 or 1.
    """
    if loss.per_token:
        return torch.randint(outputs // tokens, (*shape, tokens), generator=generator)
    if loss.values:
        each = shape if outputs == 1 else (*shape, outputs)
        return torch.randint(2, each, generator=generator)
    return torch.randint(outputs, shape, generator=generator)


def _cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return -(labels * outputs.log_softmax(dim=-1)).sum(dim=-1)


def _with_terms(
    outputs: Tensor, labels: Tensor, *, smoothing: float, class_weights: tuple[float, ...]
) -> Tensor:
    """Return cross entropy with smoothed labels and weights of classes, as PyTorch has it."""
    rows = (1.0 - smoothing) * labels + smoothing / labels.shape[-1]
    if not class_weights:
        return _cross_entropy(outputs, rows)
    weights = outputs.new_tensor(class_weights)
    counted = (labels * weights).sum(dim=-1).mean(dim=-1, keepdim=True).clamp_min(1e-30)
    return _cross_entropy(outputs, rows * weights) / counted


def _mean_of_tokens(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the tokens of each text that have a label; 0 where none has."""
    return -(labels * outputs).sum(dim=-1) / labels.sum(dim=-1).clamp_min(1.0)


def _share_of_tokens(outputs: Tensor, labels: Tensor) -> Tensor:
    found = outputs.unflatten(-1, (labels.shape[-1], -1)).argmax(dim=-1)
    there = labels >= 0
    right: Tensor = ((found == labels) & there).sum(dim=-1)
    return right / there.sum(dim=-1).clamp_min(1)


def _squared(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean(dim=-1)


def _absolute(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).abs().mean(dim=-1)


def _huber(outputs: Tensor, labels: Tensor) -> Tensor:
    apart = (outputs - labels).abs()
    return torch.where(apart <= 1.0, 0.5 * apart.square(), apart - 0.5).mean(dim=-1)


def _binary(outputs: Tensor, labels: Tensor) -> Tensor:
    # As PyTorch's: a logarithm is never below -100.
    on, off = outputs.log().clamp_min(-100.0), (1 - outputs).log().clamp_min(-100.0)
    return -(labels * on + (1 - labels) * off).sum(dim=-1)


def _binary_logits(outputs: Tensor, labels: Tensor) -> Tensor:
    return (F.softplus(outputs) - labels * outputs).sum(dim=-1)


def _itself(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the outputs, which are the loss of each example."""
    del labels
    return outputs.sum(dim=-1)


def _never(outputs: Tensor, labels: Tensor) -> Tensor:
    """Accuracy has no meaning where the output is the loss itself."""
    del labels
    return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)


def _likeliest(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.argmax(dim=-1) == labels


def _near(outputs: Tensor, labels: Tensor) -> Tensor:
    wanted = labels if labels.dim() == outputs.dim() else labels[..., None]
    return ((outputs - wanted).abs() <= CLOSE).float().mean(dim=-1)


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, _likeliest, values=False),
    "language_model": Loss(_itself, _never, labelled=False),
    "token_cross_entropy": Loss(_mean_of_tokens, _share_of_tokens, values=False, per_token=True),
    RECONSTRUCTION: Loss(_itself, _never, labelled=False),
    "mse": Loss(_squared, _near, several=True, label=lambda output, slope: output - slope / 2),
    "mae": Loss(_absolute, _near, several=True),
    "huber": Loss(_huber, _near, several=True),
    "binary_cross_entropy": Loss(
        _binary,
        lambda outputs, labels: (outputs[..., 0] > 0.5) == (labels > 0.5),
        label=lambda output, slope: output - slope * output * (1 - output),
    ),
    "binary_cross_entropy_logits": Loss(
        _binary_logits,
        lambda outputs, labels: (outputs[..., 0] > 0.0) == (labels > 0.5),
        label=lambda output, slope: output.sigmoid() - slope,
    ),
}
