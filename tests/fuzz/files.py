"""Parsers of files: configuration, policies, captures, truth, and what a run directory holds."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import torch
from flwr.app import RecordDict
from fuzz.mutations import HOSTILE, YAML, Raw, damaged, documents, garbage, mangled, text_of
from fuzz.outcome import Parser
from hypothesis import strategies as st
from safetensors.torch import save

from bract import Observation, ObservationStore
from bract.audit.captures import Capture, Captures
from bract.audit.results import Batch, Results
from bract.audit.truth import load_truth
from bract.audit.uncaptured import read_missed, read_removed
from bract.captures.aggregates import Aggregates
from bract.cli.comparison_plan import parse_defense
from bract.cli.gate import Gate
from bract.client.answered import Request
from bract.client.answers import Answers
from bract.client.defending import defenses_of
from bract.client.defenses import DefenseState
from bract.client.encrypted.pins import Pins
from bract.client.policy import SitePolicy, load_policy
from bract.client.policy_checks import check_run
from bract.client.replies import pieces, unpack
from bract.client.site import Site, read_private_seed
from bract.config import load_config
from bract.config.config import config_of_run, parse_config
from bract.defenses.entries import read_defense
from bract.errors import BractError
from bract.report import write_report
from bract.report.comparison.variants import upload_bytes
from bract.report.facts import gather
from bract.rundir import RunDirectory
from bract.runtime.pinned import declared_app
from bract.schema import AuditResult, ClientDeclaration, ObservationFile, Report
from bract.schema.metrics import ClientRow, GlobalRow, MetricsRow
from bract.schema.run import RunState
from bract.scores import score_images

FEDERATION = [
    {
        "name": "demo",
        "seed": 7,
        "clients": 3,
        "data": {"name": "digits", "partition": {"kind": "sizes", "sizes": [4, 40, 40]}},
        "model": {"name": "lenet-strided", "activation": "relu"},
        "training": {"lr": 0.1, "local_steps": 4, "momentum": 0.5},
        "strategy": {"name": "fedboosting", "p_hat": 0.9},
        "defenses": [{"name": "noise", "clip": 1.0, "std": 0.1}, "pruning"],
        "encryption": {"scheme": "paillier", "threshold": 2, "clip": 1.0, "identities": []},
        "capture": {"rounds": [1, 2], "clients": ["a"], "quota": "2GB", "store": "s3://b/c"},
        "audit": {"attacks": ["ig"], "clients": ["client-0"], "leak": {"ssim": 0.4}},
    },
    {"data": {"partition": {"kind": "dirichlet", "alpha": 0.3}}, "encryption": "none"},
]
POLICY = [
    {
        "require": [{"name": "noise", "minimum": {"std": 0.1}, "equal": {"kind": "gaussian"}}],
        "models": ["lenet"],
        "data": {"names": ["digits"], "paths": ["/srv/data"], "download": False},
        "local_steps": {"minimum": 2, "maximum": 10},
        "max_epsilon": 8.0,
        "delta": 1e-5,
        "metric_decimals": 3,
    }
]
RUN_CONFIG = {
    "federation": "name: demo",
    "rounds": 3,
    "training.lr": 0.1,
    "strategy.name": "fedprox",
}
NODE_CONFIG = {
    "partition-id": 0,
    "name": "client-0",
    "require-encryption": True,
    "key-id": "0" * 32,
    "dealer": "6b" * 32,
    "device": "cpu",
    "public-test": False,
}
DECLARATION = {
    "algorithm": "fedavg",
    "model": "lenet",
    "image_shape": [1, 8, 8],
    "classes": 10,
    "mean": [0.3],
    "std": [0.4],
    "lr": 0.1,
    "local_steps": 2,
    "batch_size": 4,
    "num_examples": 8,
    "defenses": [{"name": "noise", "std": 0.1, "clip": 1.0}],
}
TENSORS = {"fc.weight": torch.ones(2, 2), "fc.bias": torch.zeros(2)}
SENT_DIGEST = hashlib.sha256(save(TENSORS)).hexdigest()


def observation() -> Observation:
    return Observation(
        round=1,
        client="client-0",
        parameters=TENSORS,
        update=TENSORS,
        declaration=ClientDeclaration.from_dict(DECLARATION),
        provenance={"run_id": "1", "node_id": "7", "received": 1.0, "metrics": {"loss": 0.5}},
    )


DESCRIPTION = [
    ObservationFile(
        round=1,
        client="client-0",
        declaration=ClientDeclaration.from_dict(DECLARATION),
        tensors={"parameters": tuple(TENSORS), "update": tuple(TENSORS)},
        sent={"parameters": SENT_DIGEST},
    ).model_dump(mode="json", by_alias=True)
]
SHARED = [
    DESCRIPTION[0]
    | {
        "rounded": {"dtype": "float16", "error": 1e-4, "saved": 12, "kept": ["fc.bias"]},
        "uploaded": 24,
    }
]
BEFORE = [SHARED[0] | {"schema": 6}]
AUDIT = [
    AuditResult(
        round=1,
        client="client-0",
        attack="ig",
        chosen_attack="ig",
        settings={"tv": 1e-4},
        scored=1,
        seconds=1.0,
        iterations=4,
        loss_curve=[(0, 1.0), (1, 0.5)],
        gradient_cosine=0.9,
        images=[
            {
                "index": 0,
                "label": 3,
                "true_label": 3,
                "label_confidence": 0.9,
                "reconstruction": "a.png",
                "original": "b.png",
                "scores": {"mse": 0.1, "psnr": 10.0, "ssim": 0.5, "rank": 1},
                "baselines": {"class_mean": {"ssim": 0.2, "psnr": 9.0}},
            }
        ],
        baselines={"class_mean": {"ssim": 0.2, "psnr": 9.0}},
        signals={"layers": {"fc": {"cosine": 0.5}}, "truth_check": {"cosine": 0.5}},
        trials=[{"attack": "ig", "method": "ig", "pass": 1}],
        label_accuracy=1.0,
        candidates=100,
    ).to_dict()
]
ROWS = [
    MetricsRow(
        round=1,
        seconds=2.0,
        time=3.0,
        evaluation=GlobalRow(loss=0.5, accuracy=0.25),
        clients={"client-0": ClientRow.of({"train_loss": 2.0}, num_examples=3, weight=1.0)},
        failures=[{"client": "client-1", "reason": "gone"}],
        boosting={"clients": ["a"], "V": [[0.5]], "T": [0.5], "weights": [1.0]},
    ).to_dict()
]
STATE = [
    RunState(
        name="demo", status="finished", started=1.0, finished=2.0, versions={"bract": "1"}
    ).to_dict()
]
MISSED = [{"schema": 1, "round": 1, "node_id": "7", "reason": "full disk"}]
REMOVED = [{"schema": 1, "round": 1, "captures": 3, "size": 4096, "time": 1.5}]


def _write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def _config(data: bytes, folder: Path) -> object:
    config = load_config(_write(folder, "f.yaml", data))
    defenses_of(config)
    return config


def _policy(data: bytes, folder: Path) -> object:
    policy = load_policy(_write(folder, "policy.yaml", data))
    config = parse_config("defenses: [{name: noise, clip: 1.0, std: 0.5}]")
    check_run(policy, Site(name="site", partition=0), config, defenses_of(config))
    return policy


def _description(data: bytes, folder: Path) -> object:
    _write(folder, "captures/round-0001/client-0/observation.json", data)
    store = ObservationStore(folder / "captures")
    assert len(Captures(folder / "captures").index) <= 1
    described = store.describe(*store.folders())
    described.declaration.to_dict()
    return described


@functools.cache
def _captured() -> dict[str, bytes]:
    return {
        "observation.json": text_of(DESCRIPTION[0]).encode(),
        f"../.sent/{SENT_DIGEST}.safetensors": save(TENSORS),
        "update.safetensors": save(TENSORS),
    }


def _tensors(data: bytes, folder: Path) -> object:
    home = folder / "captures/round-0001/client-0"
    for name, content in (_captured() | {"update.safetensors": data}).items():
        _write(home, name, content)
    upload_bytes(home)
    found = ObservationStore(folder / "captures").load(home)
    found.check()
    return found.gradient()


def _shared(data: bytes, folder: Path) -> object:
    """A description that says where what was sent lies, and how the update was rounded."""
    home = folder / "captures/round-0001/client-0"
    sent = home.with_name(".sent")
    _write(home, "observation.json", data)
    _write(home, "update.safetensors", save({n: v.half() for n, v in TENSORS.items()}))
    _write(sent, f"{SENT_DIGEST}.safetensors", save(TENSORS))
    found = ObservationStore(folder / "captures").load(home)
    assert all(torch.equal(value, TENSORS[name]) for name, value in found.parameters.items())
    return found


def _sent(data: bytes, folder: Path) -> object:
    """What was sent, under the digest of what it should be or is."""
    home = folder / "captures/round-0001/client-0"
    digest = hashlib.sha256(data).hexdigest() if len(data) % 2 else SENT_DIGEST
    text = text_of(SHARED[0] | {"sent": {"parameters": digest}}).encode()
    _write(home, "observation.json", text)
    _write(home, "update.safetensors", save(TENSORS))
    _write(home.with_name(".sent"), f"{digest}.safetensors", data)
    return ObservationStore(folder / "captures").load(home).parameters


@functools.cache
def _packed() -> bytes:
    found: bytes = pyarrow.compress(save(TENSORS), "zstd", asbytes=True)
    return found


def _unpacked(data: bytes, folder: Path) -> object:
    """A compressed update, beside what was sent in plain."""
    home = folder / "captures/round-0001/client-0"
    said = {"packed": len(save(TENSORS)), "rounded": None}
    _write(home, "observation.json", text_of(SHARED[0] | said).encode())
    _write(home, "update.safetensors.zst", data)
    _write(home.with_name(".sent"), f"{SENT_DIGEST}.safetensors", save(TENSORS))
    return ObservationStore(folder / "captures").load(home).update


def _removed(data: bytes, folder: Path) -> object:
    _write(folder, "removed.jsonl", data)
    return _whole(read_removed(folder), data)


def _missed(data: bytes, folder: Path) -> object:
    _write(folder, "missed.jsonl", data)
    return _whole(read_missed(folder), data)


def _truth(data: bytes, folder: Path) -> object:
    _write(folder, "client-0/round-0001.safetensors", data)
    truth = load_truth(folder, Capture(1, "client-0", ClientDeclaration()))
    if truth is not None and truth.images.shape[1:] == (1, 8, 8) and len(truth.images) < 100:
        score_images(torch.full((1, 1, 8, 8), 0.5), truth, perceptual=False)
    if truth is None:
        raise BractError("unscored", code="usage")
    return truth


def _state(data: bytes, folder: Path) -> object:
    _write(folder, "run.json", data)
    run = RunDirectory(folder)
    run.update_state(status="failed")
    return run.state()


def _metrics(data: bytes, folder: Path) -> object:
    _write(folder, "metrics.jsonl", data)
    return _whole(RunDirectory(folder).metrics(), data)


def _whole(found: list[Any], data: bytes) -> object:
    """Count what a reader left out as refused: it warns and goes on."""
    if len(found) < len(data.splitlines()):
        raise BractError("a line was left out", code="usage")
    return found


def _audit(data: bytes, folder: Path) -> object:
    results = Results(folder, "oblivious")
    capture = Capture(1, "client-0", ClientDeclaration())
    batch = Batch("reconstruction", "ig", 0, (capture,))
    path = _write(folder, str(results.path(batch, capture).relative_to(folder)), data)
    results.read(batch, capture)
    return AuditResult.parse_text(path.read_bytes(), source=str(path))


def _report(data: bytes, folder: Path) -> object:
    return Report.parse_text(data, source=str(folder / "report.json"))


@functools.cache
def _written_report() -> list[Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _run(root, {})
        write_report(root)
        return [json.loads((root / "report.json").read_text())]


def _run(root: Path, changes: dict[str, bytes]) -> None:
    whole = {
        "run.json": text_of(STATE[0]).encode(),
        "config.yaml": b"name: demo\nclients: 1\n",
        "metrics.jsonl": text_of(ROWS[0]).encode(),
        "captures/round-0001/client-0/observation.json": text_of(DESCRIPTION[0]).encode(),
        "captures/missed.jsonl": text_of(MISSED[0]).encode(),
        "captures/removed.jsonl": text_of(REMOVED[0]).encode(),
        "audit/ig/round-0001--client-0.json": text_of(AUDIT[0]).encode(),
    }
    for name, content in (whole | changes).items():
        _write(root, name, content)


def _page(value: tuple[str, bytes, int], folder: Path) -> object:
    name, data, rendered = value
    _run(folder, {name: data})
    if rendered:  # A page takes a hundred times as long as its facts.
        return write_report(folder, redact=rendered == 2)
    return gather(folder).redact().to_dict()


def _pages() -> st.SearchStrategy[tuple[str, bytes, int]]:
    kinds = {
        "run.json": documents(STATE),
        "config.yaml": documents(FEDERATION, yaml=True),
        "metrics.jsonl": documents(ROWS),
        "captures/round-0001/client-0/observation.json": documents(DESCRIPTION),
        "captures/missed.jsonl": documents(MISSED),
        "captures/removed.jsonl": documents(REMOVED),
        "audit/ig/round-0001--client-0.json": documents(AUDIT),
    }
    return st.one_of(
        *(
            st.tuples(st.just(n), inputs, st.sampled_from([0] * 10 + [1, 2]))
            for n, inputs in kinds.items()
        )
    )


def plain(value: Any) -> Any:
    """Return what JSON text of a drawn value reads as; a text where it is none."""
    try:
        return json.loads(text_of(value))
    except (ValueError, RecursionError):
        return str(value)


SCALARS = [plain(v) for v in HOSTILE if not isinstance(plain(v), list | dict | None)]
CONFIG_VALUES = [
    *SCALARS,
    *(str(v) for v in YAML if isinstance(v, Raw)),
    *(b"", b"\x00" * 40, [1, 2], ["a"], [0.5], [True], [], float("nan"), float("inf"), 10**400),
]
"""What Flower's configuration records and node configurations can hold, and a little more."""


