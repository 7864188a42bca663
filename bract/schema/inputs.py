"""What an input is to records and pages: its words and its scores, without its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from bract.registry import Outlines


@dataclass(frozen=True)
class PrimaryScore:
    """The score by which reconstructions of an input are compared.

    Attributes
    ----------
    name
        In words, as a page shows it after "mean".
    value
        Field of `bract.schema.audit.Scores` that holds it.
    unit
        ``%`` where a page shows a share as per cent; empty for a plain number.
    better
        Whether ``higher`` or ``lower`` values are nearer to the original.
    """

    name: str
    value: str
    unit: Literal["", "%"] = ""
    better: Literal["higher", "lower"] = "higher"


class InputOutline:
    """What records and pages need of one kind of input; `bract.inputs.Input` extends it.

    Attributes
    ----------
    name
        The name in configurations (``data.input``), in declarations and in ``bract.yaml``.
    noun
        What one example is called on a page, in the singular.
    primary
        The score by which its reconstructions are compared.
    columns
        Further scores that a page has columns for: ``ssim``, ``psnr``, ``mse``, ``lpips``,
        ``nrmse``.
    withheld
        Whether pages leave its examples out unless they are asked to show them.
    """

    name: ClassVar[str]
    noun: ClassVar[str] = "example"
    primary: ClassVar[PrimaryScore] = PrimaryScore("share of features right", "features", "%")
    columns: ClassVar[tuple[str, ...]] = ()
    withheld: ClassVar[bool] = False


class ImageOutline(InputOutline):
    """Images."""

    name = "image"
    noun = "image"
    primary = PrimaryScore("SSIM", "ssim")
    columns = ("ssim", "psnr", "mse", "lpips")


class TableOutline(InputOutline):
    """Rows of a table."""

    name = "table"
    noun = "row"


class TextOutline(InputOutline):
    """Texts."""

    name = "text"
    noun = "text"
    primary = PrimaryScore("share of tokens recovered", "features", "%")
    withheld = True


class SignalOutline(InputOutline):
    """Values over time in one or more channels."""

    name = "signal"
    noun = "signal"
    primary = PrimaryScore("correlation", "correlation")
    columns = ("nrmse",)


INPUT_OUTLINES: Outlines[InputOutline] = Outlines(
    ImageOutline,
    TableOutline,
    TextOutline,
    SignalOutline,
    group="bract.inputs",
    place="bract.inputs.base:INPUTS",
)


def outline_of(kind: str) -> type[InputOutline]:
    """Return the outline of an input; that of any input where it is not installed."""
    return INPUT_OUTLINES.get(kind) or InputOutline


def is_redacted(asked: bool | None, kinds: Iterable[str]) -> bool:
    """Return whether a page of these inputs leaves their examples out.

    Parameters
    ----------
    asked
        None where nothing was asked: then it does if one of the inputs is withheld.
    kinds
        Names of inputs; one that is not installed is withheld.
    """
    if asked is not None:
        return asked
    found = (INPUT_OUTLINES.get(kind) for kind in kinds)
    return any(outline is None or outline.withheld for outline in found)
