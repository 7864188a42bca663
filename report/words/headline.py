"""The verdict in words: the result in plain ones, and separately how it was measured.

A reader who knows no statistics reads ``sentence`` and ``explanation``; the interval, the number
of attackers and how one of them was chosen are in ``statistics``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bract.config.client_names import AGGREGATE
from bract.report.reach import worst_upload
from bract.report.words.attack_text import budget_text, choice_text, hurried, spread_text
from bract.report.words.formatting import noun_of, plural
from bract.schema.report_rows import AttackRow, ImageFacts, ObservationFacts
from bract.schema.verdict import UNJUDGED, Level
from bract.scores.judging import Checked
from bract.scores.leaks import LeakRule, undecided

MOST_TOKENS = 0.8
"""Share of a text's tokens from which on their recovery is named, though it is no text."""

READABLE = "Readable: nearer to its own original than chance explains, and alike enough to be seen."


@dataclass(frozen=True)
class Headline:
    """Words of a verdict, in the order of the page; ``statistics`` is empty without scores."""

    sentence: str
    explanation: str
    statistics: str = ""


def headline(
    level: Level,
    row: AttackRow | None,
    attacks: Sequence[AttackRow],
    observations: Sequence[ObservationFacts],
    *,
    left: int,
    captures: int,
    checked: Checked,
    rule: LeakRule,
) -> Headline:
    """Return the words for a run.

    Parameters
    ----------
    row
        The attack over all clients that makes the verdict; None where none ran.
    attacks, observations
        All of the run's.
    left
        How many of the captured uploads no attack ran on.
    captures
        Number of uploads that the server holds.
    checked
        The checks of the run's uploads.
    """
    if row is None:
        return _nothing_ran(len(observations), captures)
    if level in UNJUDGED:
        return _unjudged(checked)
    mine = [o for o in observations if same_attack(o, row)]
    clients = [a for a in attacks if same_attack(a, row) and a.client is not None]
    if level == "unscored":
        return _unscored(row, mine, len(clients))
    statistics = _statistics(row, attacks, rule)
    place = worst_upload(observations)
    if level == "leaked" and place is not None:
        return _leaked(row, observations[place], attacks, observations, statistics, checked)
    found = (
        _undecided(row, statistics) if level == "undecided" else _none(row, mine, rule, statistics)
    )
    if left:
        some = f"{left} of {plural(captures, 'upload')} that the server holds"
        explained = f"{found.explanation} {some} {_was(left)} not attacked."
        found = replace(found, explanation=explained)
    if before := f"{checked.reserve()}{hurried(row)}":
        said = f"{before}{found.sentence[0].lower()}{found.sentence[1:]}"
        return replace(found, sentence=f"{said[0].upper()}{said[1:]}")
    return found


def with_unread(read: Headline, level: Level, row: AttackRow | None, unread: int) -> Headline:
    """Return the words for a run of which so many results and uploads could not be read.

    They come before any verdict but a leak, which stands whatever the others held.
    """
    if not unread:
        return read
    files = plural(unread, "file")
    explanation = f"{read.explanation} No figure here is of the {files} that could not be read."
    if level == "leaked":
        return replace(read, explanation=explanation)
    sentence = read.sentence
    if row is None or not sentence.startswith(row.attack_name):
        sentence = f"{sentence[0].lower()}{sentence[1:]}"
    said = f"{files} of the run could not be read; of the rest: {sentence}"
    return replace(read, sentence=said, explanation=explanation)


def finding(sentence: str, level: Level, openly: str) -> str:
    """Return a page's first words: the verdict's, and what was sent openly before it or behind.

    Before any verdict but a leak, since the values that were sent need no attack.
    """
    return " ".join(filter(None, (sentence, openly) if level == "leaked" else (openly, sentence)))


def same_attack(one: AttackRow | ObservationFacts, other: AttackRow | ObservationFacts) -> bool:
    """Return whether two rows are of the same attack, tier and input."""
    return one.row_key == other.row_key


def who(row: AttackRow) -> str:
    """Name the attack with its tier and budget."""
    return f"{row.attack_name} ({budget_text(row)})"


def _nothing_ran(examined: int, captures: int) -> Headline:
    if examined:
        return Headline(
            f"No upload could be attacked: {_all(examined)} examined {_was(examined)} set aside.",
            "An upload that could not be attacked here is not thereby hidden from others.",
        )
    if captures:
        return Headline(
            f"No attack has been run on the {plural(captures, 'upload')} that the server holds.",
            "Only an audit finds out what the captures give away.",
        )
    return Headline(
        "No attack has been run, and no upload has been captured to run one on.",
        "The server writes down what it receives where its operator switched that on.",
    )


