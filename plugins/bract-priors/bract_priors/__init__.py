"""Generators trained on public images, and attacks that search them."""
