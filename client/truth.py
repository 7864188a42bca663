"""The client's training images, kept on its own disk to score an audit. They never leave it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import Tensor
from torch.nn.functional import one_hot

from bract.captures.aggregates import masked_name
from bract.client.candidates import examples_of, keep_candidates
from bract.client.private import warn_of_open_folders
from bract.disk.files import write_text
from bract.disk.permissions import make_private_folder
from bract.disk.tensor_files import write_tensors
from bract.errors import BractError, listed, one_line
from bract.inputs.base import content_bytes, joined, kept_examples, what_is_audited
from bract.installed.app_folder import app_folder
from bract.protocol.node_names import node_name
from bract.protocol.records import configured_round, stated_round
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)

_WARNED = "bract.nothing-is-kept"

_PASSES = "bract.passes"
"""Record of a client's state that counts passes over its data, where no message names a round."""

TRUTH_KEY = "truth-dir"
"""Node config key with the folder in which a client keeps its training images."""


def keep(
    trainloader: Iterable[Any],
    msg: Message | Mapping[str, Any] | None,
    context: Context,
    folder: Path | str | None = None,
    *,
    held_out: Iterable[Any] | None = None,
) -> Any:
    """Return ``trainloader`` as it is, but for keeping what it yields on this client's own disk.

    An audit is scored with it later: ``bract audit DIR --truth FOLDER``. Nothing is sent. The
    distinct inputs and labels of one round are written to
    ``FOLDER/RUN_ID/node-<id>/round-NNNN.safetensors`` (mode 0600) whenever a pass over the loader
    ends, until one pass is complete. Training goes on whatever happens here.

    With ``held_out`` an audit can also measure who was in it: records of the same site that were
    set apart at random before training and are never trained on, beside those that were, are kept
    in ``FOLDER/RUN_ID/node-<id>/candidates.safetensors``.

    Examples
    --------
    ::

        trainloader = keep(trainloader, msg, context, folder="/srv/site/truth")

    In Flower's older API, in ``client_fn(context)``, or in ``fit(self, parameters, config)``::

        trainloader = keep(trainloader, None, context, folder="/srv/site/truth")
        trainloader = keep(self.trainloader, config, self.context, folder="/srv/site/truth")

    Parameters
    ----------
    trainloader
        Yields batches: dictionaries, tuples or lists that hold model inputs, float
        ``(B, C, H, W)``, and labels, int64 ``(B,)``, several of 0 and 1, ``(B, classes)``, or
        numbers, float ``(B,)`` or ``(B, values)``;
        of a table float rows ``(B, features)`` and
        targets, ``(B,)`` or ``(B, 1)``; of texts dictionaries with ``input_ids`` ``(B, T)``,
        ``attention_mask`` and ``labels``, as transformers' collators make them.
    msg
        The message that Flower passed to the app, or the config of ``fit``, which names the round.
        Where it names none, as None does, rounds are counted by the passes that this client begins:
        give the config where a strategy does not train every client in every round.
    context
        The context that Flower passed to the app.
    folder
        Where to keep it; a relative folder is in the app's own (`bract.installed.app_folder`).
        None takes ``truth-dir`` of the node config, which is the site's to set; without either
        nothing is kept.
    held_out
        Loader of records that are not trained on; read once a run.
    """
    writer = writer_of(msg, context, folder, held_out=held_out)
    if writer is None:
        return trainloader
    writer.cure = "of a loader whose batches are changed before they enter the model, let "
    writer.cure += "bract.client.witness keep what enters it; "
    return _Kept(trainloader, writer)


def _outline(batch: Any) -> str:
    """Return in words what a batch holds: types and shapes, no values."""
    held = list(batch.values()) if isinstance(batch, Mapping) else batch
    parts = held if isinstance(held, list | tuple) else [held]
    said = [
        f"{str(part.dtype).removeprefix('torch.')} {'x'.join(map(str, part.shape)) or 'alone'}"
        if isinstance(part, Tensor)
        else type(part).__name__
        for part in parts
    ]
    return listed(said, 4)


