"""Splits of the training data over clients; uneven ones by flwr-datasets' partitioners."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from bract.config.config import (
    DirichletPartition,
    IidPartition,
    Partition,
    ShardsPartition,
    SizesPartition,
)
from bract.errors import BractError, one_line, shown


def partition_indices(
    labels: Tensor, partition: Partition, *, clients: int, client: int, seed: int
) -> list[int]:
    """Return the indices of one client's examples; see `Partitions` for those of every one."""
    return Partitions(labels, partition, clients=clients, seed=seed).indices(client)


class Partitions:
    """The training data, split over all clients: drawn once, read client by client.

    The same labels, partition and seed give disjoint parts for ``client`` in 0..clients-1.

    Parameters
    ----------
    labels
        int64 ``(N,)``, the labels of the whole training split; ``(N, T)`` of tokens.
    """

    def __init__(self, labels: Tensor, partition: Partition, *, clients: int, seed: int) -> None:
        if clients > len(labels):
            raise BractError(
                f"clients: {shown(clients)} clients for {len(labels)} training examples; "
                "lower clients or use more data",
                code="data-partition",
            )
        self._clients, self._count = clients, len(labels)
        order = np.random.default_rng(seed).permutation(len(labels))
        self._order = order
        self._starts: list[int] | None = None
        self._partitioner: Any = None
        if isinstance(partition, SizesPartition):
            if sum(partition.sizes) > len(labels):
                raise BractError(
                    f"data.partition.sizes adds up to {shown(sum(partition.sizes))}, "
                    f"but there are {len(labels)} training examples",
                    code="data-partition",
                )
            self._starts = [0, *accumulate(partition.sizes)]
            return
        if isinstance(partition, IidPartition):
            # The parts of flwr-datasets' IidPartitioner, without the memory of its imports.
            each, more = divmod(len(labels), clients)
            self._starts = [client * each + min(client, more) for client in range(clients + 1)]
            return

        if labels.dim() > 1:
            raise BractError(
                f"data.partition.kind is {partition.kind}, which splits by the label of each "
                "example; every token has a label here: set iid or sizes",
                code="config-conflict",
            )
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        self._partitioner = _partitioner(partition, clients, seed)
        self._partitioner.dataset = Dataset.from_dict(
            {"index": order, "label": labels.numpy()[order]}
        )

    def indices(self, client: int) -> list[int]:
        """Return the indices of one client's examples."""
        if not 0 <= client < self._clients:
            raise BractError(
                f"partition-id {shown(client)} is outside 0..{self._clients - 1} "
                f"(clients: {self._clients})",
                code="data-partition",
            )
        if self._starts is not None:
            start, end = self._starts[client : client + 2]
            return [int(i) for i in self._order[start:end]]
        try:
            part = self._partitioner.load_partition(client)
        except (ArithmeticError, LookupError, ValueError) as error:
            # flwr-datasets divides by the size of a shard, which is 0 where there are too many.
            raise BractError(
                f"data.partition: cannot split {self._count} examples over {self._clients} clients "
                f"({one_line(error, 200)}); ask for fewer clients or shards, or a larger alpha",
                code="data-partition",
            ) from error
        return [int(i) for i in part["index"]]


def _partitioner(partition: DirichletPartition | ShardsPartition, clients: int, seed: int) -> Any:
    from flwr_datasets.partitioner import DirichletPartitioner, ShardPartitioner

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
