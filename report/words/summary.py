"""The summary for a data protection officer: what an assessment under Art. 35 GDPR asks, in words.

It is made of the verdict, of the rows that say how far attacks got (`bract.report.reach`), and of
what each question found, so another question or input adds its own sentences without a change here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bract.config.client_names import AGGREGATE
from bract.errors import listed
from bract.report.words.formatting import (
    duration,
    left_open,
    moment,
    noun_of,
    percent,
    plural,
)
from bract.report.words.headline import finding, same_attack
from bract.report.words.left import openly, sent_openly, stop_sending
from bract.report.words.reach import KNOWS, examined_again, rounds_done
from bract.report.words.threats import (
    ANY_MEMBERSHIP,
    FINAL_MEMBERSHIP,
    IN_THE_CLEAR,
    OUT_OF_SCOPE,
    SEVERAL_ROUNDS,
    SUM_IN_THE_CLEAR,
    THE_SUM,
)
from bract.schema import Report
from bract.schema.report_rows import AttackRow
from bract.schema.verdict import UNJUDGED

SHOWN = 6
"""Names of clients, and of anything else that is listed, before the rest is counted."""

TO_COMPLETE = (
    "Purpose of the training, its legal basis, necessity and proportionality",
    "Groups of people whose data are used, how many people, and special categories (Art. 9)",
    "Controllers, joint controllers and processors (Art. 26, 28)",
    "Who operates the server, and in which country",
    "Who may read stored uploads, and when they are deleted",
    "Advice of the data protection officer, and people heard (Art. 35(2), (9))",
    "Risk that stays high: prior consultation of the authority (Art. 36)",
)
"""What no training records; the controller fills it in."""

SOURCES = (
    "Art. 35(7) GDPR asks for a description of the processing (a), its necessity and "
    "proportionality (b), the risks to people (c) and the measures (d). This page is evidence for "
    "(a), (c) and (d); it does not replace the assessment. Whether people can be identified is "
    "judged by “all the means reasonably likely to be used”, by the controller or by another "
    "person, with regard to “the costs of and the amount of time required for identification”, the "
    "“available technology at the time of the processing and technological developments” (recital "
    "26 GDPR). EDPB Opinion 28/2024 applies that test to trained models, and has resistance to "
    "attacks tested, reconstruction, model inversion, attribute and membership inference among "
    "them; this page applies it to what clients send while a model is trained. It covers the means "
    "named under “What was tried”, and no others."
)


@dataclass(frozen=True)
class Section:
    """One heading; ``basis`` is the provision that asks for it, ``items`` is a list below."""

    heading: str
    basis: str
    sentences: list[str]
    items: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """What is printed: the finding, its sections, blank lines to fill in, and the sources."""

    finding: str
    sections: list[Section]
    to_complete: Sequence[str] = TO_COMPLETE
    sources: str = SOURCES


def summary(report: Report) -> Summary:
    """Return the summary of a report.

    It shows no single record, and is the same for a redacted report. It
    never calls a run safe, and nothing in it anonymous.
    """
    row = report.verdict.headline
    noun = noun_of([*report.run.inputs, *(o.input for o in report.observations)])
    return Summary(
        finding=_finding(report, row, noun),
        sections=[
            Section("Whose data", "Art. 35(7)(a)", _whose(report, noun)),
            Section("What was trained, and when", "Art. 35(7)(a)", _trained(report)),
            Section(
                "What an operator of the server could learn",
                "Art. 35(7)(c)",
                _learned(report, row, noun),
            ),
            Section("With what effort", "Recital 26", _effort(report, row)),
            Section("What was tried", "All means reasonably likely", [], _tried(report)),
            Section(
                "What was not tried",
                "",
                ["None of this was examined, so nothing here is evidence about it:"],
                not_tried(report),
            ),
            Section(
                "How large a leak could have been missed",
                "Limits of this evidence",
                _missed(report, row, noun),
            ),
            Section(
                "What to change, and when to examine again",
                "Art. 35(7)(d)",
                [],
                [*changes(report, noun), examined_again(report.examine)],
            ),
        ],
    )


def _finding(report: Report, row: AttackRow | None, noun: str) -> str:
    sentence = _verdict(report, row, noun)
    return finding(sentence, report.verdict.level, sent_openly(report.left))


def _verdict(report: Report, row: AttackRow | None, noun: str) -> str:
    proven = any(o.certificate is not None for o in report.observations)
    if report.verdict.level == "unscored" and row is not None and not proven:
        return (
            f"{plural(row.images, noun)} were reconstructed from uploads; how near they are to the "
            "originals has not been measured."
        )
    return report.verdict.sentence


def recipients(report: Report) -> str:
    """Return who receives what left the sites, in a sentence; empty where nothing is recorded."""
    saw = {row.question: row.answer for row in report.threat_model.saw}
    if IN_THE_CLEAR not in saw:
        return ""
    read = {
        "yes": "can read every update",
        "no": "receives the updates encrypted",
        "partly": "can read some of the updates",
    }.get(saw[IN_THE_CLEAR], "may read the updates")
    if SUM_IN_THE_CLEAR in saw:
        read += " and can read the sum of each round's"
    return (
        f"All of it goes to the operator of the server, who {read}. Each client receives the model "
        "that the server combines of all updates."
    )


def measured_units(report: Report) -> str:
    """Return of what one measured result is: the units, with the question that each is of."""
    noun = noun_of([*report.run.inputs, *(o.input for o in report.observations)])
    units = [f"one {noun} in one upload (reconstruction)"] if report.reach else []
    units += [f"{q.unit} ({q.title})" for q in report.questions if q.answered and q.unit]
    return listed(units, SHOWN) if units else "nothing was measured"


def _whose(report: Report, noun: str) -> list[str]:
    names = [c.client for c in report.clients]
    if not names:
        return ["No client is recorded."]
    counts = [c.examples for c in report.clients if c.examples is not None]
    declared = "None of them declared how many examples it trained on."
    if counts:
        some = "" if len(counts) == len(names) else f" {len(counts)} of"
        each = [f"{c.client} {c.examples:,}" for c in report.clients if c.examples is not None]
        declared = (
            f"Together{some and ',' + some} they declared {plural(sum(counts), noun)}: "
            f"{listed(each, SHOWN)}."
        )
    return [
        f"{plural(len(names), 'client')} (each an organisation or a device) trained on data of "
        f"their own: {listed(names, SHOWN)}.",
        declared,
        "How many people these describe is not recorded by a training, and is to be entered below.",
    ]


def _trained(report: Report) -> list[str]:
    run = report.run
    model = f"Model {run.model}" if run.model else "The model's name is not recorded"
    data = f" on {run.data}" if run.model and run.data else ""
    begun, ended = run.started or run.first_upload, run.finished or run.last_upload
    when = ""
    if begun and ended:
        when = f", from {moment(begun)} to {moment(ended)}"
    trained = f"{model}{data}; {rounds_done(run)}{when}."
    sha = f" Configuration: SHA-256 {report.config_sha256[:16]}…." if report.config_sha256 else ""
    return [
        f"{trained}{sha}",
        _protection(report),
        f"Examined with bract {report.bract}; this page was written {moment(report.written)}.",
    ]


def _protection(report: Report) -> str:
    defenses = list(dict.fromkeys(name for o in report.observations for name in o.defenses))
    schemes = sorted({o.encryption for o in report.observations} - {"none"})
    if not report.observations:
        return "Which protection the uploads had was not examined."
    on = [*defenses, *(f"encryption ({scheme})" for scheme in schemes)]
    if not on:
        return "No protection of the uploads is declared."
    return f"Protection of the uploads that clients declared: {listed(on, SHOWN)}."


def _learned(report: Report, row: AttackRow | None, noun: str) -> list[str]:
    found = [
        "An operator can keep what each client sends while following every rule of the training. "
        "Data can be computed from it without access to the clients."
    ]
    if row is not None and row.scored and report.verdict.level not in UNJUDGED:
        if row.judged:
            each = ", counted anew in each round" if len(row.rounds) > 1 else ""
            they = (
                "was reconstructed so that it"
                if row.leaked == 1
                else "were reconstructed so that they"
            )
            found.append(
                f"Of {plural(row.judged, noun)} that could be judged{each}, {row.leaked} {they} "
                "can be recognised or matched, beyond what chance explains."
            )
        if opened := left_open(row):
            found.append(f"Of {plural(row.scored, noun)} attacked in all: {listed(opened)}.")
        if row.identified and row.candidates and not row.leaked:
            found.append(
                f"Of {row.identifiable} for which it could be tested, {row.identified} "
                f"{'is' if row.identified == 1 else 'are'} nearer to {_its(row.identified)} than "
                f"to {row.candidates - 1:,} other candidates. An arbitrary {noun} is so in 1 of "
                f"{row.candidates:,} cases, and one that is typical of its class more often: that "
                "alone counts as no reconstruction."
            )
        found += _labels(report)
        found += _targets(report)
    else:
        found.append(report.verdict.explanation)
    if names := openly(report.left):
        found.append(f"It can read {listed(names, SHOWN)} as they were sent.")
    return found + [f"{q.title}: {q.sentence}" for q in report.questions]


def _its(count: int) -> str:
    return "its own original" if count == 1 else "their own originals"


def _labels(report: Report) -> list[str]:
    """Return how many labels the attack that names most of them named, and at the worst client."""
    named = [(a.label_accuracy, a) for a in report.attacks if a.label_accuracy is not None]
    overall = [(share, a.attack_name) for share, a in named if a.client is None]
    if not overall:
        return []
    share, attack = max(overall)
    worst, client, by = max(
        ((share, str(a.client), a.attack_name) for share, a in named if a.client is not None),
        default=(share, "", attack),
    )
    most = f"; at {client} {percent(worst)}, by {by}" if worst > share else ""
    return [
        f"Of the labels of what was attacked, {percent(share)} were named correctly, by {attack}"
        f"{most}. A label can itself be sensitive, such as a diagnosis."
    ]


def _targets(report: Report) -> list[str]:
    """Return how far off targets that are numbers were, for the attack that came nearest."""
    rows = [a for a in report.attacks if a.client is None]
    known = [(a.target_error, a) for a in rows if a.target_error is not None]
    if not known:
        return []
    error, row = min(known, key=lambda one: one[0])
    beside = (
        "no other client kept any to compare that with"
        if row.target_baseline is None
        else f"the mean of what other clients kept is off by {row.target_baseline:.3g}"
    )
    return [
        f"Of the targets, which are numbers, each was off by {error:.3g} on average, by "
        f"{row.attack_name}; {beside}. A target can itself be sensitive, such as an age."
    ]


def _tried(report: Report) -> list[str]:
    """Return each attack over all clients: its name, what it knows, how many uploads it had."""
    rows = [row for row in report.attacks if row.client is None]
    tried = [
        f"{row.attack_name}{_choosing(row)}, by an attacker who {KNOWS[row.tier]}: "
        f"{_attacked(report, row)}"
        for row in rows
    ]
    return [
        *tried,
        *(f"{q.title} (a question of its own)" for q in report.questions if q.answered),
    ] or ["nothing"]


def _choosing(row: AttackRow) -> str:
    """Return that an attack chooses among several, and what it chose."""
    if not row.portfolio:
        return ""
    chosen = f", here {listed(sorted(row.methods), 3)}" if row.methods else ""
    return f" (chooses among several attacks by itself{chosen})"


def _attacked(report: Report, row: AttackRow) -> str:
    """Return what an attack ran on: uploads of clients, or sums of all clients' updates."""
    own = [a for a in report.attacks if same_attack(a, row) and a.client is not None]
    if all(a.client == AGGREGATE for a in own):
        return f"{plural(row.uploads, 'sum')} of all clients' updates"
    return f"{plural(row.uploads, 'upload')} of {plural(row.clients, 'client')}"


