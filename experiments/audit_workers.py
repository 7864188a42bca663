"""An audit by one worker and by two: wall time, processor time, and whether results are equal.

    python -m experiments.audit_workers [--uploads 16] [--iterations 2000] [--repeats 3] [--json]

Every upload is the gradient of two 16-pixel digits from a strided LeNet, attacked by ``ig`` in
batches of two, one thread a worker. The clock runs from the first batch that is handed out to the
last result on disk, after each worker has attacked a batch for one iteration; one worker and two
take turns. Processor seconds are those of the workers. Other work on the machine leaves each worker
less of a core: ``cores`` is how many the workers had on average, and ``load`` the machine's load
average over the last minute at the end.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bract.audit.audit import Audit
from bract.audit.audit_pool import Attacking, AuditPool
from bract.captures.observation import ObservationStore
from bract.cli.launch.cluster import Asked, Cluster, connected
from bract.config import FederationConfig, build_config
from bract.config.config import AuditRequest
from bract.data.views import client_data, data_spec
from bract.pool import Ray
from bract.rundir import RunDirectory
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.uploads import gradient_upload, network_for

COLUMNS = ["workers", "uploads", "iterations", "seconds", "cpu_seconds", "cores", "load", "equal"]
BATCH = 2
MODEL = "lenet-strided"


def capture(root: Path, clients: int) -> RunDirectory:
    """Write the captures of one round."""
    config: FederationConfig = build_config(
        {
            "clients": clients,
            "data": {"image_size": 16, "validation": 0.0},
            "model": {"name": MODEL, "activation": "relu"},
            "training": {"algorithm": "fedsgd", "batch_size": 2},
        }
    )
    run = RunDirectory(root)
    run.create(config)
    run.update_state(status="finished")
    spec = data_spec(config.data)
    model = network_for(spec, MODEL, 0, activation="relu")
    for client in range(clients):
        data = client_data(config, client)
        images, labels = data.images[:BATCH], data.labels[:BATCH]
        seen = gradient_upload(
            model,
            images,
            labels,
            spec=spec,
            client=f"client-{client}",
            model=MODEL,
            activation="relu",
        )
        ObservationStore(run.captures).save(seen)
    return run


def processor_seconds() -> float:
    """Return what the workers have computed."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if "ray::Worker" in " ".join(process.cmdline()):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            continue
    return total


def facts(run: RunDirectory) -> list[Any]:
    """Return the results without their times."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: timeless(v) for k, v in value.items() if k != "seconds" or v is None}
        return [timeless(v) for v in value] if isinstance(value, list) else value

    files = sorted(run.audit.rglob("*.json"))
    pictures = [p.read_bytes() for p in sorted(run.audit.rglob("*.png"))]
    return [*(timeless(json.loads(path.read_text())) for path in files), *pictures]


def measure(run: RunDirectory, cluster: Cluster, workers: int, iterations: int) -> dict[str, Any]:
    """Audit once."""
    do = Attacking(run.root.absolute(), 1)
    with Ray(cluster.ray, do, workers=workers, gpus=cluster.gpus) as ray:
        pool = AuditPool(cluster.device, ray)
        seconds = 0.0
        for steps in (1, iterations):
            audit = Audit(
                run, AuditRequest(attacks=["ig"], iterations=steps, device="cpu", batch=BATCH)
            )
            used, begun = processor_seconds(), time.perf_counter()
            results = list(pool.execute(audit, audit.plan(), lambda *_: None))
            seconds, used = time.perf_counter() - begun, processor_seconds() - used
    note(f"{workers} workers: {seconds:.1f} s, {used:.1f} s of processors")
    return {
        "workers": workers,
        "uploads": len(results),
        "iterations": iterations,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used, 2),
        "cores": round(used / seconds, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--uploads", type=int, default=16)
    arguments.add_argument("--iterations", type=int, default=2000)
    arguments.add_argument("--repeats", type=int, default=3)
    options = parse(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        run = capture(Path(folder) / "run", options.uploads)
        choice = AuditRequest(
            attacks=["ig"], iterations=options.iterations, device="cpu", batch=BATCH
        )
        audit = Audit(run, choice)
        list(audit.execute(audit.plan()))
        alone = facts(run)
        with connected(Asked(workers=2, device="cpu")) as cluster:
            for repeat in range(options.repeats):
                pair = []
                for workers in (1, 2):
                    row = measure(run, cluster, workers, options.iterations)
                    pair.append(row | {"repeat": repeat, "equal": facts(run) == alone})
                ratio = pair[0]["seconds"] / pair[1]["seconds"]
                rows += [pair[0], pair[1] | {"ratio": round(ratio, 3)}]
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    note(f"two workers are {statistics.median(ratios):.2f} times as fast as one")
    emit(rows, [*COLUMNS, "ratio"], as_json=options.json)


if __name__ == "__main__":
    main()
