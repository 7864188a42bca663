"""Requests of ``bract audit``: the configuration's audit section, overlaid by its options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bract.attacks.problem.evidence import has_attacker
from bract.attacks.problem.public_prior import load_prior
from bract.attacks.registry import attacks_only_for
from bract.audit.captures import Captures
from bract.cli.settings import read_section
from bract.config import FederationConfig, build_config
from bract.config.audit import TIERS, Tier
from bract.config.config import AuditConfig, AuditRequest
from bract.errors import BractError
from bract.registry import unknown
from bract.rundir import RunDirectory
from bract.runtime.key_files import client_key


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of ``bract audit`` that choose what is attacked, and by what; None where left out.

    Attributes
    ----------
    attacks, questions, restarts, device, settings
        Keys of the audit section; ``settings`` are those of ``--set``, ``audit.KEY=VALUE``.
    clients, rounds, budget
        As `parse_clients`, `parse_rounds` and `parse_budget` read them.
    tier, key, prior, truth, models, final
        As `audit_requests` takes them.
    """

    attacks: Sequence[str] | None = None
    questions: Sequence[str] | None = None
    clients: str | None = None
    rounds: str | None = None
    budget: str | None = None
    restarts: int | None = None
    device: str | None = None
    settings: Sequence[str] | None = None
    tier: str | None = None
    key: Path | None = None
    prior: Path | None = None
    truth: Path | None = None
    models: Sequence[str] = ()
    final: Path | None = None

    def requests(self, root: Path) -> list[AuditRequest]:
        """Return one request a tier for a run directory."""
        return audit_requests(
            root,
            self._section(root),
            tier=self.tier,
            key=self.key,
            prior=self.prior,
            truth=self.truth,
            models=self.models,
            final=self.final,
        )

    def _section(self, root: Path) -> dict[str, Any]:
        """Return keys of the audit section that the options replace, and their values."""
        section = read_section("audit", self.settings, AuditConfig.model_fields)
        budget_each = section.get("budget_each", _configured(root).budget_each)
        return {
            **section,
            **({"attacks": self.attacks} if self.attacks else {}),
            **({"questions": self.questions} if self.questions else {}),
            **({"clients": parse_clients(self.clients)} if self.clients else {}),
            **({"rounds": parse_rounds(self.rounds)} if self.rounds else {}),
            **({"restarts": self.restarts} if self.restarts else {}),
            **({"device": self.device} if self.device else {}),
            **({} if self.budget is None else parse_budget(self.budget, each=budget_each)),
        }


def audit_requests(
    root: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    tier: str | None = None,
    key: Path | None = None,
    prior: Path | None = None,
    truth: Path | None = None,
    models: Iterable[str] = (),
    final: Path | None = None,
) -> list[AuditRequest]:
    """Overlay the ``audit`` section of the run's configuration; return one request a tier.

    Parameters
    ----------
    settings
        Keys of that section, and their values.
    tier
        A tier, or ``all`` for every one that applies to the run; None takes the section's.
    key
        Key file of one client. None takes the first client's of an encrypted run on this machine.
    models
        References ``package.module:callable`` that the captures may declare; the audit imports
        and calls them.
    final
        File of the final global model.
    """
    if final is not None and not final.is_file():
        raise BractError(
            f"--final {final}: no such file; expected the final global model as safetensors, or as "
            "torch.save(model.state_dict(), FILE) writes it",
            code="file-missing",
        )
    run = RunDirectory.open(root)
    config = run.config()
    section = _overlaid(config, settings or {})
    wanted = tier or section.tier
    if wanted not in (*TIERS, "all"):
        raise BractError(unknown("tier", wanted, [*TIERS, "all"]), code="unknown-name")
    threshold = config.encryption.threshold
    own = client_key(run.keys, 0, threshold)
    held = key or (own if own.is_file() else None)
    tiers = [t for t in TIERS if t == wanted]
    if wanted == "all":
        tiers = _tiers_that_apply(run, held, prior)
        if key is not None and "colluding" not in tiers:
            raise BractError("--key: no captured upload is encrypted; leave it out", code="usage")
    else:
        _check_files(wanted, key, held, prior)
    # What was asked for by name holds in every tier.
    named = "attacks" in (settings or {})
    generator = load_prior(prior).kind if prior and "surrogate" in tiers else None
    surrogate = attacks_only_for("surrogate", generator)
    return [
        AuditRequest(
            **section.model_dump(exclude={"tier", "attacks"}),
            attacks=surrogate if one == "surrogate" and not named else section.attacks,
            seed=config.seed,
            tier=one,
            key=held if one == "colluding" else None,
            prior=prior if one == "surrogate" else None,
            truth=truth,
            models=sorted(set(models)),
            final=final,
        )
        for one in tiers
    ]


