"""What a server that breaks the protocol gets out of a client of an encrypted run: nothing."""

import dataclasses
import json
import logging
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import refusals
import torch
from encrypted_runs import key_secrets, small, small_grid, tiny, train
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from bract.client import REFUSED
from bract.client.encrypted.client import EncryptedClient
from bract.client.encrypted.failures import FailedAggregates, record_folder
from bract.config import agreed, dump_config
from bract.installed import release
from bract.models.initialise import initialise
from bract.paillier import Layout, deal, encrypt, partial_decrypt
from bract.paillier.cipher import from_matrix, to_matrix
from bract.paillier.exchange import make_identity
from bract.paillier.keyfile import dump_private, dump_public, save_identity
from bract.paillier.stripping import strip_messages
from bract.protocol.arrays import from_arrays, to_arrays
from bract.protocol.ciphertexts import EncryptedUpdate, decrypt_mean, plan_layout
from bract.protocol.keyexchange import box_keys, write_key_box, write_recipients
from bract.protocol.partials import RefusedHelpError
from bract.seeds import derive_seed

PAILLIER = {"scheme": "paillier", "clip": 0.5}
IN_BAND = {**PAILLIER, "keys": "in-band"}
SERVER = make_identity()


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def send(grid: Any, kind: Any, node: Any = 1, **records: Any) -> Any:
    """Send one message as the server does, and return the client's answer."""
    config = ConfigRecord(
        {"bract-version": release(), "bract-session": "s", "server-round": 1}
        | records.pop("config", {})
    )
    message = Message(RecordDict({"config": config, **records}), node, kind)
    (reply,) = grid.send_and_receive([message])
    return reply


def refused(reply: Any) -> Any:
    assert reply.has_error()
    return reply.error.reason


def grid_of(folder: Any, keys: Any = (), encryption: Any = PAILLIER, **node: Any) -> Any:
    config = small(encryption=encryption)
    grid = small_grid(folder, config, keys)
    for context in grid.contexts.values():
        context.node_config.update(node)
    assert not send(grid, "query.hello").has_error()
    return grid


def strangers(*identities: Any) -> Any:
    return write_recipients({7 + i: identity.public for i, identity in enumerate(identities)})


@pytest.mark.parametrize("asked_as", ["provisioned", "in-band"])
def test_a_provisioned_key_never_leaves_on_request(
    tmp_path: Path, whole_key: Any, asked_as: Any
) -> None:
    grid = grid_of(tmp_path, [whole_key] * 3)
    run_config = {"federation": dump_config(small(encryption={**PAILLIER, "keys": asked_as}))}
    grid.contexts[1].run_config.update(run_config)
    reason = refused(send(grid, "query.deal", recipients=strangers(SERVER)))
    assert ("never leaves" if asked_as == "provisioned" else "key file") in reason
    assert not any(secret.decode(errors="replace") in reason for secret in key_secrets(whole_key))


@pytest.mark.parametrize("pin", [{"require-encryption": True}, {"key-id": "ab" * 16}])
def test_a_site_that_demands_encryption_trains_in_no_other_run(tmp_path: Path, pin: Any) -> None:
    config = small()
    grid = small_grid(tmp_path, config)
    grid.contexts[1].node_config.update(pin)
    assert "demands encryption" in refused(send(grid, "train"))


@pytest.mark.parametrize(("scheme", "other"), [("paillier", "masks"), ("masks", "paillier")])
def test_a_site_that_demands_one_scheme_trains_in_no_run_of_another(
    tmp_path: Path, scheme: str, other: str
) -> None:
    grid = small_grid(tmp_path, small(encryption=other))
    grid.contexts[1].node_config["require-encryption"] = scheme
    asked = "query.advertise" if other == "masks" else "query.hello"
    refusals.check_named(refused(send(grid, asked)), "require-encryption", scheme, other)


