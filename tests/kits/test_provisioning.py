"""Start-up kits: who holds which secret, what is refused, and what changes later."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from refusals import refused
from sites import NGINX, federation, headers_of

from bract.certificates.authority import (
    read_certificate,
    read_node_key,
)
from bract.certificates.validity import (
    check_certificate,
    check_key,
    check_signed,
)
from bract.cli.launch.launcher import Launch
from bract.cli.remote.running import check_remote
from bract.cli.run import run_federation
from bract.client.encrypted.pins import Pins
from bract.client.site import Site
from bract.config import load_config
from bract.kits import kit as kits
from bract.kits.administration import add_site, open_kits, renew, revoke_site
from bract.kits.kit import (
    check_files,
    open_kit,
    read_kit,
)
from bract.kits.provisioning import provision
from bract.kits.site_file import (
    read_site,
)
from bract.kits.sites import read_sites
from bract.parse import parse_yaml

THREE = ("hospital-a", "hospital-b", "hospital-c")


@pytest.fixture
def provisioned(tmp_path: Path) -> Path:
    """The kits of three sites."""
    provision(federation(*THREE), tmp_path / "kits", source=tmp_path / "federation.yaml")
    return tmp_path / "kits"


def secrets_of(kit: Path) -> dict[str, set[bytes]]:
    """Every form in which a secret of a kit could stand in another: by file."""
    found = {}
    for name in kits.SECRETS:
        if not (kit / name).is_file():
            continue
        text = (kit / name).read_bytes()
        body = b"".join(line for line in text.splitlines() if not line.startswith(b"-----"))
        forms = {text, body, base64.b64decode(body[: len(body) // 4 * 4].replace(b"=", b"A"))}
        if name in ("ca.key", kits.SUPERLINK_KEY, kits.GATEWAY_KEY, kits.NODE_KEY):
            load = (
                serialization.load_ssh_private_key
                if name == kits.NODE_KEY
                else serialization.load_pem_private_key
            )
            key = load(text, None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            scalar = key.private_numbers().private_value.to_bytes(48, "big")
            forms |= {scalar, scalar.hex().encode(), base64.b64encode(scalar)}
        found[name] = {form for form in forms if len(form) >= 32}
    return found


def content_of(kit: Path) -> bytes:
    return b"\0".join(path.read_bytes() for path in sorted(kit.rglob("*")) if path.is_file())


def decoded(content: bytes) -> bytes:
    """Every stretch of base64 of a kit, decoded."""
    texts = re.findall(rb"(?:[A-Za-z0-9+/=]{16,}\n?)+", content)
    joined = (text.replace(b"\n", b"") for text in texts)
    return b"\0".join(base64.b64decode(t[: len(t) // 4 * 4].replace(b"=", b"A")) for t in joined)


def assert_no_foreign_secret(folder: Path) -> int:
    """Search every kit for every other party's secrets; return how many there were."""
    parties = sorted(path for path in folder.iterdir() if path.is_dir())
    count = 0
    for owner in parties:
        for name, forms in secrets_of(owner).items():
            count += 1
            assert any(form in content_of(owner) for form in forms)
            for other in parties:
                if other == owner:
                    continue
                held = content_of(other)
                for form in forms:
                    assert form not in held and form not in decoded(held), (owner, name, other)
    return count


@pytest.mark.parametrize("key", ["audit", "capture"])
def test_a_client_to_audit_or_capture_that_is_no_site_is_refused(key: str, tmp_path: Path) -> None:
    config = federation(*THREE, **{key: {"clients": ["hospital-a", "hospital-d"]}})
    with refused("unknown-name", f"{key}.clients", "hospital-d") as caught:
        provision(config, tmp_path / "kits", source=tmp_path / "federation.yaml")
    assert ", ".join(THREE) in str(caught.value)
    assert not (tmp_path / "kits").exists()
    check_remote(federation(*THREE, **{key: {"clients": ["hospital-a"]}}))
    with refused("unknown-name", "hospital-d"):
        check_remote(config)


