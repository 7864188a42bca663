"""What clients of one run agree on: a server that shows them different runs gets nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encrypted_runs import small, small_grid, train
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict, UserConfig
from refusals import check_named, refused

from bract.client import masked, policy, site
from bract.config import FederationConfig, agreed, build_config, dump_config
from bract.errors import BractError
from bract.installed import release
from bract.masks import roster, unmasking
from bract.paillier import Layout, encrypt, exchange, keyfile, stripping
from bract.protocol import arrays, ciphertexts, keyexchange, masking
from bract.rundir import RunDirectory
from bract.server import encrypted

MASKS = {"scheme": "masks", "clip": 0.5}
PAILLIER = {"scheme": "paillier", "clip": 0.5}
VICTIM = 0
RECEIVED = {"w": torch.zeros(6)}
OWN = torch.tensor([0.3, -0.2, 0.1, 0.4, -0.4, 0.05])
"""What the victim sends; the others' updates, of examples that the server chose, are zero."""


def masks(**changes: Any) -> FederationConfig:
    return small(encryption=MASKS, **changes)


class Sites:
    """Three sites that pin each other, and a server that shows each of them a run of its own."""

    def __init__(self, folder: Path, runs: dict[int, tuple[int, FederationConfig]]) -> None:
        self.folder, self.runs = folder, runs
        identities = {n: exchange.make_identity() for n in runs}
        peers = folder / "peers"
        peers.write_text("\n".join(i.public.hex() for i in identities.values()))
        self.node_configs: dict[int, UserConfig] = {}
        for node, identity in identities.items():
            file = folder / f"identity-{node}.pem"
            keyfile.save_identity(identity, file)
            self.node_configs[node] = {
                "partition-id": node,
                "state-dir": str(folder / str(node)),
                "identity-key": str(file),
                "peers": str(peers),
            }

    def client(self, node: int, limits: policy.SitePolicy | None = None) -> masked.MaskedClient:
        """The client in the process of one message."""
        run, config = self.runs[node]
        node_config = self.node_configs[node]
        context = Context(run, node, node_config, RecordDict(), {})
        named = ConfigRecord({keyexchange.SESSION_KEY: "s", "server-round": 1})
        own, limits = site.Site.from_node_config(node_config), limits or policy.SitePolicy()
        content = RecordDict({"config": named})
        return masked.MaskedClient(config, own, limits, context, content)

    def sum(self) -> torch.Tensor:
        """Let the server add three masked updates up; return the mean that it reads."""
        adverts = {n: masking.Advert.read(self.client(n).advertise()) for n in self.runs}
        seats = tuple(seat_of(n, advert) for n, advert in adverts.items())
        rosters = {n: roster.Roster(self.client(n).session, 1, 2, 2, seats) for n in self.runs}
        named = {n: masking.write_roster(rosters[n]) for n in self.runs}
        dealt = {n: masking.read_dealt(self.client(n).share(named[n])) for n in self.runs}
        for n in self.runs:
            sent = {m: dealt[m].parcels[n] for m in self.runs if m != n}
            self.client(n).open(masking.write_parcels(sent))
        updates: dict[int, masking.MaskedUpdate] = {}
        for n in self.runs:
            client, update = self.client(n), OWN if n == VICTIM else torch.zeros(6)
            client.check_ready()
            updates[n], _ = client.mask({"w": update}, RECEIVED, {})
        survivors = masking.write_survivors(tuple(self.runs))
        sealed = {
            n: masking.read_by_node(self.client(n).agree(survivors), "seals of who answered")
            for n in self.runs
        }
        revealed = {}
        for n in self.runs:
            boxes = {m: sealed[m][n] for m in self.runs if m != n}
            answer = self.client(n).unmask(masking.write_by_node(boxes))
            revealed[n] = masking.read_by_node(answer, "shares")
        with masking.masking():
            task = bytes.fromhex(updates[VICTIM].task)
            seeds = unmasking.rebuild(rosters[VICTIM], dealt, tuple(self.runs), revealed, task)
            config = self.runs[VICTIM][1].encryption
            layout = masking.mask_layout(config, "parameters", 6)
            total = np.zeros(6, dtype=layout.dtype)
            for masked_update in updates.values():
                total += layout.from_bytes(masked_update.parts["parameters"])
            unmasking.unmask(total, seeds, masking.STREAMS["parameters"])
            sums = {"parameters": layout.reduce(total)}
        return masking.decode_mean(sums, updates[VICTIM].shapes, config, 3)["parameters"]["w"]


def seat_of(node: int, advert: masking.Advert, weight: int = 1) -> roster.Seat:
    return roster.Seat(node, advert.identity, advert.box_key, advert.mask_key, weight)


def test_clients_of_one_run_give_their_sum(tmp_path: Path) -> None:
    config = masks()
    mean = Sites(tmp_path, dict.fromkeys(range(3), (1, config))).sum()
    assert torch.allclose(3 * mean, OWN.double(), atol=1e-3)


