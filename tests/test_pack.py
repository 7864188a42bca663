"""The capture pack as tests of the audit read it."""

from pathlib import Path

import pack
from audited import SETTINGS, attacked, captured_run

from bract.audit.audit import Audit
from bract.config.config import AuditRequest


def test_uploads_of_the_pack_are_audited_as_those_of_a_run(tmp_path: Path) -> None:
    names = ("lenet-strided-b1", "defended-pruning-b1")
    run, _, _ = captured_run(
        tmp_path / "run", SETTINGS | {"clients": 2, "data": {"name": "digits", "image_size": 8}}
    )
    pack.copied(run, *names)
    request = AuditRequest(attacks=["gauss-newton"], iterations=8, tier="adaptive")
    results = attacked(Audit(run, request))
    # The first has three rounds.
    assert sorted(found.client for found in results) == sorted([*names, names[0], names[0]])
    for found in results:
        assert all(image.scores and (image.scores.psnr or 0) > 40 for image in found.images)


def test_an_upload_is_the_caller_s_own() -> None:
    one, other = pack.upload("lenet-strided-b1"), pack.upload("lenet-strided-b1")
    next(iter(one.update.values())).zero_()
    assert float(next(iter(other.update.values())).abs().max()) > 0
    assert float(next(iter(pack.upload("lenet-strided-b1").update.values())).abs().max()) > 0
