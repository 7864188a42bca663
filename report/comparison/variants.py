"""What each variant of a comparison gave away, how well it learned, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

from pydantic import JsonValue

from bract.captures.captured import CaptureRecords
from bract.errors import BractError
from bract.parse.strict_json import parse_json
from bract.report.order import mean, strength
from bract.schema import Report
from bract.schema.comparison import Costs, DefenseWords, ShownAccuracy, VariantRound, VariantRow
from bract.schema.metrics import ClientRow
from bract.schema.reach import LeakCounts
from bract.schema.report_rows import AttackRow, RoundFacts

Defense = Mapping[str, JsonValue]
"""A defense's name and settings, as a configuration holds them."""

UNDEFENDED = "undefended"
NO_DEFENSE = DefenseWords()
_MOST_HEADER = 1 << 26
UPLOADED = ("update", "returned_buffers", "ciphertexts")


@dataclass(frozen=True)
class Variant:
    """One run of a comparison.

    Attributes
    ----------
    name
        Folder of its run directory; `UNDEFENDED` is what the others are compared with.
    defenses
        Name and every public setting of each defense that its clients applied.
    words
        What the page calls them (`bract.defenses.words`).
    error
        Why it did not finish; None if it did.
    """

    name: str
    defenses: tuple[Defense, ...] = ()
    words: DefenseWords = NO_DEFENSE
    error: str | None = None


@dataclass(frozen=True)
class ExampleCounts:
    """How many examples an accuracy was counted over.

    Attributes
    ----------
    test
        Examples of the test data; None if not known.
    validation
        Size of each client's validation share, by its name; empty if not known.
    """

    test: int | None = None
    validation: Mapping[str, int] = field(default_factory=dict)

    def count(self, measure: str) -> int | None:
        """Return the examples behind ``global`` accuracy, or that of all ``clients`` together."""
        return self.test if measure == "global" else sum(self.validation.values()) or None


def variant_row(
    variant: Variant, folder: Path, report: Report | None, tested: ExampleCounts
) -> VariantRow:
    """Return one row of a comparison.

    Parameters
    ----------
    folder
        The variant's run directory.
    report
        The report of that run; None if there is none.
    tested
        Weighs the clients' accuracies.
    """
    page = f"{variant.name}/report.html" if (folder / "report.html").is_file() else None
    row = VariantRow(
        variant=variant.name,
        title=variant.words.title,
        defenses=[dict(d) for d in variant.defenses],
        settings=variant.words.settings,
        all_settings=variant.words.all_settings,
        error=variant.error,
        report=page,
        locked=variant.words.locked,
    )
    if report is None:
        return row
    attacks = [a for a in report.attacks if a.client is None]
    attack = max(attacks, key=strength, default=None)
    rounds = [_round(r, row.locked, report, attack, tested) for r in report.rounds]
    last = rounds[-1] if rounds else None
    known = {r.round for r in rounds}
    rounds += [
        VariantRound(round=number, **_leakage(report, attack, number))
        for number in sorted({row.round for row in report.leakage} - known)
    ]
    clients = report.rounds[-1].clients if report.rounds else {}
    return row.model_copy(
        update={
            "level": report.verdict.level,
            "config_sha256": report.config_sha256,
            "run": report.run,
            "failures": len(report.failures),
            "refused": len(report.refused),
            "attacks": attacks,
            "attack": attack,
            "rounds": rounds,
            "accuracy": last and last.accuracy,
            "client_accuracy": last and last.client_accuracy,
            "random_key_accuracy": _pooled(clients, "random_key_accuracy", tested),
            "costs": _costs([r for r in report.rounds if r.round > 0], folder),
        }
    )


def _round(
    row: RoundFacts, locked: bool, report: Report, attack: AttackRow | None, tested: ExampleCounts
) -> VariantRound:
    """Return accuracy after a round, of the global model and at the clients, and its leakage.

    Clients judge the model that they receive, so theirs is one round behind. Where a defense
    keeps part of the model at the client (``locked``) theirs is the only accuracy that means
    anything, and ``accuracy`` is None.
    """
    return VariantRound(
        round=row.round,
        accuracy=None if locked else row.accuracy,
        client_accuracy=_pooled(row.clients, "validation_accuracy", tested),
        **_leakage(report, attack, row.round),
    )


