"""The model, the notes, and how one is trained on the other."""

import random
from pathlib import Path

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
)

TOKENIZER = Path(__file__).parent / "tokenizer"
BATCH_SIZE = 32
LONGEST = 24
NOTES = 400
SMALL = 4
"""Notes of partition 0; the other partitions share the rest."""

FIRST = "Ada Boris Chloe Dario Elena Farid Greta Hugo Ines Jonas Kira Luca Mina Nils Olga Pavel"
LAST = "Abel Brandt Costa Dietz Ekman Fabre Gomez Hansen Ivanov Jansen Keller Lopez Meyer Novak"
TOWNS = "Bergen Cadiz Delft Essen Faro Ghent Hull Izmir Jena Kiel Lyon Malmo Nice Oslo Porto"
CALM = [
    "came for a check and felt well",
    "slept well and asked for no change",
    "walks daily without pain",
]
URGENT = [
    "came with chest pain at night",
    "fell twice and could not stand",
    "was short of breath since morning",
]


def make_notes():
    """Return made-up notes with label 1 where they are urgent; they describe no real person."""
    draw = random.Random(7)
    notes = []
    for _ in range(NOTES):
        label = draw.randrange(2)
        name = f"{draw.choice(FIRST.split())} {draw.choice(LAST.split())}"
        what = draw.choice(URGENT if label else CALM)
        number = f"{draw.randrange(1000, 10000)}"
        notes.append((f"{name} of {draw.choice(TOWNS.split())}, file {number}, {what}.", label))
    return notes


def get_tokenizer():
    """Read the tokenizer from its folder."""
    return AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)


def get_model():
    """Return a BERT of the tiny shape; its random weights are the same at every party."""
    torch.manual_seed(0)
    tokenizer = get_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=2,
    )
    return AutoModelForSequenceClassification.from_config(config)


def load_data(partition_id: int, num_partitions: int):
    """Return the loaders of one client: four fifths to train on, the rest to test with."""
    tokenizer = get_tokenizer()
    rows = []
    for text, label in make_notes():
        encoded = tokenizer(text, truncation=True, max_length=LONGEST)
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": label})
    train, test = rows[: 4 * len(rows) // 5], rows[4 * len(rows) // 5 :]
    small, rest = train[:SMALL], train[SMALL:]
    mine = small if partition_id == 0 else rest[partition_id - 1 :: num_partitions - 1]
    collate = DataCollatorWithPadding(tokenizer=tokenizer)
    return (
        DataLoader(mine, shuffle=True, batch_size=BATCH_SIZE, collate_fn=collate),
        DataLoader(test[partition_id::num_partitions], batch_size=BATCH_SIZE, collate_fn=collate),
    )


def train(net, trainloader, epochs, lr, device):
    """Train the model; return the mean loss."""
    net.to(device).train()
    optimizer = AdamW(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for batch in trainloader:
            batch = {name: value.to(device) for name, value in batch.items()}
            loss = net(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
    return total / (epochs * len(trainloader))


def test(net, testloader, device):
    """Return mean loss and accuracy."""
    net.to(device).eval()
    total, correct = 0.0, 0
    with torch.no_grad():
        for batch in testloader:
            batch = {name: value.to(device) for name, value in batch.items()}
            outputs = net(**batch)
            total += outputs.loss.item() * len(batch["labels"])
            correct += (outputs.logits.argmax(dim=-1) == batch["labels"]).sum().item()
    return total / len(testloader.dataset), correct / len(testloader.dataset)
