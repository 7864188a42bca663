"""Damaged keys, shares and captures: one short error each, and no damage goes unnoticed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import refusals
import typer.testing

from bract import ObservationStore
from bract.cli.main import app
from bract.errors import BractError
from bract.paillier import PaillierError, PrivateKey
from bract.paillier.keyfile import dump_private, load_private
from bract.paillier.sharefile import dump_share, load_share
from bract.paillier.sharing import KeyShare

DEEP = "[" * 5000


def body(text: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(base64.b64decode(b"".join(text.split(b"\n")[1:-2])))
    return content


def with_body(text: bytes, content: str) -> bytes:
    first, *_, last, _ = text.split(b"\n")
    return b"\n".join([first, base64.b64encode(content.encode()), last, b""])


def refused(load: Callable[[bytes], object], text: bytes) -> None:
    with pytest.raises(PaillierError) as error:
        load(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_high_bit_in_any_byte_of_a_key_file_is_refused(whole_key: PrivateKey) -> None:
    text = dump_private(whole_key)
    for place in range(0, len(text), 97):
        refused(load_private, text[:place] + bytes([text[place] | 0x80]) + text[place + 1 :])


def test_damage_in_any_field_of_a_key_share_is_found(two_of_three: list[KeyShare]) -> None:
    text = dump_share(two_of_three[0])
    whole = body(text)
    assert {"index", "threshold", "total", "degree", "value", "verification", "n"} <= set(whole)
    for name, value in whole.items():
        changes: list[Any] = [10**9, None, DEEP]
        if isinstance(value, int):
            changes.append(value + 1)
        elif isinstance(value, str):
            changes.append(value[:-1] + ("0" if value[-1] != "0" else "1"))
        else:
            changes.append([*value[:-1], value[0]])
        for changed in changes:
            refused(load_share, with_body(text, json.dumps(whole | {name: changed})))
        refused(
            load_share, with_body(text, json.dumps({k: v for k, v in whole.items() if k != name}))
        )


@pytest.mark.parametrize("content", [DEEP, '{"n": ' + DEEP, "9" * 4301, "", "null"])
def test_a_key_whose_body_is_no_key_is_refused(content: str, whole_key: PrivateKey) -> None:
    refused(load_private, with_body(dump_private(whole_key), content))


@pytest.mark.parametrize(
    "options",
    [
        ("--threshold", "1000000000"),
        ("--threshold", "1000000000", "--clients", "1000000000"),
        ("--threshold", "1001", "--clients", "1001"),
        ("--threshold", "9" * 4301),
    ],
)
def test_a_huge_threshold_writes_no_key(options: tuple[str, ...], tmp_path: Path) -> None:
    done = typer.testing.CliRunner().invoke(app, ["keygen", str(tmp_path / "keys"), *options])
    assert done.exit_code != 0
    assert isinstance(done.exception, BractError | SystemExit)
    assert not list(tmp_path.rglob("*.pem"))


@pytest.mark.parametrize("text", [DEEP, '{"schema": ' + DEEP, "", "{", "9" * 4301])
def test_a_capture_whose_description_is_deep_or_cut_is_named(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "round-0001" / "client-0"
    folder.mkdir(parents=True)
    (folder / "observation.json").write_text(text)
    with refusals.refused("capture-damaged", "client-0") as error:
        ObservationStore(tmp_path).describe(folder)
    assert len(str(error.value)) < 500 + len(str(folder))
