"""What each variant of a comparison gave away, how well it learned, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bract.audit.captures import Captures
from bract.defenses import DEFENSES, DefenseSpec
from bract.errors import BractError
from bract.report.facts.summary import mean, strength
from bract.schema import TIERS
from bract.strict_json import parse_json

Facts = dict[str, Any]

UNDEFENDED = "undefended"
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
    given
        The settings among them that somebody chose, which the first table shows; None for all.
    error
        Why it did not finish; None if it did.
    """

    name: str
    defenses: tuple[dict[str, Any], ...] = ()
    error: str | None = None
    given: tuple[dict[str, Any], ...] | None = None


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
    variant: Variant, folder: Path, facts: Facts | None, tested: ExampleCounts
) -> Facts:
    """Return one row of a comparison.

    Parameters
    ----------
    folder
        The variant's run directory.
    facts
        What `gather` found there; None if nothing.
    tested
        Weighs the clients' accuracies.
    """
    row: Facts = {
        "variant": variant.name,
        "title": title(variant.defenses),
        "defenses": [dict(d) for d in variant.defenses],
        "settings": settings(variant.defenses if variant.given is None else variant.given),
        "all_settings": settings(variant.defenses),
        "error": variant.error,
        "report": None,
        "status": facts["run"]["status"] if facts else None,
        "config_sha256": facts["config_sha256"] if facts else None,
        "audit_seconds": facts["run"]["audit_seconds"] if facts else None,
        "training_seconds": facts["run"]["training_seconds"] if facts else None,
        "failures": len(facts["failures"]) if facts else 0,
        "refused": len(facts["refused"]) if facts else 0,
    }
    rounds = [r for r in facts["rounds"] if r["round"] > 0] if facts else []
    kinds = [kind for kind in map(_spec, variant.defenses) if kind is not None]
    locked = any(kind.keeps == "model" for kind in kinds)
    row |= _accuracy(facts["rounds"] if facts else [], locked, tested)
    row |= _leakage(facts)
    row |= _costs(rounds, folder)
    return row


def title(defenses: Sequence[Facts]) -> str:
    """Return what to call a chain of defenses: ``AdaDefense + Gaussian noise``."""
    if not defenses:
        return "Undefended"
    return " + ".join(_title(defense) for defense in defenses)


def _title(defense: Facts) -> str:
    kind = _spec(defense)
    return str(defense.get("name")) if kind is None else kind.title_with(defense)


def _spec(defense: Facts) -> type[DefenseSpec] | None:
    """Return what is public of a defense; None for one that is not known here."""
    return DEFENSES.get(str(defense.get("name")))


def settings(defenses: Sequence[Facts]) -> str:
    """Return a chain's settings in words, without the names and what the title says already."""
    return "; ".join(filter(None, map(_settings, defenses)))


def _settings(defense: Facts) -> str:
    kind = _spec(defense)
    said = {"name"} | (kind.in_title() if kind is not None else set())
    return ", ".join(
        f"{key.replace('_', ' ')} {value}"
        for key, value in defense.items()
        if key not in said and value is not None
    )


def _accuracy(rounds: Sequence[Facts], locked: bool, tested: ExampleCounts) -> Facts:
    """Return accuracy after the last round, of the global model and at the clients.

    Clients judge the model that they receive, so theirs is one round behind. Where a defense
    keeps part of the model at the client (``locked``) theirs is the only accuracy that means
    anything, and ``accuracy`` is None.
    """
    history = [
        {
            "round": row["round"],
            "accuracy": None if locked else row["accuracy"],
            "client_accuracy": _pooled(row["clients"], "validation_accuracy", tested),
        }
        for row in rounds
    ]
    last = rounds[-1]["clients"] if rounds else {}
    return {
        "accuracy": history[-1]["accuracy"] if history else None,
        "client_accuracy": history[-1]["client_accuracy"] if history else None,
        "random_key_accuracy": _pooled(last, "random_key_accuracy", tested),
        "locked": locked,
        "rounds": history,
    }


