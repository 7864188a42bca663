"""Attacks of papers that match gradients, for comparison: none is in bract's default audit."""
