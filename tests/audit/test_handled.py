"""An input that an attack does not handle is named, by describe, audit and report alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audited import audited_run, with_keys
from refusals import refused

from bract import ObservationStore
from bract.audit.audit import Audit
from bract.audit.handled import why_unhandled
from bract.cli.describe import describe_app
from bract.config.config import AuditRequest
from bract.inputs import INPUTS
from bract.inputs.image import Image
from bract.report.facts import gather


class Sound(Image):
    name = "sound"


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INPUTS._entries, "sound", Sound)


def test_an_image_can_be_attacked_and_an_unknown_input_is_named() -> None:
    assert why_unhandled("image") is None
    assert "Did you mean 'image'" in (why_unhandled("imag") or "")


def test_describe_audit_and_report_refuse_an_input_alike(sound: Any, tmp_path: Path) -> None:
    run = audited_run(tmp_path / "run", 1)
    store = ObservationStore(run.captures)
    for seen in list(store):
        declared = seen.declaration.updated({"input": "sound"})
        store.save(type(seen)(**{**vars(seen), "declaration": declared}))
    request = AuditRequest(attacks=["ig"], iterations=1, device="cpu")
    audit = Audit(run, with_keys(request))
    (result,) = audit.execute(audit.plan())
    assert "the client trains on 'sound'" in (result.refused or "")
    report = gather(run.root)
    assert any("no attack handles the input 'sound'" in note for note in report.notes)
    with refused("input-mismatch", "input", "sound"):
        describe_app(run.root, {"input.kind": "sound"})
