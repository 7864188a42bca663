"""What to do next, by what the verdict is: a sentence each, with the command or where to read."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

from bract.report.words.headline import same_attack
from bract.report.words.left import stop_sending
from bract.schema.report_rows import AttackRow, ObservationFacts
from bract.schema.verdict import UNJUDGED, Level, NextStep


def next_steps(
    level: Level,
    strongest: AttackRow | None,
    observations: Sequence[ObservationFacts],
    *,
    tiers: Sequence[str],
    captures: int,
    configured: bool,
    models: Sequence[str] = (),
    sent: Sequence[str] = (),
) -> list[NextStep]:
    """Return at most three steps, each with ``text``, and ``command`` or ``section`` or neither.

    A command runs as it is printed, but for RUN, DIR and FILE, which stand for paths.

    Parameters
    ----------
    strongest
        The attack that makes the verdict.
    tiers
        Tiers that have something to know and were not tried.
    captures
        Number of uploads that the server holds.
    configured
        Whether the run was made from a configuration of bract's, which can run again defended.
    models
        References ``package.module:callable`` that the captures declare: an audit names them.
    sent
        Names of what was sent openly, which comes first.
    """
    found = [_step(stop_sending(sent), section="left")] if sent else []
    found += _steps(level, strongest, observations, tiers, captures, configured)
    return [_with_models(step, models) for step in found][:3]


def _with_models(step: NextStep, models: Sequence[str]) -> NextStep:
    """Add to an audit's command the models that it may import."""
    if step.command is None or not step.command.startswith("bract audit "):
        return step
    words = [word for model in models for word in ("--model", shlex.quote(model))]
    return step.model_copy(update={"command": " ".join([step.command, *words])})


def _steps(
    level: Level,
    strongest: AttackRow | None,
    observations: Sequence[ObservationFacts],
    tiers: Sequence[str],
    captures: int,
    configured: bool,
) -> list[NextStep]:
    mine = [o for o in observations if strongest and same_attack(o, strongest)]
    if level == "not-attacked":
        return _audit_first(captures, configured)
    if level == "refused":
        return _refused(observations)
    if level in UNJUDGED:
        return [
            _step("Correct the description of the clients:", command="bract describe RUN"),
            _step("Audit again with the corrected description:", command="bract audit RUN"),
        ]
    if level == "unscored":
        return [
            _step("Look at the pictures and judge them by eye.", section="worst"),
            _step(
                "Ask the operator of a client to keep its originals on its own disk (truth: true), "
                "and score the same attack against them:",
                command="bract audit RUN --truth DIR --resume",
            ),
        ]
    if level == "undecided":
        return [
            _step("Look at the pictures and judge them by eye.", section="worst"),
            _step(
                f"Audit with more test {strongest.noun if strongest else 'image'}s of every class "
                "that clients hold, which no client trained on."
            ),
        ]
    noun = strongest.noun if strongest else "image"
    steps = [_tier_step(tier, noun) for tier in tiers]
    if level == "leaked":
        return [*_defend(mine, configured), *steps, _keep()][:3]
    undefended = bool(mine) and not any(o.defenses or o.encryption != "none" for o in mine)
    defend = _defend(mine, configured)[:1] if undefended else []
    return [*steps, *_try_harder(strongest)[:1], *defend, *_try_harder(strongest)[1:]][:3]


def _audit_first(captures: int, configured: bool) -> list[NextStep]:
    if captures:
        return [_step("Attack what was captured, and score it:", command="bract audit RUN")]
    if configured:
        return [
            _step("Train: no round has been captured yet.", command="bract run RUN/config.yaml")
        ]
    return [
        _step(
            "Let the server write down what it receives, and train again:",
            command='strategy = HonestButCurious(FedAvg(...), store="captures")',
        )
    ]


def _refused(observations: Sequence[ObservationFacts]) -> list[NextStep]:
    reasons = Counter(o.refused or "" for o in observations)
    (reason, count), *_ = reasons.most_common(1)
    many = "" if count == len(observations) else f" of {count} of them"
    steps = [_step(f"Read why. The reason{many}: {reason.rstrip('.')}.", "gaps")]
    if any(o.encryption != "none" and o.tier != "colluding" for o in observations):
        steps.append(
            _step(
                "Attack with one client's key as well:",
                command="bract audit RUN --tier colluding --key FILE",
            )
        )
    return steps


def _defend(mine: Sequence[ObservationFacts], configured: bool) -> list[NextStep]:
    defended = any(o.defenses for o in mine)
    if defended:
        text = (
            "The declared defense did not stop this attacker. Compare others, with what each "
            "costs in accuracy and time:"
        )
    else:
        text = (
            "No defense is declared. See what each one leaves of this, and what it costs in "
            "accuracy and time:"
        )
    if configured:
        first = _step(text, command="bract compare RUN/config.yaml")
    else:
        first = _step(
            "Put another defense around each client, and audit again:"
            if defended
            else "No defense is declared. Put one around each client, and audit again:",
            command='app = ClientApp(mods=[DefenseMod("adadefense")])',
        )
    if configured and all(o.encryption == "none" for o in mine):
        return [
            first,
            _step(
                "Or encrypt the uploads, so that the server reads only their sum; in the "
                "configuration:",
                command="encryption: paillier",
            ),
        ]
    return [first]


def _tier_step(tier: str, noun: str) -> NextStep:
    if tier == "colluding":
        return _step(
            "Attack with one client's key as well:",
            command="bract audit RUN --tier colluding --key FILE",
        )
    if tier == "adaptive":
        return _step(
            "Attack with knowledge of the defense, which often gets more:",
            command="bract audit RUN --tier adaptive",
        )
    if tier == "surrogate":
        return _step(
            f"Attack with public {noun}s like the clients':",
            command="bract audit RUN --tier surrogate --prior FILE",
        )
    return _step(
        "Attack without knowledge of the defense:", command="bract audit RUN --tier oblivious"
    )


def _keep() -> NextStep:
    return _step(
        "Treat the uploads in captures/ as you would the data: anyone who holds them can do "
        "the same."
    )


def _try_harder(strongest: AttackRow | None) -> list[NextStep]:
    command = "bract audit RUN --budget 10m --restarts 4"
    if strongest is not None and not strongest.portfolio:
        command += " --attack auto"
    return [
        _step("Give the attackers more time and more tries:", command=command),
        _step("Read what was not tried.", "threat-model"),
    ]


def _step(text: str, section: str | None = None, *, command: str | None = None) -> NextStep:
    return NextStep(text=text, command=command, section=section)
