"""Complete a description from the captures and the model, and check that they go together.

Longer than most modules: each key is inferred, checked and refused in one place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bract.audit.captures import Capture, Captures, with_buffers, with_names
from bract.audit.description.explain import (
    LABELS,
    OPTIMIZERS,
    Explained,
    Labels,
    explain,
    is_as_initialised,
    likeliest_optimizer,
)
from bract.audit.description.facts import (
    CaptureFacts,
    batch_and_epochs,
    read_facts,
    read_tensors,
)
from bract.audit.description.normalisation import normalisation_of
from bract.audit.description.rows import guess_schema
from bract.audit.description.texts import text_schema_of
from bract.audit.truth import load_truth, truth_path
from bract.data.texts import tokenizer_of
from bract.defenses.entries import prepare_model
from bract.errors import BractError, listed, one_line
from bract.inputs import INPUTS
from bract.inputs.base import what_is_audited
from bract.models import create_model
from bract.models.autoencoder import Autoencoder
from bract.models.losses import RECONSTRUCTION, loss_of
from bract.models.third_party_texts import adapter_names, aliases_of, embedding_of
from bract.protocol.observation import ClientDeclaration, Observation
from bract.references import vouched
from bract.schema.description import AppDescription, build_description

SIDES = (32, 28, 64, 224, 8, 16, 48, 96, 128, 256, 24, 12, 14, 20, 40, 56, 80, 112, 160, 192, 299)
"""Sides of square images that are tried, the usual ones first."""

EXPLAINED = 4.0
"""Factor between captured and simulated size up to which a description explains an update: above
the largest simulated one, or below the smallest while the model is as it was initialised. A model
that has learnt its clients' data makes their updates smaller without any bound."""

DECISIVE = 1.15
"""Factor by which one optimizer's simulated updates must stray less than the other's."""

FEW_TENSORS = 4
"""Parameters below which how far they stray from each other says nothing of the optimizer."""

MOMENTUM = 0.9
"""The momentum, besides none, that may explain updates where nothing gives one."""

COMPARED = 4
"""Most captures whose update is compared with a simulated one: those of the fewest steps in the
first round, where a simulated client is most like a real one."""

_COLUMNS = "input.table.columns"
_RETURNED = {
    "classification": "{classes} classes",
    "token-classification": "{classes} log-probabilities of the labels of their tokens",
    "language-model": "their losses",
}
"""Key of the reason for a guessed schema."""

START = {"sgd": 0.05, "adam": 0.001}
"""Learning rates from which the captured one is inferred."""


@dataclass
class Findings:
    """What was found about a description.

    Attributes
    ----------
    description
        Completed, with the reasons of its guesses.
    confirmed
        What the captures bear out, in words.
    doubts
        What does not fit well and is no error, in words.
    """

    description: AppDescription
    confirmed: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def complete(
    captures: Captures, description: AppDescription, *, truth: Path | None = None
) -> Findings:
    """Fill in undeclared values, and check everything against the captures.

    The model is imported and run: `captures` must name it among its trusted models.

    Parameters
    ----------
    truth
        Folder of what clients kept, where they gave it: then the input is no guess.
    """
    work = _Work(captures, description)
    work.check_clients()
    if truth is not None:
        work.guess_schema(truth)
    work.choose_model()
    if truth is not None:
        work.read_truth(truth)
    work.choose_loss()
    work.choose_input()
    work.choose_norm_mode()
    work.choose_steps()
    work.choose_size()
    return Findings(work.description(), work.confirmed, work.doubts)


