"""What all experiments share: kept rows, one schema of results, uploads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused

from bract.attacks import Budget, Refusal, attack
from bract.client.defenses import ProtectContext, build_defenses
from bract.config.config import TrainingConfig
from experiments.harness import attacking, command
from experiments.harness.attacking import attack_uploads
from experiments.harness.command import Finished, emit
from experiments.harness.result import RESULTS, BenchmarkResult, committed, read
from experiments.harness.uploads import gradient_upload, network_for, plain_spec, trained_upload
from experiments.papers.results import COMMITTED, PaperResult

COUNTS: dict[type[Any], Iterator[Path]] = {
    BenchmarkResult: RESULTS.glob("*.json"),
    PaperResult: COMMITTED.glob("*/*.json"),
}


def test_kept_rows_of_other_code_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "rows.jsonl", []

    def measure() -> dict[str, Any]:
        calls.append(1)
        return {"psnr": 1.0}

    for code, measured in (("one", 1), ("one", 1), ("other", 2), ("other", 2)):
        monkeypatch.setattr(command, "digest", lambda *_, code=code: code)
        assert Finished(path).row(["a"], measure)["psnr"] == 1.0
        assert len(calls) == measured
    with path.open("a") as file:
        file.write('{"key": "[\\"b')  # interrupted
    monkeypatch.setattr(command, "digest", lambda *_: "third")
    assert Finished(path).get(["a"]) is None
    assert Finished(path, keep_older=True).row(["a"], measure)["code"] == "other"
    Finished(path).row(["b"], measure)
    assert Finished(path).get(["b"]) is not None


@pytest.mark.parametrize("kind", COUNTS, ids=lambda kind: kind.__name__)
def test_every_committed_result_names_where_it_comes_from(kind: Any) -> None:
    found = [read(kind, path) for path in COUNTS[kind]]
    assert len(found) > 40
    for result in found:
        assert result.experiment and result.command and result.device and result.rows
        assert {"bract", "python", "torch"} <= set(result.versions)


def test_what_is_printed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["/checkout/experiments/peers.py", "--model", "a b", "--json"])
    rows: list[dict[str, Any]] = [{"psnr": 20.5, "each": [1, 2]}, {"psnr": None}]
    emit(rows, ("psnr",), as_json=True)
    path = tmp_path / "peers-here.json"
    path.write_text(capsys.readouterr().out)
    assert committed("peers", tmp_path) == rows
    result = read(BenchmarkResult, path)
    assert result.command == "python -m experiments.peers --model 'a b' --json"
    assert result.experiment == "peers" and result.code
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 9}))
    with refused("schema-version", "schema", 9):
        read(BenchmarkResult, path)
    with refused("file-missing", 0):
        committed("none", tmp_path)


def test_an_undefended_gradient_is_captured_alike_by_both_ways() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 1, 16, 16, generator=generator)
    labels = torch.tensor([3, 4])
    spec = plain_spec((1, 16, 16))
    network = network_for(spec, "lenet-strided", 5)
    plain = gradient_upload(network, images, labels, model="lenet-strided")
    sent = trained_upload(
        network,
        images,
        labels,
        training=TrainingConfig(algorithm="fedsgd", batch_size=2, lr=0.1),
        spec=spec,
        chain=build_defenses([]),
        state={},
        context=ProtectContext(round=1),
        seed=0,
        client="client-0",
        model="lenet-strided",
    )
    for name, value in plain.update.items():
        torch.testing.assert_close(sent.captured.update[name], value)
    assert sent.captured.declaration.batch_size == plain.declaration.batch_size == 2


def test_an_attacker_who_cannot_undo_a_defense_takes_the_upload_at_face_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def reconstruct(given: Any, using: Any, *, tier: str, **_: Any) -> Any:
        asked.append((tier, [seen.key for seen in given]))
        refuse = tier == "adaptive"
        return [
            Refusal(attack="ig", observation=s.key, reason="unknown")
            if refuse and s.key == "b"
            else s.key
            for s in given
        ]

    monkeypatch.setattr(attacking, "reconstruct", reconstruct)
    captured: Any = [
        SimpleNamespace(
            captured=SimpleNamespace(key=key), plain=SimpleNamespace(key=f"plain {key}"), history=()
        )
        for key in ("a", "b")
    ]

    def outcome(tier: Any) -> Any:
        asked.clear()
        return attack_uploads(
            attack("ig"), captured, tier, budget=Budget(iterations=1), seed=0, device="cpu"
        )

    assert outcome("adaptive") == (["a", "b"], {1: "unknown"})
    assert asked == [("adaptive", ["a", "b"]), ("oblivious", ["b"])]
    assert outcome("plain") == (["plain a", "plain b"], {})
