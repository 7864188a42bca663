"""An encrypted federation through real processes, and the audit with a client's key."""

import json
import os
from pathlib import Path

import pytest
import torch
from encrypted_runs import key_secrets
from safetensors.torch import load_file
from test_processes import Command

from bract import ObservationStore
from bract.paillier import PrivateKey, keyfile
from bract.protocol.keyfiles import read_key_file
from bract.rundir import RunDirectory

pytestmark = pytest.mark.processes

CONFIG = """
name: quick
truth: true
clients: 3
rounds: 2
model: {name: lenet-strided, activation: relu}
training:
  {lr: 0.1, lr_schedule: exponential, local_steps: 4, augmentation: [random-crop], dropout: 0.2}
data: {image_size: 16, partition: {kind: sizes, sizes: [120, 60, 2]}}
encryption: paillier
"""


SHARED_OUT = """
name: dealt
clients: 3
rounds: 1
model: {name: "encrypted_runs:tiny"}
training:
  {lr: 0.1, lr_schedule: exponential, local_steps: 4, augmentation: [random-crop], dropout: 0.2}
data: {image_size: 8, validation: 0.2, partition: {kind: sizes, sizes: [120, 80, 60]}}
strategy: {name: fedboosting}
encryption: {scheme: paillier, keys: in-band, threshold: 2}
"""


def test_an_encrypted_federation_trains_and_the_server_keeps_ciphertexts_only(
    tmp_path: Path,
) -> None:
    (tmp_path / "quick.yaml").write_text(CONFIG)
    command = Command(tmp_path, "run", "quick.yaml")
    code, errors = command.finish()
    assert code == 0, errors
    assert command.nothing_is_left()
    run = RunDirectory.open(tmp_path / "runs" / "quick")
    rows = run.metrics()
    assert [row.round for row in rows] == [0, 1, 2]
    assert all(row.evaluation and row.evaluation.clients == 3 for row in rows)
    assert (rows[2].clients["client-0"].encrypt_seconds or 0) > 0
    observations = list(ObservationStore(run.captures))
    assert len(observations) == 6
    assert all(o.ciphertexts and not o.update for o in observations)
    assert [o.declaration.lr for o in observations[::3]] == pytest.approx([0.1, 0.095])
    assert {o.declaration.dropout for o in observations} == {0.2}
    models = [
        load_file(run.root / "state" / f"client-{i}" / f"quick-client-{i}-final.safetensors")
        for i in range(3)
    ]
    for name, value in models[0].items():
        assert torch.equal(models[1][name], value)
        assert torch.equal(models[2][name], value)
    key_file = run.keys / "private.pem"
    assert key_file.stat().st_mode & 0o777 == 0o600
    key = read_key_file(key_file)
    assert isinstance(key, PrivateKey)
    secrets = key_secrets(key)
    secrets += [value.numpy().tobytes()[:64] for value in models[0].values() if value.numel() > 99]
    for folder in (run.captures, run.aggregates, run.logs, run.models):
        for file in folder.rglob("*"):
            held = file.read_bytes() if file.is_file() else b""
            assert not any(secret in held for secret in secrets), file
    options = ["--attack", "ig", "--budget", "2", "--clients", "client-2", "--rounds", "1"]
    for tier in ("oblivious", "colluding"):
        command = Command(tmp_path, "audit", "runs/quick", *options, "--tier", tier)
        code, errors = command.finish()
        assert code == 0, errors
    found = {
        json.loads(path.read_text())["tier"]: json.loads(path.read_text())["refused"]
        for path in run.audit.glob("*/*.json")
    }
    assert "no gradient attack applies" in found["oblivious"]
    assert found["colluding"] is None


def test_fedboosting_under_a_threshold_with_shares_dealt_through_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    (tmp_path / "dealt.yaml").write_text(SHARED_OUT)
    command = Command(tmp_path, "run", "dealt.yaml")
    code, errors = command.finish()
    assert code == 0, errors
    assert "sees the whole key" in errors
    run = RunDirectory.open(tmp_path / "runs" / "dealt")
    (row,) = run.metrics()[1:]
    assert row.boosting is not None
    assert all(
        score is not None and 0.0 <= score <= 1.0 for scores in row.boosting.V for score in scores
    )
    assert [c.weight for c in row.clients.values()] == row.boosting.weights
    # Pinned identities; the key itself is in no file here.
    assert {file.name for file in run.keys.iterdir()} == {
        *(f"identity-{client}.pem" for client in range(3)),
        "peers.txt",
    }
    log = (run.logs / "server.log").read_text()
    assert "client-0 generates the Paillier key for " in log
    assert "round 1: boosting weights: client-0 " in log
    finals, secrets = [], []
    for client in range(3):
        folder = run.root / "state" / f"client-{client}"
        finals.append(load_file(folder / f"dealt-client-{client}-final.safetensors"))
        state = load_file(next(folder.glob("*-encryption.safetensors")))
        secrets += state["key"].numpy().tobytes().splitlines()[-6:-2]
        identity = keyfile.read_identity(run.keys / f"identity-{client}.pem").private
        secrets += [identity, identity.hex().encode()]
    assert b"KEY SHARE" in state["key"].numpy().tobytes()
    secrets += [value.numpy().tobytes()[:64] for value in finals[0].values() if value.numel() > 15]
    assert all(torch.equal(finals[0][name], other[name]) for other in finals for name in other)
    held = [
        file.read_bytes()
        for folder in (run.captures, run.aggregates, run.logs, run.models)
        for file in folder.rglob("*")
        if file.is_file()
    ]
    assert len(held) > 6
    for secret in secrets:
        assert not any(secret in data for data in held)
