"""Parsers of messages: replies to train, evaluate and query messages, and what clients are sent."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fuzz.files import CONFIG_VALUES, DECLARATION, plain
from fuzz.mutations import damaged, garbage, mangled, text_of
from fuzz.outcome import Parser
from hypothesis import strategies as st

from bract import ObservationStore
from bract.client.encrypted.sharing import join_partials, partials_of
from bract.config.encryption import EncryptionConfig
from bract.errors import BractError
from bract.paillier import Layout, deal, encrypt, partial_decrypt
from bract.paillier.exchange import make_identity
from bract.paillier.stripping import strip_messages
from bract.protocol import node_names
from bract.protocol.arrays import from_arrays, to_arrays
from bract.protocol.ciphertexts import EncryptedUpdate
from bract.protocol.fused import answer_fused, read_scores
from bract.protocol.keyexchange import (
    KEY_BOX,
    Hello,
    box_keys,
    open_key_box,
    read_dealt,
    read_recipients,
    write_dealt,
    write_key_box,
    write_recipients,
)
from bract.protocol.partials import SealedPartials, open_bundle, seal_partials, write_bundle
from bract.protocol.records import read_final
from bract.schema import ClientDeclaration
from bract.schema.capture import MISSED
from bract.server.capturing import CapturePlan
from bract.server.loopback import LoopbackGrid
from bract.server.recorder import Recorder
from bract.strategies import FedAvg
from bract.strategies.encrypted.validation import check_ciphertexts
from bract.strategies.scores import usable_column

SENT = {"fc.weight": torch.ones(2, 2), "bn.running_mean": torch.zeros(2)}
CHANGED = {"fc.weight": torch.full((2, 2), 0.25)}

Records = dict[str, tuple[type, dict[str, Any]]]


def array(data: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array(dtype="float32", shape=(2, 2), stype=stype, data=data)


def numpy_header(text: str, version: bytes = b"\x01\x00") -> bytes:
    body = text.encode() + b"\n"
    size = len(body).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + body


@functools.cache
def odd_arrays() -> list[Array]:
    kinds = ("f4", "f8", "f2", "i8", "u1", "b1", "c8", "U3", "M8[s]", ">f4", "u8", "u2", "V4")
    values = [np.zeros((2, 2), kind) for kind in kinds]
    shapes = [
        np.zeros(shape, np.float32) for shape in ((), (0,), (0, 2), (2,), (2, 2, 1), (1,) * 40)
    ]
    special = [np.full((2, 2), value, np.float32) for value in (np.nan, np.inf, 1e38, -1e38, 1e-45)]
    headers = [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f4', 'fortran_order': 1, 'shape': (True,)}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 5000 + ")}",
        "(" * 3000,
        "-" * 8000 + "1",
        "'" + "a" * 60_000,
    ]
    found = [Array(value) for value in (*values, *shapes, *special)]
    found += [array(numpy_header(text)) for text in headers]
    found += [array(numpy_header(headers[0], version)) for version in (b"\x02\x00", b"\x03\x00")]
    return [*found, array(b""), array(b"PK\x03\x04"), array(Array(special[0]).data, "pickle")]


@st.composite
def arrays(draw: Any) -> Any:
    """Draw one array as it may arrive: whole, odd, mangled or garbage."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(st.sampled_from(odd_arrays()))
    if kind == 1:
        return array(draw(garbage()))
    whole = draw(st.sampled_from(odd_arrays()))
    return array(draw(mangled([whole.data])), draw(st.sampled_from(["numpy.ndarray"] * 9 + ["x"])))


NAMES = ["x", "", "\n", "fc.weight", "fc.bias", "x" * 5000, "\u202e", "../x", "num-examples"]


@st.composite
def contents(draw: Any, valid: list[Records]) -> Any:
    """Draw the content of a message with up to three records or values changed."""
    records = {
        name: (kind, dict(values)) for name, (kind, values) in draw(st.sampled_from(valid)).items()
    }
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2, 3]))):
        name = draw(st.sampled_from([*records, "x"]))
        operation = draw(st.integers(0, 9))
        if operation == 0:
            records.pop(name, None)
        elif operation == 1:
            kind = draw(st.sampled_from([ArrayRecord, MetricRecord, ConfigRecord]))
            records[name] = (kind, {})
        elif operation == 2 and name in records:
            records[draw(st.sampled_from(NAMES))] = records[name]
        elif name in records:
            kind, values = records[name]
            key = draw(st.sampled_from([*values, *NAMES[:2]] if operation > 3 else NAMES))
            if operation == 4:
                values.pop(key, None)
            else:
                values[key] = _value(draw, kind, values.get(key))
    return build(records)


