"""Data sets, partitions and normalisation."""

from bract.data.partition import partition_indices
from bract.data.sources import DATASETS, Source, open_source
from bract.data.views import ClientData, DataSpec, client_data, data_spec, test_data

__all__ = [
    "DATASETS",
    "ClientData",
    "DataSpec",
    "Source",
    "client_data",
    "data_spec",
    "open_source",
    "partition_indices",
    "test_data",
]
