from typing import Any

import pytest
from refusals import refused

from bract.config import build_config, dump_config
from bract.config.config import config_of_run, parse_config


def test_the_scheme_alone_is_enough() -> None:
    assert parse_config("encryption: paillier") == parse_config("encryption: {scheme: paillier}")
    assert parse_config("{}").encryption.scheme == "none"
    assert config_of_run({"encryption": "paillier"}).encryption.enabled
    assert config_of_run({"encryption.scheme": "paillier"}).encryption.key_bits == 2048


def test_a_dumped_section_reads_back_the_same() -> None:
    config = parse_config("encryption: {scheme: paillier, threshold: 2, clip: 0.5, degree: 2}")
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("encryption: pailler", ("config-value", "encryption.scheme", "pailler")),
        ("encryption: {keyz: in-band}", ("config-key", "encryption.keys")),
        (
            "encryption: {scheme: paillier, key_bits: 1024}",
            ("config-value", "encryption.key_bits", "1024"),
        ),
        ("encryption: {clip: 0}", ("config-value", "encryption.clip", "0")),
        ("encryption: {scheme: paillier, bits: 33}", ("config-value", "encryption.bits", "33")),
        (
            "encryption: {scheme: paillier, threshold: 1}",
            ("config-value", "encryption.threshold", "1"),
        ),
        ("encryption: {scheme: paillier, threshold: 4}", ("config-value", "4", "3")),
        (
            "{clients: 40, encryption: paillier}",
            ("config-value", "max_weight_sum", "31", "40"),
        ),
        (
            "{clients: 6, encryption: paillier, strategy: {name: fedboosting}}",
            ("config-value", "6", "0.84", "50"),
        ),
    ],
)
def test_what_cannot_work_is_refused_before_training_with_the_numbers(
    text: Any, message: tuple[str, ...]
) -> None:
    with refused(*message):
        parse_config(text, source="f.yaml")


def test_what_is_refused_encrypted_is_fine_in_the_clear() -> None:
    assert build_config({"clients": 40}).clients == 40
    raised = {"scheme": "paillier", "max_weight_sum": 50}
    build_config({"clients": 6, "encryption": raised, "strategy": {"name": "fedboosting"}})


def test_what_encryption_cannot_hide_is_said() -> None:
    def cautions(clients: Any, strategy: Any = "fedavg", **section: Any) -> Any:
        config = build_config({"encryption": {"scheme": "paillier", **section}})
        return " ".join(config.encryption.cautions(clients, strategy))

    assert cautions(3) == ""
    assert "with 2 clients" in cautions(2)
    assert "solve for the others' updates" in cautions(3, "fedboosting")
    assert "encryption.identities" in cautions(3, threshold=2)
    listed = [f"{number:02x}" + "00" * 31 for number in (9, 10, 11)]
    assert cautions(3, threshold=2, identities=listed) == ""
    assert "sees the whole key" in cautions(3, keys="in-band", threshold=2)
    assert build_config({}).encryption.cautions(2, "fedboosting") == []