@pytest.mark.parametrize(
    "other",
    [
        {
            "data": {
                "name": "wine",
                "image_size": 8,
                "validation": 0.0,
                "partition": {"kind": "iid"},
            }
        },
        {"data": {"path": "/srv/known", "image_size": 8, "validation": 0.0}},
        {"seed": 4},
        {"model": {"name": "lenet"}},
        {"strategy": {"name": "fedprox"}},
        {"rounds": 7},
    ],
    ids=lambda other: "-".join(other),
)
def test_a_server_that_shows_the_others_another_configuration_reads_no_update(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """It would know the others' updates, and subtract them from the sum."""
    sites = Sites(tmp_path, {n: (1, masks() if n == VICTIM else masks(**other)) for n in range(3)})
    for node in range(3):
        sites.client(node)._put(examples=torch.tensor(60))
    with pytest.raises(BractError):
        sites.sum()


def test_a_server_that_shows_the_others_another_run_reads_no_update(tmp_path: Path) -> None:
    config = masks()
    with pytest.raises(BractError):
        Sites(tmp_path, {n: (1 if n == VICTIM else 2, config) for n in range(3)}).sum()


def test_state_of_masks_is_of_one_run(tmp_path: Path) -> None:
    """Also where a server names the same session in both."""
    config = masks()
    sites = Sites(tmp_path, dict.fromkeys(range(3), (1, config)))
    sites.client(0).advertise()
    for run, other in ((2, config), (1, masks(seed=4))):
        sites.runs[0] = (run, other)
        with refused("state-lost"):
            sites.client(0).check_ready()


@pytest.mark.parametrize(
    ("weighting", "weights", "allowed"),
    [
        ("uniform", (1, 1, 1), True),
        ("uniform", (2, 1, 1), False),
        ("uniform", (1, 2, 1), False),
        ("examples", (2, 1, 1), True),
        ("examples", (3, 1, 1), False),
        ("examples", (1, 1, 3), False),
    ],
)
def test_a_roster_gives_no_client_more_than_its_share(
    tmp_path: Path, weighting: str, weights: tuple[int, ...], allowed: bool
) -> None:
    """A weight of one more, where three have one each, is half of the sum."""
    config = masks(strategy={"weighting": weighting, "max_share": 0.5})
    sites = Sites(tmp_path, dict.fromkeys(range(3), (1, config)))
    adverts = {n: masking.Advert.read(sites.client(n).advertise()) for n in range(3)}
    seats = tuple(seat_of(n, advert, weights[n]) for n, advert in adverts.items())
    client = sites.client(VICTIM)
    named = masking.write_roster(roster.Roster(client.session, 1, 2, 2, seats))
    if allowed:
        client.share(named)
        return
    with refused("request-refused", max(weights), sum(weights)):
        client.share(named)


@pytest.mark.parametrize(
    ("limits", "weights", "allowed"),
    [
        ({"min_summed_clients": 3}, (1, 1, 1), True),
        ({"min_summed_clients": 3}, (1, 1, 2**20 - 2), False),
        ({"min_summed_clients": 3}, (4, 4, 3), False),
        ({"min_summed_clients": 2}, (2, 2, 1), True),
        ({"min_summed_clients": 2}, (6, 3, 1), False),
        ({}, (6, 3, 1), True),
        ({}, (6, 1, 1), False),
    ],
)
def test_a_site_counts_the_clients_of_a_sum_by_their_weights(
    tmp_path: Path, limits: dict[str, int], weights: tuple[int, ...], allowed: bool
) -> None:
    """Whatever share the configuration allows, which is the server's to choose."""
    section = {**MASKS, "max_weight_sum": 2**20}
    config = small(encryption=section, strategy={"max_share": 1.0})
    sites = Sites(tmp_path, dict.fromkeys(range(3), (1, config)))
    adverts = {n: masking.Advert.read(sites.client(n).advertise()) for n in range(3)}
    seats = tuple(seat_of(n, advert, weights[n]) for n, advert in adverts.items())
    client = sites.client(VICTIM, policy.SitePolicy.model_validate(limits))
    named = masking.write_roster(roster.Roster(client.session, 1, 2, 2, seats))
    if allowed:
        client.share(named)
        return
    with refused("policy-refused", max(weights), sum(weights), "min_summed_clients"):
        client.share(named)


# --- Paillier ---


def send(grid: Any, kind: str, config: dict[str, Any] | None = None, **records: Any) -> Any:
    """Send node 1 one message as the server does."""
    named = {
        "bract-version": release(),
        keyexchange.SESSION_KEY: "s",
        "server-round": 1,
        **(config or {}),
    }
    message = Message(RecordDict({"config": ConfigRecord(named), **records}), 1, kind)
    (reply,) = grid.send_and_receive([message])
    return reply


def enter(grid: Any, run: int, config: FederationConfig) -> None:
    """Let node 1 be asked in another run."""
    grid.contexts[1].run_id = run
    grid.contexts[1].run_config["federation"] = dump_config(config)


def ask_for_help(grid: Any, public: Any, recipient: exchange.Identity, **config: Any) -> Any:
    vector, _ = encrypt(public, np.linspace(-0.4, 0.4, 9), Layout(9, 0.5, 16, 31))
    powers = stripping.strip_messages(public, vector)
    update = ciphertexts.EncryptedUpdate({"parameters": vector}, {"parameters": (("w", (9,)),)})
    return send(
        grid,
        "query.partial",
        {"tag": "round-1", "vectors": 1, **config},
        recipients=keyexchange.write_recipients({7: recipient.public}),
        **{
            "vector-0": arrays.to_arrays(update.to_tensors()),
            "stripped-0": ArrayRecord({"parameters": Array(powers)}),
        },
    )


def test_help_to_decrypt_is_given_in_the_run_that_a_client_joined_alone(
    tmp_path: Path, two_of_three: Any
) -> None:
    config = small(encryption={**PAILLIER, "threshold": 2})
    other = small(encryption={**PAILLIER, "threshold": 2}, seed=4)
    public, peer = two_of_three[0].public, exchange.make_identity()
    grid = small_grid(tmp_path, config, two_of_three, run_id=1)
    assert not send(grid, "query.hello").has_error()
    assert not ask_for_help(grid, public, peer).has_error()
    for run, asked, continues in ((1, other, []), (2, config, []), (2, other, ["1"])):
        enter(grid, run, asked)
        for reply in (
            ask_for_help(grid, public, peer, **{"bract-continues": continues}),
            send(grid, "query.hello", {"bract-continues": continues}),
            send(grid, "train", {"bract-continues": continues}),
        ):
            assert reply.has_error()
            check_named(reply.error.reason, 1, run)
    enter(grid, 1, config)
    assert not ask_for_help(grid, public, peer).has_error()


def test_a_resumed_run_goes_on_with_the_state_and_the_earlier_run_ends(
    tmp_path: Path, two_of_three: Any
) -> None:
    config = small(encryption={**PAILLIER, "threshold": 2})
    longer = small(encryption={**PAILLIER, "threshold": 2}, rounds=7)
    public, peer = two_of_three[0].public, exchange.make_identity()
    grid = small_grid(tmp_path, config, two_of_three, run_id=1)
    identity = send(grid, "query.hello").content["hello"]["identity"]
    # Two attempts that this client never heard of, then one that it joins.
    enter(grid, 4, longer)
    resumed = {"bract-continues": ["1", "2", "3"]}
    assert send(grid, "query.hello", resumed).content["hello"]["identity"] == identity
    assert not ask_for_help(grid, public, peer, **resumed).has_error()
    enter(grid, 1, config)
    for earlier in ([], ["4"]):
        reply = ask_for_help(grid, public, peer, **{"bract-continues": earlier})
        assert reply.has_error()
        check_named(reply.error.reason, 4, 1)


def test_a_key_that_came_in_band_outlives_a_resume_with_more_rounds(tmp_path: Path) -> None:
    section = {**PAILLIER, "keys": "in-band"}
    config = small(encryption=section, rounds=2)

    def second_round(message: Any) -> Any:
        later = message.metadata.message_type == "train" and "aggregate-1" in message.content
        return "unplugged" if later else None

    with refused("run-failed", "unplugged"):
        train(tmp_path, config, small_grid(tmp_path, config, faults=second_round, run_id=1))
    for run in (2, 3):
        longer = small(encryption=section, rounds=run + 1)
        grid = small_grid(tmp_path, longer, run_id=run)
        folder = RunDirectory(tmp_path / "run")
        encrypted.EncryptedFederation(longer, folder).train(grid)
        assert "query.deal" not in {m.metadata.message_type for m in grid.log}
        sent = next(m for m in grid.log if m.metadata.message_type == "train")
        assert sent.content["config"]["bract-continues"] == ["1", "2"][: run - 1]
    assert [row.round for row in folder.metrics()] == [0, 1, 2, 3, 4]


# --- The digest of a configuration ---


def test_settings_of_an_app_of_ones_own_are_agreed_on_too() -> None:
    config = build_config({"clients": 3})
    rates = [agreed.AgreedRun.of(config, 1, "s", besides={"lr": lr}) for lr in (0.1, 0.0)]
    assert rates[0].identity != rates[1].identity


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"device": "cuda:1"}, True),
        ({"data": {"download": True}}, True),
        ({"data": {"path": "/srv/known"}}, False),
        ({"data": {"partition": {"kind": "shards"}}}, False),
        ({"training": {"lr_schedule": "cosine"}}, False),
        ({"strategy": {"name": "fedboosting"}}, False),
        ({"defenses": ["pruning"]}, False),
        ({"canaries": {"count": 2}}, False),
        ({"rounds": 9}, False),
    ],
    ids=str,
)
def test_all_of_a_configuration_is_agreed_on_but_what_is_listed(
    change: dict[str, Any], same: bool
) -> None:
    plain, changed = (agreed.config_digest(build_config(c)) for c in ({}, change))
    assert (changed == plain) == same


def test_a_digest_does_not_depend_on_what_is_spelt_out() -> None:
    """A key at its default is left out, so that a release without it computes the same."""
    spelt = build_config(build_config({"seed": 4}).model_dump(mode="json"))
    assert agreed.config_digest(spelt) == agreed.config_digest(build_config({"seed": 4}))
