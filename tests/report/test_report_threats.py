"""The threat-model card."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from golden import check_words
from reporting import gather

from bract import Observation, ObservationStore
from bract.report import write_report
from bract.schema import ClientDeclaration

FAMILIES = (
    "closed-form",
    "over pixels",
    "through a generator",
    "batch statistics",
    "public images",
)


def card(facts: dict[str, Any]) -> str:
    """All words of the card."""
    model = facts["threat_model"]
    saw = (f"{row['question']}: {row['answer']}. {row['detail']}" for row in model["saw"])
    # Which attacks a family has is theirs to say.
    missing = (re.sub(r" \(.*\)", "", item) for item in model["not_tried"])
    return "\n".join((*saw, *(f"Not tried: {item}" for item in missing)))


def test_what_the_protocol_declares_is_seen(make_run: Any) -> None:
    check_words("threats", "what the protocol declares", card(gather(make_run(rounds=1))))


def test_a_proximal_term_is_shown_where_one_is_declared(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.capture(root, 1, "a", proximal_mu=0.25)
    check_words("threats", "a proximal term", card(gather(root)))


def test_what_was_not_declared_is_named(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.capture(root, 1, "a", lr=None, local_steps=None, mean=None)
    check_words("threats", "rate, steps and mean not declared", card(gather(root)))


def test_texts_are_called_texts(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.capture(root, 1, "a", input="text")
    words = card(gather(root))
    assert "text shape" in words and "image" not in words.replace("surrogate) images", "")


def test_a_defense_is_named_with_its_settings(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.capture(root, 1, "a", defenses=[{"name": "adadefense", "eps": 1e-08}])
    check_words("threats", "a defense", card(gather(root)))


def test_encrypted_uploads_are_not_in_the_clear(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a", "b"], rounds=1, audit=False)
    writers.capture(root, 1, "a", encryption="paillier")
    check_words("threats", "one of two encrypted", card(gather(root)))
    writers.capture(root, 1, "b", encryption="paillier")
    check_words("threats", "all encrypted", card(gather(root)))


def test_running_statistics_are_seen_only_where_they_came_back(make_run: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    store = ObservationStore(root / "captures")
    weight = {"w": torch.ones(2)}
    buffers = {"bn.running_mean": torch.zeros(2)}

    for case, returned in (("statistics returned", buffers), ("statistics kept", {})):
        sent: dict[str, Any] = {"buffers": buffers, "returned_buffers": returned}
        store.save(Observation(1, "a", weight, weight, ClientDeclaration(), **sent))
        check_words("threats", case, card(gather(root)))


def test_attack_families_and_uploads_left_out_are_listed(make_run: Any) -> None:
    root = make_run(rounds=2)
    (root / "audit" / "ig" / "round-0002--client-0.json").unlink()
    check_words("threats", "one upload left out", card(gather(root)))


def test_a_tier_is_missing_only_where_it_has_something_to_know(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1)
    assert not any("tier" in item for item in gather(root)["threat_model"]["not_tried"])
    writers.capture(root, 1, "a", defenses=[{"name": "pruning"}])
    missing = gather(root)["threat_model"]["not_tried"]
    assert "the adaptive tier" in missing and "the colluding tier" not in missing
    writers.capture(root, 1, "a", encryption="paillier")
    missing = gather(root)["threat_model"]["not_tried"]
    assert "the colluding tier" in missing and "the adaptive tier" not in missing


@pytest.mark.parametrize(
    ("facts", "tried"),
    [
        ({"attack": "ig"}, {"over pixels"}),
        ({"attack": "best", "method": "grnn-polish"}, {"through a generator"}),
        ({"attack": "gradinversion"}, {"batch statistics"}),
        (
            {"attack": "auto", "method": "ig", "not_applicable": {"analytic": "no such layer"}},
            {"over pixels", "closed-form"},
        ),
        (
            {"attack": "ig", "trials": [{"attack": "best", "method": "grnn"}]},
            {"over pixels", "through a generator"},
        ),
    ],
)
def test_what_was_tried_is_what_the_record_names(
    make_run: Any, writers: Any, facts: Any, tried: Any
) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.audit(root, 1, "a", **facts)
    missing = " ".join(gather(root)["threat_model"]["not_tried"])
    assert {family for family in FAMILIES if family not in missing} == tried


def test_the_page_says_whose_secrets_came_from_a_seed_that_was_found(
    make_run: Any, writers: Any, parse: Any
) -> None:
    root = make_run(clients=["a", "b"], rounds=1, audit=False)
    for client, seed in (("a", 987654), ("b", None)):
        evidence = {"defense": "noise", "weak_seed": seed, "weak_seed_search": {"tried": 9}}
        settings = {"evidence": evidence}
        writers.audit(root, 1, client, tier="adaptive", noise=1.2, settings=settings)
    (note,) = [note for note in gather(root)["notes"] if "seed" in note]
    check_words("threats", "a seed that was found", note)
    text = parse(write_report(root, redact=True).read_text()).text
    assert note in text and "987654" not in text


@pytest.mark.parametrize(
    ("signal", "words"),
    [
        ("scalars_agree", "The attacker who knows Guardian trusts no reading of"),
        ("lock_found", "The attacker who knows FedKL searched the lock and did not find that of"),
    ],
)
def test_the_page_says_where_an_attackers_own_signal_tells_that_he_failed(
    make_run: Any, writers: Any, parse: Any, signal: Any, words: Any
) -> None:
    root = make_run(clients=["a", "b", "c"], rounds=1, audit=False)
    for client, value in (("a", False), ("b", True), ("c", None)):
        evidence = {} if value is None else {signal: value}
        settings = {"evidence": evidence}
        writers.audit(root, 1, client, tier="adaptive", noise=1.2, settings=settings)
    (note,) = [note for note in gather(root)["notes"] if words in note]
    assert note.startswith(f"{words} a in round 1 (") and " b " not in note and " c " not in note
    assert "did not converge" in parse(write_report(root).read_text()).text
