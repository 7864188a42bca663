"""The mean updates that a masked run's server learns, and what one client takes off them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from bract.attacks.problem.global_models import joint_declaration
from bract.audit.captures import Capture, Captures
from bract.captures.aggregates import Aggregates, masked_name
from bract.captures.observation import Observation
from bract.config.client_names import AGGREGATE
from bract.errors import BractError, one_line
from bract.rundir import RunDirectory
from bract.updates.update import Tensors

MASKS = "masks"


class MaskedSums:
    """A server of masked sums, alone or together with one client.

    It holds each round's mean update in the clear, in every tier. A colluding client adds what it
    sent itself, which leaves the mean of the others.

    Parameters
    ----------
    run, captures
        The run; its ``aggregates/`` hold the means.
    own
        Folder in which the colluding client kept its truth, named after it, with its own shares of
        the sums; None where the server is alone.
    """

    def __init__(self, run: RunDirectory, captures: Captures, own: Path | None = None) -> None:
        self._captures, self._aggregates = captures, Aggregates(run.aggregates)
        self._weights = {
            row.round: {client: share.weight for client, share in row.clients.items()}
            for row in run.metrics()
        }
        self._own = own
        if own is not None and not any(own.glob("masked-*.safetensors")):
            raise BractError(
                f"{own}: holds no masked-NNNN.safetensors; of a masked run --key is the folder in "
                "which the colluding client kept its truth (truth-dir, or truth/CLIENT of the run)",
                code="truth-lacking",
            )

    def aggregates(self, rounds: Iterable[Sequence[Capture]]) -> list[Capture]:
        """Return a capture for each round whose mean is known.

        Parameters
        ----------
        rounds
            The clients' captures of each round.
        """
        found = []
        for captures in rounds:
            weights = self._weights.get(captures[0].round, {})
            summed = [
                c
                for c in captures
                if c.declaration.encryption == MASKS
                and c.client in weights
                and (self._own is None or c.client != self._own.name)
            ]
            if summed and captures[0].round <= self._aggregates.last:
                declaration = joint_declaration([c.declaration for c in summed])
                found.append(
                    Capture(
                        captures[0].round,
                        AGGREGATE,
                        replace(declaration, encryption="none"),
                        members=tuple(c.client for c in summed),
                    )
                )
        return found

    def aggregate(self, capture: Capture) -> Observation:
        """Return a round's mean update, of the members of the capture, as one observation.

        Raises
        ------
        BractError
            If the mean, or the colluding client's share of it, cannot be read.
        """
        sent = self._captures.load(self._captures.of_round(capture.round)[0])
        mean = self._mean(capture.round)
        wrong = [n for n in sent.parameters | sent.buffers if n not in mean]
        if wrong:
            raise BractError(
                f"{capture.key}: the round's mean lacks {', '.join(wrong[:5])}",
                code="capture-damaged",
            )
        return replace(
            sent,
            client=capture.client,
            declaration=capture.declaration,
            update={n: mean[n].to(v.dtype) for n, v in sent.parameters.items()},
            returned_buffers={n: (v - mean[n]).to(v.dtype) for n, v in sent.buffers.items()},
            ciphertexts={},
            provenance={"members": list(capture.members)},
        )

    def files(self, number: int) -> list[Path]:
        """Return the files that a round's mean is read from."""
        found = [] if self._own is None else [self._own / masked_name(number)]
        return [self._aggregates.path(number), *found]

    def _mean(self, number: int) -> Tensors:
        try:
            mean = self._aggregates.aggregate(number)
            if self._own is None:
                return mean
            path = self._own / masked_name(number)
            mine = load_file(path)
        except (OSError, SafetensorError) as error:
            raise BractError(
                f"round-{number:04d}/{AGGREGATE}: cannot be read ({one_line(error, 200)})",
                code="file-unreadable",
            ) from error
        share = float(self._weights.get(number, {}).get(self._own.name) or 0.0)
        if not 0.0 < share < 1.0:
            raise BractError(
                f"{path}: {self._own.name} has the weight {share:g} in round {number}; expected a "
                "share of the mean that leaves something of others",
                code="attack-unsuited",
            )
        return {n: (v - share * mine[n]) / (1.0 - share) for n, v in mean.items()}
