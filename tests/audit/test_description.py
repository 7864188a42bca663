"""A stranger's captures, described afterwards: what is inferred, refused and scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import attacked, with_keys
from refusals import refused
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.attacks.problem.target_model import target_model_of
from bract.audit.audit import Audit
from bract.audit.captures import Captures, with_buffers
from bract.audit.description.confirm import confirm
from bract.audit.description.facts import CaptureFacts, batch_and_epochs, read_facts
from bract.audit.description.infer import Findings, complete
from bract.client.truth import save_truth
from bract.config.config import AuditRequest
from bract.disk import write_tensors
from bract.errors import BractError
from bract.models import MODELS
from bract.report import write_report
from bract.rundir import RunDirectory
from bract.schema import AppDescription, ClientDeclaration
from bract.schema.description_text import build_description, dump_description
from bract.updates.update import buffers_of, difference, parameters_of


class TheirNet(nn.Module):
    """Normalises its inputs itself, by buffers that have no name of PyTorch's."""

    shift: Tensor

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor([0.1]))
        self.conv = nn.Conv2d(1, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.head = nn.Linear(4 * 7 * 7, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.conv(x - self.shift)))
        logits: Tensor = self.head(features.flatten(1))
        return logits


def their_net() -> nn.Module:
    torch.manual_seed(3)
    return TheirNet()


def plain_net() -> nn.Module:
    torch.manual_seed(3)
    return TheirNet(norm=False)


def another_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 5))


def wants_arguments(size: int) -> nn.Module:
    return nn.Linear(size, 2)


