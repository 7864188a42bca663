"""``site.yaml`` in a site's kit: the site's own settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bract.config.faults import fault
from bract.disk.files import utf8
from bract.disk.named import unreadable
from bract.errors import BractError, listed, shown
from bract.installed.references import check_reference
from bract.kits.kit import SITE_FILE, Kit, KitError, read_text
from bract.parse.strict_yaml import parse_yaml
from bract.runtime.fork_server import Load
from bract.runtime.pinned import DEFAULT_APP


class SiteFile(BaseModel):
    """``site.yaml``: what a site decides for itself; relative paths begin at the kit.

    Attributes
    ----------
    name
        The site's name, as in its kit.
    partition
        Which part of the training data is this site's, from 0, where all sites hold the same data.
    device
        ``auto``, ``cpu`` or ``cuda:N``.
    data
        Folder of this site's own data in the place of the run's ``data.path``; all of it is the
        site's. None reads what the run names.
    models
        References ``package.module:callable`` to installed code that a run's ``model.name`` may
        name here, besides registered names.
    policy
        The site's policy file; None demands nothing.
    state
        Folder where the site's state survives a restart.
    truth
        Folder in which to keep what was trained on, for scoring an audit; None keeps nothing.
    app
        The one installed ClientApp that runs here.
    public_test
        Whether the test split is public and is stored here.
    require_encryption
        Whether runs that are not encrypted are refused; the name of a scheme refuses runs of
        another one, too.
    paillier_key, identity_key, peers
        Files of encrypted runs.
    port
        Number in the SuperNode's socket's name.
    load
        When torch is imported: ``start``, with the SuperNode; ``message``, when the first message
        comes, so that a site that waits has less than half the memory and a slower first round;
        ``each``, anew for every message.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    partition: Annotated[int, Field(ge=0)]
    device: str = "auto"
    data: str | None = None
    models: list[Annotated[str, AfterValidator(check_reference)]] = Field(default_factory=list)
    policy: str | None = None
    state: str = "state"
    truth: str | None = None
    app: str = DEFAULT_APP
    public_test: bool = False
    require_encryption: bool | Literal["paillier", "masks"] = False
    paillier_key: str | None = None
    identity_key: str | None = None
    peers: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] = 9094
    load: Load = "start"

    def decisions(self) -> list[str]:
        """Return in words what the kit runs and opens at the site, a line a key, for a person."""
        return [f"{key} {_in_words(key, getattr(self, key))}" for key in type(self).model_fields]

    def node_config(self, folder: Path) -> str:
        """Return Flower's node configuration for a site whose kit is in ``folder``."""
        paths = {
            "data-path": self.data,
            "policy": self.policy,
            "state-dir": self.state,
            "truth-dir": self.truth,
            "paillier-key": self.paillier_key,
            "identity-key": self.identity_key,
            "peers": self.peers,
        }
        values: dict[str, str | int | bool] = {
            "name": self.name,
            "partition-id": self.partition,
            "device": self.device,
        }
        values |= {key: utf8(folder / path) for key, path in paths.items() if path is not None}
        if self.models:
            values["models"] = " ".join(self.models)
        if self.public_test:
            values["public-test"] = True
        if self.require_encryption:
            values["require-encryption"] = self.require_encryption
        return " ".join(
            f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
        )


_UNSET = {
    "data": "as the run names them",
    "models": "none of its own",
    "truth": "not kept",
    "require_encryption": "not required",
    "identity_key": "drawn for each run",
    "peers": "not pinned",
}


def _in_words(key: str, value: object) -> str:
    if value is None or value is False or value == []:
        return _UNSET.get(key, "none" if value is None else "no")
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "yes" if value is True else str(value)


def read_site(folder: Path, kit: Kit) -> SiteFile:
    """Read the site file of a kit.

    Raises
    ------
    KitError
        If it is missing or wrong, naming the key, or of another site than the kit.
    """
    path = folder / SITE_FILE
    try:
        content: Any = parse_yaml(read_text(path).decode())
        site = SiteFile.model_validate(content if content is not None else {})
    except ValidationError as error:
        raise KitError(f"{path}: {listed(_described(p) for p in error.errors())}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, KitError) from error
    except BractError as error:
        raise KitError(f"{path}: {error}", code=error.code) from error
    if site.name != kit.name:
        raise KitError(
            f"{path}: name is {shown(site.name)}, and this is the kit of {kit.name}; the server "
            "knows this key by that name, so set it back"
        )
    return site


def _described(problem: Any) -> str:
    if problem["type"] == "missing":
        return f"{'.'.join(map(str, problem['loc']))}: missing"
    return fault(problem, SiteFile.model_fields)
