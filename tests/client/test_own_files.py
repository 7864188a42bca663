"""No reply names a file or a setting of the site, whatever is wrong with it."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

from bract.client import REFUSED
from bract.client import app as client_app
from bract.config import build_config, dump_config
from bract.data import views
from bract.defenses import configured
from bract.installed import release
from bract.protocol import arrays
from bract.server import loopback

IN_BAND = {"scheme": "paillier", "keys": "in-band"}


def asked(encryption: Any, kind: str, node: dict[str, Any], tmp_path: Path) -> str:
    """Return the error with which a site answers."""
    config = build_config(
        {
            "name": "asked",
            "clients": 3,
            "rounds": 2,
            "data": {"image_size": 8},
            "model": {"name": "linear"},
            "training": {"lr": 0.1, "local_steps": 1},
            "encryption": encryption,
        }
    )
    node = {"partition-id": 0, "name": "site", "state-dir": str(tmp_path / "state"), **node}
    grid = loopback.LoopbackGrid(client_app.app, [node], {"federation": dump_config(config)})
    spec: Any = views.known_spec(config.data)
    model = configured.configured_model(config, spec)
    about: dict[str, Any] = {"server-round": 1, "bract-version": release(), "bract-session": "x"}
    content: dict[str, Any] = {
        "config": ConfigRecord(about),
        "arrays": arrays.to_arrays(model.state_dict()),
    }
    (reply,) = grid.send_and_receive([grid.create_message(RecordDict(content), kind, 1, "")])
    assert reply.has_error()
    return str(reply.error.reason)


@pytest.mark.parametrize("mode", [None, 0o600, 0o644])
@pytest.mark.parametrize(
    ("key", "encryption", "kind"),
    [
        ("paillier-key", "paillier", "query.hello"),
        ("paillier-key", "paillier", "train"),
        ("identity-key", IN_BAND, "query.hello"),
        ("identity-key", "masks", "query.advertise"),
        ("peers", "masks", "query.advertise"),
        ("policy", "none", "train"),
        ("private-seed-file", "none", "train"),
    ],
)
def test_a_file_that_cannot_be_read_stays_at_the_site(
    key: str, encryption: Any, kind: str, mode: int | None, tmp_path: Path
) -> None:
    folder = tmp_path / "MARKED"
    folder.mkdir()
    if mode is not None:
        (folder / "file").write_text("MARKED {}")
        (folder / "file").chmod(mode)
    reason = asked(encryption, kind, {key: str(folder / "file")}, tmp_path)
    assert "MARKED" not in reason
    assert str(tmp_path) not in reason
    assert REFUSED in reason


def test_a_wrong_device_of_the_site_stays_there(tmp_path: Path) -> None:
    reason = asked("none", "train", {"device": "MARKED"}, tmp_path)
    assert "MARKED" not in reason
    assert REFUSED in reason


@pytest.mark.parametrize(
    ("given", "at"),
    [
        ({"data": {"name": "folder", "path": "/GUESS"}}, "/GUESS"),
        ({"model": {"name": "lenet"}}, "lenet"),
        ({"defenses": [{"name": "noise", "std": 0.125}]}, "0.125"),
        ({}, "version"),
    ],
    ids=["data.path", "model.name", "a number", "the message"],
)
def test_a_path_of_a_request_reads_alike_whether_it_is_one_of_the_sites_or_not(
    given: dict[str, Any], at: str, tmp_path: Path
) -> None:
    """Else a server would try paths until it knows where a site has its policy and state."""
    text = dump_config(build_config({"name": "s", "model": {"name": "linear"}, **given}))

    def asked_of(site: Path, guess: str) -> str:
        site.mkdir(exist_ok=True)
        (site / "policy.yaml").write_text("{}")
        own = {"policy": str(site / "policy.yaml"), "state-dir": str(site / "state")}
        version = guess if at == "version" else release()
        about = ConfigRecord({"server-round": 1, "bract-version": version})
        settings = {"federation": text.replace(at, guess)}
        grid = loopback.LoopbackGrid(client_app.app, [{"partition-id": 0, **own}], settings)
        message = grid.create_message(RecordDict({"config": about}), "train", 1, "")
        (reply,) = grid.send_and_receive([message])
        return str(reply.error.reason)

    sites = tmp_path / "one", tmp_path / "other"
    for guess in ("one/policy.yaml", "other/state", "one/stat", "/etc"):
        reasons = {asked_of(site, str(tmp_path / guess)) for site in sites}
        assert len(reasons) == 1
