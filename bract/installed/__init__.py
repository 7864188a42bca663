"""Installed software of this machine: Flower, packages, plug-ins, the app that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bract.lazy import lazily

if TYPE_CHECKING:
    from bract.installed.app_folder import App, app_in
    from bract.installed.plugins import (
        GROUPS,
        PluginError,
        blaming,
        elsewhere,
        is_of_bract,
        package_of,
    )
    from bract.installed.references import (
        TrustedReference,
        import_reference,
        naming_their_line,
        own_word,
        vouched,
    )
    from bract.installed.versions import (
        PROTOCOL,
        RESULT_CODE,
        check_release,
        code_digest,
        package_versions,
        release,
    )

__all__ = [
    "GROUPS",
    "PROTOCOL",
    "RESULT_CODE",
    "App",
    "PluginError",
    "TrustedReference",
    "app_in",
    "blaming",
    "check_release",
    "code_digest",
    "elsewhere",
    "import_reference",
    "is_of_bract",
    "naming_their_line",
    "own_word",
    "package_of",
    "package_versions",
    "release",
    "vouched",
]

_PLACES = {
    "App": "bract.installed.app_folder",
    "GROUPS": "bract.installed.plugins",
    "PROTOCOL": "bract.installed.versions",
    "PluginError": "bract.installed.plugins",
    "RESULT_CODE": "bract.installed.versions",
    "TrustedReference": "bract.installed.references",
    "app_in": "bract.installed.app_folder",
    "blaming": "bract.installed.plugins",
    "check_release": "bract.installed.versions",
    "code_digest": "bract.installed.versions",
    "elsewhere": "bract.installed.plugins",
    "import_reference": "bract.installed.references",
    "is_of_bract": "bract.installed.plugins",
    "naming_their_line": "bract.installed.references",
    "own_word": "bract.installed.references",
    "package_of": "bract.installed.plugins",
    "package_versions": "bract.installed.versions",
    "release": "bract.installed.versions",
    "vouched": "bract.installed.references",
}

__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
