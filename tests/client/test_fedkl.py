import copy
from typing import Any

import pytest
import torch
from model_zoo import image_models
from refusals import refused
from torch import nn
from torch.nn import functional as F

from bract.client.defenses import FedKL, ProtectContext, build_defenses
from bract.defenses.entries import prepare_model
from bract.models import create_model
from bract.models.keylock import Lock, key_locks, trainable_parameters, with_random_key
from bract.updates.update import difference, parameters_of

CONTEXT = ProtectContext(seed=4)


def make(name: Any = "lenet-bn", activation: Any = "relu") -> Any:
    return create_model(name, classes=10, channels=1, image_size=32, activation=activation)


def locked(
    name: Any = "lenet-bn", state: Any = None, context: Any = CONTEXT, **parameters: Any
) -> Any:
    torch.manual_seed(0)
    chain = build_defenses([{"name": "fedkl", **parameters}])
    model = chain.prepare_model(make(name))
    state = {} if state is None else state
    chain.attach(model, state, context)
    return chain, model, state


@pytest.mark.parametrize("name", image_models())
def test_the_first_normalisation_of_any_model_is_locked_and_keeps_its_name(name: Any) -> None:
    with torch.device("meta"):
        plain = make(name)
        named = list(plain.named_modules())
        norms = [n for n, m in named if isinstance(m, nn.BatchNorm2d)]
        norms = norms or [n for n, m in named if isinstance(m, nn.LayerNorm)]
        if not norms:
            with refused("model-unsuited"):
                prepare_model(make(name), [{"name": "fedkl"}])
            return
        model = prepare_model(make(name), [{"name": "fedkl"}])
    assert list(key_locks(model)) == norms[:1]
    gone = {f"{norms[0]}.weight", f"{norms[0]}.bias"}
    assert set(model.state_dict()) == set(plain.state_dict()) - gone


def test_every_normalisation_can_be_locked() -> None:
    model = prepare_model(make("resnet20"), [{"name": "fedkl", "blocks": "every"}])
    assert len(key_locks(model)) == 19
    assert not [n for n, _ in model.named_parameters() if "norm" in n]


def test_a_model_without_normalisation_is_refused_with_ones_that_have() -> None:
    with refused("model-unsuited", "LeNet", "BatchNorm2d", "self.norm(self", "lenet-bn"):
        prepare_model(make("lenet"), [{"name": "fedkl"}])


def test_scale_and_shift_are_the_lock_of_the_key_worked_by_hand() -> None:
    model = prepare_model(nn.Sequential(nn.BatchNorm2d(2)), [{"name": "fedkl"}])
    scale, shift = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        scale.weight.copy_(torch.tensor([[1.0, 2.0], [-4.0, 0.0]]))
        scale.bias.copy_(torch.tensor([0.5, 0.0]))
        shift.weight.copy_(torch.tensor([[0.0, 0.0], [2.0, 2.0]]))
        shift.bias.copy_(torch.tensor([-1.0, 0.0]))
    key = torch.tensor([0.5, 0.25])
    images = torch.randn(3, 2, 4, 4)
    normal = F.batch_norm(images, None, None, training=True)
    # gamma = (.5 + .5 + .5, -2), beta = (-1, 1.5); with the ReLU (1.5, 0) and (0, 1.5).
    for relu, gamma, beta in ((False, [1.5, -2.0], [-1.0, 1.5]), (True, [1.5, 0.0], [0.0, 1.5])):
        Lock(key, {"0": (scale, shift)}, relu).attach(model)
        expected = normal * torch.tensor(gamma).view(2, 1, 1) + torch.tensor(beta).view(2, 1, 1)
        torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_locked_layer_is_the_plain_one_with_the_locks_numbers_in_it(momentum: Any) -> None:
    plain = nn.BatchNorm2d(2, momentum=momentum)
    model: Any = prepare_model(
        nn.Sequential(nn.BatchNorm2d(2, momentum=momentum)), [{"name": "fedkl", "key_length": 8}]
    )
    generator = torch.Generator().manual_seed(3)
    Lock.draw({"0": 2}, 8, source=generator).attach(model)
    gamma, beta = (c.detach() for c in model[0].lock.coefficients())
    with torch.no_grad():
        plain.weight.copy_(gamma)
        plain.bias.copy_(beta)
    for training in (True, True, False):
        plain.train(training), model.train(training)
        images = torch.randn(3, 2, 4, 4) + 1
        torch.testing.assert_close(model(images), plain(images))
    for name, value in model[0].state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    # What an attacker puts in its place gives the same.
    images = torch.randn(3, 2, 4, 4)
    own = model(images)
    model[0].gamma, model[0].beta = gamma, beta
    torch.testing.assert_close(model(images), own)


