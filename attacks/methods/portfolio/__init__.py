"""Choices among attacks."""
