"""Long work over rows, spread over cores by threads that release the GIL inside gmpy2."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import gmpy2

Progress = Callable[[int, int], None]
"""Called from the calling thread with (items done, items in total)."""

_CHUNK = 64

Item = TypeVar("Item")
Result = TypeVar("Result")


def release_gil() -> None:
    """Let gmpy2 release the GIL in the current thread (its context belongs to the thread)."""
    gmpy2.get_context().allow_release_gil = True


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_chunks(
    work: Callable[[Sequence[Item]], list[Result]],
    items: Sequence[Item],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """Apply ``work`` to chunks of ``items``, in order, and return the joined results.

    Args:
        work: Takes some items and returns one result an item; safe to call from several threads.
        items: All items.
        threads: Number of threads; None takes the cores that this process may use.
        progress: Called after each chunk with the number of finished items.

    Raises:
        ValueError: Fewer than one thread.
    """
    if threads is None:
        threads = available_cores()
    if threads < 1:
        raise ValueError(f"threads must be at least 1, found {threads}")
    size = max(1, min(_CHUNK, -(-len(items) // threads)))
    chunks = [items[k : k + size] for k in range(0, len(items), size)]
    results: list[Result] = []
    if threads == 1 or len(chunks) < 2:
        for chunk in chunks:
            results += work(chunk)
            _tell(progress, len(results), len(items))
        return results
    with ThreadPoolExecutor(threads, initializer=release_gil) as pool:
        for part in pool.map(work, chunks):
            results += part
            _tell(progress, len(results), len(items))
    return results


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
