"""The section ``capture``: what the server writes down of what it receives, where, and how much."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bract.config.client_names import check_name
from bract.config.sections import Fraction
from bract.config.work import Positive, Section
from bract.errors import BractError, shown

__all__ = ["URL", "CaptureConfig", "Compression", "Dtype", "bytes_of", "check_store"]

Dtype = Literal["float32", "float16", "bfloat16"]
Compression = Literal["none", "zstd"]

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:::|://).+")
"""What makes a store a place of fsspec's rather than a folder."""

_KINDS = (
    *("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "tos", "hdfs", "hf"),
    *("sftp", "ssh", "ftp", "smb", "webdav", "webhdfs", "http", "https", "memory", "file", "local"),
)
"""Kinds of URL that hold captures. fsspec knows others that run code: ``reference::`` renders
templates out of the file that it is pointed at."""

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{middle}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for middle, base in (("", 1000), ("i", 1024))
}


def bytes_of(value: Any) -> Any:
    """Read ``2GB``, ``500 MiB`` or a number of bytes; kB, MB, GB and TB are powers of 1000.

    Raises
    ------
    ValueError
        If a text is no such size.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", value)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ValueError(f"expected bytes, or a size such as 2GB or 500MiB, found {shown(value)}")
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def _name(name: str) -> str:
    try:
        return check_name(name)
    except BractError as error:
        raise ValueError(str(error)) from None


def check_store(url: str) -> None:
    """Refuse a URL that is no place for captures.

    Raises
    ------
    ValueError
        If it is of another kind than `_KINDS`, or one URL within another (``::``).
    """
    scheme, found, _ = url.partition("://")
    if not found or scheme.lower() not in _KINDS or "::" in url:
        raise ValueError(
            f"expected one URL that begins with one of {', '.join(_KINDS)}, such as "
            "s3://bucket/folder, and no `::` in it"
        )


def _url(text: str) -> str:
    if not URL.fullmatch(text) or not text.isprintable():
        raise ValueError(
            "expected a URL such as s3://bucket/folder; captures of a run lie in its folder "
            "`captures` where there is none"
        )
    check_store(text)
    if re.search(r"//[^/]*:[^/]*@|^https?://[^/]*@|[?#]", text):
        raise ValueError(
            "expected a URL without password, query and fragment: reports show the configuration; "
            "credentials stand where fsspec looks for them, such as the environment"
        )
    return text


Size = Annotated[
    int,
    Field(ge=1, le=10**18),
    BeforeValidator(bytes_of, json_schema_input_type=int | str),
]


class CaptureConfig(Section):
    """What the honest-but-curious server writes down of what it receives, and how much of it.

    A reply is captured where every key lets it: its round is one of ``rounds`` and every
    ``every``-th from the first, its client one of ``clients`` and drawn with probability
    ``fraction``, by the federation's seed, the round and the client's name alone.

    Attributes
    ----------
    store
        URL of fsspec's in place of the run's ``captures/``; the run's name is appended.
    dtype
        Of a float32 update on disk. ``float16`` and ``bfloat16`` halve it, and attacks lose
        precision.
    compression
        Of an update on disk, where it saves a twentieth at least.
    quota
        Most bytes of all captures; what would go beyond is listed in ``missed.jsonl``.
    keep_rounds
        Captured rounds that stay: an earlier one is removed when another begins.
    values
        Whether ``left.jsonl``, which lists everything that came from a client by name and size,
        holds the values of metrics and config, too.
    """

    enabled: bool = True
    store: Annotated[str, Field(max_length=1000), AfterValidator(_url)] | None = None
    rounds: list[Positive] | None = None
    every: Positive = 1
    clients: list[Annotated[str, AfterValidator(_name)]] | None = None
    fraction: Fraction = 1.0
    dtype: Dtype = "float32"
    compression: Compression = "none"
    quota: Size | None = None
    keep_rounds: Positive | None = None
    values: bool = False

    def place(self, run: str) -> str | None:
        """Return the URL for a run's captures; None if they are stored in the run's own folder."""
        return None if self.store is None else f"{self.store.rstrip('/')}/{run}"
