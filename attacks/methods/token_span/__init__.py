"""Tokens of a language model from the subspaces that its gradients span."""
