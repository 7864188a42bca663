"""What a curious client makes of two consecutive global models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from refusals import refused

from bract import Observation
from bract.attacks.problem.global_models import joint_declaration, observe_global_models
from bract.models import create_model
from bract.models.initialise import initialise


def clients_of(observe: Any, tiny: Any, *sizes: int) -> tuple[list[Observation], Observation]:
    """Gradients of clients with so many images each, and that of all images in one batch."""
    network = create_model("lenet-strided", classes=10, channels=1, image_size=8)
    initialise(network, "default", 0)
    found, at = [], 0
    for number, size in enumerate(sizes):
        images, labels = tiny[0][at : at + size], tiny[1][at : at + size]
        seen = observe(images, labels, model=network, client=f"client-{number}")
        declaration = replace(seen.declaration, model="lenet-strided")
        found.append(replace(seen, declaration=declaration))
        at += size
    return found, observe(tiny[0][:at], tiny[1][:at], model=network)


def after(clients: list[Observation], server_lr: float) -> Any:
    total = sum(seen.declaration.num_examples or 0 for seen in clients)
    return {
        name: value
        - server_lr
        * sum(s.update[name] * ((s.declaration.num_examples or 0) / total) for s in clients)
        for name, value in clients[0].parameters.items()
    }


def test_the_difference_is_the_gradient_of_everybodys_images(observe: Any, tiny: Any) -> None:
    clients, joint = clients_of(observe, tiny, 1, 2)
    found = observe_global_models(
        clients[0].parameters,
        after(clients, 0.5),
        [seen.declaration for seen in clients],
        number=4,
        client="others",
        server_lr=0.5,
    )
    assert found.key == "round-0004/others"
    assert (found.declaration.batch_size, found.declaration.num_examples) == (3, 3)
    for name, value in joint.update.items():
        assert torch.allclose(found.update[name], value, atol=1e-6)


def test_what_the_observer_sent_is_taken_out(observe: Any, tiny: Any) -> None:
    clients, _ = clients_of(observe, tiny, 1, 2)
    found = observe_global_models(
        clients[0].parameters,
        after(clients, 1.0),
        [clients[1].declaration],
        number=1,
        client="others",
        known=[(1 / 3, clients[0].update)],
    )
    assert found.declaration.num_examples == 2
    for name, value in clients[1].update.items():
        assert torch.allclose(found.update[name], value, atol=1e-6)


def test_models_that_do_not_fit_are_refused(observe: Any, tiny: Any) -> None:
    clients, _ = clients_of(observe, tiny, 1, 1)
    before, declared = clients[0].parameters, [clients[1].declaration]

    def look(later: Any, declarations: Any = declared, **known: Any) -> None:
        observe_global_models(before, later, declarations, number=1, client="others", **known)

    with refused("capture-lacks"):
        look({})
    with refused("capture-lacks"):
        look(before, known=[(0.5, {})])
    with refused("attack-unsuited", "observer"):
        look(before, [])
    with refused("attack-unsuited", "weight"):
        look(before, known=[(1.0, clients[0].update)])
    other = replace(declared[0], model="lenet")
    with refused("attack-unsuited", "lenet", "lenet-strided"):
        joint_declaration([*declared, other])
