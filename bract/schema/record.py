"""Base classes of records: strict fields, a schema version, redaction, and strict JSON.

An unknown field is an error for writer and reader alike. A file of another schema version is
refused before its fields are read, naming both versions.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bract.errors import BractError, SchemaError, one_line, shown
from bract.parse.strict_json import dump_json, parse_json

MOST_BYTES = 1 << 28
"""Largest record that is read; a report of thousands of images takes a tenth of it."""


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
"""A float; NaN and infinity, which JSON does not have, become None."""


def _on_one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected text of one line without control characters")
    return text


Line = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_on_one_line)]
"""Text that is printed and may be another party's: one line, and no character that moves it."""


_T = TypeVar("_T")
_PUBLIC = object()

Public = Annotated[_T, _PUBLIC]
"""Marks a field that a redacted report may hold; every other field is reset to its default."""


class RecordError(BractError):
    """Content that is no such record; ``detail`` is the reason, without the file's name."""

    code = "file-damaged"

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(f"{source}: half-written or corrupted ({detail})")
        self.detail = detail


class Record(BaseModel):
    """Part of a file: an unknown field is an error, and no value changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    def to_dict(self) -> dict[str, Any]:
        """Return what is written: plain JSON values under the names that the file has."""
        return self.model_dump(mode="json", by_alias=True)

    def redact(self) -> Self:
        """Return a copy in which every field that is not `Public` has its default."""
        fields = type(self).model_fields
        return self.model_copy(
            update={
                name: _redacted(getattr(self, name))
                if is_public(type(self), name)
                else field.get_default(call_default_factory=True)
                for name, field in fields.items()
            }
        )

    @classmethod
    def parse(cls, content: object, *, source: str) -> Self:
        """Check decoded JSON; ``source`` is named in errors, with the first field that is wrong."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise RecordError(source, describe(error)) from error


class VersionedRecord(Record):
    """A whole file, or a line of one, with the schema version by which it was written.

    A subclass declares ``schema_version: Literal[N] = Field(default=N, alias="schema")``.
    """

    kind: ClassVar[str]
    """What the file is called in error messages."""

    remedy: ClassVar[str] = "use the bract version that wrote it, or run it again"
    """What to do with a file of another version."""

    earlier: ClassVar[tuple[int, ...]] = ()
    """Schema versions that are read, too; a file of one has no more than their fields."""

    schema_version: int = Field(default=0, alias="schema")

    @classmethod
    def version(cls) -> int:
        """Return the schema version that this class writes."""
        return int(cls.model_fields["schema_version"].default)

    @classmethod
    def parse(cls, content: object, *, source: str) -> Self:
        """Check decoded JSON of this version.

        Raises
        ------
        SchemaError
            If it is of another schema version, naming both, or right but for a field that is not
            known.
        RecordError
            If it is no such record.
        """
        if not isinstance(content, dict):
            raise RecordError(source, f"expected an object, found a {type(content).__name__}")
        found = content.get("schema")
        if found not in (cls.version(), *cls.earlier):
            version = "missing" if found is None else shown(found, 40)
            raise SchemaError(
                f"{source}: {cls.kind} schema {version}, this "
                f"version reads {cls.version()}; {cls.remedy}"
            )
        try:
            return super().parse(content, source=source)
        except RecordError as error:
            if (field := _unknown(error.__cause__)) is None:
                raise
            raise SchemaError(
                f"{source}: {cls.kind} holds {field}, which this version does not know: another "
                f"bract wrote it; {cls.remedy}"
            ) from error

    def to_text(self, *, ascii_only: bool = True) -> str:
        """Return the JSON text that `parse_text` reads, as `dump_json` has it.

        Raises
        ------
        BractError
            If `parse_text` would refuse it: written, it would end every later use of the file.
        """
        text = dump_json(self.to_dict(), ascii_only=ascii_only)
        try:
            self.parse_text(text, source=self.kind)
        except BractError as error:
            raise BractError(
                f"{one_line(error, 300)}: not written, since it could not be read again",
                code="write-failed",
            ) from error
        return text

    @classmethod
    def parse_text(cls, text: str | bytes, *, source: str) -> Self:
        """Check JSON text, as `parse` does."""
        try:
            content = parse_json(text, most=MOST_BYTES, constants=True)
        except BractError as error:
            raise RecordError(source, str(error)) from error
        return cls.parse(content, source=source)


def is_public(kind: type[Record], name: str) -> bool:
    """Return whether a redacted report may hold a field."""
    return _PUBLIC in kind.model_fields[name].metadata


def _redacted(value: Any) -> Any:
    if isinstance(value, Record):
        return value.redact()
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_redacted(item) for item in value)
    return value


def _unknown(error: BaseException | None) -> str | None:
    """Return the first field that is not known, where nothing else is wrong."""
    problems = error.errors() if isinstance(error, ValidationError) else []
    if not problems or any(one["type"] != "extra_forbidden" for one in problems):
        return None
    return one_line(".".join(map(str, problems[0]["loc"])), 100)


def describe(error: ValidationError) -> str:
    """Return the first problem in words: where it is, and what is wrong."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    text = f"{where}: {problem['msg']}" if where else problem["msg"]
    return one_line(text, 300)
