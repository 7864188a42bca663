"""The defenses as a Flower mod, for any ClientApp."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType
from torch import Tensor

from bract.client.accounting import mechanism_of
from bract.client.answered import Request
from bract.client.answers import Answers
from bract.client.defenses import (
    DefenseChain,
    DefenseError,
    DefenseState,
    build_defenses,
)
from bract.client.failures import hiding
from bract.client.own_model import OwnModel
from bract.client.policy import PolicyError, SitePolicy, check, load_policy
from bract.client.private import warn_of_open_folders
from bract.client.refusals import note_refusal
from bract.client.replies import digest
from bract.errors import BractError
from bract.protocol.codes import ErrorCode
from bract.protocol.fused import FUSED_TYPE, MODELS_KEY, TRAINING_SCORES
from bract.protocol.records import BUFFER_ENDINGS, DEFENSES, NUM_EXAMPLES_KEY, ROUND_KEY
from bract.protocol.update import Tensors
from bract.strict_json import parse_json

SWITCH_KEY = "bract-defense"
"""Node config key by which a site turns the mod ``on`` or ``off``, or names its own defense in the
place of the app's: a name, or a JSON list of entries. The run config is the server's."""

SWITCH_VARIABLE = "BRACT_DEFENSE"
"""Environment variable of a client's process with the same, where its node config has no key: in
Flower's simulation engine, whose nodes have no configuration of their own."""

ROUNDS_KEY = "num-server-rounds"
"""Run config key that declares the rounds, as Flower's own templates call it."""


