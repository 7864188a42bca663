"""The defenses as a Flower mod, for any ClientApp."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType

from bract.client.accounting import mechanism_of
from bract.client.answered import Request
from bract.client.answers import Answers
from bract.client.app_guard import Guard
from bract.client.app_update import AppAsDeclared, AppUpdate
from bract.client.defenses import DefenseChain, DefenseError, DefenseState, build_defenses
from bract.client.gate import Gate, IndependentError, passing
from bract.client.guarding import RunLedger, check_sums
from bract.client.own_model import OwnModel
from bract.client.policy import PolicyError, SitePolicy, load_policy
from bract.client.policy_checks import check
from bract.client.received import Reads
from bract.client.requests import one_value, request_to_app
from bract.client.withholding import (
    answer_of,
    check_carried,
    check_scores,
    check_split,
    round_metrics,
    withhold,
)
from bract.errors import BractError, contained
from bract.parse.strict_json import parse_json
from bract.protocol.fused import FUSED_TYPE, MODELS_KEY
from bract.protocol.records import DEFENSES
from bract.schema.capture import UpdateKind
from bract.updates.update import Tensors

SWITCH_KEY = "bract-defense"
"""Node config key by which a site turns the mod ``on`` or ``off``, or names its own defense in the
place of the app's: a name, or a JSON list of entries. The run config is the server's."""

SWITCH_VARIABLE = "BRACT_DEFENSE"
"""Environment variable of a client's process with the same, where its node config has no key: in
Flower's simulation engine, whose nodes have no configuration of their own."""

_UNSEEN = (
    "plain_updates",
    "plain_sums",
    "min_summed_clients",
    "fixed_members",
    "models",
    "data",
    "local_steps",
    "local_epochs",
    "batch_size",
    "min_training_images",
    "initial_model",
    "canaries",
)

_UNENCRYPTED = ("plain_updates", "plain_sums")
"""Those of them that encryption by the app itself holds to."""

_log = logging.getLogger(__name__)

Handler = Callable[[Message, Context], Message]
"""The rest of the mods, and the app's own handler."""


