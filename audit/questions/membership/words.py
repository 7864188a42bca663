"""What the answers mean, in a sentence, and the table of the page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bract.audit.intervals import mean_interval
from bract.audit.questions.membership.rates import CLASS, RATES, found_among, needed
from bract.audit.questions.rule import Decision
from bract.schema.membership import (
    AttackerScore,
    ClientMembership,
    InfluenceScore,
    MembershipAnswer,
    Observer,
)
from bract.schema.report import QuestionPart, Table

SEEN_IN: dict[Observer, str] = {
    "server": "in its updates",
    "client": "in the global models",
    "public": "in the final model",
}
WHO: dict[Observer, str] = {
    "server": "The server, from a client's updates,",
    "client": "Any client, from the global models that it receives,",
    "public": "Anyone who gets the final model alone",
}
LOOKED_AT: dict[Observer, str] = {
    "server": "updates (server)",
    "client": "global models (any client)",
    "public": "final model (anyone)",
}


def decision(answers: Sequence[MembershipAnswer]) -> Decision:
    """Return what all tiers together found."""
    every = [(answer, client) for answer in answers for client in answer.every]
    if not every:
        return Decision("unknown", "No client kept candidates that could be scored.")
    fair = [(answer, client) for answer, client in every if client.unfair is None]
    if not fair:
        _, first = every[0]
        return Decision("unfair", f"Not answered: for {first.client}, {first.unfair}.")
    chances = {f"{i}": c.chance for i, (_, c) in enumerate(fair) if c.chance is not None}
    no_chance = found_among(chances, min(a.level for a, _ in fair))  # over tiers, too
    found = [pair for i, pair in enumerate(fair) if f"{i}" in no_chance]
    names = sorted({client.client for _, client in fair})
    missed = " ".join(filter(None, (_missed([c for _, c in fair]), _refused(every))))
    scores = [s for _, c in fair if (s := strongest(c))]
    if not found and not scores:
        return Decision("unknown", f"No attacker's scores of {_listed(names)} are known.")
    if not found:
        largest = max(scores, key=lambda s: s.auc or 0.0)
        return Decision(
            "none-found",
            f"No attacker recognised the records of {_listed(names)} better than chance does in "
            f"one of twenty audits; the largest area under the curve was {area(largest)}."
            f"{_of_models([c for _, c in fair])}{_shares([c for _, c in fair])}",
            effort=_effort(every),
            missed=missed,
        )
    answer, client = max(found, key=lambda pair: _auc(pair[1]))
    best = strongest(client)
    assert best is not None
    who = sorted({c.client for _, c in found})
    return Decision(
        "members-found",
        f"Records of {clients_text(len(who), len(names))} are recognised as trained on "
        f"({_listed(who)}). Most clearly {client.client}, {SEEN_IN[client.observer]}, by "
        f"{best.title.lower()} in the {answer.tier} tier: area under the curve {area(best)}"
        f"{_rate_text(best)}.{_of_models([c for _, c in fair])}{_shares([c for _, c in fair])}",
        effort=_effort(every),
        missed=missed,
        found=True,
    )


def _of_models(clients: Sequence[ClientMembership]) -> str:
    """Return what others than the server recognise, by the global models alone."""
    texts = []
    observers: tuple[Observer, ...] = ("client", "public")
    for observer in observers:
        mine = [c for c in clients if c.observer == observer]
        if not mine:
            continue
        found = [c for c in mine if c.found]
        who = f"{WHO[observer]} recognises" if found else f"{WHO[observer]} recognised"
        whose = (
            f"records of {clients_text(len(found), len(mine))}" if found else "no client's records"
        )
        areas = [s for c in mine if (s := strongest(c))]
        best = area(max(areas, key=lambda s: s.auc or 0.0)) if areas else "–"
        texts.append(f" {who} {whose} (largest area {best}).{_of_groups(mine)}")
    return "".join(texts)


def _of_groups(clients: Sequence[ClientMembership]) -> str:
    """Return how many groups stand out, by intervals that hold for all groups of a client."""
    groups = [g for c in clients for g in c.groups]
    out = [g for g in groups if g.auc_low is not None and g.auc_low > 0.5]
    if not out:
        return ""
    most = max(out, key=lambda g: g.auc or 0.0)
    return (
        f" {len(out)} of {len(groups)} groups of one class or category stand out by themselves, "
        f"the clearest with an area of {_within(most.auc, most.auc_low, most.auc_high, '.2f')}."
    )


def clients_text(count: int, whole: int) -> str:
    """Return ``2 of 3 clients``, ``both clients``, ``the one client``."""
    if whole == 1:
        return "the one client"
    return "both clients" if count == whole == 2 else f"{count} of {whole} clients"


def _shares(clients: Sequence[ClientMembership]) -> str:
    """Return how well the shares of groups are read from updates, beside a guess without them."""
    parts = []
    names = list(dict.fromkeys(s.attribute for c in clients for s in c.shares))
    for name in names:
        found = [s for c in clients for s in c.shares if s.attribute == name]
        gains = [s.prior_error - s.error for s in found]
        limits = mean_interval(gains, level=1.0 - 0.05 / len(names))
        if limits is None or limits[0] <= 0.0:
            continue
        what = "classes" if name == CLASS else "a column's categories"
        parts.append(
            f" The shares of {what} in a client's data are read from its updates with an "
            f"error of {fmean(s.error for s in found):.2f} (total variation, mean of {len(found)} "
            f"clients), where the held-out records' shares err by "
            f"{fmean(s.prior_error for s in found):.2f} "
            f"[less by {limits[0]:.2f} to {limits[1]:.2f}]."
        )
    return "".join(parts)


def rows(answers: Sequence[MembershipAnswer]) -> Table:
    """Return a row for each tier, client and attacker, over rounds, the strongest first."""
    shown = []
    for answer in answers:
        for client in answer.every:
            scores = [s for s in client.scores if s.round is None]
            for score in sorted(scores, key=lambda s: -(s.auc or 0.0)):
                shown.append(_row(answer, client, score))
    return Table(
        columns=[
            *(
                "looked at",
                "tier",
                "client",
                "members",
                "held out",
                "attacker",
                "area under the curve",
            ),
            *(f"true positives at {100 * rate:g} %" for rate in RATES),
            *("by chance", "blind classifier"),
        ],
        rows=shown,
    )


def influence_part(answers: Sequence[MembershipAnswer]) -> list[QuestionPart]:
    """Return the section of the final model with each client's updates on and off."""
    scores = [score for answer in answers for score in answer.influence]
    if not scores:
        return []
    return [
        QuestionPart(
            title="A client's influence on the final model",
            sentence=(
                "The server can leave one client's updates out of every round's sum, the others' "
                "as they were sent. Loss is what the client's own records then lose in the final "
                "model. No verdict rests on it."
            ),
            table=Table(
                columns=[
                    *("client", "rounds left out", "members", "held out"),
                    *("loss gained, members", "loss gained, held out"),
                    *("area under the curve", "by chance"),
                ],
                rows=[
                    [
                        score.client,
                        len(score.rounds),
                        score.members,
                        score.non_members,
                        _digits(score.moved_members),
                        _digits(score.moved_others),
                        area(score),
                        None if score.chance is None else f"{score.chance:.2g}",
                    ]
                    for score in scores
                ],
            ),
        )
    ]


