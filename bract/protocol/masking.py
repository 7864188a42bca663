"""The messages of masked sums: keys, shares and survivors of a round, and the masked update.

Everything here passes through the server, which can read all of it but the boxes.

====================  ======================================================================
message type          asks a client
====================  ======================================================================
``query.advertise``   for its keys of the round, and how many examples it trains on
``query.share``       to share its seeds among its neighbours of the roster
``query.open``        to take its neighbours' shares; it names those that are wrong
``train``             for its masked update
``query.agree``       to seal who answered for its neighbours (``consistency``)
``query.unmask``      for one share of each client that it holds shares of
====================  ======================================================================

Input of every reader here is untrusted: any fault in it raises `BractError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from bract.config.encryption import EncryptionConfig
from bract.config.work import MOST_EXAMPLES
from bract.errors import BractError, one_line, shown
from bract.masks.errors import MaskError
from bract.masks.layout import MaskLayout, Words
from bract.masks.party import SHARE_BYTES, Dealt, Parcel
from bract.masks.roster import Roster, Seat
from bract.paillier.exchange import SEALED_BYTES, require_usable
from bract.parse.strict_json import parse_json
from bract.protocol.ciphertexts import (
    BUFFER_BITS,
    BUFFERS,
    HEADER,
    INTEGERS,
    PARAMETERS,
    Shapes,
    check_tensors,
    readable,
    shaped,
    split_floating,
)
from bract.protocol.keyexchange import as_bytes, as_integer, as_list, as_text
from bract.protocol.records import instructions_of
from bract.updates.update import Tensors, flatten

ADVERTISE_TYPE = "query.advertise"
SHARE_TYPE = "query.share"
OPEN_TYPE = "query.open"
AGREE_TYPE = "query.agree"
UNMASK_TYPE = "query.unmask"

LOST_KEY = "lost-sums"
"""Config key: digests of the rosters of earlier sums whose masks the server could not take off."""

STREAMS = {PARAMETERS: 0, BUFFERS: 1, INTEGERS: 2}
"""Number of each vector's masks among those of a seed."""

_MASKS = "masks"
_MOST_HEADER = 1 << 20
_MOST_ROSTER = 100_000
_HASH_BYTES = 32
_BOX_BYTES = 2 * SHARE_BYTES + SEALED_BYTES
_MOST_WHY = 200
"""Characters of a reason why shares are wrong, each of up to four bytes."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Advert:
    """A client's keys of one round: its seat without the weight, and its number of examples.

    ``proof`` shows that it holds their private halves (`bract.masks.party.Party.prove`); empty
    where the message brought no challenge.
    """

    identity: bytes
    box_key: bytes
    mask_key: bytes
    examples: int
    proof: bytes = b""

    def to_content(self) -> RecordDict:
        """Write to the content of a reply."""
        return _content(
            {
                "identity": self.identity,
                "box-key": self.box_key,
                "mask-key": self.mask_key,
                "examples": self.examples,
                "proof": self.proof,
            }
        )

    @classmethod
    def read(cls, content: RecordDict) -> Advert:
        """Read a reply; keys with which nothing can be agreed are refused."""

        def read(fields: Mapping[str, Any]) -> Advert:
            identity, box_key, mask_key = keys = [
                as_bytes(fields[name]) for name in ("identity", "box-key", "mask-key")
            ]
            for key in keys:
                require_usable(key)
            examples, proof = as_integer(fields["examples"]), as_bytes(fields["proof"])
            return cls(identity, box_key, mask_key, examples, proof)

        found = _read(content, "keys", read)
        if not 1 <= found.examples <= MOST_EXAMPLES:
            raise BractError(
                f"claims {found.examples} examples, expected 1 to {MOST_EXAMPLES}",
                code="message-malformed",
            )
        return found


def write_roster(roster: Roster) -> RecordDict:
    """Write the clients of a sum, for each of them."""
    seats = roster.seats
    return _content(
        {
            "session": roster.session,
            "number": roster.number,
            "threshold": roster.threshold,
            "neighbours": roster.neighbours,
            "nodes": [str(seat.node) for seat in seats],
            "identities": [seat.identity for seat in seats],
            "box-keys": [seat.box_key for seat in seats],
            "mask-keys": [seat.mask_key for seat in seats],
            "weights": [seat.weight for seat in seats],
        }
    )


def read_roster(content: RecordDict) -> Roster:
    """Read what `write_roster` wrote."""

    def read(fields: Mapping[str, Any]) -> Roster:
        columns = [
            [kind(value) for value in as_list(fields[name])]
            for name, kind in (
                ("nodes", as_integer),
                ("identities", as_bytes),
                ("box-keys", as_bytes),
                ("mask-keys", as_bytes),
                ("weights", as_integer),
            )
        ]
        if len(columns[0]) > _MOST_ROSTER:
            raise ValueError(f"{len(columns[0])} clients")
        return Roster(
            as_text(fields["session"]),
            as_integer(fields["number"]),
            as_integer(fields["threshold"]),
            as_integer(fields["neighbours"]),
            tuple(Seat(*row) for row in zip(*columns, strict=True)),
        )

    return _read(content, "clients of a masked sum", read)


def write_dealt(dealt: Dealt) -> RecordDict:
    """Write a client's sharing of its seeds."""
    content = write_parcels(dealt.parcels)
    content.config_records[_MASKS]["seed"] = dealt.seed
    return content


