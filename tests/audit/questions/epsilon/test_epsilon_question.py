"""Epsilon measured on captured uploads, and planted faults that it finds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import request_of
from safetensors.torch import load_file

from bract.audit.audit import Audit
from bract.cli.gate import Gate, check_alarms
from bract.client.canaries import BEYOND_CLIP, open_canaries
from bract.client.policy import SitePolicy
from bract.config import FederationConfig, build_config
from bract.data.views import ClientData, client_data, data_spec
from bract.defenses.noise import Noise
from bract.errors import PrivacyAlarmError
from bract.files import write_tensors
from bract.models import create_model
from bract.models.initialise import initialise
from bract.protocol.canaries import canary_directions, canary_projections, canary_update
from bract.protocol.observation import ClientDeclaration, Observation, ObservationStore
from bract.protocol.update import flatten, parameters_of, unflatten
from bract.rundir import RunDirectory
from bract.schema.epsilon import EpsilonAnswer

NOISE = Noise(epsilon=8.0, clip=1.0)
ROUNDS = 80
CLIENT = "client-0"

Mechanism = Callable[[torch.Tensor, int, torch.Generator], torch.Tensor]


def config_of(**changes: Any) -> FederationConfig:
    return build_config(
        {
            "name": "canaries",
            "clients": 1,
            "rounds": ROUNDS,
            "data": {"image_size": 8, "validation": 0.5},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "defenses": [NOISE.public()],
            "canaries": {"count": 1, "kind": "update"},
            **changes,
        }
    )


def clipped(vector: torch.Tensor) -> torch.Tensor:
    return vector * min(1.0, 1.0 / float(vector.norm()))


def noise(like: torch.Tensor, generator: torch.Generator, factor: float = 1.0) -> torch.Tensor:
    return (
        factor * NOISE.deviation * torch.randn(len(like), generator=generator, dtype=torch.float64)
    )


def made(root: Path, mechanism: Mechanism, *, rounds: int = ROUNDS) -> RunDirectory:
    """A run of canary updates under a mechanism that is declared to be `NOISE`."""
    config = config_of(rounds=rounds)
    run = RunDirectory(root)
    run.create(config)
    run.update_state(status="finished")
    model = initialise(
        create_model("lenet-strided", classes=10, channels=1, image_size=8, activation="relu"),
        "default",
        0,
    )
    sent = parameters_of(model)
    size = flatten(sent).numel()
    generator = torch.Generator().manual_seed(9)
    coins = torch.randint(0, 2, (rounds, 1), generator=generator)
    write_tensors(
        run.truth / CLIENT / "canaries.safetensors",
        {"included": coins.to(torch.uint8)},
        about={"run": "1", "kind": "update"},
    )
    store = ObservationStore(run.captures)
    for number in range(1, rounds + 1):
        directions = canary_directions(size, 1, seed=config.seed, client=CLIENT, number=number)
        signs = coins[number - 1] * 2.0 - 1.0
        vector = mechanism(canary_update(directions, signs, BEYOND_CLIP), number, generator)
        store.save(
            Observation(
                round=number,
                client=CLIENT,
                parameters=sent,
                update=unflatten(vector, sent),
                declaration=ClientDeclaration(
                    model="lenet-strided",
                    activation="relu",
                    image_shape=(1, 8, 8),
                    classes=10,
                    batch_size=2,
                    num_examples=2,
                    defenses=(NOISE.public(),),
                ),
            )
        )
    return run


def measured(run: RunDirectory, tier: str = "oblivious") -> EpsilonAnswer:
    settings = {"questions": ["epsilon"], "device": "cpu", "weak_seeds": 1 << 12}
    audit = Audit(run, request_of(run.root, settings, tier=tier))
    (answer,) = audit.execute(audit.plan())
    assert isinstance(answer, EpsilonAnswer)
    return answer


def test_noise_as_declared_is_measured_below_its_account(tmp_path: Path) -> None:
    answer = measured(made(tmp_path / "run", lambda v, _, g: clipped(v) + noise(v, g)))
    (found,) = answer.clients
    assert found.low is not None and found.low_gaussian is not None and found.high is not None
    assert 0.0 < found.low_gaussian < found.high <= (NOISE.epsilon or 0.0)
    assert found.low < found.high and not found.alarm
    assert found.rounds == found.canaries == ROUNDS
    check_alarms([answer])


def half(vector: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """Calibrated for a sensitivity of half a clip."""
    return clipped(vector) + noise(vector, generator, 0.25)


def unclipped(vector: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    return vector + noise(vector, generator)


def after_the_sum(vector: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """The server adds the noise to the sum: the upload that it holds has none."""
    return clipped(vector)


def replayed(vector: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """The same noise in every round, as from a seed that is not advanced."""
    return clipped(vector) + noise(vector, torch.Generator().manual_seed(2**40 + 5))


def squared(vector: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """Noise whose scale is split over the coordinates."""
    return clipped(vector) + noise(vector, generator, len(vector) ** -0.5)


@pytest.mark.parametrize("fault", [half, unclipped, after_the_sum, replayed, squared])
def test_a_planted_fault_raises_the_alarm(fault: Mechanism, tmp_path: Path) -> None:
    answer = measured(made(tmp_path / "run", fault))
    (found,) = answer.clients
    assert found.alarm
    with pytest.raises(PrivacyAlarmError, match="above the account: client-0"):
        check_alarms([answer])


def test_noise_of_32_bit_seeds_raises_the_alarm_in_the_adaptive_tier(tmp_path: Path) -> None:
    def weak(vector: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randn(len(vector), generator=torch.Generator().manual_seed(number))
        return clipped(vector) + NOISE.deviation * drawn.double()

    run = made(tmp_path / "run", weak, rounds=40)
    assert not measured(run).clients[0].alarm
    assert measured(run, "adaptive").clients[0].alarm


def test_a_client_without_canaries_costs_itself_one_line(tmp_path: Path) -> None:
    run = made(tmp_path / "run", after_the_sum, rounds=2)
    (run.truth / CLIENT / "canaries.safetensors").unlink()
    answer = measured(run)
    assert answer.refused is not None and "took no part" in answer.refused
    (run.truth / CLIENT / "canaries.safetensors").write_bytes(b"no tensors")
    assert "not readable" in (measured(run).refused or "")


def test_a_gate_holds_the_measured_epsilon(tmp_path: Path) -> None:
    answer = measured(made(tmp_path / "run", after_the_sum))
    rule: Any = None
    assert Gate.parse("epsilon>1").judge([answer], rule).crossed
    assert not Gate.parse("epsilon>9").judge([answer], rule).crossed
    assert Gate.parse("epsilon.high>4@oblivious").judge([answer], rule).judged == 1


def test_directions_are_orthonormal_and_give_back_the_signs() -> None:
    directions = canary_directions(1000, 7, seed=0, client="a", number=3)
    signs = torch.tensor([1.0, -1, 1, 1, -1, -1, 1])
    vector = canary_update(directions, signs, 2.0)
    assert float(vector.norm()) == pytest.approx(2.0)
    found = canary_projections(directions, vector, 7)
    torch.testing.assert_close(found, signs.double() * 2.0 / 7**0.5)
    other = canary_directions(1000, 7, seed=0, client="a", number=4)
    assert not torch.equal(directions, other)


def kept(tmp_path: Path, kind: str, **policy: Any) -> tuple[Any, ClientData]:
    config = config_of(canaries={"count": 20, "kind": kind})
    data = client_data(config, 0)
    found = open_canaries(
        config.canaries,
        SitePolicy(**policy),
        tmp_path,
        data,
        data_spec(config.data),
        run=1,
        rounds=4,
    )
    return found, data


@pytest.mark.parametrize("kind", ["mislabelled", "random"])
def test_a_client_includes_records_by_coins_that_it_keeps(kind: str, tmp_path: Path) -> None:
    found, data = kept(tmp_path, kind, canaries=20)
    again, _ = kept(tmp_path, kind, canaries=20)
    assert torch.equal(found.included, again.included) and torch.equal(found.labels, again.labels)
    path = tmp_path / "canaries.safetensors"
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_file(path)["included"].tolist() == found.included.int().tolist()
    extended = found.extend(data)
    count = int(found.included.sum())
    assert 0 < count < 20 and extended.canaries == count
    assert torch.equal(extended.images[:-count], data.images)
    assert torch.equal(extended.images[-count:], found.images[found.included])
    if kind == "mislabelled":
        assert bool((found.labels != data.validation_labels[-20:]).all())
        assert len(extended.validation_images) == len(data.validation_images) - 20


def test_the_site_s_policy_decides(tmp_path: Path, caplog: Any) -> None:
    found, _ = kept(tmp_path, "random")
    assert found is None and not list(tmp_path.iterdir())
    assert "the site's policy allows canaries: 0" in caplog.text
