"""A Flower app in the shape of the one for transformers, with made-up notes."""
