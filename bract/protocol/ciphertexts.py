"""Encrypted updates on the wire: tensors to vectors of ciphertexts, and back to their mean.

An encrypted update holds up to three vectors: ``parameters`` and, where the model has any,
``buffers`` and ``integers``, its floating point and its integer buffers. Each holds differences
``received - local``. Integers have steps of one, so their mean is exact and rounds to an integer.

One array record carries it: ``header`` (JSON as ``uint8``: key id, layout and weight of each
vector, and names and shapes of the tensors in order) and one ``uint8`` matrix for each vector. With
a threshold a second record may hold the ``n``-th powers of each vector's ciphertexts
(`bract.paillier.stripping`), which spares the server most of its work; it is neither captured nor
kept, since any party can compute it.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from bract.config.encryption import EncryptionConfig
from bract.errors import BractError, one_line
from bract.paillier import (
    Layout,
    PaillierError,
    PrivateKey,
    PublicKey,
    decrypt,
    encrypt,
    weighted_sum,
)
from bract.paillier.cipher import CipherVector
from bract.paillier.stripping import combine_powers, encrypt_with_powers
from bract.parse.strict_json import parse_json
from bract.process.logs import log_progress
from bract.updates.update import Tensors, apply_update, flatten, unflatten

_log = logging.getLogger(__name__)

PARAMETERS = "parameters"
BUFFERS = "buffers"
INTEGERS = "integers"
HEADER = "header"

BUFFER_BITS = 32
"""Bits of a buffer's code: buffers are few, and span more than an update does."""