class _Work:
    """A description in the making."""

    def __init__(self, captures: Captures, description: AppDescription) -> None:
        self.captures = captures
        self.content: dict[str, Any] = description.model_dump(exclude_none=True)
        self.content.setdefault("guessed", {})
        self.given = description
        self.confirmed: list[str] = []
        self.doubts: list[str] = []
        self.facts = read_facts(captures.root)
        self.first = min(self.facts, key=lambda f: (f.capture.round, f.steps or 0))
        self.model: nn.Module = nn.Identity()
        self._normalisation_seen = False
        self._kept_texts: list[Tensor] = []

    def description(self) -> AppDescription:
        return build_description(self.content)

    def declaration(self, capture: Capture | None = None) -> ClientDeclaration:
        found = capture or self.first.capture
        return self.description().declare(found.declaration, found.client, found.round)

    def guess(self, section: str, key: str, value: Any, reason: str) -> None:
        """Write an undeclared value, and the reason for it."""
        target = self.content.setdefault(section, {}) if section else self.content
        target[key] = value
        self.content["guessed"][f"{section}.{key}" if section else key] = reason

    def observation(self, fact: CaptureFacts | None = None) -> Observation:
        found = (fact or self.first).capture
        observation = read_tensors(self.captures.root, found)
        observation = with_names(observation, self.content.get("names", {}))
        return with_buffers(observation, self.content.get("buffers", ()))

    # What is chosen, in order.

    def check_clients(self) -> None:
        captured = sorted({c.client for c in self.captures.index})
        if strange := sorted(set(self.given.clients) - set(captured)):
            raise BractError(
                f"bract.yaml: clients.{strange[0]}: no capture is of it; captured are "
                f"{one_line(', '.join(captured), 300)}"
            )

    def _name_adapters(self) -> None:
        """Find the model's names for adapters that were captured without their adapter's name."""
        captured = set(self.observation().parameters)
        names = adapter_names(self.model)
        found = {short: name for short, name in names.items() if short in captured}
        if found and not self.given.names:
            self.content["names"] = found

    def _guess_texts(self, model: nn.Module) -> bool:
        """Take the schema of undeclared texts from a model that begins with an embedding."""
        declared = self.declaration()
        embedding = embedding_of(model)
        if embedding is None or declared.text is not None or declared.table is not None:
            return False
        if self.given.input.kind not in (None, "text") or declared.input not in ("image", "text"):
            return False
        data = self.given.data
        named = data is not None and data.text is not None and data.text.tokenizer is not None
        schema, reasons = text_schema_of(
            model,
            embedding,
            self._kept_texts,
            self.observation().update,
            tokenizer_of(data) if data is not None and named else None,
        )
        self.content["input"] = {"kind": "text", "text": asdict(schema)}
        for key, reason in reasons.items():
            self.content["guessed"][f"input.text.{key}"] = reason
        return True

    def guess_schema(self, truth: Path) -> None:
        """Take the columns of undeclared rows from those that clients kept."""
        declared = self.declaration()
        if declared.table is not None or self.given.input.kind not in (None, "table", "text"):
            return
        kept = [c for f in self.facts if (c := self._kept(truth, f)) is not None]
        self._kept_texts = [c["inputs"] for c in kept if _are_texts(c["inputs"])]
        if declared.input == "text":
            return
        rows = [c["inputs"] for c in kept if c["inputs"].dim() == 2]
        if not rows or len(rows) < len(kept) or not all(r.is_floating_point() for r in rows):
            return
        schema = guess_schema(rows, [c["labels"] for c in kept], outputs=self._rows())
        reason = (
            f"{sum(map(len, rows))} rows that clients kept; name the columns, and give the ranges "
            "and means that are public"
        )
        self.content["input"] = {"table": asdict(schema)}
        self.content["guessed"][_COLUMNS] = reason

    def _kept(self, truth: Path, fact: CaptureFacts) -> dict[str, Tensor] | None:
        """Return inputs and labels ``(N, ...)`` of a capture's client, where it kept them."""
        from safetensors.torch import load_file

        path = truth_path(truth, fact.capture.client, fact.capture)
        content = load_file(path) if path.is_file() else {}
        inputs, labels = content.get("inputs"), content.get("labels")
        if inputs is None or labels is None or not len(inputs):
            return None
        of_tokens = _are_texts(inputs) and labels.shape == inputs.shape
        if labels.shape != (len(inputs),) and not of_tokens:
            return None
        return {"inputs": inputs, "labels": labels}

    def _choose_binary_loss(self, inputs: Tensor) -> None:
        """Take outputs that are all in [0, 1] as probabilities, of rows whose schema is a guess."""
        target = self.content["input"]["table"]["target"]
        if target["loss"] != "binary_cross_entropy_logits":
            return
        with torch.no_grad():
            outputs = self.model.eval()(inputs)
        self.model.train()
        if float(outputs.min()) >= 0.0 and float(outputs.max()) <= 1.0:
            target["loss"] = "binary_cross_entropy"

    def _take_schema(self) -> None:
        """Write the schema that the app declares alone: shape and statistics follow from it."""
        declared = self.declaration()
        for kind, schema in (("table", declared.table), ("text", declared.text)):
            taken = self.given.input.kind in (None, kind) and declared.image_shape is None
            if schema is not None and taken:
                section = self.content.setdefault("input", {})
                section |= {"kind": kind, kind: asdict(schema)}

    def _check_readable(self) -> None:
        declared = self.declaration()
        if reason := INPUTS[declared.input].declared(declared).unreadable(declared):
            raise BractError(f"bract.yaml: {reason}")

    def choose_model(self) -> None:
        self._take_schema()
        declared = self.declaration()
        if declared.input != "text" or declared.text is not None:
            self._check_readable()
        name = declared.model
        if name is None:
            raise BractError(
                "bract.yaml: model is not given and no capture declares it; give it as "
                "--model package.module:callable"
            )
        name = vouched(name, self.captures.models, what="the model", how=f"name it: --model {name}")
        classes = declared.classes or self._rows() or 10
        shape = declared.image_shape or (self._channels()[0], SIDES[0], SIDES[0])

        def made(declared: ClientDeclaration, shape: Sequence[int]) -> nn.Module:
            return create_model(
                name,
                classes=classes,
                channels=shape[0],
                image_size=shape[1],
                activation=declared.activation,
                table=declared.table,
                text=declared.text,
            )

        try:
            model = made(declared, shape)
            if self._guess_texts(model):
                declared = self.declaration()
                model = made(declared, declared.image_shape or shape)
        except BractError as error:
            if declared.text is None:
                raise
            raise BractError(f"bract.yaml: input.text: {error}") from None
        self._check_readable()
        self.model = prepare_model(model, declared.defenses)
        self._name_adapters()
        observation = self.observation()
        own = {n: tuple(v.shape) for n, v in self.model.named_parameters()}
        buffers = {n for n, _ in self.model.named_buffers()} | aliases_of(self.model)
        if taken := sorted(buffers & set(observation.parameters)):
            self.content["buffers"] = [*self.content.get("buffers", ()), *taken]
            observation = self.observation()
        found = {n: tuple(v.shape) for n, v in observation.parameters.items()}
        if problem := _mismatch(name, own, found):
            raise BractError(f"{observation.key}: {problem}")
        self.confirmed.append(
            f"{name} has the {len(own)} captured parameters "
            f"({sum(v.numel() for v in self.model.parameters()):,} values)"
        )

    def read_truth(self, truth: Path) -> None:
        """Take the shape of the input, and check the normalisation, by what clients kept."""
        from safetensors.torch import load_file

        paths = [truth_path(truth, f.capture.client, f.capture) for f in self.facts]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise BractError(
                f"{truth}: holds nothing of the captured clients; expected "
                f"{paths[0].relative_to(truth)} and the like"
            )
        content = load_file(path)
        declared = self.declaration()
        if declared.table is not None or declared.text is not None:
            self._read_rows(path, truth, paths)
            return
        kept = content.get("inputs", content.get("images"))
        if kept is None or kept.dim() != 4:
            raise BractError(f"{path}: holds no images; expected what bract.client.keep writes")
        shape = tuple(kept.shape[1:])
        if declared.image_shape is not None and declared.image_shape != shape:
            raise BractError(
                f"bract.yaml: input.shape is {list(declared.image_shape)}, the client kept inputs "
                f"of {list(shape)} ({path}); correct it"
            )
        self.content.setdefault("input", {})["shape"] = list(shape)
        if "inputs" not in content:
            return
        if self.declaration().mean is None:
            mean, std = normalisation_of(kept)
            reason = f"the kept inputs go from {float(kept.min()):.3g} to {float(kept.max()):.3g}"
            if mean is not None and std is not None:
                self.guess("input", "mean", mean, reason)
                self.guess("input", "std", std, reason)
        capture = next(f.capture for f, p in zip(self.facts, paths, strict=True) if p == path)
        self._check_pixels(path, kept, self.declaration(capture))
        self._normalisation_seen = True
        self.confirmed.append(f"inputs that clients kept are {_times(shape)} pixels in [0, 1]")
        if load_truth(truth, replace(capture, declaration=self.declaration(capture))) is None:
            raise BractError(f"{path}: cannot be used to score; see the warning above")

    def _read_rows(self, path: Path, truth: Path, paths: Sequence[Path]) -> None:
        """Check what a client kept of a table against the schema."""
        fact = next(f for f, p in zip(self.facts, paths, strict=True) if p == path)
        kept = self._kept(truth, fact)
        if kept is not None and _COLUMNS in self.content["guessed"]:
            self._choose_binary_loss(kept["inputs"])
        capture = fact.capture
        declared = self.declaration(capture)
        if load_truth(truth, replace(capture, declaration=declared)) is None:
            raise BractError(f"{path}: cannot be used to score; see the warning above")
        self._normalisation_seen = True
        noun = "rows" if declared.table is not None else "texts"
        kind = "table" if declared.table is not None else "text"
        self.confirmed.append(f"the {noun} that clients kept fit input.{kind}")

    def _check_pixels(self, path: Path, inputs: Tensor, declared: ClientDeclaration) -> None:
        from bract.inputs.image import on_steps, pixels_of

        try:
            pixels = pixels_of(inputs.float(), declared.mean, declared.std)
        except BractError as error:
            raise BractError(f"{path}: {error}") from None
        low, high = float(pixels.min()), float(pixels.max())
        if high - low < 0.5 and not on_steps(pixels):
            self.doubts.append(
                f"{path}: the pixels go from {low:.3g} to {high:.3g} only; if clients' pictures "
                "have more contrast than that, input.std is too small and every PSNR too high"
            )

    def choose_loss(self) -> None:
        """Take the model as an autoencoder where it is declared as one, or rebuilds its input."""
        declared = self.declaration()
        shape = declared.image_shape
        if declared.loss == RECONSTRUCTION:
            if shape is None:
                shape = next(filter(self._rebuilds, self._shapes()), None)
            if shape is None:
                raise BractError(
                    f"bract.yaml: loss is {RECONSTRUCTION}, and model {declared.model} rebuilds "
                    "none of the usual square images; give --set input.shape=[channels,height,"
                    "width]"
                )
        elif self.given.loss is not None or declared.table is not None or declared.text is not None:
            return
        else:
            shapes = [shape] if shape is not None else self._shapes()
            shape = None
            if not any(self._classifies(one) for one in shapes):
                shape = next(filter(self._rebuilds, shapes), None)
            if shape is None:
                return
            self.guess(
                "",
                "loss",
                RECONSTRUCTION,
                f"the model classifies no image, and rebuilds one of {_times(shape)}",
            )
        if declared.image_shape is None:
            reason = "of the usual sizes the model rebuilds this one"
            self.guess("input", "shape", list(shape), reason)
        self.model = Autoencoder(self.model, shape)
        self.content["classes"] = 1

    def _shapes(self) -> list[tuple[int, int, int]]:
        return [(channels, side, side) for channels in self._channels() for side in SIDES]

    def _classifies(self, shape: tuple[int, int, int]) -> bool:
        """Whether the model maps an image to classes, fewer than the values of the image."""
        outputs = self._outputs(shape)
        if isinstance(outputs, str):
            return False
        return outputs.dim() == 2 and outputs.shape[1] < math.prod(shape)

    def _rebuilds(self, shape: tuple[int, int, int]) -> bool:
        try:
            Autoencoder(self.model, shape)
        except BractError:
            return False
        return True

    def choose_input(self) -> None:
        declared = self.declaration()
        if declared.image_shape is not None:
            outputs = self._outputs(declared.image_shape)
            if isinstance(outputs, str):
                raise BractError(
                    f"bract.yaml: input.shape is {list(declared.image_shape)}, which model "
                    f"{declared.model} does not take: {self._first_layer() or outputs}"
                )
        else:
            outputs = self._infer_shape()
        shape = self.declaration().image_shape
        first = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
        if first is not None and shape is not None and first.in_channels != shape[0]:
            self.doubts.append(
                f"input.shape has {shape[0]} channels, the first convolution of model "
                f"{declared.model} takes {first.in_channels}"
            )
        if outputs.dim() != 2:
            raise BractError(
                f"model {declared.model} returns {_times(tuple(outputs.shape))} for two images, "
                "expected (2, classes) of a classifier, or two images of an autoencoder"
            )
        classes = int(outputs.shape[1])
        if declared.classes is not None and declared.classes != classes:
            raise BractError(
                f"bract.yaml: classes is {declared.classes}, model {declared.model} has {classes} "
                "outputs; correct it"
            )
        self.content["classes"] = classes
        self.confirmed.append(
            f"one forward pass: texts of {declared.text.length} tokens to "
            + _RETURNED[declared.text.task].format(classes=classes)
            if declared.text is not None
            else f"one forward pass: {_times(shape or ())} images to "
            + (f"{classes} classes" if loss_of(self.declaration().loss).labelled else "themselves")
        )
        self._doubt_dropout()
        if (
            declared.mean is None
            and self.declaration().mean is None
            and not self._normalisation_seen
        ):
            channels = shape[0] if shape else 1
            reason = "no capture shows it: pixels as they are, in [0, 1]"
            self.guess("input", "mean", [0.0] * channels, reason)
            self.guess("input", "std", [1.0] * channels, reason)
            self.doubts.append(
                "nothing says how the clients normalise their inputs; pixels in [0, 1] are taken "
                "as they are; correct input.mean and input.std if that is wrong"
            )

    def _doubt_dropout(self) -> None:
        """Say that a model of texts drops inputs at random, which no attack simulates."""
        rates = {m.p for m in self.model.modules() if isinstance(m, nn.Dropout) and m.p > 0.0}
        if self.declaration().text is not None and rates and self.given.training.dropout is None:
            self.doubts.append(
                f"the model drops {max(rates):.0%} of inputs at random where it trains; the masks "
                "are unknown, and attacks simulate it without: positions and order of tokens may "
                "not be found; declare training.dropout=0 if the clients train in evaluation mode"
            )

    def choose_norm_mode(self) -> None:
        counted = [f.steps for f in self.facts if f.steps is not None]
        if not counted:
            return
        if self.given.norm_mode is not None:
            if self.given.norm_mode == "train" and not any(counted):
                self.doubts.append(
                    "norm_mode is train, but no client's batch normalisation counted a batch: "
                    "eval fits the captures"
                )
            return
        self.content["norm_mode"] = "train" if any(counted) else "eval"
        self.confirmed.append(
            f"batch normalisation ran in {self.content['norm_mode']} mode, as its counters say"
        )

    def choose_steps(self) -> None:
        work = self.given.training
        counting = [f for f in self.facts if f.steps]
        declared = self.declaration()
        own = {name for name, w in self.given.clients.items() if w.local_steps or w.local_epochs}
        if declared.local_steps is not None and work.batch_size is None:
            work = work.model_copy(update={"batch_size": declared.batch_size})
        open_ones = [f for f in self.facts if self.declaration(f.capture).local_steps is None]
        if open_ones:
            common = [f for f in counting if f in open_ones]
            drops = [False, True] if work.drop_last is None else [work.drop_last]
            tried = {
                drop: batch_and_epochs(
                    common,
                    batch_size=work.batch_size,
                    epochs=work.local_epochs,
                    drop_last=drop,
                )
                for drop in drops
            }
            drop = next((drop for drop, pair in tried.items() if pair is not None), False)
            found = tried.get(drop)
            if found is not None:
                reason = "explains the batches that batch normalisation counted"
                if drop and work.drop_last is None:
                    self.guess("training", "drop_last", True, reason)
                for key, value in zip(("batch_size", "local_epochs"), found, strict=True):
                    if getattr(work, key) is None:
                        self.guess("training", key, value, reason)
            elif counting and not work.batch_size:
                self._steps_by_client(counting, own)
            else:
                self._conventional_steps()
        self._check_steps(counting)

    def _conventional_steps(self) -> None:
        work = self.given.training
        reason = "a convention; the captures do not say"
        if work.batch_size is None and self.declaration().batch_size is None:
            self.guess("training", "batch_size", 32, reason)
            self.doubts.append(
                "nothing declares the batch size; 32 is assumed: correct training.batch_size"
            )
        if work.local_epochs is None:
            self.guess("training", "local_epochs", 1, reason)
            self.doubts.append(
                "nothing declares the local epochs; one is assumed: correct training.local_epochs, "
                "or give training.local_steps"
            )

    def _steps_by_client(self, counting: Sequence[CaptureFacts], own: set[str]) -> None:
        """Write each client's own steps, where no batch size explains all of them."""
        epochs = self.given.training.local_epochs or 1
        reason = (
            f"its examples over the steps that batch normalisation counted, in {epochs} "
            f"epoch{'s' * (epochs > 1)}"
        )
        for fact in counting:
            client = fact.capture.client
            if client in own:
                continue
            section = self.content.setdefault("clients", {}).setdefault(client, {})
            section["local_steps"] = fact.steps
            if fact.examples and "batch_size" not in section:
                section["batch_size"] = -(-fact.examples * epochs // (fact.steps or 1))
                self.content["guessed"][f"clients.{client}.batch_size"] = reason

    def _check_steps(self, counting: Sequence[CaptureFacts]) -> None:
        wrong = []
        for fact in counting:
            planned = self.declaration(fact.capture).local_steps
            if planned is not None and planned != fact.steps:
                wrong.append((fact, planned))
        if wrong:
            fact, planned = wrong[0]
            more = f" ({len(wrong)} of {len(counting)} captures differ)" if len(wrong) > 1 else ""
            raise BractError(
                f"{fact.capture.key}: the description makes {planned} local steps of "
                f"{fact.examples} examples, its batch normalisation counted {fact.steps}{more}; "
                "correct training.batch_size, training.local_epochs or training.local_steps, or "
                f"describe the client: --set clients.{fact.capture.client}.local_steps={fact.steps}"
            )
        if counting:
            self.confirmed.append(
                f"the local steps of {len(counting)} captures are those that batch normalisation "
                "counted"
            )

    def choose_size(self) -> None:
        """Hold optimizer and learning rate against the size of the updates, or infer them."""
        work = self.given.training
        named = self.declaration()
        if named.defenses:
            self.doubts.append(
                "the updates are defended, so their size does not show the learning rate"
            )
            if named.lr is None:
                raise BractError(
                    "bract.yaml: training.lr is not given, and it does not show in defended "
                    "updates; give --set training.lr=RATE"
                )
            return
        chosen = self._compared()
        found = {name: self._explain(chosen, name) for name in OPTIMIZERS}
        best, advantage = likeliest_optimizer(found)
        decided = advantage >= DECISIVE and len(self.observation().update) >= FEW_TENSORS
        if work.optimizer is None:
            fitting = [n for n in OPTIMIZERS if named.lr and self._explains(chosen, n)]
            name = best if decided else "sgd"
            reason = "simulated updates look most like the captured ones"
            if len(fitting) == 1:
                name, reason = fitting[0], f"alone explains the updates' size with lr {named.lr:g}"
            elif not decided:
                reason = "a convention"
            self.guess("training", "optimizer", name, reason)
        elif work.optimizer not in OPTIMIZERS:
            self.doubts.append(
                f"optimizer {work.optimizer} is simulated by no attack: the update is matched as "
                "if it were a gradient"
            )
            return
        elif decided and work.optimizer != best:
            self.doubts.append(
                f"training.optimizer is {work.optimizer}, but the updates look like {best}'s "
                f"(their layers stray {advantage:.1f} times less from simulated ones)"
            )
        name = str(self.content["training"]["optimizer"])
        within = self._within(chosen, name)
        momentum = self._choose_momentum(within, named.lr)
        low, high = within[momentum]
        if named.lr is None:
            self._guess_rate(name, low, high, len(chosen))
            return
        # Above all explanations, or below them where nothing that was learnt makes updates small.
        small = high < 1 / EXPLAINED and is_as_initialised(self.model, self.observation())
        if low <= EXPLAINED and not small:
            off = max(low, 1 / high, 1.0)
            self.confirmed.append(
                f"a simulated client with {name}, lr {named.lr:g} explains the updates' size"
                + (f" (to a factor of {off:.1f})" if off <= EXPLAINED else ", after training")
            )
            return
        ratio = low if low > EXPLAINED else high
        rate = float(f"{named.lr * ratio:.1g}")
        self.doubts.append(
            f"the updates are {_times_as(ratio)} a simulated client's with lr {named.lr:g} and "
            f"momentum {momentum:g}: training.lr of about {rate:g} would explain them, or another "
            "number of local steps"
        )

    def _explains(self, chosen: Sequence[CaptureFacts], name: str) -> bool:
        """Whether an optimizer leads as far as the captured updates, with the known rate."""
        within = self._within(chosen, name).values()
        return any(low <= EXPLAINED and high >= 1 / EXPLAINED for low, high in within)

    def _within(
        self, chosen: Sequence[CaptureFacts], name: str
    ) -> dict[float, tuple[float, float]]:
        """Return the least and largest captured over simulated size, by momentum.

        Relative to the declared learning rate, or to the one to begin with (`START`).
        """
        steps = max(self.declaration(fact.capture).local_steps or 1 for fact in chosen)
        declared = self.declaration().momentum
        tried = [declared]
        if name == "sgd" and self._momentum_open and steps > 1:
            tried = [0.0, MOMENTUM]
        found = {}
        for momentum in tried:
            factors = []
            for labels in LABELS:
                each = self._explain(chosen, name, labels=labels, momentum=momentum)
                factors.append(median(one.factor for one in each))
            rate = self.declaration().lr
            scale = START[name] / rate if rate else 1.0
            found[momentum] = (min(factors) * scale, max(factors) * scale)
        return found

    @property
    def _momentum_open(self) -> bool:
        """Whether neither a person nor a train message gives the momentum."""
        return self.given.training.momentum is None and not self.declaration().momentum

    def _choose_momentum(
        self, within: dict[float, tuple[float, float]], rate: float | None
    ) -> float:
        """Return the momentum, which is a guess where nothing gives it and it matters."""
        if len(within) == 1:
            return next(iter(within))
        chosen, reason = 0.0, "a convention; the captures do not say"
        if rate is not None and within[0.0][0] > EXPLAINED >= within[MOMENTUM][0]:
            chosen, reason = MOMENTUM, f"explains the updates' size with lr {rate:g}; 0 does not"
        self.guess("training", "momentum", chosen, reason)
        return chosen

    def _guess_rate(self, name: str, low: float, high: float, compared: int) -> None:
        rate = float(f"{START[name] * math.sqrt(low * high):.1g}")
        self.guess(
            "training",
            "lr",
            rate,
            f"the size of {compared} updates compared with simulated ones; good to a factor of "
            f"{EXPLAINED * math.sqrt(high / low):.1g}",
        )

    def _compared(self) -> list[CaptureFacts]:
        def order(fact: CaptureFacts) -> tuple[int, int]:
            return fact.capture.round, self.declaration(fact.capture).local_steps or 1

        fewest = min(map(order, self.facts))
        return [f for f in self.facts if order(f) == fewest][:COMPARED]

    def _explain(
        self,
        chosen: Sequence[CaptureFacts],
        name: str,
        *,
        labels: Labels = "mixed",
        momentum: float | None = None,
    ) -> list[Explained]:
        """Compare captures with simulated clients; factors are relative to `START`."""
        found = []
        for fact in chosen:
            declared = self.declaration(fact.capture)
            lr = declared.lr if declared.lr and declared.optimizer == name else START[name]
            simulated = replace(declared, optimizer=name, lr=lr)
            if name != "sgd":
                simulated = replace(simulated, momentum=0.0)
            elif momentum is not None:
                simulated = replace(simulated, momentum=momentum)
            one = explain(self.model, self.observation(fact), simulated, labels=labels)
            found.append(Explained(one.factor * lr / START[name], one.spread))
        return found

    # What the captured tensors say.

    def _rows(self) -> int | None:
        """Rows of the last matrix: the number of classes."""
        matrices = [v for v in self.observation().parameters.values() if v.dim() == 2]
        return int(matrices[-1].shape[0]) if matrices else None

    def _channels(self) -> list[int]:
        first = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
        if first is not None:
            return [first.in_channels]
        kernels = [v for v in self.observation().parameters.values() if v.dim() == 4]
        return [int(kernels[0].shape[1])] if kernels else [1, 3]

    def _infer_shape(self) -> Tensor:
        tried: dict[tuple[int, int, int], Tensor] = {}
        reasons = []
        for shape in self._shapes():
            outputs = self._outputs(shape)
            if isinstance(outputs, str):
                reasons.append(outputs)
            elif outputs.dim() != 2:
                reasons.append(f"it returns {_times(tuple(outputs.shape))} for two images")
            else:
                tried[shape] = outputs
        if not tried:
            raise BractError(
                f"model {self.declaration().model} takes none of the usual square images: "
                f"{self._first_layer() or listed(dict.fromkeys(reasons), most=1)}; "
                f"{what_is_audited()}; give --set input.shape=[channels,height,width] for images "
                "of another size, and declare another input in the app: "
                'HonestButCurious(..., declaration={"input": ...})'
            )
        shape = next(iter(tried))
        others = [_times(other) for other in list(tried)[1:4]]
        reason = "the only usual size that the model takes"
        if others:
            reason = f"the model takes it, and {', '.join(others)} as well"
            self.doubts.append(
                f"input {_times(shape)} is a guess: {reason}; correct input.shape if it is another"
            )
        self.guess("input", "shape", list(shape), reason)
        return tried[shape]

    def _first_layer(self) -> str | None:
        """Return why the model's first layer takes no images; None where it does not show."""
        first = next((m for m in self.model.modules() if list(m.parameters(recurse=False))), None)
        if isinstance(first, nn.Embedding | nn.EmbeddingBag):
            return "it begins with an embedding, so its inputs are token ids"
        sides = [side for side in SIDES for c in (1, 3) if c * side * side == _wide(first)]
        if sides:
            return (
                f"it begins with a linear layer of {_wide(first)} inputs, {sides[0]}×{sides[0]} "
                "pixels; name a callable that makes it with nn.Flatten before it if it classifies "
                "them, and one whose forward returns the reconstruction if it is an autoencoder"
            )
        if isinstance(first, nn.Linear):
            return (
                f"it begins with a linear layer of {first.in_features} inputs, which is no usual "
                "image: rows of a table, perhaps"
            )
        return None

    def _outputs(self, shape: tuple[int, int, int]) -> Tensor | str:
        """Run the model once on two grey images; return what it says, or why it does not."""
        kept = {name: value.clone() for name, value in self.model.named_buffers()}
        training = self.model.training
        self.model.eval()
        try:
            text = self.declaration().text
            inputs = torch.full((2, *shape), 0.5)
            if text is not None:
                other = next(i for i in range(text.vocabulary) if i != text.padding)
                inputs = torch.full((2, text.length), other)
            with torch.no_grad():
                found = self.model(inputs)
        except Exception as error:  # noqa: BLE001 - a third-party model may raise anything
            return f"{type(error).__name__}: {one_line(str(error).splitlines()[0], 200)}"
        finally:
            self.model.train(training)
            with torch.no_grad():
                for name, value in self.model.named_buffers():
                    value.copy_(kept[name])
        return found if isinstance(found, Tensor) else f"it returns a {type(found).__name__}"


def _are_texts(inputs: Tensor) -> bool:
    return inputs.dim() == 2 and inputs.dtype == torch.int64


def _wide(layer: nn.Module | None) -> int | None:
    return layer.in_features if isinstance(layer, nn.Linear) else None


def _mismatch(
    name: str, own: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> str | None:
    if found and all(key.isdigit() for key in found):
        return (
            "its arrays have numbers for names, so which belongs to which layer is open; send "
            "ArrayRecord(model.state_dict())"
        )
    lacking, strange = sorted(set(own) - set(found)), sorted(set(found) - set(own))
    prefixes = {key.removesuffix(name) for key in found for name in lacking if key.endswith(name)}
    if lacking and len(prefixes) == 1:
        return (
            f"its names begin with {min(prefixes)!r}, those of model {name} do not; name a "
            "callable that makes the model as the clients wrap it"
        )
    if lacking:
        return (
            f"model {name} has {', '.join(lacking[:3])}, which the capture lacks"
            f"{_and_strange(strange)}; name the model that the clients trained"
        )
    if strange:
        return (
            f"it holds {', '.join(strange[:3])}, which model {name} lacks; name the model that "
            "the clients trained"
        )
    for key, shape in own.items():
        if found[key] != shape:
            return (
                f"{key} was captured as {_times(found[key])}, model {name} has {_times(shape)}; "
                "name the model that the clients trained"
            )
    return None


def _and_strange(names: Sequence[str]) -> str:
    return f" (it holds {', '.join(names[:3])} instead)" if names else ""


def _times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _times_as(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio >= 1 else f"1/{1 / ratio:.3g} of"
