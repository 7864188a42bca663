import pytest
import torch

from bract.attacks import IG, Budget, GaussNewton
from bract.attacks.metrics import psnr, score


@pytest.mark.parametrize("lr", [0.1, 0.5])
def test_images_of_a_two_step_update_need_both_steps(observe, tiny, lr):
    images, labels = tiny[0][:2], tiny[1][:2]
    seen = observe(images, labels, steps=2, batch_size=1, lr=lr)
    unrolled = GaussNewton()(seen, budget=Budget(restarts=3))
    single = GaussNewton(unroll=1)(seen, budget=Budget(restarts=3))
    assert min(score(unrolled.images, images).psnr) > 50
    assert max(score(single.images, images).psnr) < 15


def test_a_first_order_attack_unrolls_too(observe, tiny):
    images, labels = tiny[0][:2], tiny[1][:2]
    seen = observe(images, labels, steps=2, batch_size=1, lr=0.1, init="uniform")
    found = IG()(seen, budget=Budget(iterations=150))
    assert min(score(found.images, images).psnr) > 20
    assert found.settings["forward"]["kind"] == "LocalTraining"


def test_the_update_with_the_wrong_sign_is_not_explained(observe, tiny):
    images, labels = tiny[0][:1], tiny[1][:1]
    seen = observe(images, labels, steps=2, batch_size=1, lr=0.1, init="uniform")
    right = GaussNewton()(seen)
    flipped = type(seen)(
        1, "c", seen.parameters, {n: -v for n, v in seen.update.items()}, seen.protocol
    )
    assert float(psnr(right.images, images)[0]) > 50
    assert float(psnr(GaussNewton()(flipped).images, images)[0]) < 20
    assert torch.isfinite(right.images).all()
