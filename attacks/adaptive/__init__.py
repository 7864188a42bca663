"""Attackers that know the defense and its hyper-parameters: a file or a folder each."""
