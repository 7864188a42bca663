"""A site's demands on every run, whatever the server asks for: the site's policy file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bract.client.guard_policy import GuardPolicy
from bract.client.site import Site
from bract.config import DataConfig
from bract.config.faults import fault, fields_at
from bract.defenses import DEFENSES
from bract.disk.named import read_named
from bract.errors import BractError, listed, one_line, shown
from bract.parse.strict_yaml import parse_yaml
from bract.registry import unknown
from bract.updates.shares import SMALLEST_SUM

LARGEST_LOSS = 10.0
"""Where losses are cut before they are rounded: without it, a server that scales the weights of a
model up gets any precision that it likes. Guessing among 22,000 classes costs as much."""

SCORE_DECIMALS = 2
"""Of FedBoosting's training score: with the cut above, 10 bits a round."""

MOST_ROUNDS = 1000
"""Answers of one kind in one run, where a policy sets no ``max_rounds_per_run``."""

MOST_UNDECLARED = 20
"""The same, where the run does not declare its rounds either."""

SIGNIFICANT_DIGITS = 3
"""Of a replied measurement, where a policy sets no ``metric_decimals``: at most 20 bits, and no
cut that would spoil a metric of another range."""

Number = int | float
_Count = Annotated[int, Field(ge=1)]


class PolicyError(BractError):
    """The server asks for what this site does not give; the client takes no part."""

    code = "policy-refused"


class _Section(BaseModel):
    # Strict: a quoted "false" must not pass for a switch that is on.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _check_order(what: str, minimum: Number, maximum: Number) -> None:
    if minimum > maximum:
        raise ValueError(
            f"{what} has minimum {shown(minimum)} above maximum {shown(maximum)}, which no run "
            "meets; exchange or remove one"
        )


class Requirement(_Section):
    """One defense that must be on, and bounds on its hyper-parameters.

    A hyper-parameter that is unset (None) in the run meets no bound. Without bounds a run meets it
    with any hyper-parameters, which the server writes: also with such that change no update.
    """

    name: str
    minimum: dict[str, Number] = Field(default_factory=dict)
    maximum: dict[str, Number] = Field(default_factory=dict)
    equal: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_be_met(self) -> Requirement:
        for key in self.minimum.keys() & self.maximum.keys():
            _check_order(f"{self.name}.{key}", self.minimum[key], self.maximum[key])
        return self

    def cautions(self) -> list[str]:
        """Return a warning where there is no bound, with what can be bounded."""
        if self.minimum or self.maximum or self.equal:
            return []
        fields = ", ".join(DEFENSES[self.name].model_fields)
        return [
            f"require: {self.name} has no bounds, so that a run meets it with any "
            f"hyper-parameters, also with such that protect nothing; bound {fields} by minimum, "
            "maximum or equal (docs/guide/defenses.md has an example of each defense)"
        ]

    def violations(self, declared: dict[str, dict[str, Any]]) -> list[str]:
        """Return how the run's defenses, by name, fall short of this requirement."""
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


class Bounds(_Section):
    """Smallest and largest whole number that the run may ask for; None sets no bound."""

    minimum: _Count | None = None
    maximum: _Count | None = None

    @model_validator(mode="after")
    def _can_be_met(self) -> Bounds:
        if self.minimum is not None and self.maximum is not None:
            _check_order("a bound", self.minimum, self.maximum)
        return self

    def violations(self, what: str, found: int, most: int | None = None) -> list[str]:
        """Return how ``found`` is outside of the bounds.

        Parameters
        ----------
        most
            What the maximum bounds, where that is another number than the minimum bounds.
        """
        most = found if most is None else most
        if self.minimum is not None and found < self.minimum:
            return [f"{what} must be at least {self.minimum}, the run has {found}"]
        if self.maximum is not None and most > self.maximum:
            return [f"{what} must be at most {self.maximum}, the run has {most}"]
        return []


