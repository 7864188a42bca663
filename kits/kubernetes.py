"""Manifests for Kubernetes in a kit: the networks and identities of its compose file."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from bract.config.deployment import DeploymentConfig
from bract.kits import kit as kits
from bract.kits.rendering import Facts, render

MANIFEST, KUSTOMIZATION = "kubernetes.yaml", "kustomization.yaml"


def write_for_site(folder: Path, facts: Facts, deployment: DeploymentConfig) -> None:
    """Write a site's manifests; its kit, as it will be when it is whole, becomes one Secret."""
    facts = _common(facts) | {
        "port": deployment.port,
        "server_block": _block(deployment.server),
        "data_path": facts["data"],
    }
    render(folder / MANIFEST, "kubernetes-site.yaml.j2", facts)
    names = {path.name for path in folder.iterdir() if path.is_file()}
    names |= {kits.NODE_KEY, kits.SUMS, KUSTOMIZATION}
    if kits.PAILLIER_SEALED in names:
        names.add(kits.PAILLIER_KEY)
    if kits.PEERS in names:
        names.add(kits.IDENTITY_KEY)
    secrets = {"kit": sorted(names)}
    made = facts | {"secrets": secrets, "public": {}}
    render(folder / KUSTOMIZATION, "kustomization.yaml.j2", made)


def write_for_operator(folder: Path, facts: Facts) -> None:
    """Write the operator's manifests: one Secret for the SuperLink and one for the gateway."""
    facts = _common(facts)
    render(folder / MANIFEST, "kubernetes-operator.yaml.j2", facts)
    made = facts | {
        "secrets": {
            "superlink": [kits.SUPERLINK, kits.SUPERLINK_KEY],
            "gateway": [kits.GATEWAY, kits.GATEWAY_KEY],
        },
        "public": {"kit": [kits.KIT, kits.CA, kits.SITES, "federation.yaml", kits.NGINX]},
    }
    render(folder / KUSTOMIZATION, "kustomization.yaml.j2", made)


def _common(facts: Facts) -> dict[str, object]:
    return {**facts, "namespace": f"bract-{facts['project']}".replace("_", "-")[:63].rstrip("-")}


def _block(server: str) -> str | None:
    """Return the one address that a site connects to, None where the server has a name."""
    try:
        return str(ipaddress.ip_network(server))
    except ValueError:
        return None
