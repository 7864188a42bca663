"""Data sets, partitions and normalisation."""

from bract.data.sources import DATASETS, Dataset, Source

__all__ = ["DATASETS", "Dataset", "Source"]