class DataPolicy(_Section):
    """Which data a run may name.

    ``names`` lists data sets; None allows every one. ``paths`` are folders in or below which
    ``data.path`` must be; a run without ``data.path`` then meets no path. None allows those of
    the node config, and ``download`` None the setting of the node config: no folder and no download
    if it has none.
    """

    names: list[str] | None = None
    paths: list[str] | None = None
    download: bool | None = None

    def violations(self, site: Site, data: DataConfig) -> list[str]:
        """Return what of the run's ``data`` section, as it is at a site, the site does not read.

        No path is repeated: a text that held one would differ where it is one of the site's own.
        """
        name, path, found = data.name, data.path, []
        if self.names is not None and name not in self.names:
            found.append(f"data.name must be one of {self.names}, the run has {name!r}")
        if self.paths is not None:
            allowed = _inside(path, self.paths)
        else:
            allowed = path in (None, site.data_path) or _inside(path, site.data_paths)
        if not allowed:
            found.append(
                "data.path is the site's to allow, and the run's is in no folder that it allows; "
                "set data in site.yaml, data.paths in the policy, or data-paths in the node config"
            )
        tokenizer = None if data.text is None else data.text.tokenizer
        given = site.data_paths if self.paths is None else self.paths
        folders = [*given, *filter(None, [site.data_path])]
        if tokenizer is not None and not _inside(tokenizer, folders):
            found.append(
                "data.text.tokenizer is the site's to allow; put it into the site's data folder, "
                "or name its folder in data.paths of the policy or data-paths in the node config"
            )
        if data.download and not (site.download if self.download is None else self.download):
            found.append(
                "data.download must be false, the run has true; set data.download in the policy "
                "where this site may download"
            )
        return found


def _in_words(value: object) -> object:
    return value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value


