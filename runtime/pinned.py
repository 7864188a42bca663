"""A site runs the ClientApp that its operator installed, whatever bundle the server sends.

Flower's SuperNode unpacks the bundle of a run (FAB), puts its folder in front of the import path
and imports the ClientApp that the bundle names: a user who may submit a run executes code at every
site. Under the rules of this module

- the SuperNode answers every message of a run whose bundle names another ClientApp, or that is no
  ClientApp at all, with an error that names both;
- the process that runs the ClientApp neither unpacks the bundle nor installs its dependencies; it
  imports the operator's app from the environment that the operator installed.

The bundle's configuration still reaches the app, as ``context.run_config``: numbers and text.
"""

from __future__ import annotations

import io
import os
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from bract.errors import BractError, one_line, shown
from bract.installed.flower import CLIENTAPP, SUPERNODE, place
from bract.installed.references import TrustedReference, check_reference, import_reference
from bract.protocol.codes import SERVER_APP, ErrorCode
from bract.runtime.rule import Layer, Rule

APP = "BRACT_CLIENT_APP"
"""Environment variable with the one ClientApp that a SuperNode runs, ``package.module:name``."""

DEFAULT_APP = "bract.client.app:app"

LARGEST_MANIFEST = 1 << 20
"""Bytes of the largest ``pyproject.toml`` that is read from a bundle."""

_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class RefusedAppError(BractError):
    """A run asks for code that this site's operator did not install."""

    code = "app-refused"


def pinned_app() -> str:
    """Return the ClientApp that the operator named.

    Raises
    ------
    BractError
        If none is named, or the name is no ``package.module:name``: then nothing runs.
    """
    reference = os.environ.get(APP, "")
    try:
        return check_reference(reference)
    except ValueError as error:
        raise BractError(
            f"the app of this site is {error}; "
            f"start the SuperNode with `bract supernode --app {DEFAULT_APP}`",
            code="import-failed",
        ) from None


def declared_app(bundle: bytes) -> str:
    """Return the ClientApp that a bundle names in its ``pyproject.toml``; nothing is unpacked.

    Raises
    ------
    RefusedAppError
        If the bundle cannot be read or names none.
    """
    found: Any = manifest_of(bundle)
    try:
        for key in ("tool", "flwr", "app", "components", "clientapp"):
            found = found[key]
    except (KeyError, TypeError) as error:
        raise _no_app(error) from error
    if not isinstance(found, str):
        raise RefusedAppError(f"the run's bundle names {shown(found)}, which is no ClientApp")
    return found


def manifest_of(bundle: bytes) -> dict[str, Any]:
    """Return the ``pyproject.toml`` of a bundle; nothing is unpacked.

    Raises
    ------
    RefusedAppError
        If it cannot be read.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(bundle))
        with archive:
            # Flower's bundles are stored or deflated; other decoders need not read untrusted bytes.
            if archive.getinfo("pyproject.toml").compress_type not in _COMPRESSION:
                raise RefusedAppError("its pyproject.toml is neither stored nor deflated")
            with archive.open("pyproject.toml") as file:
                text = file.read(LARGEST_MANIFEST + 1)
        if len(text) > LARGEST_MANIFEST:
            raise RefusedAppError(f"its pyproject.toml has more than {LARGEST_MANIFEST} bytes")
        return tomllib.loads(text.decode())
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        zlib.error,
        EOFError,
        KeyError,
        ValueError,
        RuntimeError,
        NotImplementedError,
        RecursionError,
        OSError,
    ) as error:
        raise _no_app(error) from error


def _no_app(error: Exception) -> RefusedAppError:
    return RefusedAppError(
        f"the run's bundle names no ClientApp ({type(error).__name__}: {one_line(error, 200)}); "
        "this site runs only what its operator installed"
    )


def refuse_other(bundle: bytes, app: str) -> None:
    """Refuse a bundle that names another ClientApp than the operator's."""
    found = declared_app(bundle)
    if found != app:
        raise RefusedAppError(
            f"this site runs {app!r} only, and the run asks for {found[:200]!r}; submit a run "
            "whose clientapp is that, or let the site's operator install and name another"
        )


def load_app(app: str) -> Any:
    """Import the operator's ClientApp."""
    from flwr.clientapp import ClientApp

    found = import_reference(TrustedReference(app), what="the app of this site,", keeps=True)
    if not isinstance(found, ClientApp):
        raise BractError(
            f"the app of this site, {app!r}, is a {type(found).__name__}; expected a "
            "flwr.clientapp.ClientApp",
            code="import-failed",
        )
    return found


def _at_supernode(_: str) -> Mapping[str, Layer]:
    app = pinned_app()
    return {_PULL: lambda original: _guarded(original, app)}


def _guarded(original: Callable[..., int | None], app: str) -> Callable[..., int | None]:
    """Make the SuperNode answer runs of other apps than ``app`` with an error."""
    from flwr.app import Error, Message

    from bract.installed.flower import _insert_message as reply_with

    def pull(**given: Any) -> int | None:
        taken: list[Any] = []

        def receive() -> Any:
            received = given["receive"]()
            taken.extend(received or ())
            return received

        def get_run(run_id: int) -> Any:
            run = given["get_run"](run_id)
            # A run that names no task is one of the apps with a ServerApp and ClientApps.
            if run.primary_task_type not in ("", None, SERVER_APP):
                raise RefusedAppError(
                    f"this site runs {app!r} only, and the run is a {run.primary_task_type!r}"
                )
            return run

        def get_fab(fab_hash: str, run_id: int) -> Any:
            bundle = given["get_fab"](fab_hash, run_id)
            refuse_other(bundle.content, app)
            return bundle

        try:
            return original(
                **(given | {"receive": receive, "get_run": get_run, "get_fab": get_fab})
            )
        except RefusedAppError as error:
            message = taken[0]
            answer = Message(Error(ErrorCode.INVALID_BUNDLE, str(error)), reply_to=message)
            reply_with(answer, given["state"], given["object_store"])
            return int(message.metadata.run_id)

    return pull


def _at_clientapp(_: str) -> Mapping[str, Layer]:
    app = pinned_app()

    def check_only(bundle: bytes, **_: Any) -> None:
        refuse_other(bundle, app)

    def loader(**_: Any) -> Callable[..., Any]:
        return lambda *_: load_app(app)

    return {_INSTALL: lambda _: check_only, _LOAD: lambda _: loader}


_PULL = f"{SUPERNODE}:_pull_and_store_message"
_INSTALL, _LOAD = f"{CLIENTAPP}:install_from_fab", f"{CLIENTAPP}:get_load_client_app_fn"

AT_SUPERNODE = Rule(
    name="the operator's app at the SuperNode",
    kind="security",
    commands=("flower-supernode",),
    needs=(
        f"{_PULL}(state, object_store, receive, get_run, get_fab)",
        place("_insert_message"),
    ),
    does="A site answers a run of another app with an error, whatever bundle arrives.",
    without="a user who may submit runs could run code at every site",
    put=_at_supernode,
)

AT_CLIENTAPP = Rule(
    name="the operator's app in its process",
    kind="security",
    commands=("flwr-clientapp",),
    needs=(_INSTALL, _LOAD),
    does="Nothing of a bundle is installed or imported.",
    without="a user who may submit runs could run code at every site",
    put=_at_clientapp,
)