@pytest.mark.parametrize("key", ["audit", "capture"])
def test_a_run_refuses_to_audit_a_client_that_it_does_not_have(key: str, tmp_path: Path) -> None:
    config = federation(*THREE, **{key: {"clients": ["client-0", "hospital-a"]}})
    for superlink, unknown in ((None, "hospital-a"), ("sockets/8000.sock", "client-0")):
        with refused("unknown-name", f"{key}.clients", unknown):
            run_federation(config, tmp_path, Launch(superlink=superlink))
    assert not list(tmp_path.iterdir())


def test_no_kit_holds_a_secret_of_another_party(provisioned: Path) -> None:
    # The CA's, the SuperLink's, the gateway's, and one a site.
    assert assert_no_foreign_secret(provisioned) == 6


@pytest.mark.parametrize(
    "encryption",
    [
        {"scheme": "paillier", "threshold": 2, "max_weight_sum": 31},
        {"scheme": "paillier", "keys": "in-band"},
        {"scheme": "masks"},
    ],
    ids=["threshold", "in-band", "masks"],
)
def test_shares_and_identities_are_in_their_sites_kit_alone(
    encryption: dict[str, Any], tmp_path: Path
) -> None:
    config = federation(*THREE, encryption=encryption)
    provision(config, tmp_path / "kits", source=tmp_path / "federation.yaml")
    shares = 3 if config.encryption.uses_key_files else 0
    assert assert_no_foreign_secret(tmp_path / "kits") == 9 + shares
    written = load_config(tmp_path / "kits" / "operator" / "federation.yaml")
    assert bool(written.encryption.key_id) == bool(shares)
    for partition, name in enumerate(THREE):
        site = node_config(tmp_path / "kits" / name)
        assert site["require-encryption"] == encryption["scheme"]
        assert ("paillier-key" in site) == bool(shares)
        # A server cannot name a key of its own as a client's, and each seat is its identity's.
        pins = Pins.from_node_config(site)
        own = pins.identity()
        assert own is not None and pins.peers is not None and own.public in pins.peers
        assert {key.hex() for key in pins.peers} == set(written.encryption.identities)
        assert written.encryption.identities[partition] == own.public.hex()


def test_one_paillier_key_goes_to_every_site_and_to_nobody_else(tmp_path: Path) -> None:
    config = federation(*THREE, encryption="paillier")
    provision(config, tmp_path / "kits", source=tmp_path / "federation.yaml")
    texts = {(tmp_path / "kits" / name / kits.PAILLIER_KEY).read_bytes() for name in THREE}
    assert len(texts) == 1
    (text,) = texts
    for other in ("authority", "operator"):
        held = content_of(tmp_path / "kits" / other)
        lines = [line for line in text.splitlines() if len(line) > 40]
        assert lines and not any(line in held for line in lines)


def node_config(kit: Path) -> dict[str, Any]:
    from flwr.common.config import parse_config_args

    site = read_site(kit, open_kit(kit, "site"))
    return dict(parse_config_args([site.node_config(kit)]))


def test_no_compose_file_or_manifest_of_a_kit_gives_a_key_twice(provisioned: Path) -> None:
    found = [*provisioned.glob("*/compose.yaml"), *provisioned.glob("*/kustomization.yaml")]
    assert len(found) == 8
    for path in found:
        assert parse_yaml(path.read_text())


def test_secrets_are_the_owners_alone_and_checksums_are_those_of_sha256sum(
    provisioned: Path,
) -> None:
    for path in provisioned.rglob("*"):
        if path.name in kits.SECRETS:
            assert path.stat().st_mode & 0o777 == 0o600, path
    for kit in provisioned.iterdir():
        assert kit.stat().st_mode & 0o777 == 0o700
        if shutil.which("sha256sum"):
            subprocess.run(["sha256sum", "--check", "--quiet", kits.SUMS], cwd=kit, check=True)
        listed = {line.split()[1] for line in (kit / kits.SUMS).read_text().splitlines()}
        assert listed == {p.name for p in kit.iterdir() if p.is_file()} - {kits.SUMS}


