from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bract.cli.templates import demo_config, template
from bract.config import (
    FederationConfig,
    build_config,
    config_of_run,
    dump_config,
    load_config,
    parse_config,
)
from bract.errors import BractError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {partitoin: {kind: iid}}", r"data\.partitoin.*Did you mean 'data\.partition'"),
        ("roundz: 3", "Did you mean 'rounds'"),
        ("clients: 0", "clients: found 0"),
        ("clients: three", "clients: found 'three'"),
        ("training: {lr: -1}", r"training\.lr: found -1"),
        (
            "data: {partition: {kind: dirichlet, alhpa: 1}}",
            r"Did you mean 'data\.partition\.alpha'",
        ),
        ("data: {partition: {kind: sizes, sizes: [5]}}", "1 entries for 3 clients"),
        ("training: {algorithm: fedsgd, local_steps: 4}", "fedsgd uploads the gradient"),
        ("- a list", "expected keys and values"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_bad_key_or_value_is_named_with_what_was_expected(text: Any, message: Any) -> None:
    with pytest.raises(BractError, match=message):
        parse_config(text, source="f.yaml")


def test_a_missing_file_is_named_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(BractError, match=r"nothing\.yaml: no such file; `bract init`"):
        load_config(tmp_path / "nothing.yaml")


def test_the_written_template_is_the_default_but_for_what_it_says() -> None:
    written = parse_config(template("federation.yaml"))
    assert written.model.activation == "relu"
    default = FederationConfig()
    changed = written.model_copy(
        update={"model": written.model.model_copy(update={"activation": "sigmoid"})}
    )
    assert changed == default


def test_the_demo_is_a_valid_federation() -> None:
    assert demo_config().truth


@given(
    rounds=st.integers(1, 10**6),
    lr=st.floats(1e-6, 1e6),
    kind=st.sampled_from(["iid", "dirichlet", "shards"]),
)
def test_a_dumped_config_is_read_back_equal(rounds: Any, lr: Any, kind: Any) -> None:
    config = build_config(
        {"rounds": rounds, "training": {"lr": lr}, "data": {"partition": {"kind": kind}}}
    )
    assert parse_config(dump_config(config)) == config


def test_dotted_run_config_keys_lie_over_the_federation_text() -> None:
    config = config_of_run(
        {"federation": "rounds: 9\nseed: 4", "rounds": 2, "training.lr": 0.5, "run-dir": "x"}
    )
    assert (config.rounds, config.seed, config.training.lr) == (2, 4, 0.5)
    with pytest.raises(BractError, match="unknown key"):
        config_of_run({"federation": "", "training.lrr": 0.5})
