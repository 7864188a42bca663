"""Data sets, partitions and normalisation."""

from bract.data import tables  # registers its data sets
from bract.data.sources import DATASETS, Dataset, Source

__all__ = ["DATASETS", "Dataset", "Source", "tables"]
