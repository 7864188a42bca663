"""The model, the data, and how one is trained on the other."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SMALL = 4
"""Images of partition 0; the other partitions share the rest."""


class Net(nn.Module):
    """Two convolutions and three fully connected layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        """Map images to logits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def digits():
    """Return all images, normalised, and their labels."""
    bundle = load_digits()
    images = torch.tensor(bundle.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, size=(32, 32), mode="bilinear").clamp(0, 1)
    return (images - 0.5) / 0.5, torch.tensor(bundle.target)


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return the loaders of one client: four fifths to train on, the rest to test with."""
    images, labels = digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(42))
    train, test = order[: 4 * len(order) // 5], order[4 * len(order) // 5 :]
    small, rest = train[:SMALL], train[SMALL:]
    mine = small if partition_id == 0 else rest[partition_id - 1 :: num_partitions - 1]
    held_out = test[partition_id::num_partitions]
    trainset = TensorDataset(images[mine], labels[mine])
    testset = TensorDataset(images[held_out], labels[held_out])
    return (
        DataLoader(trainset, batch_size=batch_size, shuffle=True),
        DataLoader(testset, batch_size=batch_size),
    )


def train(net, trainloader, epochs, lr, device):
    """Train the model; return the mean loss."""
    net.to(device).train()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(trainloader))


def test(net, testloader, device):
    """Return mean loss and accuracy."""
    net.to(device).eval()
    total, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in testloader:
            logits = net(images.to(device)).cpu()
            total += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(1) == labels).sum().item()
    return total / len(testloader.dataset), correct / len(testloader.dataset)
