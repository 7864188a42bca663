"""Encrypted aggregation: the strategies and their phases."""