def test_a_crafted_first_model_that_was_refused_is_trained_on_by_no_later_message(
    tmp_path: Path, whole_key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def note(model: Any, *_: Any, **__: Any) -> Any:
        started.append({name: value.clone() for name, value in model.state_dict().items()})
        raise RuntimeError("enough was seen")

    def held(reply: Any) -> Any:
        return reply.content["hello"]["model-round"]

    monkeypatch.setattr("bract.client.session.train_locally", note)
    config = small(encryption=PAILLIER)
    honest = initialise(tiny(), config.model.init, derive_seed(config.seed, "model")).state_dict()
    crafted = {name: value + 1.0 for name, value in honest.items()}
    (tmp_path / "policy.yaml").write_text(
        "initial_model: from-seed\nmodels: ['encrypted_runs:tiny']\n"
    )
    grid = grid_of(tmp_path, [whole_key] * 3, policy=str(tmp_path / "policy.yaml"))
    for _ in range(2):
        crafts = refused(send(grid, "train", arrays=to_arrays(crafted)))
        refusals.check_named(crafts, "from-seed", "1.weight")
        assert held(send(grid, "train")) == held(send(grid, "query.hello")) == -1
    send(grid, "train", arrays=to_arrays(honest))
    (found,) = started
    for name, value in found.items():
        torch.testing.assert_close(value, honest[name])
    assert held(send(grid, "query.hello")) == 0


def test_a_client_that_helps_to_decrypt_without_peers_warns_of_it(
    tmp_path: Path, two_of_three: Any, caplog: pytest.LogCaptureFixture
) -> None:
    threshold = {**PAILLIER, "threshold": 2}
    assert not send(grid_of(tmp_path / "a", two_of_three, threshold), "query.hello").has_error()
    assert "peers" in caplog.text
    caplog.clear()
    peers = pinned(tmp_path / "b", make_identity())
    grid = grid_of(tmp_path / "b", two_of_three, threshold, peers=peers)
    assert not send(grid, "query.hello").has_error()
    assert "peers" not in caplog.text


def test_a_site_encrypts_under_the_key_that_its_operator_named_alone(
    tmp_path: Path, whole_key: Any
) -> None:
    grid = small_grid(tmp_path, small(encryption=PAILLIER), [whole_key] * 3)
    grid.contexts[1].node_config["key-id"] = whole_key.public.key_id
    grid.contexts[2].node_config["key-id"] = "0" * 32
    assert not send(grid, "query.hello").has_error()
    assert "the node config's key-id is 000" in refused(send(grid, "query.hello", 2))


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"require-encryption": "yes"}, "expected true or false"),
        ({"dealer": "abc"}, "is no public identity"),
        ({"dealer": "09" + "00" * 30 + "80"}, "is no public identity"),
        ({"peers": "/nowhere"}, "cannot be read"),
        ({"key-id": 7}, "expected text in quotes"),
    ],
)
def test_a_pin_that_cannot_be_read_is_named_at_the_site(
    tmp_path: Path, whole_key: Any, pin: Any, message: Any, caplog: pytest.LogCaptureFixture
) -> None:
    grid = small_grid(tmp_path, small(encryption=PAILLIER), [whole_key] * 3)
    grid.contexts[1].node_config.update(pin)
    assert REFUSED in refused(send(grid, "query.hello"))
    assert message in caplog.text


def pinned(folder: Any, *identities: Any) -> Any:
    folder.mkdir(exist_ok=True)
    path = folder / "peers"
    path.write_text("".join(f"{i.public.hex()}  # a site\n" for i in identities) + "\n# end\n")
    return str(path)


def test_a_dealer_with_pinned_peers_seals_its_key_for_no_stranger(tmp_path: Path) -> None:
    peer = make_identity()
    grid = grid_of(tmp_path, (), IN_BAND, peers=pinned(tmp_path, peer))
    asked = send(grid, "query.deal", recipients=strangers(peer, SERVER))
    refusals.check_named(refused(asked), SERVER.public.hex())
    assert not send(grid, "query.deal", recipients=strangers(peer)).has_error()


