"""Results of the papers' experiments on disk: a file a scale, written whole after every unit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bract.disk import write_text
from bract.errors import BractError
from bract.parse import dump_json
from bract.schema.record import Number, Record
from experiments.harness.result import Result, read
from experiments.papers.catalog import HERE
from experiments.papers.declaration import Experiment, Scale

COMMITTED = HERE / "results"
"""Results that belong to this version of bract."""


class Sample(Record):
    """What one image, client or seed gave.

    Attributes
    ----------
    group
        Of what was drawn independently: a client or a seed.
    image, network
        What a client's image was taken from and the seed of its network, over both of which its
        intervals are; None where a seed draws everything, and of results from before they were
        kept, whose intervals are over groups.
    values
        By metric.
    """

    group: int
    image: int | None = None
    network: int | None = None
    values: dict[str, Number]


class Unit(Record):
    """A part of a row that is measured at once, and that an interrupted experiment keeps.

    Attributes
    ----------
    key
        Digest of all that it follows from: settings, number of the unit, code, libraries.
    samples
        What was measured.
    refused
        Why an attack could not be run, where it could not; those clients have no sample.
    pictures
        PNG, in base64: originals above, reconstructions below.
    seconds
        Processor time.
    secret
        What the clients' private numbers were drawn from, in hexadecimal.
    """

    key: str
    samples: tuple[Sample, ...]
    refused: tuple[str, ...] = ()
    pictures: str | None = None
    seconds: float
    secret: str | None = None


class RowResult(Record):
    """The units of one row that are done, by number, of ``count``.

    Attributes
    ----------
    settings
        Digest of the settings that were run; None in results from before it was kept.
    """

    name: str
    count: int
    settings: str | None = None
    units: dict[int, Unit]

    @property
    def whole(self) -> bool:
        """Return whether every unit is done."""
        return set(self.units) == set(range(self.count))

    def samples(self) -> list[Sample]:
        """Return all samples in order."""
        return [sample for _, unit in sorted(self.units.items()) for sample in unit.samples]


class PaperResult(Result[RowResult]):
    """What one experiment of a paper gave at one scale so far."""

    scale: Scale

    def row(self, name: str) -> RowResult | None:
        """Return a row by name, where it was begun."""
        return next((row for row in self.rows if row.name == name), None)


def path_of(folder: Path, experiment: Experiment, scale: Scale) -> Path:
    """Return where a result lies."""
    return folder / experiment.paper / f"{experiment.item}-{scale}.json"


def read_result(folder: Path, experiment: Experiment, scale: Scale) -> PaperResult | None:
    """Read a result; None where there is none.

    Raises
    ------
    BractError
        If the file is none, or of another experiment.
    """
    path = path_of(folder, experiment, scale)
    if not path.is_file():
        return None
    found = read(PaperResult, path)
    if (found.experiment, found.scale) != (experiment.name, scale):
        raise BractError(
            f"{path}: holds {found.experiment} at {found.scale}, expected {experiment.name} at "
            f"{scale}; move it away",
            code="file-damaged",
        )
    return found


def write_result(folder: Path, experiment: Experiment, result: PaperResult) -> Path:
    """Write a result whole; an earlier one stays until then."""
    text = dump_json(result.to_dict())
    return write_text(path_of(folder, experiment, result.scale), text + "\n")


def finished_units(folder: Path) -> Iterator[Unit]:
    """Yield the units of every readable result in a folder: equal keys are equal measurements."""
    for path in sorted(folder.glob("*/*.json")):
        try:
            found = read(PaperResult, path)
        except BractError:
            continue
        for row in found.rows:
            yield from row.units.values()
