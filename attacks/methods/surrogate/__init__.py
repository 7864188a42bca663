"""Attackers who trained a generator on public images."""