class DefenseMod:
    """Replace the update in every train reply by a defended one, or by an error.

    The update is what the app received minus what it returns; the reply then holds what it received
    minus the defended update. So any server that averages arrays works as before. Evaluations are
    held to the site's policy, with or without a file; messages of other types are counted and reach
    the app. An error that the app raises, in whatever message, is not sent.

    Floating arrays are protected. Integer arrays, and the running statistics of batch
    normalisation, are no parameters and pass as they are; they reveal statistics of the data.

    With a defended update the metrics that are no whole numbers (losses, accuracies) are
    withheld, but for FedBoosting's rounded score: NaN takes their place, so that strategies find
    the names that they expect. The site's policy decides (``train_metrics``).

    Examples
    --------
    ::

        app = ClientApp(mods=[DefenseMod("adadefense", alpha=0.01)])

    Parameters
    ----------
    defense
        Name of a defense, or a list of ``{"name": ..., <hyper-parameter>: ...}`` in order.
        Those that change the model or read the batch (``fedkl``, ``precode``, ``soteria``) need a
        line where the app makes its model: `bract.defenses.keylock`, `bract.defenses.defended`.
    buffers
        Names, or last parts of names, of floating arrays that are not parameters, beside PyTorch's
        running statistics; ``[]``: there are none. A name counts where a layer that the app made
        holds the array by it, or where the names are the app's own (``reads="name"``). Arrays of a
        list, or with ``reads="order"``, go by their numbers: where one of a list may be a running
        statistic, the mod refuses until their numbers, or ``[]``, are given.
    update
        What the app returns: ``weights`` after training, a ``delta`` (trained minus received
        weights), or the ``gradient``. None takes what resembles the received weights for weights,
        and refuses everything else.
    record
        Key of the record of arrays that holds the received model, as the app reads it, where more
        than one is sent (SCAFFOLD). None: a message with more than one is refused, as its sender
        could choose from which of them the update is taken.
    seen
        Whether the app trains by optimizers of PyTorch's in this process. The update is then taken
        from what its parameters held before their first steps, and an array of which no parameter
        did is refused, unless it came back as it was received. False: names and order decide, and
        the author answers for it that each received array is a tensor of its own.
    reads
        How the app reads the arrays of that record: by ``name``, as
        ``load_state_dict(received.to_torch_state_dict())`` does, or by their ``order``. None:
        either, so that a reply is refused where the two differ, or is of names for a list. It
        counts with ``seen=False``, and for a state that no parameter has at the end.
    keeps
        Beginnings of the names of arrays that the app receives and does not return, as FedBN's
        ``bn``; it reads by name then.
    tied
        Groups of names that are one tensor of the app's model, such as
        ``[["embed.weight", "head.weight"]]``, where ``seen`` does not show it. The app is handed
        the first one's value under all of them, and that one's defended update is sent under all.
        Values that differ under other names are refused.
    guard
        Attacks each defended update before it leaves, by what `bract.client.Guard` declares of the
        app, and strengthens or refuses it. None: a site whose policy sets ``guard`` takes no part.
    parameters
        Hyper-parameters of a single defense.

    Attributes
    ----------
    encrypted
        Whether the app encrypts what leaves the mod, as `EncryptedClientApp` notes in its mods.
    """

    def __init__(
        self,
        defense: str | Sequence[Mapping[str, Any]],
        *,
        buffers: Sequence[str] | None = None,
        update: UpdateKind | None = None,
        record: str | None = None,
        reads: Reads | None = None,
        keeps: Sequence[str] = (),
        tied: Sequence[Sequence[str]] = (),
        seen: bool = True,
        guard: Guard | None = None,
        **parameters: Any,
    ) -> None:
        if not isinstance(defense, str) and parameters:
            raise BractError(
                "DefenseMod: give hyper-parameters inside the list of defenses", code="config-value"
            )
        entries = [{"name": defense, **parameters}] if isinstance(defense, str) else defense
        self.defenses = _built(entries)
        self._declared = AppAsDeclared(
            buffers=buffers,
            update=update,
            record=record,
            reads=reads,
            keeps=keeps,
            tied=tied,
            seen=seen,
        )
        self.encrypted = False
        self._guard = guard

    def __call__(self, msg: Message, context: Context, call_next: Handler) -> Message:
        """Handle one message; the state is read per message, in Flower's fresh process."""
        if not self.encrypted:
            return passing(msg, context, lambda gate: self._handle(gate, msg, context, call_next))
        gate = Gate(context)
        try:
            with contained():
                return self._handle(gate, msg, context, call_next)
        except Exception as error:  # noqa: BLE001 - what the app encrypts in has a gate of its own
            raise IndependentError(str(gate.refusal(error))) from None

    def _handle(self, gate: Gate, msg: Message, context: Context, call_next: Handler) -> Message:
        with gate.own_settings():
            path = context.node_config.get("policy")
            policy = load_policy(None if path is None else Path(str(path)))
        chain = self._chain(gate, context)
        request = request_to_app(msg, context)
        answers = Answers(context.state, directory=gate.folder, site=gate.client, policy=policy)
        check(policy, chain)
        check_visible(policy, encrypts=self.encrypted, guards=self._guard is not None)
        with gate.own_settings():
            guarding = self._guarding(policy, chain, gate, answers, request, msg, context)
        if request.once:
            if (len(chain) or guarding) and request.trains:
                self._declared.check_message(
                    msg.content.array_records,
                    bounded=policy.max_epsilon is not None,
                    first=request.server_round in (None, 0, 1),
                )
            _check_models(msg, policy)
        kept = gate.admit(answers, request, None if guarding else mechanism_of(chain))
        if kept is not None:
            return Message(kept, reply_to=msg)
        own = OwnModel(chain, self._store(gate, context))
        gate.open()
        if not request.once:
            scored = request_to_app(msg, context, scored=True)
            # A query's answer is the app's own; a model that it evaluates is this client's.
            with own.taking() if chain.keeps_model else nullcontext():
                reply = self._answer_query(
                    answer_of(call_next(msg, context)),
                    policy,
                    protected=self._protects(policy, chain),
                )
            if check_scores(reply, policy):
                answers.commit_scores(scored)
            return reply
        reply = self._answer(msg, context, call_next, own, policy, chain=chain, guarding=guarding)
        if not request.trains:
            check_split(reply, policy)
        return gate.keep(reply)

    def _protects(self, policy: SitePolicy, chain: DefenseChain) -> bool:
        """Return whether an update leaves defended or guarded, and so no model beside it."""
        return bool(len(chain)) or self._guard is not None or policy.guard is not None

    def _answer_query(self, reply: Message, policy: SitePolicy, *, protected: bool) -> Message:
        """Return the answer to a query, its measurements rounded; it holds no array.

        A model that an app has trained leaves by a query as well as by an update.
        """
        _check_without_arrays(reply, policy, protected=protected)
        if protected:
            check_carried(reply)
        round_metrics(reply, policy)
        return reply

    def _answer(
        self,
        msg: Message,
        context: Context,
        call_next: Handler,
        own: OwnModel,
        policy: SitePolicy,
        *,
        chain: DefenseChain,
        guarding: Guarding | None,
    ) -> Message:
        """Return the app's reply, of which the update is defended and the metrics are rounded."""
        trains = msg.metadata.message_type.partition(".")[0] == MessageType.TRAIN
        protected = self._protects(policy, chain)
        if trains and (len(chain) or guarding):
            reply = self._train(msg, context, call_next, own, policy, guarding)
        else:
            with own.taking():
                reply = answer_of(call_next(msg, context))
            if protected:
                check_carried(reply)
        if trains:
            withhold(reply, policy, hidden=bool(len(chain)) or guarding is not None)
        else:
            _check_without_arrays(reply, policy, protected=protected)
        round_metrics(reply, policy)
        return reply

    def _guarding(
        self,
        policy: SitePolicy,
        chain: DefenseChain,
        gate: Gate,
        answers: Answers,
        request: Request,
        msg: Message,
        context: Context,
    ) -> Guarding | None:
        """Return what a defended update passes; None where nothing guards it."""
        if self._guard is None or not request.trains:
            return None
        if self.encrypted:
            check_sums(policy)
            _log.info("guard: the update is sealed, the server reads sums alone; not attacked")
            return None
        limits = self._guard.policy(policy.guard)
        check_guarded(policy)
        answers.check_guard(request, limits)
        return partial(
            self._guard.passed,
            policy=limits,
            chain=chain,
            msg=msg,
            context=context,
            ledger=RunLedger(answers, request, limits),
            folder=gate.folder,
            site=gate.client,
        )

    def _chain(self, gate: Gate, context: Context) -> DefenseChain:
        """Return the defenses of this site; none where it turned them off."""
        own = context.node_config.get(SWITCH_KEY, os.environ.get(SWITCH_VARIABLE))
        asked = context.run_config.get(SWITCH_KEY)
        if asked not in (*_SWITCH, None):
            raise BractError(
                f"{SWITCH_KEY} is {asked!r}, expected 'on' or 'off'", code="config-value"
            )
        if isinstance(own, str) and own not in _SWITCH:
            with gate.own_settings():
                return _built(_named(own))
        if own not in (*_SWITCH, None):
            with gate.own_settings():
                raise BractError(
                    f"{SWITCH_KEY} is {own!r}, expected 'on', 'off', a defense such as 'guardian', "
                    "or a JSON list of entries with a name",
                    code="config-value",
                )
        if own is None and asked in ("off", False):
            raise BractError(
                f"the run config sets {SWITCH_KEY}: {asked!r}, but only this site may turn its "
                f"defense off; take the key out of the run config, or set {SWITCH_KEY}='off' in "
                "the site's node config",
                code="request-refused",
            )
        if own in ("on", True, None):
            return self.defenses
        _log.warning("DefenseMod is off (%s): this update is sent unprotected", SWITCH_KEY)
        return build_defenses([])

    def _train(
        self,
        msg: Message,
        context: Context,
        call_next: Handler,
        own: OwnModel,
        policy: SitePolicy,
        guarding: Guarding | None,
    ) -> Message:
        """Return the app's reply to a train message with the defended update."""
        records = msg.content.array_records
        with own.taking(), self._declared.watching(records) as watched:
            # The app may change the message that it is handed.
            sent = {name: ArrayRecord(dict(record)) for name, record in records.items()}
            reply = answer_of(call_next(msg, context))
        check_carried(reply)
        bounded = policy.max_epsilon is not None
        update = self._declared.update_in(reply.content, sent, watched, bounded=bounded)
        if update is None:
            return reply
        turn, protected = own.protect(update.tensors())
        _log.info("DefenseMod, update %d: %s", turn, own.chain.report)
        if guarding is not None:
            protected = guarding(update, protected)
        update.write(reply.content, protected)
        reply.content[DEFENSES] = ConfigRecord({"chain": json.dumps(own.chain.public())})
        return reply

    def _store(self, gate: Gate, context: Context) -> DefenseState:
        return DefenseState(
            context.state, directory=gate.folder, key=f"run-{context.run_id}-{gate.client}"
        )


