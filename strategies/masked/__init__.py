"""Masked sums: the strategies and their phases."""
