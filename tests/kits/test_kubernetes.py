"""Kubernetes manifests of kits: valid, restricted, with the networks and identities of compose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from sites import federation

from bract.kits import kit as kits
from bract.kits.provisioning import provision
from bract.kits.requests import accept_kit, make_request

KUBERNETES = "1.31"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("provisioned")
    config = federation(
        "hospital-a",
        {"name": "Hospital_B", "data": "/srv/x rays", "device": "cuda:0"},
        encryption={"scheme": "paillier", "threshold": 2, "max_weight_sum": 31},
    )
    requests = {"hospital-a": make_request("hospital-a", folder / "keys")}
    out = folder / "kits"
    provision(config, out, source=folder / "federation.yaml", requests=requests)
    accept_kit(out / "hospital-a", folder / "keys")
    return out


PARTIES = ("operator", "hospital-a", "Hospital_B")


def objects(kit: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((kit / "kubernetes.yaml").read_text()))


def kustomization(kit: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((kit / "kustomization.yaml").read_text())
    return found


def pod(kit: Path) -> dict[str, Any]:
    (deployment,) = (o for o in objects(kit) if o["kind"] == "Deployment")
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return found


def containers(kit: Path) -> Iterator[dict[str, Any]]:
    yield from pod(kit)["initContainers"]
    yield from pod(kit)["containers"]


@pytest.mark.parametrize("party", PARTIES)
def test_every_object_fits_the_schema_of_kubernetes(party: str, made: Path) -> None:
    found = objects(made / party)
    for one in found:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    (namespace,) = {o["metadata"].get("namespace") for o in found if o["kind"] != "Namespace"}
    assert namespace == kustomization(made / party)["namespace"] and namespace == namespace.lower()
    claims = {o["metadata"]["name"] for o in found if o["kind"] == "PersistentVolumeClaim"}
    volumes = {volume["name"] for volume in pod(made / party)["volumes"]}
    for container in containers(made / party):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert claims == ({"state", "runs"} if party == "operator" else {"state"})


@pytest.mark.parametrize("party", PARTIES)
def test_pods_are_restricted_as_the_containers_of_compose_are(party: str, made: Path) -> None:
    found = pod(made / party)
    assert found["automountServiceAccountToken"] is False
    assert found["securityContext"]["runAsNonRoot"]
    assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(found)
    assert not any("hostPath" in volume for volume in found["volumes"])
    for container in containers(made / party):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    labels = objects(made / party)[0]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_networks_are_those_of_compose(made: Path) -> None:
    (policy,) = (o for o in objects(made / "operator") if o["kind"] == "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"] and "egress" not in policy["spec"]
    assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8443}]}]
    site = [o["spec"] for o in objects(made / "hospital-a") if o["kind"] == "NetworkPolicy"]
    assert site[0] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ports = {p["port"] for rule in site[1]["egress"] for p in rule["ports"]}
    assert ports == {8443, 53} and "ingress" not in site[1]
    assert not any(o["kind"] == "Service" for o in objects(made / "hospital-a"))


@pytest.mark.parametrize(
    ("server", "block"), [("192.0.2.7", "192.0.2.7/32"), ("2001:db8::7", "2001:db8::7/128")]
)
def test_a_site_reaches_one_address_where_the_server_has_one(
    server: str, block: str, tmp_path: Path
) -> None:
    config = federation("a", "b", deployment={"server": server})
    provision(config, tmp_path / "kits", source=tmp_path / "federation.yaml")
    specs = [o["spec"] for o in objects(tmp_path / "kits" / "a") if o["kind"] == "NetworkPolicy"]
    (rule,) = specs[1]["egress"]
    assert rule["to"] == [{"ipBlock": {"cidr": block}}]


def test_each_container_holds_its_own_keys_alone(made: Path) -> None:
    (superlink, gateway) = kustomization(made / "operator")["secretGenerator"]
    assert kits.GATEWAY_KEY not in superlink["files"] and kits.SUPERLINK_KEY not in gateway["files"]
    mounted = {
        container["name"]: [m["name"] for m in container["volumeMounts"]]
        for container in containers(made / "operator")
    }
    assert mounted["superexec"].count("operator") == 1
    assert not {"superlink", "gateway", "state"} & set(mounted["superexec"])
    assert not {"superlink", "place", "state", "runs"} & set(mounted["gateway"])
    public = kustomization(made / "operator")["configMapGenerator"][0]["files"]
    assert not set(public) & kits.SECRETS


@pytest.mark.parametrize("party", ["hospital-a", "Hospital_B"])
def test_a_sites_secret_is_its_whole_kit_as_it_is_checked_when_it_starts(
    party: str, made: Path
) -> None:
    (secret,) = kustomization(made / party)["secretGenerator"]
    assert set(secret["files"]) == {p.name for p in (made / party).iterdir() if p.is_file()}
    assert all((made / party / name).is_file() for name in secret["files"])


def test_a_sites_data_and_gpu_are_asked_for(made: Path) -> None:
    (container,) = pod(made / "Hospital_B")["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    (data,) = (m for m in container["volumeMounts"] if m["name"] == "data")
    assert data == {"name": "data", "mountPath": "/srv/x rays", "readOnly": True}