@pytest.mark.parametrize("recipients", [0, 3])
def test_a_dealer_seals_for_the_declared_number_of_clients_alone(
    tmp_path: Path, recipients: Any
) -> None:
    grid = grid_of(tmp_path, (), IN_BAND)
    others = [make_identity() for _ in range(recipients)]
    asked = send(grid, "query.deal", recipients=strangers(*others))
    assert "the run has 3 clients" in refused(asked)


def boxed_by(identity: Any, grid: Any, key: Any, claimed: Any) -> Any:
    hello = send(grid, "query.hello").content["hello"]
    run = agreed.AgreedRun.of(small(encryption=IN_BAND), grid.run.run_id, "s").identity
    boxes = box_keys(
        {1: dump_private(key)}, {1: hello["identity"]}, session=run, sender=9, identity=identity
    )
    return {"key-box": write_key_box(9, claimed, boxes[1])}


def test_a_key_of_the_servers_own_is_refused_where_the_dealer_is_pinned(
    tmp_path: Path, whole_key: Any
) -> None:
    dealer = make_identity()
    grid = grid_of(tmp_path, (), IN_BAND, dealer=dealer.public.hex())
    honest = boxed_by(SERVER, grid, whole_key, SERVER.public)
    assert "another client's key" in refused(send(grid, "train", **honest))
    lying = boxed_by(SERVER, grid, whole_key, dealer.public)
    assert "sealed by another sender" in refused(send(grid, "train", **lying))
    right = boxed_by(dealer, grid, whole_key, dealer.public)
    assert not send(grid, "train", **right).has_error()
    assert send(grid, "query.hello").content["hello"]["key"] == dump_public(whole_key.public)