@st.composite
def settings(draw: Any, base: dict[str, Any], names: list[str]) -> Any:
    """Draw a flat mapping with one to three of its values changed."""
    found = dict(base)
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from([*found, *names]) if found else st.sampled_from(names))
        if draw(st.integers(0, 4)) == 0:
            found.pop(key, None)
        else:
            found[key] = draw(st.sampled_from(CONFIG_VALUES))
    return found


def _node(value: dict[str, Any], folder: Path) -> object:
    return Site.from_node_config(value), Pins.from_node_config(value)


def _seed(data: bytes, folder: Path) -> object:
    return read_private_seed(_write(folder, "seed", data))


def _run_config(value: dict[str, Any], folder: Path) -> object:
    return defenses_of(config_of_run(value))


def _peers(data: bytes, folder: Path) -> object:
    return Pins.from_node_config({"peers": str(_write(folder, "peers", data))})


def _answered(data: bytes, folder: Path) -> object:
    _write(folder, "site-answered.json", data)
    answers = Answers(RecordDict(), directory=folder, site="site", policy=SitePolicy())
    answers.epsilon()
    request = Request("train", 2, "d", 1, "demo", "c", 3)
    answers.admit(request)
    return answers.knows_start(request)


ANSWERED = [
    {
        "schema_version": 1,
        "totals": {"train": 1},
        "mechanisms": {"gaussian:1.5": 1, "laplace:2.0": 2},
        "without_guarantee": 0,
        "runs": {
            "1/demo": {"config": "c", "kinds": {"train": {"round": 1, "count": 1, "digest": "e"}}}
        },
    }
]


