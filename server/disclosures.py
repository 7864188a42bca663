"""Rules that look at what left a site: small counts, labels, means by class, texts and names.

A rule sees the values, in the hook, while the reply is there. What is stored is its name and its
reason, a text of the rule's class that no value can enter. A package adds a rule in the group
``bract.disclosures``.
"""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from bract.errors import one_line
from bract.installed.plugins import PluginError, blaming
from bract.protocol.claims import claim_of
from bract.registry import Registry, named
from bract.schema.left import Flag
from bract.server.called import BETWEEN, is_file_or_address, is_person
from bract.server.parts import MOST_PARTS, NUMPY, Walk, numpy_array, parts_of
from bract.server.things import MOST_NUMBERS, About, Thing

_log = logging.getLogger(__name__)

SMALL = 10
"""Counts below this are flagged, as statistical offices suppress cells of tables."""

LONG = 64
"""Numbers from which on a list may hold values of single records."""


class DisclosureRule(ABC):
    """One rule about what a reply holds; it keeps no state.

    Attributes
    ----------
    name
        Its name in the registry.
    reason
        Why a thing is flagged, in one line: for people, and without any value.
    labels
        Whether what it flags holds or counts labels.
    states
        Whether it is shown arrays with the names and shapes of the model's in another record, too.
    """

    name: ClassVar[str]
    reason: ClassVar[str]
    labels: ClassVar[bool] = False
    states: ClassVar[bool] = False

    @abstractmethod
    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:
        """Return the things that this rule flags.

        Parameters
        ----------
        things
            All that one reply holds beside the model's arrays, and the parts of texts that are
            JSON and of bytes that are numpy's; a part is flagged for its whole.
        about
            What else is known of the reply.
        """


