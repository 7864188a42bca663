"""The threat-model card: what the server saw, what the attacker was given, what was not tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from bract.config import FederationConfig
from bract.config.audit import TIERS
from bract.config.client_names import AGGREGATE
from bract.errors import listed
from bract.report.read import RunFiles
from bract.report.words.formatting import noun_of, plural
from bract.report.words.left import could_hold_labels
from bract.schema import ClientDeclaration, ObservationFile
from bract.schema.account import LeftFacts
from bract.schema.description import AppDescription
from bract.schema.membership import MembershipAnswer
from bract.schema.report import QuestionFacts
from bract.schema.report_rows import ObservationFacts
from bract.schema.verdict import SeenRow, ThreatModel

Seen = Literal["yes", "no", "partly", "unknown"]

OUT_OF_SCOPE = (
    "a server that alters the model or the protocol to extract more (an active attacker)",
    "property inference: what is true of a client's records together",
    "reconstruction by an attacker who sees only the final model",
)


IN_THE_CLEAR = "Each client's update in the clear"
"""The row of what the server saw that says who could read updates."""

SUM_IN_THE_CLEAR = "Each round's sum of updates"

SEVERAL_ROUNDS = "combining several rounds in one attack"
THE_SUM = "the aggregate itself"
ANY_MEMBERSHIP = "membership: whether a record was used, rather than how it looks"
FINAL_MEMBERSHIP = "membership in the final model, as anyone who gets it could ask"


def threat_model(
    files: RunFiles,
    observations: Sequence[ObservationFacts],
    left: LeftFacts | None = None,
    questions: Sequence[QuestionFacts] = (),
) -> ThreatModel:
    """Return what the server saw, what the attacker knew, and what was not tried.

    What it saw rests on the captures alone, and on the audit where those are gone; ``left`` is what
    clients sent beside their updates, ``questions`` what was asked beside the reconstruction.
    """
    return ThreatModel(
        saw=[*_saw(files), *_sent_labels(left or LeftFacts()), *_given(observations)],
        not_tried=_not_tried(files, observations, questions),
        families=list(_families_not_tried(observations)),
        rest=_rest(files, observations),
        unread=_unread(files),
        out_of_scope=list(OUT_OF_SCOPE),
    )


def tiers_that_apply(files: RunFiles, observations: Sequence[ObservationFacts]) -> list[str]:
    """Return the tiers that have something to know; all of them where nothing is known.

    The adaptive tier needs a defense to know, the colluding one an encryption to open, and the
    surrogate one public images, which are optional.
    """
    declared = [capture.declaration for capture in files.captures]
    seen = bool(declared or observations)
    defended = (
        not seen or any(d.defenses for d in declared) or any(o.defenses for o in observations)
    )
    schemes = {d.encryption for d in declared} | {o.encryption for o in observations}
    encrypted = not seen or bool(schemes - {"none"})
    has = {"oblivious": True, "adaptive": defended, "surrogate": not seen, "colluding": encrypted}
    return [tier for tier in TIERS if has[tier]]


def attacked_captures(
    captures: Sequence[ObservationFile], observations: Sequence[ObservationFacts]
) -> int:
    """Count the captured uploads that an attack ran on, by themselves."""
    done = {(o.round, o.client) for o in observations if not o.refused and not o.members}
    return sum((capture.round, capture.client) in done for capture in captures)


def _saw(files: RunFiles) -> list[SeenRow]:
    captures = files.captures
    if not captures:
        detail = "This run directory holds no captures."
        return [_row("Model parameters sent to each client", "unknown", detail)]
    declared = [c.declaration for c in captures]
    sources = _sources(files.description)
    encrypted = sum(d.encryption != "none" for d in declared)
    schemes = ", ".join(_values(declared, "encryption"))
    plain = _row(IN_THE_CLEAR, "yes", "Every captured upload was readable.")
    if encrypted == len(captures):
        plain = _row(IN_THE_CLEAR, "no", f"Encrypted: {schemes}.")
    elif encrypted:
        detail = f"{encrypted} of {len(captures)} uploads were encrypted."
        plain = _row(IN_THE_CLEAR, "partly", detail)
    return [
        _parameters(sum(d.encryption not in ("none", "masks") for d in declared), len(captures)),
        plain,
        *_keys(files.config if encrypted else None),
        _statistics(captures),
        _hyper_parameters(declared, sources),
        _normalisation(declared, sources),
        _defenses(declared),
    ]


def _parameters(encrypted: int, captures: int) -> SeenRow:
    question = "Model parameters before training"
    if not encrypted:
        return _row(question, "yes", "The server itself sent them.")
    detail = "The initial ones, which it sent; later ones passed through it as ciphertexts."
    return _row(question, "no" if encrypted == captures else "partly", detail)


def _keys(config: FederationConfig | None) -> list[SeenRow]:
    if config is None or not config.encryption.enabled:
        return []
    if config.encryption.uses_masks:
        neighbours, need = config.encryption.mask_plan(config.clients)
        detail = (
            f"The masks cancel in it; {need} of the {neighbours + 1} clients that hold shares of a "
            "seed take the others off. No update alone, unless so many of them help the server."
        )
        return [_row(SUM_IN_THE_CLEAR, "yes", detail)]
    question = "The key that decrypts uploads"
    threshold = config.encryption.threshold
    detail = "No key; every client holds the whole one, so any client and the server read all."
    if threshold is not None:
        detail = f"No key; any {threshold} clients decrypt together, fewer read nothing."
    if config.strategy.name == "fedboosting":
        detail += " FedBoosting's fused models let every client solve for the others' updates."
    return [_row(question, "no", detail)]


def few_clients(files: RunFiles) -> list[str]:
    """Warn where encryption cannot hide the clients' updates from each other."""
    clients = {c.client for c in files.captures if c.declaration.encryption != "none"}
    if not clients or len(clients) > 2:
        return []
    return [
        f"The uploads of {plural(len(clients), 'client')} were encrypted. With fewer than three, "
        "each client subtracts its own update from the mean that all decrypt, and holds the "
        "other's: take three or more."
    ]


