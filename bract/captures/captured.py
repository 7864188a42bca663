"""The records of captures on disk, read without their tensors: this imports no torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from bract.config.client_names import check_name
from bract.config.faults import first_problem
from bract.disk.locks import reading
from bract.errors import BractError, SchemaError, one_line
from bract.parse.strict_json import parse_json
from bract.schema.capture import MOST_ROUNDS, READ_SCHEMAS, ObservationFile

SENT = ".sent"
"""Folder in a round's with what was sent; clients' names begin with a letter or digit."""

DESCRIPTION = "observation.json"

LONGEST_DESCRIPTION = 16 * 2**20

READERS = ".reading.lock"
"""In a store: held by readers, so that no round is removed meanwhile."""


_log = logging.getLogger(__name__)


class CaptureRecords:
    """The records of a store of captures: which there are, and what each declares.

    ``round-0001/client-0/`` holds ``observation.json``, which is read here, and tensors, which
    `bract.captures.observation.ObservationStore` reads too.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Keep every round from being removed while the block runs."""
        return reading(self.root / READERS) if self.root.is_dir() else contextlib.nullcontext()

    def rounds(self) -> list[tuple[int, Path]]:
        """Return the number and the folder of each round, in their order."""
        found = [(round_of(folder.name), folder) for folder in self.root.glob("round-*")]
        return sorted((number, folder) for number, folder in found if number is not None)

    def shared(self, description: ObservationFile) -> tuple[Path, ...]:
        """Return the files that an observation shares with its round's; nothing is checked."""
        sent = self.root / round_name(description.round) / SENT
        return tuple(sent / sent_name(digest) for digest in description.sent.values())

    def folder(self, server_round: int, client: str) -> Path:
        """Return the folder of an observation."""
        return self.root / round_name(server_round) / check_name(client)

    def describe(self, folder: Path) -> ObservationFile:
        """Read the record of one observation without its tensors."""
        path = folder / DESCRIPTION
        try:
            with path.open("rb") as file:
                text = file.read(LONGEST_DESCRIPTION + 1)
            content = parse_json(text, most=LONGEST_DESCRIPTION)
            if not isinstance(content, dict):
                raise BractError(
                    f"expected an object, found a {type(content).__name__}", code="capture-damaged"
                )
            found = content.get("schema")
            if isinstance(found, bool) or found not in READ_SCHEMAS:
                raise SchemaError(
                    f"{path}: observation schema {one_line(found, 40)}, this version reads "
                    f"{' and '.join(map(str, READ_SCHEMAS))}; capture it again or use the bract "
                    "version that wrote it"
                )
            description = ObservationFile.model_validate(content)
            expected = self.folder(description.round, description.client)
            if (expected.parent.name, expected.name) != (folder.parent.name, folder.name):
                raise BractError(
                    f"it belongs to {expected.parent.name}/{expected.name}", code="capture-damaged"
                )
        except SchemaError:
            raise
        except ValidationError as error:
            raise BractError(
                f"{folder}: corrupted capture ({first_problem(error)})", code="capture-damaged"
            ) from None
        except (OSError, BractError, RecursionError) as error:
            raise BractError(
                f"{folder}: half-written or corrupted capture ({one_line(error, 200)})",
                code="capture-damaged",
            ) from None
        return description

    def folders(self) -> list[Path]:
        """Return the folders of whole and broken observations, by round and client."""
        return sorted(
            folder for found in self.root.glob("round-*") for folder in captures_in_round(found)
        )

    def described(self) -> Iterator[tuple[Path, ObservationFile]]:
        """Yield the folder and the record of every readable observation; warn about the others.

        Raises
        ------
        SchemaError
            At one of another version.
        """
        for folder in self.folders():
            try:
                yield folder, self.describe(folder)
            except SchemaError:
                raise
            except BractError as error:
                _log.warning("skipped: %s", error)

    @property
    def is_empty(self) -> bool:
        """Return whether no round is stored here."""
        return not self.rounds()


def captures_in_round(round_folder: Path) -> list[Path]:
    """Return the folders of a round's whole and broken observations."""
    return [f for f in round_folder.glob("*") if f.is_dir() and not f.name.startswith(".")]


def sent_name(digest: str) -> str:
    """Return the name of a file in `SENT`."""
    return f"{digest}.safetensors"


def round_name(number: int) -> str:
    """Return the name of a round's folder."""
    return f"round-{number:04d}"


def round_of(name: str) -> int | None:
    """Return the round of a folder's name; None where it is no round's."""
    digits = name.removeprefix("round-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > len(str(MOST_ROUNDS)):
        return None
    return int(digits) if name == round_name(int(digits)) else None