def read_dealt(content: RecordDict) -> Dealt:
    """Read what `write_dealt` wrote."""
    parcels = read_parcels(content)
    seed = _read(content, "shares", lambda fields: as_bytes(fields["seed"], _HASH_BYTES))
    return Dealt(seed, parcels)


def write_parcels(parcels: Mapping[int, Parcel]) -> RecordDict:
    """Write parcels by the other party's node id."""
    return _content(
        {
            "nodes": [str(node) for node in parcels],
            "boxes": [parcel.box for parcel in parcels.values()],
            "own": [parcel.own for parcel in parcels.values()],
            "pairs": [parcel.pairs for parcel in parcels.values()],
        }
    )


def read_parcels(content: RecordDict) -> dict[int, Parcel]:
    """Read what `write_parcels` wrote; a client's own parcel has an empty box."""

    def read(fields: Mapping[str, Any]) -> dict[int, Parcel]:
        sizes = {"boxes": (0, _BOX_BYTES), "own": (_HASH_BYTES,), "pairs": (_HASH_BYTES,)}
        columns = [
            [as_bytes(value, *sizes[name]) for value in as_list(fields[name])] for name in sizes
        ]
        rows = zip(_nodes(fields), *columns, strict=True)
        return {node: Parcel(*row) for node, *row in rows}

    return _read(content, "shares", read)


def write_by_node(values: Mapping[int, bytes]) -> RecordDict:
    """Write one value a client: sealed boxes, or shares."""
    return _content({"nodes": [str(n) for n in values], "values": list(values.values())})


def read_by_node(
    content: RecordDict, what: str, *sizes: int, most: int | None = None
) -> dict[int, bytes]:
    """Read what `write_by_node` wrote: values of one of ``sizes``, or of ``most`` bytes at most."""

    def read(fields: Mapping[str, Any]) -> dict[int, bytes]:
        values = [as_bytes(value, *sizes, most=most) for value in as_list(fields["values"])]
        return dict(zip(_nodes(fields), values, strict=True))

    return _read(content, what, read)


def write_refused(refused: Mapping[int, str]) -> RecordDict:
    """Write whose shares are wrong, and why."""
    return write_by_node({n: one_line(why, _MOST_WHY).encode() for n, why in refused.items()})


def read_refused(content: RecordDict) -> dict[int, str]:
    """Read what `write_refused` wrote."""
    found = read_by_node(content, "which shares are wrong", most=4 * _MOST_WHY)
    return {node: one_line(why.decode(errors="replace"), _MOST_WHY) for node, why in found.items()}


def read_lost(content: RecordDict) -> tuple[str, ...]:
    """Return the digests of the rosters whose sums the server states it could not unmask."""
    found = instructions_of(content).get(LOST_KEY, [])
    if not isinstance(found, list) or not all(isinstance(d, str) for d in found):
        raise BractError(
            f"the message's {LOST_KEY} is {shown(found)}, expected digests of rosters",
            code="message-malformed",
        )
    return tuple(map(str, found))


def write_survivors(survivors: tuple[int, ...]) -> RecordDict:
    """Write who answered."""
    return _content({"survivors": [str(node) for node in survivors]})


def read_survivors(content: RecordDict) -> tuple[int, ...]:
    """Read what `write_survivors` wrote."""
    return _read(
        content,
        "who answered",
        lambda fields: tuple(map(as_integer, as_list(fields["survivors"]))),
    )


@dataclass(frozen=True)
class MaskedUpdate:
    """One client's weighted codes under masks.

    Attributes
    ----------
    number, digest
        The round, and the digest of the roster for which it was masked.
    parts
        Bytes of each vector: ``parameters`` and, where the model has any, ``buffers`` and
        ``integers``, its floating point and its integer buffers, as changes.
    shapes
        Names and shapes of the tensors in each vector, in order.
    task
        Digest of the message that it answers, in hexadecimal digits.
    """

    number: int
    digest: str
    parts: dict[str, NDArray[Any]]
    shapes: dict[str, Shapes]
    task: str = ""

    def to_tensors(self) -> Tensors:
        """Write as ``uint8`` tensors: the header, and one for each vector."""
        header = {
            "round": self.number,
            "roster": self.digest,
            "task": self.task,
            "tensors": self.shapes,
        }
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        return {HEADER: text, **{n: torch.from_numpy(data) for n, data in self.parts.items()}}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> MaskedUpdate:
        """Read what `to_tensors` wrote, from an array record or a capture."""
        try:
            header = parse_json(tensors[HEADER].numpy().tobytes(), most=_MOST_HEADER)
            shapes = {
                str(part): tuple((str(n), tuple(map(int, s))) for n, s in listed)
                for part, listed in header["tensors"].items()
            }
            parts = {part: tensors[part].numpy() for part in shapes}
            task = bytes.fromhex(header["task"]).hex()
            found = cls(int(header["round"]), str(header["roster"]), parts, shapes, task)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BractError(
                f"the masked update's header is damaged or missing: {one_line(error, 200)}",
                code="message-malformed",
            ) from None
        if PARAMETERS not in parts or set(parts) - set(STREAMS):
            raise BractError(
                f"masked {one_line(', '.join(parts), 200) or 'nothing'}", code="message-malformed"
            )
        return found


