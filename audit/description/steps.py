"""Local steps, batch size and epochs, by the batches that batch normalisation counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bract.audit.description.draft import Draft
from bract.audit.description.facts import CaptureFacts, batch_and_epochs
from bract.errors import BractError


def choose_norm_mode(draft: Draft) -> None:
    """Take training or evaluation mode of batch normalisation from its counters."""
    counted = [f.steps for f in draft.facts if f.steps is not None]
    if not counted:
        return
    if draft.given.norm_mode is not None:
        if draft.given.norm_mode == "train" and not any(counted):
            draft.doubts.append(
                "norm_mode is train, but no client's batch normalisation counted a batch: "
                "eval fits the captures"
            )
        return
    draft.content["norm_mode"] = "train" if any(counted) else "eval"
    draft.confirmed.append(
        f"batch normalisation ran in {draft.content['norm_mode']} mode, as its counters say"
    )


def choose_steps(draft: Draft, passes: Mapping[tuple[str, int], int]) -> None:
    """Infer batch size and epochs where they are open, and check the counted steps.

    Parameters
    ----------
    passes
        How many batches witnesses saw normalised, by client and round.
    """
    work = draft.given.training
    counting = [f for f in draft.facts if f.steps]
    declared = draft.declaration()
    own = {name for name, w in draft.given.clients.items() if w.local_steps or w.local_epochs}
    if declared.local_steps is not None and work.batch_size is None:
        work = work.model_copy(update={"batch_size": declared.batch_size})
    open_ones = [f for f in draft.facts if draft.declaration(f.capture).local_steps is None]
    if open_ones:
        common = [f for f in counting if f in open_ones]
        drops = [False, True] if work.drop_last is None else [work.drop_last]
        tried = {
            drop: batch_and_epochs(
                common,
                batch_size=work.batch_size,
                epochs=work.local_epochs,
                drop_last=drop,
            )
            for drop in drops
        }
        drop = next((drop for drop, pair in tried.items() if pair is not None), False)
        found = tried.get(drop)
        if found is not None:
            reason = "explains the batches that batch normalisation counted"
            if drop and work.drop_last is None:
                draft.guess("training", "drop_last", True, reason)
            for key, value in zip(("batch_size", "local_epochs"), found, strict=True):
                if getattr(work, key) is None:
                    draft.guess("training", key, value, reason)
        elif counting and not work.batch_size:
            _steps_by_client(draft, counting, own)
        else:
            _conventional_steps(draft)
    _doubt_counts(draft)
    _check_steps(draft, counting, passes)


def _doubt_counts(draft: Draft) -> None:
    """Say where neither a reply nor what was kept shows how many examples an update is of."""
    unknown = [f for f in draft.facts if draft.declaration(f.capture).num_examples is None]
    if unknown:
        draft.doubts.append(
            f"{unknown[0].capture.key}: nothing says how many examples it is of, and as many as a "
            "batch are looked for: let clients reply with the metric num-examples, or declare "
            "--set training.num_examples=N"
        )


def _conventional_steps(draft: Draft) -> None:
    work = draft.given.training
    reason = "a convention; the captures do not say"
    fewer = set(draft.kept_fewer.values())
    whole = {fact.capture.client for fact in draft.facts} == draft.kept_fewer.keys()
    given = (work.batch_size, work.local_epochs, draft.declaration().batch_size)
    if whole and len(fewer) == 1 and given == (None, None, None):
        # As of a loop that ends after some steps, beside a count of the whole data set.
        (count,) = fewer
        reason = "clients kept so many of the examples that they declare, as of a loop that ends"
        draft.guess("training", "batch_size", count, reason)
        draft.guess("training", "local_steps", 1, reason)
        draft.doubts.append(
            f"clients kept {count} examples and declare more; one step of {count} is assumed: "
            "correct training.batch_size and training.local_steps"
        )
        return
    if work.batch_size is None and draft.declaration().batch_size is None:
        draft.guess("training", "batch_size", 32, reason)
        draft.doubts.append(
            "nothing declares the batch size; 32 is assumed: correct training.batch_size"
        )
    if work.local_epochs is None:
        draft.guess("training", "local_epochs", 1, reason)
        draft.doubts.append(
            "nothing declares the local epochs; one is assumed: correct training.local_epochs, "
            "or give training.local_steps"
        )


def _steps_by_client(draft: Draft, counting: Sequence[CaptureFacts], own: set[str]) -> None:
    """Write each client's own steps, where no batch size explains all of them."""
    epochs = draft.given.training.local_epochs or 1
    reason = (
        f"its examples over the steps that batch normalisation counted, in {epochs} "
        f"epoch{'s' * (epochs > 1)}"
    )
    for fact in counting:
        client = fact.capture.client
        if client in own:
            continue
        section = draft.content.setdefault("clients", {}).setdefault(client, {})
        section["local_steps"] = fact.steps
        if fact.examples and "batch_size" not in section:
            section["batch_size"] = -(-fact.examples * epochs // (fact.steps or 1))
            draft.content["guessed"][f"clients.{client}.batch_size"] = reason


def _check_steps(
    draft: Draft, counting: Sequence[CaptureFacts], passes: Mapping[tuple[str, int], int]
) -> None:
    wrong: list[tuple[CaptureFacts, int]] = []
    seen: list[tuple[CaptureFacts, int]] = []
    for fact in counting:
        planned = draft.declaration(fact.capture).local_steps
        if planned is None or planned == fact.steps:
            continue
        known = passes.get((fact.capture.client, fact.capture.round)) == fact.steps
        (seen if known else wrong).append((fact, planned))
    if wrong:
        raise BractError(_unlike_steps(wrong, len(counting)), code="declaration-wrong")
    if seen:
        fact, planned = seen[0]
        draft.doubts.append(
            f"{fact.capture.key}: batch normalisation counted {fact.steps} batches and the client "
            f"made {planned} local steps, as its witness saw: running statistics are of passes "
            "that are no steps of their own, too"
        )
    elif counting:
        draft.confirmed.append(
            f"the local steps of {len(counting)} captures are those that batch normalisation "
            "counted"
        )


def _unlike_steps(wrong: Sequence[tuple[CaptureFacts, int]], count: int) -> str:
    """Say which steps are not those that were counted, and what may be why."""
    fact, planned = wrong[0]
    more = f" ({len(wrong)} of {count} captures differ)" if len(wrong) > 1 else ""
    client = fact.capture.client
    ratios = {divmod(one.steps or 0, steps) for one, steps in wrong if steps}
    times, left = next(iter(ratios)) if len(ratios) == 1 else (0, 1)
    accumulated = (
        f"; where each step accumulates the gradients of {times} batches, it counts as many and "
        "these steps are right: no attack simulates that, and nothing here tells it from more "
        "steps, as bract.client.witness does"
        if times > 1 and not left
        else ""
    )
    return (
        f"{fact.capture.key}: the description makes {planned} local steps of {fact.examples} "
        f"examples, its batch normalisation counted {fact.steps}{more}; correct "
        "training.batch_size, training.local_epochs or training.local_steps, or describe the "
        f"client: --set clients.{client}.local_steps={fact.steps}{accumulated}"
    )
