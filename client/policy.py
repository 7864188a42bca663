"""What a site demands of every run, whatever the server asks for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bract.client.defenses import DEFENSES, DefenseChain
from bract.errors import BractError
from bract.registry import unknown

Number = int | float


class PolicyError(BractError):
    """A run asks for less protection than this site demands; the client takes no part."""


class Requirement(BaseModel):
    """One defense that must be on, and bounds on its hyper-parameters.

    A hyper-parameter that is unset (None) in the run meets no bound.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    minimum: dict[str, Number] = Field(default_factory=dict)
    maximum: dict[str, Number] = Field(default_factory=dict)
    equal: dict[str, Any] = Field(default_factory=dict)

    def violations(self, declared: dict[str, dict[str, Any]]) -> list[str]:
        """Say how the run's defenses, by name, fall short of this requirement."""
        if self.name not in declared:
            return [f"{self.name!r} must be on"]
        found = declared[self.name]
        low = [(k, "at least", v, _number(found[k], -1) >= v) for k, v in self.minimum.items()]
        high = [(k, "at most", v, _number(found[k], 1) <= v) for k, v in self.maximum.items()]
        same = [(k, "exactly", v, found[k] == v) for k, v in self.equal.items()]
        return [
            f"{self.name}.{key} must be {bound} {value!r}, the run has {found[key]!r}"
            for key, bound, value, met in (*low, *high, *same)
            if not met
        ]


class SitePolicy(BaseModel):
    """A site's policy file.

    .. code-block:: yaml

        require:
          - name: noise
            minimum: {std: 0.001}
            maximum: {clip: 1.0}
            equal: {kind: gaussian}
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    require: list[Requirement] = Field(default_factory=list)


def load_policy(path: Path) -> SitePolicy:
    """Read and check a site's policy.

    Raises
    ------
    PolicyError
        If the file is missing, is no such YAML, or names a defense or hyper-parameter that does
        not exist. A site whose policy cannot be read takes no part.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: the site's policy cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise PolicyError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    try:
        policy = SitePolicy.model_validate(content if content is not None else {})
    except ValidationError as error:
        problems = (
            f"{'.'.join(str(part) for part in problem['loc']) or 'policy'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise PolicyError(f"{path}: {'; '.join(problems)}") from error
    for requirement in policy.require:
        if requirement.name not in DEFENSES:
            raise PolicyError(f"{path}: {unknown('defense', requirement.name, DEFENSES)}")
        known = DEFENSES[requirement.name].model_fields
        for key in (*requirement.minimum, *requirement.maximum, *requirement.equal):
            if key not in known:
                raise PolicyError(
                    f"{path}: {requirement.name}: {unknown('hyper-parameter', key, known)}"
                )
    return policy


def check(policy: SitePolicy, defenses: DefenseChain) -> None:
    """Refuse a run whose defenses fall short of the policy.

    Raises
    ------
    PolicyError
        Naming every defense and hyper-parameter that falls short, what was found and demanded.
    """
    declared = {entry["name"]: entry for entry in defenses.public()}
    problems = [text for requirement in policy.require for text in requirement.violations(declared)]
    if problems:
        asked = ", ".join(declared) or "no defense"
        raise PolicyError(
            f"this site's policy refuses the run ({asked}): {'; '.join(problems)}. "
            "Change the federation's defenses, or ask the site"
        )


def _number(found: Any, side: int) -> float:
    return float(found) if isinstance(found, int | float) else side * math.inf
