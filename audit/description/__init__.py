"""Infer the description of an app from its captures, and check one against them."""
