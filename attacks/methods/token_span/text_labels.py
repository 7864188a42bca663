"""Labels of texts that are known, one a text."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from bract.attacks.problem.case import text_schema
from bract.attacks.problem.problem import Problem
from bract.attacks.solve.labels import last_layer
from bract.data.tokens import ids_of

_MOST_UNKNOWNS = 1024
_FAINT = 1e-10


def labels_of_texts(problem: Problem, trial: int, texts: Tensor) -> Tensor | None:
    """Return the label of each text of one trial, by the gradient of the last layer.

    That gradient is a sum over texts of the slope of the loss at each logit times the logit's own
    gradient, which the text gives: linear equations for the slopes. The slope at the label alone is
    negative, whatever an update's length and without a bias.

    Parameters
    ----------
    texts
        Examples ``(B, ...)`` as the model takes them.

    Returns
    -------
    Tensor or None
        int64 ``(B,)``; None where a text is empty, or the update lacks the layer.
    """
    schema, classes = text_schema(problem.cases[trial]), problem.classes
    names = [name for name in last_layer(problem.target_model) if name in problem.target]
    every = [ids[ids != schema.padding] for ids in ids_of(texts.cpu(), schema)]
    if not names or not all(len(ids) for ids in every) or len(every) * classes > _MOST_UNKNOWNS:
        return None
    model = copy.deepcopy(problem.target_model.model).cpu().float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in problem.parameters:
                value.copy_(problem.parameters[name][trial])
    layer = [model.get_parameter(name).requires_grad_() for name in names]
    rows = []
    for ids in every:
        with torch.enable_grad():
            logits = model(ids[None])[0]
            each = [torch.autograd.grad(one, layer, retain_graph=True) for one in logits]
        rows += [torch.cat([part.flatten() for part in own]).double() for own in each]
    given = torch.cat([problem.target[name][trial].flatten() for name in names]).cpu().double()
    equations, weights = torch.stack(rows), problem.weights or {}
    if all(name in weights for name in names):
        trust = torch.cat([weights[name][trial].flatten() for name in names]).cpu().double()
        root = trust.clamp_min(0.0).sqrt()
        equations, given = equations * root, given * root
    system = equations @ equations.T
    slopes: Tensor = torch.linalg.pinv(system, rtol=_FAINT, hermitian=True) @ (equations @ given)
    return slopes.view(len(every), classes).argmin(dim=1)
