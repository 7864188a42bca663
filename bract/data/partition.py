"""Splits of the training data over clients, by flwr-datasets' partitioners."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from bract.config import (
    DirichletPartition,
    IidPartition,
    Partition,
    ShardsPartition,
    SizesPartition,
)
from bract.errors import BractError


def partition_indices(
    labels: Tensor, partition: Partition, *, clients: int, client: int, seed: int
) -> list[int]:
    """Return the indices of one client's examples.

    The same labels, partition and seed give disjoint parts for ``client`` in 0..clients-1.

    Parameters
    ----------
    labels
        int64 ``(N,)``, the labels of the whole training split.

    Raises
    ------
    BractError
        If there are more clients than examples, or the partition cannot be drawn.
    """
    if clients > len(labels):
        raise BractError(
            f"clients: {clients} clients for {len(labels)} training examples; "
            "lower clients or use more data"
        )
    if not 0 <= client < clients:
        raise BractError(f"partition-id {client} is outside 0..{clients - 1} (clients: {clients})")
    rng = np.random.default_rng(seed)
    if isinstance(partition, SizesPartition):
        if sum(partition.sizes) > len(labels):
            raise BractError(
                f"data.partition.sizes adds up to {sum(partition.sizes)}, "
                f"but there are {len(labels)} training examples"
            )
        start = sum(partition.sizes[:client])
        order = rng.permutation(len(labels))
        return [int(i) for i in order[start : start + partition.sizes[client]]]

    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    order = rng.permutation(len(labels))
    shuffled = Dataset.from_dict({"index": order, "label": labels.numpy()[order]})
    partitioner = _partitioner(partition, clients, seed)
    partitioner.dataset = shuffled
    try:
        part = partitioner.load_partition(client)
    except ValueError as error:
        raise BractError(
            f"data.partition: cannot split {len(labels)} examples over {clients} clients "
            f"({' '.join(str(error).split())})"
        ) from error
    return [int(i) for i in part["index"]]


def _partitioner(
    partition: IidPartition | DirichletPartition | ShardsPartition, clients: int, seed: int
) -> Any:
    from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, ShardPartitioner

    if isinstance(partition, IidPartition):
        return IidPartitioner(num_partitions=clients)
    if isinstance(partition, DirichletPartition):
        return DirichletPartitioner(
            num_partitions=clients,
            partition_by="label",
            alpha=partition.alpha,
            min_partition_size=partition.min_examples,
            self_balancing=False,
            seed=seed,
        )
    return ShardPartitioner(
        num_partitions=clients,
        partition_by="label",
        num_shards_per_partition=partition.shards_per_client,
        seed=seed,
    )