def weak_seeds(observations: Sequence[ObservationFacts]) -> list[str]:
    """Note whose noise or keys the adaptive attacker found by trying seeds.

    The seed is in the attack's settings; here it is left out, as it would open other rounds.
    """
    found: dict[str, set[str]] = {}
    for o in observations:
        evidence = o.settings.get("evidence")
        if isinstance(evidence, dict) and evidence.get("weak_seed") is not None:
            found.setdefault(str(evidence.get("defense")), set()).add(o.client)
    return [
        f"The secret numbers of {defense} at {', '.join(sorted(clients))} come from a torch "
        "generator whose seed was found by trying: the attacker holds them, and the defense "
        "promises nothing. Draw them from a cryptographic generator, as bract's own clients do."
        for defense, clients in found.items()
    ]


def untrusted_evidence(observations: Sequence[ObservationFacts]) -> list[str]:
    """Note where an adaptive attacker's own signal shows that the defense was not undone.

    Without any look at the originals: by Guardian's scalars (`scalars_agree`) and the residual that
    FedKL's searched lock leaves (`lock_found`).
    """
    found: dict[str, list[str]] = {}
    for o in observations:
        evidence = o.settings.get("evidence")
        if not isinstance(evidence, dict) or o.refused:
            continue
        for signal, text in _SIGNALS.items():
            if evidence.get(signal) is False:
                where = f"{o.client} in round {o.round} ({o.attack_name})"
                found.setdefault(text, []).append(where)
    return [
        f"{text} {listed(dict.fromkeys(where), 5)}. The reconstructions there bound nothing: read "
        "it as an attack that did not converge, not as a defense that held."
        for text, where in found.items()
    ]


_SIGNALS = {
    "scalars_agree": "The attacker who knows Guardian trusts no reading of",
    "lock_found": "The attacker who knows FedKL searched the lock and did not find that of",
}


def clipped_values(files: RunFiles) -> list[str]:
    """Note where encryption cut values, which biases the mean that the clients decrypt."""
    found = [
        (row.round, client, int(report.clipped))
        for row in files.metrics
        for client, report in row.clients.items()
        if report.clipped
    ]
    if not found:
        return []
    number, client, most = max(found, key=lambda entry: entry[2])
    return [
        f"Encryption cut about {sum(count for *_, count in found)} values that lay outside the "
        f"clip range, {most} of them in round {number} at {client}. The mean is that of the cut "
        "values: raise encryption.clip where they are many."
    ]


def _statistics(captures: Sequence[ObservationFile]) -> SeenRow:
    question = "Batch-normalisation statistics"
    returned = sum(bool(_running(c, "returned_buffers")) for c in captures)
    if returned:
        detail = f"{returned} of {len(captures)} uploads carried the clients' running statistics."
        return _row(question, "yes" if returned == len(captures) else "partly", detail)
    if any(_running(c, "buffers") for c in captures):
        return _row(question, "no", "The model has them; no client sent its own back.")
    return _row(question, "no", "The model has no batch normalisation.")


