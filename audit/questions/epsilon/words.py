"""What the measured epsilon means, in a sentence, and the table of the page."""

from __future__ import annotations

from collections.abc import Sequence

from bract.audit.questions.rule import Decision
from bract.schema.epsilon import ClientEpsilon, EpsilonAnswer
from bract.schema.report import Table


def decision(answers: Sequence[EpsilonAnswer]) -> Decision:
    """Return the largest lower bound, beside the account."""
    able = [(a, c) for a in answers for c in a.clients if c.refused is None]
    if not able:
        return Decision("unknown", "No client's canaries took part.")
    answer, most = max(able, key=lambda pair: low(pair[1]))
    account = "no noise is declared, so no account limits it"
    if most.high is not None:
        account = f"the account allows {most.high:.2f}"
    missed = "More canaries, or more rounds, show more."
    if most.most is not None:
        missed = (
            f"{most.canaries} coins show {most.most:.2f} at most, whatever leaks: more canaries, "
            "or more rounds, show more."
        )
    effort = "The uploads, and the canaries without the coins."
    broken = [c.client for _, c in able if c.alarm]
    text = (
        f"By its canaries, {most.client} spends an epsilon of at least {low(most):.2f} "
        f"(95 % confidence, delta {answer.delta:g}, {answer.tier} tier); {account}."
    )
    if broken:
        names = ", ".join(sorted(set(broken)))
        return Decision(
            "alarm",
            f"The protection is broken: measured above the account for {names}. {text}",
            effort=effort,
            missed=missed,
            found=True,
        )
    return Decision("measured", text, effort=effort, missed=missed)


def rows(answers: Sequence[EpsilonAnswer]) -> Table:
    """Return a row for each tier and client."""
    return Table(
        columns=[
            *("tier", "client", "canaries", "kind", "right guesses", "epsilon, at least"),
            *(
                "if Gaussian",
                "one-shot estimate",
                "by the last model",
                "account, at most",
                "can show",
            ),
        ],
        rows=[
            [
                answer.tier,
                one.client,
                one.canaries,
                one.kind,
                f"{one.right} of {one.guesses}",
                one.low,
                one.low_gaussian,
                one.estimate,
                one.estimate_last,
                one.high,
                one.most,
            ]
            for answer in answers
            for one in answer.clients
            if one.refused is None
        ],
    )


def low(client: ClientEpsilon) -> float:
    """Return the higher of the two lower bounds."""
    return max(client.low or 0.0, client.low_gaussian or 0.0)
