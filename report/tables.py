"""Tables over the rows of a run: attacks by client, clients, leakage by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from bract.audit.intervals import mean_interval, share_interval
from bract.report.order import last, mean, natural, scores, severity, strength, total
from bract.report.read import RunFiles
from bract.report.words.formatting import noun_of
from bract.schema.audit import EXACT_DB, Baseline, at_cap
from bract.schema.inputs import outline_of
from bract.schema.metrics import MetricsRow
from bract.schema.report_rows import (
    AttackRow,
    BoostingFacts,
    ClientFacts,
    ImageFacts,
    LeakageRow,
    Margins,
    ObservationFacts,
    RoundFacts,
    ScoreSpread,
    Spread,
    SsimPsnr,
)

T = TypeVar("T")

_BOUNDS = {
    "ssim": (-1.0, 1.0),
    "ssim difference": (-2.0, 2.0),
    "psnr": (0.0, EXACT_DB),
    "psnr difference": (-EXACT_DB, EXACT_DB),
    "mse": (0.0, 1.0),
    "correlation": (-1.0, 1.0),
    "nrmse": (0.0, 1.0),
}
"""What a score cannot leave, and so its mean cannot."""

_SHARES = ("leaked", "features", "exact", "identified_top1", "identified_top5", "label_accuracy")

_MEANS = (
    "exact",
    "mse",
    "nrmse",
    "lpips_alex",
    "lpips_vgg",
    "stlpips",
    "identified_top1",
    "identified_top5",
)

BASELINES = (
    *("class_mean", "random_image", "prior_only"),
    *("mode_and_mean", "random_row", "nearest_public_row"),
    "random_signal",
)

OfClient = tuple[str, float]
"""A value, and the client that it is of."""


def attack_rows(observations: Sequence[ObservationFacts]) -> list[AttackRow]:
    """Return one row for each attack, tier, input and client, after one over all clients.

    ``client`` is None in the row over all clients. Refused observations are left out.
    """
    rows: list[AttackRow] = []
    done = [o for o in observations if not o.refused]
    for asked in _unique(o.row_key for o in done):
        group = [o for o in done if o.row_key == asked]
        clients = sorted({o.client for o in group}, key=natural)
        for client in [None, *clients]:
            rows.append(_attack_row(client, [o for o in group if client in (None, o.client)]))
    return rows


def _attack_row(client: str | None, group: Sequence[ObservationFacts]) -> AttackRow:
    images = [image for o in group for image in o.images]
    known = [(o.client, image) for o in group for image in o.images if image.scores]
    oracle = [image.oracle for image in images if image.oracle]
    budgets = [o.budget for o in group]
    labels = [
        (o.client, o.label_accuracy)
        for o in group
        if o.label_accuracy is not None
        for _ in o.images
    ]
    others = {name: spread(_values(known, name), name) for name in _MEANS} | {
        "label_accuracy": spread(labels, "label_accuracy")
    }
    leaked = [(who, float(i.leaked)) for who, i in known if i.leaked is not None]
    identified = [value for _, value in _values(known, "identified_top1")]
    return AttackRow(
        attack=group[0].attack,
        attack_name=group[0].attack_name,
        tier=group[0].tier,
        input=group[0].input,
        client=client,
        portfolio=group[0].portfolio,
        chose=any(o.chosen_attack != _asked(o) for o in group),
        methods=dict(Counter(o.method_name for o in group if o.method != _asked(o))),
        repeats=len({o.repeat for o in group}),
        uploads=len({(o.round, o.client) for o in group}),
        clients=len({o.client for o in group}),
        rounds=_unique(o.round for o in group),
        images=len(images),
        scored=len(known),
        failed=sum(o.failed for o in group),
        leaked=sum(bool(image.leaked) for image in images),
        undecided=sum(not image.decided for image in images),
        unjudged=sum(not image.judged for image in images),
        identified=int(sum(identified)),
        identifiable=len(identified),
        candidates=min((o.candidates for o in group if o.candidates), default=None),
        leaked_share=spread(leaked, "leaked"),
        ssim=_score(known, "ssim"),
        psnr=_score(known, "psnr"),
        features=_score(known, "features"),
        correlation=_score(known, "correlation"),
        noun=noun_of([group[0].input]),
        measure=outline_of(group[0].input).primary.name,
        margin=Margins(ssim=_margin(known, "ssim"), psnr=_margin(known, "psnr")),
        intervals={name: (found.low, found.high) for name, found in others.items()},
        oracle=SsimPsnr(
            ssim=mean(o.ssim for o in oracle),
            psnr=mean(o.psnr for o in oracle),
            features=mean(o.features for o in oracle),
            correlation=mean(o.correlation for o in oracle),
        ),
        baselines=_baselines(group),
        target_error=mean(o.target_error for o in group for _ in o.images),
        target_baseline=mean(o.target_baseline for o in group for _ in o.images),
        gradient_cosine=mean(o.gradient_cosine for o in group),
        seconds=total(o.seconds for o in group),
        iterations=max((b.iterations or 0 for b in budgets), default=0) or None,
        budget_seconds=max((b.seconds or 0.0 for b in budgets), default=0.0) or None,
        restarts=max((b.restarts or 0 for b in budgets), default=0) or None,
        **{name: found.mean for name, found in others.items()},
    )


def _asked(observation: ObservationFacts) -> str:
    """Return the attack by its own name, also where it ran on several uploads together."""
    return observation.attack.partition("@")[0]


def _score(known: Sequence[tuple[str, ImageFacts]], name: str) -> ScoreSpread:
    values = _values(known, name)
    return ScoreSpread(
        **dict(spread(values, name)),
        count=len(values),
        at_cap=at_cap([value for _, value in values]) if name == "psnr" else 0,
        best=max((value for _, value in values), default=None),
        missing=len(known) - len(values),
    )


def _values(known: Sequence[tuple[str, ImageFacts]], name: str) -> list[OfClient]:
    found = [(client, getattr(image.scores, name)) for client, image in known]
    return [(client, float(value)) for client, value in found if value is not None]


def _margin(known: Sequence[tuple[str, ImageFacts]], name: str) -> Spread:
    """Return how far images are above the best baseline for each, without the gradient."""
    pairs = [
        (client, getattr(image.scores, name), getattr(image.baseline, name))
        for client, image in known
    ]
    return spread(
        [(client, own - other) for client, own, other in pairs if None not in (own, other)],
        f"{name} difference",
    )


def spread(values: Sequence[OfClient], score: str | None = None) -> Spread:
    """Return mean and 95 % interval of a score, each value with the client that it is of.

    There is no interval for a single client, and for clients that all have the same mean. Images,
    rounds and seeds of one client are not independent, so they count as one.
    """
    numbers, clients = [value for _, value in values], [client for client, _ in values]
    found = None
    if numbers and score in _SHARES:
        found = share_interval(numbers, groups=clients)
    elif numbers:
        found = mean_interval(numbers, groups=clients, bounds=_BOUNDS.get(score or ""))
    low, high = found or (None, None)
    return Spread(mean=mean(numbers), low=low, high=high)


def _baselines(group: Sequence[ObservationFacts]) -> dict[str, Baseline]:
    names = _unique([*BASELINES, *(name for o in group for name in o.baselines)])
    result = {}
    for name in names:
        found = [b for o in group if (b := o.baselines.get(name)) for _ in o.images]
        row = Baseline(
            ssim=mean(b.ssim for b in found),
            features=mean(b.features for b in found),
            correlation=mean(b.correlation for b in found),
            nrmse=mean(b.nrmse for b in found),
            psnr=mean(b.psnr for b in found),
            mse=mean(b.mse for b in found),
        )
        if (row.ssim, row.psnr, row.features, row.correlation) != (None,) * 4:
            result[name] = row
    return result


def leakage_rows(observations: Sequence[ObservationFacts]) -> list[LeakageRow]:
    """Return one row for each scored observation: how much of it leaked in its round."""
    return [
        LeakageRow(
            attack=o.attack,
            attack_name=o.attack_name,
            tier=o.tier,
            round=o.round,
            client=o.client,
            scored=o.scored,
            leaked=o.leaked,
            undecided=o.undecided,
            unjudged=o.unjudged,
            ssim_mean=mean(scores(o, "ssim")),
            ssim_best=max(scores(o, "ssim"), default=None),
            psnr_mean=mean(scores(o, "psnr")),
            psnr_at_cap=at_cap(scores(o, "psnr")),
            baseline_ssim=o.best_baseline.ssim,
            features_mean=mean(scores(o, "features")),
            features_best=max(scores(o, "features"), default=None),
            baseline_features=o.best_baseline.features,
            correlation_mean=mean(scores(o, "correlation")),
            correlation_best=max(scores(o, "correlation"), default=None),
            baseline_correlation=o.best_baseline.correlation,
            measure=outline_of(o.input).primary.name,
            input=o.input,
        )
        for o in observations
        if o.scored
    ]


def client_rows(
    files: RunFiles, observations: Sequence[ObservationFacts], attacks: Sequence[AttackRow]
) -> list[ClientFacts]:
    """Return one row a client: its training, its captures, and what the strongest attack got."""
    names = {c for row in files.metrics for c in row.clients}
    names |= {c.client for c in files.captures} | {o.client for o in observations}
    names |= {f.client for row in files.metrics for f in row.failures}
    return [_client_row(name, files, observations, attacks) for name in sorted(names, key=natural)]


def _client_row(
    name: str,
    files: RunFiles,
    observations: Sequence[ObservationFacts],
    attacks: Sequence[AttackRow],
) -> ClientFacts:
    trained = [row.clients[name] for row in files.metrics if name in row.clients]
    captured = [c for c in files.captures if c.client == name]
    counts = [t.num_examples for t in trained] or [c.declaration.num_examples for c in captured]
    own = [o for o in observations if o.client == name]
    mine = [o for o in own if not o.refused]
    strongest = max((a for a in attacks if a.client == name), key=strength, default=None)
    its = [o for o in mine if strongest is not None and o.row_key == strongest.row_key]
    worst = max((o for o in its if o.scored), key=severity, default=None)
    return ClientFacts(
        client=name,
        rounds=len(trained) or len({c.round for c in captured}),
        examples=next(filter(None, counts), None),
        seconds_per_round=mean(t.seconds for t in trained),
        encryption_seconds_per_round=mean(
            total((t.encrypt_seconds, t.decrypt_seconds)) for t in trained
        ),
        clipped=total(t.clipped for t in trained),
        train_loss=last(t.train_loss for t in trained),
        validation_accuracy=last(t.validation_accuracy for t in trained),
        captures=len(captured),
        attacked=len({o.round for o in mine}),
        refused=len(own) - len(mine),
        failures=sum(f.client == name for row in files.metrics for f in row.failures),
        strongest=strongest,
        best_ssim=max((value for o in its for value in scores(o, "ssim")), default=None),
        best_features=max((value for o in its for value in scores(o, "features")), default=None),
        best_correlation=max(
            (value for o in its for value in scores(o, "correlation")), default=None
        ),
        worst_round=worst.round if worst else None,
    )


def round_rows(metrics: Sequence[MetricsRow]) -> list[RoundFacts]:
    """Return one row for each round of training."""
    return [
        RoundFacts(
            round=row.round,
            seconds=row.seconds,
            loss=row.evaluation.loss if row.evaluation else None,
            accuracy=row.evaluation.accuracy if row.evaluation else None,
            clients=row.clients,
            failures=len(row.failures),
        )
        for row in metrics
    ]


def boosting_rows(metrics: Sequence[MetricsRow]) -> list[BoostingFacts]:
    """Return what each round's FedBoosting measured; empty for a run with another strategy."""
    return [BoostingFacts(round=m.round, **m.boosting.model_dump()) for m in metrics if m.boosting]


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
