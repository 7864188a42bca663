"""The identity of a run: a digest of all that its clients must agree on.

It is bound into every sealed box, into every mask and into the state that a client keeps. Clients
to which a server shows different runs or configurations therefore neither open each other's boxes
nor mask for one sum, and no state of one run is used in another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bract.config.config import FederationConfig
from bract.config.sections import KINDS

MAY_DIFFER = ("device", "data.download")
"""Keys that clients of one run need not agree on: they decide no example, no step and no sum.

Every other key is agreed on, a later release's too. ``data.path`` chooses the examples, so it is
not listed. What is a site's own, such as its folder of data, is in its node config, which is no
part of a run's configuration.
"""

FREE_ON_RESUME = ("rounds", "capture", "audit", "deployment")
"""Keys that may change where an interrupted run is resumed (``bract run --resume``)."""


def config_digest(
    config: FederationConfig,
    *,
    without: Collection[str] = (),
    besides: Mapping[str, object] | None = None,
) -> str:
    """Return the SHA-256 of a configuration, in hexadecimal digits.

    A key at its default does not enter it, so a release that adds keys computes the same digest.

    Parameters
    ----------
    without
        Keys that do not enter it either, besides `MAY_DIFFER`.
    besides
        Flower's run config, where an app reads settings of its own from it.
    """
    stated = config.model_dump(mode="json", exclude_defaults=True)
    whole = config.model_dump(mode="json")
    # Sections of two kinds may state the same keys, and leave their kind at its default.
    kinds = [[".".join(place), _kind(_at(whole, place))] for place in KINDS]
    for key in (*MAY_DIFFER, *without):
        *sections, last = key.split(".")
        _at(stated, sections).pop(last, None)
    others = [[key, repr(value)] for key, value in sorted((besides or {}).items())]
    # A section that stated nothing else is as one that is left out.
    given = {key: value for key, value in stated.items() if value != {}}
    return _digest(["configuration 1", given, kinds, others])


@dataclass(frozen=True)
class AgreedRun:
    """One run, as a client or the server of it knows it.

    Attributes
    ----------
    run_id
        Flower's id of the run.
    session
        Drawn by the server; a resumed Paillier run keeps it, and has another ``run_id``.
    config
        `config_digest` of the whole configuration.
    kept
        `config_digest` without `FREE_ON_RESUME`: what a resumed run keeps.
    """

    run_id: int
    session: str
    config: str
    kept: str

    @classmethod
    def of(
        cls,
        config: FederationConfig,
        run_id: int,
        session: str,
        *,
        besides: Mapping[str, object] | None = None,
    ) -> AgreedRun:
        """Return the run with this configuration; ``besides`` is as `config_digest` takes it."""
        whole = config_digest(config, besides=besides)
        kept = config_digest(config, without=FREE_ON_RESUME, besides=besides)
        return cls(run_id, session, whole, kept)

    @property
    def identity(self) -> str:
        """Digest of session, run id and configuration, in hexadecimal digits."""
        return _digest(["run 1", self.session, str(self.run_id), self.config])


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _at(content: dict[str, Any], place: Collection[str]) -> dict[str, Any]:
    for part in place:
        content = content.get(part, {})
    return content


def _kind(section: Mapping[str, Any]) -> str:
    return str(section.get("kind", section.get("name")))
