"""Parsers of what parties bring each other: kits, descriptions, priors, first messages."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from flwr.app import ConfigRecord, Context, RecordDict
from fuzz.files import DECLARATION, DESCRIPTION, _run, settings
from fuzz.messages import SENT, contents, message, parts
from fuzz.mutations import damaged, documents, garbage, mangled, text_of
from fuzz.outcome import Parser
from hypothesis import strategies as st
from safetensors.torch import save

from bract.attacks import declared
from bract.attacks.problem.target_model import target_model_of
from bract.audit.captures import Captures
from bract.audit.description.infer import complete
from bract.cli.watch import Watched
from bract.client import Gate
from bract.client.agreement import agree, request_of
from bract.client.opening import open_session
from bract.config import dump_config
from bract.config.config import parse_config
from bract.defenses import DEFENSES
from bract.errors import BractError
from bract.installed import release
from bract.kits.kit import Kit, check_files, open_kit
from bract.kits.site_file import read_site
from bract.kits.sites import read_sites
from bract.models import create_model
from bract.protocol.arrays import to_arrays
from bract.protocol.records import ARRAYS, CONFIG, ROUND_KEY, VERSION_KEY
from bract.rundir import RunDirectory
from bract.schema import AppDescription, ClientDeclaration
from bract.schema.description_text import read_description
from bract.updates.update import parameters_of
from bract_priors.flow import Flow
from bract_priors.prior_facts import PriorFacts, PriorKind
from bract_priors.trained_prior import Decoder, TrainedPrior, make_prior

KIT = {
    "schema": 1,
    "role": "site",
    "name": "hospital-a",
    "federation": "demo",
    "authority": "ab" * 32,
    "made_by": release(),
    "server": "fl.example.org",
    "port": 8443,
    "superlink_port": 8000,
    "issued": "2026-01-02T03:04:05Z",
}
SITE = {
    "name": "hospital-a",
    "partition": 0,
    "device": "cpu",
    "data": "images",
    "models": ["my_app.task:Net"],
    "policy": "policy.yaml",
    "truth": None,
    "app": "bract.client.app:app",
    "public_test": True,
    "paillier_key": "key.pem",
    "port": 9094,
}
ISSUED = {"public_key": "ssh-ed25519 AAAA", "partition": 0, "issued": "2026-01-02T03:04:05Z"}
SITES = {"schema": 1, "sites": {"hospital-a": ISSUED}, "former": ["ssh-ed25519 BBBB"]}
APP = {
    "model": "lenet",
    "activation": "relu",
    "input": {"shape": [1, 8, 8], "mean": [0.3], "std": [0.4]},
    "classes": 10,
    "loss": "cross_entropy",
    "norm_mode": "train",
    "training": {
        "optimizer": "sgd",
        "lr": 0.1,
        "lr_schedule": {"kind": "step", "factor": 0.1, "every": 3},
        "batch_size": 4,
        "local_epochs": 2,
        "augmentation": ["horizontal-flip"],
        "dropout": 0.5,
    },
    "clients": {"client-0": {"local_steps": 5, "num_examples": 9}},
    "defenses": ["adadefense", {"name": "noise", "clip": 1.0, "std": 0.1}],
    "data": {"name": "folder", "path": "images"},
    "guessed": {"training.lr": "the size of the updates"},
}


def _kit(data: bytes, folder: Path) -> object:
    (folder / "kit.json").write_bytes(data)
    return open_kit(folder, "site").address


def _checksums(data: bytes, folder: Path) -> object:
    (folder / "SHA256SUMS").write_bytes(data)
    return check_files(folder)


def _site(data: bytes, folder: Path) -> object:
    (folder / "site.yaml").write_bytes(data)
    text = read_site(folder, Kit.model_validate(KIT)).node_config(folder)
    return text.encode()


def _sites(data: bytes, folder: Path) -> object:
    (folder / "sites.json").write_bytes(data)
    found = read_sites(folder / "sites.json")
    return found.active, found.revoked_keys


def _app(data: bytes, folder: Path) -> object:
    (folder / "bract.yaml").write_bytes(data)
    found = read_description(folder)
    assert found is not None
    return [found.declare(ClientDeclaration(), "client-0", n).to_dict() for n in (1, 2)]


@functools.cache
def _prior_file(kind: PriorKind) -> bytes:
    shape: tuple[Literal[1], int, int] = (1, 8, 8)
    latent: int = 4
    made: Decoder | Flow = Decoder(shape, latent=4, width=2)
    if kind == "flow":
        latent, made = 64, Flow(shape, width=2)
    facts = PriorFacts(
        generator=kind,
        image_shape=shape,
        latent=latent,
        width=2,
        source="digits",
        images=3,
        digest="0" * 64,
    )
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "prior"
        make_prior(facts, made, torch.zeros(3, 64, dtype=torch.uint8)).save(path)
        return path.read_bytes()


def _prior(data: bytes, folder: Path) -> object:
    (folder / "prior").write_bytes(data)
    found = TrainedPrior.load(folder / "prior")
    found.check((1, 8, 8), 10)
    return found.sample([1], seed=0)


@st.composite
def _priors(draw: Any) -> Any:
    """Draw a prior whose record, which the header holds as text, has damaged values."""
    whole = _prior_file(draw(st.sampled_from(get_args(PriorKind))))
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    (about,) = header["__metadata__"]
    facts = json.loads(header["__metadata__"][about])
    header["__metadata__"][about] = text_of(draw(damaged([facts])))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[end:]


FEDERATION = parse_config(
    "{name: demo, clients: 2, data: {image_size: 8}, model: {name: mlp}, "
    "defenses: [{name: noise, clip: 1.0, std: 0.1}]}"
)


def _request_records() -> list[Any]:
    instructions = ConfigRecord({ROUND_KEY: 1, VERSION_KEY: release()})
    return [parts(RecordDict({ARRAYS: to_arrays(SENT), CONFIG: instructions}))]


def _context(run_config: dict[str, Any]) -> Context:
    return Context(1, 7, {"partition-id": 0}, RecordDict(), run_config)


def _first_message(content: RecordDict, folder: Path) -> object:
    """What a server sends to a client, up to the training."""
    asked = message(content)
    asked.metadata.message_type = "train"
    with open_session(asked, _context({"federation": dump_config(FEDERATION)})) as session:
        session.open()
        return session.model


def _agreed(value: dict[str, Any], folder: Path) -> object:
    """A run's configuration at a client, up to the decision whether it takes part."""
    instructions = ConfigRecord({ROUND_KEY: 1, VERSION_KEY: release()})
    asked = message(RecordDict({CONFIG: instructions}))
    context = _context(value)
    return request_of(agree(Gate(context), asked, context), asked, context)


