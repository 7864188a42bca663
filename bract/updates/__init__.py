"""Updates: the named tensors that a client trains, and how they follow from its steps."""
