"""The ``deployment`` section of a federation's configuration: whose start-up kits are made."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from bract.config.client_names import check_name
from bract.config.work import Section
from bract.errors import BractError

KITS_OF_THE_OPERATOR = frozenset({"authority", "operator"})
"""Folders in addition to those of the sites; no site has such a name."""

_HOST = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    r"(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


def _site_name(name: str) -> str:
    try:
        check_name(name)
    except BractError as error:
        raise ValueError(str(error)) from None
    if name.casefold() in KITS_OF_THE_OPERATOR:
        raise ValueError(f"{name!r} is the name of another kit; choose another name for the site")
    return name


def _host(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    # Digits and dots alone are a mistyped address, never a name.
    if not _HOST.fullmatch(host) or re.fullmatch(r"[0-9.]+", host):
        raise ValueError("expected a host name such as bract.example.org, or an IP address")
    return host.lower()


class SiteConfig(Section):
    """One site: its name, and what its own file begins with.

    ``data`` is the folder of the site's own images in the place of ``data.path``, ``policy`` a
    file, relative to the federation's, to put into the kit, ``device`` one of auto, cpu, cuda:N.
    """

    name: Annotated[str, AfterValidator(_site_name)]
    device: str = "auto"
    data: str | None = None
    policy: str | None = None


def _sites(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [{"name": entry} if isinstance(entry, str) else entry for entry in value]


def _distinct(sites: list[SiteConfig]) -> list[SiteConfig]:
    seen: set[str] = set()
    for site in sites:
        # Some file systems hold names that differ in case only to be one.
        if site.name.casefold() in seen:
            raise ValueError(f"the site {site.name!r} is named twice; give each a name of its own")
        seen.add(site.name.casefold())
    return sites


class DeploymentConfig(Section):
    """Where the sites find the server, and who they are; ``bract provision`` makes their kits.

    ``server`` is the host name or IP address of the gateway, as the sites reach it, ``port`` its
    port; ``superlink_port`` is the SuperLink's, on the loopback interface. ``days`` is
    how long the certificates of the gateway and the SuperLink are valid, the CA's is ten times
    that. A site is a name, or ``name`` and what its own file begins with.
    """

    server: Annotated[str, AfterValidator(_host)]
    port: Annotated[int, Field(ge=1, le=65535)] = 8443
    superlink_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    days: Annotated[int, Field(ge=1, le=3650)] = 365
    sites: Annotated[
        list[SiteConfig],
        BeforeValidator(_sites, json_schema_input_type=list[str | SiteConfig]),
        AfterValidator(_distinct),
        Field(min_length=1),
    ]
