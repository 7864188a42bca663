"""What a server app tells of its run over Flower's log, and nobody else can tell."""

import json
import sys

import pytest
from refusals import refused

from bract.protocol.progress import LONGEST, Progress, ProgressReader, ProgressWriter
from bract.schema.metrics import GlobalRow, MetricsRow


def heard(reader: ProgressReader, *texts: str) -> list[Progress | str]:
    return [event for text in texts for event in reader.feed(text)]


def lines(capsys: pytest.CaptureFixture[str], *events: Progress) -> str:
    writer = ProgressWriter("1.2.3")
    for one in events:
        writer.write(one)
    return capsys.readouterr().out


def test_what_is_told_is_heard_in_pieces_of_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    row = MetricsRow(round=2, seconds=1.5, evaluation=GlobalRow(loss=float("nan"), accuracy=0.5))
    text = "INFO : starting\n" + lines(
        capsys,
        Progress(event="training", name="n", rounds=3, clients=2, run="/srv/runs/n-1"),
        Progress(event="round", row=row),
        Progress(event="finished"),
    )
    for size in (1, 7, 64, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        found = heard(ProgressReader(), *pieces)
        assert found[0] == "INFO : starting"
        events = [event for event in found if isinstance(event, Progress)]
        assert [event.event for event in events] == ["begun", "training", "round", "finished"]
        assert events[0].bract == "1.2.3"
        assert (events[1].run, events[1].rounds) == ("/srv/runs/n-1", 3)
        assert events[2].row == row


def test_a_line_that_a_client_made_is_a_line_of_log(capsys: pytest.CaptureFixture[str]) -> None:
    reader = ProgressReader()
    genuine = lines(capsys, Progress(event="training", rounds=3))
    assert [type(event) for event in heard(reader, genuine)] == [Progress, Progress]
    forged = f"bract-{'0' * 32} " + json.dumps({"event": "finished"})
    again = f"bract-{'0' * 32} " + json.dumps({"event": "begun"})
    assert heard(reader, f"{forged}\n{again}\n{forged}\n") == [forged, again, forged]


def test_only_the_first_line_of_a_server_app_sets_the_token() -> None:
    early = f"bract-{'1' * 32} " + json.dumps({"event": "finished"})
    assert heard(ProgressReader(), early + "\n") == [early]


def test_another_version_s_words_are_an_error_that_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reader = ProgressReader()
    genuine = lines(capsys)
    heard(reader, genuine)
    token = genuine.split()[0]
    with refused("message-malformed"):
        heard(reader, f'{token} {{"event": "later"}}\n')


def test_a_line_without_end_costs_no_memory() -> None:
    reader = ProgressReader()
    assert heard(reader, *["x" * (1 << 20)] * 9) == []
    assert len(reader._rest) <= LONGEST
    assert heard(reader, "x\nafter\n") == ["after"]


def test_every_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(sys, "stdout", type("Out", (), {"write": pieces.append})())
    ProgressWriter("1").write(Progress(event="finished"))
    assert len(pieces) == 2
    assert all(piece.startswith("\nbract-") and piece.endswith("}\n") for piece in pieces)
