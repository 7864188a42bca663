import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from safetensors import SafetensorError

from bract import Observation, ObservationStore
from bract.errors import BractError
from bract.schema import ClientDeclaration
from bract.schema.declaration import ClientStatement


def observation(**changes: Any) -> Observation:
    fields = {
        "round": 3,
        "client": "client-1",
        "parameters": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)},
        "update": {"w": torch.full((2, 3), 0.5), "b": torch.tensor([1.0, -1.0])},
        "buffers": {"n": torch.tensor(7)},
        "declaration": ClientDeclaration(
            model="lenet",
            image_shape=(1, 32, 32),
            classes=10,
            mean=(0.3,),
            std=(0.4,),
            lr=0.1,
            local_steps=2,
            defenses=({"name": "adadefense", "eps": 1e-8},),
        ),
        "provenance": {"run_id": "5"},
    }
    return Observation(**{**fields, **changes})


def test_an_observation_survives_the_disk(tmp_path: Path) -> None:
    store = ObservationStore(tmp_path)
    saved = observation()
    folder = store.save(saved)
    assert folder == tmp_path / "round-0003" / "client-1"
    loaded = store.load(folder)
    assert loaded.declaration == saved.declaration
    assert loaded.provenance.items() >= saved.provenance.items()
    assert list(loaded.update) == ["w", "b"]
    for group in ("parameters", "update", "buffers"):
        for name, value in getattr(saved, group).items():
            assert torch.equal(getattr(loaded, group)[name], value)
            assert getattr(loaded, group)[name].dtype == value.dtype


def test_a_half_written_or_damaged_capture_is_skipped_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObservationStore(tmp_path)
    store.save(observation())
    cut = store.save(observation(client="client-2"))
    (cut / "update.safetensors").write_bytes((cut / "update.safetensors").read_bytes()[:40])
    empty = store.save(observation(client="client-3"))
    (empty / "observation.json").unlink()
    assert [o.client for o in store] == ["client-1"]
    assert str(cut) in caplog.text
    assert str(empty) in caplog.text


def test_a_temporary_folder_of_a_crash_is_not_an_observation(tmp_path: Path) -> None:
    store = ObservationStore(tmp_path)
    folder = store.save(observation())
    shutil.copytree(folder, folder.with_name(".client-9.0123.tmp"))
    assert len(store.folders()) == 1


def test_another_schema_is_refused_with_found_and_wanted(tmp_path: Path) -> None:
    store = ObservationStore(tmp_path)
    path = store.save(observation()) / "observation.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "schema": 5}))
    with refused("schema-version", "schema", 5, 6, 7):
        list(store)


def test_the_gradient_of_local_training_is_the_update_over_lr_and_steps() -> None:
    gradient = observation().gradient()
    torch.testing.assert_close(gradient["b"], torch.tensor([5.0, -5.0]))
    sgd = observation(declaration=ClientDeclaration(algorithm="fedsgd", lr=0.1, local_steps=1))
    torch.testing.assert_close(sgd.gradient()["b"], torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update": {"w": torch.zeros(2, 3)}}, ("capture-lacks",)),
        ({"update": {"w": torch.zeros(3, 2), "b": torch.zeros(2)}}, ("capture-damaged", "3", "2")),
        (
            {"update": {"w": torch.zeros(2, 3), "b": torch.tensor([1.0, torch.nan])}},
            ("attack-evidence", "NaN"),
        ),
        (
            {"update": {}, "ciphertexts": {"c": torch.zeros(4, dtype=torch.uint8)}},
            ("capture-encrypted",),
        ),
    ],
)
def test_what_no_attack_can_use_is_refused_by_name(changes: Any, message: tuple[str, ...]) -> None:
    with refused(*message):
        observation(**changes).check()


@pytest.mark.parametrize("name", ["", ".", "..", "../out", "/tmp/out", "a/b", "a b", "x" * 65])
def test_no_client_name_leaves_its_rounds_folder_or_replaces_it(tmp_path: Path, name: Any) -> None:
    store = ObservationStore(tmp_path / "captures")
    kept = store.save(observation(client="client-0"))
    with refused("message-malformed"):
        store.save(observation(client=name))
    assert store.folders() == [kept]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["captures"]