def _reply(data: bytes, folder: Path) -> object:
    return unpack(data, "label")


@functools.cache
def _kept_replies() -> list[bytes]:
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

    content = RecordDict(
        {
            "a": ArrayRecord({"w": Array(torch.ones(3).numpy())}),
            "m": MetricRecord({"x": [1.0, 2.0]}),
            "c": ConfigRecord({"b": b"12", "l": [b"1"]}),
        }
    )
    return [b"".join(pieces(content, "label"))]


@st.composite
def _headed(draw: Any) -> Any:
    whole = _kept_replies()[0]
    start = 8 + int.from_bytes(whole[:8], "big")
    header = text_of(draw(damaged([json.loads(whole[8:start])]))).encode(errors="surrogatepass")
    length = draw(st.sampled_from([len(header)] * 6 + [0, 2**64 - 1]))
    return length.to_bytes(8, "big") + header + whole[start:]


def _defense_state(data: bytes, folder: Path) -> object:
    _write(folder, "site.safetensors", data)
    return DefenseState(RecordDict(), directory=folder, key="site").load()


def _aggregates(data: bytes, folder: Path) -> object:
    _write(folder, "initial.safetensors", save(TENSORS))
    _write(folder, "aggregates.json", data)
    return Aggregates(folder)


def _safetensors(*tensors: dict[str, torch.Tensor]) -> st.SearchStrategy[bytes]:
    wholes = [save(value) for value in tensors]

    @st.composite
    def headed(draw: Any) -> Any:
        whole = draw(st.sampled_from(wholes))
        end = 8 + int.from_bytes(whole[:8], "little")
        document = json.loads(whole[8:end])
        header = text_of(draw(damaged([document]))).encode(errors="surrogatepass")
        length = draw(st.sampled_from([len(header)] * 6 + [0, 2**64 - 1, 2**40]))
        return length.to_bytes(8, "little") + header + whole[end:]

    return st.one_of(st.sampled_from(wholes), mangled(wholes), headed(), garbage())


