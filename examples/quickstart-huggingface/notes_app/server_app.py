"""What the server does in a run."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from bract.server import HonestButCurious  # edit 1
from notes_app.task import get_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds."""
    strategy = FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"])
    strategy = HonestButCurious(strategy, store="captures")  # edit 1
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_model().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
    )
