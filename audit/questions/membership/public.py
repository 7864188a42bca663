"""Reference models of an audit, trained on the public data that it has, if it has any."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks.membership import LocalModel, ModelView, Training, logits_of, train_references
from bract.audit.observations import Observations
from bract.captures.observation import ClientDeclaration
from bract.data.views import test_data
from bract.errors import BractError, one_line
from bract.seeds import derive_seed
from bract.updates.update import Tensors

REFERENCES = 4
"""Reference models."""

POPULATION = 500
"""Most public records that RMIA compares a candidate with."""


class PublicModels:
    """Reference models, and public records that none of them saw; trained once.

    Parameters
    ----------
    left_out
        Gets the reason where public data could not be used.
    """

    def __init__(self, seen: Observations, left_out: list[str]) -> None:
        self._seen, self._left_out = seen, left_out
        self._asked = False
        self.states: list[Tensors] = []
        self.inputs = torch.empty(0)
        self.labels = torch.empty(0, dtype=torch.int64)
        self.logits = torch.empty(0)

    def train(self, found: LocalModel, declaration: ClientDeclaration, rounds: int) -> None:
        """Train them from what was sent, as a client does in so many rounds; once in all."""
        data = self._seen.data
        if self._asked or data is None:
            return
        self._asked = True
        try:
            images, labels = test_data(data)
            if tuple(images.shape[1:]) != declaration.image_shape:
                raise BractError(
                    f"public images are {tuple(images.shape[1:])}, the client's "
                    f"{declaration.image_shape}",
                    code="data-shape",
                )
        except (BractError, OSError) as error:
            self._left_out.append(f"reference models: {one_line(error, 300)}")
            return
        seed = derive_seed(self._seen.request.seed, "reference models")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        half = len(order) // 2
        fitted, apart = order[:half], order[half : half + POPULATION]
        inputs = found.target.normalise(images)
        self.inputs, self.labels = inputs[apart], labels[apart]
        self.states = list(
            train_references(
                found.model,
                found.sent,
                inputs[fitted],
                labels[fitted],
                Training.declared(declaration, rounds),
                count=REFERENCES,
                seed=seed,
            )
        )
        self.logits = torch.stack([logits_of(found.model, s, self.inputs) for s in self.states])

    def of_model(self, own: LocalModel, inputs: Tensor, labels: Tensor) -> ModelView:
        """Return what a model, and the reference models beside it, make of candidates.

        Parameters
        ----------
        own
            Its ``local`` state is the model.
        inputs
            Normalised candidates ``(N, ...)``.
        """
        local = logits_of(own.model, own.local, inputs)
        none = local.new_empty(0, *local.shape)
        there = bool(self.states)
        return ModelView(
            kind=own.target.declaration.loss,
            labels=labels,
            local=local,
            references=torch.stack([logits_of(own.model, s, inputs) for s in self.states])
            if there
            else none,
            population=logits_of(own.model, own.local, self.inputs) if there else none,
            population_references=self.logits,
            population_labels=self.labels,
        )
