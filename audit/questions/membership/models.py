"""Score candidates by the global models, which every client, or the public, holds in the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bract.attacks.membership import (
    MEMBERSHIP,
    LocalModel,
    ModelAttacker,
    ModelView,
    Training,
    global_model,
    logits_of,
    parts,
    train_shadow,
)
from bract.attacks.membership.measuring import coefficients, gradients_on_the_way
from bract.audit.captures import Capture
from bract.audit.global_models import GlobalModels, read_model
from bract.audit.observations import Observations
from bract.audit.questions.membership.candidates import Candidates, pool
from bract.audit.questions.membership.public import PublicModels
from bract.audit.questions.membership.rounds import Scored, round_view, without_shadows
from bract.audit.questions.membership.score import Array
from bract.captures.observation import Observation
from bract.errors import BractError, one_line
from bract.schema.membership import Observer
from bract.seeds import derive_seed
from bract.updates.update import Tensors

SHADOWS = 16
"""Shadow models of a small model."""

FEWER_SHADOWS = 6
"""Of one with more than `LARGE` parameters."""

LARGE = 2_000_000


class ModelScorer:
    """Scores every client's candidates by the global models alone, without any upload.

    ``client`` sees all of them, and takes the difference of two that follow each other for the
    update of the whole federation. ``public`` sees the final one. Neither reads an update, so a
    defense or a cipher on the way to the server changes nothing here.

    Parameters
    ----------
    candidates
        By client.
    public
        Reference models; they are trained here where no upload could be read.
    over_budget
        Tells whether the request's time is spent.

    Attributes
    ----------
    left_out
        What could not be used, and why.
    shadows
        How many shadow models were trained.
    """

    def __init__(
        self,
        seen: Observations,
        candidates: Mapping[str, Candidates],
        public: PublicModels,
        over_budget: Callable[[], bool],
    ) -> None:
        self._seen, self._public, self._over_budget = seen, public, over_budget
        self._models = GlobalModels(seen.run, seen.captures)
        self._candidates, owners = pool(candidates)
        self._owners = np.array(owners)
        self.left_out: list[str] = []
        self.shadows = 0

    def of_client(self, client: str) -> Candidates:
        """Return the candidates of a client that are scored here."""
        return self._candidates.take(torch.from_numpy(self._owners == client))

    def score(self, captures: Sequence[Capture]) -> dict[Observer, dict[str, Scored]]:
        """Return what was scored, by observer and client.

        Parameters
        ----------
        captures
            Of single clients; their rounds are those of which a curious client looks at the models.
        """
        flat = sorted(
            {c.key: c for one in captures for c in one.rounds if not c.members}.values(),
            key=lambda c: (c.round, c.client),
        )
        found: dict[Observer, dict[str, Scored]] = {}
        if not flat:
            return found
        steps: tuple[tuple[Observer, Callable[[Sequence[Capture]], dict[int, LocalModel]]], ...]
        steps = (("client", self._followed), ("public", self._final))
        for observer, open_models in steps:
            try:
                rounds = open_models(flat)
                scores = {n: self._of_round(observer, m, flat) for n, m in rounds.items()}
            except (BractError, RuntimeError, ValueError) as error:
                self.left_out.append(f"global models, {observer}: {one_line(error, 300)}")
                continue
            found[observer] = self._split(scores)
        return {observer: scored for observer, scored in found.items() if scored}

    def _split(self, scores: Mapping[int, Mapping[str, Array]]) -> dict[str, Scored]:
        """Return the scores of each client's own candidates."""
        attackers = {name: MEMBERSHIP[name]() for name in MEMBERSHIP}
        found = {}
        for client in dict.fromkeys(self._owners.tolist()):
            mine = self._owners == client
            one = Scored(np.zeros(0, dtype=bool))
            for number, by_name in scores.items():
                finite = {n: v[mine] for n, v in by_name.items() if np.isfinite(v).all()}
                if finite:
                    one.rounds[number] = finite
            if one.rounds:
                one.join(self.of_client(client), attackers)
                if one.judged:
                    found[client] = one
        return found

    def _followed(self, captures: Sequence[Capture]) -> dict[int, LocalModel]:
        """Return the rounds of the federation of which both global models are known."""
        found: dict[int, LocalModel] = {}
        for number in sorted({c.round for c in captures}):
            if found and self._over_budget():
                self.left_out.append(f"global model after round {number}: no time was left")
                break
            if self._models.files(number):
                found[number] = global_model(self._sent(captures, number), self._after(number))
        return found

    def _final(self, captures: Sequence[Capture]) -> dict[int, LocalModel]:
        """Return the final model, beside the one that the first round began with."""
        final = self._models.final(self._seen.request.final)
        if final is None:
            self.left_out.append(
                "the final model: not kept below models/; name its file: "
                "bract audit RUN --final FILE"
            )
            return {}
        number, path = final
        first = self._sent(captures, captures[0].round)
        return {number: global_model(first, read_model(path))}

    def _sent(self, captures: Sequence[Capture], number: int) -> Observation:
        """Return an observation of a round, for the global model that every client received."""
        return self._seen.captures.load(next(c for c in captures if c.round == number))

    def _after(self, number: int) -> dict[str, Tensor]:
        return dict(self._models.after(number))

    def _of_round(
        self, observer: Observer, own: LocalModel, captures: Sequence[Capture]
    ) -> dict[str, Array]:
        """Return the scores of all clients' candidates, by attacker."""
        candidates = self._candidates
        inputs, labels = own.target.normalise(candidates.images), candidates.labels
        rounds = len({c.round for c in captures})
        self._public.train(own, captures[0].declaration, rounds)
        if observer == "client":
            rows, update = gradients_on_the_way(own, inputs, labels, seed=self._seen.request.seed)
            seen = round_view(own, [], candidates, coefficients(rows, update), self._public)
            each = [MEMBERSHIP[name]() for name in without_shadows()]
            return {a.name: a.score(seen).numpy() for a in each if a.lacks(seen) is None}
        view = self._public.of_model(own, inputs, labels)
        view = view.beside(*self._train_shadows(own, inputs, labels, captures))
        return self._of_final(view)

    def _of_final(self, view: ModelView) -> dict[str, Array]:
        """Return the scores of all candidates by every attacker that reads one model."""
        found = {}
        for attacker in (MEMBERSHIP[name]() for name in MEMBERSHIP):
            if not isinstance(attacker, ModelAttacker):
                continue
            lacking = attacker.lacks(view)
            if lacking is None:
                found[attacker.name] = attacker.score(view).numpy()
            else:
                self.left_out.append(f"final model, {attacker.name}: not run, it needs {lacking}")
        return found

    def _train_shadows(
        self, own: LocalModel, inputs: Tensor, labels: Tensor, captures: Sequence[Capture]
    ) -> tuple[Tensor, Tensor]:
        """Train shadow federations; return their outputs ``(S, N, classes)``, and who is inside."""
        first = captures[0].round
        size = sum(value.numel() for value in own.update.values())
        seed = derive_seed(self._seen.request.seed, "shadow models")
        trained = sum(c.declaration.num_examples or 0 for c in captures if c.round == first)
        inside = parts(
            len(labels),
            FEWER_SHADOWS if size > LARGE else SHADOWS,
            share=trained / len(labels) or 0.5,
            seed=seed,
        )
        rounds = len({c.round for c in captures})
        # Batch normalisation keeps its statistics in training: those of the model under attack.
        start = own.local | {name: own.sent[name] for name in own.update}
        clients = dict.fromkeys(self._owners.tolist())
        outputs: list[Tensor] = []
        for number, chosen in enumerate(inside):
            if self._over_budget():
                self.left_out.append(f"shadow models: {number} of {len(inside)}, no time was left")
                break
            sites = [
                torch.from_numpy(self._owners == client).logical_and(chosen).nonzero()[:, 0]
                for client in clients
            ]
            state = train_shadow(
                own.model,
                start,
                inputs,
                labels,
                sites,
                Training.declared(captures[0].declaration, 1),
                rounds=rounds,
                seed=derive_seed(seed, number),
            )
            outputs.append(self._outputs(own, state, inputs))
        self.shadows = len(outputs)
        none = torch.empty(0, len(labels))
        return (torch.stack(outputs) if outputs else none), inside[: len(outputs)]

    def _outputs(self, own: LocalModel, state: Tensors, inputs: Tensor) -> Tensor:
        """Return the outputs of one shadow model, which is not kept."""
        return logits_of(own.model, state, inputs)