def test_flower_reads_the_keys_and_a_site_reads_its_node_config(provisioned: Path) -> None:
    for number, name in enumerate(THREE):
        kit = provisioned / name
        key = serialization.load_ssh_private_key((kit / kits.NODE_KEY).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"
        public = serialization.load_ssh_public_key((kit / kits.NODE_PUBLIC).read_bytes())
        assert public == key.public_key()
        site = Site.from_node_config(node_config(kit))
        assert (site.name, site.partition, site.state_dir) == (name, number, kit / "state")
    issued = read_sites(provisioned / "operator" / kits.SITES).active
    assert [issued[name].public_key for name in THREE] == [
        (provisioned / name / kits.NODE_PUBLIC).read_text().strip() for name in THREE
    ]


def test_the_gateways_certificate_is_for_its_name_and_both_are_the_cas(provisioned: Path) -> None:
    from cryptography import x509

    operator = provisioned / "operator"
    for name, key in ((kits.SUPERLINK, kits.SUPERLINK_KEY), (kits.GATEWAY, kits.GATEWAY_KEY)):
        check_signed(operator / name, operator / kits.CA)
        check_key(operator / name, operator / key)
        check_certificate(operator / name, fix="")
    extension = read_certificate(operator / kits.GATEWAY).extensions
    names = extension.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    with refused("certificate-faulty"):
        check_key(operator / kits.GATEWAY, operator / kits.SUPERLINK_KEY)


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx")
@pytest.mark.parametrize("server", ["bract.example.org", "192.0.2.7", "2001:db8::7"])
def test_nginx_takes_the_gateways_configuration(server: str, tmp_path: Path) -> None:
    config = federation(*THREE, deployment={"server": server})
    provision(config, tmp_path / "kits", source=tmp_path / "federation.yaml")
    assert NGINX is not None
    (tmp_path / "prefix").mkdir()
    done = subprocess.run(
        [
            *(NGINX, "-t", "-e", "stderr", "-p", tmp_path / "prefix"),
            *("-c", tmp_path / "kits" / "operator" / "nginx.conf"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_takes_the_units(provisioned: Path, tmp_path: Path) -> None:
    units = [
        provisioned / "operator" / "superlink.service",
        provisioned / "operator" / "superexec.service",
        provisioned / "operator" / "gateway.service",
        provisioned / "hospital-a" / "bract-site.service",
    ]
    for unit in units:
        # What it would start is not installed where the tests run.
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.M)
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(tmp_path / unit.name for unit in units)],
        capture_output=True,
        text=True,
        check=False,
    )
    own = [line for line in done.stderr.splitlines() if any(u.name in line for u in units)]
    assert not own, done.stderr


def test_the_compose_files_give_each_service_its_own_keys_alone(provisioned: Path) -> None:
    operator = yaml.safe_load((provisioned / "operator" / "compose.yaml").read_text())
    volumes = {
        name: {volume.split(":")[0] for volume in service.get("volumes", [])}
        for name, service in operator["services"].items()
    }
    assert "./superlink.key" in volumes["superlink"] and "./gateway.key" in volumes["gateway"]
    assert not {"./gateway.key", "./ca.key"} & volumes["superlink"]
    assert not {"./superlink.key", "./sockets", "./state"} & volumes["gateway"]
    for other in ("network", "superexec", "operator", "audit"):
        assert not {"./superlink.key", "./gateway.key", "./state"} & volumes[other]
    site = yaml.safe_load((provisioned / "hospital-a" / "compose.yaml").read_text())
    for service in (*operator["services"].values(), site["services"]["supernode"]):
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert not service.get("privileged")
    assert "ports" not in site["services"]["supernode"]
    # Server apps run beside the SuperLink, so that they outlive it, and reach its socket alone.
    assert "--external" in operator["services"]["superlink"]["command"]
    assert operator["services"]["superexec"]["command"] == ["bract", "superexec", "--kit", "/kit"]
    assert operator["services"]["superexec"]["network_mode"] == "none"
    published = {name: s["ports"] for name, s in operator["services"].items() if "ports" in s}
    assert published == {"network": ["8443:8443"]}


def test_provisioning_writes_nothing_half_and_replaces_nothing(tmp_path: Path) -> None:
    source = tmp_path / "federation.yaml"
    bad = federation("hospital-a", {"name": "hospital-b", "policy": "missing.yaml"})
    with refused("file-unreadable", "missing.yaml"):
        provision(bad, tmp_path / "kits", source=source)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kits").mkdir()
    with refused("file-taken", tmp_path):
        provision(federation(*THREE), tmp_path / "kits", source=source)
    assert list((tmp_path / "kits").iterdir()) == []


@pytest.mark.parametrize(
    ("deployment", "words"),
    [
        ({"sites": ["a", "b", "a"]}, ("config-value", "'a'")),
        ({"sites": ["a", "b", "A"]}, ("config-value", "'A'")),
        ({"sites": ["a", "b"]}, ("config-value", "2", "3")),
        ({"sites": ["a", "b", "operator"]}, ("config-value", "operator")),
        ({"sites": ["a", "b", "../c"]}, ("config-value", "../c")),
        ({"sites": ["a", "b", "c/d"]}, ("config-value", "c/d")),
        ({"sites": ["a", "b", "aggregate"]}, ("config-value", "aggregate")),
        ({"server": "no spaces"}, ("config-value", "no spaces")),
        ({"server": "evil;}"}, ("config-value", "evil;}")),
        ({"server": "300.1.1.1"}, ("config-value", "300.1.1.1")),
        ({"port": 0}, ("config-value", "deployment.port")),
        ({"days": 0}, ("config-value", "deployment.days")),
        ({"sties": []}, ("config-key", "deployment.sties")),
    ],
)
def test_a_wrong_deployment_is_named(deployment: dict[str, Any], words: tuple[str, ...]) -> None:
    with refused(*words):
        federation("x", "y", "z", deployment=deployment)


def test_a_federation_without_sites_is_told_how_to_name_them(tmp_path: Path) -> None:
    config = federation("x").model_copy(update={"deployment": None})
    with refused("config-key", "deployment"):
        provision(config, tmp_path / "kits", source=tmp_path / "federation.yaml")


def test_the_sites_are_told_nothing_of_each_other_by_a_run(tmp_path: Path) -> None:
    from bract.cli.bundle import app_manifest

    config = federation({"name": "hospital-a", "data": "/srv/secret"}, "hospital-b")
    bundle = app_manifest(config, tmp_path)
    assert "hospital" not in bundle and "secret" not in bundle


def test_a_changed_file_is_found_and_a_sites_own_choice_is_not_an_error(provisioned: Path) -> None:
    kit = provisioned / "hospital-a"
    (kit / kits.SITE_FILE).write_text((kit / kits.SITE_FILE).read_text() + "\n")
    assert check_files(kit) == kits.Files(changed=[kits.SITE_FILE])
    shutil.copy(provisioned / "hospital-b" / kits.NODE_KEY, kit / kits.NODE_KEY)
    (kit / kits.NODE_PUBLIC).unlink()
    broken = check_files(kit).broken
    assert broken == ["node.key is not the file that was issued", "node.pub is missing"]
    (provisioned / "hospital-c" / kits.NODE_KEY).chmod(0o644)
    assert "chmod 600" in check_files(provisioned / "hospital-c").broken[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: hospital-b\npartition: 0\n", ("kit-faulty", "hospital-a")),
        ("name: hospital-a\npartition: 0\ndevcie: cpu\n", ("kit-faulty", "device")),
        ("name: hospital-a\npartition: -1\n", ("kit-faulty", "partition")),
        ("partition: 0\n", ("kit-faulty", "name")),
        ("- 1\n", ("kit-faulty", "site.yaml")),
        ("name: [\n", ("text-malformed", "site.yaml")),
    ],
)
def test_a_wrong_site_file_is_named(text: str, words: tuple[str, ...], provisioned: Path) -> None:
    kit = provisioned / "hospital-a"
    (kit / kits.SITE_FILE).write_text(text)
    with refused(*words):
        read_site(kit, read_kit(kit))