HERE = "test_description"
SIZES = {"node-1": 4, "node-2": 10}


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Two clients of unequal size, who kept their truth; nothing is declared."""
    return captured(tmp_path, monkeypatch, their_net)


def captured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
    optimizer: str = "sgd",
    lr: float = 0.1,
    epochs: int = 1,
    batch: int = 4,
) -> RunDirectory:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    run = RunDirectory(tmp_path / "app")
    store = ObservationStore(run.captures)
    for number, (client, size) in enumerate(SIZES.items()):
        model = make()
        parameters, buffers = parameters_of(model), buffers_of(model)
        named = {n: v for n, v in buffers.items() if n == "shift"}
        generator = torch.Generator().manual_seed(number)
        coarse = torch.rand(size, 1, 4, 4, generator=generator)
        images = F.interpolate(coarse, size=(16, 16), mode="bilinear")
        labels = torch.randint(5, (size,), generator=generator)
        model.train()
        kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
        descent = kind(model.parameters(), lr=lr)
        for _ in range(epochs):
            for at in range(0, size, batch):
                descent.zero_grad()
                part = (images[at : at + batch] - 0.5) / 0.5
                F.cross_entropy(model(part), labels[at : at + batch]).backward()
                descent.step()
        after = buffers_of(model)
        # As the hook writes it: what has no name of PyTorch's own counts as a parameter.
        store.save(
            Observation(
                round=1,
                client=client,
                parameters=parameters | named,
                update=difference(parameters, parameters_of(model))
                | {n: torch.zeros_like(v) for n, v in named.items()},
                buffers={n: v for n, v in buffers.items() if n not in named},
                returned_buffers={n: v for n, v in after.items() if n not in named},
                declaration=ClientDeclaration(num_examples=size),
            )
        )
        write_tensors(
            run.truth / client / "round-0001.safetensors",
            {"inputs": (images - 0.5) / 0.5, "labels": labels},
        )
    return run


def described(run: RunDirectory, content: Any, **options: Any) -> Findings:
    description = build_description(content)
    model = description.model
    trusted = [model] if model else []
    return complete(Captures(run.captures, trusted, description), description, **options)


def test_what_the_captures_show_is_inferred(app: RunDirectory) -> None:
    found = described(app, {"model": f"{HERE}:their_net"})
    d = found.description
    assert d.classes == 5 and d.norm_mode == "train" and d.buffers == ("shift",)
    assert d.input.shape == (1, 16, 16)
    assert (d.training.batch_size, d.training.local_epochs) == (4, 1)
    assert d.training.optimizer == "sgd"
    assert d.training.lr is not None and 0.1 / 4 < d.training.lr < 0.1 * 4
    guessed = {"input.mean", "input.std", "training.batch_size", "training.local_epochs"}
    assert guessed | {"training.lr", "training.optimizer"} <= set(d.guessed)
    assert "classes" not in d.guessed and "norm_mode" not in d.guessed
    assert any("input.mean" in doubt for doubt in found.doubts)


def test_an_adam_client_is_told_from_an_sgd_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = captured(tmp_path, monkeypatch, their_net, "adam", 0.002, epochs=2)
    d = described(run, {"model": f"{HERE}:their_net"}).description
    assert d.training.optimizer == "adam" and d.training.local_epochs == 2
    assert d.training.lr == pytest.approx(0.002, rel=0.6)
    wrong = described(run, {"model": f"{HERE}:their_net", "training": {"optimizer": "sgd"}})
    assert any("look like adam's" in doubt for doubt in wrong.doubts)


def test_a_learning_rate_that_cannot_explain_the_updates_is_doubted(app: RunDirectory) -> None:
    for lr, doubted in ((0.1, False), (0.001, True), (30.0, True)):
        content = {"model": f"{HERE}:their_net", "training": {"lr": lr, "optimizer": "sgd"}}
        found = described(app, content)
        assert any("would explain them" in doubt for doubt in found.doubts) == doubted


def test_without_batch_statistics_the_steps_are_a_convention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = captured(tmp_path, monkeypatch, plain_net)
    found = described(run, {"model": f"{HERE}:plain_net"})
    assert found.description.training.batch_size == 32
    assert "convention" in found.description.guessed["training.batch_size"]
    assert any("training.batch_size" in doubt for doubt in found.doubts)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "model is not given"),
        ({"model": f"{HERE}:another_net"}, "another_net has 1.bias, 1.weight, which the capture"),
        ({"model": f"{HERE}:wants_arguments"}, "cannot be made (TypeError"),
        ({"model": f"{HERE}:no_net"}, "cannot be imported"),
        ({"input": {"shape": [1, 9, 9]}}, "does not take"),
        ({"input": {"shape": [3, 16, 16]}}, "does not take"),
        ({"classes": 7}, "has 5 outputs"),
        ({"training": {"batch_size": 2}}, "batch normalisation counted 1"),
        ({"training": {"local_steps": 9}}, "clients.node-1.local_steps=1"),
        ({"clients": {"node-7": {}}}, "clients.node-7: no capture is of it; captured are node-1"),
    ],
)
def test_each_wrong_declaration_gives_one_error(app: RunDirectory, content: Any, said: str) -> None:
    whole = content if content == {} else {"model": f"{HERE}:their_net"} | content
    with pytest.raises(BractError) as caught:
        described(app, whole)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_that_nobody_trusts_is_not_imported(app: RunDirectory) -> None:
    description = AppDescription(model="os:abort")
    with refused("code-untrusted", "--model", "os:abort"):
        complete(Captures(app.captures, (), description), description)


def test_what_clients_kept_settles_input_and_normalisation(app: RunDirectory) -> None:
    found = described(app, {"model": f"{HERE}:their_net"}, truth=app.truth)
    assert found.description.input.mean == (0.5,) and "input.shape" not in found.description.guessed
    for content, said in (
        ({"input": {"mean": [0.0], "std": [1.0]}}, "correct input.mean and input.std"),
        ({"input": {"mean": [0.5], "std": [0.1]}}, "a small part of 0 to 1"),
        ({"input": {"shape": [1, 17, 17]}}, r"kept inputs of \[1, 16, 16\]"),
    ):
        with pytest.raises(BractError, match=said):
            described(app, {"model": f"{HERE}:their_net"} | content, truth=app.truth)
    with refused("truth-lacking"):
        described(app, {"model": f"{HERE}:their_net"}, truth=app.audit)


def test_pictures_whose_channels_stand_last_are_refused(app: RunDirectory) -> None:
    for path in app.truth.rglob("*.safetensors"):
        kept = load_file(path)
        colours = kept["inputs"].repeat(1, 3, 1, 1).permute(0, 2, 3, 1).contiguous()
        write_tensors(path, kept | {"inputs": colours})
    with refused("truth-unusable", "16×16×3", "input.shape=[16,16,3]"):
        described(app, {"model": f"{HERE}:their_net"}, truth=app.truth)


class OfAnyShape(TheirNet):
    """Takes its 256 values in rows of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 1, 16, 16))


def net_of_any_shape() -> nn.Module:
    torch.manual_seed(3)
    return OfAnyShape()


