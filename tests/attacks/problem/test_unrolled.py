from dataclasses import replace
from typing import Any

import pack
import pytest
import torch
from observing import scores

from bract.attacks import IG, Budget
from bract.attacks.methods.gauss_newton import GaussNewton
from bract.scores import psnr


def test_images_of_several_steps_need_all_of_them() -> None:
    held = pack.held("fedavg-epochs-b2")
    unrolled = GaussNewton()(held.seen, budget=Budget(iterations=8))
    single = GaussNewton(unroll=1)(held.seen, budget=Budget(iterations=8))
    assert min(row.psnr for row in scores(unrolled.images, held.images)) > 50
    assert max(row.psnr for row in scores(single.images, held.images)) < 30


def test_a_proximal_term_is_unrolled_where_it_is_declared() -> None:
    held = pack.held("fedavg-proximal-b1")
    left_out = replace(held.seen, declaration=replace(held.seen.declaration, proximal_mu=None))
    known, wrong = (GaussNewton()(o, budget=Budget(iterations=8)) for o in (held.seen, left_out))
    assert known.settings["forward"]["proximal_mu"] == 0.5
    assert float(psnr(known.images, held.images)) > 50
    assert float(psnr(wrong.images, held.images)) < 40
    assert wrong.final_loss > 1e3 * known.final_loss


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.1, 0.5])
def test_images_of_a_two_step_update_need_both_steps(observe: Any, tiny: Any, lr: Any) -> None:
    images, labels = tiny[0][:2], tiny[1][:2]
    seen = observe(images, labels, steps=2, batch_size=1, lr=lr)
    unrolled = GaussNewton()(seen, budget=Budget(restarts=3))
    single = GaussNewton(unroll=1)(seen, budget=Budget(restarts=3))
    assert min(row.psnr for row in scores(unrolled.images, images)) > 50
    assert max(row.psnr for row in scores(single.images, images)) < 15


@pytest.mark.slow
def test_a_fedprox_update_gives_its_images_where_mu_is_declared_and_not_where_it_is_left_out(
    observe: Any, tiny: Any
) -> None:
    images, labels = tiny[0][:2], tiny[1][:2]
    seen = observe(images, labels, steps=4, batch_size=1, lr=0.5, proximal_mu=0.5)
    plain = observe(images, labels, steps=4, batch_size=1, lr=0.5)
    left_out = replace(seen, declaration=replace(seen.declaration, proximal_mu=None))
    known, fedavg, wrong = (
        GaussNewton()(o, budget=Budget(restarts=4)) for o in (seen, plain, left_out)
    )
    assert known.settings["forward"]["proximal_mu"] == 0.5
    assert min(row.psnr for row in scores(known.images, images)) > 50
    assert min(row.psnr for row in scores(fedavg.images, images)) > 50
    assert max(row.psnr for row in scores(wrong.images, images)) < 25


def test_a_first_order_attack_unrolls_too(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:2], tiny[1][:2]
    seen = observe(images, labels, steps=2, batch_size=1, lr=0.1, init="uniform")
    found = IG()(seen, budget=Budget(iterations=150))
    assert min(row.psnr for row in scores(found.images, images)) > 20
    assert found.settings["forward"]["kind"] == "LocalTraining"


def test_the_update_with_the_wrong_sign_is_not_explained(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    seen = observe(images, labels, steps=2, batch_size=1, lr=0.1, init="uniform")
    right = GaussNewton()(seen)
    flipped = type(seen)(
        1, "c", seen.parameters, {n: -v for n, v in seen.update.items()}, seen.declaration
    )
    assert float(psnr(right.images, images)[0]) > 50
    assert float(psnr(GaussNewton()(flipped).images, images)[0]) < 20
    assert torch.isfinite(right.images).all()
