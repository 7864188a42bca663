"""The defenses as a Flower mod, for any ClientApp."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType
from torch import Tensor

from bract.client.accounting import mechanism_of
from bract.client.answers import Answers
from bract.client.defenses import (
    DefenseChain,
    DefenseError,
    DefenseState,
    build_defenses,
)
from bract.client.gate import Gate, IndependentError, passing
from bract.client.layer_buffers import LayerBuffers, layer_buffers
from bract.client.own_model import OwnModel
from bract.client.policy import PolicyError, SitePolicy, check, load_policy
from bract.client.received import (
    Reads,
    base_of,
    check_integers,
    check_pairs,
    check_untied,
    checked_names,
    checked_reads,
    checked_ties,
    running_statistics,
    tie,
    tied_arrays,
)
from bract.client.requests import one_value, request_to_app
from bract.client.withholding import answer_of, check_scores, check_split, round_metrics, withhold
from bract.errors import BractError
from bract.names import numbered
from bract.protocol.arrays import view_arrays
from bract.protocol.fused import FUSED_TYPE, MODELS_KEY
from bract.protocol.reading import (
    Reading,
    checked_kind,
    described,
    possible_statistics,
    read,
)
from bract.protocol.records import (
    BUFFER_ENDINGS,
    DEFENSES,
    to_arrays,
)
from bract.protocol.update import counts_steps
from bract.schema.capture import UpdateKind
from bract.strict_json import parse_json

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
    reads
        How the app reads the arrays of that record: by ``name``, as
        ``load_state_dict(received.to_torch_state_dict())`` does, or by their ``order``. None:
        either, so that a reply is refused where the two differ, or is of names for a list.
    keeps
        Beginnings of the names of arrays that the app receives and does not return, as FedBN's
        ``bn``; it reads by name then.
    tied
        Groups of names that are one tensor of the app's model, such as
        ``[["embed.weight", "head.weight"]]``. The app is handed the first one's value under all of
        them, and that one's defended update is sent under all. Values that differ under other
        names are refused.
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
        **parameters: Any,
    ) -> None:
        if not isinstance(defense, str) and parameters:
            raise BractError(
                "DefenseMod: give hyper-parameters inside the list of defenses", code="config-value"
            )
        entries = [{"name": defense, **parameters}] if isinstance(defense, str) else defense
        self.defenses = _built(entries)
        self.buffers = BUFFER_ENDINGS if buffers is None else checked_names("buffers", buffers)
        self._told_buffers = buffers is not None
        told = {name for name in self.buffers if not name.isdigit()}
        # PyTorch's own buffers count beside those that the author names.
        self._buffer_names = frozenset(told and told | set(BUFFER_ENDINGS))
        self.update = checked_kind("DefenseMod", update)
        self.record = record
        self.reads = checked_reads(reads)
        self.keeps = checked_names("keeps", keeps)
        self.tied = checked_ties(tied)
        self.encrypted = False

    def __call__(self, msg: Message, context: Context, call_next: Handler) -> Message:
        """Handle one message; the state is read per message, in Flower's fresh process."""
        if not self.encrypted:
            return passing(msg, context, lambda gate: self._handle(gate, msg, context, call_next))
        gate = Gate(context)
        try:
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
        check_visible(policy, encrypts=self.encrypted)
        if request.once:
            if len(chain) and request.trains:
                base_of(msg.content.array_records, self.record)
            if len(chain) and request.trains and policy.max_epsilon is not None:
                self._check_buffers(msg.content.array_records)
            if len(chain) and request.trains and request.server_round in (None, 0, 1):
                self._check_lists(msg.content.array_records)
            _check_models(msg, policy)
        kept = gate.admit(answers, request, mechanism_of(chain))
        if kept is not None:
            return Message(kept, reply_to=msg)
        own = OwnModel(chain, self._store(gate, context))
        gate.open()
        if not request.once:
            scored = request_to_app(msg, context, scored=True)
            # A query's answer is the app's own; a model that it evaluates is this client's.
            with own.taking() if chain.keeps_model else nullcontext():
                reply = self._answer_query(answer_of(call_next(msg, context)), policy, chain)
            if check_scores(reply, policy):
                answers.commit_scores(scored)
            return reply
        reply = self._answer(msg, context, call_next, own, policy, chain=chain)
        if not request.trains:
            check_split(reply, policy)
        return gate.keep(reply)

    def _answer_query(self, reply: Message, policy: SitePolicy, chain: DefenseChain) -> Message:
        """Return the answer to a query, its measurements rounded; it holds no array.

        A model that an app has trained leaves by a query as well as by an update.
        """
        _check_without_arrays(reply, policy, chain)
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
    ) -> Message:
        """Return the app's reply, of which the update is defended and the metrics are rounded."""
        trains = msg.metadata.message_type.partition(".")[0] == MessageType.TRAIN
        if trains and len(chain):
            tie(msg.content.array_records.values(), self.tied)
        # The app may change the message that it is handed.
        sent = {name: ArrayRecord(dict(r)) for name, r in msg.content.array_records.items()}
        endings = {name.rpartition(".")[2] for name in self._buffer_names}
        with own.taking(), layer_buffers(endings) as layers:
            reply = answer_of(call_next(msg, context))
        if trains:
            if len(chain):
                self._protect(sent, reply, own, policy, chain, layers)
            withhold(reply, policy, hidden=bool(len(chain)))
        else:
            _check_without_arrays(reply, policy, chain)
        round_metrics(reply, policy)
        return reply

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

    def _protect(
        self,
        sent: Mapping[str, ArrayRecord],
        reply: Message,
        own: OwnModel,
        policy: SitePolicy,
        chain: DefenseChain,
        layers: LayerBuffers,
    ) -> None:
        replied = dict(reply.content.array_records)
        if not replied:
            return
        if len(replied) != 1:
            raise DefenseError(
                f"DefenseMod: the reply holds {len(replied)} array records "
                f"({', '.join(replied)}), expected one; nothing was sent"
            )
        if policy.max_epsilon is not None:
            self._check_buffers(replied)
        self._check_lists(replied)
        try:
            # Under a bound of epsilon no refusal may depend on the data.
            compare = policy.max_epsilon is None
            base = base_of(sent, self.record)
            reading = read(base, reply.content, update=self.update, compare=compare)
        except BractError as error:
            raise DefenseError(f"DefenseMod: {error}; nothing was sent", code=error.code) from None
        if reading.extra:
            raise DefenseError(
                f"DefenseMod: the app returned {', '.join(list(reading.extra)[:5])}, which it did "
                "not receive, so there is no update to protect; nothing was sent"
            )
        received = [name for record in base.values() for name in record]
        if reading.kind == "weights":
            check_pairs(received, list(replied[reading.record]), reading, self.reads, self.keeps)
        check_integers(reading)
        # An app that returns what it received under the same names returns those of the server.
        named = numbered(received) and not numbered(list(reading.keys.values()))
        names = self._protected(reading, None if named or self.reads == "name" else layers)
        if policy.max_epsilon is not None:
            _check_covered(reading, names)
        tied = tied_arrays(reading, names, self.tied)
        if reading.kind == "weights" and policy.max_epsilon is None:
            check_untied(reading, [name for name in names if name not in tied])
        update = reading.update([name for name in names if name not in tied])
        if not update:
            raise DefenseError("DefenseMod: the reply holds no floating arrays to protect")
        turn, protected = own.protect(update)
        # One draw of noise for one tensor: else its names would differ from here on.
        protected = {name: protected[tied.get(name, name)] for name in names}
        _log.info("DefenseMod, update %d: %s", turn, chain.report)
        written = to_arrays(reading.returning(protected))
        arrays = dict(reply.content.array_records[reading.record])
        arrays |= {reading.keys[name]: array for name, array in written.items()}
        reply.content[reading.record] = ArrayRecord(arrays)
        reply.content[DEFENSES] = ConfigRecord({"chain": json.dumps(chain.public())})

    def _protected(self, reading: Reading, layers: LayerBuffers | None) -> list[str]:
        """Return the names of the arrays to protect: what the app returned decides, not the server.

        Parameters
        ----------
        layers
            Buffers of the app's layers; None where the reply's names are the app's own.

        Raises
        ------
        DefenseError
            If an array is none that a defense protects, or may be a buffer.
        """
        bare = self._bare(reading) if layers is None else self._bare_of_layers(reading, layers)
        names = []
        for name, after in reading.returned.items():
            if after.is_complex():
                raise DefenseError(
                    f"DefenseMod: {name} is {described(after)}, which no defense protects; nothing "
                    "was sent"
                )
            if not after.is_floating_point() or reading.keys[name] in bare:
                continue
            if (reading.sent[name].dtype, after.dtype) == (torch.float64, torch.float32):
                # A server that averages in float64; the app trained what it read of that.
                reading.sent[name] = reading.sent[name].to(after.dtype)
            if reading.sent[name].dtype != after.dtype:
                raise DefenseError(
                    f"DefenseMod: {name} was received as {described(reading.sent[name])} and "
                    f"returned as {described(after)}; nothing was sent"
                )
            names.append(name)
        wide = [name for name in names if reading.returned[name].dtype == torch.float64]
        if wide and len(wide) < len(names) and not self._told_buffers:
            raise DefenseError(
                f"DefenseMod: {wide[0]} is float64 and other arrays are not, as an averaged "
                "integer buffer is; give the buffers, such as "
                f"buffers={[wide[0].rpartition('.')[2], *BUFFER_ENDINGS]}, or the endings alone "
                "where it is a parameter; nothing was sent"
            )
        return names

    def _bare(self, reading: Reading) -> set[str]:
        """Return the reply's names of floating arrays that are no parameters; they are the app's.

        Raises
        ------
        DefenseError
            If a name of running statistics is given to an array that shows none.
        """
        keys = list(reading.keys.values())
        # Numbers are places in a list; in one of other names they are none.
        told = [name for name in self.buffers if not name.isdigit() or numbered(keys)]
        named = {key for key in keys if key.rpartition(".")[2] in told}
        bare = set[str]()
        if self.buffers:
            bare = running_statistics({key: reading.returned[n] for n, key in reading.keys.items()})
        if self._told_buffers:
            # PyTorch's own endings show nothing, also where they are told; whole names do.
            bare |= {key for key in named if key.rpartition(".")[2] not in BUFFER_ENDINGS}
            bare |= {key for key in keys if key in told}
        if strange := sorted(named - bare):
            raise DefenseError(
                f"DefenseMod: {strange[0]} is named as a running statistic, and is none beside "
                "mean, variance and count of one layer, as BatchNorm's are; give the model's "
                f"buffers by their whole names, DefenseMod(..., buffers={strange[:3]}), or "
                "buffers=[] where it has none; nothing was sent"
            )
        return bare

    def _bare_of_layers(self, reading: Reading, layers: LayerBuffers) -> set[str]:
        """Return the same where the server may have chosen the names: what the app's layers hold.

        Raises
        ------
        DefenseError
            If a name alone says that an array is no parameter.
        """
        keys = list(reading.keys.values())
        places = self.buffers if self.reads == "order" or numbered(keys) else ()
        bare = {key for place, key in enumerate(keys) if str(place) in places}
        for name, key in reading.keys.items():
            value = reading.returned[name]
            named = bool(self._buffer_names & {key, key.rpartition(".")[2]})
            if not (named and value.is_floating_point()):
                continue
            if not layers.hold(value):
                raise DefenseError(
                    f"DefenseMod: {key} would leave undefended for its name, which the server "
                    "chose where the app takes arrays one after the other and returns them as they "
                    "were called, and no layer of the app holds it; where the app looks arrays up "
                    "by their names and returns model.state_dict(), say so: DefenseMod(..., "
                    "reads='name'); where it takes them in their order, give the places of its "
                    "buffers, DefenseMod(..., reads='order', buffers=['4', '5']); or buffers=[] "
                    "where it has none; nothing was sent"
                )
            bare.add(key)
        return bare

    def _check_lists(self, records: Mapping[str, ArrayRecord]) -> None:
        """Refuse a list of arrays whose running statistics cannot be distinguished."""
        if self._told_buffers:
            return
        for record in records.values():
            if not numbered(list(record)):
                continue
            if found := possible_statistics(view_arrays(record)):
                raise DefenseError(
                    "DefenseMod: the arrays have numbers for names, and running statistics, to "
                    f"which no noise may be added, may be among {', '.join(found[:8])}; send "
                    "ArrayRecord(model.state_dict()) on both sides, or give their numbers, "
                    f"DefenseMod(..., buffers={found[:8]}), or buffers=[] where the model has none",
                    code="defense-unsuited",
                )

    def _check_buffers(self, records: Mapping[str, ArrayRecord]) -> None:
        """Refuse arrays that no noise covers: buffers, and whole numbers but a count of steps."""
        buffers = {*BUFFER_ENDINGS, *self.buffers}
        for key, array in ((k, a) for r in records.values() for k, a in view_arrays(r).items()):
            named = key in buffers or key.rpartition(".")[2] in buffers
            if named or not array.is_floating_point():
                _check_step_counter(key, array)

    def _store(self, gate: Gate, context: Context) -> DefenseState:
        return DefenseState(
            context.state, directory=gate.folder, key=f"run-{context.run_id}-{gate.client}"
        )


