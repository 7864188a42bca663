"""What a client does with a message."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from bract.client import keep  # edit 2
from notes_app.task import get_model, load_data
from notes_app.task import test as test_fn
from notes_app.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on this client's notes."""
    model = get_model()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    trainloader, _ = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    trainloader = keep(trainloader, msg, context, folder="truth")  # edit 2
    loss = train_fn(
        model,
        trainloader,
        context.run_config["local-epochs"],
        msg.content["config"]["lr"],
        device,
    )
    metrics = {"train_loss": loss, "num-examples": len(trainloader.dataset)}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on this client's notes."""
    model = get_model()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    _, testloader = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    loss, accuracy = test_fn(model, testloader, device)
    metrics = {"loss": loss, "accuracy": accuracy, "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
