"""Messages of a server that asks for what it likes, to the apps of a site whose data are marked."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from bract.client import DefenseMod, EncryptedClientApp
from bract.installed import release
from bract.models import create_model
from bract.server.loopback import LoopbackGrid

MARK = "MARK"
"""Every cell and column name of the site's file holds it, and so does the name of the file."""

COLUMNS = tuple(f"{MARK}-{name}" for name in ("name", "age", "diagnosis"))
KINDS = (
    "train",
    "train.default",
    "train.fit",
    "evaluate",
    "evaluate.fused",
    "evaluate.final",
    "query",
    "query.advertise",
    "query.share",
    "query.open",
    "query.agree",
    "query.unmask",
    "query.hello",
    "query.deal",
    "query.partial",
    "query.default",
    "query.get_parameters",
)
WEIGHTS = [3 if kind.partition(".")[0] in ("train", "evaluate") else 1 for kind in KINDS]
PER_CONFIGURATION = 20
HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 31, 1 << 63, 10**400, 1e308, -0.0, float("nan"), float("inf")),
    *("", " ", "\u202e\u0000", "\ud7ff" * 3, "e\u0301" * 40, "../../etc/passwd", "a" * 2000),
    *("os:system", f"{MARK}.csv", f"{{{MARK}}}", "%s%n", "null", "1e999", "!!python/name:os.abort"),
    *([], {}, [[[[]]]], [1, "a", None], {"": ""}, {"name": []}, list(range(300))),
)
"""Values of other types, ranges and lengths than any key takes."""

RECORDS = (
    *("config", "arrays", "recipients", "key-box", "dealt", "survivors", "roster", "parcels"),
    *("fitins.config", "fitins.parameters", "evaluateins.config", "getpropertiesins.config"),
    *("ciphertexts", "aggregate-1", "metrics", "update", "bract.defenses", "", "a/b", f"{MARK}"),
)
"""Names of records: bract's own, those of Flower's older API, and none of any app."""


def site_data(folder: Path) -> Path:
    """Write a site's own file, as table and texts, and a folder of images; return the file.

    The last row breaks every schema, and the image is none.
    """
    path = folder / f"{MARK}.csv"
    rows = [",".join(f"{MARK}-{column}-{i}" for column in range(3)) for i in range(60)]
    path.write_text("\n".join([",".join(COLUMNS), *rows, ",,"]) + "\n")
    images = folder / f"{MARK}-images" / "train" / f"{MARK}-class"
    images.mkdir(parents=True)
    (images / f"{MARK}.png").write_bytes(b"\x89PNG")
    return path


@cache
def bract_app() -> ClientApp:
    """Return bract's own ClientApp."""
    app: ClientApp = import_module("bract.client.app").app
    return app


@dataclass
class Asked:
    """One message, and the texts that the server wrote for it."""

    grid: LoopbackGrid
    message: Message
    kind: str
    app: str
    config: str = field(repr=False)

    @property
    def run_config(self) -> str:
        """What is laid over the configuration."""
        return str({k: v for k, v in self.grid.contexts[1].run_config.items() if k != "federation"})

    def repeats(self, text: str) -> bool:
        """Return whether all marked words of a text are the server's own."""
        own = self.config + self.run_config + str(self.message.content)
        words = [word.rstrip(".-") for word in re.findall(rf"{MARK}[\w.-]*", text)]
        return all(word in own for word in words)


