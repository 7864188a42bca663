from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bract.audit.questions.membership import rounds
from bract.audit.questions.membership.blind import blind_score
from bract.errors import BractError
from experiments.harness.rows import send_rows


def test_rows_have_a_blind_score_though_a_feature_is_one_value() -> None:
    sent = send_rows("wine", 40, seed=0)
    members = np.arange(40) % 2 == 0
    found = blind_score(sent.truth.images, sent.truth.labels, members, seed=0)
    assert 0.0 <= found.auc <= 1.0 and 0.0 <= found.chance <= 1.0


def test_a_model_of_numbers_is_refused_by_its_loss() -> None:
    capture: Any = SimpleNamespace(
        declaration=send_rows("diabetes", 2, seed=0).captured.declaration
    )
    scorer: Any = SimpleNamespace()
    with pytest.raises(BractError, match="loss 'mse' is declared; membership"):
        rounds.Scorer._open(scorer, capture)
