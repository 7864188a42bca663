from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited import request_of

from bract.attacks.membership.view import losses, scaled_confidence
from bract.audit.audit import Audit
from bract.audit.questions.membership.blind import blind_score
from bract.config.text import TextSchema
from bract.data.tokens import as_example
from bract.inputs.text import Texts
from bract.models.losses import loss_of
from bract.report import write_report
from bract.schema.membership import MembershipAnswer
from experiments.harness.rows import send_rows
from experiments.membership import Setting, federation


def test_rows_have_a_blind_score_though_a_feature_is_one_value() -> None:
    sent = send_rows("wine", 40, seed=0)
    members = np.arange(40) % 2 == 0
    found = blind_score(sent.truth.images, sent.truth.labels, members, seed=0)
    assert 0.0 <= found.auc <= 1.0 and 0.0 <= found.chance <= 1.0


def kept(input_name: str, **settings: Any) -> Setting:
    settings |= {"images": 20, "held_out": 24, "rounds": 2, "epochs": 1, "final": True}
    return Setting("test", input=input_name, **settings)


SETTINGS = {
    "classes of rows": kept("table", data="breast-cancer", model="mlp-100"),
    "numbers of rows": kept("table", data="diabetes", model="mlp-100", lr=0.01),
    "labels of texts": kept("text", data="clinical-notes", model="text-encoder(width=16, depth=1)"),
    "next tokens": kept(
        "text",
        data="clinical-notes",
        model="text-decoder(width=16, depth=1)",
        section='{"text": {"task": "language-model"}}',
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_and_texts_are_scored_from_captures_to_the_page(name: str, tmp_path: Path) -> None:
    run, _ = federation(SETTINGS[name], tmp_path / "run")
    audit = Audit(run, request_of(run.root, {"questions": ["membership"], "device": "cpu"}))
    (answer,) = audit.execute(audit.plan())
    assert isinstance(answer, MembershipAnswer)
    assert answer.input == SETTINGS[name].input and not answer.left_out
    assert [(c.members, c.non_members) for c in answer.clients] == [(20, 24)] * 3
    over = {s.attacker: s.auc for s in answer.clients[0].scores if s.round is None}
    assert {"loss", "fedmia-loss", "rmia", "lira", "combined"} <= set(over)
    assert (over["gradient-regression"] or 0.0) > 0.55
    public = next(c for c in answer.models if c.observer == "public")
    assert {"stacked", "lira-shadow", "rmia-shadow"} <= {s.attacker for s in public.scores}
    classes = {"classes of rows", "labels of texts"}
    assert [s.attribute for s in answer.clients[0].shares] == ["class"] * (name in classes) + [
        "sex"
    ] * (name == "numbers of rows")
    assert "Who was in it" in write_report(run.root).read_text()


def test_a_text_s_features_count_its_tokens() -> None:
    schema = TextSchema(vocabulary=1000, length=4)
    found = Texts(schema).features(as_example(torch.tensor([[7, 7, 9, 0], [513, 1, 2, 3]]), schema))
    assert found[0, [0, 7, 9]].tolist() == [1.0, 2.0, 1.0] and found[0].sum() == 4.0
    assert found[1, :4].tolist() == [0.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["mse", "language_model", "binary_cross_entropy_logits"])
def test_each_loss_is_that_of_training(kind: str) -> None:
    outputs, labels = torch.randn(3, 5, 1).abs(), (torch.rand(5) > 0.5).float()
    found = losses(outputs, labels, kind)
    assert found.shape == (3, 5) and found.dtype == torch.float64
    mean = loss_of(kind).mean(outputs[1].double(), labels)
    torch.testing.assert_close(found[1].mean(), mean)
    confidence = scaled_confidence(outputs, labels, kind)
    p = (-found).exp()
    torch.testing.assert_close(confidence, p.log() - (1 - p).log())
