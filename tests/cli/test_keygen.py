from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from typer.testing import CliRunner

from bract.cli.main import app
from bract.config.encryption import EncryptionConfig
from bract.errors import BractError
from bract.paillier import PrivateKey
from bract.paillier.keyfile import read_identity, read_public
from bract.paillier.sharing import KeyShare
from bract.protocol.keyfiles import read_key_file
from bract.runtime.key_files import client_key, write_keys


def test_a_key_pair_is_written_for_the_owner_alone_and_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    result = CliRunner().invoke(app, ["keygen", str(folder), "--bits", "2048"])
    assert result.exit_code == 0, result.output
    for words in ("generating a key of 2048 bits", "public.pem", "private.pem", "paillier-key"):
        assert words in result.output
    assert sorted(p.name for p in folder.iterdir()) == ["private.pem", "public.pem"]
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "private.pem").stat().st_mode & 0o777 == 0o600
    key = read_key_file(folder / "private.pem")
    assert isinstance(key, PrivateKey)
    assert read_public(folder / "public.pem") == key.public
    assert key.public.key_id in result.output
    before = (folder / "private.pem").read_bytes()
    again = CliRunner().invoke(app, ["keygen", str(folder)])
    assert isinstance(again.exception, BractError)
    assert "exists already" in str(again.exception)
    assert (folder / "private.pem").read_bytes() == before


def test_with_a_threshold_each_client_gets_a_share_and_nobody_the_whole_key(tmp_path: Path) -> None:
    config = EncryptionConfig(scheme="paillier", threshold=2, degree=2)
    write_keys(tmp_path, config, clients=3)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["public.pem", "share-0.pem", "share-1.pem", "share-2.pem"]
    read = [read_key_file(client_key(tmp_path, client, 2)) for client in range(3)]
    shares = [share for share in read if isinstance(share, KeyShare)]
    assert [share.index for share in shares] == [1, 2, 3]
    assert {(share.threshold, share.total, share.degree) for share in shares} == {(2, 3, 2)}
    for client in range(3):
        assert client_key(tmp_path, client, 2).stat().st_mode & 0o777 == 0o600


def test_a_site_makes_an_identity_of_its_own_and_reads_its_public_half(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["keygen", str(tmp_path / "site"), "--identity"])
    assert result.exit_code == 0, result.output
    path = tmp_path / "site" / "identity.pem"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_identity(path).public.hex() in result.output
    assert [p.name for p in path.parent.iterdir()] == ["identity.pem"]
    again = CliRunner().invoke(app, ["keygen", str(tmp_path / "site"), "--identity"])
    assert "exists" in str(again.exception)


def test_one_leftover_file_stops_everything(tmp_path: Path) -> None:
    (tmp_path / "share-2.pem").write_text("old")
    config = EncryptionConfig(scheme="paillier", threshold=2)
    with refused("file-taken", "share-2.pem"):
        write_keys(tmp_path, config, clients=3)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threshold", "5"], "threshold is 5, but there are 3 clients"),
        (["--bits", "1024"], "key_bits: found 1024"),
        (["--set", "encryption.randomness=none"], "randomness: found 'none'"),
        (["--set", "encryption.degre=2"], "Did you mean 'encryption.degree'"),
    ],
)
def test_impossible_keys_are_refused_before_anything_is_written(
    tmp_path: Path, arguments: Any, message: Any
) -> None:
    result = CliRunner().invoke(app, ["keygen", str(tmp_path / "keys"), *arguments])
    assert isinstance(result.exception, BractError)
    assert message in str(result.exception)
    assert not (tmp_path / "keys").exists()
