"""CENSOR sends nothing along the update, tensor by tensor, and its attacker knows that."""

from typing import Any

import pytest
import torch
from torch import nn

from bract import Observation
from bract.attacks import ADAPTIVE, Known
from bract.defenses import ProtectContext
from bract.schema import ClientDeclaration
from bract_papers.adaptive.censor import OrthogonalLikelihood
from bract_papers.defenses.censor import Censor

SEED = 2**70


def upload(trials: int = 5, **fields: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 3))
    images, labels = torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    loss = nn.functional.cross_entropy(model(images), labels)
    names = [name for name, _ in model.named_parameters()]
    gradient = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    defense = Censor(trials=trials, step=0.1, **fields)
    context = ProtectContext(model=model, images=images, labels=labels, seed=SEED)
    return model, gradient, defense, defense.protect(gradient, {}, context)


def test_every_tensor_is_orthogonal_to_its_own_and_as_long() -> None:
    _, gradient, _, sent = upload()
    assert list(sent) == list(gradient)
    for name, value in gradient.items():
        assert abs(float((sent[name] * value).sum())) < 1e-6 * float(value.square().sum())
        assert float(sent[name].norm()) == pytest.approx(float(value.norm()), rel=1e-5)


def test_more_trials_find_a_lower_loss_and_none_that_of_the_update() -> None:
    losses = [upload(trials)[2].report["loss"] for trials in (1, 50)]
    assert losses[1] < losses[0]
    assert losses[1] > upload()[2].report["loss_undefended"]


def test_the_model_is_left_as_it_was() -> None:
    model, *_ = upload()
    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 3))
    for name, value in fresh.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert model.training


def test_the_attackers_likelihood_is_least_at_the_true_gradient() -> None:
    model, gradient, _, sent = upload()
    observation = Observation(
        round=1,
        client="client-0",
        parameters=dict(model.named_parameters()),
        update=sent,
        declaration=ClientDeclaration(
            algorithm="fedsgd", defenses=({"name": "censor", "trials": 5, "step": 0.1},)
        ),
    )
    evidence = ADAPTIVE["censor"](observation, Known())
    assert evidence.notes["equations"] == 8
    nats = OrthogonalLikelihood()
    rows = {name: torch.stack([gradient[name], sent[name]]) for name in evidence.target}
    target = {name: value[None] for name, value in evidence.target.items()}
    true, upload_itself = nats(rows, target, None).tolist()
    assert true < 1e-3 < upload_itself