_SWITCH = ("on", "off", True, False)


def _check_covered(reading: Reading, protected: Sequence[str]) -> None:
    """Refuse a reply of which anything that the client changed would leave without noise.

    Whatever exempts an array from a defense, its name or its values, exempts none from max_epsilon.
    """
    for name, array in reading.returned.items():
        before = reading.sent[name] if reading.kind == "weights" else torch.zeros_like(array)
        if name not in protected and not torch.equal(array, before):
            _refuse_bare(reading.keys[name])


def _check_step_counter(key: str, array: Tensor) -> None:
    if not counts_steps(key, array.dtype, array.shape):
        _refuse_bare(key)


def _refuse_bare(key: str) -> None:
    raise DefenseError(
        f"DefenseMod: this site's policy sets max_epsilon, but {key} would leave without noise;"
        " take a model without buffers, as those of batch normalisation are"
    )


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


def _check_without_arrays(reply: Message, policy: SitePolicy, chain: DefenseChain) -> None:
    """Refuse arrays in a reply that is no update: no defense protects them."""
    if reply.content.array_records and (len(chain) or policy.max_epsilon is not None):
        raise DefenseError(
            "DefenseMod: the app answered a query or an evaluation with arrays, which no defense "
            "protects; nothing was sent. Give the strategy its initial parameters where it asks "
            "for them"
        )


def check_visible(policy: SitePolicy, *, encrypts: bool = False) -> None:
    """Refuse a policy with keys that a mod cannot check, rather than ignore them.

    Parameters
    ----------
    encrypts
        Whether the mod sends no plain updates.
    """
    unseen = [
        key
        for key in _UNSEEN
        if getattr(policy, key) != SitePolicy.model_fields[key].get_default()
        and not (encrypts and key in _UNENCRYPTED)
    ]
    if unseen:
        raise PolicyError(
            f"this site's policy sets {', '.join(unseen)}, which a mod cannot hold an app "
            "to; run bract's own ClientApp, or take them out of the policy"
        )


def _check_models(msg: Message, policy: SitePolicy) -> None:
    if msg.metadata.message_type == FUSED_TYPE:
        policy.check_models(one_value(msg, MODELS_KEY))
