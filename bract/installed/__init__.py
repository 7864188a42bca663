"""Installed software of this machine: Flower, packages, plug-ins, the app that runs."""

from bract.installed.app_folder import App, app_in
from bract.installed.plugins import GROUPS, PluginError, blaming, elsewhere, is_of_bract, package_of
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
