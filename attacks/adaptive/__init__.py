"""Attackers that know the defense and its hyper-parameters."""
