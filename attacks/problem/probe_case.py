"""A made-up upload of a model, which no attack has a reason to refuse but the model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from bract.attacks.problem.case import Case, open_case
from bract.attacks.problem.target_model import TargetModel
from bract.captures.observation import ClientDeclaration, Observation
from bract.updates.update import buffers_of, parameters_of

_NUDGE = 1e-2
"""Deviation of what is added to every parameter: fresh output layers may be zero, and then no other
layer has a gradient."""


def probe_case(model: nn.Module, declaration: ClientDeclaration) -> Case:
    """Return a case of one random example's undefended gradient.

    Parameters
    ----------
    model
        Its parameters are moved a little.
    declaration
        Of the model and the data; how clients train and defend is left out, and
        batch normalisation goes by running statistics.
    """
    plain = ClientDeclaration()
    declared = replace(
        declaration,
        algorithm="fedsgd",
        num_examples=1,
        batch_size=1,
        local_steps=1,
        norm_mode="eval",
        dropout=plain.dropout,
        defenses=plain.defenses,
        encryption=plain.encryption,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator), alpha=_NUDGE)
    target = TargetModel(model, declared)
    example = torch.rand(1, 1, *target.image_shape, generator=generator)
    state = {n: v[None].requires_grad_() for n, v in parameters_of(model).items()}
    # A tied weight is a parameter under one of its names, and no buffer under the other.
    buffers = {n: v[None] for n, v in buffers_of(model).items() if n in target.buffer_names}
    outputs = target(state, buffers, target.normalise(example))
    weights = torch.randn(outputs.shape, generator=generator)
    found = torch.autograd.grad((outputs * weights).sum(), list(state.values()), allow_unused=True)
    return open_case(
        Observation(
            round=0,
            client="probe",
            parameters=parameters_of(model),
            buffers=buffers_of(model),
            update={
                n: torch.zeros_like(v[0]) if slope is None else slope[0]
                for (n, v), slope in zip(state.items(), found, strict=True)
            },
            declaration=declared,
        ),
        tier="oblivious",
        max_images=1,
    )
