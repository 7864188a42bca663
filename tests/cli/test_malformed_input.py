"""Malformed configuration, by name: one line, exit code 2, no traceback, nothing written."""

import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from bract.cli.main import main
from bract.cli.run import check_feasible
from bract.config.config import parse_config
from bract.data.partition import Partitions

MALFORMED = {
    "an impossible date": ("seed: 2020-13-45", "'2020-13-45' is no timestamp (line 1, column 7)"),
    "an integer that is none": ("seed: !!int abc", "'abc' is no int"),
    "an empty integer": ("seed: !!int ''", "'' is no int"),
    "an integer of 4,301 digits": ("seed: " + "9" * 4301, "is no int"),
    "an integer of 4,300 digits": ("seed: " + "9" * 4300, "is no int"),
    "an integer of 6,000 hexadecimal digits": ("seed: 0x" + "f" * 6000, "is no int"),
    "nested brackets": ("name: " + "[" * 5000, "nested more than 64 deep"),
    "nested brackets, closed": ("name: " + "[" * 5000 + "]" * 5000, "nested more than 64 deep"),
    "defenses that are no list": ('defenses: "{{{"', "defenses: found '{{{'"),
    "too many shards": (
        "data: {partition: {kind: shards, shards_per_client: 500}}",
        "data.partition: cannot split 1437 examples over 3 clients",
    ),
    "an object of Python": ("name: !!python/object/apply:os.getcwd []", "could not determine"),
    "an alias to itself": ("name: &a [*a]", "an alias refers to itself"),
    "a key given twice": ("seed: 1\nseed: 2", "key 'seed' is given twice (line 2, column 1)"),
    "a path with a null": ('data: {name: folder, path: "a\\0b"}', "holds a null character"),
    "a path that is too long": ("data: {name: folder, path: " + "a" * 300 + "}", "than 255 bytes"),
    "a long value": ("device: [" + "x" * 9000 + "]", "device: found ['xxxx"),
    "many unknown keys": ("\n".join(f"key{i}: 1" for i in range(2000)), "; and 1997 more"),
    "an infinite number": ("training: {lr: .inf}", "training.lr: found inf"),
    "no text": ("\x00", "special characters are not allowed"),
    "text of another encoding": ("\udcff", "cannot be read as text"),
}


def bomb() -> str:
    lines = ["x0: &x0 [1]"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join([*lines, "defenses: *x11"])


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """Take back what the command line sets up for its own process."""
    handler, logger = signal.getsignal(signal.SIGTERM), logging.getLogger("bract")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    signal.signal(signal.SIGTERM, handler)
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.mark.parametrize("case", [*MALFORMED, "a billion laughs"])
def test_malformed_configuration_is_one_short_line(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text, message = MALFORMED.get(case) or (bomb(), "more than 100000 values")
    (tmp_path / "f.yaml").write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bract", "run", "f.yaml", "--cold"])
    with pytest.raises(SystemExit) as left:
        main()
    said = capfd.readouterr().err.strip()
    assert left.value.code == 2
    assert message in said
    assert said.startswith("error: ")
    assert "\n" not in said
    assert len(said) < 600
    assert [path.name for path in tmp_path.iterdir()] == ["f.yaml"]


def test_a_run_of_a_thousand_clients_draws_its_partition_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    begin = Partitions.__init__

    def counted(self: Partitions, *given: Any, **named: Any) -> None:
        drawn.append(named["clients"])
        begin(self, *given, **named)

    monkeypatch.setattr(Partitions, "__init__", counted)
    check_feasible(parse_config("{clients: 1000, data: {validation: 0.0}}"))
    assert drawn == [1000]


def test_dropout_that_somebodys_own_model_cannot_take_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headless_by_hand.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Conv2d(1, 10, 32))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    asked = "{{model: {{name: 'headless_by_hand:{}'}}, training: {{dropout: {}}}}}"
    with refused("model-unsuited", "training.dropout", "0.5", "null"):
        check_feasible(parse_config(asked.format("net", 0.5)).as_own_word())
    check_feasible(parse_config(asked.format("net", "null")).as_own_word())
    # It may be on the clients' path alone.
    check_feasible(parse_config(asked.format("missing", 0.5)).as_own_word())
