"""What a third-party app's reply may tell of its data beside the update: held back, or rounded."""

from __future__ import annotations

import math
from typing import Any

from flwr.app import Message

from bract.client.defenses import DefenseError
from bract.client.policy import PolicyError, SitePolicy
from bract.errors import BractError, shown
from bract.protocol.fused import TRAINING_SCORES
from bract.protocol.records import NUM_EXAMPLES_KEY, OLDER_EXAMPLES_KEY

MOST_TEXT = 1024
MOST_NUMBERS = 256
"""What records beside a defended update may hold: names and counts, and no model."""

OLDER_EXAMPLES_RECORD = "evaluateres.num_examples"
"""Record of metrics in which a client of Flower's older API counts what it evaluated on."""


def answer_of(reply: Message) -> Message:
    """Return an app's reply; an error in it is the app's, of which the server reads nothing."""
    if reply.has_error():
        raise BractError(f"the app replied with an error: {reply.error.reason}", code="site-failed")
    return reply


def check_split(reply: Message, policy: SitePolicy) -> None:
    """Refuse to send scores of fewer examples than the policy demands."""
    records = reply.content.metric_records
    found = [record.get(NUM_EXAMPLES_KEY) for record in records.values()]
    if OLDER_EXAMPLES_RECORD in records:
        found = [records[OLDER_EXAMPLES_RECORD].get(OLDER_EXAMPLES_KEY)]
    for number in found or [None]:
        _check_count(number, policy)


def check_scores(reply: Message, policy: SitePolicy) -> bool:
    """Return whether the answer to a query holds scores; refuse those of too few examples.

    Scores are numbers that are not whole, whole ones beside ``num-examples`` (how many of them were
    correct), and lists of whatever, which may hold an entry an example. An app that answers other
    such values states of how many examples they are. A single text is the app's own.

    Raises
    ------
    PolicyError
        If ``num-examples`` is missing, or below ``min_validation_images`` in a record.
    """
    counts = [r[NUM_EXAMPLES_KEY] for r in _measurements(reply) if NUM_EXAMPLES_KEY in r]
    if not any(_holds_scores(record) for record in _measurements(reply)):
        return False
    for number in counts or [None]:
        _check_count(number, policy)
    return True


def _holds_scores(record: Any) -> bool:
    values = [value for name, value in record.items() if name != NUM_EXAMPLES_KEY]
    kinds = (int, float, list) if NUM_EXAMPLES_KEY in record else (float, list)
    return any(isinstance(value, kinds) for value in values)


def _check_count(number: object, policy: SitePolicy) -> None:
    if not isinstance(number, int | float) or number < policy.min_validation_images:
        raise PolicyError(
            f"the app scored a model on {NUM_EXAMPLES_KEY} = {number}, and this site's policy "
            f"demands min_validation_images: {policy.min_validation_images}"
        )


def _measurements(reply: Message) -> list[Any]:
    """Return the records that may hold measurements; Flower's older API sends them as config."""
    return [*reply.content.metric_records.values(), *reply.content.config_records.values()]


def check_carried(reply: Message) -> None:
    """Refuse what may hold an update, or a part of it, beside the arrays: no defense protects it.

    Apps send models as bytes, as texts, or as lists of whole numbers after quantisation.

    Raises
    ------
    DefenseError
        If records of metrics and configuration hold bytes, texts of more than `MOST_TEXT`
        characters, or more than `MOST_NUMBERS` whole numbers.
    """
    texts, numbers = 0, 0
    for name, value in (item for record in _measurements(reply) for item in record.items()):
        values = value if isinstance(value, list) else [value]
        if any(isinstance(one, bytes) for one in values):
            raise _carries(name, "bytes")
        texts += sum(len(one) for one in values if isinstance(one, str))
        if texts > MOST_TEXT:
            raise _carries(name, f"texts of more than {MOST_TEXT} characters in all")
        numbers += sum(isinstance(one, int) for one in values)
        if numbers > MOST_NUMBERS:
            raise _carries(name, f"more than {MOST_NUMBERS} whole numbers in all")


def _carries(name: str, what: str) -> DefenseError:
    return DefenseError(
        f"DefenseMod: {shown(name)} of the reply holds {what}, which may be an update and which no "
        "defense protects; return arrays in an ArrayRecord; nothing was sent"
    )


def withhold(reply: Message, policy: SitePolicy, *, hidden: bool) -> None:
    """Replace measured values by NaN; whole numbers are counts, and stay."""
    if policy.tells_training(hidden=hidden):
        return
    for record in _measurements(reply):
        examples = record.get(NUM_EXAMPLES_KEY)
        images = examples if isinstance(examples, int) else 0
        for name, value in list(record.items()):
            if isinstance(value, float):
                allowed = None
                if name in TRAINING_SCORES:
                    allowed = policy.training_score(value, images, hidden=hidden)
                record[name] = math.nan if allowed is None else allowed
            elif isinstance(value, list):
                record[name] = [math.nan if isinstance(v, float) else v for v in value]


def round_metrics(reply: Message, policy: SitePolicy) -> None:
    """Round measured values; the number of examples is a count, also where it is a float."""
    for record in _measurements(reply):
        for name, value in list(record.items()):
            if isinstance(value, float) and name != NUM_EXAMPLES_KEY:
                record[name] = policy.rounded(value)
            elif isinstance(value, list):
                record[name] = [policy.rounded(v) if isinstance(v, float) else v for v in value]
