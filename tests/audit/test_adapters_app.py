"""A third-party app in the shape of FlowerTune: low-rank adapters of a causal language model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import nn

from bract import Observation, ObservationStore
from bract.audit.audit import Audit
from bract.cli.describe import describe_app
from bract.client import keep
from bract.config.config import AuditRequest
from bract.report import write_report
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.updates.update import difference

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

MODEL = "test_adapters_app:adapted"
VOCABULARY, LENGTH = 150, 12
TEXT = [7, 93, 21, 140, 66, 34, 118, 52, 9, 77, 101, 45]


def adapted() -> nn.Module:
    """As the app makes it: a small GPT-2 with random weights, of which adapters are trained."""
    torch.manual_seed(4)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    base = transformers.GPT2LMHeadModel(config)
    lora = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True
    )
    found: nn.Module = peft.get_peft_model(base, lora)
    return found


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    found = peft.get_peft_model_state_dict(model)
    return {name: value.detach().clone() for name, value in found.items()}


def train(model: nn.Module, loader: Any, lr: float) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def batch(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """As a collator for causal language models makes it."""
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def captured(folder: Path) -> None:
    """Capture one client in rounds one and two; only adapters go to and fro."""
    model, lr = adapted(), 2.0
    for number in (1, 2):
        before = state(model)
        content = RecordDict({"config": ConfigRecord({"server-round": number})})
        context: Any = SimpleNamespace(node_id=7, run_id=1, node_config={}, state=RecordDict())
        message: Any = SimpleNamespace(content=content)
        train(model, keep([batch([TEXT])], message, context, folder=folder / "truth"), lr)
        ObservationStore(folder / "captures").save(
            Observation(
                round=number,
                client="node-7",
                parameters=before,
                buffers={},
                update=difference(before, state(model)),
                returned_buffers={},
                declaration=ClientDeclaration(num_examples=1, batch_size=1, local_steps=1, lr=lr),
            )
        )


def test_adapters_alone_go_from_two_edits_to_a_scored_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    captured(tmp_path)
    describe_app(
        tmp_path, {"training.optimizer": "sgd"}, model=MODEL, truth=tmp_path / "truth" / "1"
    )
    run = RunDirectory(tmp_path)
    described = run.description()
    assert described is not None and described.input.text is not None
    assert described.input.text.task == "language-model"
    assert all(".default." in name for name in described.names.values()) and described.names
    request = AuditRequest(
        attacks=["token-span"],
        device="cpu",
        models=frozenset({MODEL}),
        truth=tmp_path / "truth" / "1",
        seconds=20.0,
    )
    audit = Audit(run, request)
    first, second = audit.execute(audit.plan())
    # Nothing reaches A in the first round, while B is zero.
    assert first.refused is not None and "adapters it is until" in first.refused
    assert second.refused is None
    write_report(tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    (observation,) = (o for o in report["observations"] if o["round"] == 2)
    assert observation["signals"]["truth_check"]["cosine"] > 1 - 1e-5
    assert observation["images"][0]["scores"]["features"] > 0.7
