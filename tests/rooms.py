"""The rooms of the package: folders at the top that links in ``bract/`` name."""

from pathlib import Path

ROOT = Path(__file__).parent.parent

LINKED = tuple(sorted(path.name for path in (ROOT / "bract").iterdir() if path.is_symlink()))

ROOMS = ("bract", *LINKED)

PLUG_INS = tuple(sorted(path.parent for path in ROOT.glob("plugins/*/bract_*/__init__.py")))
"""Packages of ``plugins/``, each a distribution of its own."""


def packages() -> set[str]:
    """Return the package and all of its sub-packages, by their import names."""
    folders = (init.parent for room in ROOMS for init in (ROOT / room).rglob("__init__.py"))
    parts = (folder.relative_to(ROOT).parts for folder in folders)
    return {".".join(p if p[0] == "bract" else ("bract", *p)) for p in parts}


def sources() -> list[Path]:
    """Return every module of bract and of its plug-ins, once."""
    folders = [*(ROOT / room for room in ROOMS), *PLUG_INS]
    return sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")})


def written(folder: str, kind: str = "*.py") -> list[Path]:
    """Return a folder's files, without the copies that building a wheel leaves in a plug-in's."""
    found = (ROOT / folder).rglob(kind)
    return sorted(path for path in found if "build" not in path.relative_to(ROOT).parts)
