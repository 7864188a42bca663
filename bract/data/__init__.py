"""Data sets, partitions and normalisation."""

from bract.data.partition import Partitions, partition_indices
from bract.data.sources import DATASETS, Dataset, Source, open_source
from bract.data.views import ClientData, DataSpec, client_data, data_spec, test_data

__all__ = [
    "DATASETS",
    "ClientData",
    "DataSpec",
    "Dataset",
    "Partitions",
    "Source",
    "client_data",
    "data_spec",
    "open_source",
    "partition_indices",
    "test_data",
]