@pytest.mark.parametrize(("shape", "declared"), [((8, 32, 1), False), ((16, 16, 1), True)])
def test_inputs_one_value_wide_and_declared_ones_are_taken(
    app: RunDirectory, shape: tuple[int, int, int], declared: bool
) -> None:
    """Eight leads of a heart's recording have no colours."""
    for path in app.truth.rglob("*.safetensors"):
        kept = load_file(path)
        write_tensors(path, kept | {"inputs": kept["inputs"].reshape(-1, *shape)})
    content: dict[str, Any] = {"model": f"{HERE}:net_of_any_shape"}
    if declared:
        with refused("truth-unusable", "16×16×1", "input.shape=[16,16,1]"):
            described(app, content, truth=app.truth)
        content["input"] = {"shape": list(shape)}
    assert described(app, content, truth=app.truth).description.input.shape == shape


def test_a_normalisation_that_flattens_pixels_is_doubted(app: RunDirectory) -> None:
    content = {"model": f"{HERE}:their_net", "input": {"mean": [0.5], "std": [0.2]}}
    found = described(app, content, truth=app.truth)
    assert any("every PSNR too high" in doubt for doubt in found.doubts)


def test_batches_and_epochs_explain_every_count(app: RunDirectory) -> None:
    capture = Captures(app.captures).index[0]

    def facts(*pairs: tuple[int, int]) -> list[CaptureFacts]:
        return [CaptureFacts(capture, examples, steps) for examples, steps in pairs]

    assert batch_and_epochs(facts((20, 3), (8, 1), (9, 2))) == (8, 1)
    assert batch_and_epochs(facts((20, 10), (4, 2)), batch_size=4) == (4, 2)
    assert batch_and_epochs(facts((20, 3), (20, 4))) is None
    assert batch_and_epochs([]) is None


def test_unequal_clients_are_described_one_by_one(app: RunDirectory) -> None:
    store = ObservationStore(app.captures)
    first = store.load(app.captures / "round-0001" / "node-1")
    counted = {n: v + 4 if "num_batches" in n else v for n, v in first.returned_buffers.items()}
    store.save(replace(first, returned_buffers=counted))
    d = described(app, {"model": f"{HERE}:their_net"}).description
    assert d.clients["node-1"].local_steps == 5 and d.clients["node-2"].local_steps == 3
    assert "clients.node-1.batch_size" in d.guessed
    assert "clients.node-1.local_steps" not in d.guessed  # it was counted


def test_a_count_that_is_none_tells_no_steps(app: RunDirectory) -> None:
    store = ObservationStore(app.captures)
    first = store.load(app.captures / "round-0001" / "node-1")
    counted = {
        n: v * float("nan") if "num_batches" in n else v for n, v in first.returned_buffers.items()
    }
    store.save(replace(first, returned_buffers=counted))
    facts = {found.capture.client: found.steps for found in read_facts(app.captures)[0]}
    assert facts["node-1"] is None and facts["node-2"] == 3


def test_a_client_that_returns_what_it_was_sent_costs_itself_alone(app: RunDirectory) -> None:
    store = ObservationStore(app.captures)
    first = store.load(app.captures / "round-0001" / "node-1")
    store.save(replace(first, update={n: torch.zeros_like(v) for n, v in first.update.items()}))
    found = described(app, {"model": f"{HERE}:their_net"}, truth=app.truth)
    assert any(doubt.startswith("set aside: ") and "node-1" in doubt for doubt in found.doubts)


def test_an_audit_takes_the_description_without_a_new_training_run(app: RunDirectory) -> None:
    choice = AuditRequest(attacks=["ig"], iterations=5, device="cpu", models=frozenset())
    with refused("declaration-lacks", "bract"):
        Audit(app, choice)
    name = f"{HERE}:their_net"
    found = described(app, {"model": name, "training": {"lr": 0.1}}, truth=app.truth)
    (app.root / "bract.yaml").write_text(dump_description(found.description))
    with refused("code-untrusted", "bract.yaml", "--model", "test_description"):
        Audit(app, choice)
    audit = Audit(app, with_keys(choice, models=[name]))
    results = list(attacked(audit))
    assert all(result.scored and result.refused is None for result in results)
    assert results[0].local_steps == 1 and results[1].local_steps == 3
    check = results[0].signals.truth_check if results[0].signals else None
    assert check is not None and (check.cosine or 0.0) > 1 - 1e-5
    # Nobody named test data, so the images of the other client stand in, never its own.
    assert results[0].candidates == 11 and results[1].candidates == 5
    assert {"class_mean", "random_image"} <= set(results[0].baselines)
    page = write_report(app.root).read_text()
    assert "Guessed from the captures" in page and "that other clients kept" in page


