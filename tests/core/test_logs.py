import logging
from pathlib import Path

import pytest

from bract.process import logs


def test_long_work_says_how_far_it_is_and_short_work_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([0.0, 1.0, 2.0, 100.0, 103.0, 106.0, 109.0, 112.0])
    monkeypatch.setattr("bract.process.logs.time.monotonic", lambda: next(times))
    logger = logging.getLogger("bract.test")
    with caplog.at_level(logging.INFO):
        tell = logs.log_progress(logger, "quick")
        tell(64, 128)
        tell(128, 128)
        assert caplog.text == ""
        tell = logs.log_progress(logger, "encrypting parameters")
        for done in (64, 128, 192, 256):
            tell(done, 256)
    assert [r.getMessage() for r in caplog.records] == [
        "encrypting parameters: 128 of 256 ciphertexts, 6 s",
        "encrypting parameters: 256 of 256 ciphertexts, 12 s",
    ]


def test_a_file_takes_the_records_of_bract_while_the_block_runs(tmp_path: Path) -> None:
    logger = logging.getLogger("bract.test")
    path = tmp_path / "server.log"
    before = logging.getLogger("bract").level
    with logs.log_to_file(path):
        logger.info("weights are 0.5 and 0.5")
        logger.debug("a detail")
    logger.warning("too late")
    assert path.read_text().splitlines()[0].endswith("INFO: weights are 0.5 and 0.5")
    assert len(path.read_text().splitlines()) == 1
    assert logging.getLogger("bract").level == before


def test_logging_that_somebody_set_up_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, root = logging.getLogger("bract"), logging.getLogger()
    before = list(logger.handlers)
    logs.log_to_stderr()
    assert logger.handlers == before
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    logs.log_to_stderr()
    logs.log_to_stderr()
    assert len(logger.handlers) == 1