def moved(tmp_path: Path, change: Any) -> Any:
    store = ObservationStore(tmp_path)
    folder = store.save(observation())
    path = folder / "observation.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return store, folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(client="client-2"), ("capture-damaged", "round-0003/client-2")),
        (lambda c: c.update(client="../../out"), ("capture-damaged", "../../out")),
        (lambda c: c.update(round=4), ("capture-damaged", "round-0004")),
        (lambda c: c.update(round="3; rm"), ("capture-damaged",)),
        (lambda c: c["declaration"].update(local_steps=10**12), ("capture-damaged", "local_steps")),
        (
            lambda c: c["declaration"].update(image_shape=[1, 10**9, 2]),
            ("capture-damaged", "image_shape"),
        ),
        (lambda c: c["declaration"].update(lr="fast"), ("capture-damaged",)),
        (lambda c: c["declaration"].update(extra=1), ("capture-damaged", "extra")),
        (lambda c: c["declaration"].update(model="a\x1b]0;b"), ("capture-damaged", "model")),
        (lambda c: c["declaration"].update(model="a\nnext: b"), ("capture-damaged", "model")),
        (lambda c: c["declaration"].update(defenses=[{"alpha": 1}]), ("capture-damaged", "name")),
        (
            lambda c: c["declaration"].update(defenses=[{"name": "x", "y": [[1]]}]),
            ("capture-damaged", "defenses"),
        ),
        (
            lambda c: c["declaration"].update(defenses=[{"name": "x"}] * 17),
            ("capture-damaged", "defenses"),
        ),
        (lambda c: c["tensors"].update(secrets=["w"]), ("capture-damaged", "tensors")),
        (lambda c: c.update(declaration=[]), ("capture-damaged", "declaration")),
    ],
)
def test_a_malformed_description_is_refused_by_its_folder(
    tmp_path: Path, change: Any, words: tuple[str, ...]
) -> None:
    store, folder = moved(tmp_path, change)
    with refused(*words) as caught:
        store.describe(folder)
    assert str(folder) in str(caught.value)
    assert list(store) == []


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "null", '"x"', "NaN", ""])
def test_a_description_that_is_no_object_is_refused_and_the_others_are_read(
    tmp_path: Path, text: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObservationStore(tmp_path)
    bad = store.save(observation(client="bad"))
    store.save(observation(client="good"))
    (bad / "observation.json").write_text(text)
    assert [o.client for o in store] == ["good"]
    assert str(bad) in caplog.text


def test_a_model_reference_is_read_only_by_a_reader_who_named_it(tmp_path: Path) -> None:
    declared = ClientDeclaration(model="os:abort")
    folder = ObservationStore(tmp_path).save(observation(declaration=declared))
    assert ObservationStore(tmp_path).load(folder).declaration.model is None
    assert ObservationStore(tmp_path, models=["a:b"]).load(folder).declaration.model is None
    trusting = ObservationStore(tmp_path, models=["os:abort"])
    assert trusting.load(folder).declaration.model == "os:abort"
    assert trusting.describe(folder).declaration.model == "os:abort"


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left")])
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("bract.captures.observation.write_bytes", fail)
    with refused("write-failed", "client-1"):
        ObservationStore(tmp_path).save(observation())
    assert list(tmp_path.rglob("*.*")) == []


def test_what_does_not_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bract.captures.observation.shutil.disk_usage", lambda _: SimpleNamespace(free=40)
    )
    with refused("file-unwritable", 40, "free"):
        ObservationStore(tmp_path).save(observation())
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=100, deadline=None)
@given(
    said=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["model", "num_examples", "defenses", "batch_size", "x", "name"]),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_a_client_says_is_taken_flagged_or_refused(said: Any) -> None:
    said = said if isinstance(said, dict) else {"defenses": said, "model": said}
    mine = ClientDeclaration(model="lenet", lr=0.1, batch_size=8)
    try:
        statement = ClientStatement.of(said)
    except BractError:
        return
    declaration, flags = statement.lay_over(mine, said)
    assert (declaration.model, declaration.lr) == ("lenet", 0.1)
    assert declaration.batch_size is not None and declaration.batch_size <= 8
    assert all(len(flag) < 400 for flag in flags)
