"""The folder of the Flower app that runs in this process, where its author keeps it.

A relative path of an app means a place in that folder. The working directory is not it: `flwr run`
leaves a local SuperLink in the folder of the first app that it ran, and every later app of the
machine runs there; and an app's own files run from a copy, unpacked in Flower's own folder.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bract.errors import BractError

MANIFEST = "pyproject.toml"

APP_FOLDER = "BRACT_APP_FOLDER"
"""Environment variable with the folder, set where Flower's processes are started for one app."""


@dataclass(frozen=True)
class App:
    """A Flower app as its manifest describes it.

    Attributes
    ----------
    folder
        Where the manifest is.
    name
        Of its ``[project]``.
    identity
        What two copies of one app have in common, and two apps do not.
    """

    folder: Path
    name: str
    identity: tuple[Any, ...]


def app_in(folder: Path) -> App | None:
    """Return the app whose manifest is in a folder; None where there is none."""
    try:
        content = tomllib.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        project = content["project"]
        components = content["tool"]["flwr"]["app"]["components"]
        name = str(project["name"])
        return App(folder, name, (name, project.get("version"), components))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError):
        return None


def running_app() -> App | None:
    """Return the app that Flower unpacked for this process; None where it runs none of these."""
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr").resolve()
    unpacked = (Path(entry) for entry in sys.path if entry)
    found = (app_in(folder) for folder in unpacked if folder.resolve().is_relative_to(home))
    return next((app for app in found if app is not None), None)


def app_folder() -> Path:
    """Return the folder that relative paths of the running app are in, as an absolute path.

    It is the working directory, unless that is the folder of another app: then it is the one
    folder next to or in the working directory that holds this app.

    Raises
    ------
    BractError
        If the working directory is another app's, and this one's is not found.
    """
    if named := os.environ.get(APP_FOLDER):
        return Path(named)
    here, app = Path.cwd(), running_app()
    if app is None:
        return here
    if _is_of(app, here):
        return here
    near = [folder for folder in _near(here) if _is_of(app, folder)]
    if len(near) == 1:
        return near[0]
    other = app_in(here)
    if other is None:
        return here
    raise BractError(
        f"the app {app.name} runs in {here}, the folder of the app {other.name}, where the "
        "SuperLink was started; name an absolute folder, or end that SuperLink and run the app "
        "from its own folder",
        code="usage",
    )


def _is_of(app: App, folder: Path) -> bool:
    found = app_in(folder)
    return found is not None and found.identity == app.identity


def _near(here: Path) -> Iterator[Path]:
    for above in (here, here.parent):
        try:
            yield from sorted(path.parent for path in above.glob(f"*/{MANIFEST}"))
        except OSError:
            continue