class TruthWriter:
    """Writes down the distinct examples that one client trains on in one round.

    Parameters
    ----------
    folder
        The client's own.
    server_round
        None counts the passes that the client begins, in ``state``.
    held_out
        As in `keep`.
    """

    def __init__(
        self,
        folder: Path,
        server_round: int | None,
        *,
        run: int,
        state: RecordDict,
        held_out: Iterable[Any] | None = None,
    ) -> None:
        self.folder = folder
        self._held_out = held_out
        self._round, self._run = server_round, run
        self._state = state
        self._seen: dict[bytes, tuple[Tensor, Tensor]] = {}
        self._rows: dict[bytes, Tensor] = {}
        self._journal: list[tuple[bytes, tuple[Tensor, Tensor] | None, Tensor | None]] | None = None
        self.cure = ""

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def round(self) -> int:
        """Return the round; the first one where no message names it and no pass was begun."""
        return self._round or 1

    def begin(self) -> None:
        """Count a round where no message names it."""
        if self._round is None:
            held = self._state.config_records.get(_PASSES)
            count = held["count"] if held is not None else 0
            self._round = count + 1 if isinstance(count, int) else 1
            self._state[_PASSES] = ConfigRecord({"count": self._round})

    def remember(self, batch: Any) -> int | None:
        """Remember a batch's examples; return how many are new, None where no input knows it."""
        found = kept_examples(batch, self._label)
        if found is None:
            if _WARNED not in self._state:  # each message has a process of its own
                self._state[_WARNED] = ConfigRecord({"round": self._round or 0})
                _log.warning(
                    "nothing is kept to score an audit: a batch holds no inputs and labels of any "
                    "known input (found %s; images are floats, batch x channels x height x width, "
                    "with a class or numbers each); %s%s",
                    _outline(batch),
                    self.cure,
                    what_is_audited(),
                )
            return None
        before = len(self._seen)
        self._widen(found[1])
        for image, label in zip(*found, strict=True):
            key = content_bytes(image)
            if key not in self._seen:
                self._note(key)
                self._seen[key] = image, label
        return len(self._seen) - before

    def _widen(self, labels: Tensor) -> None:
        """Take classes for rows of 0 and 1, where later examples show that some have several."""
        held = self._label
        if held is None or held.dim() or held.is_floating_point() or labels.dim() != 2:
            return
        for key, (image, label) in self._seen.items():
            self._note(key)
            self._seen[key] = image, one_hot(label.long(), labels.shape[1]).float()

    def settle(self) -> None:
        """Begin to note what is remembered from now on, for `forget_unsettled`."""
        self._journal = []

    def forget_unsettled(self) -> None:
        """Forget what was remembered since `settle`."""
        for key, held, row in reversed(self._journal or ()):
            for known, value in ((self._seen, held), (self._rows, row)):
                if value is None:
                    known.pop(key, None)
                else:
                    known[key] = value  # type: ignore[assignment]
        self._journal = []

    def forget_all(self) -> None:
        """Forget every example."""
        self._seen.clear()
        self._rows.clear()
        self._journal = None if self._journal is None else []

    def _note(self, key: bytes) -> None:
        if self._journal is not None:
            self._journal.append((key, self._seen.get(key), self._rows.get(key)))

    def unknown(self, batch: Any) -> tuple[int, int]:
        """Return how many different examples of a batch are not remembered, and how many it has."""
        found = kept_examples(batch, self._label)
        given = set() if found is None else {content_bytes(one) for one in found[0]}
        return len(given - self._seen.keys()), len(given)

    @property
    def _label(self) -> Tensor | None:
        """Return the first example's label; None before it."""
        return next(iter(self._seen.values()))[1] if self._seen else None

    def soften(self, inputs: Tensor, rows: Tensor) -> None:
        """Take probabilities of classes as the targets of examples that are remembered.

        Parameters
        ----------
        inputs, rows
            Images as the model saw them, ``(B, C, H, W)``, and float32 ``(B, classes)``; of other
            inputs nothing is taken.
        """
        if inputs.dim() != 4:
            return
        for image, row in zip(inputs.detach().cpu().float(), rows.cpu(), strict=True):
            key = content_bytes(image.contiguous())
            if key in self._seen:
                self._note(key)
                self._rows[key] = row
                self._seen[key] = self._seen[key][0], row.argmax()

    def _targets(self) -> dict[str, Tensor]:
        """Return the targets where some are probabilities; one-hot rows of the others."""
        if not self._rows:
            return {}
        classes = len(next(iter(self._rows.values())))
        rows = [
            self._rows.get(key, one_hot(label.long(), classes).float())
            for key, (_, label) in self._seen.items()
        ]
        return {"targets": torch.stack(rows)}

    def write(self) -> None:
        """Write what was remembered; a failure is logged."""
        if not self._seen:
            return
        held = list(self._seen.values())
        try:
            # The audit, which knows the normalisation, computes the pixels of the inputs.
            tensors = {
                "inputs": joined([image[None] for image, _ in held]),
                "labels": joined([label[None] for _, label in held]),
                **self._targets(),
            }
            _save(self.folder, self.round, tensors)
            if self._held_out is not None:
                keep_candidates(
                    self.folder,
                    self._run,
                    self.round,
                    (tensors["inputs"], tensors["labels"]),
                    examples_of(self._held_out),
                    name="inputs",
                )
        except (OSError, RuntimeError, BractError) as error:
            _log.warning("not kept to score an audit: %s", one_line(error, 300))