RULES: Registry[type[DisclosureRule]] = Registry(
    "disclosure rule", group="bract.disclosures", check=partial(named, DisclosureRule)
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COUNTED = _words(
    "examples example samples sample images patients patient subjects subject people persons "
    "records rows cases controls positives negatives support deaths events visits scans"
)
_COUNTING = _words("count counts cnt hist histogram frequency frequencies freq tally")
_CELLS = _words("tp fp tn fn confusion")
_SETS = _words("data dataset trainset testset valset cohort")
_NO_PEOPLE = _words(
    "epoch epochs step steps batch batches round rounds layer layers worker workers thread "
    "threads client clients node nodes device devices gpu gpus cpu param params parameter "
    "parameters retry retries version seed rank restart restarts iter iters iteration "
    "iterations bit bits dim dims dimension dimensions channel channels feature features "
    "process processes second seconds width height loss acc accuracy mean std var lr rate ratio "
    "id index partition token tokens"
)
_LABEL = _words("label labels class classes target targets diagnosis diagnoses category")
_SHARES = _COUNTING | _words(
    "dist distribution distributions prior priors prop props proportion proportions balance "
    "weights weight num n support share shares prevalence per"
)
_SCORES = _words(
    "acc accuracy accuracies recall precision f1 auc auroc loss losses iou dice sensitivity "
    "specificity score scores error errors"
)
_HISTORY = _words(
    "loss losses acc accuracy accuracies history histories curve lr lrs time times step steps "
    "epoch epochs grad grads gradient gradients norm norms roc thresholds threshold auc "
    "duration"
)
_MEANS = _words("mean means avg average averages")
_PROTOTYPES = _words(
    "proto protos prototype prototypes centroid centroids center centers centre centres"
)


def _whole(numbers: np.ndarray) -> bool:
    return bool(numbers.size and np.isfinite(numbers).all() and (numbers == np.rint(numbers)).all())


def _groups(things: Sequence[Thing]) -> Iterator[list[Thing]]:
    """Yield things of one record whose names differ in a number, or in their last or first word."""
    found: dict[tuple[str, str, str], list[Thing]] = defaultdict(list)
    for thing in things:
        name = thing.name
        pattern = re.sub(r"\d+", "#", name)
        if pattern != name:
            found[thing.source, thing.record, pattern].append(thing)
            continue
        first, cut, _ = name.replace("-", "_").replace(" ", "_").rpartition("_")
        if cut:
            found[thing.source, thing.record, f"{first}_*"].append(thing)
        _, cut, last = name.replace("-", "_").replace(" ", "_").partition("_")
        if cut:
            found[thing.source, thing.record, f"*_{last}"].append(thing)
    yield from (group for group in found.values() if len(group) > 1)


@RULES.register("small-count")
class SmallCount(DisclosureRule):
    """A count of people or examples below `SMALL`."""

    name = "small-count"
    reason = f"a count below {SMALL}: so few people can be singled out"

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:  # noqa: ARG002
        """Return counts, single or in a list, by their names and values."""
        for thing in things:
            numbers = thing.numbers
            if numbers is None or thing.dtype == "bool" or not self._counts(thing):
                continue
            if _whole(numbers) and ((numbers >= 1) & (numbers < SMALL)).any():
                yield thing

    @staticmethod
    def _counts(thing: Thing) -> bool:
        words = thing.own_words
        if words & _NO_PEOPLE:
            return False
        if "size" in words or "len" in words:
            return bool(words & _SETS)
        if words & _LABEL and not words & _COUNTING:
            return False
        return bool(words & (_COUNTED | _COUNTING | _CELLS))


@RULES.register("label-histogram")
class LabelHistogram(DisclosureRule):
    """How many examples a client has of each class, as counts or as shares."""

    name = "label-histogram"
    reason = "how many examples the site has of each class, or of each value of a column"
    labels = True

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:
        """Return lists and groups of numbers that are one number a class."""
        for thing in things:
            numbers = thing.numbers
            if numbers is None or len(thing.shape) > 1 or thing.dtype == "bool":
                continue
            if numbers.size > 1 and self._is_histogram(thing, numbers, about):
                yield thing
        for group in _groups(things):
            values = [t.numbers for t in group if t.shape == () and t.dtype in ("int", "float")]
            row = np.concatenate([v for v in values if v is not None] or [np.zeros(0)])
            if len(row) == len(group) and self._is_group(group, row, about):
                yield from group

    @staticmethod
    def _is_histogram(thing: Thing, numbers: np.ndarray, about: About) -> bool:
        if not np.isfinite(numbers).all() or (numbers < 0).any():
            return False
        words = thing.own_words
        if words & (_SCORES | _HISTORY):
            return False
        named_so = bool(thing.words & _LABEL and words & _SHARES) or bool(words & _COUNTING)
        if named_so and (_whole(numbers) or words & _SHARES):
            return True
        if len(numbers) not in about.classes:
            return False
        if _whole(numbers):
            return float(numbers.sum()) in about.examples
        shares = abs(float(numbers.sum()) - 1) < 1e-2 and len(numbers) > 2
        return shares and any(
            (np.abs(numbers * n - np.rint(numbers * n)) < 0.06).all() for n in about.examples
        )

    @staticmethod
    def _is_group(group: list[Thing], numbers: np.ndarray, about: About) -> bool:
        words = frozenset.intersection(*(t.words for t in group))
        if words & (_SCORES | _HISTORY | _NO_PEOPLE) or (numbers < 0).any():
            return False
        if _whole(numbers) and float(numbers.sum()) in about.examples:
            return True
        if not words & _LABEL:
            return False
        return _whole(numbers) or bool(words & _SHARES)


@RULES.register("labels")
class Labels(DisclosureRule):
    """Labels of single examples."""

    name = "labels"
    reason = "labels of single examples"
    labels = True
    states = True

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:  # noqa: ARG002
        """Return lists of whole numbers or texts under a name of labels."""
        names = _LABEL | {"y", "ys", "gt", "truth", "outcome", "outcomes"}
        others = _SHARES | _SCORES | _HISTORY | _MEANS | _PROTOTYPES | {"names", "idx", "map"}
        for thing in things:
            words = thing.record_words if thing.state else thing.own_words
            if not words & names or words & (others - {"n", "num", "per"}):
                continue
            numbers = thing.numbers
            # A bias that begins at 0 is whole, too.
            if thing.state and (numbers is None or (numbers == numbers[:1]).all()):
                continue
            if thing.kind == "texts" or (
                numbers is not None
                and _whole(numbers)
                and claim_of(thing.name) is None
                and (numbers.size > 1 or thing.own_words <= {"label", "y", "true", "diagnosis"})
            ):
                yield thing


@RULES.register("class-means")
class ClassMeans(DisclosureRule):
    """Means or prototypes of each class: pictures of what a client has."""

    name = "class-means"
    reason = "means or prototypes by class: what the site's examples of a class look like"
    labels = True
    states = True

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:
        """Return rows of numbers a class, in one list or array, or in one a class."""
        for thing in things:
            numbers = thing.numbers
            if numbers is None or numbers.size < 4 or thing.own_words & (_SCORES | _HISTORY):
                continue
            rows = [c for c in about.classes if numbers.size % c == 0 and numbers.size >= 2 * c]
            words = thing.record_words if thing.state else thing.words
            spoken = words & _PROTOTYPES or (words & _MEANS and words & _LABEL)
            fits = any(numbers.size // c in about.widths for c in rows)
            # Moments of an optimizer are means, and a network may be another's target.
            others = _FEATURES if thing.state else _MEANS | _LABEL | _FEATURES
            if spoken or (rows and fits and words & others):
                yield thing
        for group in _groups([t for t in things if t.shape and not (t.model or t.state)]):
            sizes = {int(np.prod(t.shape)) for t in group}
            words = frozenset.intersection(*(t.words for t in group))
            if len(sizes) != 1 or sizes == {1} or words & (_SCORES | _HISTORY):
                continue
            few = any(len(group) <= c for c in about.classes)
            if words & _PROTOTYPES or (few and words & (_MEANS | _LABEL | _FEATURES)):
                yield from group


_FEATURES = _words("feature features embedding embeddings anchor anchors logits")


@RULES.register("values")
class Values(DisclosureRule):
    """A long list of numbers, or one entry of any type an example: values of single records."""

    name = "values"
    reason = "one entry for each example, or a long list of numbers: may be values of records"

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:
        """Return lists as long as the examples, and long ones."""
        asked = about.message.partition(".")[0] == "query"
        for thing in things:
            size, words = thing.count, thing.own_words
            if not thing.entries:
                continue
            if thing.source == "arrays":
                if asked and size >= LONG:
                    yield thing
            elif words & (_COUNTING | _MEANS | _PROTOTYPES) and size <= MOST_NUMBERS:
                continue
            elif thing.entries & about.examples - about.classes:
                if not words & {"epoch", "epochs", "history", "curve", "step", "steps", "lr"}:
                    yield thing
            elif size >= LONG and not words & _HISTORY:
                yield thing


@RULES.register("other-array")
class OtherArray(DisclosureRule):
    """An array of no shape that the server sent: pictures, features, statistics of the data."""

    name = "other-array"
    reason = "an array of no shape that the server sent: may be values or features of records"

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:
        """Return arrays that are no such state of training as momentum, which has sent shapes."""
        for thing in things:
            if thing.source != "arrays" or thing.shape in about.shapes or not about.shapes:
                continue
            if thing.record == about.update:
                continue
            size = math.prod(thing.shape)
            rows = thing.shape[0] if len(thing.shape) > 1 else 0
            row = size > 1 and size in about.examples - about.classes
            if ((size >= LONG or row) and not thing.layer) or rows in about.examples:
                yield thing


_FILES = (
    *(b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"II*\x00", b"MM\x00*", b"\xff\x4f\xff\x51"),
    *(b"\x00\x00\x00\x0cjP  ", b"%PDF", b"PK\x03\x04", b"\x1f\x8b\x08", b"\x89HDF\r\n", b"PAR1"),
    *(b"ARROW1", b"FEA1", b"SQLite format 3", b"RIFF", b"OggS"),
)
"""How files of pictures, tables, sounds and archives begin."""

_WITHIN = ((128, b"DICM"), (344, b"n+1\x00"), (344, b"ni1\x00"), (4, b"n+2\x00"))
"""Names of formats of files that stand further in: of DICOM and NIfTI."""

_PICKLED = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))


