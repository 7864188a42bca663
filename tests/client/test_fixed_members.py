"""Sites of one fixed set of members: what a server sums over them, it sums over all of them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from encrypted_runs import TamperingGrid, small, small_grid, train
from flwr.app import RecordDict
from refusals import check_named, refused

import bract.client.sums as sums
from bract import ObservationStore
from bract.captures.aggregates import Aggregates
from bract.client.policy import SitePolicy
from bract.config import FederationConfig
from bract.errors import RunFailedError
from bract.paillier import exchange, keyfile
from bract.updates.update import flatten

SITES = 7
VICTIM, ONE, OTHER = 1, {2, 3, 4}, {5, 6, 7}
"""Nodes: a site whose update the server wants, and two halves of the others."""

MEMBERS = dict.fromkeys("abcd", 1)


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def settings(**changes: Any) -> FederationConfig:
    return small(
        clients=SITES,
        training={"algorithm": "fedsgd", "lr": 0.1, "batch_size": 64},
        # A server that moves the model by next to nothing between two sums.
        strategy={"tolerate_failures": True, "weighting": "uniform", "server_lr": 1e-6},
        data={
            "image_size": 8,
            "validation": 0.0,
            "partition": {"kind": "sizes", "sizes": [14] * SITES},
        },
        **changes,
    )


class Members:
    """Seven sites that pin each other, in one run after the other, under one policy."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.folder, self.policy = folder, folder / "policy.yaml"
        self.policy.write_text(policy)
        self.pinned = True
        identities = [exchange.make_identity() for _ in range(SITES)]
        (folder / "peers").write_text("\n".join(i.public.hex() for i in identities))
        for node, identity in enumerate(identities, 1):
            keyfile.save_identity(identity, folder / f"identity-{node}.pem")

    def run(
        self,
        name: str,
        asked: dict[int, Collection[int]],
        *,
        seed: int = 3,
        phase: str = "",
        tamper: Any = lambda message, reply: None,
    ) -> Any:
        """Let the server of a run ask some nodes alone in some rounds."""
        config = settings(rounds=max(asked), seed=seed, encryption={"scheme": "masks", "clip": 0.5})

        def faults(message: Any) -> str | None:
            number = message.content["config"]["server-round"]
            meant = message.metadata.dst_node_id in asked[number]
            return None if meant or phase not in ("", message.metadata.message_type) else "gone"

        grid = small_grid(self.folder, config, kind=TamperingGrid, faults=faults, tamper=tamper)
        for node, context in grid.contexts.items():
            context.node_config |= {
                "policy": str(self.policy),
                "peers": str(self.folder / "peers"),
                "identity-key": str(self.folder / f"identity-{node}.pem"),
            }
            if not self.pinned:
                del context.node_config["peers"]
        (self.folder / name).mkdir()
        return train(self.folder / name, config, grid)


ALL = range(1, SITES + 1)
ATTACK = {1: ALL, 2: ONE, 3: OTHER}


def test_sums_without_a_site_give_its_update_whatever_it_refuses_itself(tmp_path: Path) -> None:
    """The attack that `fixed_members` is against, and that `min_summed_clients` is not."""
    run = Members(tmp_path, "min_summed_clients: 3").run("attack", ATTACK)
    found = [flatten(Aggregates(run.aggregates).aggregate(n)).double() for n in (1, 2, 3)]
    got = 7 * found[0] - 3 * found[1] - 3 * found[2]
    plain = settings()
    bare = train(tmp_path / "plain", plain, small_grid(tmp_path / "plain", plain))
    (sent,) = (o for o in ObservationStore(bare.captures) if o.client == "client-0")
    true = flatten({n: sent.update[n].double() for n in Aggregates(run.aggregates).aggregate(1)})
    assert float(torch.cosine_similarity(got, true, dim=0)) > 0.99


@pytest.mark.parametrize(
    ("asked", "phase"),
    [(ATTACK, ""), ({1: ALL, 2: ONE | OTHER}, "train")],
    ids=["others are named", "one sends no update"],
)
def test_members_that_are_fixed_open_no_second_set(
    asked: dict[int, Any], phase: str, tmp_path: Path
) -> None:
    members = Members(tmp_path, "{fixed_members: true, min_summed_clients: 3}")
    code = "run-failed" if phase else "clients-missing"
    with refused(code, "fixed_members", kind=RunFailedError):
        members.run("attack", asked, phase=phase)
    assert Aggregates(tmp_path / "attack" / "run" / "aggregates").last == 1