def _truths() -> st.SearchStrategy[bytes]:
    good = {"images": torch.rand(2, 1, 8, 8), "labels": torch.tensor([1, 2])}
    odd: list[dict[str, torch.Tensor]] = [
        good | {"labels": torch.tensor([1])},
        good | {"labels": torch.tensor([1.0, 2.0])},
        good | {"labels": torch.tensor([[1, 2]])},
        good | {"images": torch.rand(0, 1, 8, 8), "labels": torch.zeros(0, dtype=torch.int64)},
        good | {"images": torch.full((2, 1, 8, 8), float("nan"))},
        good | {"images": torch.rand(2, 8, 8)},
        good | {"images": torch.rand(2, 1, 8, 8, dtype=torch.float64)},
        good | {"images": torch.ones(2, 1, 8, 8, dtype=torch.int32)},
        good | {"images": torch.rand(2, 1, 8, 8) * 1e30},
        good | {"labels": torch.tensor([-1, 2**62])},
    ]
    return _safetensors(good, *odd)


def _bundle(data: bytes, folder: Path) -> object:
    return declared_app(data)


@st.composite
def _bundles(draw: Any) -> Any:
    manifest = b'[tool.flwr.app.components]\nclientapp = "bract.client.app:app"\n'
    if draw(st.booleans()):
        manifest = draw(st.one_of(mangled([manifest]), garbage(), st.just(b"a=" + b"[" * 9000)))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", draw(st.sampled_from([0, 8, 12, 14]))) as archive:
        archive.writestr("pyproject.toml", manifest)
    whole = stream.getvalue()
    return draw(st.one_of(st.just(whole), mangled([whole]), garbage()))


