"""Hold a run against a site's policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bract.client.defenses import DefenseChain
from bract.client.policy import PolicyError, SitePolicy
from bract.client.site import Site
from bract.client.training import planned_examples, planned_passes, planned_steps, smallest_batch
from bract.config import FederationConfig
from bract.config.config import TrainingConfig
from bract.defenses.entries import read_defense


def check(policy: SitePolicy, defenses: DefenseChain) -> None:
    """Refuse a run whose defenses fall short of the policy."""
    refuse(_defense_violations(policy, defenses), defenses)


def check_run(
    policy: SitePolicy, site: Site, config: FederationConfig, defenses: DefenseChain
) -> None:
    """Refuse a run that its configuration shows to be against the policy."""
    problems = _defense_violations(policy, defenses, config.declared_defenses)
    if not policy.plain_updates and not config.encryption.enabled:
        problems.append("encryption must be on, the run would send updates unencrypted")
    if not policy.plain_sums and config.encryption.uses_masks:
        problems.append(
            "plain_sums is false, and the server of masked sums learns each round's sum; take "
            "encryption: paillier"
        )
    private = config.training.private
    epsilon, most = None if private is None else private.epsilon, policy.max_epsilon
    if epsilon is not None and most is not None and epsilon > most:
        problems.append(
            f"training.private.epsilon must be at most max_epsilon: {most:g}, the run has "
            f"{epsilon:g}"
        )
    if policy.models is not None and config.model.name not in policy.models:
        problems.append(
            f"model.name must be one of {policy.models}, the run has {config.model.name!r}"
        )
    problems += policy.data.violations(site, site.local(config).data)
    training = config.training
    if training.algorithm == "fedavg" and training.local_steps is None:
        problems += policy.local_epochs.violations("training.local_epochs", training.local_epochs)
    # What the run alone decides is refused here, with its reason; the rest once the data are open.
    if training.algorithm == "fedsgd" or training.local_steps is not None:
        steps = planned_steps(training, 1)
        problems += policy.local_steps.violations("local steps", steps)
        # Each step is a pass at most.
        problems += policy.local_epochs.violations(_PASSES, steps, 0)
        problems += _few_images(policy, steps * training.batch_size)
    least = policy.batch_size.minimum
    if least is not None and training.batch_size < least:
        problems += policy.batch_size.violations("a batch", training.batch_size)
    if policy.guard is not None and private is not None:
        problems.append(
            "training.private must be off: its epsilon covers no update that this site's guard "
            "chooses by the data"
        )
    refuse(problems, defenses)


def check_training(
    policy: SitePolicy, training: TrainingConfig, count: int, defenses: DefenseChain
) -> None:
    """Refuse local training that the policy does not allow on ``count`` examples.

    Raises
    ------
    PolicyError
        It names the count, so that it may not leave the site.
    """
    problems = policy.local_steps.violations("local steps", planned_steps(training, count))
    problems += policy.local_epochs.violations(_PASSES, *planned_passes(training, count))
    largest = min(training.batch_size, count)
    # With per-example noise batches are samples of any size.
    smallest = largest if training.private is not None else smallest_batch(training, count)
    problems += policy.batch_size.violations("a batch", smallest, largest)
    problems += _few_images(policy, planned_examples(training, count))
    refuse(problems, defenses)


_PASSES = "passes over the data (local_epochs)"


def _few_images(policy: SitePolicy, most: int) -> list[str]:
    if most >= policy.min_training_images:
        return []
    return [
        f"the images of an update must be at least {policy.min_training_images} "
        f"(min_training_images), the run trains on {most}"
    ]


def refuse(problems: list[str], defenses: DefenseChain) -> None:
    """Raise `PolicyError` with every one of ``problems``; do nothing where there is none."""
    if problems:
        asked = ", ".join(defense.name for defense in defenses.defenses) or "no defense"
        raise PolicyError(
            f"this site's policy refuses the run ({asked}): {'; '.join(problems)}. "
            "Change the federation's configuration, or ask the site"
        )


def _defense_violations(
    policy: SitePolicy, defenses: DefenseChain, besides: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """Return how defenses, and those declared ``besides``, fall short of the policy."""
    declared = {entry["name"]: entry for entry in defenses.public()}
    for entry in besides:
        if entry["name"] not in declared:
            declared[entry["name"]] = read_defense(entry).public()
    return [text for requirement in policy.require for text in requirement.violations(declared)]
