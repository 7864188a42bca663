"""What a client keeps for a membership audit."""

from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from bract.client import keep
from bract.client.candidates import keep_candidates


def records(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.arange(20 * 4, dtype=torch.float32).reshape(20, 1, 2, 2) / 80
    return images[first:last], torch.arange(20)[first:last] % 10


def found(folder: Path) -> list[tuple[int, int]]:
    content = load_file(folder / "candidates.safetensors")
    order = (content["images"][:, 0, 0, 0] * 20).round().long()
    return sorted(zip(order.tolist(), content["first_round"].tolist(), strict=True))


def test_members_are_added_in_the_round_that_first_trains_on_them(tmp_path: Path) -> None:
    keep_candidates(tmp_path, 1, 1, records(0, 3), records(10, 14))
    keep_candidates(tmp_path, 1, 2, records(1, 5), records(10, 14))
    members = [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]
    assert found(tmp_path) == [*members, *((i, 0) for i in range(10, 14))]
    path = tmp_path / "candidates.safetensors"
    assert path.stat().st_mode & 0o777 == 0o600
    keep_candidates(tmp_path, 2, 1, records(7, 8), records(10, 14))
    assert found(tmp_path) == [(7, 1), *((i, 0) for i in range(10, 14))]


def test_without_held_out_records_nothing_is_kept(tmp_path: Path) -> None:
    keep_candidates(tmp_path, 1, 1, records(0, 3), records(0, 0))
    assert not list(tmp_path.iterdir())


def test_an_app_s_loader_of_held_out_records_is_kept_beside_its_members(
    tmp_path: Path,
) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
    config = ConfigRecord({"server-round": 2, "lr": 0.1})
    message = Message(RecordDict({"config": config}), dst_node_id=7, message_type="train")
    context = Context(1, 7, {}, RecordDict(), {})
    list(keep([records(0, 5)], message, context, tmp_path, held_out=[records(10, 14)]))
    content = load_file(tmp_path / "1" / "node-7" / "candidates.safetensors")
    assert content["first_round"].tolist() == [0] * 4 + [2] * 5
    assert torch.equal(content["inputs"], torch.cat([records(10, 14)[0], records(0, 5)[0]]))
