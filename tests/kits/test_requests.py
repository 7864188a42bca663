"""Keys that sites make themselves: who holds what, and which requests and kits are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from refusals import refused
from sites import federation
from test_provisioning import content_of, decoded, secrets_of

from bract.certificates.authority import node_public_text, read_key, read_node_key
from bract.cli.commands.provision import accept
from bract.client.policy import SitePolicy
from bract.config.config import SiteConfig
from bract.errors import BractError
from bract.kits import kit as kits
from bract.kits.administration import add_site, open_kits, revoke_site
from bract.kits.provisioning import AUTHORITY, CA_KEY, provision
from bract.kits.requests import (
    REQUEST,
    accept_kit,
    make_request,
    read_request,
    read_requests,
)
from bract.kits.sites import read_sites
from bract.kits.starting import check_whole
from bract.paillier import exchange
from bract.protocol.keyfiles import read_key_file

SITES = ("hospital-a", "hospital-b", "hospital-c")


def provisioned(folder: Path, **changes: Any) -> Path:
    """Sites make their keys, send requests, and are made kits."""
    (folder / "requests").mkdir()
    for name in SITES:
        make_request(name, folder / "keys" / name)
        shutil.copy(folder / "keys" / name / REQUEST, folder / "requests" / f"{name}.json")
    config = federation(*SITES, **changes)
    requests = read_requests(folder / "requests", list(SITES))
    provision(config, folder / "kits", source=folder / "federation.yaml", requests=requests)
    return folder / "kits"


THRESHOLD = {"scheme": "paillier", "threshold": 2, "max_weight_sum": 31}
IN_BAND = {"scheme": "paillier", "keys": "in-band"}


@pytest.mark.parametrize("encryption", [None, THRESHOLD, IN_BAND], ids=["plain", "shares", "own"])
def test_who_provisions_never_holds_a_sites_key_and_the_accepted_kit_is_whole(
    encryption: dict[str, Any] | None, tmp_path: Path
) -> None:
    made = provisioned(tmp_path, **({} if encryption is None else {"encryption": encryption}))
    returned = content_of(made)
    everything = returned + decoded(returned)
    for name in SITES:
        for form in (f for forms in secrets_of(tmp_path / "keys" / name).values() for f in forms):
            assert form not in everything
        with refused("kit-faulty", tmp_path):
            check_whole(made / name)
        accept_kit(made / name, tmp_path / "keys" / name)
        assert kits.check_files(made / name) == kits.Files()
        key = node_public_text(read_node_key(made / name / kits.NODE_KEY).public_key())
        assert read_sites(made / "operator" / kits.SITES).active[name].public_key == key
    if encryption is THRESHOLD:
        shares = [read_key_file(made / name / kits.PAILLIER_KEY) for name in SITES]
        assert len({share.public.key_id for share in shares}) == 1
        for name in SITES:
            text = (made / name / kits.PAILLIER_KEY).read_bytes()
            assert not any(line in returned for line in text.splitlines() if len(line) > 40)
    assert (made / "hospital-a" / kits.IDENTITY_KEY).exists() == (encryption is not None)


def test_a_share_opens_for_its_site_alone(tmp_path: Path) -> None:
    made = provisioned(tmp_path, encryption=THRESHOLD)
    kit = made / "hospital-a"
    shutil.copy(made / "hospital-b" / kits.PAILLIER_SEALED, kit / kits.PAILLIER_SEALED)
    kits.reissue(kit, [kits.PAILLIER_SEALED])
    with refused("kit-faulty", "CA"):
        accept_kit(kit, tmp_path / "keys" / "hospital-a")
    kits.sign(kit, read_key(made / AUTHORITY / CA_KEY))
    with refused("key-mismatch", tmp_path):
        accept_kit(kit, tmp_path / "keys" / "hospital-a")
    assert not (kit / kits.NODE_KEY).exists()


def test_a_kit_is_not_accepted_with_the_keys_of_another_request(tmp_path: Path) -> None:
    made = provisioned(tmp_path)
    make_request("hospital-a", tmp_path / "second")
    with refused("identity-refused", tmp_path):
        accept_kit(made / "hospital-a", tmp_path / "second")
    (made / "hospital-a" / kits.CA).write_bytes((made / "hospital-a" / kits.KIT).read_bytes())
    with refused("kit-faulty", "ca.crt"):
        accept_kit(made / "hospital-a", tmp_path / "keys" / "hospital-a")


@pytest.mark.parametrize("name", [kits.SITE_FILE, "start.sh", kits.SIGNATURE])
def test_a_kit_that_was_changed_on_the_way_is_not_accepted(tmp_path: Path, name: str) -> None:
    kit = provisioned(tmp_path) / "hospital-a"
    with (kit / name).open("ab") as file:
        file.write(b"# more\n")
    (kit / kits.SUMS).write_text(kits.sums(kit))
    with refused("kit-faulty", "CA"):
        accept_kit(kit, tmp_path / "keys" / "hospital-a")


def planted(kit: Path, where: str, outside: Path) -> None:
    """Put something into a kit that the provisioner did not."""
    place = kit / where
    match where:
        case "state/answered.json" | "state/deep/er/answered.json" | "other/file" | ".hidden/file":
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("{}")
        case "state" | "linked":
            shutil.rmtree(place, ignore_errors=True)
            place.symlink_to(outside, target_is_directory=True)
        case "state/link" | "dangling":
            place.symlink_to(outside / ("file" if where != "dangling" else "none"))
        case "state/pipe" | "pipe":
            os.mkfifo(place)
        case "state/empty" | "empty":
            place.mkdir()
        case _:  # a file of the kit that is a link to its own content elsewhere, or a pipe
            (outside / where).write_bytes(place.read_bytes())
            place.unlink()
            place.symlink_to(outside / where)


@pytest.mark.parametrize(
    "where",
    [
        *("state/answered.json", "state/deep/er/answered.json", "other/file", ".hidden/file"),
        *("state", "linked", "state/link", "dangling", "state/pipe", "pipe", "state/empty"),
        *("empty", kits.KIT, kits.CA, kits.SUMS, kits.SIGNATURE, kits.SITE_FILE),
    ],
)
def test_whatever_was_planted_in_a_kit_is_refused_before_it_is_used(
    where: str, tmp_path: Path
) -> None:
    kit = provisioned(tmp_path) / "hospital-a"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("{}")
    planted(kit, where, outside)
    with refused("kit-faulty", where):
        accept_kit(kit, tmp_path / "keys" / "hospital-a")
    assert not (kit / kits.NODE_KEY).exists()


def test_a_kit_without_its_folder_for_state_is_accepted(tmp_path: Path) -> None:
    kit = provisioned(tmp_path) / "hospital-a"
    shutil.rmtree(kit / "state")
    accept_kit(kit, tmp_path / "keys" / "hospital-a")
    assert kits.check_files(kit) == kits.Files()


@pytest.mark.parametrize("name", [kits.CA, kits.SITE_FILE])
def test_a_pipe_in_the_place_of_a_file_is_named_and_never_opened(name: str, tmp_path: Path) -> None:
    kit = provisioned(tmp_path) / "hospital-a"
    accept_kit(kit, tmp_path / "keys" / "hospital-a")
    (kit / name).unlink()
    os.mkfifo(kit / name)
    with refused("kit-faulty", name):
        check_whole(kit)


def test_a_file_that_was_added_to_a_kit_is_not_accepted(tmp_path: Path) -> None:
    kit = provisioned(tmp_path) / "hospital-a"
    (kit / ".env").write_text("BRACT_CLIENT_IMAGE=another")
    with refused("kit-faulty", ".env"):
        accept_kit(kit, tmp_path / "keys" / "hospital-a")


def _other_curve(content: dict[str, Any]) -> None:
    content["public_key"] = node_public_text(ec.generate_private_key(ec.SECP256R1()).public_key())


ALTERED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another name": (lambda c: c.update(name="hospital-b"), "signature"),
    "another identity": (lambda c: c.update(identity="2" * 64), "signature"),
    "a point of low order": (lambda c: c.update(identity="0" * 64), "no usable X25519"),
    "a path as a name": (lambda c: c.update(name="../x"), "not allowed"),
    "another curve": (_other_curve, "P-384"),
    "a comment": (lambda c: c.update(public_key=c["public_key"] + " x\ny"), "public_key"),
    "no signature": (lambda c: c.update(signature="!"), "signature"),
    "an unknown field": (lambda c: c.update(more=1), "more"),
    "another schema": (lambda c: c.update(schema=9), "schema 9"),
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_request_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    make_request("hospital-a", tmp_path / "keys")
    path = tmp_path / "keys" / REQUEST
    content = json.loads(path.read_text())
    change, words = ALTERED[what]
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(BractError, match=words) as raised:
        read_request(path)
    assert "\n" not in str(raised.value)


def test_every_site_needs_one_request_and_no_other_has_one(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    make_request("hospital-a", tmp_path / "keys")
    shutil.copy(tmp_path / "keys" / REQUEST, folder / "1.json")
    assert list(read_requests(folder, ["hospital-a"])) == ["hospital-a"]
    with refused("file-missing", "hospital-b"):
        read_requests(folder, ["hospital-a", "hospital-b"])
    with refused("identity-refused", "hospital-b"):
        read_requests(folder, ["hospital-b"])
    shutil.copy(tmp_path / "keys" / REQUEST, folder / "2.json")
    with refused("identity-refused", tmp_path):
        read_requests(folder, ["hospital-a"])
    with refused("file-taken", tmp_path):
        make_request("hospital-a", tmp_path / "keys")


def test_a_site_that_sends_the_identity_of_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, identity = tmp_path / "requests", exchange.make_identity()
    folder.mkdir()
    monkeypatch.setattr(exchange, "make_identity", lambda: identity)
    for name in SITES[:2]:
        make_request(name, tmp_path / name)
        shutil.copy(tmp_path / name / REQUEST, folder / f"{name}.json")
    with refused("identity-refused", "hospital-b.json", "hospital-a", identity.public.hex()):
        read_requests(folder, list(SITES[:2]))


def test_a_site_is_added_by_its_request_and_a_revoked_key_is_not_taken_again(
    tmp_path: Path,
) -> None:
    made = provisioned(tmp_path)
    request = make_request("hospital-d", tmp_path / "new")
    with open_kits(made, doing="test") as opened:
        add_site(opened, SiteConfig(name="hospital-d"), request=request)
    accept_kit(made / "hospital-d", tmp_path / "new")
    check_whole(made / "hospital-d")
    with open_kits(made, doing="test") as opened:
        revoke_site(opened, "hospital-d")
    shutil.rmtree(made / "hospital-d")
    with open_kits(made, doing="test") as opened, refused("identity-refused", "hospital-d"):
        add_site(opened, SiteConfig(name="hospital-d"), request=request)


MASKS = {"scheme": "masks"}


def changed(made: Path, kit: Path, *edits: tuple[str, str]) -> None:
    """Let the provisioner change a site file, and sign the kit again."""
    text = (kit / kits.SITE_FILE).read_text()
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    (kit / kits.SITE_FILE).write_text(text)
    signed(made, kit)


def signed(made: Path, kit: Path) -> None:
    (kit / kits.SUMS).write_text(kits.sums(kit))
    kits.sign(kit, read_key(made / AUTHORITY / CA_KEY))


@pytest.mark.parametrize("encryption", [MASKS, IN_BAND], ids=["masks", "paillier"])
@pytest.mark.parametrize(
    "how", ["named", "unnamed", "listed", "unpinned", "neither", "other pins", "no list"]
)
def test_a_kit_in_which_a_site_has_another_identity_is_not_accepted(
    how: str, encryption: dict[str, Any], tmp_path: Path
) -> None:
    """It would answer as that site: the provisioner holds the private half."""
    made = provisioned(tmp_path, encryption=encryption)
    kit, theirs = made / "hospital-a", make_request("hospital-a", tmp_path / "theirs")
    request = read_request(tmp_path / "keys" / "hospital-a" / REQUEST)
    shutil.copy(tmp_path / "theirs" / kits.IDENTITY_KEY, kit / "own.pem")
    peers = (kit / kits.PEERS).read_text().replace(request.identity, theirs.identity)
    match how:
        case "named":
            changed(made, kit, (f"identity_key: {kits.IDENTITY_KEY}", "identity_key: own.pem"))
        case "unnamed":
            changed(made, kit, (f"identity_key: {kits.IDENTITY_KEY}", "identity_key: null"))
        case "unpinned":
            changed(made, kit, (f"peers: {kits.PEERS}", "peers: null"))
        case "other pins":
            (kit / "others.txt").write_text(peers)
            changed(made, kit, (f"peers: {kits.PEERS}", "peers: others.txt"))
        case "neither":
            (kit / kits.PEERS).unlink()
            own = (f"identity_key: {kits.IDENTITY_KEY}", "identity_key: null")
            changed(made, kit, own, (f"peers: {kits.PEERS}", "peers: null"))
        case "no list":
            (kit / kits.PEERS).unlink()
            changed(made, kit)
        case _:
            (kit / kits.PEERS).write_text(peers)
            signed(made, kit)
    with refused("file-unreadable" if how == "no list" else "identity-refused", kit):
        accept_kit(kit, tmp_path / "keys" / "hospital-a")
    assert not (kit / kits.NODE_KEY).exists()


def test_an_identity_in_a_kit_gives_way_to_the_sites_own(tmp_path: Path) -> None:
    made = provisioned(tmp_path)
    kit, keys = made / "hospital-a", tmp_path / "keys" / "hospital-a"
    make_request("hospital-a", tmp_path / "theirs")
    shutil.copy(tmp_path / "theirs" / kits.IDENTITY_KEY, kit / kits.IDENTITY_KEY)
    changed(made, kit, ("identity_key: null", f"identity_key: {kits.IDENTITY_KEY}"))
    accept_kit(kit, keys)
    own = (keys / kits.IDENTITY_KEY).read_bytes()
    assert (kit / kits.IDENTITY_KEY).read_bytes() == own


@pytest.mark.parametrize("name", [kits.NODE_PUBLIC, kits.SITE_FILE, kits.CA, kits.KIT])
def test_a_kit_that_lacks_a_file_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    made = provisioned(tmp_path)
    (made / "hospital-a" / name).unlink()
    signed(made, made / "hospital-a")
    with pytest.raises(BractError) as caught:
        accept_kit(made / "hospital-a", tmp_path / "keys" / "hospital-a")
    assert name in str(caught.value)


@pytest.mark.parametrize("name", [kits.NODE_KEY, kits.IDENTITY_KEY, REQUEST])
def test_keys_that_are_missing_are_named(name: str, tmp_path: Path) -> None:
    made = provisioned(tmp_path, encryption=MASKS)
    (tmp_path / "keys" / "hospital-a" / name).unlink()
    with refused("file-unreadable", tmp_path / "keys" / "hospital-a" / name):
        accept_kit(made / "hospital-a", tmp_path / "keys" / "hospital-a")


def test_what_an_accepted_kit_runs_and_opens_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = provisioned(tmp_path)
    kit = made / "hospital-a"
    (kit / "policy.yaml").write_text("data: {paths: []}\n")
    changed(
        made,
        kit,
        ("data: null", "data: /srv/records"),
        ("policy: null", "policy: policy.yaml"),
        ("public_test: false", "public_test: true"),
    )
    accept(kit, tmp_path / "keys" / "hospital-a")
    said = " ".join(capsys.readouterr().err.split())
    for found in ("site.yaml", "app bract.client.app:app", "data /srv/records", "start.sh"):
        assert found in said
    assert "public_test yes" in said
    # Each key of both files, also one that is added later.
    written = [line.partition(":")[0] for line in (kit / kits.SITE_FILE).read_text().splitlines()]
    keys = [key for key in written if key.isidentifier()]
    assert {"paillier_key", "identity_key", "state", "public_test", "load"} <= set(keys)
    for key in (*keys, *SitePolicy.model_fields):
        assert f"{key} " in said or f"{key}: " in said, key