def _running(capture: ObservationFile, group: Literal["buffers", "returned_buffers"]) -> list[str]:
    return [name for name in capture.tensors.get(group, ()) if "running_" in name]


_INFERRED = "inferred: "
"""How the reason for a value begins that explains what a client kept."""

_KEYS = {
    "local_epochs": "local_steps",
    "drop_last": "local_steps",
    "lr_schedule": "lr",
    "input.mean": "mean",
    "input.std": "mean",
    "input.shape": "image_shape",
}
"""Fields of a declaration by the keys of ``bract.yaml`` that give them under another name."""


def _sources(description: AppDescription | None) -> dict[str, str]:
    """Return ``assumed`` or ``inferred`` by the field of a declaration that nothing declares."""
    found: dict[str, str] = {}
    for key, reason in (description.guessed if description else {}).items():
        last = key.rpartition(".")[2]
        field = _KEYS.get(key, _KEYS.get(last, last))
        source = "inferred" if reason.startswith(_INFERRED) else "assumed"
        # The weaker source counts.
        found[field] = "assumed" if "assumed" in (source, found.get(field)) else source
    return found


def _hyper_parameters(declared: Sequence[ClientDeclaration], sources: Mapping[str, str]) -> SeenRow:
    names = ("algorithm", "optimizer", "lr", "local_steps", "batch_size", "num_examples")
    known = {name: _values(declared, name) for name in names}
    absent = [name for name, values in known.items() if not values]
    known["proximal_mu"] = _values(declared, "proximal_mu")
    detail = "; ".join(
        f"{name.replace('_', ' ')} {', '.join(values[:4])}{' and others' if values[4:] else ''}"
        + (f" ({sources[name]})" if name in sources else "")
        for name, values in known.items()
        if values
    )
    if absent:
        detail += f"; not declared: {', '.join(name.replace('_', ' ') for name in absent)}"
    unseen = {*absent, *(name for name in names if sources.get(name) == "assumed")}
    answer: Seen = "yes" if not unseen else "partly" if len(unseen) < len(names) else "no"
    return _row("Training hyper-parameters", answer, _sentence(detail))


def _normalisation(declared: Sequence[ClientDeclaration], sources: Mapping[str, str]) -> SeenRow:
    shapes = ", ".join(_values(declared, "image_shape"))
    shape = f"{noun_of(d.input for d in declared)} shape"
    question = f"Input normalisation and {shape}"
    how = sources.get("image_shape", "declared")
    if _values(declared, "mean"):
        source = sources.get("mean", "declared")
        answer: Seen = "partly" if "assumed" in (source, how) else "yes"
        size = f"{shapes} {how}" if shapes and how != source else shapes or "not declared"
        return _row(question, answer, f"{source.capitalize()}; {shape} {size}.")
    detail = f"{shape.capitalize()} {shapes} {how}, normalisation not declared."
    return _row(question, "partly", detail) if shapes else _row(question, "no", "Not declared.")


def _defenses(declared: Sequence[ClientDeclaration]) -> SeenRow:
    named = list(dict.fromkeys(_defense(one) for d in declared for one in d.defenses))
    question = "The defense and its public settings"
    if named:
        return _row(question, "yes", _sentence("; ".join(named)))
    return _row(question, "no", "None declared.")


def _defense(defense: Mapping[str, object]) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in defense.items() if key != "name")
    name = str(defense.get("name", "unnamed"))
    return f"{name} ({settings})" if settings else name


def _sent_labels(left: LeftFacts) -> list[SeenRow]:
    """Return whether clients sent labels; ``no`` only where everything that left is known."""
    sent = list(dict.fromkeys(row.name for row in left.rows if row.labels))
    question = "Labels, or counts or means by label"
    if sent:
        detail = f"Sent, counted or averaged by class: {listed(sent, 5)}."
        return [_row(question, "yes", detail)]
    if left.recorded != "all" or left.unlisted:
        detail = "What clients sent beside their training was not recorded."
        return [_row(question, "unknown", detail)]
    if unsure := could_hold_labels(left):
        detail = f"No rule found any; they could be in {listed(unsure, 5)}."
        return [_row(question, "unknown", detail)]
    detail = "Labels: never sent. Model arrays and single numbers left the sites, nothing else."
    return [_row(question, "no", detail)]


