"""Which ClientApp a bundle names, and what a site makes of it; nothing is unpacked."""

import io
import zipfile
from typing import Any

import pytest
from refusals import refused

from bract.runtime import pinned, rule
from bract.runtime.pinned import RefusedAppError, declared_app, load_app, pinned_app, refuse_other


def bundle(manifest: str, name: str = "pyproject.toml") -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, manifest)
    return content.getvalue()


def naming(app: str) -> bytes:
    return bundle(f"[tool.flwr.app.components]\nclientapp = {app}\n")


def test_the_app_that_a_bundle_names_is_read() -> None:
    assert declared_app(naming("'a.b:c'")) == "a.b:c"
    refuse_other(naming("'a.b:c'"), "a.b:c")


def test_another_app_is_refused_with_both_names() -> None:
    with refused("app-refused", "a.b:c", "a.b:d"):
        refuse_other(naming("'a.b:d'"), "a.b:c")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        naming("3"),
        naming("["),
        bundle("x = 1"),
        bundle("tool = 'flwr'"),
        bundle("", name="else.toml"),
        bundle("#" * (pinned.LARGEST_MANIFEST + 1)),
        naming("'a.b:c'")[:-30],
    ],
    ids=["empty", "bytes", "number", "toml", "no key", "text", "no file", "huge", "cut"],
)
def test_a_bundle_that_names_no_app_is_refused(content: Any) -> None:
    with pytest.raises(RefusedAppError):
        declared_app(content)


@pytest.mark.parametrize("named", [None, "", "bract.client.app", "a b:c", ":app", "../x:app"])
def test_a_site_without_an_app_runs_nothing(monkeypatch: pytest.MonkeyPatch, named: Any) -> None:
    monkeypatch.delenv(pinned.APP, raising=False)
    if named is not None:
        monkeypatch.setenv(pinned.APP, named)
    with refused("import-failed", "package.module"):
        pinned_app()
    for one in (pinned.AT_SUPERNODE, pinned.AT_CLIENTAPP):
        with refused("import-failed", "package.module"):
            rule.hold(one.commands[0], (one,))


def test_the_app_is_the_installed_one_and_must_be_a_clientapp() -> None:
    from bract.client.app import app

    assert load_app("bract.client.app:app") is app
    with refused("import-failed", "no_such_package.client:app", "no_such_package"):
        load_app("no_such_package.client:app")
    with refused("import-failed", "flwr.clientapp.ClientApp"):
        load_app("bract.errors:BractError")