def _effort(report: Report, row: AttackRow | None) -> list[str]:
    if row is None:
        return ["No attack ran, so no effort is known."]
    found = []
    if row.seconds is not None and row.uploads:
        devices = listed([_device(d) for d in report.run.audit_devices] or ["one computer"], 3)
        found.append(
            f"The strongest attack took {duration(row.seconds / row.uploads)} of computing time "
            f"for an upload, on average, on {devices}, by an attacker who {KNOWS[row.tier]}."
        )
    found.append(
        "It needs the stored uploads and published software. Costs fall with time: the figure is "
        "for the technology of the day on which this page was written."
    )
    if openly(report.left):
        found.append("To read what was sent openly takes no effort.")
    return found + [f"{q.title}: {q.effort}" for q in report.questions if q.effort]


def _device(name: str) -> str:
    kind = name.partition(":")[0]
    return {"cpu": "an ordinary processor", "cuda": "one graphics card"}.get(kind, name)


def not_tried(report: Report) -> list[str]:
    """Return the report's own list of what was not tried, in the words of this page."""
    model = report.threat_model
    without = [one.tier for one in report.verdict.tiers if not one.tried]
    tiers = [
        text
        for tier, text in KNOWS.items()
        if f"the {tier} tier" in model.not_tried or (tier == "surrogate" and tier in without)
    ]
    left = report.captures - report.attacked
    uploads = [f"{left} of {plural(report.captures, 'stored upload')}"] if left else []
    methods = [f"methods: {listed(model.families, SHOWN)}"] if model.families else []
    named = [*model.not_tried, *model.out_of_scope]
    beyond = [text for line, text in BEYOND.items() if line in named]
    rest = [text for text in (model.rest, model.unread) if text]
    return [*(f"an attacker who {text}" for text in tiers), *uploads, *rest, *methods, *beyond]


