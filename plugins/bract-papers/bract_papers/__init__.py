"""Attacks and defenses of papers, for comparison: none is in bract's default audit."""