@pytest.mark.thorough
def test_a_dealer_takes_another_key_until_the_run_has_used_its_own_and_never_after(
    tmp_path: Path, whole_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_identity()
    for used in (False, True):
        grid = grid_of(tmp_path / str(used), (), IN_BAND)
        own = send(grid, "query.deal", recipients=strangers(SERVER)).content["dealt"]["key"]
        assert send(grid, "query.hello").content["hello"]["unconfirmed"] is True
        if used:
            send(grid, "train")
        caplog.clear()
        send(grid, "train", **boxed_by(other, grid, whole_key, other.public))
        hello = send(grid, "query.hello").content["hello"]
        assert hello["unconfirmed"] is False
        assert hello["key"] == (own if used else dump_public(whole_key.public))
        assert ("took another" in caplog.text) is not used


def test_a_dealer_with_peers_takes_no_key_of_a_strangers(tmp_path: Path, whole_key: Any) -> None:
    (tmp_path / "peers").write_text(SERVER.public.hex())
    grid = grid_of(tmp_path, (), IN_BAND, peers=str(tmp_path / "peers"))
    own = send(grid, "query.deal", recipients=strangers(SERVER)).content["dealt"]["key"]
    other = make_identity()
    assert "not among the peers" in refused(
        send(grid, "train", **boxed_by(other, grid, whole_key, other.public))
    )
    assert send(grid, "query.hello").content["hello"]["key"] == own


def test_an_identity_key_is_the_same_in_every_run(
    tmp_path: Path, whole_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    identity = make_identity()
    save_identity(identity, tmp_path / "identity.pem")
    grid = grid_of(tmp_path, [whole_key] * 3, **{"identity-key": str(tmp_path / "identity.pem")})
    assert send(grid, "query.hello").content["hello"]["identity"] == identity.public
    (tmp_path / "identity.pem").chmod(0o644)
    assert REFUSED in refused(send(grid, "query.hello"))
    assert "chmod 600" in caplog.text


def aggregate_of(public: Any) -> Any:
    layout = Layout(9, 0.5, 16, 31)
    vector, _ = encrypt(public, np.linspace(-0.4, 0.4, 9), layout)
    return EncryptedUpdate({"parameters": vector}, {"parameters": (("w", (9,)),)})


def ask_for_help(grid: Any, update: Any, stripped: Any, recipients: Any) -> Any:
    return send(
        grid,
        "query.partial",
        config={"tag": "round-1", "vectors": 1},
        recipients=recipients,
        **{
            "vector-0": to_arrays(update.to_tensors()),
            "stripped-0": ArrayRecord({"parameters": Array(stripped)}),
        },
    )


def test_a_server_that_sends_1_plus_n_for_a_power_reads_no_share(
    tmp_path: Path, two_of_three: Any
) -> None:
    """The server is a recipient of the box too, so it would read the whole share."""
    grid = grid_of(tmp_path, two_of_three, {**PAILLIER, "threshold": 2})
    public = two_of_three[0].public
    update = aggregate_of(public)
    right = strip_messages(public, update.vectors["parameters"])
    chosen = to_matrix([1 + public.n], right.shape[1])
    reason = refused(ask_for_help(grid, update, chosen, strangers(SERVER)))
    assert "not the n-th powers" in reason
    assert not ask_for_help(grid, update, right, strangers(SERVER)).has_error()
    # What such a power gives away, were it taken:
    share = two_of_three[0]
    power = pow(1 + public.n, 2 * math.factorial(3) * share.value, public.n**2)
    assert (power - 1) // public.n // (2 * math.factorial(3)) == share.value


def test_a_helper_with_pinned_peers_seals_its_help_for_no_stranger(
    tmp_path: Path, two_of_three: Any
) -> None:
    peer = make_identity()
    encryption = {**PAILLIER, "threshold": 2}
    grid = grid_of(tmp_path, two_of_three, encryption, peers=pinned(tmp_path, peer))
    update = aggregate_of(two_of_three[0].public)
    stripped = strip_messages(two_of_three[0].public, update.vectors["parameters"])
    asked = ask_for_help(grid, update, stripped, strangers(peer, SERVER))
    assert "is not among the peers" in refused(asked)
    own = write_recipients({1: SERVER.public})
    assert "not its own" in refused(ask_for_help(grid, update, stripped, own))
    assert not ask_for_help(grid, update, stripped, strangers(peer)).has_error()


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"config": {"vectors": "many"}},
        {"config": {"vectors": 1, "tag": "t"}},
        {"config": {"vectors": 1, "tag": "t"}, "recipients": ConfigRecord({"nodes": [1]})},
    ],
)
def test_a_garbled_request_for_help_is_an_error_and_no_help(
    tmp_path: Path, two_of_three: Any, records: Any
) -> None:
    grid = grid_of(tmp_path, two_of_three, {**PAILLIER, "threshold": 2})
    assert refused(send(grid, "query.partial", **records))


def test_help_of_another_dealing_is_refused_by_its_share(two_of_three: Any) -> None:
    others = deal(2, 3, 2048)
    update = aggregate_of(others[0].public)
    with pytest.raises(ValueError, match="load the key of this run"):
        partial_decrypt(two_of_three[0], update.vectors["parameters"])


def final_content(folder: Path, keys: Any, **encryption: Any) -> tuple[Any, Any]:
    """A run whose first client never got the final message, and what it would have been sent."""
    kept = []

    def without_the_first(message: Any) -> Any:
        if message.metadata.message_type == "evaluate.final" and message.metadata.dst_node_id == 1:
            kept.append(message.content)
            return "unplugged"
        return None

    config = small(
        encryption={**PAILLIER, **encryption}, rounds=1, strategy={"tolerate_failures": True}
    )
    grid = small_grid(folder, config, keys, faults=without_the_first)
    train(folder, config, grid)
    grid._faults = lambda message: None
    return grid, kept[0]


def with_vector(content: Any, change: Any) -> Any:
    """The same message with another vector of parameters in its aggregate."""
    update = EncryptedUpdate.from_tensors(from_arrays(content.array_records["aggregate-1"]))
    vectors = {**update.vectors, "parameters": change(update.vectors["parameters"])}
    altered = to_arrays(dataclasses.replace(update, vectors=vectors).to_tensors())
    return RecordDict({**content, "aggregate-1": altered})