ACTIVE, PROPERTIES, FINAL = OUT_OF_SCOPE

BEYOND = {
    SEVERAL_ROUNDS: "the uploads of several rounds of one client, taken together",
    THE_SUM: "the sum of all clients' updates, which is what an encrypted training shows",
    ACTIVE: "an operator who alters the model or the protocol to learn more",
    ANY_MEMBERSHIP: "whether one person's record was used at all (membership)",
    FINAL_MEMBERSHIP: "whether one person's record was used, asked of the finished model",
    PROPERTIES: "what is true of a client's records together",
    FINAL: "reconstruction from the finished model alone",
}
"""Lines of the report's own list (`bract.report.words.threats`), in the words of this page."""


def _missed(report: Report, row: AttackRow | None, noun: str) -> list[str]:
    if row is None or not row.scored or report.verdict.level in UNJUDGED:
        return ["Nothing was measured, so a leak of any size could have been missed."]
    found, share = [], row.leaked_share
    if not row.judged:
        return [
            f"All of them: of {plural(row.scored, noun)} none could be judged "
            f"({listed(left_open(row))}), so nothing here rules out a leak of any size."
        ]
    if share.low is None or share.high is None:
        found.append(
            "Uploads of a single client were judged: nothing follows for other clients, however "
            "large their leak is."
        )
    else:
        found.append(
            f"Uploads of {row.clients} clients were examined, {plural(row.judged, noun)} judged. "
            f"Of clients like these, the same attack may reconstruct {percent(share.low)} to "
            f"{percent(share.high)} of the {noun}s on average ({percent(row.leaked / row.judged)} "
            f"here; 95 % interval over clients); a single upload can give away all of its {noun}s."
        )
    if row.undecided:
        found.append(f"For {plural(row.undecided, noun)} it could not be decided.")
    found.append(
        "The counts are a lower bound: more time, another method or more knowledge can only find "
        "more."
    )
    return found + [f"{q.title}: {q.missed}" for q in report.questions if q.missed]


