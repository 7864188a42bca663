"""All rules that Flower's processes are started under, and what they need of Flower.

python -m bract.runtime.rules      # table of docs/reference/flower-rules.md; what Flower lacks
"""

from __future__ import annotations

import sys

from bract import flower
from bract.runtime import (
    admission,
    arriving,
    audit_log,
    children,
    clock,
    contact,
    control,
    joining,
    long_polling,
    loopback,
    parts,
    parts_on_disk,
    pinned,
    polling,
    resuming,
    retrying,
    senders,
    simulation,
    sockets,
    timeline,
    transfers,
    trees,
    untrusted,
)
from bract.runtime.rule import Kind, Off, Rule, ordered, top

RULES: tuple[Rule, ...] = tuple(
    ordered(
        (
            sockets.REQUESTS,
            sockets.SERVERS,
            audit_log.RULE,
            children.RULE,
            pinned.AT_SUPERNODE,
            pinned.AT_CLIENTAPP,
            trees.RULE,
            senders.RULE,
            untrusted.RULE,
            arriving.RULE,
            parts_on_disk.RULE,
            resuming.RULE,
            retrying.RULE,
            admission.RULE,
            contact.RULE,
            clock.RULE,
            simulation.RULE,
            timeline.RULE,
            control.RULE,
            loopback.RULE,
            parts.ASKED_TOGETHER,
            parts.TOGETHER_AT_LINK,
            parts.TOGETHER_AT_NODE,
            long_polling.HELD_AT_LINK,
            long_polling.HELD_AT_NODE,
            polling.POLL_SOONER,
            polling.LATE_PARTS,
            transfers.RULE,
            joining.RULE,
        )
    )
)
"""In the order of their layers, the innermost first."""

_PUBLIC = ("flwr.app:", "uvicorn:", "subprocess:")


def private_names() -> list[str]:
    """Return what is private to Flower and needed by a rule, as ``module:name``."""
    names = {top(place) for rule in RULES for place in rule.needs}
    return sorted(name for name in names if not name.startswith(_PUBLIC))


def messages() -> list[str]:
    """Return those of `private_names` that are messages of Flower's wire protocol."""
    return [name for name in private_names() if name.startswith("flwr.proto.")]


def lacking() -> list[Off]:
    """Return the rules that the installed Flower lacks a place for."""
    return [Off(rule, tuple(places)) for rule in RULES if (places := rule.lacking())]


def has_runtime() -> bool:
    """Return whether bract starts the installed Flower's processes without being asked to.

    So it is with releases whose source was read, where no rule is off.
    """
    return flower.is_supported(flower.installed()) and not lacking()


_KINDS: dict[Kind, str] = {
    "security": "Flower without a place of these does not start",
    "reliability": "Flower's own way is followed where a place is missing",
    "speed": "Flower's own way is followed where a place is missing",
}


def table() -> str:
    """Return the rules as Markdown, one table a kind."""
    lines = []
    for kind, missing in _KINDS.items():
        lines += [f"## {kind.capitalize()}", "", f"{missing}.", ""]
        lines += ["| rule | in | what it does | without it | places of Flower |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for rule in RULES:
            if rule.kind == kind:
                lines.append(_row(rule))
        lines.append("")
    return "\n".join(lines)


def _row(rule: Rule) -> str:
    where = ", ".join(f"`{command}`" for command in rule.commands)
    if set(rule.commands) >= set(clock.RULE.commands):
        where = "all" + "".join(f", `{c}`" for c in rule.commands if c not in clock.RULE.commands)
    without = f"{rule.without[0].upper()}{rule.without[1:].removesuffix('.')}."
    return f"| {rule.name} | {where} | {rule.does} | {without} | {_places(rule)} |"


def _places(rule: Rule) -> str:
    by_module: dict[str, list[str]] = {}
    for place in rule.needs:
        module, _, name = place.partition("(")[0].partition(":")
        by_module.setdefault(module, []).append(f"`{name}`")
    return "<br>".join(f"`{module}`: {', '.join(names)}" for module, names in by_module.items())


def main() -> None:
    """Print the table, and the rules that the installed Flower lacks; exit with 1 if any."""
    off = lacking()
    held = f"{len(RULES) - len(off)} of {len(RULES)} rules hold"
    code = len(private_names()) - len(messages())
    need = f"they need {code} private names and {len(messages())} messages of the wire protocol"
    sys.stdout.write(f"{table()}\nflwr {flower.installed()}: {held}; {need}\n")
    for missing in off:
        places = ", ".join(missing.lacking)
        sys.stdout.write(f"off ({missing.rule.kind}): {missing.rule.name}, missing {places}\n")
    sys.exit(1 if off else 0)


if __name__ == "__main__":
    main()
