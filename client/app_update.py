"""The update in the reply of an app that `DefenseMod` knows nothing of: what, taken from what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, RecordDict

from bract.client.defenses import DefenseError
from bract.client.held import Began, Held, holding
from bract.client.layer_buffers import LayerBuffers, layer_buffers
from bract.client.received import (
    Reads,
    base_of,
    check_pairs,
    check_untied,
    checked_names,
    checked_reads,
    checked_ties,
    tie,
    tied_arrays,
)
from bract.client.undefended import Undefended, check_covered, check_integers, floating_names
from bract.errors import BractError, shown
from bract.protocol.arrays import view_arrays
from bract.protocol.reading import Reading, checked_kind, described, read
from bract.protocol.records import BUFFER_ENDINGS, to_arrays
from bract.schema.capture import UpdateKind
from bract.updates.update import Tensors


@dataclass(frozen=True)
class Watched:
    """An app's layers and parameters, as they were seen while it trained."""

    layers: LayerBuffers
    held: Held


@dataclass(frozen=True)
class AppUpdate:
    """The update of one reply.

    Attributes
    ----------
    reading
        The reply beside what was sent; ``sent`` is what the update is taken from.
    names
        The arrays to protect.
    tied
        Those of them that are one tensor under a second name: each later name, and the first.
    """

    reading: Reading
    names: list[str]
    tied: Mapping[str, str]

    def tensors(self) -> Tensors:
        """Return the update, each tensor once."""
        return self.reading.update([name for name in self.names if name not in self.tied])

    def write(self, content: RecordDict, protected: Tensors) -> None:
        """Put a protected update in the place of the reply's own."""
        # One draw of noise for one tensor: else its names would differ from here on.
        every = {name: protected[self.tied.get(name, name)] for name in self.names}
        written = to_arrays(self.reading.returning(every))
        arrays = dict(content.array_records[self.reading.record])
        arrays |= {self.reading.keys[name]: array for name, array in written.items()}
        content[self.reading.record] = ArrayRecord(arrays)


