"""The guard around the update of a third-party app, as its author declares the app."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from flwr.app import Context, Message
from pydantic import ValidationError
from torch import Tensor

from bract.captures.observation import ClientDeclaration, Observation
from bract.client.app_update import AppUpdate
from bract.client.defenses import DefenseChain
from bract.client.guard import Candidate, Finding, Ladder, send_or_refuse
from bract.client.guard_policy import BATCH, GuardPolicy, Step
from bract.client.guarding import RunLedger, apart, check_guard_installed
from bract.config.faults import first_problem
from bract.defenses import ProtectContext
from bract.errors import BractError, shown
from bract.inputs import Truth, input_of
from bract.installed.references import own_word
from bract.protocol.reading import Reading
from bract.updates.update import Tensors

Examples = Callable[[Message, Context], tuple[Tensor, Tensor]]
"""Returns the inputs of an app's model and their labels."""

_OWN = ("defenses", "num_examples", "encryption", "algorithm")
"""Fields of a declaration that the mod fills in itself."""


class Guard:
    """Describes an app to a guard, which attacks its updates before they leave.

    The site's policy (``guard:``) decides limit, time, ladder and margin; without it those given
    here do. The guard rests in no case: an update that it cannot judge is refused.

    Examples
    --------
    ::

        guard = Guard(
            "my_app.task:Net", batch_of_this_round, classes=10, lr=0.1, local_steps=1, batch_size=8
        )
        app = ClientApp(mods=[DefenseMod("pruning", ratio=0.9, guard=guard)])

    Parameters
    ----------
    model
        Registered name of the model, or ``package.module:callable`` without arguments; its
        parameters have the names of the arrays that the app receives.
    examples
        Returns, once the app has answered, what it trained on in this round: inputs as its model
        took them, of images float32 ``(N, C, H, W)``, and labels int64 ``(N,)``.
    others
        Returns further examples of the site, by which the leak rule tells a copy from chance; None
        leaves that open, and what can be read counts.
    limit, seconds, ladder, margin
        As in the policy, where a site sets none.
    declared
        Further fields of `bract.schema.ClientDeclaration`: ``classes``, ``lr``, ``local_steps``,
        ``batch_size``, ``mean`` and ``std`` of the inputs, ``loss``, ``input``. Attacks simulate
        the client by them; what is wrong here makes the guard blind.

    Raises
    ------
    BractError
        If a value is none of these, or a step of the ladder trains on larger batches, which a mod
        cannot do.
    """

    def __init__(
        self,
        model: str,
        examples: Examples,
        *,
        others: Examples | None = None,
        limit: str | Mapping[str, float] = "leaked",
        seconds: float = 2.0,
        ladder: Sequence[Any] = (),
        margin: int = 1,
        **declared: Any,
    ) -> None:
        given = {"limit": limit, "seconds": seconds, "ladder": list(ladder), "margin": margin}
        try:
            self._policy = GuardPolicy.model_validate(given)
        except ValidationError as error:
            raise BractError(f"Guard: {first_problem(error)}", code="config-value") from None
        if not callable(examples):
            raise BractError(
                f"Guard: examples is {shown(examples)}, expected a function of message and context "
                "that returns inputs and labels",
                code="config-value",
            )
        if wrong := sorted(set(declared) & set(_OWN)):
            raise BractError(
                f"Guard: {', '.join(wrong)} are known to the mod; leave them out",
                code="config-key",
            )
        self._declaration = replace(ClientDeclaration.from_dict(declared), model=own_word(model))
        self._examples, self._others = examples, others

    def policy(self, site: GuardPolicy | None) -> GuardPolicy:
        """Return what holds at a site.

        Raises
        ------
        BractError
            If its ladder trains on larger batches.
        """
        found = site or self._policy
        if any(step.batch for step in found.steps):
            raise BractError(
                f"guard: a step of the ladder is {BATCH!r}, and a mod cannot train the app again; "
                "take it out, or run bract's own ClientApp",
                code="config-conflict",
            )
        check_guard_installed()
        return found

    def passed(
        self,
        update: AppUpdate,
        protected: Tensors,
        *,
        policy: GuardPolicy,
        chain: DefenseChain,
        msg: Message,
        context: Context,
        ledger: RunLedger,
        folder: Any,
        site: str,
    ) -> Tensors:
        """Return what may leave of a protected update.

        Raises
        ------
        BractError
            If nothing may leave, or the guard cannot look; its text stays at the site.
        """
        from bract.client.guard_attack import Inspection

        number = ledger.request.server_round or 1

        # The app's own functions run within the guard: an error there counts as a stop.
        @cache
        def seen() -> tuple[Truth, Truth, Observation]:
            truth, known = self._truths(msg, context)
            return truth, known, self._sent(update, protected, truth, max(1, number), site)

        @cache
        def inspection() -> Inspection:
            _, known, sent = seen()
            return Inspection(policy, sent, known, defenses=chain.public(), seed=number)

        def inspect(candidate: Candidate, step: Step, seconds: float) -> Finding:
            return inspection()(candidate, step, seconds)

        def make(step: Step) -> Candidate | None:
            truth, _, sent = seen()
            returned = {n: update.reading.returned[n] for n in sent.buffers}
            batch = self._declaration.batch_size or len(truth.images)
            made = protected
            if step.skips:
                if sent.buffers:
                    return None  # the app's statistics would leave beside the zeros
                made = {name: torch.zeros_like(value) for name, value in protected.items()}
            elif len(step.chain):
                made = step.chain.protect(protected, {}, apart(ProtectContext(number), step))
            return Candidate(made, returned, truth.images, truth.labels, batch)

        about: dict[str, object] = {"run": ledger.request.run, "round": number}
        left = send_or_refuse(Ladder(policy, inspect, make), ledger, about, folder, site)
        return left.candidate.update

    def _truths(self, msg: Message, context: Context) -> tuple[Truth, Truth]:
        inputs, labels = self._examples(msg, context)
        declaration = self._shaped(inputs)
        kind = input_of(declaration)
        truth = kind.read({"inputs": inputs, "labels": labels}, declaration)
        if self._others is None:
            return truth, truth
        more, named = self._others(msg, context)
        return truth, kind.read({"inputs": more, "labels": named}, declaration)

    def _shaped(self, inputs: Tensor) -> ClientDeclaration:
        declared = self._declaration
        if declared.image_shape is not None or inputs.dim() != 4:
            return declared
        channels, height, width = inputs.shape[1:]
        shape = (channels, height, width)
        mean = declared.mean or (0.0,) * channels
        return replace(
            declared, image_shape=shape, mean=mean, std=declared.std or (1.0,) * channels
        )

    def _sent(
        self, update: AppUpdate, protected: Tensors, truth: Truth, number: int, site: str
    ) -> Observation:
        reading: Reading = update.reading
        shape = tuple(truth.images.shape[1:])
        inputs = truth.images if len(shape) == 3 else torch.zeros(0)
        buffers = [name for name in reading.sent if name not in update.names]
        return Observation(
            round=number,
            client=site,
            parameters={name: reading.sent[name] for name in protected},
            update={},
            buffers={name: reading.sent[name] for name in buffers},
            declaration=replace(
                self._shaped(inputs),
                algorithm="fedsgd" if reading.kind == "gradient" else "fedavg",
            ),
        )
