"""The arrays of an app's reply that leave without a defense: buffers, and whole numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from bract.client.defenses import DefenseError
from bract.client.layer_buffers import LayerBuffers
from bract.client.received import Reads, checked_names
from bract.protocol.arrays import view_arrays
from bract.protocol.reading import Reading, described, possible_statistics
from bract.protocol.records import BUFFER_ENDINGS
from bract.updates.update import counts_steps, numbered


class Undefended:
    """Which floating arrays of an app's replies are no parameters.

    Parameters
    ----------
    buffers
        Names, last parts of names, or places in a list that the author gives; None: PyTorch's
        running statistics.
    reads
        How the app reads what it receives, where its author declares it.

    Attributes
    ----------
    told
        Whether the author gave any.
    endings
        The names by which layers may hold such arrays.

    Raises
    ------
    BractError
        If ``buffers`` is no list of names.
    """

    def __init__(self, buffers: Sequence[str] | None, reads: Reads | None) -> None:
        self.buffers = BUFFER_ENDINGS if buffers is None else checked_names("buffers", buffers)
        self.declared = buffers is not None
        self._reads = reads
        declared = {name for name in self.buffers if not name.isdigit()}
        # PyTorch's own buffers count beside those that the author names.
        self._names = frozenset(declared and declared | set(BUFFER_ENDINGS))
        self.endings = frozenset(name.rpartition(".")[2] for name in self._names)

    def among(self, reading: Reading, received: Sequence[str], layers: LayerBuffers) -> set[str]:
        """Return which floating arrays of a reply are no parameters, by their names in a reading.

        Parameters
        ----------
        received
            Names of what was sent, in their order.
        layers
            Buffers of the layers that the app made.

        Raises
        ------
        DefenseError
            If a name alone says that an array is no parameter.
        """
        keys = list(reading.keys.values())
        # An app that returns what it received under the same names returns those of the server.
        own = self._reads == "name" or (numbered(received) and not numbered(keys))
        bare = self._named(reading) if own else self._of_layers(reading, layers)
        return {name for name, key in reading.keys.items() if key in bare}

    def _named(self, reading: Reading) -> set[str]:
        """Return the reply's names of floating arrays that are no parameters; they are the app's.

        Raises
        ------
        DefenseError
            If a name of running statistics is given to an array that shows none.
        """
        keys = list(reading.keys.values())
        # Numbers are places in a list; in one of other names they are none.
        declared = [name for name in self.buffers if not name.isdigit() or numbered(keys)]
        named = {key for key in keys if key.rpartition(".")[2] in declared}
        bare = set[str]()
        if self.buffers:
            bare = running_statistics({key: _after(reading, n) for n, key in reading.keys.items()})
        if self.declared:
            # PyTorch's own endings show nothing, also where they are told; whole names do.
            bare |= {key for key in named if key.rpartition(".")[2] not in BUFFER_ENDINGS}
            bare |= {key for key in keys if key in declared}
        if strange := sorted(named - bare):
            raise DefenseError(
                f"DefenseMod: {strange[0]} is named as a running statistic, and is none beside "
                "mean, variance and count of one layer, as BatchNorm's are; give the model's "
                f"buffers by their whole names, DefenseMod(..., buffers={strange[:3]}), or "
                "buffers=[] where it has none; nothing was sent"
            )
        return bare

    def _of_layers(self, reading: Reading, layers: LayerBuffers) -> set[str]:
        """Return the same where the server may have chosen the names: what the app's layers hold.

        Raises
        ------
        DefenseError
            If a name alone says that an array is no parameter.
        """
        keys = list(reading.keys.values())
        places = self.buffers if self._reads == "order" or numbered(keys) else ()
        bare = {key for place, key in enumerate(keys) if str(place) in places}
        for name, key in reading.keys.items():
            value = _after(reading, name)
            named = bool(self._names & {key, key.rpartition(".")[2]})
            if not (named and value.is_floating_point()):
                continue
            if not layers.hold(value, rounded=reading.kind == "delta"):
                raise DefenseError(
                    f"DefenseMod: {key} would leave undefended for its name, and no layer of the "
                    "app holds it. Where the app returns a state that it kept (of the best epoch, "
                    "an average, a file) and looks arrays up by their names, say so: "
                    "DefenseMod(..., reads='name'); where it takes them in their order, give the "
                    "places of its buffers, DefenseMod(..., reads='order', buffers=['4', '5']); or "
                    "buffers=[] where it has none; nothing was sent"
                )
            bare.add(key)
        return bare

    def check_lists(self, records: Mapping[str, ArrayRecord]) -> None:
        """Refuse a list of arrays whose running statistics cannot be distinguished.

        Raises
        ------
        DefenseError
            If two neighbours of one dimension and size may be some, and the author says nothing.
        """
        if self.declared:
            return
        for record in records.values():
            if not numbered(list(record)):
                continue
            if found := possible_statistics(view_arrays(record)):
                raise DefenseError(
                    "DefenseMod: the arrays have numbers for names, and running statistics, to "
                    f"which no noise may be added, may be among {', '.join(found[:8])}; give "
                    "buffers=[] where the model has none, as with LayerNorm and GroupNorm; or "
                    "send ArrayRecord(model.state_dict()) on both sides; or give their numbers, "
                    f"DefenseMod(..., buffers={found[:8]})",
                    code="defense-unsuited",
                )

    def check_covered_by_noise(self, records: Mapping[str, ArrayRecord]) -> None:
        """Refuse arrays that no noise covers: buffers, and whole numbers but a count of steps.

        Raises
        ------
        DefenseError
            If there are any.
        """
        buffers = {*BUFFER_ENDINGS, *self.buffers}
        for key, array in ((k, a) for r in records.values() for k, a in view_arrays(r).items()):
            named = key in buffers or key.rpartition(".")[2] in buffers
            if not named and array.is_floating_point():
                continue
            if not counts_steps(key, array.dtype, array.shape):
                _refuse(key)


def _after(reading: Reading, name: str) -> Tensor:
    """Return what the app holds after training, up to rounding."""
    returned = reading.returned[name]
    return reading.sent[name] + returned if reading.kind == "delta" else returned


def check_covered(reading: Reading, protected: Sequence[str]) -> None:
    """Refuse a reply of which anything that the client changed would leave without noise.

    Whatever exempts an array from a defense, its name or its values, exempts none from max_epsilon.

    Raises
    ------
    DefenseError
        If there is such an array.
    """
    for name, array in reading.returned.items():
        before = reading.sent[name] if reading.kind == "weights" else torch.zeros_like(array)
        if name not in protected and not torch.equal(array, before):
            _refuse(reading.keys[name])


def _refuse(key: str) -> None:
    raise DefenseError(
        f"DefenseMod: this site's policy sets max_epsilon, but {key} would leave without noise;"
        " take a model without buffers, as those of batch normalisation are"
    )


def floating_names(reading: Reading) -> list[str]:
    """Return the names of a reply's floating arrays.

    Raises
    ------
    DefenseError
        If an array is complex, which no defense protects.
    """
    for name, after in reading.returned.items():
        if after.is_complex():
            raise DefenseError(
                f"DefenseMod: {name} is {described(after)}, which no defense protects; nothing was "
                "sent"
            )
    return [name for name, after in reading.returned.items() if after.is_floating_point()]


def running_statistics(arrays: Mapping[str, Tensor]) -> set[str]:
    """Return the names of PyTorch's running statistics: mean, variance and count, side by side.

    Names alone do not show them: of an app that returns arrays under the names that it received the
    server chooses these. The count is a whole number that the app made, so the two before it are
    its layer's; and no variance is below 0, as some values of a trained weight or bias are.
    """
    names = list(arrays)
    found: set[str] = set()
    for group in zip(names, names[1:], names[2:], strict=False):
        layer = group[0].rpartition(".")[0]
        own = tuple(f"{layer}.{ending}" if layer else ending for ending in BUFFER_ENDINGS)
        mean, variance, count = (arrays[name] for name in group)
        vectors = mean.dim() == variance.dim() == 1 and mean.shape == variance.shape
        counted = count.dim() == 0 and not count.is_floating_point()
        if group == own and vectors and counted and not bool((variance < 0.0).any()):
            found |= set(group)
    return found


def check_integers(reading: Reading) -> None:
    """Refuse whole numbers that changed and are no single count: no defense protects them.

    A server that sends parameters as whole numbers would have them back bare of an app that
    returns what it trained in the type that it received.
    """
    for name, after in reading.returned.items():
        if after.is_floating_point() or after.is_complex() or after.numel() <= 1:
            continue
        before = reading.sent[name] if reading.kind == "weights" else torch.zeros_like(after)
        # An average turned whole numbers into floating ones on the way.
        if not torch.equal(before.double(), after.double()):
            raise DefenseError(
                f"DefenseMod: {name} holds whole numbers and came back changed, which no defense "
                "protects; nothing was sent"
            )
