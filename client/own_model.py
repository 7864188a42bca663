"""The model of a third-party app, as the mod sees it: the app names it, the mod adds secrets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bract.client.defenses import DefenseChain, DefenseState
from bract.client.gate import IndependentError
from bract.defenses import Defense, ProtectContext, Stage
from bract.defenses.own_model import MODEL_HOOK, first_batch
from bract.updates.update import Tensors

TURN = "mod.turn"
"""Name, in the state, of how many updates this client has sent."""


class OwnModel:
    """The model that one message's app trains, with the private state of its defenses.

    Parameters
    ----------
    chain
        The mod's defenses; empty where they are off.
    store
        Where their state is kept.

    Attributes
    ----------
    chain
        The same.
    """

    def __init__(self, chain: DefenseChain, store: DefenseState) -> None:
        self.chain, self._store = chain, store
        self._state: Tensors | None = None
        self._turn = 1
        self._model: nn.Module | None = None
        self._images: list[Tensor] = []

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Take the models that the app passes to `bract.defenses.defended` meanwhile."""
        token = MODEL_HOOK.set(self._take if len(self.chain) else None)
        try:
            yield
        finally:
            MODEL_HOOK.reset(token)

    def _take(self, model: nn.Module, defense: Defense) -> None:
        mine = next((d for d in self.chain.defenses if d.name == defense.name), None)
        if mine is None or mine.public() != defense.public():
            has = ", ".join(str(entry) for entry in self.chain.public())
            raise IndependentError(
                f"the app prepares its model for {defense.public()}, its DefenseMod has {has}; "
                "give both the same defense and hyper-parameters",
                code="config-conflict",
            )
        state = self._load()
        self.chain.attach(model, state, ProtectContext(round=self._turn))
        if self.chain.keeps_model:
            self._save(state, self._turn - 1)
        if model is not self._model:
            self._model, self._images = model, first_batch(model)

    def protect(self, update: Tensors) -> tuple[int, Tensors]:
        """Return the number of this update, from 1, and what may leave of it.

        Raises
        ------
        IndependentError
            If the app never declared which model it trains.
        DefenseError
            If a defense fails.
        """
        unprepared = [
            d.name for d in self.chain.defenses if d.stage is Stage.MODEL or "model" in d.needs
        ]
        if unprepared and self._model is None:
            line = "keylock(net)" if "fedkl" in unprepared else f"defended(net, {unprepared[0]!r})"
            raise IndependentError(
                f"DefenseMod: {', '.join(unprepared)} needs the model that the app trains; write "
                f"net = {line} where the app makes it, at the server too (bract.defenses); nothing "
                "was sent",
                code="defense-unsuited",
            )
        state = self._load()
        context = ProtectContext(
            round=self._turn,
            model=self._model,
            images=self._images[0] if self._images else None,
        )
        protected = self.chain.protect(update, state, context)
        self._save(state, self._turn)
        return self._turn, protected

    def _load(self) -> Tensors:
        if self._state is None:
            self._state = self._store.load()
            self._turn = int(self._state.pop(TURN, torch.tensor(0))) + 1
        return self._state

    def _save(self, state: Tensors, turn: int) -> None:
        self._store.save({**state, TURN: torch.tensor(turn)})
