"""Maui: features from the gradient of a head, then images from features."""
