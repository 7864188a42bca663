"""The rules that Flower's processes are started under: each holds, or nothing starts."""

from pathlib import Path

import pytest

from bract.deploy import flower, rules, sockets
from bract.errors import BractError


def test_sockets_are_refused_in_a_folder_that_others_may_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv(sockets.FOLDER, str(tmp_path))
    with pytest.raises(BractError, match="mode 0755; the folder of sockets must be"):
        sockets.listener(8000)


def test_another_version_of_flower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "installed", lambda: "1.42.0")
    with pytest.raises(BractError, match=r"Flower 1\.42\.0 is installed"):
        flower.run("flower-superlink")


def test_a_rule_that_has_nothing_to_replace_stops_the_process() -> None:
    with pytest.raises(BractError, match="a rule of bract would not hold"):
        rules.replace("flwr.supernode.start_client_internal", "no_such_name", None)
