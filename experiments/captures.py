"""What captures take on disk: each with what was sent, once a round, rounded, compressed.

    python -m experiments.captures [--clients 3] [--rounds 2] [--repeats 3] [--json]

Clients train on the embedded digits (LeNet at 32 pixels as ``bract init`` has it; ResNet-18 at 64
and 32 pixels in colour, a few batches), and every capture is written to disk by the store, and
read again. ``before`` is how captures were written until schema 3: each with all that was sent. The
bytes of a larger federation (``--of-clients``, ``--of-rounds``) are computed from those that were
written: a capture's own files for every client and round, and what was sent for every round, where
it is shared, else for every client. zstd is pyarrow's, level 3; ``grouped`` puts the first bytes of
all values before the second ones. The attack is on single digits, one gradient each.
"""

import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import torch
from safetensors.torch import load_file

from bract.attacks import Reconstruction, reconstruct
from bract.captures.observation import ClientDeclaration, Observation, ObservationStore
from bract.captures.storing import GROUPS, encode
from bract.config import FederationConfig, build_config
from bract.config.capture import Compression, Dtype
from bract.data.views import client_data, data_spec
from bract.disk import replacing, tensors_as_bytes, write_bytes
from bract.scores.image import psnr
from bract.updates.rounding import rounded
from bract.updates.update import buffers_of, difference, parameters_of
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.uploads import gradient_upload, network_for

MODELS: dict[str, dict[str, Any]] = {
    "lenet": {
        "model": {"name": "lenet", "activation": "relu"},
        "training": {"batch_size": 8, "lr": 0.1},
    },
    "resnet18": {
        "model": {"name": "resnet18", "activation": "relu"},
        "data": {"channels": 3, "image_size": 64},
        "training": {"batch_size": 8, "lr": 0.1, "local_steps": 4},
    },
    "resnet18 at 32": {
        "model": {"name": "resnet18", "activation": "relu"},
        "data": {"channels": 3},
        "training": {"batch_size": 8, "lr": 0.1, "local_steps": 4},
    },
}
LAYOUTS: dict[str, tuple[Dtype, Compression]] = {
    "before": ("float32", "none"),
    "once a round": ("float32", "none"),
    "zstd": ("float32", "zstd"),
    "float16": ("float16", "none"),
    "bfloat16": ("bfloat16", "none"),
    "float16 and zstd": ("float16", "zstd"),
}
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
COLUMNS = (
    *("kind", "model", "layout", "written_mb", "own_mb", "sent_mb", "of_gb", "share_sent"),
    *("write_ms", "read_ms", "error", "what", "ratio", "grouped", "compress_ms", "psnr"),
)


def main() -> None:
    """Write, read and compress; then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--clients", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--of-clients", type=int, default=50)
    arguments.add_argument("--of-rounds", type=int, default=10)
    arguments.add_argument("--images", type=int, default=16)
    options = parse(arguments)
    rows: list[dict[str, Any]] = []
    for name, content in MODELS.items():
        config = build_config({"clients": options.clients, **content})
        observations = trained(config, options)
        note(f"{name}: {len(observations)} uploads")
        for layout in LAYOUTS:
            rows.append({"model": name, **layout_row(layout, observations, options)})
            note(f"{name}, {layout}: {rows[-1]['own_mb']:.3f} MB a capture of its own")
        rows += [{"model": name, **row} for row in zstd_rows(observations, options)]
    rows += attack_rows(options)
    emit(rows, COLUMNS, as_json=options.json)


def trained(config: FederationConfig, options: Any) -> list[Observation]:
    """Return what a server of this federation holds, round by round."""
    spec = data_spec(config.data)
    model = network_for(spec, config.model.name, 0, activation=config.model.activation)
    training = config.training
    found = []
    for number in range(1, options.rounds + 1):
        sent, buffers = parameters_of(model), buffers_of(model)
        mean = {name: torch.zeros_like(value) for name, value in sent.items()}
        for client in range(options.clients):
            model.load_state_dict(sent | buffers)
            data = client_data(config, client)
            optimizer = torch.optim.SGD(model.parameters(), lr=training.lr)
            batches = len(data.images) // training.batch_size
            for step in range(training.local_steps or batches):
                at = step % batches * training.batch_size
                images = spec.normalise(data.images[at : at + training.batch_size])
                labels = data.labels[at : at + training.batch_size]
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
            update = difference(sent, parameters_of(model))
            found.append(
                Observation(
                    round=number,
                    client=f"client-{client}",
                    parameters=sent,
                    buffers=buffers,
                    update=update,
                    returned_buffers=buffers_of(model),
                    declaration=ClientDeclaration(model=config.model.name, lr=training.lr),
                    provenance={"received": time.time(), "metrics": {"loss": 0.5}},
                )
            )
            mean = {n: v + update[n] / options.clients for n, v in mean.items()}
        model.load_state_dict({n: v - mean[n] for n, v in sent.items()} | buffers)
    return found


def layout_row(layout: str, observations: list[Observation], options: Any) -> dict[str, Any]:
    """Write every observation in one layout, several times over, and read it again."""
    dtype, compression = LAYOUTS[layout]
    writes: list[float] = []
    reads: list[float] = []
    losses = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            store = ObservationStore(root)
            store.compression = compression
            save = partial(saved_alone, store) if layout == "before" else store.save
            for observation in observations:
                started = time.perf_counter()
                update, loss = rounded(observation.update, dtype)
                save(replace(observation, update=update, rounded=loss))
                writes.append(time.perf_counter() - started)
                losses += [loss.error] if loss and loss.error is not None else []
            read = read_alone if layout == "before" else ObservationStore(root).load
            for folder in ObservationStore(root).folders():
                started = time.perf_counter()
                read(folder)
                reads.append(time.perf_counter() - started)
            sent = sum(p.stat().st_size for p in root.glob("round-*/.sent/*"))
            total = sum(p.stat().st_size for p in root.rglob("*") if p.is_file())
    captures = len(observations)
    own = (total - sent) / captures
    a_round = sent / options.rounds
    many = options.of_clients * options.of_rounds
    held = observations[0]
    what_was_sent = sum(len(tensors_as_bytes(t)) for t in (held.parameters, held.buffers) if t)
    return {
        "kind": "layout",
        "layout": layout,
        "clients": options.clients,
        "rounds": options.rounds,
        "repeats": options.repeats,
        "written_mb": total / 1e6,
        "own_mb": own / 1e6,
        "sent_mb": a_round / 1e6,
        "share_sent": what_was_sent / own if layout == "before" else None,
        "of_clients": options.of_clients,
        "of_rounds": options.of_rounds,
        "of_gb": (own * many + a_round * options.of_rounds) / 1e9,
        "write_ms": 1e3 * statistics.median(writes),
        "read_ms": 1e3 * statistics.median(reads),
        "error": max(losses, default=None),
    }


def saved_alone(store: ObservationStore, observation: Observation) -> None:
    """Write one observation as schema 3 did: every group of tensors in the client's folder."""
    content = json.loads(bytes(encode(observation).own["observation.json"]))
    for key in ("sent", "rounded", "packed", "uploaded"):
        del content[key]
    final = store.folder(observation.round, observation.client)
    with replacing(final) as temporary:
        temporary.mkdir()
        for group in GROUPS:
            if getattr(observation, group):
                tensors = tensors_as_bytes(getattr(observation, group))
                write_bytes(temporary / f"{group}.safetensors", tensors)
        text = json.dumps(content | {"schema": 3}, indent=1)
        write_bytes(temporary / "observation.json", text.encode())


