"""The comparison in words: what each variant leaked, and which attackers were not tried."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bract.report.comparison.variants import UNDEFENDED
from bract.report.words.formatting import plural
from bract.schema.comparison import ComparisonLevel, ComparisonVerdict, VariantRow
from bract.schema.reach import LeakCounts
from bract.schema.verdict import UNJUDGED
from bract.scores.leaks import LeakRule, undecided


def comparison_verdict(
    rows: Sequence[VariantRow], rule: LeakRule, unread: Collection[str] = ()
) -> ComparisonVerdict:
    """Return the verdict over a comparison: ``level``, ``sentence``, ``limits``, ``rule``.

    ``level`` is ``leaked`` (from some variant), ``none-leaked``, ``undecided``, ``unscored``,
    ``misdescribed`` or ``unconfirmed`` (of the undefended run no upload may be judged),
    ``not-attacked`` or ``no-control`` (the undefended run gave nothing to compare with). The
    sentence names the counts and never calls a defense safe.

    Parameters
    ----------
    unread
        Titles of variants of which files could not be read.
    """
    level, sentence = _judge(rows)
    if unread:
        sentence = f"Not all files of {_joined(list(unread))} could be read. {sentence}"
    return ComparisonVerdict(
        level=level,
        sentence=sentence,
        limits=_limits(rows, level),
        rule=rule.text,
        ssim=rule.ssim,
    )


def _judge(rows: Sequence[VariantRow]) -> tuple[ComparisonLevel, str]:
    control = next((row for row in rows if row.variant == UNDEFENDED), None)
    defended = [row for row in rows if row.variant != UNDEFENDED]
    scored = [row for row in defended if row.counts.scored and row.level not in UNJUDGED]
    aside = [row.title for row in defended if row.level in UNJUDGED]
    unjudged = f"; not judged: {_joined(aside)}" if aside else ""
    if not any(row.images for row in rows):
        return "not-attacked", "No variant has been attacked, so there is no leakage to compare."
    if control is None or not control.images:
        return "no-control", (
            "The undefended run gave no reconstruction, so there is nothing to compare the "
            f"defenses with{'; ' + _counts(scored) if scored else ''}."
        )
    if control.level in ("misdescribed", "unconfirmed"):
        return control.level, (
            "No comparison: the uploads of the undefended run are not what their description says, "
            "so that nothing was found in them shows nothing."
        )
    if not control.counts.scored:
        return "unscored", (
            "The attacks returned images, but without the originals it is not known how close "
            "they are, so the defenses cannot be compared."
        )
    start = control.counts
    all_images = plural(start.scored, "attacked image")
    open_ones = sum(row.counts.undecided for row in (control, *scored))
    all_of_them = sum(row.counts.scored for row in (control, *scored))
    if open_ones and not any(row.counts.leaked for row in (control, *scored)):
        said = undecided(open_ones, all_of_them)
        return "undecided", f"{said[0].upper()}{said[1:]}{unjudged}."
    if not start.leaked and not any(row.counts.leaked for row in scored):
        return "none-leaked", (
            f"Even undefended, none of the {all_images} was reconstructed above the leak "
            f"threshold: these attacks cannot rank the defenses{unjudged}."
        )
    sentence = (
        f"Undefended, the attacks reconstructed {start.leaked} of {all_images}"
        if start.leaked
        else f"Undefended, the attacks reconstructed none of the {all_images}"
    )
    if scored:
        sentence += f"; {_counts(scored, start.scored)}"
    if open_ones:
        sentence += f"; {undecided(open_ones, all_of_them)}"
    return "leaked", f"{sentence}{unjudged}."


def _counts(rows: Sequence[VariantRow], total: int | None = None) -> str:
    """Return ``9 of 24 under Pruning and none under Guardian or FedKL``, most leaked first.

    ``total`` is the count that the sentence has named already.
    """
    found = [(row.counts, row.title) for row in rows]
    hit = sorted((one for one in found if one[0].leaked), key=lambda one: -_share(one[0]))
    parts = [f"{counts.leaked} of {counts.scored} under {title}" for counts, title in hit]
    spared: dict[int, list[str]] = {}
    for counts, title in found:
        if counts.judged and not counts.leaked:
            spared.setdefault(counts.judged, []).append(title)
    for count, names in spared.items():
        parts.append(f"none{'' if count == total else f' of {count}'} under {_either(names)}")
    return _joined(parts)


def _share(counts: LeakCounts) -> float:
    return counts.leaked / counts.scored


def _limits(rows: Sequence[VariantRow], level: ComparisonLevel) -> str:
    if level == "not-attacked":
        return "Run the audit on the variants to find out what their captures give away."
    if level in UNJUDGED:
        return "Correct the description of the clients, and compare again."
    if level == "unscored":
        return (
            "Scores need the originals, which a client keeps only where its operator switched "
            "that on (truth: true). Judge the pictures by eye."
        )
    if level == "undecided":
        return "This is no sign that the uploads hide the images: audit with more test data."
    if level == "none-leaked":
        return (
            "Give the attacks more iterations or restarts, or choose stronger ones, until the "
            "undefended run leaks; only then is a comparison evidence about a defense."
        )
    return " ".join(filter(None, (_attackers(rows), _choice(rows), _scope(rows))))


def _choice(rows: Sequence[VariantRow]) -> str:
    """Return how the attacker behind a figure was chosen, where there was a choice."""
    most = max((sum(bool(a.scored) for a in row.attacks) for row in rows), default=0)
    if most < 2:
        return ""
    return (
        f"Each figure is that of the strongest of up to {most} attackers, chosen with the "
        "originals; its interval does not cover that choice."
    )


def _attackers(rows: Sequence[VariantRow]) -> str:
    """Return which kinds of attacker made the defended figures, and which were not tried."""
    defended = [row for row in rows if row.variant != UNDEFENDED and row.images]
    adaptive = [row for row in defended if {a.tier for a in row.attacks} - {"oblivious"}]
    others = [row.title for row in defended if row not in adaptive]
    if not defended:
        return "No defended run was attacked."
    if not adaptive:
        return (
            "Every attacker here was oblivious: it took the uploads at face value. One who knows "
            "the defense and its settings (adaptive) was not tried and may get much more."
        )
    text = "The attackers were oblivious, and adaptive ones who knew the defense and its settings"
    if others:
        return f"{text}; against {_joined(others)} no adaptive attacker was tried."
    return f"{text}."


def _scope(rows: Sequence[VariantRow]) -> str:
    names = list(dict.fromkeys(a.attack_name for row in rows for a in row.attacks))
    return (
        f"The figures bound {_joined(names)} at the budgets below, on these images, and nothing "
        "else."
    )


def _joined(parts: Sequence[str], word: str = "and") -> str:
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} {word} {parts[-1]}"


def _either(names: Sequence[str]) -> str:
    return _joined(names, "or")
