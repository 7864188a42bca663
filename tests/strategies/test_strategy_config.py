from typing import Any

import pytest
from refusals import refused

from bract.config import build_config, dump_config
from bract.config.config import FedBoostingConfig, config_of_run, parse_config
from bract.errors import BractError
from bract.strategies import FedAvg, FedBoosting, FedProx
from bract.strategies.registry import create_strategy


def configured(**strategy: Any) -> Any:
    return build_config({"strategy": strategy})


def test_the_name_chooses_the_strategy_and_fedavg_is_the_default() -> None:
    assert type(create_strategy(build_config({}))) is FedAvg
    assert type(create_strategy(configured(weighting="uniform"))) is FedAvg
    assert type(create_strategy(configured(name="fedprox"))) is FedProx
    assert type(create_strategy(configured(name="fedboosting"))) is FedBoosting


def test_every_key_reaches_the_strategy() -> None:
    strategy = create_strategy(
        configured(
            name="fedboosting",
            weighting="proportional",
            signal="loss",
            fusing="random",
            p_hat=0.7,
            server_lr=0.3,
            tolerate_failures=True,
            timeout=42,
        ),
        first_round=4,
    )
    assert isinstance(strategy, FedBoosting)
    assert (strategy.weighting, strategy.signal, strategy.fusing) == (
        "proportional",
        "loss",
        "random",
    )
    assert (strategy.p_hat, strategy.server_lr, strategy.validation_timeout) == (0.7, 0.3, 42)
    assert (strategy.tolerate_failures, strategy.first_round) == (True, 4)
    proximal = create_strategy(configured(name="fedprox", proximal_mu=2))
    assert isinstance(proximal, FedProx) and proximal.proximal_mu == 2


def test_a_config_survives_writing_and_reading() -> None:
    config = configured(name="fedboosting", p_hat=0.8)
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"name": "fedbosting"}, "Did you mean 'fedboosting'"),
        ({"name": "fedboosting", "phat": 0.9}, "Did you mean 'strategy.p_hat'"),
        ({"name": "fedboosting", "p_hat": 0.3}, "strategy.p_hat: found 0.3"),
        ({"name": "fedboosting", "weighting": "examples"}, "'softmax' or 'proportional'"),
        ({"p_hat": 0.9}, "unknown key 'strategy.p_hat'"),
        ({"name": "fedprox", "proximal_mu": -1}, "strategy.proximal_mu: found -1"),
        ({"joins": {"client-2": 0}}, "strategy.joins.client-2: found 0"),
        ({"joins": {"clinic-2": 2}}, "the clients are client-0, client-1, client-2"),
        ({"joins": {"client-2": 6}}, "join in round 6, and the federation has 5; lower it"),
        ({"joins": {f"client-{n}": 2 for n in range(3)}}, "no client for round 1"),
        ({"joins": {"client-2": 2}, "fraction": 0.5}, "strategy.fraction is 0.5; remove one"),
        (
            {"joins": {"client-2": 2}, "quorum": 2, "tolerate_failures": True},
            "strategy.quorum is 2; remove one",
        ),
    ],
)
def test_a_wrong_strategy_section_is_named_with_its_mend(strategy: Any, words: Any) -> None:
    with pytest.raises(BractError) as caught:
        build_config({"strategy": strategy})
    assert words in str(caught.value)


def test_fedboosting_without_validation_data_is_refused_before_anything_starts() -> None:
    with refused("config-value", "data.validation", 0):
        build_config({"strategy": {"name": "fedboosting"}, "data": {"validation": 0.0}})


def test_clients_that_join_later_and_encryption_exclude_each_other() -> None:
    content = {"strategy": {"joins": {"client-2": 2}}}
    assert create_strategy(build_config(content)).joins == {"client-2": 2}
    with refused("config-value", "encryption", "masks"):
        build_config(content | {"encryption": "masks"})


def test_a_run_config_can_switch_the_strategy_of_a_whole_file() -> None:
    text = dump_config(configured(weighting="uniform", server_lr=0.5))
    found = config_of_run(
        {"federation": text, "strategy.p_hat": 0.8, "strategy.name": "fedboosting"}
    ).strategy
    assert isinstance(found, FedBoostingConfig)
    assert (found.name, found.p_hat, found.server_lr) == ("fedboosting", 0.8, 0.5)
    assert found.weighting == "softmax"