def mask_layout(config: EncryptionConfig, part: str, length: int) -> MaskLayout:
    """Return the layout of one vector; sums in it cannot wrap."""
    clips = {
        PARAMETERS: config.clip,
        BUFFERS: config.buffer_clip,
        INTEGERS: float(2 ** (BUFFER_BITS - 1) - 1),
    }
    return MaskLayout(
        length,
        clips[part],
        config.bits if part == PARAMETERS else BUFFER_BITS,
        config.max_weight_sum,
    )


def encode_update(
    update: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    config: EncryptionConfig,
    weight: int,
) -> tuple[dict[str, Words], dict[str, Shapes], int]:
    """Quantise a client's update and weigh it; nothing is masked yet.

    Parameters
    ----------
    update, buffers
        Differences ``received - local`` of the parameters, and of the buffers.

    Returns
    -------
    tuple of dict, dict and int
        Words and shapes of each vector, and the number of values outside the clip range.
    """
    words, shapes, clipped = {}, {}, 0
    floating, integers = split_floating(buffers)
    for part, tensors in ((PARAMETERS, update), (BUFFERS, floating), (INTEGERS, integers)):
        if not tensors:
            continue
        values = flatten({name: value.to(torch.float64) for name, value in tensors.items()}).numpy()
        with masking():
            words[part], outside = mask_layout(config, part, values.size).encode(values, weight)
        shapes[part] = tuple((name, tuple(value.shape)) for name, value in tensors.items())
        clipped += outside
    return words, shapes, clipped


def check_masked(
    update: MaskedUpdate,
    roster: Roster,
    config: EncryptionConfig,
    model: Mapping[str, torch.Tensor],
) -> None:
    """Refuse a masked update that would spoil the sum.

    Raises
    ------
    BractError
        If it was masked in another round or for other clients, or its tensors or bytes are not
        those of the model and the configuration.
    """
    if update.number != roster.number or update.digest != roster.digest.hex():
        raise BractError(
            f"sent masks of round {update.number} and roster {one_line(update.digest, 16)}, this "
            f"is round {roster.number} and roster {roster.digest.hex()[:16]}",
            code="round-mismatch",
        )
    check_tensors(update.shapes, model, "masked")
    for part, data in update.parts.items():
        length = sum(math.prod(shape) for _, shape in update.shapes[part])
        layout = mask_layout(config, part, length)
        if data.dtype != "uint8" or data.shape != (layout.nbytes,):
            raise BractError(
                f"sent {part} as {data.shape} of {data.dtype}, expected {layout.nbytes} bytes for "
                f"{length} values",
                code="update-refused",
            )


def decode_mean(
    sums: Mapping[str, Words],
    shapes: Mapping[str, Shapes],
    config: EncryptionConfig,
    weight: int,
) -> dict[str, Tensors]:
    """Return the weighted mean of the tensors of each vector, float64, from unmasked sums."""
    with masking():
        return {
            part: shaped(mask_layout(config, part, words.size).decode(words, weight), shapes[part])
            for part, words in sums.items()
        }


@contextmanager
def masking() -> Iterator[None]:
    """Turn what masked sums refuse into errors that the command line prints."""
    try:
        with readable():
            yield
    except MaskError as error:
        raise BractError(one_line(error), code="message-malformed") from error


def _content(fields: Mapping[str, Any]) -> RecordDict:
    return RecordDict({_MASKS: ConfigRecord(dict(fields))})


def _nodes(fields: Mapping[str, Any]) -> list[int]:
    nodes = list(map(as_integer, as_list(fields["nodes"])))
    if len(nodes) > _MOST_ROSTER:
        raise ValueError(f"{len(nodes)} clients")
    return nodes


def _read(content: RecordDict, what: str, read: Callable[[Mapping[str, Any]], _T]) -> _T:
    try:
        with masking():
            return read(content.config_records[_MASKS])
    except BractError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise BractError(
            f"sent no {what} ({one_line(error, 200)})", code="message-malformed"
        ) from error
