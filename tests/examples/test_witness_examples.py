"""Trainings under a witness: each is the same with it, and confirmed from what it saw."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from environments import ROOT
from flwr.app import ConfigRecord, RecordDict
from refusals import refused
from torch import nn

from bract import Observation, ObservationStore
from bract.cli.describe import describe_app
from bract.rundir import RunDirectory
from bract.schema import AppDescription, ClientDeclaration, Work, read_work

EXAMPLE = ROOT / "examples" / "witness"
HERE = "test_witness_examples"
LABELS = torch.arange(8) * 7 % 10


def example() -> Any:
    spec = importlib.util.spec_from_file_location("witness_trainings", EXAMPLE / "trainings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(96, 10)
    )


def language() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"vocab_size": 60, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(
        **size, **still, bos_token_id=0, eos_token_id=0, pad_token_id=0, tie_word_embeddings=False
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def run(
    train: Callable[..., None],
    model: nn.Module,
    data: tuple[Any, ...],
    client: int,
    truth: Path | None,
) -> None:
    node = {} if truth is None else {"truth-dir": str(truth)}
    context = SimpleNamespace(node_id=client, run_id=1, node_config=node, state=RecordDict())
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    torch.manual_seed(1)
    train(model, *data, SimpleNamespace(content=content), context)


def trained(folder: Path, name: str) -> Work:
    """Train two clients under a witness, each as without it, and capture what they send."""
    train, make = getattr(example(), name), language if name == "trainer" else net
    store = ObservationStore(folder / "captures")
    for client in range(2):
        generator = torch.Generator().manual_seed(client)
        images = torch.rand(8, 1, 8, 8, generator=generator)
        images[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
        texts = torch.randint(3, 60, (4, 12), generator=generator)
        data: tuple[Any, ...] = (images, LABELS)
        if name == "trainer":
            data = (texts, str(folder / "trainer"))
        own, alone = make(), make()
        before = {n: v.detach().clone() for n, v in own.named_parameters()}
        run(train, own, data, client, folder / "truth")
        run(train, alone, data, client, None)
        assert all(torch.equal(v, alone.state_dict()[n]) for n, v in own.state_dict().items())
        store.save(
            Observation(
                round=1,
                client=f"node-{client}",
                parameters=before,
                buffers={},
                update={n: before[n] - v.detach() for n, v in own.named_parameters()},
                returned_buffers={},
                declaration=ClientDeclaration(num_examples=4 if name == "trainer" else 8),
            )
        )
    return read_work(next((folder / "truth").rglob("node-0/*.work.json")))


def described(folder: Path, model: str = "net", **options: Any) -> AppDescription:
    describe_app(folder, {}, model=f"{HERE}:{model}", truth=folder / "truth" / "1", **options)
    found = RunDirectory(folder).description()
    assert found is not None
    return found


CONFIRMED: dict[str, dict[str, Any]] = {
    "plain_loop": {"momentum": 0.9, "batch_size": 4, "local_epochs": 1},
    "dict_batches": {"label_smoothing": 0.1, "optimizer": "adam", "local_epochs": 1},
    "mixed_up": {"soft_targets": True, "momentum": 0.9, "local_epochs": 1},
    "as_lightning": {"betas": (0.8, 0.99), "max_grad_norm": 0.5, "optimizer": "adamw"},
    "own_loader": {"local_epochs": 2, "batch_size": 8},
    "compiled": {"batch_size": 4, "local_epochs": 1},
}


@pytest.mark.parametrize("name", CONFIRMED)
def test_a_training_is_the_same_under_a_witness_and_confirmed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, name)
    work = described(tmp_path).training.model_dump()
    said = capsys.readouterr().err
    assert "2 of 2" in said, said
    for key, value in CONFIRMED[name].items():
        assert work[key] == pytest.approx(value), key


@pytest.mark.thorough
def test_transformers_trainer_is_the_same_under_a_witness_and_confirmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, "trainer")
    work = described(tmp_path, "language").training
    assert "2 of 2" in capsys.readouterr().err
    assert work.optimizer == "adamw" and work.lr_factors == pytest.approx((1.0, 0.5))
    assert work.max_grad_norm is not None


def test_mixed_precision_is_the_same_under_a_witness_and_right_up_to_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = trained(tmp_path, "mixed_precision")
    assert work.autocast == "bfloat16" and work.terms[0].scale == 1.0 and not work.remainder
    assert described(tmp_path).training.max_grad_norm == 0.5
    said = capsys.readouterr().err
    assert "2 of 2" in said or "bfloat16" in said, said


def test_two_optimizers_are_the_same_under_a_witness_and_named(tmp_path: Path) -> None:
    work = trained(tmp_path, "two_optimizers")
    assert {one.name for one in work.optimizers} == {"SGD", "Adam"}
    with refused("declaration-wrong", "2 optimizers", "Adam", "SGD"):
        described(tmp_path)


def test_the_readme_lists_every_training() -> None:
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    written = re.findall(r"^def ([a-z]\w*)\(", (EXAMPLE / "trainings.py").read_text(), re.MULTILINE)
    assert re.findall(r"^\| `(\w+)`", page, re.MULTILINE) == written
