"""Tables over many observations: attacks by client, clients, leakage by round."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bract.audit.scoring.metrics import at_cap, mean_interval, share_interval
from bract.report.facts.reading import RunFiles
from bract.schema import EXACT_DB, MetricsRow

Facts = dict[str, Any]

_BOUNDS = {
    "ssim": (-1.0, 1.0),
    "ssim difference": (-2.0, 2.0),
    "psnr": (0.0, EXACT_DB),
    "psnr difference": (-EXACT_DB, EXACT_DB),
    "mse": (0.0, 1.0),
}
"""What a score cannot leave, and so its mean cannot."""

_SHARES = ("leaked", "identified_top1", "identified_top5", "label_accuracy")

BASELINES = ("class_mean", "random_image", "prior_only")


def attack_rows(observations: Sequence[Facts]) -> list[Facts]:
    """Return one row for each attack, tier and client, after one over all clients.

    ``client`` is None in the row over all clients. Refused observations are left out. ``ssim`` and
    ``psnr`` hold ``mean``, ``low`` and ``high``; the other scores are means, whose intervals
    ``intervals`` holds by name.
    """
    rows: list[Facts] = []
    done = [o for o in observations if not o["refused"]]
    for attack, tier in _unique((o["attack"], o["tier"]) for o in done):
        group = [o for o in done if (o["attack"], o["tier"]) == (attack, tier)]
        clients = sorted({o["client"] for o in group}, key=natural)
        for client in [None, *clients]:
            rows.append(_attack_row(client, [o for o in group if client in (None, o["client"])]))
    return rows


def _attack_row(client: str | None, group: Sequence[Facts]) -> Facts:
    images = [image for o in group for image in o["images"]]
    scored = [image for image in images if image["scores"]]
    known = [(o["client"], image) for o in group for image in o["images"] if image["scores"]]
    oracle = [image for image in images if image["oracle"]]
    budgets = [o["budget"] for o in group]
    labels = [
        (o["client"], float(o["label_accuracy"]))
        for o in group
        if o["label_accuracy"] is not None
        for _ in o["images"]
    ]
    others = {name: spread(_values(known, name), name) for name in _MEANS} | {
        "label_accuracy": spread(labels, "label_accuracy")
    }
    return {
        "attack": group[0]["attack"],
        "attack_name": group[0]["attack_name"],
        "tier": group[0]["tier"],
        "client": client,
        "chose": any(o["chosen_attack"] != _asked(o) for o in group),
        "methods": dict(Counter(o["method_name"] for o in group if o["method"] != _asked(o))),
        "repeats": len({o["repeat"] for o in group}),
        "uploads": len({(o["round"], o["client"]) for o in group}),
        "clients": len({o["client"] for o in group}),
        "rounds": _unique(o["round"] for o in group),
        "images": len(images),
        "scored": len(scored),
        "failed": sum(o["failed"] for o in group),
        "leaked": sum(bool(image["leaked"]) for image in images),
        "undecided": sum(not image["decided"] for image in images),
        "leaked_share": spread(
            [(who, float(i["leaked"])) for who, i in known if i["leaked"] is not None], "leaked"
        ),
        "ssim": _score(known, "ssim"),
        "psnr": _score(known, "psnr"),
        "margin": {name: _margin(known, name) for name in ("ssim", "psnr")},
        **{name: found["mean"] for name, found in others.items()},
        "intervals": {name: [found["low"], found["high"]] for name, found in others.items()},
        "oracle": {name: mean(i["oracle"][name] for i in oracle) for name in ("ssim", "psnr")},
        "baselines": _baselines(group),
        "gradient_cosine": mean(o["gradient_cosine"] for o in group),
        "seconds": total(o["seconds"] for o in group),
        "iterations": max((b["iterations"] or 0 for b in budgets), default=0) or None,
        "budget_seconds": max((b["seconds"] or 0.0 for b in budgets), default=0.0) or None,
        "restarts": max((b["restarts"] or 0 for b in budgets), default=0) or None,
    }


_MEANS = ("mse", "lpips_alex", "lpips_vgg", "stlpips", "identified_top1", "identified_top5")


def _asked(observation: Facts) -> str:
    """Return the attack by its own name, also where it ran on several uploads together."""
    return str(observation["attack"]).partition("@")[0]


def _score(known: Sequence[tuple[str, Facts]], name: str) -> Facts:
    values = _values(known, name)
    return {
        **spread(values, name),
        "count": len(values),
        "at_cap": at_cap([value for _, value in values]) if name == "psnr" else 0,
        "best": max((value for _, value in values), default=None),
        "missing": len(known) - len(values),
    }


def _values(known: Sequence[tuple[str, Facts]], name: str) -> list[tuple[str, float]]:
    found = [(client, image["scores"][name]) for client, image in known]
    return [(client, float(value)) for client, value in found if value is not None]


def _margin(known: Sequence[tuple[str, Facts]], name: str) -> Facts:
    """Return how far images are above the best baseline for each, without the gradient."""
    return spread(
        [
            (client, i["scores"][name] - i["baseline"][name])
            for client, i in known
            if i["scores"][name] is not None and i["baseline"][name] is not None
        ],
        f"{name} difference",
    )


def spread(values: Sequence[tuple[str, float]], score: str | None = None) -> Facts:
    """Return ``mean``, ``low`` and ``high`` of a score, each value with the client that it is of.

    ``low`` and ``high`` are the ends of the 95 % interval over clients, and None where there is
    none: of a single client, and of clients that all have the same mean. Images, rounds and seeds
    of one client are not independent, so they count as one.
    """
    numbers, clients = [value for _, value in values], [client for client, _ in values]
    found = None
    if numbers and score in _SHARES:
        found = share_interval(numbers, groups=clients)
    elif numbers:
        found = mean_interval(numbers, groups=clients, bounds=_BOUNDS.get(score or ""))
    low, high = found or (None, None)
    return {"mean": mean(numbers), "low": low, "high": high}


def _baselines(group: Sequence[Facts]) -> Facts:
    names = _unique([*BASELINES, *(name for o in group for name in o["baselines"])])
    result = {}
    for name in names:
        found = [(o["baselines"].get(name), len(o["images"])) for o in group]
        scores = {
            key: mean(b[key] for b, images in found if b for _ in range(images))
            for key in ("ssim", "psnr", "mse")
        }
        if scores["ssim"] is not None or scores["psnr"] is not None:
            result[name] = scores
    return result


def leakage_rows(observations: Sequence[Facts]) -> list[Facts]:
    """Return one row for each scored observation: how much of it leaked in its round."""
    return [
        {
            "attack": o["attack"],
            "attack_name": o["attack_name"],
            "tier": o["tier"],
            "round": o["round"],
            "client": o["client"],
            "scored": o["scored"],
            "leaked": o["leaked"],
            "ssim_mean": mean(_scores(o, "ssim")),
            "ssim_best": max(_scores(o, "ssim"), default=None),
            "psnr_mean": mean(_scores(o, "psnr")),
            "psnr_at_cap": at_cap(_scores(o, "psnr")),
            "baseline_ssim": o["best_baseline"]["ssim"],
        }
        for o in observations
        if o["scored"]
    ]


def client_rows(
    files: RunFiles, observations: Sequence[Facts], attacks: list[Facts]
) -> list[Facts]:
    """Return one row a client: its training, its captures, and what the strongest attack got."""
    names = {c for row in files.metrics for c in row.clients}
    names |= {c.client for c in files.captures} | {o["client"] for o in observations}
    names |= {f.client for row in files.metrics for f in row.failures}
    rows = []
    for name in sorted(names, key=natural):
        trained = [row.clients[name] for row in files.metrics if name in row.clients]
        mine = [o for o in observations if o["client"] == name and not o["refused"]]
        strongest = max((a for a in attacks if a["client"] == name), key=strength, default=None)
        worst = max((o for o in mine if o["scored"]), key=severity, default=None)
        rows.append(
            {
                "client": name,
                "rounds": len(trained),
                "examples": next((t.num_examples for t in trained if t.num_examples), None),
                "seconds_per_round": mean(t.seconds for t in trained),
                "encryption_seconds_per_round": mean(
                    total((t.encrypt_seconds, t.decrypt_seconds)) for t in trained
                ),
                "clipped": total(t.clipped for t in trained),
                "train_loss": last(t.train_loss for t in trained),
                "validation_accuracy": last(t.validation_accuracy for t in trained),
                "captures": sum(c.client == name for c in files.captures),
                "attacked": len({o["round"] for o in mine}),
                "refused": sum(o["client"] == name and bool(o["refused"]) for o in observations),
                "failures": sum(f.client == name for row in files.metrics for f in row.failures),
                "strongest": strongest and {key: strongest[key] for key in _STRONGEST},
                "worst_round": worst["round"] if worst else None,
            }
        )
    return rows


_STRONGEST = ("attack", "attack_name", "tier", "images", "scored", "leaked", "ssim", "psnr")


def strength(row: Facts) -> tuple[float, float, float]:
    """Order attack rows by the share of images leaked, then mean SSIM, then mean PSNR."""
    return _order(row["leaked"], row["scored"], row["ssim"]["mean"], row["psnr"]["mean"])


def severity(observation: Facts) -> tuple[float, float, float]:
    """Order observations by the share of images leaked, then mean SSIM, then mean PSNR."""
    ssim, psnr = mean(_scores(observation, "ssim")), mean(_scores(observation, "psnr"))
    return _order(observation["leaked"], observation["scored"], ssim, psnr)


def _order(
    leaked: int, scored: int, ssim: float | None, psnr: float | None
) -> tuple[float, float, float]:
    share = leaked / scored if scored else -1.0
    return share, -2.0 if ssim is None else ssim, -1.0 if psnr is None else psnr


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def last(values: Iterable[float | None]) -> float | None:
    """Return the last known value; None where nothing is."""
    return next((v for v in reversed(list(values)) if v is not None), None)


def _scores(observation: Facts, name: str) -> list[float]:
    found = [image["scores"][name] for image in observation["images"] if image["scores"]]
    return [value for value in found if value is not None]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key by which ``client-2`` comes before ``client-10``."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def boosting_rows(metrics: Sequence[MetricsRow]) -> list[Facts]:
    """Return what each round's FedBoosting measured, as ``metrics.jsonl`` has it, with ``round``.

    Empty for a run with another strategy.
    """
    return [{"round": m.round, **m.boosting.model_dump()} for m in metrics if m.boosting]
