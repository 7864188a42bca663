"""Words on uploads that are not what their description says, which no attack can judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bract.report.words.formatting import plural
from bract.schema import AuditResult
from bract.schema.check import DescriptionCheck

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
    count
        Uploads that were checked.
    """

    contradicted: dict[tuple[int, str], DescriptionCheck] = field(default_factory=dict)
    unconfirmed: dict[tuple[int, str], DescriptionCheck] = field(default_factory=dict)
    count: int = 0

    @classmethod
    def of(cls, results: Sequence[AuditResult]) -> Checked:
        """Gather the checks of attacks' results."""
        contradicted, unconfirmed, confirmed, seen = {}, {}, set(), set()
        for result in results:
            check, key = result.check, (result.round, result.client)
            if check is None:
                continue
            seen.add(key)
            if check.state == "contradicted":
                contradicted[key] = check
            elif check.state == "confirmed":
                confirmed.add(key)
            elif check.failing:
                unconfirmed[key] = check
        # What one tier's reading confirms is right, whatever another one's makes of it.
        return cls(
            {k: v for k, v in contradicted.items() if k not in confirmed},
            {k: v for k, v in unconfirmed.items() if k not in confirmed | contradicted.keys()},
            len(seen),
        )

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
        return (
            f"No verdict: no client kept anything to confirm the description by, and "
            f"{_of(len(self.unconfirmed), self.count)} not as it says."
        )

    def note(self) -> str:
        """Return a sentence beside a leak, on uploads that were not judged; empty without any."""
        left = len(self.contradicted) + len(self.unconfirmed)
        if not left:
            return ""
        return (
            f"{_of(left, self.count, first=True)} not what the description says: more may leak "
            "there than was found."
        )


def _of(count: int, whole: int, *, first: bool = False) -> str:
    if whole == 1:
        return f"{'The' if first else 'the'} one upload checked is"
    return f"{count} of {plural(whole, 'upload')} checked {'is' if count == 1 else 'are'}"