class Drawn:
    """Messages to the apps of one site."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._draw, self._file, self._folder = draw, site_data(folder), folder
        self._own = {"mod": _app_under_mod(self._file), "encrypted": _encrypted_app(self._file)}
        self._policy = folder / "policy.yaml"
        self._policy.write_text("{max_rounds_per_run: 3, min_training_images: 30}")
        self._run = 0

    def messages(self) -> Iterator[Asked]:
        """Yield messages without end, some to one run and some to runs of their own."""
        draw = self._draw
        while True:
            config = configuration(draw)
            text = json.dumps(config, ensure_ascii=False)
            if draw.random() < 0.05:
                place = draw.randrange(len(text))
                text = (
                    text[:place] + draw.choice(["", "\t", "&a", "*a", "\x07", "{"]) + text[place:]
                )
            data = config.get("data")
            images = isinstance(data, dict) and data.get("name") in ("folder", "digits")
            grid, app = self._grid(text, images=images)
            for _ in range(PER_CONFIGURATION):
                if draw.random() < 0.8:
                    grid, app = self._grid(text, images=images)
                (kind,) = draw.choices(KINDS, WEIGHTS)
                message = grid.create_message(asked(draw, 1), kind, 1, "")
                yield Asked(grid, message, kind, app, text)

    def _grid(self, text: str, *, images: bool) -> tuple[LoopbackGrid, str]:
        draw = self._draw
        self._run += 1
        app = draw.choices(["bract", "mod", "encrypted"], [6, 2, 1])[0]
        node: dict[str, Any] = {"partition-id": draw.randrange(3), "name": "site"}
        node["data-path"] = str(self._folder / f"{MARK}-images" if images else self._file)
        if draw.random() < 0.03:
            node["state-dir"] = str(self._folder / f"state-{self._run // 2000}")
        if draw.random() < 0.05:
            node["policy"] = str(self._policy)
        run: dict[str, Any] = {"federation": text}
        if app != "bract":
            run["num-server-rounds"] = 3
        if draw.random() < 0.05:
            run |= {draw.choice(["rounds", "data.name", "data.text.label", "a.b.c"]): f"{MARK}-x"}
        return LoopbackGrid(self._own.get(app, bract_app()), [node], run, run_id=self._run), app


def configuration(draw: random.Random) -> dict[str, Any]:
    """Return a run's configuration that names columns, classes and schemas of the site's data.

    Two of five are changed in up to four places, of whatever depth.
    """
    config = _valid(draw)
    if draw.random() < 0.4:
        for _ in range(draw.randrange(1, 5)):
            _spoil(config, draw)
    return config


def _valid(draw: random.Random) -> dict[str, Any]:
    known = [f"{MARK}-{draw.randrange(3)}-{i}" for i in range(draw.choice((2, 5, 30, 59)))]
    column = draw.choice([*COLUMNS, "text"])
    text = {
        "task": draw.choice(["classification", "token-classification", "language-model"]),
        "column": draw.choice([*COLUMNS, "text"]),
        "label": column,
        "classes": known,
        "length": 4,
    }
    table = {
        "columns": [
            {"name": name, "kind": "categorical", "categories": known}
            if draw.random() < 0.7
            else {"name": name, "kind": "continuous", "low": 0.0, "high": 1.0}
            for name in draw.sample(COLUMNS, draw.choice((1, 2)))
        ],
        "target": draw.choice(
            [{"name": column, "categories": known}, {"name": column, "mean": 0.0, "std": 1.0}]
        ),
    }
    kind = draw.choice(["text", "csv", "csv", "folder", "digits"])
    data: dict[str, Any] = {"name": kind, "validation": draw.choice((0.0, 0.3))}
    if kind == "text":
        data |= {"input": "text", "text": text}
    elif kind == "csv":
        data |= {"input": "table", "table": table}
    else:
        data |= {"image_size": 8}
    model = {"text": "text-encoder(width=16,depth=1,heads=2)", "csv": "mlp"}.get(kind, "mlp")
    return {
        "name": "asked",
        "clients": 3,
        "rounds": 50,
        "data": data,
        "model": {"name": model},
        "training": draw.choice(
            [
                {"lr": 0.1, "local_steps": 1, "batch_size": 2},
                {"lr": 0.1, "local_steps": 1, "private": {"noise_multiplier": 1.0}},
            ]
        ),
        "encryption": draw.choice(["none", "none", "masks", "paillier"]),
        "defenses": draw.choice([[], [{"name": "noise", "std": 0.1, "clip": 1.0}]]),
    }


def _spoil(config: dict[str, Any], draw: random.Random) -> None:
    """Change a value, a key or a type somewhere in nested dictionaries and lists."""
    place: Any = config
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = draw.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.2:
            break
        place = place[key]
    change = draw.randrange(4)
    if change == 0 and isinstance(place, dict):
        name = draw.choice(["unknown", f"{MARK}-key", "", "name", "path", "lr", "\u00e9"])
        place[name] = deepcopy(place[key])
    elif change == 1:
        del place[key]
    elif change == 2:
        place[key] = {"nested": {"deeper": place[key]}}
    else:
        place[key] = deepcopy(draw.choice(HOSTILE))


@cache
def _model() -> ArrayRecord:
    return ArrayRecord(create_model("mlp", classes=10, channels=1, image_size=8).state_dict())


def asked(draw: random.Random, number: int) -> RecordDict:
    """Return the content of a message to bract's own app, or of one to another app."""
    instructions: dict[str, Any] = {
        "server-round": draw.choice([number, number, number, -1, 2**60]),
        "bract-version": release(),
        "bract-session": draw.choice(["run", f"run-{number}"]),
        "models": draw.choice([1, 3, 400]),
    }
    if draw.random() < 0.1:
        instructions.pop(draw.choice(list(instructions)))
    if draw.random() < 0.15:
        key = draw.choice([*instructions, "proximal-mu", "vectors", "tag", "bract-challenge"])
        instructions[key] = _scalar(draw)
    content = RecordDict({"config": ConfigRecord(instructions)})
    if draw.random() < 0.3:
        content["arrays"] = draw.choice([_model(), ArrayRecord(), _garbage(draw)])
    while draw.random() < 0.25:
        name = draw.choice(RECORDS)
        content.pop(name, None)
        content[name] = _record(draw)
    if draw.random() < 0.02:
        content.pop("config")
    return content