def test_a_folder_that_is_no_kit_or_anothers_is_refused(provisioned: Path, tmp_path: Path) -> None:
    with refused("file-missing", tmp_path):
        open_kit(tmp_path, "site")
    with refused("usage", "operator"):
        open_kit(provisioned / "operator", "site")
    path = provisioned / "operator" / kits.KIT
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 9'))
    with refused("schema-version", 9):
        open_kit(provisioned / "operator", "operator")


def test_a_site_is_added_and_nobody_elses_kit_changes(provisioned: Path) -> None:
    from bract.config.config import SiteConfig

    before = {name: content_of(provisioned / name) for name in THREE}
    with open_kits(provisioned, doing="test") as opened:
        lines = add_site(opened, SiteConfig(name="hospital-d", device="cpu"))
    assert any("4 clients" in line for line in lines)
    assert {name: content_of(provisioned / name) for name in THREE} == before
    assert check_files(provisioned / "hospital-d").broken == []
    for role in ("authority", "operator"):
        assert list(read_sites(provisioned / role / kits.SITES).active) == [*THREE, "hospital-d"]
        assert load_config(provisioned / role / "federation.yaml").clients == 4
        assert check_files(provisioned / role) == kits.Files()
    assert (
        read_site(provisioned / "hospital-d", read_kit(provisioned / "hospital-d")).partition == 3
    )
    assert_no_foreign_secret(provisioned)
    with (
        open_kits(provisioned, doing="test") as opened,
        refused("identity-refused", "hospital-d"),
    ):
        add_site(opened, SiteConfig(name="Hospital-D"))