def _unjudged(checked: Checked) -> Headline:
    return Headline(
        checked.sentence(),
        f"{checked.reason} What a client trained by is simulated in every attack: a wrong model, "
        "loss, optimizer or record leads all of them astray, and is no sign that the uploads hide "
        "anything.",
    )


def _unscored(row: AttackRow, mine: Sequence[ObservationFacts], clients: int) -> Headline:
    made = (
        f"{row.attack_name} made {plural(row.images, _shown(row))} from the uploads of "
        f"{plural(clients, 'client')}"
    )
    needed = (
        "Scores need the originals, which a client keeps only where its operator switched that on."
    )
    statistics = f"{who(row)}; not scored"
    proven = [o for o in mine if o.certificate is not None]
    exact = sum(len(o.images) for o in proven)
    if not exact:
        return Headline(
            f"{made}; how near they are to the originals has not been measured.",
            f"{needed} Judge the {_shown(row)}s by eye.",
            f"{statistics}.",
        )
    error = max(o.certificate.error for o in proven if o.certificate is not None)
    rest = row.images - exact
    others = f" Judge the other {plural(rest, _shown(row))} by eye." if rest else ""
    return Headline(
        f"{made}; {exact} of them {'fits its upload' if exact == 1 else 'fit their uploads'} "
        "exactly, which needs no originals.",
        f"Such a {_shown(row)} reproduces the upload to rounding, by equations with one solution "
        "to numerical precision. That it is the original holds if the capture is genuine and the "
        f"client trained as declared. {needed}{others}",
        f"{statistics}; {exact} exact for the upload, estimated error {error:.2g} of the range of "
        "a pixel.",
    )


def _leaked(
    row: AttackRow,
    upload: ObservationFacts,
    attacks: Sequence[AttackRow],
    observations: Sequence[ObservationFacts],
    statistics: str,
    checked: Checked,
) -> Headline:
    """Return the words for a leak: the worst upload of any attack, and the strongest over all."""
    worst = next(a for a in attacks if same_attack(a, upload) and a.client == upload.client)
    own = [o for o in observations if same_attack(o, worst) and o.client == worst.client]
    once = upload if len(worst.rounds) > 1 and worst.repeats == 1 else None
    images = [i for o in own if once is None or o is once for i in o.images]
    readable = sum(image.leaked_by in ("ssim", "features", "correlation") for image in images)
    matched = sum(image.leaked_by == "identified" for image in images)
    whose = _whose(worst) if once is None else f"{_whose(worst)} in round {once.round}"
    part = _part(readable or matched, worst if once is None else once, whose)
    if readable:
        found = f"{part} {_was(readable)} reconstructed readably"
        if matched:
            found += f", and {matched} more closely enough to be matched to {_own(matched)}"
    else:
        found = (
            f"{part} {_was(matched)} reconstructed closely enough to be matched to {_own(matched)}"
        )
    public = worst.tier == "surrogate"
    explained = [
        f"{worst.attack_name} rebuilt {'it' if readable + matched == 1 else 'them'} from what "
        f"{_sender(worst)} during training, "
        f"{'with a generator of public images' if public else 'and from nothing else'}."
    ]
    if upload.num_examples == upload.scored == readable + matched > 1 and worst.repeats == 1:
        explained.append(f"{_sender_name(worst)} declared no more {worst.noun}s than these.")
    if once is not None:
        explained.append(
            f"In the {len(worst.rounds)} rounds of it that were attacked it is {worst.leaked} of "
            f"{worst.scored}, {_each(worst)} counted in each."
        )
    if row.clients > 1:
        by = "" if same_attack(worst, row) else f", by {who(row)},"
        explained.append(f"Over all {row.clients} clients{by} it is {row.leaked} of {row.scored}.")
    if row.undecided:
        explained.append(f"For {row.undecided} it cannot be decided.")
    if note := checked.note():
        explained.append(note)
    explained += _identified(row)
    explained += [
        "These counts are a lower bound: more time, or an attacker who knows more, can only find "
        "more.",
        READABLE,
    ]
    return Headline(f"{found}.", " ".join(explained), statistics)


def _each(row: AttackRow) -> str:
    return f"{'an' if row.noun[0] in 'aeiou' else 'a'} {row.noun}"


def _undecided(row: AttackRow, statistics: str) -> Headline:
    left, scored = row.undecided, row.scored
    if left < scored:
        sentence = (
            f"{_part(0, row)} is known to have leaked, and for {left} of them it cannot be decided"
        )
    elif scored == 1:
        sentence = f"It cannot be decided whether the {row.noun} attacked leaked"
    else:
        sentence = f"It cannot be decided whether any of the {_number(scored, row)} leaked"
    explained = [
        f"The test data hold too few {row.noun}s of their classes to separate a copy from chance. "
        f"This is no sign that the uploads hide the {row.noun}s: look at the {_shown(row)}s, or "
        "audit with more test data.",
        *_identified(row),
    ]
    return Headline(f"{sentence}{_but_identified(row)}.", " ".join(explained), statistics)


