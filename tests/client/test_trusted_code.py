"""A server names code in a run's configuration; only what the site lists is imported."""

import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict
from refusals import check_named, refused
from torch import nn

from bract.client import app as client_app
from bract.config import build_config, dump_config
from bract.installed import release
from bract.models import create_model
from bract.protocol.arrays import to_arrays
from bract.protocol.records import ARRAYS, CONFIG, ROUND_KEY, VERSION_KEY
from bract.server.loopback import LoopbackGrid

ATTACKS = ["os:abort", "ray:init", "os:getpid", "builtins:breakpoint", "trap_for_clients:spring"]


def own_net() -> Any:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.fixture(autouse=True)
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a file where it is imported."""
    (tmp_path / "trap_for_clients.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w')\ndef spring():\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "sprung"


def ask(model: str, node: Any = None, kind: str = "train", **data: Any) -> Any:
    config = build_config(
        {
            "clients": 1,
            "rounds": 2,
            "data": {"image_size": 8, **data},
            "model": {"name": model},
            "training": {"local_steps": 1},
        }
    )
    grid = LoopbackGrid(
        client_app.app,
        [{"partition-id": 0, **(node or {})}],
        {"federation": dump_config(config)},
    )
    content = RecordDict(
        {
            ARRAYS: to_arrays(own_net().state_dict()),
            CONFIG: ConfigRecord({ROUND_KEY: 1, VERSION_KEY: release()}),
        }
    )
    (reply,) = grid.send_and_receive([grid.create_message(content, kind, 1, "")])
    return reply


@pytest.mark.parametrize("model", ATTACKS)
@pytest.mark.parametrize("kind", ["train", "evaluate", "query.hello"])
def test_code_that_a_server_names_is_refused_by_name_and_not_imported(
    model: str, kind: str, trap: Path
) -> None:
    loaded = set(sys.modules)
    reason = ask(model, kind=kind).error.reason
    check_named(reason, "client-0", "model.name", repr(model))
    assert "site.yaml" in reason
    assert not trap.exists()
    assert not {"ray", "trap_for_clients"} & (set(sys.modules) - loaded)


def test_code_that_the_node_config_lists_runs() -> None:
    assert ask(f"{__name__}:own_net", {"models": f"a:b {__name__}:own_net"}).has_content()


def test_code_that_the_policy_lists_runs_and_no_other(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"models: ['{__name__}:own_net']\n")
    assert ask(f"{__name__}:own_net", {"policy": str(policy)}).has_content()
    assert "is code" in ask("os:abort", {"policy": str(policy)}).error.reason


def test_a_site_that_lists_what_is_no_reference_takes_no_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "lenet" not in ask("lenet", {"models": "lenet"}).error.reason
    check_named(caplog.text, "models", "package.module:callable")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"path": "/home"}, "data.path is the site's to allow"),
        ({"path": "../elsewhere"}, "data.path is the site's to allow"),
        (
            {"name": "clinical-notes", "input": "text", "text": {"tokenizer": "/home"}},
            "data.text.tokenizer is the site's to allow",
        ),
        ({"download": True}, "data.download must be false"),
    ],
)
def test_what_a_server_names_on_a_sites_disk_is_not_opened(
    data: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bract.client.session.client_data", None)
    assert said in ask("lenet", **data).error.reason


def test_a_folder_that_the_site_allows_is_opened(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    name = f"{__name__}:own_net"
    node = {"models": name, "data-paths": f"/nowhere:{tmp_path}", "download": True}
    assert ask(name, node, path=str(tmp_path / "shared"), download=True).has_content()
    outside = ask(name, node, path=str(tmp_path / "shared" / ".." / ".."))
    check_named(outside.error.reason, "data.path")


def test_an_empty_list_of_paths_allows_none_of_the_node_config(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("data: {paths: []}\n")
    node = {"data-paths": str(tmp_path), "policy": str(tmp_path / "policy.yaml")}
    words = {"tokenizer": str(tmp_path / "words")}
    reason = ask("lenet", node, name="clinical-notes", input="text", text=words).error.reason
    check_named(reason, "data.path", "data.text.tokenizer")


def test_a_name_without_trust_makes_no_model() -> None:
    with refused("code-untrusted", "os:getpid"):
        create_model("os:getpid", classes=10, channels=1, image_size=8)