def test_members_that_are_fixed_stay_so_in_other_runs(tmp_path: Path) -> None:
    members = Members(tmp_path, "fixed_members: true")
    assert len(members.run("first", {1: ALL}).metrics()[1].clients) == SITES
    with refused("clients-missing", "fixed_members", kind=RunFailedError):
        members.run("less", {1: ONE | OTHER}, seed=4)
    assert len(members.run("all", {1: ALL, 2: ALL}, seed=5).metrics()[2].clients) == SITES


def record(folder: Path, **policy: Any) -> sums.Sums:
    limits = SitePolicy.model_validate(policy)
    return sums.Sums(RecordDict(), directory=folder, site="a", policy=limits)


@pytest.mark.parametrize(
    "other", [dict.fromkeys("abc", 1), dict.fromkeys("abcde", 1), {**MEMBERS, "b": 2}]
)
def test_members_are_fixed_once_an_update_is_masked_for_them(
    other: dict[str, int], tmp_path: Path
) -> None:
    held = record(tmp_path, fixed_members=True)
    held.check(MEMBERS)
    held.check(other)
    held.check(MEMBERS, masks=True)
    for _ in range(2):
        with refused("policy-refused", "fixed_members", len(other), "sums.json"):
            held.check(other)
        with refused("policy-refused", "fixed_members", len(other), "sums.json"):
            held.add("roster", other, model="m", config="c")
    held.check({client: 3 * weight for client, weight in MEMBERS.items()}, masks=True)
    held.add("roster", MEMBERS, model="m", config="c")


def test_a_sum_that_could_not_be_unmasked_is_refused_before_anything_is_masked(
    tmp_path: Path,
) -> None:
    """Unless it is one of before that is left where the others drop out again."""
    held = record(tmp_path, min_summed_clients=3)
    held.add("roster", MEMBERS, model="m", config="c")
    with refused("policy-refused", "min_summed_clients"):
        held.check({**MEMBERS, "b": 2}, masks=True)
    with refused("policy-refused", "min_summed_clients"):
        held.check(dict.fromkeys("abc", 1), masks=True)
    held.check({**MEMBERS, "e": 1}, masks=True)
    record(tmp_path / "other").check(dict.fromkeys("abc", 1), masks=True)


def test_the_first_set_is_of_all_whom_a_site_pins(tmp_path: Path) -> None:
    """So that one who comes late, or whom a server leaves out first, binds none."""
    members = Members(tmp_path, "fixed_members: true")
    with refused("run-failed", "fixed_members", "peers", kind=RunFailedError):
        members.run("less", {1: ONE | OTHER})
    assert len(members.run("all", {1: ALL}, seed=5).metrics()[1].clients) == SITES


def test_members_are_known_by_their_keys(tmp_path: Path) -> None:
    members = Members(tmp_path, "fixed_members: true")
    members.pinned = False
    with refused("clients-missing", "fixed_members", "peers", kind=RunFailedError):
        members.run("first", {1: ALL})


@pytest.mark.parametrize("policy", ["min_summed_clients: 3", "{}"])
def test_one_spoilt_box_bars_no_site_from_later_sums(
    policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A malicious client seals a wrong box for one site alone."""

    def spoil(message: Any, reply: Any) -> None:
        metadata, number = message.metadata, message.content["config"]["server-round"]
        if (metadata.message_type, metadata.dst_node_id, number) == ("query.share", SITES, 1):
            record = reply.content["masks"]
            boxes, place = list(record["boxes"]), list(record["nodes"]).index(str(VICTIM))
            boxes[place] = bytes([boxes[place][0] ^ 1]) + boxes[place][1:]
            record["boxes"] = boxes

    members = Members(tmp_path, policy)
    rows = members.run("spoilt", {1: ALL, 2: ALL}, tamper=spoil).metrics()
    assert [len(row.clients) for row in rows[1:]] == [SITES, SITES]
    assert not rows[1].failures and not rows[2].failures
    check_named(caplog.text, f"client {SITES}")


def test_a_sum_that_holds_more_clients_than_it_seemed_is_judged_by_them(tmp_path: Path) -> None:
    held = record(tmp_path, min_summed_clients=3)
    held.add("first", dict.fromkeys("abc", 1), model="m", config="c")
    held.add("second", dict.fromkeys("abc", 1), model="n", config="c")
    with refused("policy-refused", "min_summed_clients"):
        held.amend("second", MEMBERS)
    other = record(tmp_path / "other", min_summed_clients=3)
    other.add("first", dict.fromkeys("abc", 1), model="m", config="c")
    other.amend("first", MEMBERS)
    other.add("second", MEMBERS, model="n", config="c")
    with refused("policy-refused", "min_summed_clients"):
        other.add("third", dict.fromkeys("abc", 1), model="o", config="c")
