"""The global models of a run: those that captures hold, and those that were kept beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from bract.audit.captures import Captures
from bract.disk.named import check_file
from bract.errors import BractError, one_line, shown
from bract.rundir import RunDirectory
from bract.updates.update import Tensors


@dataclass(frozen=True)
class GlobalModels:
    """Finds the model after each round: in the next round's captures, or below ``models/``."""

    run: RunDirectory
    captures: Captures

    def files(self, number: int) -> list[Path]:
        """Return the files that hold the global model after a round; none where it was not kept."""
        later = self.captures.of_round(number + 1)
        if later:
            return later[0].files
        kept, broken = self._kept()
        found = [path for after, path in kept if after == number][:1]
        if not found and broken is not None:
            raise broken
        return found

    def after(self, number: int) -> Tensors:
        """Return the parameters and buffers after a round that `files` has files of."""
        later = self.captures.of_round(number + 1)
        if later:
            sent = self.captures.load(later[0])
            return sent.parameters | sent.buffers
        return read_model(self.files(number)[0])

    def final(self, named: Path | None = None) -> tuple[int, Path] | None:
        """Return after which round the final model is, and its file; None where none was kept.

        Parameters
        ----------
        named
            A file that the operator names; without it the latest below ``models/`` that is no
            older than the captures.

        Raises
        ------
        BractError
            If the named file cannot be read.
        """
        last = max((c.round for c in self.captures.index), default=0)
        if named is not None:
            try:
                number = round_of(named) if named.suffix == ".safetensors" else None
            except BractError as error:
                raise BractError(
                    f"{error}; restore the file, or name another model by --final",
                    code="file-unreadable",
                ) from error
            return last if number is None else number, named
        kept = [(number, path) for number, path in self._kept()[0] if number >= last]
        return max(kept, key=lambda pair: pair[0], default=None)

    def _kept(self) -> tuple[list[tuple[int, Path]], BractError | None]:
        """Return rounds and files below ``models/``, and why one of them cannot be read."""
        found, broken = [], None
        for path in sorted(self.run.models.glob("*.safetensors")):
            try:
                number = round_of(path)
            except BractError as error:
                broken = broken or BractError(
                    f"{error}, so whether it is the global model after the last captured round is "
                    "not known; restore the file, or move it out of models/ to go on without the "
                    "round that it ends",
                    code="file-unreadable",
                )
                continue
            if number is not None:
                found.append((number, path))
        return found, broken


def read_model(path: Path) -> Tensors:
    """Read a model's state: safetensors, or what ``torch.save(model.state_dict(), FILE)`` wrote.

    Raises
    ------
    BractError
        If it cannot be read, or holds something other than tensors by name.
    """
    try:
        check_file(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file raises whatever its bytes bring PyTorch's reader to.
    except Exception as error:
        raise BractError(
            f"{path}: cannot be read ({one_line(error, 300)}); expected a model's state, as "
            "safetensors or as torch.save(model.state_dict(), FILE) writes it",
            code="file-unreadable",
        ) from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise BractError(
            f"{path}: holds a {type(state).__name__}, expected tensors by name, as "
            "torch.save(model.state_dict(), FILE) writes them",
            code="file-unreadable",
        )
    for name, value in state.items():
        if value.layout != torch.strided or _bytes(value) > value.untyped_storage().nbytes():
            raise BractError(
                f"{path}: {shown(name)} is sparse, or larger than what the file holds of it; "
                "expected the tensors of model.state_dict()",
                code="file-unreadable",
            )
    return {str(name): value for name, value in state.items()}


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def round_of(path: Path) -> int | None:
    """Return after which round a model was kept; None where the file does not say.

    Raises
    ------
    BractError
        If the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            number = (file.metadata() or {}).get("round")
            return None if number is None else int(number)
    except (OSError, ValueError, SafetensorError) as error:
        raise BractError(
            f"{path}: cannot be read ({one_line(error, 300)})", code="file-unreadable"
        ) from error
