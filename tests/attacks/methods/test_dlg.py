from typing import Any

import pytest

from bract.attacks import Budget
from bract.scores import psnr
from bract_papers.dlg import DLG, IDLG


@pytest.mark.parametrize("attack", [DLG(), IDLG()])
def test_a_digit_and_its_label_are_recovered(observe: Any, tiny: Any, attack: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    found = attack(
        observe(images, labels, init="uniform"), budget=Budget(iterations=60, restarts=2)
    )
    assert found.labels.tolist() == labels.tolist()
    assert float(psnr(found.images, images)[0]) > 20
