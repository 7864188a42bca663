import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bract.errors import BractError, SchemaError
from bract.observation import Observation, ObservationStore, Protocol


def observation(**changes) -> Observation:
    fields = {
        "round": 3,
        "client": "client-1",
        "parameters": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)},
        "update": {"w": torch.full((2, 3), 0.5), "b": torch.tensor([1.0, -1.0])},
        "buffers": {"n": torch.tensor(7)},
        "protocol": Protocol(
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


def test_an_observation_survives_the_disk(tmp_path):
    store = ObservationStore(tmp_path)
    saved = observation()
    folder = store.save(saved)
    assert folder == tmp_path / "round-0003" / "client-1"
    loaded = store.load(folder)
    assert loaded.protocol == saved.protocol
    assert loaded.provenance == saved.provenance
    assert list(loaded.update) == ["w", "b"]
    for group in ("parameters", "update", "buffers"):
        for name, value in getattr(saved, group).items():
            assert torch.equal(getattr(loaded, group)[name], value)
            assert getattr(loaded, group)[name].dtype == value.dtype


def test_a_half_written_or_damaged_capture_is_skipped_with_its_name(tmp_path, caplog):
    store = ObservationStore(tmp_path)
    store.save(observation())
    cut = store.save(observation(client="client-2"))
    (cut / "update.safetensors").write_bytes((cut / "update.safetensors").read_bytes()[:40])
    empty = store.save(observation(client="client-3"))
    (empty / "observation.json").unlink()
    assert [o.client for o in store] == ["client-1"]
    assert str(cut) in caplog.text
    assert str(empty) in caplog.text


def test_a_temporary_folder_of_a_crash_is_not_an_observation(tmp_path):
    store = ObservationStore(tmp_path)
    folder = store.save(observation())
    shutil.copytree(folder, folder.with_name(".client-9.0123.tmp"))
    assert len(store.folders()) == 1


def test_another_schema_is_refused_with_found_and_wanted(tmp_path):
    store = ObservationStore(tmp_path)
    path = store.save(observation()) / "observation.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "schema": 0}))
    with pytest.raises(SchemaError, match=r"schema 0, this version reads 1"):
        list(store)


def test_the_gradient_of_local_training_is_the_update_over_lr_and_steps():
    gradient = observation().gradient()
    torch.testing.assert_close(gradient["b"], torch.tensor([5.0, -5.0]))
    sgd = observation(protocol=Protocol(algorithm="fedsgd", lr=0.1, local_steps=1))
    torch.testing.assert_close(sgd.gradient()["b"], torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update": {"w": torch.zeros(2, 3)}}, "lacks b"),
        ({"update": {"w": torch.zeros(3, 2), "b": torch.zeros(2)}}, r"came back as \(3, 2\)"),
        ({"update": {"w": torch.zeros(2, 3), "b": torch.tensor([1.0, torch.nan])}}, "b holds NaN"),
        (
            {"update": {}, "ciphertexts": {"c": torch.zeros(4, dtype=torch.uint8)}},
            "no gradient attack applies",
        ),
    ],
)
def test_what_no_attack_can_use_is_refused_by_name(changes, message):
    with pytest.raises(BractError, match=message):
        observation(**changes).check()


@settings(max_examples=25, deadline=None)
@given(name=st.text(min_size=1, max_size=30), number=st.integers(1, 9999))
def test_no_client_name_leaves_the_store(tmp_path_factory, name, number):
    root = tmp_path_factory.mktemp("store")
    store = ObservationStore(root / "captures")
    folder = store.save(observation(client=name, round=number))
    assert root / "captures" in folder.resolve().parents
    assert store.load(folder).client == name


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bract.observation.save_file", no_space)
    with pytest.raises(BractError, match=r"client-1: cannot be written: .*No space left"):
        ObservationStore(tmp_path).save(observation())
    assert list(tmp_path.rglob("*.*")) == []