def _value(draw: Any, kind: type, old: object) -> Any:
    if kind is ArrayRecord:
        return draw(arrays())
    if isinstance(old, bytes) and draw(st.booleans()):
        return draw(mangled([old]))
    if isinstance(old, list) and old and draw(st.booleans()):
        new = list(old)
        at = draw(st.integers(0, len(new) - 1))
        if isinstance(new[at], bytes):
            new[at] = draw(mangled([new[at]]))
        elif isinstance(new[at], str):
            new[at] = draw(_texts(new[at]))
        return draw(st.sampled_from([new, new[:-1], new + new[:1], new[::-1]]))
    if isinstance(old, str) and draw(st.booleans()):
        return draw(_texts(old))
    return draw(st.sampled_from(CONFIG_VALUES))


def _texts(old: str) -> st.SearchStrategy[str]:
    """Draw text in the place of another; where that was JSON, damaged JSON."""
    found = st.one_of(st.text(max_size=30), st.sampled_from([old + old, old[:-1], old * 400]))
    try:
        document = json.loads(old)
    except (ValueError, RecursionError):
        return found
    return st.one_of(found, damaged([document]).map(text_of))


def build(records: Records) -> RecordDict:
    """Make Flower's records, without the values that they cannot carry."""
    content = RecordDict()
    for name, (kind, values) in records.items():
        record = kind()
        for key, value in values.items():
            try:
                record[key] = value
            except (TypeError, ValueError):
                continue
        content[name] = record
    return content


def parts(content: RecordDict) -> Records:
    return {name: (type(record), dict(record.items())) for name, record in content.items()}


def message(content: RecordDict) -> Any:
    metadata = SimpleNamespace(src_node_id=7, message_type="query", reply_to_message_id="1")
    return SimpleNamespace(content=content, metadata=metadata, has_content=lambda: True)


def reply_records() -> list[Records]:
    metrics: Any = {"num-examples": 8, "train_loss": 0.5, "scores": [0.5, 0.25]}
    declared: Any = {
        "client": "client-0",
        "bract-version": "1",
        "declaration": json.dumps(DECLARATION),
    }
    own: Any = {
        "update": to_arrays(CHANGED),
        "buffers": to_arrays({"bn.running_mean": torch.ones(2)}),
        "metrics": MetricRecord(metrics),
        "declared": ConfigRecord(declared),
    }
    foreign: Any = {"arrays": to_arrays(SENT), "metrics": MetricRecord(metrics)}
    chain: Any = {"bract.defenses": ConfigRecord({"chain": json.dumps(DECLARATION["defenses"])})}
    return [parts(RecordDict(own)), parts(RecordDict(foreign)), parts(RecordDict(foreign | chain))]


def _arrays(value: Array, folder: Path) -> object:
    return from_arrays(ArrayRecord({"w": value}))


def _train(content: RecordDict, folder: Path) -> object:
    strategy = FedAvg()
    strategy._sent = SENT
    contribution = strategy.read(message(content))
    strategy.check(contribution)
    return strategy.combine([contribution], strategy.weigh((contribution,)))


@functools.cache
def _request() -> Message:
    LoopbackGrid(ClientApp(), [])  # tells Flower who creates messages
    content = RecordDict({"arrays": to_arrays(SENT), "config": ConfigRecord({"server-round": 1})})
    made = Message(content, 7, "train")
    made.metadata.__dict__["_message_id"] = "1"
    return made


def _captured(content: RecordDict, folder: Path) -> object:
    declaration = ClientDeclaration.from_dict(DECLARATION | {"num_examples": None})
    recorder = Recorder(
        ObservationStore(folder), declaration, CapturePlan(), node_names.ClientNames()
    )
    request = _request()
    recorder.sent([request])
    recorder.received([Message(content, reply_to=request)])
    if (folder / MISSED).is_file():
        reason = json.loads((folder / MISSED).read_text())["reason"]
        if re.match(r"\w+(Error|Exception):", reason):
            raise TypeError(reason)
        raise BractError(reason, code="usage")
    (found,) = ObservationStore(folder)
    found.check()
    return found


