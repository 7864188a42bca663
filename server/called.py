"""Forms in which people, files and addresses are named in a text."""

from __future__ import annotations

import re

_ENDINGS = tuple(
    f".{ending}"
    for ending in str.split(
        "dcm png jpg jpeg bmp tif tiff nii nii.gz mha svs csv tsv xls xlsx parquet pdf doc docx "
        "txt npy npz h5 hdf5 edf wav mp3 flac mp4 vcf bam fastq sqlite db"
    )
)
BETWEEN = re.compile(r"[\s'\"()\[\]{}<>=,;|]+")
"""What stands between words, one of which may be a file's name or an address."""

_LETTERS = str.maketrans("", "", "-'’")
_LONGEST_NAME = 80
_MOST_NAMES = 6


def is_file_or_address(word: str) -> bool:
    """Return whether a word is a file's name, a path or an address; time grows with its length."""
    word = word.strip(".:!?")
    user, at, host = word.partition("@")
    if at and user and "." in host.strip("."):
        return True
    if word.startswith("~/") or word[1:3] == ":\\" or (word[:1] == "/" and word.count("/") > 1):
        return True
    return any(word.lower().endswith(e) and len(word) > len(e) for e in _ENDINGS)


def is_person(text: str) -> bool:
    """Return whether a text is a person's name: as people write it, or as DICOM does."""
    if len(text) > _LONGEST_NAME:
        return False
    family, caret, given = text.partition("^")
    if caret:
        return len(family) > 1 and family.isupper() and given.replace("^", "").isupper()
    words = text.replace(",", " ").split()
    if not 2 <= len(words) <= _MOST_NAMES:
        return False
    between = (w for w in words[1:-1] if not (len(w.rstrip(".")) == 1 or _is_particle(w)))
    return all(map(_is_capitalised, (words[0], words[-1], *between)))


def _is_particle(word: str) -> bool:
    return word.isalpha() and word.islower() and len(word) <= 3


def _is_capitalised(word: str) -> bool:
    letters = word.translate(_LETTERS)
    return len(letters) > 1 and letters.isalpha() and letters[0].isupper() and letters[-1].islower()
