"""A result that leaves something out is reported without it: no page rests on what may be None."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import ValidationError

from bract.disk import write_text
from bract.report import write_report
from bract.schema import Answer, Record

Keys = tuple[str | int, ...]


def filled(of: Any) -> Any:
    """Return a value of a type, of records one with every field."""
    origin, of_what = get_origin(of), get_args(of)
    if origin is Annotated:
        return filled(of_what[0])
    if origin in (Union, types.UnionType):
        return filled(next(one for one in of_what if one is not type(None)))
    if origin is Literal:
        return of_what[0]
    if origin is list:
        return [filled(of_what[0])]
    if origin is dict:
        return {"1": filled(of_what[1])}
    if isinstance(of, type) and issubclass(of, Record):
        hints = get_type_hints(of, include_extras=True)
        return {field.alias or name: filled(hints[name]) for name, field in of.model_fields.items()}
    return {str: "oblivious", int: 1, float: 0.5, bool: True}.get(of)


def fields(node: Any, path: Keys = ()) -> Iterator[Keys]:
    """Yield the path of every value of a document, once for all members of a list."""
    entries = node.items() if isinstance(node, dict) else enumerate(node[:1])
    for name, value in entries:
        if isinstance(name, str):
            yield (*path, name)
        if isinstance(value, dict | list):
            yield from fields(value, (*path, name))


def without(document: Any, path: Keys) -> Any:
    found = json.loads(json.dumps(document))
    node = found
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = None
    return found


def type_of(question: str) -> type[Answer]:
    kinds = Answer.__subclasses__()
    return next(kind for kind in kinds if kind.model_fields["question"].default == question)


def answer_of(question: str) -> Any:
    return filled(type_of(question)) | {"question": question, "refused": None}


def of_membership() -> Any:
    answer = answer_of("membership")
    (one,) = answer["clients"]
    scores = [one["scores"][0] | {"round": None}, *one["scores"]]
    one |= {"unfair": None, "scores": scores}
    answer["models"] = [one | {"observer": observer} for observer in ("client", "public")]
    return answer


def found_by_chance(answer: Any, chance: float) -> Any:
    for one in (*answer["clients"], *answer["models"]):
        one["chance"] = chance
    return answer


ANSWERS = {
    "members-found": lambda: found_by_chance(of_membership(), 1e-9),
    "none-found": lambda: found_by_chance(of_membership(), 0.9),
    "epsilon": lambda: answer_of("epsilon"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_that_leaves_one_value_out_is_reported(kind: str, make_run: Any) -> None:
    root: Path = make_run(clients=["client-0"], rounds=1)
    whole = ANSWERS[kind]()
    answers = type_of(whole["question"])
    kept = root / "audit" / "questions" / whole["question"] / "run.json"
    answers.model_validate(whole)
    failed = []
    for path in [(), *fields(whole)]:
        answer = without(whole, path) if path else whole
        try:
            answers.model_validate(answer)
        except ValidationError:
            continue
        write_text(kept, json.dumps(answer))
        try:
            write_report(root)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            failed.append(f"{path}: {type(error).__name__}: {error}")
    assert failed == []