def _final(content: RecordDict, folder: Path) -> object:
    return read_final(message(content))


def _scores(content: RecordDict, folder: Path) -> object:
    found = read_scores(message(content), "accuracy")
    problem = usable_column(found, count=2, signal="accuracy")
    if problem is not None:
        raise BractError(problem, code="usage")
    return found


def _fused(content: RecordDict, folder: Path) -> object:
    _request()
    asked = Message(content, 7, "evaluate.fused")
    return answer_fused(asked, lambda tensors: (0.5, float(len(tensors))), num_examples=4)


@functools.cache
def _keys() -> Any:
    shares = deal(2, 3, 2048)
    identities = {1: make_identity(), 7: make_identity()}
    return shares, identities, make_identity()


CONFIG = EncryptionConfig(scheme="paillier", threshold=2)
VALUES = np.linspace(-1, 1, 3)


@functools.cache
def _update() -> EncryptedUpdate:
    shares, _, _ = _keys()
    layout = Layout(length=3, clip=1.0, max_weight=CONFIG.max_weight_sum)
    vector, _ = encrypt(shares[0].public, VALUES, layout)
    return EncryptedUpdate({"parameters": vector}, {"parameters": (("w", (3,)),)})


def _hello_records() -> list[Records]:
    from bract.paillier.keyfile import dump_public

    shares, identities, _ = _keys()
    hellos = [
        Hello(7, "client-0", 0, dump_public(shares[0].public), identities[7].public, 2, (3, 4)),
        Hello(7, "client-0", 0, b"", identities[7].public, -1),
    ]
    return [parts(hello.to_content()) for hello in hellos]


def _hello(content: RecordDict, folder: Path) -> object:
    return Hello.read(message(content), 7).key_id


def _boxes() -> dict[int, bytes]:
    _, identities, sender = _keys()
    publics = {node: identity.public for node, identity in identities.items()}
    return box_keys({1: b"k", 7: b"k"}, publics, session="run", sender=1, identity=sender)


def _dealt_records() -> list[Records]:
    return [parts(write_dealt(b"key", _boxes()))]


def _recipient_records() -> list[Records]:
    publics = {node: identity.public for node, identity in _keys()[1].items()}
    return [parts(RecordDict({"recipients": write_recipients(publics)}))]


def _key_box_records() -> list[Records]:
    return [parts(RecordDict({KEY_BOX: write_key_box(1, _keys()[2].public, _boxes()[7])}))]


def _key_box(content: RecordDict, folder: Path) -> object:
    return open_key_box(content, _keys()[1][7], session="run", recipient=7)


@functools.cache
def _bundle() -> list[SealedPartials]:
    shares, identities, sender = _keys()
    publics = {node: identity.public for node, identity in identities.items()}
    vector = _update().vectors["parameters"]
    return [
        seal_partials(
            {"0.parameters": partial_decrypt(share, vector)},
            publics,
            session="run",
            sender=share.index,
            identity=sender,
            tag="round-4",
        )
        for share in shares[:2]
    ]


def _partials(content: RecordDict, folder: Path) -> object:
    sizes = {"0.parameters": _update().vectors["parameters"].data.nbytes}
    return SealedPartials.read(message(content), 5, b"", sizes=sizes, recipients=[1, 7])


def _opened(content: RecordDict, folder: Path) -> object:
    shares, identities, _ = _keys()
    helpers = open_bundle(content, "round-4", identities[7], session="run", recipient=7)
    return join_partials(shares[2], _update(), helpers, "round-4", 0)


@st.composite
def _proven(draw: Any) -> Any:
    """Draw a bundle whose helpers sealed damaged headers or data, so that it opens."""
    shares, identities, sender = _keys()
    made = []
    for sealed, share in zip(_bundle(), shares, strict=False):
        partial = _partial(share.index)
        header, data = dict(partial.header()), partial.data.tobytes()
        if draw(st.booleans()):
            header = draw(damaged([header]).map(plain))
        if draw(st.booleans()):
            data = draw(mangled([data]))
        fake: Any = SimpleNamespace(header=lambda h=header: h, data=np.frombuffer(data, np.uint8))
        publics = {node: identity.public for node, identity in identities.items()}
        made.append(
            seal_partials(
                {draw(st.sampled_from(["0.parameters"] * 5 + ["x"])): fake},
                publics, session="run", sender=sealed.sender, identity=sender, tag="round-4",
            )
        )  # fmt: skip
    return write_bundle("round-4", made, 7)