_MOST_HEADER = 1 << 20
"""Bytes of the header of an update of some ten thousand tensors."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class EncryptedUpdate:
    """One client's encrypted update, or a weighted sum of several.

    Attributes
    ----------
    vectors
        Ciphertexts under ``parameters``, ``buffers`` and ``integers``.
    shapes
        Names and shapes of the tensors in each vector, in order.
    powers
        The ``n``-th powers of the ciphertexts of each vector, of the same names; or empty.
    """

    vectors: dict[str, CipherVector]
    shapes: dict[str, Shapes]
    powers: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def to_tensors(self) -> Tensors:
        """Write as ``uint8`` tensors: the header and one matrix for each vector."""
        header = {
            part: {"vector": vector.header(), "tensors": self.shapes[part]}
            for part, vector in self.vectors.items()
        }
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        data = {part: torch.from_numpy(vector.data) for part, vector in self.vectors.items()}
        return {HEADER: text, **data}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> EncryptedUpdate:
        """Read what `to_tensors` wrote, from an array record or a capture."""
        with readable():
            try:
                header = parse_json(tensors[HEADER].numpy().tobytes(), most=_MOST_HEADER)
                vectors, shapes = {}, {}
                for part, fields in header.items():
                    data = tensors[part].numpy()
                    vectors[part] = CipherVector.from_header(fields["vector"], data)
                    shapes[part] = tuple((str(n), tuple(map(int, s))) for n, s in fields["tensors"])
            except (ArithmeticError, AttributeError, BractError, LookupError) as error:
                raise BractError(_damaged(error), code="message-malformed") from None
            except (TypeError, ValueError) as error:
                if isinstance(error, PaillierError):
                    raise
                raise BractError(_damaged(error), code="message-malformed") from None
            if PARAMETERS not in vectors or set(vectors) - {PARAMETERS, BUFFERS, INTEGERS}:
                raise BractError(
                    f"the ciphertexts hold {one_line(', '.join(vectors), 200) or 'nothing'}",
                    code="message-malformed",
                )
        update = cls(vectors, shapes)
        for part, vector in vectors.items():
            length = sum(math.prod(shape) for _, shape in shapes[part])
            if length != vector.layout.length:
                raise BractError(
                    f"the ciphertexts of {part} hold {vector.layout.length} values, "
                    f"their tensors {length}",
                    code="message-malformed",
                )
        return update

    @property
    def key_id(self) -> str:
        """Identity of the key, the same for every vector."""
        return self.vectors[PARAMETERS].key_id


def _damaged(error: Exception) -> str:
    return f"the ciphertexts' header is damaged or missing: {one_line(error, 200)}"


def plan_layout(config: EncryptionConfig, part: str, length: int) -> Layout:
    """Return the layout of one vector; slots of it cannot overflow."""
    clips = {
        PARAMETERS: config.clip,
        BUFFERS: config.buffer_clip,
        INTEGERS: float(2 ** (BUFFER_BITS - 1) - 1),
    }
    with readable():
        return Layout(
            length=length,
            clip=clips[part],
            bits=config.bits if part == PARAMETERS else BUFFER_BITS,
            max_weight=config.max_weight_sum,
            key_bits=config.key_bits,
            degree=config.degree,
        )


def check_plan(
    update: EncryptedUpdate,
    config: EncryptionConfig,
    model: Mapping[str, torch.Tensor],
) -> None:
    """Refuse ciphertexts whose headers differ from what the run's configuration plans.

    Parameters
    ----------
    model
        The run's model, whose tensors have to be there, all of them.
    """
    check_tensors(update.shapes, model, "encrypted")
    for part, vector in update.vectors.items():
        if vector.randomness != config.randomness:
            raise BractError(
                f"encrypted {part} with {vector.randomness} randomness, this run's is "
                f"{config.randomness}",
                code="update-refused",
            )
        layout = plan_layout(config, part, vector.layout.length)
        if vector.layout != layout:
            raise BractError(
                f"encrypted {part} with layout {vector.layout.to_fields()}; this run has "
                f"{layout.to_fields()}",
                code="update-refused",
            )


def check_tensors(
    shapes: Mapping[str, Shapes], model: Mapping[str, torch.Tensor], did: str
) -> None:
    """Refuse vectors that hold not each tensor of the model once, in its shape.

    Parameters
    ----------
    did
        What was done to them, for the error.
    """
    wanted = Counter((name, tuple(value.shape)) for name, value in model.items())
    found = Counter(pair for listed in shapes.values() for pair in listed)
    if wrong := sorted({name for name, _ in (found - wanted) | (wanted - found)}):
        raise BractError(
            f"{did} other tensors than the model has: {one_line(', '.join(wrong[:5]), 200)}",
            code="update-refused",
        )


def encrypt_update(
    key: PublicKey | PrivateKey,
    update: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    config: EncryptionConfig,
) -> tuple[EncryptedUpdate, int]:
    """Quantise, pack and encrypt a client's update.

    Parameters
    ----------
    update, buffers
        Differences ``received - local`` of the parameters, and of the buffers.

    Returns
    -------
    tuple of EncryptedUpdate and int
        The ciphertexts, and the number of values outside the clip range.
    """
    vectors, shapes, powers, clipped = {}, {}, {}, 0
    floating, integers = split_floating(buffers)
    for part, tensors in ((PARAMETERS, update), (BUFFERS, floating), (INTEGERS, integers)):
        if not tensors:
            continue
        values = flatten({name: value.to(torch.float64) for name, value in tensors.items()}).numpy()
        layout = plan_layout(config, part, values.size)
        progress = log_progress(_log, f"encrypting {part}")
        with readable():
            if config.sends_powers and isinstance(key, PublicKey):
                vectors[part], powers[part], outside = encrypt_with_powers(
                    key, values, layout, progress=progress
                )
            else:
                vectors[part], outside = encrypt(
                    key, values, layout, randomness=config.randomness, progress=progress
                )
        shapes[part] = tuple((name, tuple(value.shape)) for name, value in tensors.items())
        clipped += outside
    return EncryptedUpdate(vectors, shapes, powers), clipped


def combine_updates(
    key: PublicKey, updates: Sequence[EncryptedUpdate], weights: Sequence[int]
) -> EncryptedUpdate:
    """Return the encryption of ``sum_i weights[i] * updates[i]``, from the public key alone.

    It has powers of the vectors of which every update that counts brings them.
    """
    first = updates[0]
    with readable():
        vectors = {
            part: weighted_sum(
                key,
                [update.vectors[part] for update in updates],
                weights,
                progress=log_progress(_log, f"adding {part}"),
            )
            for part in first.vectors
        }
        used = [(u, w) for u, w in zip(updates, weights, strict=True) if w]
        powers = {
            part: combine_powers(
                key, vector.layout, [u.powers[part] for u, _ in used], [w for _, w in used]
            )
            for part, vector in vectors.items()
            if all(part in u.powers for u, _ in used)
        }
    return EncryptedUpdate(vectors, first.shapes, powers)


def decrypt_mean(key: PrivateKey, update: EncryptedUpdate) -> dict[str, Tensors]:
    """Return the weighted mean of the tensors of each vector, float64."""
    with readable():
        return {
            part: shaped(
                decrypt(key, vector, progress=log_progress(_log, f"decrypting {part}")),
                update.shapes[part],
            )
            for part, vector in update.vectors.items()
        }


def shaped(values: np.typing.NDArray[np.float64], shapes: Shapes) -> Tensors:
    """Cut decrypted values ``(length,)`` into named tensors."""
    return unflatten(
        torch.from_numpy(values),
        {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes},
    )


def apply_mean(model: Mapping[str, torch.Tensor], mean: dict[str, Tensors], lr: float) -> Tensors:
    """Return ``model`` after one aggregate: ``w - lr * mean`` and ``buffer - mean``, rounded."""
    moved: Tensors = {}
    for part, tensors in mean.items():
        own = {name: model[name] for name in tensors if name in model}
        wrong = [n for n, v in tensors.items() if n not in own or own[n].shape != v.shape]
        if wrong:
            raise BractError(
                f"the aggregate does not fit this model: {one_line(', '.join(wrong[:5]), 200)}",
                code="model-mismatch",
            )
        if part == INTEGERS:
            exact = {name: value.double() for name, value in own.items()}
            rounded = apply_update(exact, tensors, 1.0)
            moved |= {name: v.round().to(own[name].dtype) for name, v in rounded.items()}
        else:
            moved |= apply_update(own, tensors, lr if part == PARAMETERS else 1.0)
    return {name: moved.get(name, value) for name, value in model.items()}


def split_floating(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """Split tensors into floating point ones and the others."""
    floating = {name: value for name, value in tensors.items() if value.is_floating_point()}
    return floating, {name: value for name, value in tensors.items() if name not in floating}


@contextmanager
def readable() -> Iterator[None]:
    """Turn what the encryption refuses into errors that the command line prints."""
    try:
        yield
    except (PaillierError, FileExistsError) as error:
        raise BractError(one_line(error), code="message-malformed") from error
