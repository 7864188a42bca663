"""An app of Flower's older API, and the small model that all apps of this folder train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bract import HonestButCurious
from bract.client import keep

CLIENTS = 2

SEEN: list[np.ndarray[Any, Any]] = []
"""The arrays of the last aggregate."""


class Net(nn.Module):
    """One hidden layer, whose bias gives an image away."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.out(torch.sigmoid(self.hidden(images.flatten(1))))
        return hidden


def digits(client: int) -> DataLoader[Any]:
    found = load_digits()
    images = torch.tensor(found.images[client : client + 1], dtype=torch.float32)[:, None] / 16
    return DataLoader(TensorDataset(images, torch.tensor(found.target[client : client + 1])))


def step(net: nn.Module, loader: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


def weights(net: nn.Module) -> list[np.ndarray[Any, Any]]:
    return [value.numpy().copy() for value in net.state_dict().values()]


class Client(NumPyClient):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def fit(self, parameters: Any, config: Any) -> Any:
        net = Net()
        names = net.state_dict()
        net.load_state_dict({n: torch.tensor(a) for n, a in zip(names, parameters, strict=True)})
        step(net, self.loader)
        return weights(net), 1, {"loss": 0.5, "note": "a text"}


class Remembering(FedAvg):
    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        found = super().aggregate_fit(server_round, results, failures)
        SEEN[:] = [] if found[0] is None else parameters_to_ndarrays(found[0])
        return found


def client_app(truth: Path | None, mods: Sequence[Any] = ()) -> ClientApp:
    def client_fn(context: Context) -> Any:
        loader: Any = digits(int(context.node_config["partition-id"]))
        if truth is not None:
            loader = keep(loader, None, context, folder=truth)
        return Client(loader).to_client()

    return ClientApp(client_fn=client_fn, mods=list(mods))


def remembering() -> Remembering:
    torch.manual_seed(3)
    return Remembering(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=CLIENTS,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters(weights(Net())),
    )


def server_app(wrap: Callable[[FedAvg], Any]) -> ServerApp:
    def server_fn(context: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=wrap(remembering()), config=ServerConfig(num_rounds=2))

    return ServerApp(server_fn=server_fn)


def main() -> None:
    """Serve on a port, or take part: ``server ADDRESS STORE`` or ``client ADDRESS NUMBER``."""
    role, address, what = sys.argv[1:]
    if role == "server":
        from flwr.server import start_server

        strategy: Any = HonestButCurious(remembering(), store=what)
        config = ServerConfig(num_rounds=2)
        start_server(server_address=address, config=config, strategy=strategy)
    else:
        from flwr.client import start_client

        start_client(server_address=address, client=Client(digits(int(what))).to_client())


if __name__ == "__main__":
    main()