def test_a_revoked_name_comes_back_under_a_new_key_and_the_old_stays_out(provisioned: Path) -> None:
    from bract.config.config import SiteConfig

    old = (provisioned / "hospital-b" / kits.NODE_PUBLIC).read_text().strip()
    with open_kits(provisioned, doing="test") as opened:
        lines = revoke_site(opened, "hospital-b")
    assert any("site register" in line for line in lines)
    assert any("hospital-c has partition 2 of 2" in line for line in lines)
    sites = read_sites(provisioned / "operator" / kits.SITES)
    assert sites.revoked_keys == [old] and list(sites.active) == ["hospital-a", "hospital-c"]
    with open_kits(provisioned, doing="test") as opened:
        with refused("unknown-name", "hospital-b", "hospital-a"):
            revoke_site(opened, "hospital-b")
        with refused("file-taken"):
            add_site(opened, SiteConfig(name="hospital-b"))
        shutil.rmtree(provisioned / "hospital-b")
        add_site(opened, SiteConfig(name="hospital-b"))
    sites = read_sites(provisioned / "operator" / kits.SITES)
    assert sites.revoked_keys == [old] and sites.active["hospital-b"].public_key != old
    assert sites.active["hospital-b"].partition == 1


def test_an_encrypted_federation_takes_no_site_later(tmp_path: Path) -> None:
    from bract.config.config import SiteConfig

    config = federation(*THREE, encryption={"scheme": "paillier", "keys": "in-band"})
    provision(config, tmp_path / "kits", source=tmp_path / "federation.yaml")
    with open_kits(tmp_path / "kits", doing="test") as opened:
        with refused("key-missing", 3):
            add_site(opened, SiteConfig(name="hospital-d"))
        revoke_site(opened, "hospital-a")
    left = load_config(tmp_path / "kits" / "operator" / "federation.yaml")
    assert len(left.encryption.identities) == left.clients == 2


