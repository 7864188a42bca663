"""Canaries through the client app: what it trains on, sends and keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import load_file

from bract.client import app as client_app
from bract.config import build_config, dump_config
from bract.data.views import client_data, data_spec
from bract.installed import release
from bract.models import create_model
from bract.protocol.arrays import from_arrays, to_arrays
from bract.protocol.records import ARRAYS, CONFIG, ROUND_KEY, UPDATE, VERSION_KEY
from bract.server.loopback import LoopbackGrid
from bract.updates.canaries import canary_directions, canary_projections
from bract.updates.update import flatten


def trained(folder: Path, *, rounds: int = 2, policy: str = "canaries: 8", **changes: Any) -> Any:
    """Ask one client for so many rounds; return the configuration and its replies."""
    config = build_config(
        {
            "clients": 1,
            "rounds": rounds,
            "data": {
                "image_size": 8,
                "validation": 0.5,
                "partition": {"kind": "sizes", "sizes": [40]},
            },
            "model": {"name": "lenet-strided", "activation": "relu"},
            "canaries": {"count": 8, "kind": "update"},
            **changes,
        }
    )
    (folder / "policy.yaml").write_text(policy)
    node: dict[str, bool | float | int | str] = {
        "partition-id": 0,
        "truth-dir": str(folder / "truth"),
        "state-dir": str(folder / "state"),
        "policy": str(folder / "policy.yaml"),
    }
    grid = LoopbackGrid(client_app.app, [node], {"federation": dump_config(config)}, run_id=5)
    spec = data_spec(config.data)
    torch.manual_seed(0)
    model = create_model(
        "lenet-strided", classes=spec.classes, channels=1, image_size=8, activation="relu"
    )
    replies = []
    for number in range(1, rounds + 1):
        settings = ConfigRecord({ROUND_KEY: number, VERSION_KEY: release()})
        content = RecordDict({ARRAYS: to_arrays(model.state_dict()), CONFIG: settings})
        (reply,) = grid.send_and_receive([grid.create_message(content, "train", 1, "")])
        assert not reply.has_error(), reply.error
        replies.append(reply)
    return config, replies


def test_a_canary_update_is_clipped_and_noised_like_any_other(tmp_path: Path) -> None:
    config, replies = trained(tmp_path, defenses=[{"name": "noise", "std": 1e-3, "clip": 2.0}])
    coins = load_file(tmp_path / "truth" / "canaries.safetensors")["included"]
    assert coins.shape == (2, 8)
    for number, reply in enumerate(replies, start=1):
        vector = flatten(from_arrays(reply.content[UPDATE]))
        directions = canary_directions(
            len(vector), 8, seed=config.seed, client="client-0", number=number
        )
        found = canary_projections(directions, vector, 8)
        signs = coins[number - 1].double() * 2 - 1
        torch.testing.assert_close(found, signs * 2.0 / 8**0.5, atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", ["mislabelled", "random"])
def test_included_records_are_trained_on_and_are_no_candidates(kind: str, tmp_path: Path) -> None:
    config, _ = trained(tmp_path, canaries={"count": 8, "kind": kind})
    coins = load_file(tmp_path / "truth" / "canaries.safetensors")
    included = coins["images"][coins["included"].bool()]
    truth = load_file(tmp_path / "truth" / "round-0001.safetensors")
    used = {image.numpy().tobytes() for image in truth["images"]}
    assert {image.numpy().tobytes() for image in included} <= used
    assert len(truth["images"]) == 20 + len(included)
    candidates = load_file(tmp_path / "truth" / "candidates.safetensors")
    data = client_data(config, 0)
    members = candidates["images"][candidates["first_round"] == 1]
    own = {image.numpy().tobytes() for image in data.images}
    assert {image.numpy().tobytes() for image in members} == own
    held_out = 12 if kind == "mislabelled" else 20
    assert int((candidates["first_round"] == 0).sum()) == held_out


def test_without_the_site_s_word_training_goes_on_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "plain").mkdir()
    _, refused = trained(tmp_path / "without", policy="canaries: 7")
    _, plain = trained(tmp_path / "plain", canaries={"count": 0})
    assert not (tmp_path / "without" / "truth" / "canaries.safetensors").exists()
    for one, other in zip(refused, plain, strict=True):
        torch.testing.assert_close(
            flatten(from_arrays(one.content[UPDATE])), flatten(from_arrays(other.content[UPDATE]))
        )