def read_alone(folder: Path) -> None:
    """Read one observation as schema 3 was read."""
    json.loads((folder / "observation.json").read_text())
    for path in folder.glob("*.safetensors"):
        load_file(path)


def zstd_rows(observations: list[Observation], options: Any) -> list[dict[str, Any]]:
    """Compress what a capture holds of its own, and what was sent, in memory."""
    codec = pyarrow.Codec("zstd", compression_level=3)
    rows: list[dict[str, Any]] = []
    held = [
        (f"update, {dtype}", [rounded(o.update, dtype)[0] for o in observations])
        for dtype in DTYPES
    ]
    held.append(("parameters", [o.parameters for o in observations[:: options.clients]]))
    for what, tensors in held:
        for grouped in (False, True):
            ratios, packing, unpacking, identical = [], [], [], True
            for each in tensors:
                data = tensors_as_bytes(each)
                if grouped:
                    width = next(iter(each.values())).element_size()
                    start = 8 + int.from_bytes(data[:8], "little")
                    body = torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8)
                    data = data[:start] + body.reshape(-1, width).T.contiguous().numpy().tobytes()
                started = time.perf_counter()
                packed = codec.compress(data, asbytes=True)
                packing.append(time.perf_counter() - started)
                started = time.perf_counter()
                again = codec.decompress(packed, len(data), asbytes=True)
                unpacking.append(time.perf_counter() - started)
                identical &= again == data
                ratios.append(len(packed) / len(data))
            assert identical
            rows.append(
                {
                    "kind": "zstd",
                    "what": what,
                    "grouped": grouped,
                    "ratio": statistics.fmean(ratios),
                    "compress_ms": 1e3 * statistics.median(packing),
                    "decompress_ms": 1e3 * statistics.median(unpacking),
                    "zeros": zero_share(tensors[0]),
                }
            )
    return rows


def zero_share(tensors: dict[str, torch.Tensor]) -> float:
    """Return the share of values that are exactly zero."""
    zeros = sum(int((value == 0).sum()) for value in tensors.values())
    return zeros / sum(value.numel() for value in tensors.values())


def attack_rows(options: Any) -> list[dict[str, Any]]:
    """Attack single digits' gradients, stored in each precision."""
    config = build_config({"clients": 1, "data": {"image_size": 16}})
    spec = data_spec(config.data)
    data = client_data(config, 0)
    model = network_for(spec, "lenet-strided", 0)
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        observations, errors = [], []
        for index in range(options.images):
            seen = gradient_upload(
                model,
                data.images[index : index + 1],
                data.labels[index : index + 1],
                spec=spec,
                client=f"client-{index}",
                model="lenet-strided",
            )
            update, lost = rounded(seen.update, dtype)
            errors.append((lost and lost.error) or 0.0)
            stored = {name: value.float() for name, value in update.items()}
            observations.append(replace(seen, update=stored))
        results = reconstruct(observations, "gauss-newton", device="cpu")
        scores = [
            float(psnr(found.images, data.images[i : i + 1]).mean())
            for i, found in enumerate(results)
            if isinstance(found, Reconstruction)
        ]
        note(f"gauss-newton, {dtype}: {statistics.fmean(scores):.1f} dB")
        rows.append(
            {
                "kind": "attack",
                "model": "lenet-strided",
                "what": f"gauss-newton, {dtype}",
                "dtype": dtype,
                "images": len(scores),
                "psnr": statistics.fmean(scores),
                "psnr_least": min(scores),
                "error": max(errors),
            }
        )
    return rows


if __name__ == "__main__":
    main()