def test_named_test_data_take_the_place_of_other_clients_images(app: RunDirectory) -> None:
    name = f"{HERE}:their_net"
    found = described(app, {"model": name, "data": {"name": "digits"}}, truth=app.truth)
    (app.root / "bract.yaml").write_text(dump_description(found.description))
    choice = AuditRequest(attacks=["ig"], iterations=2, device="cpu", models=[name])
    audit = Audit(app, choice)
    results = list(attacked(audit))
    assert [result.candidates for result in results] == [100, 100]


def test_alone_a_client_is_scored_without_references(app: RunDirectory) -> None:
    name = f"{HERE}:their_net"
    (app.truth / "node-2" / "round-0001.safetensors").unlink()
    found = described(app, {"model": name, "training": {"lr": 0.1}}, truth=app.truth)
    (app.root / "bract.yaml").write_text(dump_description(found.description))
    choice = AuditRequest(
        attacks=["ig"],
        clients=["node-1"],
        iterations=2,
        device="cpu",
        models=[name],
    )
    audit = Audit(app, choice)
    (result,) = attacked(audit)
    assert result.scored and result.candidates is None
    assert any("left open" in note for note in result.notes)
    assert "cannot be decided" in write_report(app.root).read_text()


def test_captures_may_lie_in_a_folder_of_any_name(app: RunDirectory) -> None:
    elsewhere = app.captures.rename(app.root / "what-the-server-saw")
    run = RunDirectory.open(elsewhere)
    assert run.captures == elsewhere == run.root
    assert len(Captures.of_run(run).index) == 2
    save_truth(run.truth / "node-1", 1, torch.rand(4, 1, 16, 16), torch.zeros(4, dtype=torch.int64))
    page = write_report(run.root)
    assert page.parent == elsewhere and "2 captured uploads" in page.read_text()


def test_a_buffer_that_was_captured_as_a_parameter_is_taken_out(app: RunDirectory) -> None:
    observation = ObservationStore(app.captures).load(app.captures / "round-0001" / "node-1")
    found = with_buffers(observation, ("shift", "absent"))
    assert "shift" not in found.parameters and "shift" not in found.update
    assert torch.equal(found.buffers["shift"], found.returned_buffers["shift"])
    assert with_buffers(observation, ()) is observation


def test_models_of_the_registry_need_no_trust(app: RunDirectory) -> None:
    assert "lenet" in MODELS
    with refused("declaration-wrong"):
        described(app, {"model": "lenet", "input": {"shape": [1, 32, 32]}, "classes": 5})


@pytest.mark.parametrize("given", [{}, {"lr": 0.1}])
def test_local_epochs_that_nothing_declares_are_found_on_what_clients_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    run = captured(tmp_path, monkeypatch, plain_net, epochs=3)
    content: dict[str, Any] = {"model": f"{HERE}:plain_net", "input": {"mean": [0.5], "std": [0.5]}}
    described_so = build_description(content | {"training": {"batch_size": 4, **given}})
    captures = Captures(run.captures, [f"{HERE}:plain_net"], described_so)
    found = complete(captures, described_so, truth=run.truth)
    confirmed = confirm(captures, found, described_so, truth=run.truth).description
    assert confirmed.training.local_epochs == 3
    assert confirmed.training.lr == pytest.approx(0.1, rel=0.05)
    assert "kept" in confirmed.guessed["training.local_epochs"]