@RULES.register("file")
class File(DisclosureRule):
    """Bytes in the format of a file, whose content no rule reads."""

    name = "file"
    reason = "bytes in the format of a file, such as a picture or a table: no rule read them"

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:  # noqa: ARG002
        """Return bytes by how they begin; two bytes are too few, as those of ciphertexts show."""
        for thing in things:
            held = thing.value if isinstance(thing.value, list) else [thing.value]
            if any(isinstance(v, bytes) and self._is_file(v) for v in held):
                yield thing

    @staticmethod
    def _is_file(value: bytes) -> bool:
        bitmap = value.startswith(b"BM") and int.from_bytes(value[2:6], "little") == len(value)
        pickled = value.startswith(_PICKLED) and value.endswith(b".")
        known = value.startswith(_FILES) or any(value.startswith(n, at) for at, n in _WITHIN)
        unread = value.startswith(NUMPY) and numpy_array(value) is None
        return len(value) >= LONG and (known or unread or bitmap or pickled)


_PEOPLE_KEYS = _words(
    "patient patients person people user users username subject subjects doctor physician nurse "
    "mrn ssn email mail phone address birth birthday dob surname firstname lastname fullname"
)
_FILE_KEYS = _words("file files filename filenames path paths folder folders dir")
_TECHNICAL = _words(
    "status state device optimizer optimiser optim model arch architecture version framework "
    "dtype scheduler loss criterion backend phase task split mode strategy algorithm client "
    "site node cid partition run experiment uuid hash digest sha checksum time timestamp date "
    "start end lib library python torch platform os type kind format schema config dataset "
    "activation metric metrics gpu cpu hardware precision method defense defence mechanism "
    "accountant fold"
)
_MACHINE = re.compile(
    r"(?:ok|okay|success|done|true|false|yes|no|none|null|nan|cpu|cuda(?::\d+)?|mps|train|test|"
    r"v?\d[\w.:+\-]*|[0-9a-fA-F\-]{8,64})",
    re.IGNORECASE,
)