def _scalar(draw: random.Random) -> Any:
    lists: list[Any] = [[1, 2], ["a"], [float("nan")], [], [b"x"]]
    scalars = [v for v in HOSTILE if isinstance(v, bool | float | str)]
    whole = [v for v in HOSTILE if type(v) is int and abs(v) < 1 << 63]
    return draw.choice([*scalars, *whole, b"", b"\x00" * 40, *lists])


def _record(draw: random.Random) -> Any:
    kind = draw.randrange(3)
    if kind == 0:
        return ConfigRecord({str(draw.randrange(5)): _scalar(draw) for _ in range(3)})
    if kind == 1:
        return MetricRecord({"num-examples": draw.choice([1, -1, float("nan"), 2**62])})
    return _garbage(draw)


def _garbage(draw: random.Random) -> ArrayRecord:
    """Return arrays whose bytes are not what their shape and type say."""
    shape = draw.choice([(), (0,), (3, 1), (1 << 40,), (-1,)])
    array = Array(
        dtype=draw.choice(["float32", "int64", "object", "bfloat16", f"{MARK}"]),
        shape=shape,
        stype=draw.choice(["numpy.ndarray", "pickle", ""]),
        data=draw.randbytes(draw.choice([0, 7, 128])),
    )
    return ArrayRecord({draw.choice(["0", "weight", "../x", f"{MARK}"]): array})


def _third_party(app: ClientApp, file: Path) -> ClientApp:
    """Let an app raise, reply with an error, or answer, and quote the site's file where it can."""
    turn = iter(range(1 << 60))

    @app.train()
    @app.train("fit")
    @app.evaluate()
    @app.evaluate("fused")
    @app.evaluate("final")
    @app.query()
    @app.query("get_parameters")
    @app.query("hello")
    def work(message: Any, context: Any) -> Any:
        del context
        row, number = file.read_text().splitlines()[3], next(turn)
        if number % 3 == 0:
            raise ValueError(f"cannot read {row}")
        if number % 3 == 1:
            return Message(Error(number % 7, f"{row} is wrong"), reply_to=message)
        content = RecordDict({"metrics": MetricRecord({"num-examples": 40, "loss": 0.5})})
        if "train" in message.metadata.message_type:
            content["arrays"] = message.content.get("arrays", _model())
        return Message(content, reply_to=message)

    return app


def _app_under_mod(file: Path) -> ClientApp:
    return _third_party(ClientApp(mods=[DefenseMod("noise", std=1.0)]), file)


def _encrypted_app(file: Path) -> ClientApp:
    return _third_party(EncryptedClientApp(clients=3, keys="in-band"), file)
