"""Attacks with a generator trained on public images."""
