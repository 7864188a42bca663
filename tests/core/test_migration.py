"""Files of earlier schema versions are read as those of this one."""

from __future__ import annotations

from typing import Any

import pytest

from bract.errors import SchemaError
from bract.schema import AuditResult
from bract.schema.metrics import MetricsRow
from bract.schema.run import RunState

OLD: dict[str, Any] = {
    "schema": 4,
    "round": 1,
    "client": "client-0",
    "attack": "ig",
    "scored": True,
    "images": [{"index": 0, "scores": {"ssim": 0.5}}, {"index": 1}],
    "diagnosis": {"told": {"psnr": 12.0, "prior_psnr": 10.0, "numbers": 5, "pixels": 9}},
}


def test_an_audit_result_of_version_4_is_read() -> None:
    found = AuditResult.parse(OLD, source="old")
    assert found.version() == found.schema_version == 5
    assert found.scored == 1
    assert found.signals is not None and found.signals.estimate is not None
    assert found.signals.estimate.psnr == 12.0
    unscored = AuditResult.parse(OLD | {"scored": False, "diagnosis": None}, source="old")
    assert unscored.scored == 0 and unscored.signals is None


@pytest.mark.parametrize("version", [3, "4", 4.0, [4], None, True])
def test_no_other_version_is_migrated(version: Any) -> None:
    with pytest.raises(SchemaError):
        AuditResult.parse(OLD | {"schema": version}, source="old")


def test_rows_of_metrics_of_version_2_are_read_also_within_another_record() -> None:
    old = {"schema": 2, "round": 3, "failures": [{"client": "client-1", "reason": "gone"}]}
    row = MetricsRow.parse(old, source="old")
    assert (row.schema_version, row.round, row.late) == (3, 3, [])
    state = {"schema": 2, "status": "interrupted", "pending_row": old}
    assert RunState.parse(state, source="old").pending_row == row
