"""`bract describe` writes once, keeps what people wrote, and says what to type next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import Made, observed, own_loop, sgd
from refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.audit.captures import Captures
from bract.cli.describe import describe_app
from bract.cli.settings import read_settings
from bract.disk import write_tensors
from bract.errors import BractError
from bract.models import create_model
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.schema.capture import MissedCapture


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """Captures of one client of a small network, which declare nothing but its examples."""
    torch.manual_seed(0)
    model = create_model("lenet-strided", classes=4, channels=1, image_size=16, activation="relu")
    images, labels = torch.rand(2, 1, 16, 16), torch.tensor([0, 3])
    seen = observed(images, labels, model=model, classes=4, normalised=False, client="node-1")
    declared = ClientDeclaration(num_examples=2, activation="relu")
    update = {name: 0.1 * value for name, value in seen.update.items()}
    ObservationStore(tmp_path / "captures").save(replace(seen, update=update, declaration=declared))
    return tmp_path


SETTINGS: dict[str, Any] = {
    "input.shape": [1, 16, 16],
    "input.mean": [0],
    "input.std": [1],
    "training.lr": 0.1,
    "training.batch_size": 2,
    "training.local_epochs": 1,
    "training.optimizer": "sgd",
}


def describe(app: Path, settings: dict[str, Any] = SETTINGS, **options: Any) -> None:
    """Describe the captures of the `app` fixture without questions."""
    describe_app(app, settings, model="lenet-strided", **options)


def test_what_is_said_is_written_and_what_is_shown_is_completed(
    app: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(app, as_json=True)
    text = (app / "bract.yaml").read_text()
    assert "classes: 4" in text and "lr: 0.1\n" in text and "guessed" not in text
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["description"]["input"]["shape"] == [1, 16, 16] and found["doubts"] == []
    assert f"next: bract audit {app}" in " ".join(said.err.split())


def test_a_file_that_is_there_is_checked_and_changed_by_force_alone(app: Path) -> None:
    describe(app)
    path = app / "bract.yaml"
    path.write_text("# mine\n" + path.read_text())
    before = path.read_text()
    describe(app, {})
    assert path.read_text() == before
    with refused("file-taken", "training.lr"):
        describe(app, {"training.lr": 0.2})
    assert path.read_text() == before
    describe(app, {"training.lr": 0.2}, force=True)
    assert "lr: 0.2" in path.read_text() and "classes: 4" in path.read_text()


def test_a_file_that_no_person_edited_is_written_anew(app: Path) -> None:
    describe(app)
    describe(app, {"training.lr": 0.2})
    assert "lr: 0.2" in (app / "bract.yaml").read_text()


def test_a_single_client_is_described_by_its_own_keys(app: Path) -> None:
    describe(app, SETTINGS | {"clients.node-1.local_steps": 3, "clients.node-1.batch_size": 1})
    assert "local_steps: 3" in (app / "bract.yaml").read_text()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"input.shape": "1x16x16"}, "input.shape: found '1x16x16'"),
        ({"input.mean": "half"}, "input.mean: found 'half'"),
        ({"clients.node-1.steps": 2}, "Did you mean 'clients.node-1.local_steps'?"),
        ({"defenses": [{"name": "adadefense", "alpha": "x" * 300}]}, "defenses"),
        ({"training.lr": -1.0}, "training.lr: found -1.0"),
        ({"training.lr.first": 0.1}, "lr holds a value"),
    ],
)
def test_a_wrong_setting_gives_one_error_and_writes_nothing(
    app: Path, settings: Any, said: str
) -> None:
    with pytest.raises(BractError) as caught:
        describe(app, SETTINGS | settings)
    assert said in str(caught.value) and not (app / "bract.yaml").exists()


def test_without_a_model_nothing_is_written(app: Path) -> None:
    with refused("declaration-lacks", "bract.yaml"):
        describe_app(app, SETTINGS)
    assert not (app / "bract.yaml").exists()


@pytest.mark.parametrize("option", ["training.lr", "=1", "training..lr=1", "a=[1"])
def test_a_setting_that_is_no_key_and_value_names_the_option(option: str) -> None:
    with pytest.raises(BractError, match="--set"):
        read_settings([option])


def test_settings_are_yaml_and_the_last_of_a_key_counts() -> None:
    assert read_settings(["a.b=[1, 2]", "c=x=y", "a.b={k: 0.5}"]) == {"a.b": {"k": 0.5}, "c": "x=y"}


def trained(folder: Path, made: Made) -> Path:
    """Save an upload of several steps that declares little, and what its client kept."""
    seen, images, labels = made
    said = replace(ClientDeclaration(num_examples=len(images)), activation="relu")
    ObservationStore(folder / "captures").save(replace(seen, declaration=said))
    inputs = {"inputs": (images - 0.3) / 0.4, "labels": labels}
    write_tensors(folder / "truth" / seen.client / "round-0001.safetensors", inputs)
    return folder


TRAINED = {
    "input.shape": [1, 8, 8],
    "input.mean": [0.3],
    "input.std": [0.4],
    "training.lr": 0.1,
    "training.batch_size": 2,
    "training.local_epochs": 1,
}


@pytest.mark.parametrize(
    ("terms", "inferred"),
    [
        ({"momentum": 0.9}, {"momentum": 0.9}),
        ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "optimizer": "nesterov"}),
        ({}, {"momentum": 0.0}),
        ({"momentum": 0.9, "nesterov": True, "batch": 4}, {"batch_size": 4, "momentum": 0.9}),
    ],
)
def test_the_nearest_description_that_explains_what_clients_kept_is_taken(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    terms: dict[str, Any],
    inferred: dict[str, Any],
) -> None:
    settings, batch = dict(TRAINED), terms.pop("batch", 2)
    if batch != 2:
        del settings["training.batch_size"]
    describe(trained(tmp_path, own_loop(sgd(**terms), batch=batch)), settings)
    found = RunDirectory(tmp_path).description()
    assert found is not None
    for key, value in inferred.items():
        assert getattr(found.training, key) == value
        assert found.guessed[f"training.{key}"].startswith("inferred: ")
    said = " ".join(capsys.readouterr().err.split())
    assert "inferred: training." in said
    assert "1 of 1 updates" in said


def test_clipping_that_explains_what_clients_kept_is_taken(tmp_path: Path) -> None:
    describe(trained(tmp_path, own_loop(sgd(), clip=0.1)), TRAINED)
    found = RunDirectory(tmp_path).description()
    assert found is not None and found.training.max_grad_norm == 0.1


def test_what_clients_kept_contradicts_is_an_error_and_written_by_force_alone(
    tmp_path: Path,
) -> None:
    trained(tmp_path, own_loop(sgd(), loss=nn.functional.multi_margin_loss))
    with refused("declaration-wrong", "client-0", "--force"):
        describe(tmp_path, TRAINED)
    assert not (tmp_path / "bract.yaml").exists()
    describe(tmp_path, TRAINED, force=True)
    assert (tmp_path / "bract.yaml").exists()


def test_a_value_that_a_person_gave_is_named_and_not_replaced(tmp_path: Path) -> None:
    trained(tmp_path, own_loop(sgd(0.05)))
    with refused("declaration-wrong", "training.lr", "0.05"):
        describe(tmp_path, TRAINED)


@pytest.mark.parametrize(("rate", "batch"), [(0.2, 8), (0.03, 4)])
def test_a_rate_that_nothing_declares_is_read_off_a_fresh_model(
    tmp_path: Path, rate: float, batch: int
) -> None:
    trained(tmp_path, own_loop(sgd(rate), batch=batch))
    (tmp_path / "truth").rename(tmp_path / "elsewhere")
    settings = {key: value for key, value in TRAINED.items() if key != "training.lr"}
    describe(tmp_path, settings | {"training.batch_size": batch})
    found = RunDirectory(tmp_path).description()
    assert found is not None and found.training.lr == rate
    assert "training.lr" in found.guessed


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_that_nothing_declares_is_read_off_a_fresh_model(
    tmp_path: Path, momentum: float
) -> None:
    trained(tmp_path, own_loop(sgd(momentum=momentum)))
    (tmp_path / "truth").rename(tmp_path / "elsewhere")
    describe(tmp_path, TRAINED)
    found = RunDirectory(tmp_path).description()
    assert found is not None and found.training.momentum == momentum
    assert found.guessed["training.momentum"].startswith("inferred: ")


def test_a_train_message_of_another_rate_than_the_client_takes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, images, labels = own_loop(sgd(0.05))
    trained(tmp_path, (seen, images, labels))
    said = ClientDeclaration(num_examples=len(images), lr=0.1, activation="relu")
    ObservationStore(tmp_path / "captures").save(replace(seen, declaration=said))
    describe(tmp_path, {key: value for key, value in TRAINED.items() if key != "training.lr"})
    found = RunDirectory(tmp_path).description()
    assert found is not None and found.training.lr == 0.05
    assert "lr 0.1" in " ".join(capsys.readouterr().err.split())


def test_a_model_in_half_precision_is_refused_by_its_type(app: Path) -> None:
    with refused("model-unsuited", "bfloat16"):
        describe_app(app, SETTINGS, model="test_describe:halved")


def halved() -> nn.Module:
    """Return the model of the `app` fixture, in half precision."""
    model = create_model("lenet-strided", classes=4, channels=1, image_size=16, activation="relu")
    return model.to(torch.bfloat16)


class OwnHead(nn.Sequential):
    """A strided network, whose last layer clients keep to themselves."""

    def __init__(self) -> None:
        body = [nn.Conv2d(1, 4, 3, stride=2), nn.Sigmoid(), nn.Flatten()]
        super().__init__(*body, nn.Linear(36, 10))


def going_on(
    folder: Path, rounds: Sequence[int]
) -> dict[int, tuple[dict[str, Tensor], dict[str, Any]]]:
    """Capture rounds of a client that goes on with its own head; return start and gradient."""
    store, own, made = ObservationStore(folder / "captures"), OwnHead()[3].state_dict(), {}
    for number in (1, 2, 3):
        sent, model = OwnHead(), OwnHead()
        model.load_state_dict(sent.state_dict())
        model[3].load_state_dict(own)
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        images, labels = torch.rand(2, 1, 8, 8), torch.tensor([number, 7])
        F.cross_entropy(model(images), labels).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        gradient = {name: value.grad for name, value in model.named_parameters()}
        own = {name: value.clone() for name, value in model[3].state_dict().items()}
        if number not in rounds:
            continue
        before = {name: value.detach() for name, value in sent.named_parameters()}
        update = {n: before[n] - v.detach() for n, v in model.named_parameters()}
        store.save(Observation(number, "site", before, update, ClientDeclaration(num_examples=2)))
        kept = {"inputs": images, "labels": labels}
        write_tensors(folder / "truth" / "site" / f"round-{number:04d}.safetensors", kept)
        made[number] = start, gradient
    return made


OWN_HEAD: dict[str, Any] = {
    "input.shape": [1, 8, 8],
    "input.mean": [0.0],
    "input.std": [1.0],
    "training.lr": 0.1,
    "training.batch_size": 2,
    "training.local_epochs": 1,
}


def test_the_own_last_upload_is_found_and_taken_as_the_start_of_a_head(tmp_path: Path) -> None:
    made = going_on(tmp_path, (1, 2, 3))
    describe_app(tmp_path, OWN_HEAD, model="test_describe:OwnHead")
    run = RunDirectory(tmp_path)
    found = run.description()
    assert found is not None and found.own == ("3.weight", "3.bias")
    assert found.guessed["own"].startswith("inferred: ")
    captures = Captures(run.captures, [found.model or ""], found)
    with refused("capture-lacks", "round-0001", "3.weight"):
        captures.load(captures.index[0])
    for capture in captures.index[1:]:
        seen = captures.load(capture)
        start, gradient = made[capture.round]
        for name, value in start.items():
            assert torch.allclose(seen.parameters[name], value, atol=1e-6)
            assert torch.allclose(seen.update[name], 0.1 * gradient[name], atol=1e-6)


def test_a_head_of_its_own_without_an_earlier_upload_is_contradicted(tmp_path: Path) -> None:
    going_on(tmp_path, (2,))
    with refused("declaration-wrong", "site"):
        describe_app(tmp_path, OWN_HEAD, model="test_describe:OwnHead")


@pytest.mark.parametrize(
    ("frozen", "taken"),
    [((), ()), (("0.weight", "0.bias"), ("0.bias", "0.weight")), (("0.bias",), ())],
)
def test_layers_that_no_client_moves_are_taken_as_frozen(
    tmp_path: Path, frozen: tuple[str, ...], taken: tuple[str, ...]
) -> None:
    """A fine-tuned head whose client returns the whole state."""
    torch.manual_seed(0)
    images, labels = torch.rand(2, 1, 8, 8), torch.tensor([4, 7])
    sent, model = OwnHead(), OwnHead()
    model.load_state_dict(sent.state_dict())
    for name, value in model.named_parameters():
        value.requires_grad_(name not in frozen)
    F.cross_entropy(model(images), labels).backward()
    trained = [value for value in model.parameters() if value.requires_grad]
    torch.optim.SGD(trained, lr=0.1).step()
    before = {name: value.detach() for name, value in sent.named_parameters()}
    update = {n: before[n] - v.detach() for n, v in model.named_parameters()}
    said = ClientDeclaration(num_examples=2)
    ObservationStore(tmp_path / "captures").save(Observation(1, "site", before, update, said))
    kept = {"inputs": images, "labels": labels}
    write_tensors(tmp_path / "truth" / "site" / "round-0001.safetensors", kept)
    describe_app(tmp_path, OWN_HEAD, model="test_describe:OwnHead")
    found = RunDirectory(tmp_path).description()
    assert found is not None and found.absent == found.buffers == taken


def test_what_the_hook_could_not_capture_is_the_reason_without_captures(tmp_path: Path) -> None:
    missed = MissedCapture(round=1, node_id="7", reason="it holds no floating arrays but 0 (int8)")
    (tmp_path / "captures").mkdir()
    (tmp_path / "captures" / "missed.jsonl").write_text(missed.model_dump_json(by_alias=True))
    with refused("captures-none", "int8"):
        describe(tmp_path)


def test_a_loss_that_no_description_says_is_named_beside_the_rate_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {key: value for key, value in TRAINED.items() if key != "training.lr"}
    smoothed = own_loop(
        sgd(), loss=lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), batch=8
    )
    describe(trained(tmp_path, smoothed), settings | {"training.batch_size": 8})
    found = RunDirectory(tmp_path).description()
    assert found is not None and found.training.lr == pytest.approx(0.09, rel=0.1)
    assert "label smoothing 0.1" in capsys.readouterr().err


def test_a_record_that_nothing_explains_is_named_with_its_worst_tensors(tmp_path: Path) -> None:
    seen, images, labels = own_loop(sgd())
    turned = {name: value.roll(1, -1) for name, value in seen.update.items()}
    trained(tmp_path, (replace(seen, update=turned), images, labels))
    with refused("declaration-wrong", "client-0", "classifier.1.bias"):
        describe(tmp_path, TRAINED)


def renamed(seen: Observation, names: dict[str, str]) -> Observation:
    """Return an upload whose arrays were sent under other names."""

    def other(tensors: dict[str, Any]) -> dict[str, Any]:
        return {names[name]: value for name, value in tensors.items()}

    return replace(
        seen,
        parameters=other(seen.parameters),
        update=other(seen.update),
        buffers=other(seen.buffers),
    )


def test_a_list_of_arrays_is_named_by_the_order_of_the_models_state(tmp_path: Path) -> None:
    seen, images, labels = own_loop(sgd(), name="lenet-strided-bn")
    state = create_model("lenet-strided-bn", classes=10, channels=1, image_size=8).state_dict()
    numbers = {name: str(place) for place, name in enumerate(state)}
    trained(tmp_path, (renamed(seen, numbers), images, labels))
    describe_app(tmp_path, TRAINED, model="lenet-strided-bn")
    found = RunDirectory(tmp_path).description()
    assert found is not None
    assert found.names == {number: name for name, number in numbers.items()}
    assert found.guessed["names"].startswith("inferred: ")


def test_the_names_of_a_wrapped_model_are_those_of_the_model(tmp_path: Path) -> None:
    seen, images, labels = own_loop(sgd())
    wrapped = replace(
        seen,
        parameters={f"module.{n}": v for n, v in seen.parameters.items()},
        update={f"module.{n}": v for n, v in seen.update.items()},
    )
    describe(trained(tmp_path, (wrapped, images, labels)), TRAINED)
    found = RunDirectory(tmp_path).description()
    assert found is not None
    assert found.names == {f"module.{name}": name for name in seen.parameters}


def test_a_list_of_other_shapes_is_refused(tmp_path: Path) -> None:
    seen, images, labels = own_loop(sgd())
    order = {name: str(place) for place, name in enumerate(reversed(list(seen.parameters)))}
    trained(tmp_path, (renamed(seen, order), images, labels))
    with refused("declaration-wrong", "array 0", "state_dict()"):
        describe(tmp_path, TRAINED)


def test_arrays_that_clients_keep_to_themselves_are_unknown_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, images, labels = own_loop(sgd(), batch=8, name="lenet-strided-bn")
    own = {n: v for n, v in seen.parameters.items() if n not in ("features.1.weight",)}
    kept = {n: v for n, v in seen.parameters.items() if n not in own}
    assert kept
    partial = replace(
        seen,
        parameters=own,
        update={name: seen.update[name] for name in own},
        buffers=seen.buffers | kept,
        provenance={"reading": {"record": "arrays", "absent": list(kept)}},
    )
    trained(tmp_path, (partial, images, labels))
    settings = TRAINED | {"training.batch_size": 8}
    describe_app(tmp_path, settings, model="lenet-strided-bn")
    found = RunDirectory(tmp_path).description()
    assert found is not None and found.absent == tuple(kept)
    assert "1 of 1 updates" in " ".join(capsys.readouterr().err.split())


def test_a_client_that_kept_more_than_it_declares_is_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    seen, images, labels = own_loop(sgd())
    trained(tmp_path, (seen, images, labels))
    said = ClientDeclaration(num_examples=2, activation="relu")
    ObservationStore(tmp_path / "captures").save(replace(seen, declaration=said))
    with refused("declaration-wrong", "client-0", " 8 ", " 2,"):
        describe(tmp_path, TRAINED)


def test_a_single_output_is_never_taken_for_classes(tmp_path: Path) -> None:
    images, labels = torch.rand(2, 1, 16, 16), torch.zeros(2, dtype=torch.int64)
    seen = observed(images, labels, classes=1, normalised=False)
    ObservationStore(tmp_path / "captures").save(
        replace(seen, declaration=ClientDeclaration(num_examples=2))
    )
    with refused("declaration-lacks", "binary_cross_entropy_logits"):
        describe(tmp_path)


def test_images_of_a_shape_that_the_model_does_not_take_are_refused_here(app: Path) -> None:
    with refused("declaration-wrong", "[1, 16, 8]"):
        describe(app, SETTINGS | {"input.shape": [1, 16, 8]})


def test_several_labels_an_image_are_never_taken_for_classes(tmp_path: Path) -> None:
    def several(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wanted = torch.nn.functional.one_hot(labels, 10).float().roll(3, 0)
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, wanted)

    seen, _, _ = own_loop(sgd(), loss=several, count=1, batch=1)
    said = ClientDeclaration(num_examples=1, activation="relu")
    ObservationStore(tmp_path / "captures").save(replace(seen, declaration=said))
    with refused("declaration-wrong", "client-0", "--set loss="):
        describe(tmp_path, TRAINED | {"training.batch_size": 1})
    assert not (tmp_path / "bract.yaml").exists()
