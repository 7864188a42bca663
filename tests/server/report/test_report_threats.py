"""The threat-model card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bract.observation import Observation, ObservationStore, Protocol
from bract.server.report import gather


def answers(facts: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {r["question"]: (r["answer"], r["detail"]) for r in facts["threat_model"]["saw"]}


def test_what_the_protocol_declares_is_seen(make_run) -> None:
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


def test_what_was_not_declared_is_named(make_run, writers) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.capture(root, 1, "a", lr=None, local_steps=None, mean=None)
    saw = answers(gather(root))
    assert saw["Training hyper-parameters"][0] == "partly"
    assert "not declared: lr, local steps" in saw["Training hyper-parameters"][1]
    assert saw["Input normalisation and image shape"][0] == "partly"


def test_a_defense_is_named_with_its_settings(make_run, writers) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.capture(root, 1, "a", defenses=[{"name": "adadefense", "eps": 1e-08}])
    facts = gather(root)
    assert answers(facts)["The defense and its public settings"] == (
        "yes",
        "Adadefense (eps 1e-08).",
    )
    assert "the adaptive tier" in facts["threat_model"]["not_tried"]


def test_encrypted_uploads_are_not_in_the_clear(make_run, writers) -> None:
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


def test_running_statistics_are_seen_only_where_they_came_back(make_run) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    store = ObservationStore(root / "captures")
    weight = {"w": torch.ones(2)}
    buffers = {"bn.running_mean": torch.zeros(2)}

    def capture(**groups: Any) -> str:
        store.save(Observation(1, "a", weight, weight, Protocol(), **groups))
        return answers(gather(root))["Batch-normalisation statistics"][0]

    assert capture(buffers=buffers, returned_buffers=buffers) == "yes"
    assert capture(buffers=buffers) == "no"
    assert "sent its own back" in answers(gather(root))["Batch-normalisation statistics"][1]


def test_attack_families_and_uploads_left_out_are_listed(make_run) -> None:
    root = make_run(rounds=2)
    (root / "audit" / "ig" / "round-0002--client-0.json").unlink()
    not_tried = gather(root)["threat_model"]["not_tried"]
    assert "1 of the 6 captured uploads" in not_tried
    assert "gradient matching through a generator (GRNN)" in not_tried
    assert not any("IG)" in item for item in not_tried)
    assert "the adaptive tier" not in not_tried


def test_a_tier_is_missing_only_where_it_has_something_to_know(make_run, writers) -> None:
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
        ({"attack": "best", "gradient_residual": 0.3}, "GRNN"),
        ({"attack": "best", "gradient_residual": 1e-7}, "IG"),
        ({"attack": "auto", "method": "ig"}, "IG"),
        ({"attack": "auto", "method": "analytic"}, "closed-form"),
        (
            {
                "attack": "auto",
                "method": "best",
                "gradient_residual": 1e-7,
                "settings": {"trials": [{"attack": "best", "loss": 1e-14}]},
            },
            "IG",
        ),
        (
            {
                "attack": "auto",
                "method": "ig",
                "settings": {"trials": [{"attack": "best", "loss": 0.2}]},
            },
            "GRNN",
        ),
    ],
)
def test_best_is_booked_as_what_it_came_down_to(make_run, writers, facts, tried) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.audit(root, 1, "a", **facts)
    families = {"closed-form", "IG", "GRNN"}
    missing = " ".join(gather(root)["threat_model"]["not_tried"])
    names = {"closed-form": "closed-form", "IG": "(DLG, iDLG, IG)", "GRNN": "(GRNN)"}
    found = {name for name in families if names[name] not in missing}
    assert tried in found
    assert ("GRNN" in found) == (tried == "GRNN")
