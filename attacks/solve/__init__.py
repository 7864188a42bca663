"""Solve matching problems."""