@pytest.mark.parametrize(("batch", "steps"), [(2, 1), (2, 3)])
def test_a_loop_that_ends_early_mixes_the_examples_that_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, steps: int
) -> None:
    """The reply counts the whole data set, and the update holds the examples of some steps."""
    monkeypatch.setitem(SIZES, "node-1", batch * steps)
    monkeypatch.setitem(SIZES, "node-2", batch * steps)
    run = captured(tmp_path, monkeypatch, plain_net, lr=0.5, batch=batch)
    store = ObservationStore(run.captures)
    for one in list(store):
        store.save(replace(one, declaration=ClientDeclaration(num_examples=50, lr=0.5)))
    content = {"model": f"{HERE}:plain_net", "input": {"mean": [0.5], "std": [0.5]}}
    given = build_description(content)
    captures = Captures(run.captures, [f"{HERE}:plain_net"], given)
    found = confirm(captures, complete(captures, given, truth=run.truth), given, truth=run.truth)
    assert found.is_confirmed
    one = next(iter(store))
    said = found.description.declare(one.declaration, one.client, one.round)
    assert (said.batch_size, said.local_steps) == (batch, steps)


def sent_next(run: RunDirectory, rate: float, *, drawn: bool = False) -> None:
    """Let the server go on from round 1 by ``rate`` times the mean update, or another direction."""
    store = ObservationStore(run.captures)
    first = list(store)
    whole = sum(SIZES.values())
    torch.manual_seed(0)
    moved = {
        name: rate * sum(SIZES[o.client] / whole * o.update[name] for o in first)
        for name in first[0].update
    }
    if drawn:
        moved = {name: torch.randn_like(torch.as_tensor(value)) for name, value in moved.items()}
    for one in first:
        parameters = {n: v - moved[n] for n, v in one.parameters.items()}
        store.save(replace(one, round=2, parameters=parameters))


@pytest.mark.parametrize(("rate", "words"), [(1.0, "updates (cosine 1"), (0.3, "times 0.3")])
def test_the_next_model_shows_that_updates_are_read_as_the_server_reads_them(
    app: RunDirectory, rate: float, words: str
) -> None:
    sent_next(app, rate)
    found = described(app, {"model": f"{HERE}:their_net"})
    assert any(words in line and "server reads" in line for line in found.confirmed)


def test_a_model_that_goes_against_the_updates_refuses_their_sign(app: RunDirectory) -> None:
    sent_next(app, -1.0)
    content = {"model": f"{HERE}:their_net"}
    found = described(app, content)
    given, captures = build_description(content), Captures(app.captures, [content["model"]])
    with refused("declaration-wrong", "opposite sign", "update='delta'"):
        confirm(captures, found, given, truth=None)
    forced = confirm(captures, described(app, content), given, truth=None, force=True)
    assert any("opposite sign" in doubt for doubt in forced.doubts)
    # An asynchronous server goes its own way, and the clients' own data show how to read them.
    kept = confirm(captures, described(app, content, truth=app.truth), given, truth=app.truth)
    assert any("other ones" in doubt for doubt in kept.doubts)


class Frozen(nn.Module):
    """A head on a backbone that no party sends."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, stride=2)
        self.head = nn.Linear(4 * 7 * 7, 5)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.body(x)).flatten(1))
        return logits


def seeded_backbone() -> nn.Module:
    torch.manual_seed(3)
    return Frozen()


def backbone_drawn_anew() -> nn.Module:
    torch.seed()
    return Frozen()


class WithAuxiliaryHead(TheirNet):
    """Returns a second head's logits while it trains, as Inception does."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


def auxiliary_net() -> nn.Module:
    torch.manual_seed(3)
    return WithAuxiliaryHead()


def test_a_backbone_that_is_drawn_anew_and_that_nobody_sent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = captured(tmp_path, monkeypatch, seeded_backbone)
    store = ObservationStore(run.captures)
    for one in list(store):
        head = {n: v for n, v in one.parameters.items() if n.startswith("head.")}
        update = {n: one.update[n] for n in head}
        store.save(replace(one, parameters=head, update=update))
    content: dict[str, Any] = {"input": {"mean": [0.5], "std": [0.5]}, "training": {"lr": 0.1}}
    described(run, content | {"model": f"{HERE}:seeded_backbone"})
    with refused("model-unsuited", "body.weight", "anew", "loads"):
        described(run, content | {"model": f"{HERE}:backbone_drawn_anew"})
    # Who audits with a description of their own is told too.
    one = next(iter(store))
    declared = build_description(
        content
        | {"model": f"{HERE}:backbone_drawn_anew", "classes": 5, "input": {"shape": [1, 16, 16]}}
    ).declare(one.declaration, one.client, one.round)
    trusting = declared.trusting([f"{HERE}:backbone_drawn_anew"])
    with refused("model-unsuited", "body.weight", "anew"):
        target_model_of(replace(one, declaration=trusting))


