"""Labels of tokens, from the output layer's gradient once the tokens are known."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from bract.attacks.problem.case import text_schema
from bract.attacks.problem.problem import Problem
from bract.data.tokens import ids_of
from bract.errors import BractError
from bract.protocol.update import Tensors

_LEAST = 0.5
"""Share of a text's largest slope from which on a token has a label: all that have one have equal
slopes, the others none."""

_ALIKE = 1e-5
"""Relative distance up to which tokens have the same features, as equal beginnings of texts have in
a causal model. They share the least-squares slope equally."""

_DEFICIENT = 1e-7
"""Singular values of tokens' features below this share of the largest are none."""


def infer_tags(problem: Problem, texts: Tensor) -> Tensor:
    """Return the label of every token as rows ``(L, B, T * tags)``, zeros where it has none.

    The gradient of the output layer is ``S^T H``, with H the features of all tokens, which follow
    from the tokens, and S the slopes of the loss at their logits. While the tokens are linearly
    independent, S is the one least-squares solution. Under the mean cross entropy of each text's
    labelled tokens, the slope at a token of label y and prediction p is a multiple of
    ``p - e_y``, the same for all labelled tokens of a text, and zero where there is no label: y is
    the tag of the least slope.

    Parameters
    ----------
    texts
        Examples ``(L, B, T, 1, 1)`` in [0, 1].

    Raises
    ------
    BractError
        If the update lacks the output layer, or has more tokens than the layer has inputs.
    """
    found = [_of_trial(problem, trial, texts[trial]) for trial in range(problem.trials)]
    return torch.stack(found).to(problem.device, problem.dtype)


def _of_trial(problem: Problem, trial: int, texts: Tensor) -> Tensor:
    count, length = texts.shape[:2]
    tags = problem.classes // length
    target = {n: v[trial].detach().cpu().double() for n, v in problem.target.items()}
    name, head = _output_layer(problem, tags, target)
    own = {n: v[trial].detach().cpu().float() for n, v in problem.parameters.items()}
    features, predicted = _forward(problem, name, own, texts.cpu().float())
    schema = text_schema(problem.cases[trial])
    kept = (ids_of(texts.cpu(), schema) != schema.padding).flatten()
    inputs, gradient = features.flatten(0, 1)[kept], target[f"{name}.weight"]
    if f"{name}.bias" in target:
        inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
        gradient = torch.cat([gradient, target[f"{name}.bias"][:, None]], dim=1)
    slopes = _solved(inputs.double(), gradient, problem.cases[trial].observation.key, head)
    every = torch.zeros(count * length, tags, dtype=torch.float64)
    every[kept] = slopes
    return _rows(every.view(count, length, tags), predicted).flatten(1)


def _output_layer(problem: Problem, tags: int, target: Tensors) -> tuple[str, nn.Linear]:
    """Return the name of the trained linear layer that makes the logits, and the layer."""
    found = [
        (name, module)
        for name, module in problem.target_model.model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == tags
        and f"{name}.weight" in target
    ]
    if not found:
        raise BractError(
            f"{problem.cases[0].observation.key}: labels of tokens need the gradient of the output "
            f"layer, a linear one with {tags} outputs; train it, or declare the clients' model"
        )
    return found[-1]


@torch.no_grad()
def _forward(problem: Problem, name: str, own: Tensors, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output layer's inputs ``(B, T, width)``, and probabilities ``(B, T, tags)``."""
    model = copy.deepcopy(problem.target_model.model).cpu().float().eval()
    for parameter, value in model.named_parameters():
        value.copy_(own[parameter])
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, a: seen.append(a[0]))
    try:
        outputs = model(problem.target_model.normalise(texts))
    finally:
        handle.remove()
    return seen[-1], outputs.unflatten(-1, (texts.shape[1], -1)).double().exp()


def _solved(inputs: Tensor, gradient: Tensor, key: str, head: nn.Linear) -> Tensor:
    """Return S ``(N, tags)`` with ``S^T H`` nearest to the gradient, for H ``(N, width)``."""
    values = torch.linalg.svdvals(inputs)
    rank = int((values > _DEFICIENT * values.max()).sum()) if len(inputs) else 0
    near = torch.cdist(inputs, inputs) <= _ALIKE * inputs.norm(dim=1)
    distinct = int((near.int().tril(-1).sum(dim=1) == 0).sum())
    if rank < distinct:
        raise BractError(
            f"{key}: {distinct} tokens have features of rank {rank} at the output layer, which "
            f"has {head.in_features} inputs, so their labels cannot be told apart; attack an "
            "update of fewer tokens"
        )
    inverse: Tensor = torch.linalg.pinv(inputs.T, rtol=_DEFICIENT)
    return inverse @ gradient.T


def _rows(slopes: Tensor, predicted: Tensor) -> Tensor:
    """Return one-hot rows ``(B, T, tags)``, zero without a label, of slopes and probabilities."""
    label = slopes.argmin(dim=-1)
    chosen = nn.functional.one_hot(label, slopes.shape[-1]).double()
    direction = predicted - chosen
    share = (slopes * direction).sum(-1) / direction.square().sum(-1).clamp_min(1e-30)
    labelled = share > _LEAST * share.amax(dim=-1, keepdim=True)
    return chosen * labelled[..., None]
