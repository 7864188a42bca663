"""What a curious client sees: the sequence of global models, and in it the mean of all updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bract.captures.observation import ClientDeclaration, Observation
from bract.errors import BractError
from bract.updates.update import Tensors

KnownUpdates = Sequence[tuple[float, Tensors]]
"""Weights and updates that the observer knows, its own to begin with."""


def observe_global_models(
    before: Tensors,
    after: Tensors,
    declarations: Sequence[ClientDeclaration],
    *,
    number: int,
    client: str,
    server_lr: float = 1.0,
    buffers: Tensors | None = None,
    known: KnownUpdates = (),
) -> Observation:
    """Take the difference of two consecutive global models for the upload of one virtual client.

    FedAvg steps by ``w' = w - server_lr sum_i p_i u_i`` with weights that sum to 1, so

        ``(w - w') / server_lr = sum_i p_i u_i``,

    which every client can compute. Less what the observer knows, its own update, it is the mean of
    the others', weighed anew. Where the weights go by the number of examples, gradients of one
    batch each average to the gradient of the joint batch, exactly; several local steps are taken
    for joint steps, which holds to first order in the learning rate; of defended updates it is the
    mean, as it is. Subtracting float32 models leaves a relative rounding of about 6e-8 of a weight,
    over ``server_lr`` and, with known updates, over the share of the others.

    Parameters
    ----------
    before, after
        Parameters as sent in round ``number`` and in the next one, by name.
    declarations
        Of the clients whose updates are in the mean and not known.
    client
        Name of the virtual client.
    buffers
        As sent in the round.
    """
    key = f"round-{number:04d}/{client}"
    if not declarations:
        raise BractError(
            f"{key}: no client but the observer took part, so nothing is hidden",
            code="attack-unsuited",
        )
    for name, value in before.items():
        for where, other in (("the next global model", after), *_named(known)):
            found = tuple(other[name].shape) if name in other else None
            if found != tuple(value.shape):
                raise BractError(
                    f"{key}: {name} is {found or 'missing'} in {where}, and was sent as "
                    f"{tuple(value.shape)}; give two consecutive global models of one run",
                    code="capture-lacks",
                )
    share = 1.0 - sum(weight for weight, _ in known)
    if not share > 0.0:
        raise BractError(
            f"{key}: the known updates have the whole weight, so nothing is hidden",
            code="attack-unsuited",
        )
    mean: Tensors = {}
    for name, value in before.items():
        total = (value.to(torch.float64) - after[name].to(torch.float64)) / server_lr
        for weight, update in known:
            total = total - weight * update[name].to(torch.float64)
        mean[name] = (total / share).to(value.dtype)
    return Observation(
        round=number,
        client=client,
        parameters=dict(before),
        update=mean,
        declaration=joint_declaration(declarations, key),
        buffers=dict(buffers or {}),
        computed=True,
    )


def joint_declaration(
    declarations: Sequence[ClientDeclaration], key: str = "the aggregate"
) -> ClientDeclaration:
    """Declare one client that holds everybody's examples; its steps are the most that one took."""

    def total(values: Sequence[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    models = sorted({str(d.model) for d in declarations})
    if len(models) > 1:
        raise BractError(
            f"{key}: clients declare the models {', '.join(models)}; expected one",
            code="attack-unsuited",
        )
    steps = [d.local_steps for d in declarations if d.local_steps is not None]
    return replace(
        declarations[0],
        batch_size=total([d.batch_size for d in declarations]),
        num_examples=total([d.num_examples for d in declarations]),
        local_steps=max(steps, default=None),
    )


def _named(known: KnownUpdates) -> list[tuple[str, Tensors]]:
    return [("a known update", update) for _, update in known]
