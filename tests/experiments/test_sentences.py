"""Sentences of Guardian's tables: made up or by path, attacked by the papers' own attacks."""

from pathlib import Path

import pytest
from refusals import refused

from experiments.harness.reviews import made_up, sst2
from experiments.harness.texts import sentences
from experiments.papers.catalog import find
from experiments.papers.estimate import cost
from experiments.papers.runners.base import Context
from experiments.papers.runners.sentences import SentenceSettings, SentencesRunner

pytest.importorskip("transformers")

SMALL = "text-encoder(width=32,depth=1,heads=2)"


def found(settings: SentenceSettings, unit: int) -> dict[str, float]:
    (sample,) = SentencesRunner().run(settings, unit, Context()).samples
    return {name: value for name, value in sample.values.items() if value is not None}


def test_splits_of_made_up_sentences_share_none() -> None:
    parts = [set(sentences("reviews", split)) for split in ("score", "choose", "public")]
    assert all(len(part) > 500 for part in parts)
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert made_up(3, 1) == made_up(3, 1) != made_up(3, 2)


def test_sst2_is_read_by_path_and_its_absence_is_named(tmp_path: Path) -> None:
    settings = SentenceSettings(data="sst2")
    need = SentencesRunner().missing(settings, Context(folder=tmp_path))
    assert need is not None and "SST-2" in str(need)
    with refused("file-missing", tmp_path):
        sst2(tmp_path)
    (tmp_path / "SST-2").mkdir()
    path = tmp_path / "SST-2" / "train.tsv"
    path.write_text("sentence\tlabel\na film\t1\nno plot \t0\n")
    assert sst2(tmp_path) == ("a film", "no plot")
    path.write_text("text\tlabel\na film\t1\n")
    with refused("data-column", tmp_path):
        sst2(tmp_path)


@pytest.mark.parametrize("attack", ["sim", "tag", "frequent words"])
def test_a_client_is_attacked_and_its_words_are_scored(attack: str) -> None:
    settings = SentenceSettings(model=SMALL, attack=attack, iterations=2, words=(4, 9))
    values = found(settings, 0)
    assert values["f1"] == pytest.approx((values["precision"] + values["recall"]) / 2)


def test_the_attack_reads_more_words_than_no_update_shows() -> None:
    settings = SentenceSettings(iterations=60, split="choose")
    blind = settings.model_copy(update={"attack": "frequent words"})
    assert found(settings, 1)["recall"] > found(blind, 1)["recall"]


def test_a_refused_update_has_no_sample() -> None:
    settings = SentenceSettings(
        model="text-encoder(width=32,depth=2,heads=2,trained=last)", iterations=1
    )
    found = SentencesRunner().run(
        settings.model_copy(update={"attack": "token-span"}), 0, Context()
    )
    assert not found.samples and found.refused


def test_both_tables_have_every_attack_and_defense() -> None:
    five, eight = find(["guardian/table-5", "guardian/table-8"])
    assert len(five.rows_at("laptop")) == 16 and len(eight.rows_at("laptop")) == 10
    printed = five.rows[-2].published[0].values
    assert printed["f1"] == pytest.approx((printed["precision"] + printed["recall"]) / 2, abs=1e-4)  # type: ignore[operator]


def test_a_row_is_estimated_before_it_runs() -> None:
    settings = SentenceSettings(model=SMALL, iterations=50, uploads=2)
    whole = cost(settings, Context()).seconds
    assert 0.0 < whole < cost(settings.model_copy(update={"uploads": 200}), Context()).seconds