def test_the_rate_slows_the_lock_layers_and_nothing_else() -> None:
    steps: dict[float, Any] = {}
    for rate in (1.0, 0.25):
        _, model, _ = locked(rate=rate)
        images = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
        F.cross_entropy(model(images), torch.tensor([1, 2])).backward()
        (layer,) = key_locks(model).values()
        assert layer.lock is not None
        steps[rate] = (layer.lock.scale.weight.grad, model.features[0].weight.grad)
    torch.testing.assert_close(steps[0.25][0], 0.25 * steps[1.0][0])
    torch.testing.assert_close(steps[0.25][1], steps[1.0][1])
    assert float(steps[1.0][0].abs().sum()) > 0


def test_the_server_has_neither_scale_nor_shift() -> None:
    model = prepare_model(nn.Sequential(nn.BatchNorm2d(2)), [{"name": "fedkl"}])
    images = torch.randn(3, 2, 4, 4)
    torch.testing.assert_close(model(images), F.batch_norm(images, None, None, training=True))


def test_an_attacker_can_put_scale_and_shift_in_and_differentiate_by_them() -> None:
    _, model, _ = locked()
    (layer,) = key_locks(model).values()
    gamma = torch.rand(6, requires_grad=True)
    layer.gamma, layer.beta = gamma, torch.zeros(6)
    model(torch.rand(2, 1, 32, 32)).sum().backward()
    assert gamma.grad is not None
    assert float(gamma.grad.abs().sum()) > 0


def test_nothing_that_is_exchanged_holds_the_key_or_the_lock_layers() -> None:
    chain, model, state = locked()
    secrets = {id(p) for p in trainable_parameters(model)} - {id(p) for p in model.parameters()}
    assert len(secrets) == 4
    exchanged = [*model.parameters(), *model.state_dict(keep_vars=True).values()]
    assert not secrets & {id(t) for t in exchanged}
    update = chain.protect(parameters_of(model), state, ProtectContext(model=model))
    sent = b"".join(v.numpy().tobytes() for v in update.values())
    kept = [name for name in state if name.startswith("fedkl.")]
    assert len(kept) == 6
    for name in kept:
        assert state[name].numpy().tobytes()[:24] not in sent
    assert set(update) == set(dict(prepare_model(make(), chain.public()).named_parameters()))


def test_the_lock_is_trained_under_the_same_key_and_carried_to_the_next_round() -> None:
    chain, model, state = locked()
    drawn = {k: v.clone() for k, v in state.items()}
    optimizer = torch.optim.SGD(trainable_parameters(model), lr=0.1)
    before = parameters_of(model)
    F.cross_entropy(model(torch.rand(4, 1, 32, 32)), torch.tensor([1, 2, 3, 4])).backward()
    optimizer.step()
    chain.protect(difference(before, parameters_of(model)), state, ProtectContext(model=model))
    assert torch.equal(state["fedkl.key"], drawn["fedkl.key"])
    assert not torch.equal(
        state["fedkl.features.1/scale.weight"], drawn["fedkl.features.1/scale.weight"]
    )
    _, again, _ = locked(state=state)
    (layer,), (trained,) = key_locks(again).values(), key_locks(model).values()
    assert trained.lock is not None
    assert layer.lock is not None
    for now, then in zip(layer.lock.coefficients(), trained.lock.coefficients(), strict=True):
        torch.testing.assert_close(now, then)


def test_clients_draw_keys_of_their_own_and_fresh_ones_without_a_seed() -> None:
    contexts = [ProtectContext(seed=seed) for seed in (1, 2, None, None)]
    keys = [locked(context=context)[2]["fedkl.key"] for context in contexts]
    assert len({tuple(k.tolist()) for k in keys}) == 4
    assert all(k.shape == (1024,) and float(k.min()) >= 0 and float(k.max()) < 1 for k in keys)
    # The mean of 1,024 uniform draws is 1/2, give or take 3 standard deviations.
    assert float(keys[0].mean()) == pytest.approx(0.5, abs=0.03)