def _defense_option(value: str, folder: Path) -> object:
    return [read_defense(entry) for entry in parse_defense(value, {})]


def _options() -> st.SearchStrategy[str]:
    values = [str(v) for v in YAML if isinstance(v, str)]
    return st.one_of(
        st.text(max_size=40),
        st.sampled_from(["noise", "noise:std=0.1,clip=1", "pruning+noise"]),
        st.sampled_from(values).map(lambda v: f"noise:std={v}"),
        st.sampled_from(values).map(lambda v: f"noise:{v}=1"),
        st.sampled_from(values).map(lambda v: f"{v}+noise"),
    )


def _entry(value: Any, folder: Path) -> object:
    return read_defense(value)


def _entries() -> st.SearchStrategy[Any]:
    valid = [
        {"name": "noise", "std": 0.1, "clip": 1.0, "kind": "gaussian"},
        {"name": "pruning"},
        {"name": "adadefense"},
        {"name": "guardian"},
        {"name": "soteria"},
        {"name": "fedkl"},
        {"name": "precode"},
    ]
    return damaged(valid).map(plain)


def _declaration(value: Any, folder: Path) -> object:
    if not isinstance(value, dict):
        return None
    return ClientDeclaration().updated(value).to_dict()


def _gate(value: str, folder: Path) -> object:
    return Gate.parse(value)


