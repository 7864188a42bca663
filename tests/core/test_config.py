from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from bract.cli.templates import demo_config, template
from bract.config import FederationConfig, build_config, dump_config, load_config
from bract.config.config import config_of_run, parse_config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {partitoin: {kind: iid}}", ("config-key", "data.partitoin", "data.partition")),
        ("roundz: 3", ("config-key", "rounds")),
        ("clients: 0", ("config-value", "clients", "0")),
        ("clients: three", ("config-value", "clients", "three")),
        ("training: {lr: -1}", ("config-value", "training.lr", "-1")),
        (
            "data: {partition: {kind: dirichlet, alhpa: 1}}",
            ("config-key", "data.partition.alpha"),
        ),
        ("data: {partition: {kind: sizes, sizes: [5]}}", ("config-value", "1", "3")),
        ("training: {algorithm: fedsgd, local_steps: 4}", ("config-value",)),
        ("training: {lr_schedule: cosin}", ("config-value", "cosin", "cosine")),
        ("training: {lr_schedule: 3}", ("config-value",)),
        (
            "training: {lr_schedule: {kind: step, factor: 2}}",
            ("config-value", "lr_schedule.factor", "2"),
        ),
        (
            "training: {lr_schedule: {kind: step, evry: 2}}",
            ("config-key", "training.lr_schedule.every"),
        ),
        ("training: {lr_schedule: {kind: cosine, floor: 2}}", ("config-value", "2", "training.lr")),
        (
            "training: {algorithm: fedsgd, lr_schedule: step}",
            ("config-value", "strategy.server_lr"),
        ),
        (
            "{rounds: 3, training: {lr_schedule: {kind: exponential, factor: 1.0e-200}}}",
            ("config-value", "0", "3"),
        ),
        (
            "training: {augmentation: [flip]}",
            ("config-value", "augmentation.0", "flip", "random-crop"),
        ),
        ("training: {augmentation: [random-crop, random-crop]}", ("config-value",)),
        ("training: {dropout: 1}", ("config-value", "training.dropout", "1")),
        ("training: {dropout: .nan}", ("config-value", "training.dropout")),
        ("capture: {quota: 2XB}", ("config-value", "capture.quota", "2XB", "2GB")),
        ("capture: {quota: -1}", ("config-value", "capture.quota", "-1")),
        ("capture: {quota: 1e30}", ("config-value", "capture.quota")),
        ("capture: {store: captures}", ("config-value", "capture.store", "URL", "s3://bucket")),
        ("capture: {store: 's3://me:secret@host/x'}", ("config-value",)),
        ("capture: {store: 'az://x/y?sig=1'}", ("config-value",)),
        ("capture: {clients: [a/b]}", ("config-value", "capture.clients.0")),
        ("capture: {keep_rounds: 0}", ("config-value", "capture.keep_rounds", "0")),
        ("{capture: {store: 's3://b'}, audit: {live_every: 2}}", ("config-value",)),
        ("- a list", ("text-malformed",)),
        ("a: [", ("text-malformed", "YAML")),
    ],
)
def test_a_bad_key_or_value_is_named_with_what_was_expected(
    text: Any, message: tuple[str, ...]
) -> None:
    with refused(*message):
        parse_config(text, source="f.yaml")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 * 10**9),
        ("500 MiB", 500 * 2**20),
        ("1.5kB", 1500),
        ("7", 7),
        ("7B", 7),
        (12, 12),
        ("1tib", 2**40),
    ],
)
def test_a_quota_is_bytes_or_a_size(text: Any, size: int) -> None:
    config = build_config({"capture": {"quota": text}})
    assert config.capture.quota == size
    assert parse_config(dump_config(config)) == config


def test_a_missing_file_is_named_with_the_mend(tmp_path: Path) -> None:
    with refused("file-missing", "nothing.yaml"):
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
    with refused("config-key", "training.lrr", "training.lr"):
        config_of_run({"federation": "", "training.lrr": 0.5})
