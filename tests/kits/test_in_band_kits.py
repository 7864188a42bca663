"""Keys that the sites make among themselves, over start-up kits: SuperLink, nginx, SuperNodes."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from sites import BRACT, NGINX, Processes, bract, federation, free_ports, start_server

from bract.config import dump_config, load_config
from bract.kits.provisioning import provision
from bract.rundir import RunDirectory

pytestmark = [
    pytest.mark.processes,
    pytest.mark.deployment,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx"),
]

SITES = ("hospital-a", "hospital-b", "hospital-c")


def test_sites_make_the_key_among_themselves_and_a_resumed_run_waits_for_all_of_them() -> None:
    folder = Path(tempfile.mkdtemp(prefix="bract-in-band-"))
    port, superlink_port = free_ports(2)
    config = federation(
        *SITES,
        deployment={"port": port, "superlink_port": superlink_port},
        encryption={"scheme": "paillier", "keys": "in-band", "key_bits": 2048, "threshold": 2},
        strategy={"name": "fedavg", "timeout": 120, "tolerate_failures": True},
    )
    processes = Processes(folder)
    operator = folder / "kits" / "operator"
    run = RunDirectory(folder / "runs" / "study")

    def start(site: str) -> None:
        processes.bract(site, "supernode", "--kit", folder / "kits" / site)

    try:
        provision(config, folder / "kits", source=folder / "federation.yaml")
        start_server(processes, operator, superlink_port, port)
        done = bract("site", "register", "--kit", operator)
        assert done.returncode == 0, done.stderr
        for site in SITES:
            start(site)
        where = (
            *("--runs", folder / "runs"),
            *("--superlink", operator / "sockets" / f"{superlink_port}.sock"),
        )
        done = bract("run", operator / "federation.yaml", *where)
        logs = {site: processes.log(site).read_text()[-2000:] for site in SITES}
        assert done.returncode == 0, (done.stderr, logs)
        assert set(run.metrics()[-1].clients) == set(SITES)

        gone = processes.started.pop("hospital-c")
        gone.terminate()
        gone.wait(60)
        longer = load_config(operator / "federation.yaml").model_copy(update={"rounds": 2})
        (folder / "longer.yaml").write_text(dump_config(longer))
        run.update_state(status="interrupted")
        resumed = subprocess.Popen(
            [*BRACT, "run", str(folder / "longer.yaml"), *(str(w) for w in where), "--resume"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert resumed.stderr is not None
        said = ""
        for line in resumed.stderr:
            said += line
            if "waiting for clients" in line:
                start("hospital-c")
        assert resumed.wait(60) == 0, said
        assert "2 of 3 are connected (hospital-a, hospital-b), missing: hospital-c" in said
        assert set(run.metrics()[-1].clients) == set(SITES)
    finally:
        processes.end()
        shutil.rmtree(folder)