def _gates() -> st.SearchStrategy[str]:
    part = st.sampled_from(
        [
            "ssim",
            "psnr",
            ">",
            ">=",
            "<",
            "0.5",
            "1e999",
            "nan",
            "e",
            "@",
            "adaptive",
            ".",
            "9" * 5000,
            "x" * 9000,
        ]
    )
    valid = st.sampled_from(["ssim>0.5", "psnr >= 20 @adaptive", "leaked>0"])
    return st.one_of(st.text(max_size=30), valid, st.lists(part, max_size=6).map("".join))


CONFIG_NAMES = [
    *(
        "federation",
        "run-dir",
        "seed",
        "clients",
        "rounds",
        "defenses",
        "encryption",
        "audit.leak.ssim",
    ),
    *(
        "data.partition.kind",
        "data.partition",
        "training",
        "training.lr.x",
        "a.b.c",
        ".",
        "",
        "x" * 9000,
    ),
    *("strategy", "strategy.name", "strategy.p_hat", ".".join("a" * 5000), "encryption.scheme"),
]
NODE_NAMES = [
    "private-seed",
    "truth-dir",
    "state-dir",
    "policy",
    "paillier-key",
    "identity-key",
    "peers",
    "x",
]

FILES = [
    Parser("federation.yaml", documents(FEDERATION, yaml=True), _config, "bract/config"),
    Parser("run config", settings(RUN_CONFIG, CONFIG_NAMES), _run_config, "bract/config"),
    Parser("site policy", documents(POLICY, yaml=True), _policy, "client/policy.py"),
    Parser("node config", settings(NODE_CONFIG, NODE_NAMES), _node, "client/site.py"),
    Parser(
        "peers",
        st.one_of(mangled([b"6b" * 32 + b" # one\n" + b"4d" * 32]), garbage()),
        _peers,
        "client/encrypted/pins.py",
    ),
    Parser(
        "private seed",
        st.one_of(mangled([b"12345678901234567890123\n"]), garbage(), st.just(b"7")),
        _seed,
        "client/site.py",
    ),
    Parser("record of answers", documents(ANSWERED), _answered, "client/answers.py"),
    Parser(
        "kept reply",
        st.one_of(_headed(), mangled(_kept_replies()), garbage()),
        _reply,
        "client/replies.py",
    ),
    Parser("defense state", _safetensors(TENSORS), _defense_state, "client/defenses/state.py"),
    Parser("bundle", _bundles(), _bundle, "runtime/pinned.py"),
    Parser("defense entry", _entries(), _entry, "bract/defenses"),
    Parser("--defense", _options(), _defense_option, "cli/comparison_plan.py"),
    Parser("--fail-on", _gates(), _gate, "cli/gate.py"),
    Parser(
        "declaration",
        damaged([DECLARATION]).map(plain),
        _declaration,
        "bract/schema/declaration.py",
    ),
    Parser(
        "observation.json",
        documents([*DESCRIPTION, *SHARED, *BEFORE]),
        _description,
        "bract/captures/observation.py",
    ),
    Parser("shared capture", documents(SHARED), _shared, "bract/captures/observation.py"),
    Parser(
        "packed update",
        st.deferred(lambda: st.one_of(st.just(_packed()), mangled([_packed()]), garbage())),
        _unpacked,
        "bract/captures/packing.py",
    ),
    Parser("shared tensors", _safetensors(TENSORS), _sent, "bract/captures/storing.py"),
    Parser("capture tensors", _safetensors(TENSORS), _tensors, "bract/captures/observation.py"),
    Parser("missed.jsonl", documents(MISSED), _missed, "audit/uncaptured.py"),
    Parser("removed.jsonl", documents(REMOVED), _removed, "audit/uncaptured.py"),
    Parser("truth", _truths(), _truth, "audit/truth.py"),
    Parser("run.json", documents(STATE), _state, "bract/schema/run.py"),
    Parser("metrics.jsonl", documents(ROWS), _metrics, "bract/schema/metrics.py"),
    Parser("audit result", documents(AUDIT), _audit, "bract/schema/audit.py"),
    Parser(
        "report.json",
        st.deferred(lambda: documents(_written_report())),
        _report,
        "bract/schema/report.py",
    ),
    Parser("run directory", _pages(), _page, "report", examples=60),
    Parser(
        "aggregates.json",
        documents([{"session": "s", "order": list(TENSORS)}]),
        _aggregates,
        "bract/captures/aggregates.py",
    ),
]
