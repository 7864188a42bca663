from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bract.cli.templates import demo_config, template
from bract.config import FederationConfig, build_config, dump_config, load_config
from bract.config.config import config_of_run, parse_config
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
        ("training: {lr_schedule: cosin}", "unknown schedule 'cosin'. Did you mean 'cosine'"),
        ("training: {lr_schedule: 3}", "expected constant, step, cosine, exponential, or kind"),
        ("training: {lr_schedule: {kind: step, factor: 2}}", r"lr_schedule\.factor: found 2"),
        (
            "training: {lr_schedule: {kind: step, evry: 2}}",
            r"Did you mean 'training\.lr_schedule\.every'",
        ),
        ("training: {lr_schedule: {kind: cosine, floor: 2}}", r"floor is 2, above training\.lr"),
        ("training: {algorithm: fedsgd, lr_schedule: step}", r"by strategy\.server_lr"),
        (
            "{rounds: 3, training: {lr_schedule: {kind: exponential, factor: 1.0e-200}}}",
            "makes the learning rate 0 by round 3",
        ),
        ("training: {augmentation: [flip]}", r"augmentation\.0: found 'flip'; .*'random-crop'"),
        ("training: {augmentation: [random-crop, random-crop]}", "names one twice"),
        ("training: {dropout: 1}", r"training\.dropout: found 1; .*less than 1"),
        ("training: {dropout: .nan}", r"training\.dropout: found nan"),
        ("capture: {quota: 2XB}", r"capture\.quota: found '2XB'.*a size such as 2GB"),
        ("capture: {quota: -1}", r"capture\.quota: found -1"),
        ("capture: {quota: 1e30}", r"capture\.quota: found"),
        ("capture: {store: captures}", r"capture\.store: .*a URL such as s3://bucket"),
        ("capture: {store: 's3://me:secret@host/x'}", "without password"),
        ("capture: {store: 'az://x/y?sig=1'}", "without password"),
        ("capture: {clients: [a/b]}", r"capture\.clients\.0: .*not allowed"),
        ("capture: {keep_rounds: 0}", r"capture\.keep_rounds: found 0"),
        ("{capture: {store: 's3://b'}, audit: {live_every: 2}}", "leave one of them out"),
        ("- a list", "expected keys and values"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_bad_key_or_value_is_named_with_what_was_expected(text: Any, message: Any) -> None:
    with pytest.raises(BractError, match=message):
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