class SitePolicy(_Section):
    """A site's policy file; docs/guide/site-policy.md has an example with every key.

    Attributes
    ----------
    require
        Defenses that must be on, with bounds on their hyper-parameters.
    plain_updates
        Whether an update may leave that is neither encrypted nor masked.
    plain_sums
        Whether the server may learn the sum of updates, as it does of masked ones.
    min_summed_clients
        Fewest clients whose masked updates are summed: a run of fewer is refused, and a sum of
        fewer is not unmasked where others have dropped out. A run always needs 3 to begin. Where
        it is set, clients count by their weights (`bract.updates.shares.counted`), and no
        combination of the sums that this site was in counts as fewer either.
    fixed_members
        Whether this site masks for one set of clients and weights alone, in all its runs: all
        members that ``peers`` of its node config pins. Sums of the others without this site it
        cannot see, so all members are to set it.
    models
        Allowed values of ``model.name``, references to the site's own code among them; None
        allows every registered name.
    data
        Allowed data.
    local_steps, local_epochs, batch_size
        Bounds on local training, as it is carried out. Epochs are passes over the data, whether
        steps or epochs are configured: the minimum counts those that end, the maximum those that
        begin. The smallest batch counts, which is the last one of a pass.
    min_training_images
        Fewest distinct images that an update may come from: those of its steps, not all that the
        site has.
    min_validation_images
        Fewest images on which a model is scored for the server.
    max_rounds_per_run, max_rounds_total
        How many messages of one kind (training, each kind of evaluation) are answered with a
        result, in one run and in all runs of this site together. None allows those that the run
        declares, up to `MOST_ROUNDS`, or `MOST_UNDECLARED` where it declares none; over all runs
        it sets no bound.
    max_fused_models
        Most fused models that are scored in one round; a run never has more than its clients.
    max_epsilon, delta
        Largest (epsilon, delta) that all updates of this site may spend together; None keeps
        count, but sets no bound.
    initial_model
        ``from-seed`` compares the first model with what the run's ``seed`` gives.
    metric_decimals
        Decimals d that replied measurements keep, after losses are cut at `LARGEST_LOSS`: one
        number then carries log2(10^(d+1) + 1) bits at most. None keeps `SIGNIFICANT_DIGITS`
        digits and cuts nothing.
    train_metrics
        Whether loss and accuracy on the very images behind an update are sent with it: for one
        image and known parameters each is an equation about its pixels. ``auto`` sends them with
        an update that is neither defended nor encrypted; ``always`` and ``never`` do in any case.
    canaries
        Most canaries that a run may ask this site to include, for an audit of epsilon; a run that
        asks for more gets none.
    guard
        The site's attack on its own updates before they leave; None sends them unattacked.
    """

    require: list[Requirement] = Field(default_factory=list)
    plain_updates: bool = True
    plain_sums: bool = True
    min_summed_clients: Annotated[int, Field(ge=2)] = 2
    fixed_members: bool = False
    models: list[str] | None = None
    data: DataPolicy = DataPolicy()
    local_steps: Bounds = Bounds()
    local_epochs: Bounds = Bounds()
    batch_size: Bounds = Bounds()
    min_training_images: _Count = 1
    min_validation_images: _Count = 10
    max_rounds_per_run: _Count | None = None
    max_rounds_total: _Count | None = None
    max_fused_models: _Count = 64
    max_epsilon: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    initial_model: Literal["any", "from-seed"] = "any"
    metric_decimals: Annotated[int, Field(ge=0, le=15)] | None = None
    train_metrics: Literal["auto", "always", "never"] = "auto"
    canaries: Annotated[int, Field(ge=0)] = 0
    guard: GuardPolicy | None = None

    @model_validator(mode="after")
    def _guard_stands_alone(self) -> SitePolicy:
        if self.guard is None:
            return self
        if self.max_epsilon is not None:
            raise ValueError(
                "guard and max_epsilon exclude each other: what the guard sends is chosen by the "
                "data, which no noise covers; take one of them out"
            )
        if self.canaries:
            raise ValueError(
                "guard and canaries exclude each other: canaries measure epsilon, of which an "
                "update that a guard chose has none; take one of them out"
            )
        return self

    @property
    def least_counted(self) -> float:
        """As how many clients a masked sum must count, by its weights."""
        return float(self.min_summed_clients) if self.bounds_sums else SMALLEST_SUM

    @property
    def bounds_sums(self) -> bool:
        """Return whether the file sets ``min_summed_clients``."""
        return "min_summed_clients" in self.model_fields_set

    @property
    def needs_record(self) -> str | None:
        """Name the first key that needs a record over all runs; None where none does."""
        keys = ("max_rounds_total", "max_epsilon")
        found = next((key for key in keys if getattr(self, key) is not None), None)
        if found is None and self.guard is not None and self.guard.needs_record:
            return f"guard.{self.guard.needs_record}"
        return found

    def cautions(self, *, recorded: bool = True) -> list[str]:
        """Return warnings about what this policy leaves open.

        Parameters
        ----------
        recorded
            Whether the site keeps a record that outlives its SuperNode (``state-dir``).
        """
        found = [text for requirement in self.require for text in requirement.cautions()]
        return found + ([] if self.guard is None else self.guard.cautions(recorded=recorded))

    def decisions(self) -> list[str]:
        """Return what this policy decides, a line a key, for a person to read."""
        found = []
        for key in type(self).model_fields:
            value = getattr(self, key)
            shown = [_in_words(v) for v in value] if isinstance(value, list) else _in_words(value)
            note = "" if key in self.model_fields_set else " (the default)"
            found.append(f"{key}: {shown}{note}")
        return found

    def tells_training(self, *, hidden: bool) -> bool:
        """Return whether loss and accuracy of training leave with a ``hidden`` or a plain
        update.
        """
        return self.train_metrics == "always" or (self.train_metrics == "auto" and not hidden)

    def training_score(self, value: float, images: int, *, hidden: bool) -> float | None:
        """Return FedBoosting's training score as it may be sent; None where it may not.

        The weights rest on it, so ``auto`` sends it, cut and rounded to `SCORE_DECIMALS`; with
        a hidden update not from fewer than ``min_validation_images`` images.
        """
        if self.train_metrics == "always":
            return value
        few = hidden and images < self.min_validation_images
        if self.train_metrics == "never" or few:
            return None
        return round(min(value, LARGEST_LOSS), SCORE_DECIMALS)

    def check_models(self, models: object, clients: int | None = None) -> None:
        """Refuse to score more fused models than a round of so many clients has.

        Parameters
        ----------
        models
            Number of models that the message asks to score.
        clients
            As many as the run declares; None where that cannot be seen.
        """
        asked = f"was asked to score {shown(models)} fused models"
        if not isinstance(models, int) or (clients is not None and models > clients):
            raise PolicyError(
                f"{asked}, but the run declares clients: {clients}; a round fuses one model a "
                "client"
            )
        if models > self.max_fused_models:
            raise PolicyError(
                f"{asked}, and this site's policy allows max_fused_models: "
                f"{self.max_fused_models}; ask the site"
            )

    def most_rounds(self, declared: int | None) -> int:
        """Return how many messages of a kind a run gets answered that declares so many rounds."""
        if self.max_rounds_per_run is not None:
            return self.max_rounds_per_run
        return MOST_UNDECLARED if declared is None else MOST_ROUNDS

    def caps(self, declared: int | None) -> str:
        """Return the limits of a run that declares so many rounds, and the keys to change them."""
        digits = (
            f"{SIGNIFICANT_DIGITS} significant digits"
            if self.metric_decimals is None
            else f"{self.metric_decimals} decimals"
        )
        total = "no bound" if self.max_rounds_total is None else self.max_rounds_total
        return (
            f"at most {self.most_rounds(declared)} answers of a kind (max_rounds_per_run), over "
            f"all runs {total} (max_rounds_total); no score of fewer than "
            f"{self.min_validation_images} images (min_validation_images) nor of more than "
            f"{self.max_fused_models} fused models a round (max_fused_models); measurements with "
            f"{digits} (metric_decimals)"
        )

    def rounded(self, value: float) -> float:
        """Cut and round a measurement as it may be sent."""
        if math.isnan(value):
            return value
        if self.metric_decimals is None:
            return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        return round(max(-LARGEST_LOSS, min(value, LARGEST_LOSS)), self.metric_decimals)


