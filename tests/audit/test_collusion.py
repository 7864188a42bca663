"""What the hook captures of an encrypted run, and what one client's key makes of it."""

import functools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets
import torch
from audited import request_of
from encrypted_runs import final_model, key_files, small, small_grid, train
from refusals import refused
from reporting import gather

from bract import ObservationStore
from bract.audit.audit import Audit
from bract.audit.captures import Captures
from bract.audit.collusion import Collusion
from bract.audit.questions.reconstruction.notes import MEAN_OF_DEFENDED
from bract.paillier.quantize import FixedPoint

READ_ONCE = functools.cache(sklearn.datasets.load_digits)
CLIP = {"scheme": "paillier", "clip": 0.5}
STEP = FixedPoint(0.5, 16).bound + 1e-7

MODEL = "encrypted_runs:tiny"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, whole_key: Any, two_of_three: Any) -> Any:
    """The same federation in the clear, with a shared key, and with a threshold."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for name, keys, encryption in (
        ("plain", (), "none"),
        ("shared", [whole_key] * 3, CLIP),
        ("threshold", two_of_three, {**CLIP, "threshold": 2}),
    ):
        config = small(encryption=encryption, rounds=2)
        made[name] = train(folder / name, config, small_grid(folder / name, config, keys))
    return folder, made


def key_of(folder: Any, name: Any) -> Any:
    return folder / name / "keys" / "client-1.pem"


@pytest.mark.thorough
def test_the_hook_stores_ciphertexts_and_the_public_initial_model(runs: Any) -> None:
    _, made = runs
    observations = list(ObservationStore(made["shared"].captures))
    assert [o.key for o in observations] == [
        f"round-000{r}/client-{c}" for r in (1, 2) for c in (0, 1, 2)
    ]
    for observation in observations:
        assert observation.update == {} == observation.returned_buffers
        assert observation.declaration.encryption == "paillier"
        assert set(observation.ciphertexts) == {"header", "parameters"}
        assert all(value.dtype == torch.uint8 for value in observation.ciphertexts.values())
        assert bool(observation.parameters) == (observation.round == 1)
        with refused("capture-encrypted"):
            observation.check()


def test_one_client_s_key_opens_every_client_s_update(runs: Any) -> None:
    folder, made = runs
    collusion = Collusion(made["shared"], key_of(folder, "shared"))
    plain = {o.key: o for o in ObservationStore(made["plain"].captures)}
    for captured in ObservationStore(made["shared"].captures):
        opened = collusion.open(captured)
        wanted = plain[captured.key]
        assert list(opened.parameters) == list(wanted.parameters) == list(opened.update)
        # From the second round on both runs have gone their own way by the rounding of the first.
        near = STEP if captured.round == 1 else 1e-3
        for name, value in wanted.update.items():
            assert opened.update[name].dtype == value.dtype
            assert float((opened.update[name] - value).abs().max()) <= near
            assert float((opened.parameters[name] - wanted.parameters[name]).abs().max()) <= near
        opened.check()


def test_the_colluding_view_ends_where_the_clients_end(runs: Any) -> None:
    folder, made = runs
    collusion = Collusion(made["shared"], key_of(folder, "shared"))
    model = collusion._model(2)
    for name, value in final_model(folder / "shared", 0).items():
        torch.testing.assert_close(model[name], value, rtol=0, atol=0)


def test_one_share_opens_nothing_and_says_so(runs: Any) -> None:
    folder, made = runs
    collusion = Collusion(made["threshold"], key_of(folder, "threshold"))
    observation = next(iter(ObservationStore(made["threshold"].captures)))
    with refused("key-missing", 2, 3):
        collusion.open(observation)


def test_the_key_of_another_run_opens_nothing(runs: Any, another_key: Any, tmp_path: Path) -> None:
    _, made = runs
    collusion = Collusion(made["shared"], key_files(tmp_path / "k", [another_key])[0])
    with refused("message-malformed"):
        collusion.open(next(iter(ObservationStore(made["shared"].captures))))


def test_a_run_in_the_clear_has_nothing_to_collude_about(runs: Any) -> None:
    folder, made = runs
    with refused("captures-none"):
        Collusion(made["plain"], key_of(folder, "shared"))


def audit(run: Any, tier: Any, key: Any = None) -> Any:
    choice = request_of(
        run.root,
        {"attacks": ["ig"], "clients": ["client-2"], "rounds": [1], "iterations": 3},
        tier=tier,
        key=key,
        models=[MODEL],
    )
    job = Audit(run, choice)
    return [result.to_dict() for result in job.execute(job.plan())]


@pytest.fixture
def copied(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sklearn.datasets, "load_digits", READ_ONCE)
    folder, made = runs

    def copy(name: Any) -> Any:
        shutil.copytree(made[name].root, tmp_path / name)
        return type(made[name])(tmp_path / name), key_of(folder, name)

    return copy


def test_the_audit_shows_what_the_server_gets_with_and_without_a_traitor(copied: Any) -> None:
    run, key = copied("shared")
    (alone,) = audit(run, "oblivious")
    assert "is encrypted (paillier); no gradient attack applies" in alone["refused"]
    (together,) = audit(run, "colluding", key)
    assert together["refused"] is None
    assert len(together["images"]) > 0
    # The results of both tiers stay, and the report tells them apart.
    facts = gather(run.root)
    assert [(o["tier"], bool(o["refused"])) for o in facts["observations"]] == [
        ("colluding", False),
        ("oblivious", True),
    ]
    tiers = {tier["tier"]: tier for tier in facts["verdict"]["tiers"]}
    assert "1 upload examined" in tiers["oblivious"]["sentence"]
    assert tiers["colluding"]["tried"]
    assert "the oblivious tier" not in facts["threat_model"]["not_tried"]
    saw = {row["question"]: row for row in facts["threat_model"]["saw"]}
    assert saw["Each client's update in the clear"]["answer"] == "no"
    assert "any client and the server read all" in saw["The key that decrypts uploads"]["detail"]


def test_with_a_threshold_the_colluding_tier_is_set_aside_with_the_reason(copied: Any) -> None:
    run, key = copied("threshold")
    (facts,) = audit(run, "colluding", key)
    assert "one client and the server read no update" in facts["refused"]
    saw = {row["question"]: row for row in gather(run.root)["threat_model"]["saw"]}
    assert "any 2 clients decrypt together" in saw["The key that decrypts uploads"]["detail"]


def test_fused_models_that_a_client_can_solve_are_not_called_unreadable(copied: Any) -> None:
    run, key = copied("threshold")
    boosted = run.config_path.read_text().replace("name: fedavg", "name: fedboosting")
    boosted = boosted.replace("weighting: examples", "weighting: softmax")
    boosted = boosted.replace("  max_share: 0.75\n", "")
    boosted = boosted.replace("validation: 0.0", "validation: 0.1")
    run.config_path.write_text(boosted)
    (facts,) = audit(run, "colluding", key)
    assert "can solve them for the updates" in facts["refused"]
    saw = {row["question"]: row for row in gather(run.root)["threat_model"]["saw"]}
    assert "solve for the others' updates" in saw["The key that decrypts uploads"]["detail"]


def test_fewer_than_three_clients_are_warned_about_in_the_report(copied: Any) -> None:
    run, _ = copied("shared")
    assert not any("fewer than three" in note for note in gather(run.root)["notes"])
    for folder in run.captures.glob("round-*/client-2"):
        shutil.rmtree(folder)
    assert any("fewer than three" in note for note in gather(run.root)["notes"])


def test_the_colluding_tier_asks_for_a_key(copied: Any) -> None:
    run, key = copied("shared")
    with refused("usage", "--key"):
        request_of(run.root, tier="colluding")
    with refused("usage", "--key", "--tier", "colluding"):
        request_of(run.root, tier="oblivious", key=key)
    with refused("unknown-name", "colluding"):
        request_of(run.root, tier="coluding")
    run.keys.mkdir()
    shutil.copy(key, run.keys / "private.pem")
    assert request_of(run.root, tier="colluding").key == run.keys / "private.pem"


@pytest.mark.parametrize("kind", ["shared", "threshold"])
def test_the_aggregate_is_the_weighted_mean_of_the_clients_updates(runs: Any, kind: Any) -> None:
    folder, made = runs
    plain = {o.client: o for o in ObservationStore(made["plain"].captures) if o.round == 1}
    examples: list[Any] = [plain[f"client-{i}"].declaration.num_examples for i in range(3)]
    assert examples == [60, 30, 10]
    collusion = Collusion(made[kind], key_of(folder, kind))
    (capture,) = collusion.aggregates([Captures(made[kind].captures).of_round(1)])
    assert (capture.client, capture.members) == ("aggregate", tuple(sorted(plain)))
    found = collusion.aggregate(capture)
    for name, value in found.update.items():
        wanted: Any = sum(
            n / 100 * plain[f"client-{i}"].update[name] for i, n in enumerate(examples)
        )
        assert float((value - wanted).abs().max()) <= STEP
    assert found.declaration.num_examples == 100
    assert list(found.parameters) == list(found.update)
    for name, value in found.parameters.items():
        assert torch.equal(value, plain["client-0"].parameters[name])


@pytest.mark.thorough
def test_the_aggregate_is_attacked_in_the_colluding_tier_beside_the_clients(copied: Any) -> None:
    for kind, opened in (("shared", True), ("threshold", False)):
        run, key = copied(kind)
        choice = request_of(
            run.root,
            {"attacks": ["ig"], "rounds": [1], "iterations": 3},
            tier="colluding",
            key=key,
            models=[MODEL],
        )
        job = Audit(run, choice)
        results = {r.client: r.to_dict() for r in job.execute(job.plan())}
        assert set(results) == {"client-0", "client-1", "client-2", "aggregate"}
        assert (results["client-0"]["refused"] is None) == opened
        found = results["aggregate"]
        assert found["refused"] is None and found["tier"] == "colluding"
        assert found["read_as"] == "oblivious"
        assert results["client-0"]["read_as"] == "colluding"
        assert len(found["images"]) == 8
        facts = gather(run.root)
        rows = {row["attack"] for row in facts["attacks"]}
        assert "ig@aggregate" in rows
        missing = facts["threat_model"]["not_tried"]
        assert not any("the aggregate itself" in item for item in missing)


def test_epsilon_is_asked_of_single_clients_beside_an_aggregate(copied: Any) -> None:
    run, key = copied("shared")
    settings = {"questions": ["epsilon"], "rounds": [1]}
    choice = request_of(run.root, settings, tier="colluding", key=key, models=[MODEL])
    job = Audit(run, choice)
    assert "aggregate" in {c.client for batch in job.plan() for c in batch.captures}
    (answer,) = job.execute(job.plan())
    assert [one["client"] for one in answer.to_dict()["clients"]] == [
        "client-0", "client-1", "client-2",
    ]  # fmt: skip


@pytest.mark.thorough
def test_an_aggregate_of_defended_updates_is_said_to_be_read_as_it_is(
    whole_key: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sklearn.datasets, "load_digits", READ_ONCE)
    config = small(encryption=CLIP, defenses=[{"name": "pruning", "ratio": 0.5}])
    folder = tmp_path / "defended"
    run = train(folder, config, small_grid(folder, config, [whole_key] * 3))
    key = key_of(tmp_path, "defended")
    choice = request_of(
        run.root, {"attacks": ["labels"]}, tier="colluding", key=key, models=[MODEL]
    )
    job = Audit(run, choice)
    results = {r.client: r.to_dict() for r in job.execute(job.plan())}
    assert results["aggregate"]["read_as"] == "oblivious"
    assert MEAN_OF_DEFENDED in results["aggregate"]["notes"]
    assert MEAN_OF_DEFENDED in gather(run.root)["notes"]
    for client in ("client-0", "client-1", "client-2"):
        assert results[client]["read_as"] == "colluding"
        assert MEAN_OF_DEFENDED not in results[client]["notes"]


def test_a_lone_share_does_not_repeat_the_aggregate_and_says_what_is_missing(
    runs: Any, tmp_path: Path
) -> None:
    folder, made = runs
    alone = tmp_path / "alone"
    alone.mkdir()
    key = Path(shutil.copy(key_of(folder, "threshold"), alone / "share.pem"))
    collusion = Collusion(made["threshold"], alone / "share.pem")
    assert key.is_file()
    (capture,) = collusion.aggregates([Captures(made["threshold"].captures).of_round(2)])
    with refused("key-missing", 1, "--key"):
        collusion.aggregate(capture)