def changes(report: Report, noun: str) -> list[str]:
    """Return what mitigates, the most urgent first."""
    level = report.verdict.level
    defended = any(o.defenses or o.encryption != "none" for o in report.observations)
    sent = [stop_sending(names)] if (names := openly(report.left)) else []
    bare = bool(report.observations) and not defended and level != "leaked"
    protect = (
        ["Switch on a protection of the uploads, or encrypt them: none is declared."]
        if bare
        else []
    )
    again = "then have the attacks repeated by an attacker who knows it"
    first = {
        "leaked": f"Put another protection between training and upload, or encrypt; {again}."
        if defended
        else f"Switch on a protection of the uploads, or encrypt them; {again}.",
        "none-leaked": "Have the attacks repeated with more time and knowledge before relying on "
        "this result.",
        "undecided": "Have the audit repeated with more test data of every class.",
        "unscored": "Let a client keep its originals on its own disk, and have the results scored.",
        "misdescribed": "Have the description of the training corrected, and the audit repeated.",
        "unconfirmed": "Have the description of the training corrected, and the audit repeated.",
        "refused": "Read the reasons in the report, and have the audit repeated.",
        "not-attacked": "Have the audit run.",
    }[level]
    return [
        *sent,
        first,
        *protect,
        f"Treat stored uploads as personal data, like the {noun}s themselves: limit who reads "
        "them, and delete them when they are no longer needed.",
    ]