def _none(
    row: AttackRow, mine: Sequence[ObservationFacts], rule: LeakRule, statistics: str
) -> Headline:
    alike = sum(
        i.scores is not None and (i.scores.ssim or 0.0) >= rule.ssim for o in mine for i in o.images
    )
    explained = [
        "This is the result of the attacks listed here, with the time they had. It does not show "
        f"that the uploads hide the {row.noun}s.",
        READABLE,
    ]
    if alike:
        explained.insert(
            1,
            f"{plural(alike, 'picture')} below may look right all the same; chance is not ruled "
            "out there, since a typical picture of the class can look as near.",
        )
    sets = sum(_is_a_set(image) for o in mine for image in o.images)
    if sets:
        explained.insert(
            1,
            f"Most tokens of {plural(sets, row.noun)} were recovered, among others and in an order "
            "that chance explains. Which words occur can itself be sensitive.",
        )
    explained += _identified(row)
    sentence = (
        f"{_part(0, row)} was reconstructed readably"
        if row.scored > 1
        else f"The {row.noun} attacked was not reconstructed readably"
    )
    return Headline(
        f"{sentence}{_but_identified(row)}.",
        " ".join(explained),
        statistics,
    )


def _is_a_set(image: ImageFacts) -> bool:
    """Return whether most of a text's tokens were recovered, as a set that is no text."""
    found = image.scores
    if found is None or found.order_chance is None or image.leaked:
        return False
    return (found.features or 0.0) >= MOST_TOKENS


def _but_identified(row: AttackRow) -> str:
    """Return the end of a sentence that counts no leak: the images that are identified."""
    if not row.identified:
        return ""
    if row.scored == 1:
        return ", but it is identified"
    return f", but {row.identified} {'is' if row.identified == 1 else 'are'} identified"


def _identified(row: AttackRow) -> list[str]:
    """Return what *identified* means and how often chance does it; empty where none is."""
    if not row.identified or not row.candidates:
        return []
    return [
        f"Identified, {row.identified} of {row.identifiable}: among {row.candidates:,} candidate "
        f"{row.noun}s the reconstruction is nearest to its own original, as an arbitrary "
        f"{_shown(row)} is in 1 "
        f"of {row.candidates:,} cases, and one that is typical of its class more often."
    ]


def _statistics(row: AttackRow, attacks: Sequence[AttackRow], rule: LeakRule) -> str:
    overall = [a for a in attacks if a.client is None]
    text = f"{who(row)}; {spread_text(row)}{choice_text(overall)}"
    if row.undecided:
        text += f"; {undecided(row.undecided, row.scored, row.noun)}"
    return (
        f"{text}. Where nothing leaks, {_each(row)} is counted as leaked in at most "
        f"{1 - rule.level:.0%} of runs, of clients whose data are like the references."
    )


def _shown(row: AttackRow) -> str:
    """Name what a page shows of one example."""
    return "picture" if row.noun == "image" else row.noun


def _whose(row: AttackRow) -> str:
    if row.client == AGGREGATE:
        return "in the sum of all updates"
    return f"of {row.client}"


def _sender(row: AttackRow) -> str:
    if row.client == AGGREGATE:
        return "the clients' updates add up to"
    return f"{row.client} sent to the server"


def _sender_name(row: AttackRow) -> str:
    return "All clients together" if row.client == AGGREGATE else str(row.client)


def _own(count: int) -> str:
    return "its original" if count == 1 else "their originals"


def _part(count: int, row: AttackRow | ObservationFacts, whose: str = "") -> str:
    """Return ``4 of the 8 images attacked``, ``All 8 images attacked``, ``None of the ...``."""
    of = row.scored
    whose = f" {whose}".rstrip()
    if of == 1:
        return f"The {_number(1, row).partition(' ')[2]}{whose}"
    if count == of:
        return f"All {_number(of, row)}{whose}"
    return f"{count or 'None'} of the {_number(of, row)}{whose}"


def _number(count: int, row: AttackRow | ObservationFacts) -> str:
    """Count what was attacked; with several seeds each image is attacked several times."""
    if isinstance(row, ObservationFacts):
        return f"{plural(count, noun_of([row.input]))} attacked"
    if row.repeats == 1:
        return f"{plural(count, row.noun)} attacked"
    return f"{plural(count, 'attempt')} at {row.noun}s"


def _all(count: int) -> str:
    return "the one" if count == 1 else f"all {count}"


def _was(count: int) -> str:
    """Return the verb of ``count`` images; none of them takes the singular."""
    return "were" if count > 1 else "was"