class AppAsDeclared:
    """An app as its author declares it; the parameters are those of `DefenseMod`.

    Raises
    ------
    BractError
        If one is none of the values that it may have.
    """

    def __init__(
        self,
        *,
        buffers: Sequence[str] | None,
        update: UpdateKind | None,
        record: str | None,
        reads: Reads | None,
        keeps: Sequence[str],
        tied: Sequence[Sequence[str]],
        seen: bool,
    ) -> None:
        self._kind = checked_kind("DefenseMod", update)
        self._record = record
        self._reads = checked_reads(reads)
        self._undefended = Undefended(buffers, self._reads)
        self._keeps = checked_names("keeps", keeps)
        self._tied = checked_ties(tied)
        self._seen = _checked_seen(seen)

    def check_message(self, sent: Mapping[str, ArrayRecord], *, bounded: bool, first: bool) -> None:
        """Refuse a train message before the app sees it.

        Parameters
        ----------
        bounded
            Whether the site bounds epsilon.
        first
            Whether the message is of the first round, or may be.

        Raises
        ------
        DefenseError
            If its sender could choose what the update is taken from, or no noise would cover it.
        """
        base_of(sent, self._record)
        if bounded:
            self._undefended.check_covered_by_noise(sent)
        if first:
            self._undefended.check_lists(sent)

    @contextmanager
    def watching(self, sent: Mapping[str, ArrayRecord]) -> Iterator[Watched]:
        """Watch an app that is handed these arrays; those of tied names become one value."""
        tie(sent.values(), self._tied)
        base = base_of(sent, self._record)
        received = {n: v for record in base.values() for n, v in view_arrays(record).items()}
        endings = self._undefended.endings
        named = any(name.rpartition(".")[2] in endings for name in received)
        with ExitStack() as stack:
            layers = stack.enter_context(layer_buffers(endings))
            # Copied and unpickled models are not made layer by layer, and gone at the end.
            look = layers.look if named else None
            yield Watched(layers, stack.enter_context(holding(received, first_step=look)))

    def update_in(
        self,
        content: RecordDict,
        sent: Mapping[str, ArrayRecord],
        watched: Watched,
        *,
        bounded: bool,
    ) -> AppUpdate | None:
        """Return the update in a reply; None where it holds no arrays.

        Parameters
        ----------
        sent
            What the app was handed.
        bounded
            Whether the site bounds epsilon: then no refusal may depend on the data, and noise
            covers an update whatever it is taken from.

        Raises
        ------
        DefenseError
            If there is anything in it that no defense would protect, or the server could choose
            what the update is taken from.
        """
        replied = content.array_records
        if not replied:
            return None
        if len(replied) != 1:
            raise DefenseError(
                f"DefenseMod: the reply holds {len(replied)} array records "
                f"({', '.join(replied)}), expected one; nothing was sent"
            )
        if bounded:
            self._undefended.check_covered_by_noise(replied)
        self._undefended.check_lists(replied)
        base = base_of(sent, self._record)
        seen = self._seen and not bounded
        # The values of the parameters show what came back, and tell a server less than a refusal.
        compare = not bounded and not (seen and watched.held.stepped)
        reading = self._read(base, content, compare=compare)
        check_integers(reading)
        received = [name for record in base.values() for name in record]
        bare = self._undefended.among(reading, received, watched.layers)
        names = [name for name in floating_names(reading) if name not in bare]
        tied: Mapping[str, str] = tied_arrays(reading, names, self._tied)
        if bounded:
            check_covered(reading, names)
        if seen and reading.kind != "gradient":
            began = watched.held.check(reading, names, bare)
            if began.loose:
                self._read(base, content, compare=True)
                self._check_pairs(received, reading, replied)
                if reading.kind == "weights":
                    check_untied(reading, [n for n in began.loose if n not in tied])
            tied_names = {*tied, *tied.values()}
            tied = {n: one for n, one in began.tied.items() if not tied_names & {n, one}} | dict(
                tied
            )
            _start(reading, names, began)
        else:
            self._check_pairs(received, reading, replied)
            if reading.kind == "weights" and not bounded:
                check_untied(reading, [name for name in names if name not in tied])
        self._check_types(reading, names)
        if not names:
            raise DefenseError("DefenseMod: the reply holds no floating arrays to protect")
        return AppUpdate(reading, names, tied)

    def _read(
        self, base: Mapping[str, ArrayRecord], content: RecordDict, *, compare: bool
    ) -> Reading:
        try:
            reading = read(base, content, update=self._kind, compare=compare)
        except BractError as error:
            raise DefenseError(f"DefenseMod: {error}; nothing was sent", code=error.code) from None
        if reading.extra:
            raise DefenseError(
                f"DefenseMod: the app returned {', '.join(list(reading.extra)[:5])}, which it did "
                "not receive, so there is no update to protect; nothing was sent"
            )
        return reading

    def _check_pairs(
        self, received: Sequence[str], reading: Reading, replied: Mapping[str, ArrayRecord]
    ) -> None:
        if reading.kind == "weights":
            returned = list(replied[reading.record])
            check_pairs(received, returned, reading, self._reads, self._keeps)

    def _check_types(self, reading: Reading, names: Sequence[str]) -> None:
        """Refuse arrays that came back in another type than they were received in."""
        for name in names:
            before, after = reading.sent[name], reading.returned[name]
            if (before.dtype, after.dtype) == (torch.float64, torch.float32):
                # A server that averages in float64; the app trained what it read of that.
                reading.sent[name] = before.to(after.dtype)
            elif before.dtype != after.dtype:
                raise DefenseError(
                    f"DefenseMod: {name} was received as {described(before)} and returned as "
                    f"{described(after)}; nothing was sent"
                )
        wide = [name for name in names if reading.returned[name].dtype == torch.float64]
        if wide and len(wide) < len(names) and not self._undefended.declared:
            raise DefenseError(
                f"DefenseMod: {wide[0]} is float64 and other arrays are not, as an averaged "
                "integer buffer is; give the buffers, such as "
                f"buffers={[wide[0].rpartition('.')[2], *BUFFER_ENDINGS]}, or the endings alone "
                "where it is a parameter; nothing was sent"
            )


def _start(reading: Reading, names: Sequence[str], began: Began) -> None:
    """Take the update of each array from what its parameter held, in the type that came back."""
    for name in names:
        if name in began.parameters:
            returned = reading.returned[name].dtype
            reading.sent[name] = began.base(name, reading.sent[name], returned)


def _checked_seen(seen: object) -> bool:
    if isinstance(seen, bool):
        return seen
    raise BractError(
        f"DefenseMod: seen is {shown(seen)}, expected True, or False where the app trains without "
        "an optimizer of PyTorch's in this process",
        code="config-value",
    )