_UNSEEN = (
    "plain_updates",
    "plain_sums",
    "min_summed_clients",
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
    held to the site's policy, with or without a file; messages of other types pass through.

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
        Last parts of the names of floating arrays that are not parameters.
    parameters
        Hyper-parameters of a single defense.
    """

    def __init__(
        self,
        defense: str | Sequence[Mapping[str, Any]],
        *,
        buffers: Sequence[str] = BUFFER_ENDINGS,
        **parameters: Any,
    ) -> None:
        if not isinstance(defense, str) and parameters:
            raise BractError(
                "DefenseMod: give hyper-parameters inside the list of defenses", code="config-value"
            )
        entries = [{"name": defense, **parameters}] if isinstance(defense, str) else defense
        self.defenses = _built(entries)
        self.buffers = tuple(buffers)

    def __call__(self, msg: Message, context: Context, call_next: Handler) -> Message:
        """Handle one message; the state is read per message, in Flower's fresh process."""
        kind = msg.metadata.message_type.partition(".")[0]
        if kind not in (MessageType.TRAIN, MessageType.EVALUATE):
            return self._judge(msg, context, call_next)
        try:
            path = context.node_config.get("policy")
            policy = load_policy(None if path is None else Path(str(path)))
            chain = self._chain(context)
            active = bool(len(chain))
            check(policy, chain)
            check_visible(policy)
            if active and kind == MessageType.TRAIN and policy.max_epsilon is not None:
                self._check_buffers(msg.content.array_records)
            _check_models(msg, policy)
            mechanism = mechanism_of(chain) if kind == MessageType.TRAIN else None
            answers = Answers(
                context.state, directory=_folder(context), site=_client(context), policy=policy
            )
            request = _request(msg, context)
            kept = answers.admit(request, mechanism)
            if kept is not None:
                return Message(kept, reply_to=msg)
            answers.commit(request, mechanism)
            own = OwnModel(chain, self._store(context))
            with hiding(f"DefenseMod: {request.kind} of round {request.server_round}"):
                reply = self._answer(msg, context, call_next, own, policy, chain=chain)
            if kind == MessageType.EVALUATE:
                _check_split(reply, policy)
            answers.keep(request, reply.content)
        except BractError as error:
            return refuse(msg, context, error)
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
        sent = {name: dict(record) for name, record in msg.content.array_records.items()}
        with own.taking():
            reply = call_next(msg, context)
        if reply.has_error():
            raise BractError(
                f"the app replied with an error: {reply.error.reason}", code="site-failed"
            )
        if msg.metadata.message_type.partition(".")[0] == MessageType.TRAIN:
            if len(chain):
                self._protect(sent, reply, own, policy, chain)
            withhold(reply, policy, hidden=bool(len(chain)))
        round_metrics(reply, policy)
        return reply

    def _judge(self, msg: Message, context: Context, call_next: Handler) -> Message:
        """Let the app answer; a model that it evaluates is this client's own."""
        try:
            chain = self._chain(context)
            if not chain.keeps_model:
                return call_next(msg, context)
            with OwnModel(chain, self._store(context)).taking():
                return call_next(msg, context)
        except BractError as error:
            return refuse(msg, context, error)

    def _chain(self, context: Context) -> DefenseChain:
        """Return the defenses of this site; none where it turned them off."""
        own = context.node_config.get(SWITCH_KEY, os.environ.get(SWITCH_VARIABLE))
        asked = context.run_config.get(SWITCH_KEY)
        if asked not in (*_SWITCH, None):
            raise BractError(
                f"{SWITCH_KEY} is {asked!r}, expected 'on' or 'off'", code="config-value"
            )
        if isinstance(own, str) and own not in _SWITCH:
            return _built(_named(own))
        if own not in (*_SWITCH, None):
            raise BractError(
                f"{SWITCH_KEY} is {own!r}, expected 'on', 'off', a defense such as 'guardian', or "
                "a JSON list of entries with a name",
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
        sent: Mapping[str, Mapping[str, Array]],
        reply: Message,
        own: OwnModel,
        policy: SitePolicy,
        chain: DefenseChain,
    ) -> None:
        replied = dict(reply.content.array_records)
        if not replied:
            return
        if len(replied) != 1:
            raise DefenseError(
                f"DefenseMod: the reply holds {len(replied)} array records "
                f"({', '.join(replied)}), expected one; nothing was sent"
            )
        name, returned = next(iter(replied.items()))
        if policy.max_epsilon is not None:
            self._check_buffers(replied)
        received = _match(sent, name, returned)
        update: Tensors = {}
        before: Tensors = {}
        for key, array in returned.items():
            value = array.numpy()
            if value.dtype.kind in "iub" or key.rpartition(".")[2] in self.buffers:
                continue
            if value.dtype.kind != "f":
                raise DefenseError(
                    f"DefenseMod: {key} has dtype {value.dtype}, which no defense protects; "
                    "nothing was sent"
                )
            after = torch.from_numpy(value.copy())
            before[key] = torch.from_numpy(received[key].numpy().copy())
            if before[key].shape != after.shape or before[key].dtype != after.dtype:
                raise DefenseError(
                    f"DefenseMod: {key} was received as {_describe(before[key])} and returned as "
                    f"{_describe(after)}; nothing was sent"
                )
            update[key] = before[key] - after
        if not update:
            raise DefenseError("DefenseMod: the reply holds no floating arrays to protect")
        turn, protected = own.protect(update)
        _log.info("DefenseMod, update %d: %s", turn, chain.report)
        arrays = {
            key: Array((before[key] - protected[key]).numpy()) if key in protected else array
            for key, array in returned.items()
        }
        reply.content[name] = ArrayRecord(arrays)
        reply.content[DEFENSES] = ConfigRecord({"chain": json.dumps(chain.public())})

    def _check_buffers(self, records: Mapping[str, Mapping[str, Array]]) -> None:
        """Refuse floating arrays that no noise covers."""
        for key, array in ((k, a) for record in records.values() for k, a in record.items()):
            if key.rpartition(".")[2] in self.buffers and "float" in array.dtype:
                raise DefenseError(
                    f"DefenseMod: this site's policy sets max_epsilon, but {key} would leave "
                    "without noise; take a model without batch normalisation"
                )

    def _store(self, context: Context) -> DefenseState:
        warn_of_open_folders(context.state, _folder(context))
        return DefenseState(
            context.state,
            directory=_folder(context),
            key=f"run-{context.run_id}-{_client(context)}",
        )


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


def _folder(context: Context) -> Path | None:
    directory = context.node_config.get("state-dir")
    return None if directory is None else Path(str(directory))


def _client(context: Context) -> str:
    config = context.node_config
    return str(config.get("name", config.get("partition-id", f"node-{context.node_id}")))


def _request(msg: Message, context: Context) -> Request:
    numbers = [record.get(ROUND_KEY) for record in msg.content.config_records.values()]
    declared = context.run_config.get(ROUNDS_KEY)
    return Request(
        kind=msg.metadata.message_type,
        server_round=next((n for n in numbers if type(n) is int), None),
        digest=digest(msg.content),
        run=context.run_id,
        federation="",
        config=hashlib.sha256(repr(sorted(context.run_config.items())).encode()).hexdigest(),
        last_round=declared if type(declared) is int else None,
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
    found = [record.get(MODELS_KEY) for record in msg.content.config_records.values()]
    if msg.metadata.message_type == FUSED_TYPE:
        policy.check_models(next((n for n in found if n is not None), None))


def _check_split(reply: Message, policy: SitePolicy) -> None:
    found = [record.get(NUM_EXAMPLES_KEY) for record in reply.content.metric_records.values()]
    for number in found or [None]:
        if not isinstance(number, int | float) or number < policy.min_validation_images:
            raise PolicyError(
                f"the app scored a model on {NUM_EXAMPLES_KEY} = {number}, and this site's policy "
                f"demands min_validation_images: {policy.min_validation_images}"
            )


def withhold(reply: Message, policy: SitePolicy, *, hidden: bool) -> None:
    """Replace measured values by NaN; whole numbers are counts, and stay."""
    if policy.tells_training(hidden=hidden):
        return
    for record in reply.content.metric_records.values():
        examples = record.get(NUM_EXAMPLES_KEY)
        images = examples if isinstance(examples, int) else 0
        for name, value in list(record.items()):
            if isinstance(value, float):
                allowed = None
                if name in TRAINING_SCORES:
                    allowed = policy.training_score(value, images, hidden=hidden)
                record[name] = math.nan if allowed is None else allowed
            elif isinstance(value, list):
                record[name] = [math.nan if isinstance(v, float) else v for v in value]


def round_metrics(reply: Message, policy: SitePolicy) -> None:
    """Round measured values; the number of examples is a count, also where it is a float."""
    for record in reply.content.metric_records.values():
        for name, value in list(record.items()):
            if isinstance(value, float) and name != NUM_EXAMPLES_KEY:
                record[name] = policy.rounded(value)
            elif isinstance(value, list):
                record[name] = [policy.rounded(v) if isinstance(v, float) else v for v in value]


def _match(
    sent: Mapping[str, Mapping[str, Array]], name: str, returned: ArrayRecord
) -> Mapping[str, Array]:
    candidates = [sent[name]] if name in sent else list(sent.values())
    for candidate in candidates:
        if set(candidate) == set(returned):
            return candidate
    strange = sorted(set(returned) ^ set(candidates[0])) if candidates else sorted(returned)
    raise DefenseError(
        f"DefenseMod: the reply's arrays {name!r} are not those the app received (differing: "
        f"{', '.join(strange[:5])}), so there is no update to protect; nothing was sent"
    )


def _describe(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)}"


def refuse(msg: Message, context: Context, error: BractError) -> Message:
    """Return the error that is sent in place of an answer, and note it on the site's disk."""
    _log.error("%s", error)
    note_refusal(_folder(context), _client(context), error)
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, str(error)), reply_to=msg)
