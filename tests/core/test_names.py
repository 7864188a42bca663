from typing import Any

import pytest
from refusals import refused

from bract.client.site import Site
from bract.config import client_names
from bract.protocol import node_names


@pytest.mark.parametrize("name", ["client-0", "A", "site_3", "7", "x" * 64, "node-5"])
def test_names_of_letters_digits_and_dashes_are_allowed(name: Any) -> None:
    assert client_names.check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\\b",
        "-a",
        "_a",
        "a b",
        "a\n",
        "a.b",
        "é",
        "x" * 65,
        "aggregate",
        "Aggregate",
        "a\0",
        None,
        3,
        ["a"],
    ],
)
def test_a_name_that_is_a_path_or_no_plain_word_is_refused(name: Any) -> None:
    with refused("config-value"):
        client_names.check_name(name)


def test_a_name_belongs_to_the_first_node_that_claims_it() -> None:
    names = node_names.ClientNames()
    assert names.claim(1, "client-0") == "client-0"
    assert names.claim(1, "client-0") == "client-0"
    for taken in ("client-0", "CLIENT-0"):
        with refused("identity-refused", 1):
            names.claim(2, taken)
    assert (names.of(1), names.of(2)) == ("client-0", "node-2")


def test_a_node_keeps_its_name_and_may_not_take_another_nodes_number() -> None:
    names = node_names.ClientNames()
    names.claim(1, "a")
    with refused("identity-refused", "a"):
        names.claim(1, "b")
    with refused("identity-refused", "node-1"):
        names.claim(2, "node-1")
    assert names.claim(2, "node-2") == "node-2"


def test_a_client_that_was_restarted_gets_its_name_back_once_its_old_node_has_left() -> None:
    names = node_names.ClientNames()
    names.claim(1, "client-0")
    with refused("identity-refused", 1):
        names.claim(9, "client-0", lambda: [1, 9])
    assert names.claim(9, "client-0", lambda: [9]) == "client-0"
    assert names.of(1) == "node-1"


def test_a_site_hears_of_its_bad_name_before_it_sends_anything() -> None:
    with refused("config-value", "hospital/a"):
        Site.from_node_config({"partition-id": 0, "num-partitions": 1, "name": "hospital/a"})
