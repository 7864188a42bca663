"""Decide whether uploads may be judged: one answer for rules, questions, gates, tables and pages.

An upload that is not what its description says led every attack astray. What was found of it
stands, since it was compared with the truth; that nothing was found shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bract.schema import Answer
from bract.schema.check import DescriptionCheck, Unjudged

SHOWN = 3
"""Tensors that are named."""


@dataclass(frozen=True)
class Checked:
    """The checks of a run's uploads, one an upload, by round and client.

    Attributes
    ----------
    contradicted
        Whose client, repeated on what it kept, sends another update.
    unconfirmed
        Of which nothing was kept, and which lack what every such upload has.
    doubted
        Which may be judged, though repeating the client's steps gave another update: what is not
        known of them may be why.
    count
        Uploads that were checked.
    """

    contradicted: dict[tuple[int, str], DescriptionCheck] = field(default_factory=dict)
    unconfirmed: dict[tuple[int, str], DescriptionCheck] = field(default_factory=dict)
    doubted: dict[tuple[int, str], DescriptionCheck] = field(default_factory=dict)
    count: int = 0

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> Checked:
        """Gather the checks of the uploads that answers rest on."""
        contradicted, unconfirmed, doubted, confirmed, seen = {}, {}, {}, set(), set()
        for key, check in (pair for answer in answers for pair in answer.checked().items()):
            seen.add(key)
            if check.unjudged == "misdescribed":
                contradicted[key] = check
            elif check.unjudged == "unconfirmed":
                unconfirmed[key] = check
            elif check.doubted:
                doubted[key] = check
            elif check.state == "confirmed":
                confirmed.add(key)
        # What one tier's reading confirms is right, whatever another one's makes of it.
        return cls(
            {k: v for k, v in contradicted.items() if k not in confirmed},
            {k: v for k, v in unconfirmed.items() if k not in confirmed | contradicted.keys()},
            {k: v for k, v in doubted.items() if k not in confirmed},
            len(seen),
        )

    @property
    def level(self) -> Unjudged | None:
        """Level of a verdict over these uploads that found nothing; None where it may be given."""
        if self.contradicted:
            return "misdescribed"
        return "unconfirmed" if self.unconfirmed else None

    def of_answer(self, answer: Answer) -> Unjudged | None:
        """Return why what an answer did not find shows nothing; None where it may be judged."""
        clients = [answer.client, *answer.members]
        keys = {(number, client) for number in answer.all_rounds() for client in clients}
        if keys & self.contradicted.keys():
            return "misdescribed"
        return "unconfirmed" if keys & self.unconfirmed.keys() else None

    @property
    def reason(self) -> str:
        """Say of the first upload what is wrong with it."""
        found = self.contradicted or self.unconfirmed
        if not found:
            return ""
        (number, client), check = next(iter(sorted(found.items(), key=lambda item: item[0])))
        text = f"Round {number}, {client}: {check.reason}."
        if check.tensors and check.alternative is None:
            names = ", ".join(tensor.name for tensor in check.tensors[:SHOWN])
            text += f" The tensors that differ most: {names}."
        return text

    def sentence(self) -> str:
        """Return the first sentence of a verdict that cannot be given."""
        if self.contradicted:
            wrong = len(self.contradicted)
            return (
                f"No verdict: {_of(wrong, self.count)} not what the description says, so what "
                f"attacks made of {'it' if wrong == 1 else 'them'} shows nothing."
            )
        kept = any(check.cosine is not None for check in self.unconfirmed.values())
        why = (
            "what clients kept does not confirm the description"
            if kept
            else "no client kept anything to confirm the description by"
        )
        return f"No verdict: {why}, and {_of(len(self.unconfirmed), self.count)} not as it says."

    def reserve(self) -> str:
        """Return what comes before a verdict over uploads that nothing confirms; empty else."""
        if not self.doubted:
            return ""
        least = min((check.cosine or 0.0) for check in self.doubted.values())
        some = _of(len(self.doubted), self.count, first=True)
        return f"{some} not shown to be what the description says (cosine {least:.3f} or more): "

    def note(self) -> str:
        """Return a sentence beside a leak, on uploads that nothing confirms; empty without any."""
        left, words = len(self.contradicted) + len(self.unconfirmed), "not what"
        if not left:
            left, words = len(self.doubted), "not shown to be what"
        if not left:
            return ""
        return (
            f"{_of(left, self.count, first=True)} {words} the description says: more may leak "
            "there than was found."
        )


def _of(count: int, whole: int, *, first: bool = False) -> str:
    if whole == 1:
        return f"{'The' if first else 'the'} one upload checked is"
    return f"{count} of {whole:,} uploads checked {'is' if count == 1 else 'are'}"