def _digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _row(
    answer: MembershipAnswer, client: ClientMembership, score: AttackerScore
) -> list[str | float | int | bool | None]:
    chance = "unfair" if client.unfair else f"{client.chance:.2g}" if client.chance else None
    return [
        LOOKED_AT[client.observer],
        answer.tier,
        client.client,
        client.members,
        client.non_members,
        score.title,
        area(score),
        *(
            f"needs {needed(r.rate)} held out"
            if r.true_positives is None
            else _within(r.true_positives, r.low, r.high, ".0%")
            for r in score.rates
        ),
        chance,
        None if client.blind.auc is None else f"{client.blind.auc:.2f}",
    ]


def strongest(client: ClientMembership) -> AttackerScore | None:
    """Return the attacker with the largest area under the curve over rounds."""
    scores = [s for s in client.scores if s.round is None and s.auc is not None]
    return max(scores, key=lambda s: s.auc or 0.0, default=None)


def area(score: AttackerScore | InfluenceScore) -> str:
    """Return the area under the curve with its interval."""
    return _within(score.auc, score.auc_low, score.auc_high, ".2f")


def _within(value: float | None, low: float | None, high: float | None, form: str) -> str:
    """Return a value with its interval; a dash where a result leaves one of them out."""
    if value is None or low is None or high is None:
        return "–"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _rate_text(score: AttackerScore) -> str:
    known = [r for r in score.rates if r.true_positives is not None]
    if not known:
        return ""
    at = known[0]
    share = _within(at.true_positives, at.low, at.high, ".0%")
    return f", {share} of the members at {100 * at.rate:g} % false positives"


def _missed(clients: Sequence[ClientMembership]) -> str:
    """Return how large an effect could have been missed."""
    weakest = max(clients, key=lambda c: c.detectable.auc or 0.0)
    if weakest.detectable.auc is None:
        return "How large an effect could have been missed is not known."
    text = (
        f"With {weakest.members} members and {weakest.non_members} held-out records of "
        f"{weakest.client}, an area under the curve below {weakest.detectable.auc:.2f}"
    )
    if weakest.detectable.advantage:
        rate, value = next(iter(weakest.detectable.advantage.items()))
        text += f", or an advantage below {value:.2f} at {rate} % false positives,"
    text += " is often missed."
    lacking = [rate for rate in RATES if weakest.non_members < needed(rate)]
    if lacking:
        asked = ", ".join(f"{100 * rate:g} % needs {needed(rate)}" for rate in lacking)
        text += f" Held-out records are too few for some rates of false positives: {asked}."
    return text


def _refused(every: Sequence[tuple[MembershipAnswer, ClientMembership]]) -> str:
    unfair = sorted({c.client for _, c in every if c.unfair})
    return f"Not answered for {_listed(unfair)}: the candidates differ." if unfair else ""


def _effort(every: Sequence[tuple[MembershipAnswer, ClientMembership]]) -> str:
    """Return what an attacker needs: the records, the uploads, public data, and the time."""
    answers = {id(answer): answer for answer, _ in every}.values()
    references = max(answer.references for answer in answers)
    shadows = max(answer.shadows for answer in answers)
    public = f", public data for {references} reference models" if references else ""
    public += f", {shadows} shadow models" if shadows else ""
    seconds = sum(answer.seconds or 0.0 for answer in answers)
    return (
        f"The uploads and the records in question{public}, and {seconds:.0f} s of one machine for "
        f"{sum(c.members + c.non_members for c in _once(every))} records."
    )


def _once(every: Sequence[tuple[MembershipAnswer, ClientMembership]]) -> list[ClientMembership]:
    """Return each tier's clients once, whoever looked at them."""
    return list({(answer.tier, c.client): c for answer, c in every}.values())


def _auc(client: ClientMembership) -> float:
    best = strongest(client)
    return 0.0 if best is None or best.auc is None else best.auc


def _listed(names: Sequence[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
