"""An error about a guessed description names the options that correct it."""

from __future__ import annotations

from bract.audit.description.confirm import guessed_training
from bract.schema import AppDescription


def test_the_options_of_what_was_guessed_are_named() -> None:
    found = AppDescription.model_validate(
        {
            "training": {"optimizer": "sgd", "batch_size": 32},
            "guessed": {
                "training.optimizer": "a convention",
                "training.batch_size": "a convention",
            },
        }
    )
    assert guessed_training(found) == [
        "--set training.batch_size=VALUE",
        "--set training.momentum=VALUE",
    ]
    assert guessed_training(AppDescription()) == guessed_training(None) == []