def test_gamma_and_beta_are_drawn_of_either_sign_and_nothing_turns_them() -> None:
    drawn = {
        relu: Lock.draw({"0": 50}, 64, relu=relu, source=torch.Generator().manual_seed(5))
        for relu in (False, True)
    }
    # By hand: the key, then weight and bias of gamma, then of beta, within 64^-1/2 = 1/8.
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Any:
        return torch.rand(shape, generator=generator)

    key = draw(64)
    gamma, beta = (
        (0.25 * draw(50, 64) - 0.125) @ key + (0.25 * draw(50) - 0.125) for _ in range(2)
    )
    for relu, clip in ((False, -10.0), (True, 0.0)):
        found = drawn[relu].coefficients()
        torch.testing.assert_close(found["0.gamma"], gamma.clamp_min(clip), atol=1e-5, rtol=0)
        torch.testing.assert_close(found["0.beta"], beta.clamp_min(clip), atol=1e-5, rtol=0)
    assert 10 < int((gamma < 0).sum()) < 40


def test_the_papers_formula_is_the_default_and_the_relu_holds_half_of_the_channels() -> None:
    state: dict[str, Any] = {}
    for relu, settings in ((False, {}), (True, {"relu": True})):
        _, model, _ = locked("lenet-strided-bn", state=dict(state), **settings)
        ((gamma, _),) = [m.lock.coefficients() for m in key_locks(model).values() if m.lock]
        assert bool((gamma < 0).any()) is not relu
        if relu:
            dead = gamma == 0
            assert 0 < int(dead.sum()) < len(gamma)
            model(torch.rand(2, 1, 32, 32)).square().sum().backward()
            (layer,) = key_locks(model).values()
            assert layer.lock is not None and layer.lock.scale.bias.grad is not None
            assert torch.equal(layer.lock.scale.bias.grad == 0, dead)


def test_a_random_key_is_another_model_and_leaves_the_clients_own_alone() -> None:
    _, model, _ = locked()
    images = torch.rand(2, 1, 32, 32)
    model.eval()
    own = model(images)
    stranger = with_random_key(model, torch.Generator().manual_seed(0))
    stolen = with_random_key(model, torch.Generator().manual_seed(0), keep_layers=True)
    assert not torch.allclose(stranger(images), own)
    assert not torch.allclose(stolen(images), own)
    assert torch.equal(model(images), own)
    with refused("model-unsuited"):
        with_random_key(make(), torch.Generator())


def test_a_copy_and_a_move_take_the_lock_along() -> None:
    _, model, _ = locked("resnet20", blocks="every", context=ProtectContext(seed=1))
    double = copy.deepcopy(model).double().eval()
    model.eval()
    images = torch.rand(2, 1, 32, 32)
    torch.testing.assert_close(double(images.double()).float(), model(images), rtol=1e-3, atol=1e-4)


def test_training_without_the_lock_is_refused() -> None:
    defense = FedKL()
    bare = defense.prepare_model(make())
    update = parameters_of(bare)
    with refused("defense-failed", "locked"):
        defense.protect(update, {}, ProtectContext(model=bare))
    with refused("defense-failed", "prepare_model"):
        defense.attach(make(), {}, CONTEXT)
    _, model, state = locked()
    with refused("defense-failed", "secret"):
        defense.protect({**update, "secret": torch.ones(1)}, {}, ProtectContext(model=model))
    with refused("defense-failed", "another"):
        locked("resnet20", state=state)


@pytest.mark.parametrize(
    ("stored", "why"), [(None, "one of 2^32 seeds"), (2, "the sign of every gamma turned")]
)
def test_a_lock_of_an_older_format_is_redrawn_with_a_warning(
    stored: Any, why: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, state = locked()
    old = {name: value for name, value in state.items() if name != "fedkl.format"}
    if stored is not None:
        old["fedkl.format"] = torch.tensor(stored)
    key = old["fedkl.key"]
    with caplog.at_level("WARNING"):
        _, _, redrawn = locked(state=old, context=ProtectContext())
    assert why in caplog.text
    assert not torch.equal(redrawn["fedkl.key"], key)
    caplog.clear()
    _, _, kept = locked(state=dict(redrawn), context=ProtectContext())
    assert torch.equal(kept["fedkl.key"], redrawn["fedkl.key"]) and not caplog.records
