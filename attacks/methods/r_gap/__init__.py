"""Reading one image off a chain of layers, and its equations."""
