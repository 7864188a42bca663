"""Data sets, partitions and normalisation."""

import sys

from bract.data.sources import DATASETS, Dataset, Source
from bract.registry import import_modules

__all__ = ["DATASETS", "Dataset", "Source"]

import_modules(sys.modules[__name__])