@RULES.register("names")
class Names(DisclosureRule):
    """Names of people and of files."""

    name = "names"
    reason = "a name of a person or of a file, or an address"

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:  # noqa: ARG002
        """Return texts that look like names, or stand under a key of names."""
        for thing in things:
            if any(self._is_name(thing, text) for text in thing.texts):
                yield thing

    @staticmethod
    def _is_name(thing: Thing, text: str) -> bool:
        words = thing.own_words
        if any(map(is_file_or_address, BETWEEN.split(text))):
            return True
        if thing.source == "error":
            return False
        if words & (_PEOPLE_KEYS | _FILE_KEYS):
            return True
        return not words & _TECHNICAL and is_person(text.strip())


@RULES.register("text")
class Text(DisclosureRule):
    """A text that is no technical word."""

    name = "text"
    reason = "a text: it may say anything about people"

    def flagged(self, things: Sequence[Thing], about: About) -> Iterable[Thing]:
        """Return texts that `Names` leaves, but for short ones under a technical key."""
        taken = set(map(id, Names().flagged(things, about)))
        for thing in things:
            if thing.source == "error" or id(thing) in taken or thing.structure:
                continue
            if any(self._is_text(thing, text) for text in thing.texts):
                yield thing

    @staticmethod
    def _is_text(thing: Thing, text: str) -> bool:
        if _MACHINE.fullmatch(text.strip()):
            return False
        technical = thing.own_words & _TECHNICAL
        return not (technical and len(text) <= 64 and len(text.split()) < 5)


TOO_LARGE = Flag(rule="unread", reason="too large to read: what it holds was not all looked at")


def flags_of(things: Sequence[Thing], about: About) -> dict[int, list[Flag]]:
    """Return what all rules flag, by a thing's place; a faulty rule costs itself alone."""
    found: dict[int, list[Flag]] = defaultdict(list)
    parts: list[Thing] = []
    places: dict[int, int] = {}
    walk = Walk()
    for place, thing in enumerate(things):
        if thing.model:
            continue
        walk.cut = False
        held = list(parts_of(thing, walk))
        if walk.cut:
            found[place].append(TOO_LARGE)
        elif 1 < len(held) <= MOST_PARTS and isinstance(thing.value, str | bytes):
            held[0] = replace(thing, structure=True)
        parts += held
        places |= {id(part): place for part in held}
    plain = [part for part in parts if not part.state]
    for name in RULES:
        rule = RULES[name]
        try:
            with blaming(rule):
                hit = {
                    places[id(part)]
                    for part in rule().flagged(parts if rule.states else plain, about)
                }
                flag = Flag(rule=rule.name, reason=rule.reason, labels=rule.labels)
        except PluginError as error:
            _log.warning("a disclosure rule is left out of a reply: %s", one_line(error, 300))
            continue
        for place in sorted(hit):
            found[place].append(flag)
    return found
