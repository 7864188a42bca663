"""Runs at a SuperLink on another machine: submit, follow, stop."""
