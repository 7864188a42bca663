"""Who is admitted to an encrypted run, and who gets its key: strangers, liars, bad dealers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import ConfigRecord, RecordDict
from refusals import check_named, refused

from bract.captures.aggregates import Aggregates
from bract.config.encryption import EncryptionConfig
from bract.errors import BractError, RunFailedError
from bract.paillier.exchange import make_identity
from bract.paillier.keyfile import dump_public
from bract.protocol import keyexchange, node_names
from bract.protocol.keyexchange import (
    HELLO_TYPE,
    Hello,
    read_recipients,
    write_dealt,
)
from bract.protocol.records import Failure
from bract.strategies.encrypted.catch_up import CatchUp
from bract.strategies.encrypted.membership import Membership

KEYS = [make_identity() for _ in range(5)]
IDENTITIES = [identity.public for identity in KEYS]


def hello(node: Any, partition: Any = None, **changes: Any) -> Any:
    fields = {
        "node_id": node,
        "client": f"client-{node - 1}",
        "partition": node - 1 if partition is None else partition,
        "key": b"",
        "identity": IDENTITIES[node - 1],
        "model_round": -1,
        **changes,
    }
    return Hello(**fields)


class Clients:
    """Answers of connected clients; `deal` may be replaced by what a bad dealer does."""

    def __init__(self, public: Any, *hellos: Any) -> None:
        self.hellos = {h.node_id: h for h in hellos}
        self.public = public
        self.raw: dict[int, Any] = {}
        self.deals: dict[int, Any] = {}
        self.keys: dict[int, Any] = {}
        self.asked: list[Any] = []

    def connected(self) -> Any:
        return set(self.hellos)

    def proven(self, hello: Any, content: Any) -> Any:
        """A client proves what it can: an identity whose private half it has."""
        own = {k.public: k for k in self.keys.get(hello.node_id, KEYS)}
        if hello.identity not in own:
            return hello
        return hello.proven(own[hello.identity], keyexchange.read_challenge(content), "")

    def deal(self, node: Any, recipients: Any) -> Any:
        return write_dealt(dump_public(self.public), dict.fromkeys(recipients, b"box"))

    def ask(self, contents: Any, kind: Any) -> Any:
        answers, failures = {}, []
        for node, content in contents.items():
            if kind == HELLO_TYPE:
                found = self.proven(self.hellos[node], content).to_content()
                found["hello"] = ConfigRecord({**found["hello"], **self.raw.get(node, {})})
            else:
                recipients = read_recipients(content)
                self.asked.append((node, sorted(recipients)))
                found = self.deals.get(node, self.deal)(node, recipients)
            if isinstance(found, str):
                failures.append(Failure(node, self.hellos[node].client, found))
            else:
                answers[node] = SimpleNamespace(content=found, has_content=lambda: True)
        return answers, failures


def membership(clients: Any, **encryption: Any) -> Any:
    config = EncryptionConfig(scheme="paillier", **encryption)
    return Membership(
        config,
        cast(Any, clients),
        clients=3,
        names=node_names.ClientNames(),
        aggregates=Aggregates(),
    )


def admitted(run: Any) -> Any:
    return sorted(h.client for h in run.members.values())


@pytest.fixture
def in_band(whole_key: Any) -> Any:
    clients = Clients(whole_key.public, hello(1), hello(2), hello(3))
    run = membership(clients, keys="in-band")
    assert run.admit() == []
    assert clients.asked == [(1, [2, 3])]
    assert sorted(run.boxes) == [2, 3]
    return run, clients


@pytest.mark.parametrize("partition", [-1, 3, 1])
def test_a_fourth_node_of_a_run_of_three_gets_no_key(in_band: Any, partition: Any) -> None:
    run, clients = in_band
    clients.hellos[4] = hello(4, partition)
    (failure,) = run.admit()
    assert failure.client == "client-3"
    assert "partition" in failure.reason
    assert run.full
    assert 4 not in run.boxes
    assert len(clients.asked) == 1


def test_a_partition_of_minus_one_does_not_deal_the_key(whole_key: Any) -> None:
    clients = Clients(whole_key.public, hello(1), hello(2), hello(3), hello(4, -1))
    run = membership(clients, keys="in-band")
    (failure,) = run.admit()
    assert "partition -1" in failure.reason
    assert clients.asked == [(1, [2, 3])]


def test_a_stranger_does_not_inherit_the_seat_of_a_client_that_holds_the_key(in_band: Any) -> None:
    run, clients = in_band
    del clients.hellos[2]
    clients.hellos[4] = hello(4, 1, client="client-1")
    (failure,) = run.admit()
    assert "cannot show that it is the same client" in failure.reason
    # The client itself, restarted with what it kept, is another node of the same identity.
    clients.hellos = {n: h for n, h in clients.hellos.items() if n != 4}
    clients.hellos[5] = hello(5, 1, client="client-1", identity=IDENTITIES[1])
    assert run.admit() == []
    assert sorted(run.members) == [1, 3, 5]


def test_only_listed_identities_are_admitted(whole_key: Any) -> None:
    listed = tuple(identity.hex() for identity in IDENTITIES[:3])
    clients = Clients(whole_key.public, hello(1), hello(2), hello(3, identity=IDENTITIES[4]))
    run = membership(clients, keys="in-band", identities=listed)
    (failure,) = run.admit()
    check_named(failure.reason, "encryption.identities")
    assert clients.asked == [(1, [2])]


def test_a_copied_identity_is_refused_under_the_name_of_the_node_that_copied_it(
    whole_key: Any,
) -> None:
    listed = tuple(identity.hex() for identity in IDENTITIES[:3])
    copied = hello(1, identity=IDENTITIES[2])
    clients = Clients(whole_key.public, copied, hello(2), hello(3))
    clients.keys[1] = KEYS[:1]
    run = membership(clients, keys="in-band", identities=listed)
    (failure,) = run.admit()
    assert failure.node_id == 1
    check_named(failure.reason, IDENTITIES[2].hex())
    assert sorted(run.members) == [2, 3]


@pytest.mark.parametrize("late", [False, True])
def test_a_claimed_partition_goes_to_the_identity_that_is_listed_at_its_place(
    whole_key: Any, late: bool
) -> None:
    listed = tuple(identity.hex() for identity in IDENTITIES[:3])
    first = [hello(1), hello(2, 2)]
    clients = Clients(whole_key.public, *first, *([] if late else [hello(3)]))
    run = membership(clients, keys="in-band", identities=listed)
    failures = run.admit()
    if late:
        assert failures == []
        clients.hellos[3] = hello(3)
        failures = run.admit()
    (failure,) = failures
    assert (failure.node_id, failure.client) == (2, "client-1")
    check_named(failure.reason, "partition", 2, "client-2")
    assert sorted(run.members) == [1, 3]
    (again,) = run.admit()
    assert again.node_id == 2


def test_without_identities_a_partition_that_two_claim_stays_with_the_first(
    whole_key: Any,
) -> None:
    clients = Clients(whole_key.public, hello(1), hello(2, 2), hello(3))
    run = membership(clients, keys="in-band")
    (failure,) = run.admit()
    assert failure.node_id == 3
    check_named(failure.reason, "client-1")


LOW_ORDER = [bytes(32), (1).to_bytes(32, "little"), (2**255 - 19).to_bytes(32, "little")]


@pytest.mark.parametrize(
    "change",
    [
        *({"identity": point} for point in LOW_ORDER),
        {"identity": b"garbage"},
        {"identity": "text"},
        {"key": b"garbage"},
        {"key": b"-----BEGIN " * 10_000},
        {"key": 7},
        {"partition": "nan"},
        {"partition": "9" * 5000},
        {"partition": 10**18},
        {"model-round": -7},
        {"client": "../up"},
        {"client": "client-0"},
        {"refused": ["x"]},
        {"refused": 1},
    ],
)
def test_a_garbage_hello_costs_its_sender_alone_its_place(whole_key: Any, change: Any) -> None:
    clients = Clients(whole_key.public, hello(1), hello(2), hello(3))
    clients.raw[3] = change
    run = membership(clients, keys="in-band")
    (failure,) = run.admit()
    assert failure.node_id == 3
    assert admitted(run) == ["client-0", "client-1"]
    assert clients.asked == [(1, [2])]


def test_a_key_claimed_before_one_was_dealt_is_nobodys(whole_key: Any, another_key: Any) -> None:
    liar = hello(1, key=dump_public(another_key.public))
    clients = Clients(whole_key.public, liar, hello(2), hello(3))
    run = membership(clients, keys="in-band")
    (failure,) = run.admit()
    assert (failure.client, "none was dealt yet" in failure.reason) == ("client-0", True)
    assert run.public == whole_key.public
    assert clients.asked == [(2, [3])]


def test_the_configured_key_settles_what_a_majority_would_not(
    whole_key: Any, another_key: Any
) -> None:
    right, wrong = dump_public(whole_key.public), dump_public(another_key.public)
    clients = Clients(None, hello(1, key=wrong), hello(2, key=right))
    with refused("key-mismatch", "client-0", kind=RunFailedError):
        membership(clients).admit()
    run = membership(clients, key_id=whole_key.public.key_id)
    (failure,) = run.admit()
    assert failure.client == "client-0"
    assert run.public == whole_key.public


def dealt(key: Any, keep: Any = lambda node: True) -> Any:
    return lambda node, recipients: write_dealt(
        dump_public(key), {n: b"box" for n in recipients if keep(n)}
    )


@pytest.mark.parametrize(
    ("deal", "reason"),
    [
        (lambda node, recipients: "crashed", "crashed"),
        (lambda node, recipients: write_dealt(b"garbage", {}), "PUBLIC KEY block"),
        ("incomplete", "sealed no key for client-2"),
        ("standard", "for standard randomness"),
    ],
)
def test_a_bad_dealer_is_left_out_and_the_next_client_deals(
    whole_key: Any, deal: Any, reason: Any
) -> None:
    clients = Clients(whole_key.public, hello(1), hello(2), hello(3))
    bad = {
        "incomplete": dealt(whole_key.public, keep=lambda node: node != 3),
        "standard": dealt(type(whole_key.public)(whole_key.public.n)),
    }
    clients.deals[1] = bad.get(deal, deal)
    run = membership(clients, keys="in-band")
    (failure,) = run.admit()
    assert failure.client == "client-0"
    assert reason in failure.reason
    assert admitted(run) == ["client-1", "client-2"]
    assert sorted(run.boxes) == [1, 3], "who failed may come back for its key"


def test_a_provisioned_key_of_another_run_is_named_whatever_its_client_says(
    whole_key: Any, another_key: Any
) -> None:
    right, wrong = dump_public(whole_key.public), dump_public(another_key.public)
    liar = hello(3, key=wrong, unconfirmed=True)
    clients = Clients(None, hello(1, key=right), hello(2, key=right), liar)
    run = membership(clients)
    (failure,) = run.admit()
    assert "holds Paillier key" in failure.reason
    assert admitted(run) == ["client-0", "client-1"]


def test_a_member_that_hands_on_another_key_is_passed_over(
    in_band: Any, another_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, clients = in_band
    for node in (1, 2, 3):
        run.holds(node, 0)
    clients.deals[1] = dealt(another_key.public)
    again = clients.proven(hello(3), RecordDict({"config": run.instructions}))
    behind = SimpleNamespace(content=again.to_content(), has_content=lambda: True)
    assert run.readmit({3: behind}) == []
    assert clients.asked[1:] == [(1, [3]), (2, [3])]
    assert "client-0 did not hand over the key: handed over key" in caplog.text
    assert sorted(run.boxes) == [3]


def test_a_newcomer_whose_box_does_not_open_gets_one_of_another_member(in_band: Any) -> None:
    run, clients = in_band
    for node in (1, 2):
        run.holds(node, 0)
    for dealers in ([1, 2], [1, 2, 1], [1, 2, 1, 2]):
        run.refuse_box(3)
        assert 3 not in run.members
        assert run.admit() == []
        assert [node for node, _ in clients.asked] == dealers
        assert sorted(run.boxes) == [3]
    run.refuse_box(1)  # no box waits for it
    assert sorted(run.members) == [1, 2, 3]


def test_a_client_that_loses_its_state_each_round_costs_no_square_of_the_rounds() -> None:
    kept, rounds = Aggregates(), 60
    kept.begin({})
    run = SimpleNamespace(
        members={2: hello(2)}, config=EncryptionConfig(), boxes={}, instructions=ConfigRecord({})
    )
    catching_up = CatchUp(cast(Any, run), kept, cast(Any, None))
    sent = []
    for number in range(1, rounds + 1):
        try:
            content = catching_up.content(2, number)
            sent.append(sum(name.startswith("aggregate") for name in content))
        except BractError as error:
            assert error.code == "state-lost"
            sent.append(-1)
        kept.append({})
    assert sent[:19] == list(range(19))
    assert sum(n for n in sent if n > 0) <= 10 * rounds < rounds * (rounds - 1) / 2
    assert max(sent[-10:]) >= 50  # left out of some rounds, and asked again
    run.members[2] = hello(2, model_round=rounds)
    assert "config" in catching_up.content(2, rounds + 1)


def test_a_restarted_server_takes_no_other_key_than_the_one_that_was_dealt(
    whole_key: Any, another_key: Any, tmp_path: Path
) -> None:
    kept = Aggregates(tmp_path)
    kept.key = dump_public(whole_key.public)
    (tmp_path / "aggregates.json").write_text('{"session": "s", "order": []}')
    from safetensors.torch import save_file

    save_file({}, tmp_path / "initial.safetensors")
    right, wrong = dump_public(whole_key.public), dump_public(another_key.public)
    clients = Clients(None, *(hello(n, key=wrong) for n in (1, 2)), hello(3, key=right))
    config = EncryptionConfig(scheme="paillier", keys="in-band")
    run = Membership(
        config,
        cast(Any, clients),
        clients=3,
        names=node_names.ClientNames(),
        aggregates=Aggregates(tmp_path),
    )
    assert [f.client for f in run.admit()] == ["client-0", "client-1"]
    assert admitted(run) == ["client-2"]


def test_a_hello_of_another_kind_of_record_is_refused() -> None:
    content: Any = hello(1).to_content()
    del content["hello"]
    with refused("message-malformed", "hello"):
        Hello.read(cast(Any, SimpleNamespace(content=content)), 1)


def test_two_nodes_of_one_identity_are_one_client(whole_key: Any) -> None:
    """It would be dealt two shares of the key, and so count twice towards the threshold."""
    clients = Clients(whole_key.public, hello(1), hello(2), hello(3, identity=IDENTITIES[1]))
    run = membership(clients, keys="in-band")
    (failure,) = run.admit()
    check_named(failure.reason, IDENTITIES[1].hex(), "client-1")
    assert admitted(run) == ["client-0", "client-1"]
