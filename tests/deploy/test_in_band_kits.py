"""Keys that the sites make among themselves, over start-up kits: SuperLink, nginx, SuperNodes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from sites import NGINX, Processes, bract, federation, free_ports, start_server

from bract.config import dump_config
from bract.deploy.provisioning import provision
from bract.rundir import RunDirectory

pytestmark = [
    pytest.mark.processes,
    pytest.mark.deployment,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx"),
]


def test_sites_make_the_key_among_themselves_and_one_that_lost_it_is_named() -> None:
    folder = Path(tempfile.mkdtemp(prefix="bract-in-band-"))
    port, superlink_port = free_ports(2)
    names = ("hospital-a", "hospital-b", "hospital-c")
    config = federation(
        *names,
        deployment={"port": port, "superlink_port": superlink_port},
        encryption={"scheme": "paillier", "keys": "in-band", "key_bits": 2048, "threshold": 2},
        strategy={"name": "fedavg", "timeout": 90},
    )
    processes = Processes(folder)
    operator = folder / "kits" / "operator"
    try:
        provision(config, folder / "kits", source=folder / "federation.yaml")
        start_server(processes, operator, superlink_port, port)
        done = bract("site", "register", "--kit", operator)
        assert done.returncode == 0, done.stderr
        for name in names:
            processes.bract(name, "supernode", "--kit", folder / "kits" / name)
        (folder / "run.yaml").write_text(dump_config(config))
        run = ("run", operator / "federation.yaml", "--runs", folder / "runs")
        where = ("--superlink", operator / "sockets" / f"{superlink_port}.sock")
        done = bract(*run, *where)
        logs = {name: processes.log(name).read_text()[-2000:] for name in names}
        assert done.returncode == 0, (done.stderr, logs)
        assert set(RunDirectory(folder / "runs" / "study").metrics()[-1].clients) == set(names)
        print(done.stderr)
    finally:
        processes.end()
        shutil.rmtree(folder)