Guarding = Callable[[AppUpdate, Tensors], Tensors]
"""Returns what may leave of a defended update, or raises."""

_SWITCH = ("on", "off", True, False)


def _built(entries: Sequence[Mapping[str, Any]]) -> DefenseChain:
    """Build a chain that a mod can apply."""
    chain = build_defenses(entries)
    for member in chain.defenses:
        if hidden := set(member.needs) - {"model", "images"}:
            raise BractError(
                f"DefenseMod: {member.name!r} needs the app's {', '.join(sorted(hidden))}, "
                "which a mod does not see; run it with bract's own ClientApp",
                code="defense-unsuited",
            )
    return chain


def _named(setting: str) -> list[Any]:
    """Read a site's own defense: a name, or a JSON list of entries."""
    if not setting.lstrip().startswith("["):
        return [{"name": setting}]
    entries = parse_json(setting, most=16_384)
    return entries if isinstance(entries, list) else []


def _check_without_arrays(reply: Message, policy: SitePolicy, *, protected: bool) -> None:
    """Refuse arrays in a reply that is no update: no defense and no guard protects them."""
    if reply.content.array_records and (protected or policy.max_epsilon is not None):
        raise DefenseError(
            "DefenseMod: the app answered a query or an evaluation with arrays, which no defense "
            "protects; nothing was sent. Give the strategy its initial parameters where it asks "
            "for them"
        )


