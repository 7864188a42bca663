"""The attacks: a file or a folder each."""
