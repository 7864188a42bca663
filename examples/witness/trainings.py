"""Trainings in the shapes that apps have, each under a witness.

Each function is the training of one message at one client. The witness keeps what it sees in the
folder that `truth-dir` of the client's node config names, and sees nothing without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bract.client import witness


def plain_loop(net: nn.Module, images: Tensor, labels: Tensor, msg: Any, context: Any) -> None:
    """Train by a loop over a DataLoader."""
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with witness(net, msg, context):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()


class _Findings(Dataset[dict[str, Tensor]]):
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = torch.tensor(1000 + index)
        return {"number": number, "image": self.images[index], "finding": self.labels[index]}


def dict_batches(net: nn.Module, images: Tensor, labels: Tensor, msg: Any, context: Any) -> None:
    """Train on batches that are dictionaries, with smoothed labels."""
    loader = DataLoader(_Findings(images, labels), batch_size=4)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    with witness(net, msg, context):
        for batch in loader:
            optimizer.zero_grad()
            criterion(net(batch["image"]), batch["finding"]).backward()
            optimizer.step()


def mixed_up(net: nn.Module, images: Tensor, labels: Tensor, msg: Any, context: Any) -> None:
    """Train with mixup, which mixes two examples and their losses alike."""
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    shares = torch.distributions.Beta(0.4, 0.4)
    with witness(net, msg, context):
        for x, y in loader:
            share = float(shares.sample())
            optimizer.zero_grad()
            outputs = net(share * x + (1 - share) * x.flip(0))
            loss = share * F.cross_entropy(outputs, y)
            (loss + (1 - share) * F.cross_entropy(outputs, y.flip(0))).backward()
            optimizer.step()


class _Module(nn.Module):
    """A module that trains itself, as Lightning's do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.8, 0.99))
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)


class _Trainer:
    """A trainer that runs each step in the optimizer's closure, as Lightning's does."""

    def __init__(self, gradient_clip_val: float) -> None:
        self.clip = gradient_clip_val

    def fit(self, module: _Module, loader: Any) -> None:
        optimizer, schedule = module.configure_optimizers()
        module.train()
        for batch in loader:

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = module.training_step(batch)
                loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), self.clip)
                return loss

            optimizer.step(closure)
            schedule.step()


def as_lightning(net: nn.Module, images: Tensor, labels: Tensor, msg: Any, context: Any) -> None:
    """Train by a call of a trainer in the form of Lightning's."""
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    with witness(net, msg, context):
        _Trainer(gradient_clip_val=0.5).fit(_Module(net), loader)


class _Batches:
    """Batches of a loader that is not PyTorch's, as fastai's."""

    def __init__(self, images: Tensor, labels: Tensor, bs: int) -> None:
        self.items, self.bs = (images, labels), bs

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self.items
        yield from zip(images.split(self.bs), labels.split(self.bs), strict=True)


def own_loader(net: nn.Module, images: Tensor, labels: Tensor, msg: Any, context: Any) -> None:
    """Train two epochs from a loader of another library."""
    batches = _Batches(images, labels, bs=len(images))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with witness(net, msg, context):
        for _ in range(2):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()


def mixed_precision(net: nn.Module, images: Tensor, labels: Tensor, msg: Any, context: Any) -> None:
    """Train by autocast and a scaler of gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with witness(net, msg, context):
        for x, y in zip(images.split(4), labels.split(4), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()


def compiled(net: nn.Module, images: Tensor, labels: Tensor, msg: Any, context: Any) -> None:
    """Train a compiled model: the witness takes what `torch.compile` returned."""
    model: Any = torch.compile(net, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with witness(model, msg, context):
        for x, y in zip(images.split(4), labels.split(4), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def two_optimizers(net: Any, images: Tensor, labels: Tensor, msg: Any, context: Any) -> None:
    """Train the body and the head by optimizers of their own, which no attack simulates."""
    body = torch.optim.SGD(net[:-1].parameters(), lr=0.05)
    head = torch.optim.Adam(net[-1].parameters(), lr=1e-3)
    with witness(net, msg, context):
        for x, y in zip(images.split(4), labels.split(4), strict=True):
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()
            body.step()
            head.step()


def trainer(net: Any, texts: Tensor, folder: str, msg: Any, context: Any) -> None:
    """Train by `transformers.Trainer`, with its schedule and its clipping."""
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data: Any = [{"input_ids": text, "labels": text} for text in texts]
    with witness(net, msg, context):
        Trainer(model=net, args=settings, train_dataset=data).train()