def _pooled(clients: Mapping[str, Facts], key: str, tested: ExampleCounts) -> float | None:
    """Return a mean over clients, by the sizes of their validation shares where all are known."""
    known = {name: c[key] for name, c in clients.items() if c[key] is not None}
    sizes = [tested.validation.get(name, 0) for name in known]
    weights = sizes if all(sizes) else [1] * len(known)
    products = (value * weight for value, weight in zip(known.values(), weights, strict=True))
    return sum(products) / sum(weights) if known else None


_ATTACK = (
    "attack", "attack_name", "tier", "images", "scored", "leaked", "undecided", "ssim", "psnr",
    "label_accuracy", "identified_top1", "intervals", "baselines", "gradient_cosine", "seconds",
    "iterations", "budget_seconds", "restarts",
)  # fmt: skip


def _leakage(facts: Facts | None) -> Facts:
    rows = [a for a in facts["attacks"] if a["client"] is None] if facts else []
    attacks = [{key: a[key] for key in _ATTACK} for a in rows]
    found = max(attacks, key=strength, default=None)
    empty = {"mean": None, "low": None, "high": None, "best": None, "count": 0, "at_cap": 0}
    return {
        "attack": found and {key: found[key] for key in ("attack", "attack_name", "tier")},
        "images": found["images"] if found else 0,
        "scored": found["scored"] if found else 0,
        "leaked": found["leaked"] if found else 0,
        "undecided": found["undecided"] if found else 0,
        "ssim": found["ssim"] if found else empty,
        "psnr": found["psnr"] if found else empty,
        "label_accuracy": found["label_accuracy"] if found else None,
        "identified_top1": found["identified_top1"] if found else None,
        "baseline_ssim": best_baseline(found, "ssim") if found else None,
        "baseline_psnr": best_baseline(found, "psnr") if found else None,
        "attacks": attacks,
        "tiers": [tier for tier in TIERS if any(a["tier"] == tier for a in attacks)],
        "leakage": _by_round(facts, found) if facts and found else [],
    }


def best_baseline(attack: Facts, score: str) -> float | None:
    """Return the best mean SSIM or PSNR of a baseline without the gradient; None without one."""
    found = [b[score] for b in attack["baselines"].values() if b[score] is not None]
    return max(found, default=None)


def _by_round(facts: Facts, attack: Facts) -> list[Facts]:
    mine = [
        row
        for row in facts["leakage"]
        if (row["attack"], row["tier"]) == (attack["attack"], attack["tier"])
    ]
    result = []
    for number in sorted({row["round"] for row in mine}):
        there = [row for row in mine if row["round"] == number]
        result.append(
            {
                "round": number,
                "leaked": sum(row["leaked"] for row in there),
                "scored": sum(row["scored"] for row in there),
                "ssim_mean": mean(r["ssim_mean"] for r in there for _ in range(r["scored"])),
            }
        )
    return result


def _costs(rounds: Sequence[Facts], folder: Path) -> Facts:
    clients = [c for row in rounds for c in row["clients"].values()]
    uploads = Captures(folder / "captures").index
    return {
        "seconds_per_step": _median(
            c["seconds"] / c["local_steps"]
            for c in clients
            if c["seconds"] is not None and c["local_steps"]
        ),
        "seconds_in_defense": _median(c["defense_seconds"] for c in clients),
        "seconds_per_round": _median(row["seconds"] for row in rounds),
        "bytes_per_upload": mean(c.uploaded or upload_bytes(c.folder) for c in uploads if c.folder),
    }


def add_ratios(rows: Sequence[Facts]) -> None:
    """Add to each row how its costs and accuracy compare with the undefended run's."""
    control = next((row for row in rows if row["variant"] == UNDEFENDED), None)
    for row in rows:
        for name, key in (("time_ratio", "seconds_per_step"), ("bytes_ratio", "bytes_per_upload")):
            base = control[key] if control else None
            row[name] = row[key] / base if base and row[key] is not None else None
        for name in ("accuracy", "client_accuracy"):
            base = control[name] if control else None
            known = base is not None and row[name] is not None
            row[f"{name}_change"] = row[name] - base if known else None


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
    from scipy.stats import binomtest

    if share is None or not count:
        return None
    found = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return float(found.low), float(found.high)
