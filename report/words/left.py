"""What left the sites, in words: one row a kind of thing, flagged ones first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bract.errors import listed
from bract.protocol.claims import claim_of
from bract.report.words.formatting import NOTHING, plural
from bract.schema.account import LeftFacts, LeftRow

WHAT = {
    "model": "The trained model (its update)",
    "array": "Arrays that are not the model's",
    "number": "Single numbers",
    "numbers": "Lists of numbers",
    "switch": "Yes or no",
    "text": "A text",
    "texts": "Texts",
    "bytes": "Bytes that no rule can read",
}

ONE = {
    "array": "an array",
    "number": "one number",
    "numbers": "a list of numbers",
    "switch": "yes or no",
    "text": "a text",
    "texts": "texts",
    "bytes": "bytes",
}

ANSWERED = {
    "train": "training",
    "evaluate": "evaluation",
    "query": "a query of the server",
}

_NAMES = 5

FEW = 10
"""Counts below it are flagged (`bract.server.disclosures.SMALL`)."""


@dataclass(frozen=True)
class Shown:
    """One row for readers of the law.

    Attributes
    ----------
    what
        The kind of thing, or the flagged thing's name.
    names
        What it is called in the messages.
    amount, of
        How much a reply holds, and of how many clients, in answer to what.
    reasons
        Why it is flagged; empty where it is not.
    note
        What stands in their place.
    """

    what: str
    names: str
    amount: str
    of: str
    reasons: list[str]
    note: str = NOTHING


def shown_rows(left: LeftFacts) -> list[Shown]:
    """Return a row for each flagged thing, and one for each kind of all others."""
    flagged = [_flagged(row) for row in left.rows if row.reasons]
    others: dict[tuple[str, str], list[LeftRow]] = {}
    for row in left.rows:
        if not row.reasons:
            message = row.message if row.kind == "model" else ""
            others.setdefault((row.kind, message), []).append(row)
    return flagged + [_kind(kind, rows) for (kind, _), rows in others.items()]


def _flagged(row: LeftRow) -> Shown:
    what = f"{row.name or row.record}: {ONE.get(row.kind, row.kind)}"
    reasons = [reason[:1].upper() + reason[1:] for reason in row.reasons]
    if row.flagged and len(row.flagged) < row.clients:
        reasons[-1] += f" ({listed(row.flagged, 3)})"
    return Shown(what, row.record, _with_policy(row.amount, row), _of([row]), reasons)


def _kind(kind: str, rows: Sequence[LeftRow]) -> Shown:
    names = list(dict.fromkeys(row.name or row.record for row in rows))
    amounts = list(dict.fromkeys(_with_policy(row.amount, row) for row in rows))
    if len(amounts) > 1:
        each = [f"{row.name or row.record}: {_with_policy(row.amount, row)}" for row in rows]
        amounts = [listed(list(dict.fromkeys(each)), _NAMES)]
    amount = amounts[0]
    if kind == "number":
        amount = plural(len(names), "number")
        if policies := [row for row in rows if row.policy]:
            amount = f"{amount}; {listed([r.name for r in policies], 3)} {policies[0].policy}"
    unsure = could_hold_labels(LeftFacts(rows=list(rows)))
    note = "not flagged, but labels could be in it" if unsure else NOTHING
    return Shown(WHAT.get(kind, kind), listed(names, _NAMES), amount, _of(rows), [], note)


def _with_policy(amount: str, row: LeftRow) -> str:
    return f"{amount}; {row.policy}" if row.policy else amount


def _of(rows: Sequence[LeftRow]) -> str:
    clients = max(row.clients for row in rows)
    replies = max(row.replies for row in rows)
    messages = dict.fromkeys(answered(row.message) for row in rows)
    return (
        f"{plural(clients, 'client')}, {plural(replies, 'reply').replace('replys', 'replies')} "
        f"to {' and '.join(messages)}"
    )


def answered(message: str) -> str:
    """Return what a type of message asks for."""
    kind, _, action = message.partition(".")
    known = ANSWERED.get(kind, message)
    return f"{known} ({action})" if action else known


def said(left: LeftFacts) -> str:
    """Return in a sentence how far the table goes."""
    if left.recorded == "nothing":
        return "What left the sites was not recorded."
    flagged = sum(bool(row.reasons) for row in left.rows)
    if left.recorded == "training":
        return (
            "Recorded were the answers to training alone, by an earlier version or in part: "
            "answers to evaluations and queries are not in this table, and no rule looked at it."
            if not flagged
            else "Not every answer was recorded: others may have held more."
        )
    kinds = "kind of thing" if flagged == 1 else "kinds of things"
    count = f"{flagged} {kinds}" if flagged else "nothing of it"
    beyond = f" {left.unlisted} more things are not listed." if left.unlisted else ""
    replies = plural(left.replies, "reply").replace("replys", "replies")
    return (
        f"Everything in {replies} of {plural(left.clients, 'client')}, by name and size. Rules "
        f"looked at the values as they came, and flag {count} as possibly about single people or "
        f"small groups.{beyond}"
    )


_COUNTS = frozenset({"small-count"})
"""Rules whose finding is a number of people or examples, and no value of theirs."""


def openly(left: LeftFacts) -> list[str]:
    """Return the names of flagged things that hold values of records, rather than a count."""
    names = [row.name or row.record for row in left.rows if set(row.rules) - _COUNTS]
    return list(dict.fromkeys(names))


def sent_openly(left: LeftFacts) -> str:
    """Return in a sentence what the server can read without any attack; empty for nothing."""
    names = openly(left)
    if not names:
        return ""
    return f"Sent openly, for the server to read without any attack: {listed(names, _NAMES)}."


def stop_sending(names: Sequence[str]) -> str:
    """Return what to do about things that are sent openly."""
    each = "it" if len(names) == 1 else "each"
    return f"Stop sending {listed(names, _NAMES)}, or write down why {each} must leave a site."


def smallest(left: LeftFacts) -> str:
    """Return in a sentence the smallest count of people or examples that left a site."""
    found = left.smallest
    if found is None:
        nothing = left.recorded == "nothing"
        return "" if nothing else "No count of people or examples is known to have left."
    whose = f"{found.name} of {found.client}"
    count = "The smallest count of people or examples that left a site"
    if found.value is None:
        return f"{count} is below {FEW}; its value was not written down ({whose})."
    return f"{count} is {found.value:,} ({whose})."


MOST_SINGLE = 32
"""Single numbers of different names up to which they count as measurements."""

_MEASURED = {
    *("loss", "losses", "acc", "accuracy", "recall", "precision", "auc", "auroc", "roc", "iou"),
    *("miou", "dice", "sensitivity", "specificity", "perplexity", "ppl", "entropy", "mse", "mae"),
    *("rmse", "nll", "error", "psnr", "ssim", "time", "times", "second", "seconds", "duration"),
    *("ms", "epoch", "epochs", "step", "steps", "round", "rounds", "batch", "batches", "lr"),
    *("rate", "examples", "samples", "partition", "epsilon", "noise", "clip", "norm", "norms"),
    *("seed", "version", "layers", "rank", "drift", "gpu", "cpu", "memory", "stopped"),
}
"""Words in names of single numbers that measure a training; another one may tell a label."""

_QUALIFIERS = {
    *("train", "trained", "training", "val", "valid", "validation", "test", "eval", "evaluation"),
    *("best", "mean", "avg", "average", "std", "min", "max", "total", "sum", "num", "n", "number"),
    *("client", "local", "global", "final", "last", "first", "early", "per", "of", "in", "at"),
    *("macro", "micro", "weighted", "balanced", "cross", "absolute", "squared", "root", "score"),
    *("top", "grad", "gradient", "learning", "defense", "spent", "random", "key", "size", "id"),
    *("layer", "metric", "metrics"),
}
"""Words that say of which measurement a number is, and are none by themselves."""

_COUNTERS = {"epoch", "epochs", "step", "steps", "round", "rounds", "layer", "layers", "top"}
"""Words after which a number in a name counts no class."""

_NUMBERED = {"f#", "r#", "l#", "acc#"}
"""Measurements with a number in their name; several of a site may be of classes."""

_TOKEN = re.compile(r"(?:[A-Z]+(?![a-z])|[A-Z]?[a-z]+)#?|#")


def could_hold_labels(left: LeftFacts) -> list[str]:
    """Return names of things that no rule flags and that labels could be in.

    A single number may be a label, or the score of a class, which shows that a site has it: only
    one whose name is understood is taken for a measurement.
    """
    kinds = {"array", "numbers", "text", "texts", "bytes"}
    found = [row.name for row in left.rows if row.kind in kinds and not row.labels]
    single = [row for row in left.rows if row.kind in ("number", "switch")]
    unsure = [r for r in single if len(single) > MOST_SINGLE or not _is_measured(r)]
    return found + [row.name for row in unsure]


def _is_measured(row: LeftRow) -> bool:
    if row.labels or claim_of(row.name) is not None:
        return True
    if not re.fullmatch(r"[A-Za-z#_\s./:@()\[\]-]*", row.name):
        return False
    several = re.match(r"\d+ times ", row.amount) is not None
    measures, before = False, ""
    for token in _tokens(row.name.replace("@#", "_top#")):
        if token in _NUMBERED and not several:
            word, measures = "", True
        else:
            word = token.rstrip("#") or before
            if word not in (_COUNTERS if "#" in token else _MEASURED | _QUALIFIERS):
                return False
            measures |= word in _MEASURED
        before = word
    return measures


def _tokens(name: str) -> Iterator[str]:
    """Yield the lower-case words of a name, each with the number that follows it at once."""
    for part in re.findall(r"[A-Za-z#]+", name):
        known = part.lower() in _MEASURED | _NUMBERED
        yield from [part.lower()] if known else map(str.lower, _TOKEN.findall(part))
