"""The threat-model card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reporting import gather

from bract.protocol.observation import ClientDeclaration, Observation, ObservationStore
from bract.report import write_report

FAMILIES = (
    "closed-form",
    "over pixels",
    "through a generator",
    "batch statistics",
    "public images",
)


def answers(facts: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {r["question"]: (r["answer"], r["detail"]) for r in facts["threat_model"]["saw"]}


def test_what_the_protocol_declares_is_seen(make_run: Any) -> None:
    saw = answers(gather(make_run(rounds=1)))
    assert saw["Training hyper-parameters"] == (
        "yes",
        "Algorithm fedavg; optimizer sgd; lr 0.1; local steps 54; batch size 8; num examples 430.",
    )
    assert saw["Each client's update in the clear"][0] == "yes"
    assert saw["Input normalisation and image shape"] == (
        "yes",
        "Declared; image shape 1×32×32.",
    )
    assert saw["The defense and its public settings"][0] == "no"
    assert saw["Labels of the training images"][0] == "no"


def test_a_proximal_term_is_shown_where_one_is_declared(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.capture(root, 1, "a", proximal_mu=0.25)
    answer, detail = answers(gather(root))["Training hyper-parameters"]
    assert answer == "yes"
    assert detail.endswith("proximal mu 0.25.")


def test_what_was_not_declared_is_named(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.capture(root, 1, "a", lr=None, local_steps=None, mean=None)
    saw = answers(gather(root))
    assert saw["Training hyper-parameters"][0] == "partly"
    assert "not declared: lr, local steps" in saw["Training hyper-parameters"][1]
    assert saw["Input normalisation and image shape"][0] == "partly"


def test_a_defense_is_named_with_its_settings(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.capture(root, 1, "a", defenses=[{"name": "adadefense", "eps": 1e-08}])
    facts = gather(root)
    assert answers(facts)["The defense and its public settings"] == (
        "yes",
        "Adadefense (eps 1e-08).",
    )
    assert "the adaptive tier" in facts["threat_model"]["not_tried"]


def test_encrypted_uploads_are_not_in_the_clear(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a", "b"], rounds=1, audit=False)
    writers.capture(root, 1, "a", encryption="paillier")
    saw = answers(gather(root))
    assert saw["Each client's update in the clear"] == (
        "partly",
        "1 of 2 uploads were encrypted.",
    )
    writers.capture(root, 1, "b", encryption="paillier")
    saw = answers(gather(root))
    assert saw["Each client's update in the clear"][0] == "no"


def test_running_statistics_are_seen_only_where_they_came_back(make_run: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    store = ObservationStore(root / "captures")
    weight = {"w": torch.ones(2)}
    buffers = {"bn.running_mean": torch.zeros(2)}

    def capture(**groups: Any) -> str:
        store.save(Observation(1, "a", weight, weight, ClientDeclaration(), **groups))
        return answers(gather(root))["Batch-normalisation statistics"][0]

    assert capture(buffers=buffers, returned_buffers=buffers) == "yes"
    assert capture(buffers=buffers) == "no"
    assert "sent its own back" in answers(gather(root))["Batch-normalisation statistics"][1]


def test_attack_families_and_uploads_left_out_are_listed(make_run: Any) -> None:
    root = make_run(rounds=2)
    (root / "audit" / "ig" / "round-0002--client-0.json").unlink()
    not_tried = gather(root)["threat_model"]["not_tried"]
    assert "1 of the 6 captured uploads" in not_tried
    assert any("through a generator (GRNN" in item for item in not_tried)
    assert not any("over pixels" in item for item in not_tried)
    assert "the adaptive tier" not in not_tried


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
    assert note.startswith("The secret numbers of noise at a come from a torch generator")
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