def _given(observations: Sequence[ObservationFacts]) -> list[SeenRow]:
    done = [o for o in observations if not o.refused]
    if not done:
        return []
    known = [o for o in done if str(o.settings.get("labels", "")) in ("known", "true", "given")]
    noun = noun_of(o.input for o in done)
    labels = _row(
        f"Labels of the training {noun}s",
        "yes" if len(known) == len(done) else "partly" if known else "no",
        "Given to the attacker in some attacks: read those scores as an upper bound."
        if known
        else "Not given to the attacker, who inferred them from the update.",
    )
    surrogate = [str(o.settings["surrogate"]) for o in done if o.settings.get("surrogate")]
    return [
        labels,
        _row(
            f"Similar (surrogate) {noun}s",
            "yes" if surrogate else "no",
            _sentence(", ".join(dict.fromkeys(surrogate)))
            if surrogate
            else "The attacker used the update alone.",
        ),
    ]


def _not_tried(
    files: RunFiles,
    observations: Sequence[ObservationFacts],
    questions: Sequence[QuestionFacts],
) -> list[str]:
    done = [o for o in observations if not o.refused]
    # An attacker without a key was tried on ciphertexts as soon as they were set aside.
    tried = {o.tier for o in observations if not o.refused or o.encryption != "none"}
    missing = [
        f"the {tier} tier"
        for tier in TIERS
        if tier not in tried and tier in tiers_that_apply(files, observations)
    ]
    titles = {name: title for o in observations for name, title in o.titles.items()}
    missing += [
        f"{family} ({', '.join(titles.get(name, name) for name in members)})"
        for family, members in _families_not_tried(observations).items()
    ]
    if not observations:
        missing.append("any attack")
    left = len(files.captures) - attacked_captures(files.captures, observations)
    if left:
        missing.append(f"{left} of the {len(files.captures)} captured uploads")
    missing += [beyond for beyond in (_rest(files, observations), _unread(files)) if beyond]
    if not any(len(o.rounds) > 1 for o in done):
        missing.append(SEVERAL_ROUNDS)
    if not any(o.client == AGGREGATE for o in done):
        missing.append(THE_SUM)
    if not any(asked.question == "membership" and asked.answered for asked in questions):
        missing.append(ANY_MEMBERSHIP)
    elif not any(isinstance(a, MembershipAnswer) and _saw_final(a) for a in files.answers):
        missing.append(FINAL_MEMBERSHIP)
    return missing


def _unread(files: RunFiles) -> str:
    """Return what could not be read of the run; empty for nothing."""
    if not files.unread:
        return ""
    some = plural(len(files.unread), "file")
    return f"what {some} of the run held, which could not be read ({listed(files.unread, 3)})"


def _rest(files: RunFiles, observations: Sequence[ObservationFacts]) -> str:
    """Return which examples of attacked uploads were not looked for; empty for none."""
    looked: dict[tuple[int, str], int] = {}
    for one in observations:
        if not one.refused and not one.members:
            upload = one.round, one.client
            looked[upload] = max(looked.get(upload, 0), len(one.images))
    held = {(c.round, c.client): c.declaration.num_examples or 0 for c in files.captures}
    larger = {upload: held[upload] for upload in looked if held.get(upload, 0) > looked[upload]}
    if not larger:
        return ""
    upload = max(larger, key=larger.__getitem__)
    noun = noun_of(o.input for o in observations)
    return (
        f"the other {noun}s of larger uploads: at most {max(looked[u] for u in larger)} were "
        f"looked for in each, and {upload[1]} declared {larger[upload]:,}"
    )


def _saw_final(answer: MembershipAnswer) -> bool:
    return any(one.observer == "public" for one in answer.models)


def _families_not_tried(observations: Sequence[ObservationFacts]) -> dict[str, list[str]]:
    """Return the attacks of each family that serves these inputs, and of which none was tried."""
    used = {name for o in observations if not o.refused for name in o.tried}
    known = {family: names for o in observations for family, names in o.families.items()}
    return {f: members for f, members in known.items() if used.isdisjoint(members)}


def _values(declared: Iterable[ClientDeclaration], key: str) -> list[str]:
    found = [value for d in declared if (value := getattr(d, key)) is not None]
    return list(dict.fromkeys(_text(value) for value in found))


def _text(value: object) -> str:
    return "×".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _row(question: str, answer: Seen, detail: str) -> SeenRow:
    return SeenRow(question=question, answer=answer, detail=detail)