RUN_CONFIG = {"federation": dump_config(FEDERATION), "rounds": 3, "model.name": "mlp"}
RUN_NAMES = ["model.name", "data.name", "data.path", "data.download", "strategy.name", "defenses"]


@functools.cache
def _model() -> dict[str, torch.Tensor]:
    model = create_model("mlp", classes=10, channels=1, image_size=8)
    return parameters_of(model)


@functools.cache
def _digest() -> str:
    return hashlib.sha256(save(_model())).hexdigest()


@functools.cache
def _descriptions() -> list[Any]:
    tensors = {"parameters": list(_model()), "update": list(_model())}
    declaration = DECLARATION | {"model": "mlp"}
    said = {"declaration": declaration, "tensors": tensors, "sent": {"parameters": _digest()}}
    found = [DESCRIPTION[0] | said]
    undefended = found[0] | {"declaration": declaration | {"defenses": []}}
    # The first time, torch makes folders of its own.
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(BractError):
        _described(text_of(undefended).encode(), Path(name))
    return found


def _captured(value: Any, folder: Path) -> Path:
    """Write a capture of a small model whose description is ``value``."""
    _run(folder, {})
    home = folder / "captures/round-0001/client-0"
    sent = home.with_name(".sent")
    sent.mkdir()
    for path in (sent / f"{_digest()}.safetensors", home / "update.safetensors"):
        path.write_bytes(save(_model()))
    (home / "observation.json").write_bytes(value)
    return folder


def _attacked(data: bytes, folder: Path) -> object:
    """What an audit reads of a capture before any attack: declaration, defenses, model."""
    captures = Captures(_captured(data, folder) / "captures")
    found = [captures.load(capture) for capture in captures.index]
    for one in found:
        for entry in one.declaration.defenses:
            kind = DEFENSES.get(str(entry["name"]))
            if kind is not None and len(one.declaration.defenses) == 1:
                declared(kind, one)
        one.gradient()
        target_model_of(one)
    return found


def _described(data: bytes, folder: Path) -> object:
    captures = Captures(_captured(data, folder) / "captures")
    return complete(captures, AppDescription()).description


def _watched(data: bytes, folder: Path) -> object:
    return Watched(RunDirectory(_captured(data, folder)), redact=False).standing().text()


CAPTURES = st.deferred(lambda: documents(_descriptions()))

SITE_PARSERS = [
    Parser("kit.json", documents([KIT]), _kit, "kits/kit.py"),
    Parser(
        "checksums of a kit",
        st.one_of(
            mangled([hashlib.sha256(b"").hexdigest().encode() + b"  ca.crt\n"]),
            garbage(),
        ),
        _checksums,
        "kits/kit.py",
    ),
    Parser("site.yaml", documents([SITE], yaml=True), _site, "kits/site_file.py"),
    Parser("sites.json", documents([SITES]), _sites, "kits/sites.py"),
    Parser("bract.yaml", documents([APP], yaml=True), _app, "bract/schema/description_text.py"),
    Parser(
        "prior",
        st.deferred(
            lambda: st.one_of(
                _priors(), _priors(), mangled([*map(_prior_file, get_args(PriorKind))]), garbage()
            )
        ),
        _prior,
        "plugins/bract-priors/bract_priors/trained_prior.py",
    ),
    Parser("run at a client", settings(RUN_CONFIG, RUN_NAMES), _agreed, "client/agreement.py"),
    Parser(
        "message at a client",
        st.deferred(lambda: contents(_request_records())),
        _first_message,
        "client/session.py",
        examples=40,
    ),
    *(
        Parser(name, CAPTURES, parse, module, examples=examples)
        for name, parse, module, examples in (
            ("capture of an audit", _attacked, "attacks/problem/target_model.py", 60),
            ("capture of a description", _described, "audit/description/infer.py", 40),
            ("capture that is watched", _watched, "cli/watch.py", 120),
        )
    ),
]
