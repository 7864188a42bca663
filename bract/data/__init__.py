"""Data sets, partitions and normalisation."""