def writer_of(
    msg: Message | Mapping[str, Any] | None,
    context: Context,
    folder: Path | str | None,
    *,
    held_out: Iterable[Any] | None = None,
) -> TruthWriter | None:
    """Return what writes truth for a client that consents; None for one that does not.

    Consent is the ``folder``, or `TRUTH_KEY` of the node config, which is the site's to set.
    """
    chosen = folder if folder is not None else context.node_config.get(TRUTH_KEY)
    if chosen is None:
        _log.info("nothing is kept to score an audit: no folder, and no %s", TRUTH_KEY)
        return None
    if msg is None:
        number = None
    else:
        number = configured_round(msg) if isinstance(msg, Mapping) else stated_round(msg)
    place = Path(str(chosen))
    try:
        place = place if place.is_absolute() else app_folder() / place
    except BractError as error:
        _log.warning("nothing is kept to score an audit: %s", error)
        return None
    warn_of_open_folders(context.state, place)
    home = place / str(context.run_id) / node_name(context.node_id)
    return TruthWriter(home, number, run=context.run_id, state=context.state, held_out=held_out)


class _Kept:
    """A loader that writes down the distinct examples of the first pass over it."""

    def __init__(self, loader: Iterable[Any], writer: TruthWriter) -> None:
        self._loader, self._writer = loader, writer
        self._done = False

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that has none yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getitem__(self, place: Any) -> Any:
        """Return an example of a data set, of which no pass is seen; nothing is kept of it."""
        if not self._done:
            self._done = True
            _log.warning(
                "nothing is kept to score an audit: keep was given a data set, whose examples are "
                "read one by one; give it the loader, or train inside bract.client.witness"
            )
        return self._loader[place]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        if self._done:
            yield from self._loader
            return
        self._writer.begin()
        try:
            for batch in self._loader:
                if not self._done:
                    self._done = self._writer.remember(batch) is None
                yield batch
            self._done = True
        finally:
            self._writer.write()


def save_truth(folder: Path, server_round: int, images: Tensor, labels: Tensor) -> Path:
    """Write the images and labels of one round's update.

    Parameters
    ----------
    images, labels
        float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``, in order of first use.
    """
    return _save(folder, server_round, {"images": images, "labels": labels})


def save_masked(folder: Path, server_round: int, update: Tensors) -> Path:
    """Write what this client's masked update adds to a round's mean, before its weight."""
    make_private_folder(folder)
    return write_tensors(folder / masked_name(server_round), update, private=True)


def _save(folder: Path, server_round: int, tensors: Mapping[str, Tensor]) -> Path:
    make_private_folder(folder)
    path = folder / f"round-{server_round:04d}.safetensors"
    return write_tensors(path, tensors)


def save_report(folder: Path, server_round: int, report: Mapping[str, float]) -> Path:
    """Write the defenses' measurements of one round's private update."""
    path = folder / f"round-{server_round:04d}.defense.json"
    return write_text(path, json.dumps(dict(report), indent=1))
