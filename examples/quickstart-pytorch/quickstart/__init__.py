"""A Flower app in the shape of the one that `flwr new` makes for PyTorch."""
