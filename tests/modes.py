"""What of a tree other users of the machine may read, write or enter."""

import stat
from pathlib import Path


def open_to_others(tree: Path) -> list[str]:
    """Return what below a folder has a mode bit for its group or others, with its mode."""
    return sorted(
        f"{path.relative_to(tree)} {stat.S_IMODE(found.st_mode):04o}"
        for path in tree.rglob("*")
        if not stat.S_ISLNK((found := path.lstat()).st_mode) and found.st_mode & 0o077
    )


def reached_by_others(tree: Path) -> list[str]:
    """Return what of a folder others can reach, which Ray's own folders, of 0777, need not be."""
    found = []
    for path in tree.iterdir():
        mode = path.lstat().st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode):
            found.append(f"{path} {stat.S_IMODE(mode):04o}")
            found += reached_by_others(path) if stat.S_ISDIR(mode) else []
    return found
