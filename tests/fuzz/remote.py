"""Parsers of what another machine sends: packs, and what a server app tells over its log."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch
from fuzz.mutations import documents, garbage, mangled
from fuzz.outcome import Parser
from hypothesis import strategies as st
from safetensors.torch import save

from bract.cli.unpacking import pull
from bract.protocol.progress import ProgressReader

TOKEN = "0f" * 16
ROW = {"schema": 3, "round": 1, "seconds": 1.5, "global": {"loss": 0.5, "accuracy": 0.5}}
REPORTED = [
    {"event": "training", "name": "n", "rounds": 3, "clients": 2, "run": "/srv/runs/n-1"},
    {"event": "round", "row": ROW},
    {"event": "failed", "error": "no images"},
]


def packed(files: dict[str, bytes], contents: bytes | None = None) -> bytes:
    """Return a pack of files, whose ``pack.json`` is right unless another one is given."""
    whole = {
        "schema": 1,
        "bract": "1",
        "run": "n",
        "files": {
            name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
    }
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        text = json.dumps(whole).encode() if contents is None else contents
        for name, content in {"pack.json": text, **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


MODEL = save({"w": torch.zeros(3)})
WHOLE = packed({"metrics.jsonl": json.dumps(ROW).encode(), "final.safetensors": MODEL})


def _inside(name: str) -> Callable[[bytes], bytes]:
    return lambda content: packed({name: content})


def _packs() -> st.SearchStrategy[bytes]:
    entry = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    contents = [{"schema": 1, "bract": "1", "run": "n", "files": {"last.safetensors": entry}}]
    return st.one_of(
        st.just(WHOLE),
        mangled([WHOLE]),
        garbage(),
        documents([ROW]).map(_inside("metrics.jsonl")),
        documents([ROW]).map(_inside("report.json")),
        mangled([MODEL]).map(_inside("final.safetensors")),
        documents(contents).map(lambda text: packed({}, text)),
    )


def _pull(content: bytes, folder: Path) -> object:
    (folder / "pack").write_bytes(content)
    return pull(str(folder / "pack"), folder / "here")


def _listen(content: bytes, folder: Path) -> object:
    del folder
    reader = ProgressReader()
    begun = f'bract-{TOKEN} {{"event": "begun"}}\n'
    text = content.decode(errors="replace")
    return list(reader.feed(f"{begun}bract-{TOKEN} {{{text.removeprefix('{')}\n{text}\n"))


REMOTE = [
    Parser("pack", _packs(), _pull, "cli/unpacking.py"),
    Parser("progress", documents(REPORTED), _listen, "bract/protocol/progress.py"),
]