def ask(grid: Any, content: Any) -> Any:
    (reply,) = grid.send_and_receive([Message(content, 1, "evaluate.final")])
    return reply


def test_what_an_altered_aggregate_decrypts_to_is_told_alike_and_three_times_at_most(
    tmp_path: Path, whole_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Added to one slot, beyond all slots, or to the randomness: the server hears the same words.

    Else it would read a client's update value by value, from what is refused and why.
    """
    grid, content = final_content(tmp_path, [whole_key] * 3)
    n = whole_key.public.n

    def times(vector: Any, factor: int) -> Any:
        numbers = from_matrix(vector.data)
        numbers[0] = numbers[0] * factor % n**2
        return dataclasses.replace(vector, data=to_matrix(numbers, vector.data.shape[1]))

    update = EncryptedUpdate.from_tensors(from_arrays(content.array_records["aggregate-1"]))
    vector = update.vectors["parameters"]
    layout = vector.layout
    # As much as a slot holds beside the largest sum: no carry, and more than codes can give.
    beside = (1 << layout.slot_bits) - 1 - vector.weight * 2 * layout.fixed_point.levels
    factors = [1 + beside * n, 1 + (1 << (layout.slots * layout.slot_bits)) * n, 2]
    words = {refused(ask(grid, with_vector(content, lambda v, f=f: times(v, f)))) for f in factors}
    assert len(words) == 1
    assert "does not decrypt to values of this run's layout" in words.pop()
    assert caplog.text.count("was not made with djn randomness") == 1
    assert caplog.text.count("cannot give") == 2
    # Nothing more is decrypted under the key, in a run of another name neither.
    assert "decrypts nothing more under key" in refused(ask(grid, content))
    renamed = ConfigRecord({**content.config_records["config"], "bract-session": "another"})
    (initial,) = [
        m.content.array_records["arrays"]
        for m in grid.log
        if m.metadata.message_type == "train" and m.metadata.dst_node_id == 1
    ]
    again = RecordDict({**content, "config": renamed, "arrays": initial})
    assert "decrypts nothing more under key" in refused(ask(grid, again))


# --- A server that asks value by value ---


def beyond(public: Any, query: int) -> Any:
    """Return a change of a vector that adds to its first slot more than codes can give."""

    def change(vector: Any) -> Any:
        top = vector.weight * 2 * vector.layout.fixed_point.levels
        added = (1 << vector.layout.slot_bits) - 1 - top - query
        numbers = from_matrix(vector.data)
        numbers[0] = numbers[0] * (1 + added * public.n) % public.n**2
        return dataclasses.replace(vector, data=to_matrix(numbers, vector.data.shape[1]))

    return change


class Oracle:
    """A server that alters an aggregate, in another run of another federation in each query."""

    def __init__(self, folder: Path, key: Any) -> None:
        self.public = key.public
        self.grid, self.content = final_content(folder, [key] * 3)
        first = next(m for m in self.grid.log if m.metadata.message_type == "train")
        self.initial = first.content.array_records["arrays"]
        self.queries = 0

    def message(self, node: int, *, altered: bool = True) -> Message:
        self.queries += 1
        name = f"oracle-{self.queries}"
        config = small(name=name, encryption=PAILLIER)
        self.grid.contexts[node].run_id += self.queries  # a run keeps its configuration
        self.grid.contexts[node].run_config["federation"] = dump_config(config)
        content = self.content
        if altered:
            content = with_vector(content, beyond(self.public, self.queries))
        instructions = {**content.config_records["config"], "bract-session": name}
        renamed = {**content, "config": ConfigRecord(instructions), "arrays": self.initial}
        return Message(RecordDict(renamed), node, "evaluate.final")

    def ask(self, node: int = 1, *, altered: bool = True) -> Any:
        (reply,) = self.grid.send_and_receive([self.message(node, altered=altered)])
        return reply


ANSWERED = "does not decrypt to values"


def test_renaming_the_federation_reads_no_more_than_three_answers_under_a_key(
    tmp_path: Path, whole_key: Any
) -> None:
    oracle = Oracle(tmp_path, whole_key)
    assert not oracle.ask(altered=False).has_error()
    reasons = []
    for _ in range(6):
        reasons.append(refused(oracle.ask()))
        # Neither a restart of the client nor the loss of its run's folder gives further answers.
        oracle.grid.contexts[1].state.clear()
        shutil.rmtree(tmp_path / "state-0")
    assert [ANSWERED in reason for reason in reasons] == [True] * 3 + [False] * 3
    assert "decrypts nothing more" in refused(oracle.ask(altered=False))
    (record,) = (tmp_path / "keys").glob("failed-*.json")
    assert record.name == f"failed-{whole_key.public.key_id}.json"
    assert record.stat().st_mode & 0o777 == 0o600
    record.write_text("[]")
    assert REFUSED in refused(oracle.ask(altered=False))


def test_clients_with_one_key_answer_three_times_together_also_at_the_same_time(
    tmp_path: Path, whole_key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(tmp_path, whole_key)
    oracle.ask(1)
    oracle.ask(2)
    # Three clients have decrypted, and none has counted it yet.
    together = threading.Barrier(3)

    def waiting(*arguments: Any) -> Any:
        together.wait(30)
        return decrypt_mean(*arguments)

    monkeypatch.setattr("bract.client.encrypted.client.decrypt_mean", waiting)
    messages = [oracle.message(node) for node in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(oracle.grid._answer, messages))
    assert sum(ANSWERED in refused(reply) for reply in replies) == 1


def test_one_aggregate_that_fails_at_every_client_is_one_failure(
    tmp_path: Path, whole_key: Any
) -> None:
    oracle = Oracle(tmp_path, whole_key)
    same = with_vector(oracle.content, beyond(whole_key.public, 0))
    for _ in range(5):
        assert ANSWERED in refused(ask(oracle.grid, same))
    assert not ask(oracle.grid, oracle.content).has_error()


def test_a_key_that_came_in_band_is_counted_in_the_sites_state_or_in_memory(
    tmp_path: Path, whole_key: Any
) -> None:
    update = aggregate_of(whole_key.public)
    other = aggregate_of(whole_key.public)
    for folder in (tmp_path, None):
        memory = RecordDict()

        def kept(key_id: str, folder: Any = folder, memory: Any = memory) -> Any:
            return FailedAggregates(key_id, folder, memory)

        for found in (update, update, other, aggregate_of(whole_key.public)):
            kept("a" * 32).check()
            kept("a" * 32).count(found)
        with refusals.refused("decryption-refused"):
            kept("a" * 32).check()
        kept("b" * 32).check()


def test_the_count_lies_with_the_key_and_where_that_is_read_only_in_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, state = tmp_path / "keys" / "client-0.pem", tmp_path / "state"
    identity = tmp_path / "identity" / "identity.pem"
    for folder in (key.parent, identity.parent):
        folder.mkdir()
    (tmp_path / "link.pem").symlink_to(key)
    assert record_folder(tmp_path / "link.pem", None, state_dir=state) == key.parent
    assert record_folder(None, identity, state_dir=state) == identity.parent
    assert record_folder(None, None, state_dir=state) == state
    assert record_folder(None, None, state_dir=None) is None
    monkeypatch.setattr("os.access", lambda *_: False)
    assert record_folder(key, None, state_dir=state) == state
    with refusals.refused("file-unwritable", tmp_path):
        record_folder(key, None, state_dir=None)


def test_a_value_that_cannot_be_encrypted_reads_like_any_failure(
    tmp_path: Path, whole_key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = grid_of(tmp_path, [whole_key] * 3)
    nan = {n: torch.full_like(v, math.nan) for n, v in tiny().state_dict().items()}
    reasons = {refused(send(grid, "train", arrays=to_arrays(nan)))}
    with monkeypatch.context() as patch:
        patch.setattr("bract.client.session.train_locally", None)
        content = {"arrays": to_arrays(tiny().state_dict())}
        reasons.add(refused(send(grid, "train", 2, **content)).replace("client-1", "client-0"))
    assert len(reasons) == 1
    assert REFUSED in reasons.pop()


def test_a_fused_model_that_fails_is_counted_and_refused_help_still_names_its_helper(
    tmp_path: Path, whole_key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"kind": "sizes", "sizes": [60, 60, 60]}
    config = small(
        encryption=PAILLIER,
        rounds=9,
        strategy={"name": "fedboosting"},
        data={"image_size": 8, "validation": 0.5, "partition": sizes},
    )
    grid = small_grid(tmp_path, config, [whole_key] * 3)
    layout = plan_layout(config.encryption, "parameters", 1210)
    initial = to_arrays(tiny().state_dict())
    shapes = tuple((name, tuple(v.shape)) for name, v in tiny().state_dict().items())

    def ask_fused(number: int) -> Any:
        vector, _ = encrypt(whole_key.public, np.zeros(1210), layout)
        update = EncryptedUpdate({"parameters": vector}, {"parameters": shapes})
        fused = with_vector(
            RecordDict({"aggregate-1": to_arrays(update.to_tensors())}),
            beyond(whole_key.public, number),
        )
        return send(
            grid,
            "evaluate.fused",
            config={"server-round": number, "models": 1},
            **{"fused-0": fused["aggregate-1"]},
        )

    send(grid, "train", arrays=initial)
    assert REFUSED in refused(ask_fused(1))
    (record,) = (tmp_path / "keys").glob("failed-*.json")
    assert len(json.loads(record.read_text())["failed"]) == 1
    assert "was answered" in refused(ask_fused(1))
    with monkeypatch.context() as patch:
        patch.setattr(EncryptedClient, "model_round", property(lambda _: 1))
        patch.setattr(EncryptedClient, "catch_up", lambda *_, **__: True)

        def unproven(*_: Any) -> Any:
            raise RefusedHelpError("fused-2", {7: "not proven"})

        patch.setattr(EncryptedClient, "open", unproven)
        assert "node 7: not proven" in refused(ask_fused(2))


def test_clip_ranges_that_the_server_tries_do_not_count_an_update_s_values(
    tmp_path: Path, whole_key: Any
) -> None:
    """Exact counts at one clip after the other would be the distribution of the update's values."""

    def clipped(clip: float) -> float:
        folder = tmp_path / str(clip)
        config = small(encryption={**PAILLIER, "clip": clip}, rounds=1)
        grid = small_grid(folder, config, [whole_key] * 3)
        reply = send(grid, "train", arrays=to_arrays(tiny().state_dict()))
        return float(reply.content["metrics"]["clipped"])

    torch.manual_seed(0)
    counts = [clipped(clip) for clip in (1e-6, 1e-3, 2e-3, 5e-3)]
    assert counts[0] > 0.0
    assert all(count == float(f"{count:.1g}") for count in counts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"randomness": "standard"}, "with standard randomness, this run's is djn"),
        ({"clip": 500.0}, "this run has"),
        ({"max_weight": 30}, "this run has"),
    ],
)
def test_an_aggregate_of_another_plan_is_refused_before_it_is_decrypted(
    tmp_path: Path, whole_key: Any, change: Any, message: str
) -> None:
    grid, content = final_content(tmp_path, [whole_key] * 3)

    def changed(vector: Any) -> Any:
        if "randomness" in change:
            return dataclasses.replace(vector, **change)
        layout = dataclasses.replace(vector.layout, **change)
        return dataclasses.replace(vector, layout=layout)

    assert message in refused(ask(grid, with_vector(content, changed)))
    assert not ask(grid, content).has_error()
