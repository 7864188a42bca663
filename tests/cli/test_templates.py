"""The configurations that `bract init` writes: they load, and their comments agree with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from bract.cli.templates import Template, template, write_template
from bract.client.defending import defenses_of
from bract.config import FederationConfig, load_config
from bract.config.config import parse_config

TEMPLATES = list(Template)


def keys_with_comments(text: str) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Yield path, value and comment of every line that sets a scalar or a list."""
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = re.match(r"^(\s*)(?:- )?([a-z_0-9]+):\s*(.*?)(?:\s+#\s*(.*))?$", line)
        if line.lstrip().startswith(("#", "- ")) or found is None:
            continue
        depth = len(found[1])
        path = [entry for entry in path if entry[0] < depth]
        here = (*(name for _, name in path), found[2])
        if found[3] in ("", None) or found[3].startswith("#"):
            path.append((depth, found[2]))
            continue
        yield here, yaml.safe_load(found[3]), found[4] or ""


def default_of(path: tuple[str, ...]) -> tuple[Any, Any]:
    """The default of a key, and its annotation, in the section that defaults give."""
    section: Any = FederationConfig()
    for name in path[:-1]:
        section = getattr(section, name)
    value = getattr(section, path[-1])
    return value, type(section).model_fields[path[-1]].annotation


def choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is Union or isinstance(annotation, type(int | None)):
        return [choice for part in get_args(annotation) for choice in choices(part)]
    return []


@pytest.mark.parametrize("which", TEMPLATES)
def test_every_template_is_a_configuration(which: Template, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_template(path, which, force=False)
    config = load_config(path)
    assert (config.name == which) or which is Template.DIGITS
    defenses_of(config)


def test_the_whole_configuration_shows_every_key_with_its_default() -> None:
    text = template("federation.yaml")
    shown = list(keys_with_comments(text))
    for path, value, comment in shown:
        default, _ = default_of(path)
        said = re.search(r"default: ([\w.-]+)", comment)
        if said and yaml.safe_load(said[1]) != value and path != ("model", "init"):
            assert yaml.safe_load(said[1]) == default, path
            continue
        if isinstance(default, list | tuple):
            default = list(default)
        assert value == default, path
    assert {path for path, _, _ in shown} == set(leaves(FederationConfig()))


def leaves(section: BaseModel, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*before, name))
        else:
            yield (*before, name)


def test_where_a_key_has_choices_its_comment_names_them_all() -> None:
    text = template("federation.yaml")
    for path, _, comment in keys_with_comments(text):
        _, annotation = default_of(path)
        following = text.split(comment, 1)[1].splitlines()[1:4] if comment else []
        said = " ".join([comment, *(line for line in following if line.strip().startswith("#"))])
        for choice in choices(annotation):
            assert re.search(rf"\b{re.escape(choice)}\b", said), (path, choice)


@pytest.mark.parametrize("which", TEMPLATES)
def test_a_name_in_a_comment_is_one_that_the_program_knows(which: Template) -> None:
    from bract.defenses import DEFENSES

    for line in template(which.file).splitlines():
        if "guardian" in line:
            named = line.rpartition(":")[2].rpartition("#")[2]
            assert set(re.findall(r"[a-z-]+", named)) <= set(DEFENSES), line


@pytest.mark.parametrize("which", TEMPLATES)
def test_what_a_comment_says_of_a_value_holds(which: Template) -> None:
    """`key: value` in backticks is what the file sets; a number in words is the value's own."""
    text = template(which.file)
    config = parse_config(text)
    words = {"three": 3, "ten": 10}
    head = text.split("\n\n")[0].lower()
    for word, number in words.items():
        if f"{word} clients" in head:
            assert config.clients == number
    for model, said in (("resnet20", "resnet-20"), ("lenet", "lenet")):
        if said in head:
            assert config.model.name.startswith(model)
    if "cifar-10" in head:
        assert config.data.name == "cifar10"
    if "gpu" in head:
        assert config.device.startswith("cuda") and config.audit.device.startswith("cuda")
    assert ("defend their updates" in head) == bool(config.defenses)
    assert ("ciphertexts" in head) == config.encryption.enabled
    if "no client keeps examples for validation" in text:
        assert config.data.validation == 0.0
    if "clients keep what they trained on" in text:
        assert config.truth
    if "null: all share one private key" in text and which is Template.ENCRYPTED:
        assert config.encryption.threshold
