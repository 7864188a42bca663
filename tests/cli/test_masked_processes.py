"""A masked federation through real processes, and the audit of the sums that its server learns."""

import json
import os
from pathlib import Path

import pytest
from test_processes import Command

from bract import ObservationStore
from bract.protocol.masking import MaskedUpdate
from bract.rundir import RunDirectory

pytestmark = pytest.mark.processes

CONFIG = """
name: quick
truth: true
clients: 3
rounds: 2
model: {name: "encrypted_runs:tiny"}
training: {lr: 0.1, local_steps: 1, batch_size: 1}
data: {image_size: 8, validation: 0.0, partition: {kind: sizes, sizes: [60, 30, 10]}}
encryption: masks
"""


def test_a_masked_federation_trains_and_its_sums_are_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    (tmp_path / "quick.yaml").write_text(CONFIG)
    command = Command(tmp_path, "run", "quick.yaml")
    code, errors = command.finish()
    assert code == 0, errors
    assert command.nothing_is_left()
    run = RunDirectory.open(tmp_path / "runs" / "quick")
    rows = run.metrics()
    assert [len(row.clients) for row in rows] == [0, 3, 3]
    assert all(row.evaluation for row in rows)
    uploads = list(ObservationStore(run.captures))
    assert len(uploads) == 6
    for upload in uploads:
        assert not upload.update
        assert upload.parameters
        MaskedUpdate.from_tensors(upload.ciphertexts)
    # Pinned identities: one file a client, and each client's peers.
    assert len((run.keys / "peers.txt").read_text().split()) == 3
    assert (run.keys / "identity-0.pem").stat().st_mode & 0o777 == 0o600

    options = ["--attack", "ig", "--budget", "2", "--clients", "aggregate", "--rounds", "1"]
    for tier, members in (("oblivious", 3), ("colluding", 2)):
        key = ["--key", str(run.truth / "client-0")] if tier == "colluding" else []
        audit = Command(
            tmp_path, "audit", "runs/quick", *options, *key, "--tier", tier,
            "--model", "encrypted_runs:tiny",
        )  # fmt: skip
        code, errors = audit.finish()
        assert code == 0, errors
        found = [json.loads(path.read_text()) for path in run.audit.glob("*/*.json")]
        assert {row["refused"] for row in found} == {None}
        assert members in {len(row["members"]) for row in found}
