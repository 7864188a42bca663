"""Made-up clinical notes: templates filled with Faker's people, and no patient's data."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from bract.errors import BractError

DEPARTMENTS = ("cardiology", "pneumology", "endocrinology", "orthopaedics", "psychiatry")

TAGS = ("other", "name", "place", "date", "number")
"""Labels of the words of a note."""

_TAG_OF = {
    "name": "name",
    "doctor": "name",
    "city": "place",
    "year": "date",
    "phone": "number",
    "dose": "number",
}
_FIELD = re.compile(r"{(\w+)}")
_WORD = re.compile(r"\w+|[^\w\s]")

_CONDITIONS = {
    "cardiology": ("chest pain", "hypertension", "atrial fibrillation"),
    "pneumology": ("asthma", "pneumonia", "shortness of breath"),
    "endocrinology": ("type 2 diabetes", "an underactive thyroid", "weight loss"),
    "orthopaedics": ("a broken wrist", "back pain", "a torn ligament"),
    "psychiatry": ("depression", "panic attacks", "insomnia"),
}
_DRUGS = {
    "cardiology": ("aspirin", "lisinopril", "bisoprolol"),
    "pneumology": ("salbutamol", "amoxicillin", "prednisone"),
    "endocrinology": ("metformin", "insulin", "levothyroxine"),
    "orthopaedics": ("ibuprofen", "paracetamol", "naproxen"),
    "psychiatry": ("sertraline", "mirtazapine", "lorazepam"),
}
_TEMPLATES = (
    "{name}, born {year}, of {city}, has {condition} and takes {dose} mg {drug}.",
    "Patient {name} ({phone}) was seen for {condition} by Dr. {doctor}.",
    "{name} from {city} reports {condition} since {year}; phone {phone}.",
    "Dr. {doctor} gave {name} {dose} mg of {drug} for {condition}.",
)


@dataclass(frozen=True)
class Note:
    """One note.

    Attributes
    ----------
    department
        Its number in `DEPARTMENTS`.
    words, tags
        The words and punctuation marks of the text in order, and the number of each one's tag in
        `TAGS`.
    """

    text: str
    department: int
    words: tuple[str, ...] = ()
    tags: tuple[int, ...] = ()


def clinical_notes(count: int, seed: int) -> list[Note]:
    """Return notes that depend on the seed and on Faker's version alone.

    Names, places and numbers are drawn by Faker (locale ``en_US``) and belong to nobody.
    """
    try:
        from faker import Faker
    except ImportError as error:
        raise BractError(
            "data.name 'clinical-notes' needs faker, which is not installed; "
            "pip install 'bract[text]'",
            code="package-missing",
        ) from error
    people = Faker("en_US")
    people.seed_instance(seed)
    draw = random.Random(seed)
    notes = []
    for _ in range(count):
        department = draw.randrange(len(DEPARTMENTS))
        name = DEPARTMENTS[department]
        template = draw.choice(_TEMPLATES)
        filled: dict[str, object] = {
            "name": people.name(),
            "doctor": people.last_name(),
            "city": people.city(),
            "phone": people.numerify("###-####"),
            "year": draw.randrange(1930, 2015),
            "dose": draw.randrange(5, 500),
            "condition": draw.choice(_CONDITIONS[name]),
            "drug": draw.choice(_DRUGS[name]),
        }
        words, tags = _tagged(template, filled)
        notes.append(Note(template.format(**filled), department, words, tags))
    return notes


def _tagged(template: str, filled: dict[str, object]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the words of a filled template, and the number of each one's tag."""
    words: list[str] = []
    tags: list[int] = []
    for place, part in enumerate(_FIELD.split(template)):
        tag = _TAG_OF.get(part, "other") if place % 2 else "other"
        found = _WORD.findall(str(filled[part]) if place % 2 else part)
        words += found
        tags += [TAGS.index(tag)] * len(found)
    return tuple(words), tuple(tags)