def _pooled(clients: Mapping[str, ClientRow], key: str, tested: ExampleCounts) -> float | None:
    """Return a mean over clients, by the sizes of their validation shares where all are known."""
    found = {name: getattr(c, key) for name, c in clients.items()}
    known = {name: float(value) for name, value in found.items() if value is not None}
    sizes = [tested.validation.get(name, 0) for name in known]
    weights = sizes if all(sizes) else [1] * len(known)
    products = (value * weight for value, weight in zip(known.values(), weights, strict=True))
    return sum(products) / sum(weights) if known else None


def best_baseline(attack: AttackRow | None, score: str) -> float | None:
    """Return the best mean SSIM or PSNR of a baseline without the gradient; None without one."""
    found = [getattr(b, score) for b in attack.baselines.values()] if attack else []
    return max((value for value in found if value is not None), default=None)


def _leakage(report: Report, attack: AttackRow | None, number: int) -> dict[str, Any]:
    """Return what the strongest attack got from one round, as fields of `VariantRound`."""
    there = [
        row
        for row in report.leakage
        if attack and row.row_key == attack.row_key and row.round == number
    ]
    return {
        **{name: sum(getattr(row, name) for row in there) for name in LeakCounts.model_fields},
        "ssim": mean(r.ssim_mean for r in there for _ in range(r.scored)),
    }


def _costs(rounds: Sequence[RoundFacts], folder: Path) -> Costs:
    clients = [c for row in rounds for c in row.clients.values()]
    records = CaptureRecords(folder / "captures")
    return Costs(
        seconds_per_step=_median(
            c.seconds / c.local_steps for c in clients if c.seconds is not None and c.local_steps
        ),
        seconds_in_defense=_median(c.defense_seconds for c in clients),
        seconds_per_round=_median(row.seconds for row in rounds),
        bytes_per_upload=mean(
            record.uploaded or upload_bytes(capture) for capture, record in records.described()
        ),
    )


def compared(rows: Sequence[VariantRow], measure: str, tested: ExampleCounts) -> list[VariantRow]:
    """Return the rows with their costs and accuracy held against the undefended run's."""
    control = next((row for row in rows if row.variant == UNDEFENDED), None)
    found = []
    for row in rows:
        base = control.costs if control else Costs()
        costs = row.costs.model_copy(
            update={
                "time_ratio": _ratio(row.costs.seconds_per_step, base.seconds_per_step),
                "bytes_ratio": _ratio(row.costs.bytes_per_upload, base.bytes_per_upload),
            }
        )
        shown = _shown(row, control, measure, tested)
        found.append(row.model_copy(update={"costs": costs, "shown": shown}))
    return found


def _shown(
    row: VariantRow, control: VariantRow | None, measure: str, tested: ExampleCounts
) -> ShownAccuracy:
    """Return the accuracy by which variants are compared, with its interval and its change."""

    def of(one: VariantRow) -> float | None:
        return one.client_accuracy if measure == "clients" else one.accuracy

    value, before = of(row), of(control) if control else None
    low, high = wilson(value, tested.count(measure)) or (None, None)
    change = None if value is None or before is None else value - before
    return ShownAccuracy(value=value, low=low, high=high, change=change)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if base and value is not None else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def upload_bytes(folder: Path) -> int | None:
    """Return the size of an upload's tensors by its files; None if its capture is not whole.

    The tensors' own bytes: a safetensors file is 8 bytes for the length of its header, the
    header, and then these.
    """
    count = 0
    found = [folder / f"{name}.safetensors" for name in UPLOADED]
    for path in found:
        if not path.is_file():
            continue
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size - 8 - header
            try:
                described = parse_json(file.read(header), most=_MOST_HEADER) if size >= 0 else {}
                ends = [v["data_offsets"][1] for k, v in described.items() if k != "__metadata__"]
                whole = size >= 0 and size == max(ends, default=0)
            except (BractError, AttributeError, LookupError, TypeError):
                return None
        if not whole:
            return None
        count += size
    return count or None


def wilson(share: float | None, count: int | None) -> tuple[float, float] | None:
    """Return the 95 % Wilson score interval of a share that was counted over ``count`` examples."""
    if share is None or not count:
        return None
    z = NormalDist().inv_cdf(0.975)
    found = round(share * count)
    middle = (2 * found + z * z) / (2 * (count + z * z))
    half = z * math.sqrt(4 * found * (1 - found / count) + z * z) / (2 * (count + z * z))
    # Exact at the ends, where rounding would leave a little more or less.
    return 0.0 if found == 0 else middle - half, 1.0 if found == count else middle + half