def load_policy(path: Path | None) -> SitePolicy:
    """Read and check a site's policy; None gives the policy of a site that has no file.

    Raises
    ------
    PolicyError
        If the file is missing, is no such YAML, gives a key twice, or names a key, defense or
        hyper-parameter that does not exist. A site whose policy cannot be read takes no part.
    """
    if path is None:
        return SitePolicy()
    try:
        content = parse_yaml(read_named(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(
            f"{path}: the site's policy cannot be read: {one_line(error, 200)}",
            code="file-unreadable",
        ) from error
    except BractError as error:
        raise PolicyError(f"{path}: {error}", code=error.code) from error
    try:
        policy = SitePolicy.model_validate(content if content is not None else {})
    except ValidationError as error:
        problems = listed(_describe(problem) for problem in error.errors())
        raise PolicyError(
            f"{path}: {problems}. Correct the site's policy file", code="config-value"
        ) from error
    for requirement in policy.require:
        if requirement.name not in DEFENSES:
            missing = DEFENSES.missing(requirement.name)
            raise PolicyError(f"{path}: {missing}", code=missing.code)
        known = DEFENSES[requirement.name].model_fields
        for key in (*requirement.minimum, *requirement.maximum, *requirement.equal):
            if key not in known:
                raise PolicyError(
                    f"{path}: {requirement.name}: {unknown('hyper-parameter', key, known)}",
                    code="config-key",
                )
    return policy


def _inside(path: Path | None, folders: Iterable[str | Path]) -> bool:
    # Resolved, so that neither `..` nor a link leads out of an allowed folder.
    return path is not None and any(
        path.resolve().is_relative_to(Path(allowed).resolve()) for allowed in folders
    )


def _describe(problem: Any) -> str:
    whole = {**problem, "loc": problem["loc"] or ("policy",)}
    return fault(whole, fields_at(SitePolicy, problem["loc"][:-1]))


def _number(found: Any, side: int) -> float:
    return float(found) if isinstance(found, int | float) else side * math.inf