def check_guarded(policy: SitePolicy) -> None:
    """Refuse a bound on epsilon beside a guard that the app's author set."""
    if policy.max_epsilon is not None:
        raise PolicyError(
            "the app has a guard, whose choice by the data no noise covers, and this site's policy "
            "sets max_epsilon; take one of them out"
        )


def check_visible(policy: SitePolicy, *, encrypts: bool = False, guards: bool = False) -> None:
    """Refuse a policy with keys that a mod cannot check, rather than ignore them.

    Parameters
    ----------
    encrypts
        Whether the mod sends no plain updates.
    guards
        Whether the app's author declared what a guard needs.
    """
    unseen = [
        key
        for key in _UNSEEN
        if getattr(policy, key) != SitePolicy.model_fields[key].get_default()
        and not (encrypts and key in _UNENCRYPTED)
    ]
    if policy.guard is not None and not (guards or encrypts):
        unseen.append("guard")
    if unseen:
        raise PolicyError(
            f"this site's policy sets {', '.join(unseen)}, which a mod cannot hold an app "
            "to; run bract's own ClientApp, or take them out of the policy"
        )


def _check_models(msg: Message, policy: SitePolicy) -> None:
    if msg.metadata.message_type == FUSED_TYPE:
        policy.check_models(one_value(msg, MODELS_KEY))