@functools.cache
def _partial(index: int) -> Any:
    return partial_decrypt(_keys()[0][index - 1], _update().vectors["parameters"])


def _cipher_records() -> list[Records]:
    return [parts(RecordDict({"ciphertexts": to_arrays(_update().to_tensors())}))]


def _ciphertexts(content: RecordDict, folder: Path) -> object:
    record = content.array_records.get("ciphertexts")
    tensors = from_arrays(record) if record is not None else {}
    update = EncryptedUpdate.from_tensors(tensors)
    check_ciphertexts(update, _keys()[0][0].public, CONFIG, {"w": torch.zeros(3)})
    return update


@st.composite
def _cipher_headers(draw: Any) -> Any:
    tensors = _update().to_tensors()
    header = json.loads(tensors["header"].numpy().tobytes())
    text = text_of(draw(damaged([header]))).encode(errors="surrogatepass") or b" "
    changed = tensors | {"header": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    return RecordDict({"ciphertexts": to_arrays(changed)})


@functools.cache
def _partial_request() -> list[Records]:
    update, shares = _update(), _keys()[0]
    powers = strip_messages(shares[0].public, update.vectors["parameters"])
    content = RecordDict(
        {
            "config": ConfigRecord({"vectors": 1, "tag": "round-4"}),
            "vector-0": to_arrays(update.to_tensors()),
            "stripped-0": ArrayRecord({"parameters": Array(powers)}),
        }
    )
    return [parts(content)]


def _help(content: RecordDict, folder: Path) -> object:
    return partials_of(_keys()[0][0], content)


def _later(make: Any) -> st.SearchStrategy[RecordDict]:
    return st.deferred(lambda: contents(make()))


FUSED = [
    parts(
        RecordDict(
            {
                "fused-0": to_arrays(SENT),
                "fused-1": to_arrays(SENT),
                "config": ConfigRecord({"models": 2, "server-round": 1}),
            }
        )
    )
]
SCORES = [
    parts(RecordDict({"metrics": MetricRecord({"accuracy": [0.5, 0.25], "num-examples": 4})})),
    parts(RecordDict({"metrics": MetricRecord({"accuracy": 0.5})})),
]
FINAL = [
    parts(
        RecordDict(
            {
                "metrics": MetricRecord({"num-examples": 4, "test_loss": 0.5}),
                "declared": ConfigRecord({"client": "client-0"}),
            }
        )
    )
]

MESSAGES = [
    Parser("array", arrays(), _arrays, "bract/protocol/arrays.py"),
    Parser("train reply", contents(reply_records()), _train, "bract/protocol/records.py"),
    Parser("captured reply", contents(reply_records()), _captured, "server/recorder.py"),
    Parser("evaluate reply", contents(SCORES), _scores, "bract/protocol/fused.py"),
    Parser("fused models", contents(FUSED), _fused, "bract/protocol/fused.py"),
    Parser("final reply", contents(FINAL), _final, "bract/protocol/records.py"),
    Parser("hello reply", _later(_hello_records), _hello, "bract/protocol/keyexchange.py"),
    Parser(
        "deal reply",
        _later(_dealt_records),
        lambda c, _: read_dealt(message(c)),
        "bract/protocol/keyexchange.py",
    ),
    Parser(
        "recipients",
        _later(_recipient_records),
        lambda c, _: read_recipients(c),
        "bract/protocol/keyexchange.py",
    ),
    Parser("key box", _later(_key_box_records), _key_box, "bract/protocol/keyexchange.py"),
    Parser(
        "partial reply",
        _later(lambda: [parts(s.to_content()) for s in _bundle()]),
        _partials,
        "bract/protocol/partials.py",
    ),
    Parser(
        "partial decryptions",
        st.one_of(_later(lambda: [parts(write_bundle("round-4", _bundle(), 7))]), _proven()),
        _opened,
        "client/encrypted/sharing.py",
        examples=80,
    ),
    Parser(
        "partial request",
        _later(_partial_request),
        _help,
        "client/encrypted/sharing.py",
        examples=80,
    ),
    Parser(
        "ciphertexts",
        st.one_of(_later(_cipher_records), _cipher_headers()),
        _ciphertexts,
        "bract/protocol/ciphertexts.py",
    ),
]