def spectral_net() -> nn.Module:
    """Draws the vectors of two norms anew each time."""
    torch.manual_seed(3)
    net = TheirNet(norm=False)
    torch.seed()
    nn.utils.parametrizations.spectral_norm(net.conv)
    nn.utils.spectral_norm(net.head)
    return net


def test_vectors_of_a_spectral_norm_need_not_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training moves them to where the weights have them, wherever they began."""
    run = captured(tmp_path, monkeypatch, spectral_net)
    store = ObservationStore(run.captures)
    for one in list(store):
        store.save(replace(one, buffers={}, returned_buffers={}))
    content = {"model": f"{HERE}:spectral_net", "norm_mode": "eval", "training": {"lr": 0.1}}
    found = described(run, content)
    assert found.description.classes == 5
    assert any("state_dict()" in doubt and "spectral" in doubt for doubt in found.doubts)
    for mode in ("train", "eval"):
        content = found.description.model_dump(mode="json", exclude_unset=True)
        declared = build_description(content | {"norm_mode": mode})
        captures = Captures(run.captures, [f"{HERE}:spectral_net"], declared)
        seen = captures.load(captures.index[0])
        target = target_model_of(seen)
        net = spectral_net()
        net.load_state_dict(seen.parameters, strict=False)
        images = torch.rand(2, 1, 16, 16)
        for _ in range(2000):  # of power iterations, as training makes them
            expected = net.train()(images)
        held = {n: v[None].expand(2, *v.shape) for n, v in seen.parameters.items()}
        outputs = target(held, {}, images[None].expand(2, 2, 1, 16, 16))
        assert torch.allclose(outputs[1], expected, atol=1e-4)


def net_with_two_norms() -> nn.Module:
    net = spectral_net()
    nn.utils.parametrizations.spectral_norm(net.get_submodule("conv"))
    return net


def test_a_spectral_norm_of_what_another_parametrization_makes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = captured(tmp_path, monkeypatch, net_with_two_norms)
    store = ObservationStore(run.captures)
    for one in list(store):
        store.save(replace(one, buffers={}, returned_buffers={}))
    content = {"model": f"{HERE}:net_with_two_norms", "norm_mode": "eval", "training": {"lr": 0.1}}
    declared = build_description(described(run, content).description.model_dump(mode="json"))
    captures = Captures(run.captures, [f"{HERE}:net_with_two_norms"], declared)
    with refused("model-unsuited", "another parametrization"):
        target_model_of(captures.load(captures.index[0]))


MADE: list[str] = []


class WithConstant(TheirNet):
    """Holds constants that no state names, as a transformer's ``position_ids`` are."""

    def __init__(self) -> None:
        MADE.append("one")
        super().__init__()
        self.register_buffer("places", torch.arange(5), persistent=False)


def net_with_constant() -> nn.Module:
    torch.manual_seed(3)
    return WithConstant()


def test_what_is_made_alike_is_made_twice_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = captured(tmp_path, monkeypatch, net_with_constant)
    model = f"{HERE}:net_with_constant"
    content = {"model": model, "classes": 5, "input": {"shape": [1, 16, 16]}}
    one = next(iter(ObservationStore(run.captures)))
    declared = build_description(content).declare(one.declaration, one.client, one.round)
    sent = {n: v for n, v in one.parameters.items() if n != "shift"}
    plain = replace(
        one,
        parameters=sent,
        update={n: one.update[n] for n in sent},
        buffers=one.buffers | {"shift": one.parameters["shift"]},
        returned_buffers={},
        declaration=declared.trusting([model]),
    )
    made = []
    for _ in range(3):
        MADE.clear()
        target_model_of(plain)
        made.append(len(MADE))
    assert made == [2, 1, 1]


def test_a_model_that_returns_more_while_it_trains_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = captured(tmp_path, monkeypatch, their_net)
    with refused("declaration-lacks", "tuple while it trains", "logits alone"):
        described(run, {"model": f"{HERE}:auxiliary_net"})
    described(run, {"model": f"{HERE}:auxiliary_net", "norm_mode": "eval"})


def test_a_model_that_does_not_follow_from_the_updates_is_a_doubt(app: RunDirectory) -> None:
    sent_next(app, 1.0, drawn=True)
    found = described(app, {"model": f"{HERE}:their_net"})
    assert any("not follow" in doubt for doubt in found.doubts)
