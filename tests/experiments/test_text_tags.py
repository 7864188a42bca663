"""Tags of the texts of defended clients, as the experiment scores them."""

import pytest

from experiments.text_tags import DEFENSES, Setting, row_of

pytest.importorskip("transformers")


@pytest.mark.thorough
def test_tags_are_read_where_adadefense_hides_the_output_layer_s_coordinates() -> None:
    model = "text-decoder(width=128,depth=2,heads=2)"
    setting = Setting(model, 4, "adadefense", DEFENSES["adadefense"])
    row = row_of(setting, 1, "choose", 60.0)
    assert row["recall"] == 1.0
    assert row["tags"] > 0.95
