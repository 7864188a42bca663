"""The configured defenses around one message of bract's own ClientApp."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Context
from torch import Tensor, nn

from bract.client.defenses import DefenseChain, DefenseState, ProtectContext, build_defenses
from bract.client.site import Site
from bract.config import FederationConfig
from bract.errors import BractError
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)


@dataclass
class Defending:
    """A client's defenses, with the private state that they keep from round to round."""

    chain: DefenseChain
    store: DefenseState
    state: Tensors
    context: ProtectContext

    @classmethod
    def open(
        cls,
        chain: DefenseChain,
        config: FederationConfig,
        site: Site,
        context: Context,
        server_round: int,
    ) -> Defending:
        """Load the state that belongs to the run's defenses."""
        # The name of the federation, not of the run: the state goes on when a run is resumed, and
        # the epsilon that was spent on these examples stays spent.
        store = DefenseState(
            context.state, directory=site.state_dir, key=f"{config.name}-{site.name}"
        )
        state = store.load() if len(chain) else {}
        return cls(chain, store, state, ProtectContext(round=server_round, seed=site.private_seed))

    def attach(self, model: nn.Module) -> None:
        """Give the model this client's secrets."""
        self.chain.attach(model, self.state, self.context)
        if self.chain.keeps_model:
            self.store.save(self.state)

    def protect(
        self,
        update: Tensors,
        *,
        model: nn.Module,
        images: Tensor | None,
        labels: Tensor | None,
    ) -> Tensors:
        """Return what may leave, and keep the state for the next round.

        Parameters
        ----------
        model
            The model after training.
        images, labels
            The round's first batch: model inputs and labels; None where no defense may read them.
            The defenses compute where the model is.

        Returns
        -------
        dict of str to Tensor
            CPU tensors.
        """
        if not len(self.chain):
            return update
        context = replace(self.context, model=model, images=images, labels=labels)
        device = next(model.parameters()).device
        protected = self.chain.protect(
            {name: value.to(device) for name, value in update.items()}, self.state, context
        )
        self.store.save(self.state)
        _log.info("round %d: %s", context.round, self.report)
        return {name: value.cpu() for name, value in protected.items()}

    @property
    def report(self) -> dict[str, float]:
        """Return figures about the last update, for the client's own eyes."""
        return self.chain.report

    def declaration(self) -> dict[str, Any]:
        """Return what the protocol declares."""
        return {"defenses": self.chain.public()} if len(self.chain) else {}


def defenses_of(config: FederationConfig) -> DefenseChain:
    """Build the chain that a federation asks for."""
    chain = build_defenses(config.defenses, noised=config.training.private is not None)
    if chain.server_lr != 1.0 and config.strategy.server_lr != chain.server_lr:
        raise BractError(
            f"strategy.server_lr is {config.strategy.server_lr}, but these defenses upload "
            f"defended updates that the server has to scale; set strategy.server_lr: "
            f"{chain.server_lr}",
            code="config-conflict",
        )
    reading = [d.name for d in chain.defenses if {"images", "labels"} & set(d.needs)]
    if config.training.private is not None and reading:
        raise BractError(
            f"training.private: the noise covers training, and the defense {reading[0]!r} reads "
            "the examples again after it; take the defense out, or training.private",
            code="config-conflict",
        )
    return chain