def _configured(root: Path) -> AuditConfig:
    """Return the audit section that the run was made with."""
    return RunDirectory.open(root).config().audit


def _overlaid(config: FederationConfig, settings: Mapping[str, Any]) -> AuditConfig:
    """Return the audit section with some keys replaced, checked as the configuration's is."""
    given = {name: value for name, value in settings.items() if value is not None}
    content = config.audit.model_dump(mode="json")
    if given.keys() & {"iterations", "seconds", "total_seconds"}:
        content |= {"iterations": None, "seconds": None, "total_seconds": None}
    return build_config({"audit": content | given}, source="the command line").audit


def _check_files(tier: str, key: Path | None, held: Path | None, prior: Path | None) -> None:
    """Refuse a tier without the file that its attacker holds, and a file of another tier."""
    if tier == "colluding" and held is None:
        raise BractError(
            "--tier colluding: the attacker holds one client's key; name its file with --key",
            code="usage",
        )
    if tier != "colluding" and key is not None:
        raise BractError(f"--key goes with --tier colluding, not with {tier}", code="usage")
    if tier == "surrogate" and prior is None:
        raise BractError(
            "--tier surrogate: the attacker holds public images; name the generator that `bract "
            "prior train` made of them with --prior",
            code="usage",
        )
    if tier != "surrogate" and prior is not None:
        raise BractError(f"--prior goes with --tier surrogate, not with {tier}", code="usage")


def _tiers_that_apply(run: RunDirectory, key: Path | None, prior: Path | None) -> list[Tier]:
    declared = [capture.declaration for capture in Captures.of_run(run).index]
    applies: dict[Tier, bool] = {
        "oblivious": True,
        "adaptive": any(d.defenses and has_attacker(_names(d.defenses)) for d in declared),
        "surrogate": prior is not None,
        "colluding": key is not None and any(d.encryption != "none" for d in declared),
    }
    return [tier for tier in TIERS if applies[tier]]


def _names(defenses: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(entry.get("name")) for entry in defenses]


def parse_budget(text: str, *, each: bool = False) -> dict[str, int | float]:
    """Read ``2000`` (iterations a restart), or ``90s``, ``5m``, ``1h`` (wall time in all).

    Parameters
    ----------
    each
        Whether a time is each upload's rather than the whole audit's.

    Returns
    -------
    dict
        ``iterations``, ``total_seconds`` or ``seconds``, as keys of the audit section.
    """
    found = re.fullmatch(r"\s*(\d+|\d*\.\d+)\s*(s|m|h)?\s*", text)
    value = float(found[1]) if found else 0.0
    if found is None or not value or (not found[2] and not found[1].isdigit()):
        raise BractError(
            f"--budget {text!r}: expected iterations such as 2000, or a time such as 90s, 5m or 1h",
            code="usage",
        )
    if found[2]:
        key = "seconds" if each else "total_seconds"
        return {key: value * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]}
    return {"iterations": int(found[1])}


def parse_clients(text: str) -> list[str]:
    """Read ``client-0,client-1``; blanks around a name do not count."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise BractError(
            f"--clients {text!r}: expected names such as client-0,client-1", code="usage"
        )
    return names


def parse_rounds(text: str) -> list[int]:
    """Read ``1,3`` or ``1-5`` or a mixture."""
    rounds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None:
            raise BractError(f"--rounds {text!r}: expected rounds such as 1,3 or 1-5", code="usage")
        first = int(found[1])
        rounds += range(first, int(found[2] or first) + 1)
    return rounds
