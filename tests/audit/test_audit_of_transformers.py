"""A federation of vision transformers in one process, audited with the attack that is chosen."""

import logging
from pathlib import Path
from typing import Any

import pytest
from audited import attacked, request_of, with_keys

import bract.client.app as client_app
from bract.audit.audit import Audit
from bract.config import build_config, dump_config
from bract.disk import write_text
from bract.rundir import RunDirectory
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("defenses", [[], [{"name": "fedkl"}]])
def test_a_federation_of_transformers_shows_each_clients_image(
    tmp_path: Path, defenses: Any
) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = build_config(
        {
            "clients": 2,
            "rounds": 1,
            "seed": 3,
            "data": {"image_size": 16},
            "model": {"name": "vit(patch=4,width=48,depth=1,heads=2)"},
            "training": {"algorithm": "fedsgd", "batch_size": 1},
            "defenses": defenses,
        }
    )
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    nodes: list[dict[str, Any]] = [
        {
            "partition-id": i,
            "state-dir": str(tmp_path / f"state-{i}"),
            "truth-dir": str(run.truth / f"client-{i}"),
            "private-seed-file": str(
                write_text(tmp_path / f"seed-{i}", str(2**200 + i), private=True)
            ),
        }
        for i in range(2)
    ]
    Federation(config, run).train(
        LoopbackGrid(client_app.app, nodes, {"federation": dump_config(config)})
    )
    request = with_keys(request_of(run.root), truth=run.truth)
    results = attacked(Audit(run, request))
    assert len(results) == 2
    for result in results:
        facts = result.to_dict()
        assert facts["chosen_attack"] == "patch-embedding"
        assert facts["scored"] and facts["label_accuracy"] == 1.0
        assert facts["images"][0]["scores"]["psnr"] > 60
