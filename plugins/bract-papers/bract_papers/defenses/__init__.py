"""Defenses of papers, to compare others with: a client imports these modules alone."""