def test_renewed_certificates_need_nothing_of_the_sites_and_keep_what_the_operator_keeps(
    provisioned: Path,
) -> None:
    operator = provisioned / "operator"
    (operator / "state" / "superlink.db").write_text("the runs")
    sites = {name: content_of(provisioned / name) for name in THREE}
    old = read_certificate(operator / kits.GATEWAY)
    with open_kits(provisioned, doing="test") as opened:
        renew(opened, authority=False)
    assert read_certificate(operator / kits.GATEWAY).serial_number != old.serial_number
    check_signed(operator / kits.GATEWAY, provisioned / "hospital-a" / kits.CA)
    assert (operator / "state" / "superlink.db").read_text() == "the runs"
    assert check_files(operator) == kits.Files()
    assert {name: content_of(provisioned / name) for name in THREE} == sites


def test_a_renewed_ca_goes_by_the_same_key(provisioned: Path) -> None:
    old = provisioned.parent / "old.crt"
    shutil.copy(provisioned / "hospital-a" / kits.CA, old)
    with open_kits(provisioned, doing="test") as opened:
        renew(opened, authority=True)
    operator = provisioned / "operator"
    assert (operator / kits.CA).read_bytes() != old.read_bytes()
    # A site that has not been brought the new one is not cut off.
    check_signed(operator / kits.GATEWAY, old)
    assert check_files(provisioned / "hospital-a") == kits.Files()


def test_a_damaged_authority_signs_nothing(provisioned: Path) -> None:
    path = provisioned / "authority" / kits.SITES
    path.write_text(path.read_text().replace("hospital-a", "hospital-x"))
    with (
        refused("kit-faulty", "sites.json"),
        open_kits(provisioned, doing="test"),
    ):
        pass
    with (
        refused("file-missing", "authority"),
        open_kits(provisioned / "operator", doing="test"),
    ):
        pass


def test_a_key_of_a_site_is_no_other_kind(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("none")
    with refused("certificate-faulty", "OpenSSH"):
        read_node_key(tmp_path / "key")


def test_a_sites_own_folder_of_data_is_all_its_own(tmp_path: Path) -> None:
    config = federation("hospital-a", {"name": "hospital-b", "data": "/srv/xrays"})
    provision(config, tmp_path / "kits", source=tmp_path / "federation.yaml")
    own = Site.from_node_config(node_config(tmp_path / "kits" / "hospital-b"))
    local = own.local(config)
    assert (local.data.path, local.clients, own.part) == (Path("/srv/xrays"), 1, 0)
    # What is asked of the run (one update a client, rounds) is still the run's.
    assert config.clients == 2 and local.rounds == config.rounds
    shared = Site.from_node_config(node_config(tmp_path / "kits" / "hospital-a"))
    assert shared.local(config) is config and shared.part == shared.partition == 0
    compose = (tmp_path / "kits" / "hospital-b" / "compose.yaml").read_text()
    assert "/srv/xrays:/srv/xrays:ro" in yaml.safe_load(compose)["services"]["supernode"]["volumes"]


def test_the_gateway_names_the_active_sites_keys_as_flowers_requests_carry_them(
    provisioned: Path,
) -> None:
    def admitted() -> set[str]:
        text = (provisioned / "operator" / kits.NGINX).read_text()
        return {
            name
            for key, name in re.findall(r'"([A-Za-z0-9+/=]{200,})" "([\w-]+)";', text)
            if key == headers_of(provisioned / name)["flwr-public-key"]
        }

    assert admitted() == set(THREE)
    with open_kits(provisioned, doing="test") as opened:
        revoke_site(opened, "hospital-b")
    assert admitted() == {"hospital-a", "hospital-c"}
    assert check_files(provisioned / "operator") == kits.Files()


def test_kits_of_another_bract_are_not_changed(
    provisioned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bract

    monkeypatch.setattr(bract, "__version__", "9.9.9")
    with (
        open_kits(provisioned, doing="test") as opened,
        refused("bract-version", "9.9.9"),
    ):
        revoke_site(opened, "hospital-b")
