"""The defenses as a Flower mod, for any ClientApp."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from torch import Tensor

from bract.client.defenses import (
    DefenseError,
    DefenseState,
    ProtectContext,
    Stage,
    build_defenses,
)
from bract.client.policy import check, load_policy
from bract.errors import BractError
from bract.records import BUFFER_ENDINGS, DEFENSES
from bract.update import Tensors

SWITCH_KEY = "bract-defense"
"""Run or node config key that turns the mod ``on`` or ``off``; the node config decides."""


_log = logging.getLogger(__name__)


class DefenseMod:
    """Replace the update in every train reply by a defended one, or by an error.

    The update is what the app received minus what it returns; the reply then holds what it received
    minus the defended update. So any server that averages arrays works as before. Messages of
    other types pass through.

    Floating arrays are protected. Integer arrays, and the running statistics of batch
    normalisation, are no parameters and pass as they are; they tell the server about the data.

    Examples
    --------
    ::

        app = ClientApp(mods=[DefenseMod("adadefense", alpha=0.01)])

    Parameters
    ----------
    defense
        Name of a defense, or a list of ``{"name": ..., <hyper-parameter>: ...}`` in order.
        Defenses that change the model or read the batch need `bract.client.app` instead.
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
            raise BractError("DefenseMod: give hyper-parameters inside the list of defenses")
        entries = [{"name": defense, **parameters}] if isinstance(defense, str) else defense
        self.defenses = build_defenses(entries)
        self.buffers = tuple(buffers)
        for member in self.defenses.defenses:
            if member.stage is Stage.MODEL or member.needs:
                raise BractError(
                    f"DefenseMod: {member.name!r} needs the app's "
                    f"{', '.join(member.needs) or 'model'}, which a mod does not see; run it with "
                    "bract's own ClientApp"
                )

    def __call__(self, msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle one message; the state is read per message, in Flower's fresh process."""
        if msg.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(msg, context)
        try:
            active = self._active(context)
        except BractError as error:
            return _refuse(msg, error)
        if not active:
            return call_next(msg, context)
        sent = {name: dict(record) for name, record in msg.content.array_records.items()}
        reply = call_next(msg, context)
        if reply.has_error():
            return reply
        try:
            self._protect(sent, reply, context)
        except BractError as error:
            return _refuse(msg, error)
        return reply

    def _active(self, context: Context) -> bool:
        setting = context.node_config.get(SWITCH_KEY, context.run_config.get(SWITCH_KEY, "on"))
        if setting not in ("on", "off", True, False):
            raise BractError(f"{SWITCH_KEY} is {setting!r}, expected 'on' or 'off'")
        active = setting in ("on", True)
        policy_path = context.node_config.get("policy")
        if policy_path is not None:
            chain = self.defenses if active else build_defenses([])
            check(load_policy(Path(str(policy_path))), chain)
        if not active:
            _log.warning("DefenseMod is off (%s): this update is sent unprotected", SWITCH_KEY)
        return active

    def _protect(
        self, sent: Mapping[str, Mapping[str, Array]], reply: Message, context: Context
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
        store = self._store(context)
        state = store.load()
        turn = int(state.pop("mod.turn", torch.tensor(0))) + 1
        protected = self.defenses.protect(update, state, ProtectContext(round=turn))
        store.save({**state, "mod.turn": torch.tensor(turn)})
        _log.info("DefenseMod, update %d: %s", turn, self.defenses.report)
        arrays = {
            key: Array((before[key] - protected[key]).numpy()) if key in protected else array
            for key, array in returned.items()
        }
        reply.content[name] = ArrayRecord(arrays)
        reply.content[DEFENSES] = ConfigRecord({"chain": json.dumps(self.defenses.public())})

    def _store(self, context: Context) -> DefenseState:
        directory = context.node_config.get("state-dir")
        config = context.node_config
        client = config.get("name", config.get("partition-id", f"node-{context.node_id}"))
        return DefenseState(
            context.state,
            directory=Path(str(directory)) if directory is not None else None,
            key=f"run-{context.run_id}-{client}",
        )


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


def _refuse(msg: Message, error: BractError) -> Message:
    _log.error("%s", error)
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, str(error)), reply_to=msg)
