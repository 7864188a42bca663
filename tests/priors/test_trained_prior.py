import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pack
import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from bract_priors.fingerprints import NEAR, copies_among, fingerprints
from bract_priors.prior_facts import PriorFacts
from bract_priors.prior_training import PriorSettings, train_prior
from bract_priors.trained_prior import Decoder, TrainedPrior, make_prior


def blobs(count: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Bright squares on dark ground, at one of four places."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 4
    images = 0.1 * torch.rand(count, 1, size, size, generator=generator)
    half = size // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = half * (label // 2), half * (label % 2)
        image[:, top : top + half, left : left + half] += 0.8
    return images, labels


@pytest.fixture(scope="module")
def trained() -> TrainedPrior:
    images, labels = blobs(200)
    settings = PriorSettings(latent=4, width=8, epochs=60, lr=5e-3)
    return train_prior(images, labels, settings, source="blobs", classes=4)


def test_a_trained_generator_makes_images_of_the_class_it_is_asked_for(
    trained: TrainedPrior,
) -> None:
    images = trained.sample([0, 1, 2, 3], seed=5)
    means = F.avg_pool2d(images, 8).flatten(1)
    assert means.argmax(dim=1).tolist() == [0, 1, 2, 3]
    assert trained.facts.held_out_psnr is not None and trained.facts.held_out_psnr > 20
    assert torch.equal(images, trained.sample([0, 1, 2, 3], seed=5))
    assert not torch.equal(images, trained.sample([0, 1, 2, 3], seed=6))


def test_training_repeats_under_its_seed_and_leaves_the_global_generator_alone() -> None:
    images, _ = blobs(32)
    settings = PriorSettings(latent=2, width=2, epochs=1)
    before = torch.get_rng_state()
    one, two = (train_prior(images, None, settings, source="blobs") for _ in range(2))
    assert one.digest == two.digest and one.facts.classes == 0
    assert torch.equal(before, torch.get_rng_state())


def test_a_prior_knows_its_training_images_even_rounded_and_resized(trained: TrainedPrior) -> None:
    images, _ = blobs(200)
    rounded = (images[:3] * 255).round() / 255
    larger = F.interpolate(images[3:6], size=(32, 32), mode="nearest")
    others = blobs(8)[0].flip(0) * 0.9
    assert trained.trained_on(rounded).all() and trained.trained_on(larger).all()
    assert not trained.trained_on(others).any()
    assert not trained.trained_on(images[:1].expand(-1, 3, -1, -1)).any()


def test_a_file_brings_back_the_same_generator(trained: TrainedPrior, tmp_path: Path) -> None:
    again = TrainedPrior.load(trained.save(tmp_path / "prior.safetensors"))
    assert again.facts == trained.facts and again.digest == trained.digest
    assert torch.equal(again.sample([1], seed=1), trained.sample([1], seed=1))


@pytest.mark.parametrize("size", [8, 9, 28, 32, 64])
def test_a_decoder_makes_every_side(size: int) -> None:
    decoder = Decoder((3, size, size), latent=2, width=2)
    assert decoder(torch.zeros(2, 2)).shape == (2, 3, size, size)


@pytest.fixture(scope="module")
def flow() -> TrainedPrior:
    images, labels = blobs(200)
    settings = PriorSettings(kind="flow", width=8, epochs=60, lr=5e-3)
    return train_prior(images, labels, settings, source="blobs", classes=4)


@pytest.mark.slow
def test_a_trained_flow_makes_images_of_the_class_it_is_asked_for(
    flow: TrainedPrior, tmp_path: Path
) -> None:
    images = flow.sample([0, 1, 2, 3], seed=5)
    assert F.avg_pool2d(images, 8).flatten(1).argmax(dim=1).tolist() == [0, 1, 2, 3]
    assert (flow.facts.generator, flow.facts.latent) == ("flow", 256)
    assert flow.facts.held_out_psnr is not None and flow.facts.held_out_psnr > 15
    again = TrainedPrior.load(flow.save(tmp_path / "flow.safetensors"))
    assert again.facts == flow.facts and again.digest == flow.digest
    assert torch.equal(again.sample([1], seed=1), flow.sample([1], seed=1))


def test_a_flow_from_a_file_is_the_same_and_makes_other_images_of_another_class(
    tmp_path: Path,
) -> None:
    flow = pack.prior("flow")
    one, other = flow.sample([1, 1], seed=5), flow.sample([1, 7], seed=5)
    assert torch.equal(one[0], other[0]) and float((one[1] - other[1]).abs().max()) > 0.05
    again = TrainedPrior.load(flow.save(tmp_path / "flow.safetensors"))
    assert again.facts == flow.facts and again.digest == flow.digest
    assert torch.equal(again.sample([1], seed=1), flow.sample([1], seed=1))


def test_training_of_a_flow_repeats_under_its_seed() -> None:
    images, _ = blobs(32)
    settings = PriorSettings(kind="flow", width=2, epochs=1)
    one, two = (train_prior(images, None, settings, source="blobs") for _ in range(2))
    other = train_prior(images, None, replace(settings, seed=1), source="blobs")
    assert one.digest == two.digest != other.digest


def test_a_file_of_the_first_version_is_an_autoencoder_s(
    trained: TrainedPrior, tmp_path: Path
) -> None:
    path = damaged(trained.save(tmp_path / "p.safetensors"), facts={"schema": 1}, without="kind")
    found = TrainedPrior.load(path)
    assert found.facts == trained.facts and found.facts.generator == "autoencoder"
    assert torch.equal(found.sample([1], seed=1), trained.sample([1], seed=1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"facts": {"kind": "autoencoder"}}, ("file-damaged",)),
        ({"facts": {"kind": "diffusion"}}, ("file-damaged", "kind", "autoencoder", "flow")),
        ({"facts": {"kind": ["flow"]}}, ("file-damaged", "kind")),
        ({"facts": {"latent": 63}}, ("file-damaged", "latent", "64")),
        ({"facts": {"width": 16}}, ("file-damaged",)),
        ({"facts": {"width": 257}}, ("file-damaged", "width")),
        ({"last__bias": torch.full((1,), float("nan"))}, ("file-damaged", "last.bias")),
    ],
)
def test_a_damaged_flow_is_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], said: tuple[str, ...]
) -> None:
    path = damaged(pack.prior("flow").save(tmp_path / "p.safetensors"), **dict(changes))
    with refused(*said) as raised:
        TrainedPrior.load(path)
    assert "p.safetensors" in str(raised.value) and "\n" not in str(raised.value)


def test_few_images_and_what_does_not_fit_are_refused(trained: TrainedPrior) -> None:
    with refused("data-empty", 15, 16):
        train_prior(blobs(15)[0], None, PriorSettings(), source="few")
    with refused("prior-unsuited", 16, 32):
        trained.check((1, 32, 32), 4)
    with refused("prior-unsuited", 4, 10):
        trained.check((1, 16, 16), 10)
    trained.check((1, 16, 16), 4)


def damaged(path: Path, **changes: Any) -> Path:
    """Write the file again with other tensors or another record."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        facts = json.loads((file.metadata() or {})["bract.prior"])
    tensors = load_file(path)
    facts |= changes.pop("facts", {})
    facts.pop(changes.pop("without", None), None)
    for name, value in changes.items():
        tensors[name.replace("__", ".")] = value
    save_file(tensors, path, {"bract.prior": json.dumps(facts)})
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"facts": {"latent": 5}}, ("file-damaged", "first.weight")),
        ({"facts": {"latent": 10**9}}, ("file-damaged",)),
        ({"facts": {"images": 7}}, ("file-damaged",)),
        ({"facts": {"digest": "0" * 64}}, ("file-damaged", "digest")),
        ({"facts": {"schema": 9}}, ("schema-version", "schema", "9")),
        ({"facts": {"strange": 1}}, ("schema-version", "strange")),
        ({"extra": torch.zeros(3)}, ("file-damaged", "extra")),
        ({"last__bias": torch.full((4,), float("nan"))}, ("file-damaged", "last.bias")),
        ({"last__bias": torch.zeros(4, dtype=torch.float16)}, ("file-damaged", "last.bias")),
        ({"last__bias": torch.full((4,), 3e38)}, ("file-damaged", "last.bias")),
        ({"last__bias": torch.full((4,), -float("inf"))}, ("file-damaged", "last.bias")),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(
    trained: TrainedPrior, tmp_path: Path, changes: dict[str, Any], said: tuple[str, ...]
) -> None:
    path = damaged(trained.save(tmp_path / "p.safetensors"), **dict(changes))
    with refused(*said) as raised:
        TrainedPrior.load(path)
    assert "p.safetensors" in str(raised.value)


def test_other_files_are_no_priors(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    with refused("file-damaged", tmp_path):
        TrainedPrior.load(path)
    path.write_bytes(b"\x80\x04K\x01.")
    with refused("file-damaged", tmp_path):
        TrainedPrior.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with refused("file-missing", tmp_path):
        TrainedPrior.load(path)


def test_a_file_that_is_too_large_is_not_read(
    trained: TrainedPrior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trained.save(tmp_path / "p.safetensors")
    monkeypatch.setattr("bract_priors.trained_prior.MOST_BYTES", 1000)
    with refused("file-unreadable", "1,000"):
        TrainedPrior.load(path)


def header(path: Path, content: bytes, length: int | None = None) -> Path:
    """Write a safetensors file that is little but its header."""
    length = len(content) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + content)
    return path


def test_a_header_that_is_a_bomb_is_not_read(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    many = json.dumps({f"t{i}": entry for i in range(20_000)}).encode()
    with refused("file-damaged", tmp_path):
        TrainedPrior.load(header(tmp_path / "many", many))
    with refused("file-damaged", tmp_path):
        TrainedPrior.load(header(tmp_path / "claimed", b"{}", 2**63))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]},
        {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]},
        {"dtype": "os.system", "shape": [1], "data_offsets": [0, 4]},
    ],
)
def test_tensors_that_a_file_does_not_hold_take_no_memory(
    trained: TrainedPrior, entry: dict[str, Any], tmp_path: Path
) -> None:
    facts = {"__metadata__": {"bract.prior": json.dumps(trained.facts.to_dict())}}
    path = header(tmp_path / "p.safetensors", json.dumps(facts | {"first.weight": entry}).encode())
    with refused("file-damaged", "p.safetensors"):
        TrainedPrior.load(path)


def test_a_record_s_largest_network_takes_no_memory(trained: TrainedPrior, tmp_path: Path) -> None:
    largest = {"image_shape": [3, 256, 256], "latent": 1024, "width": 256, "classes": 10_000}
    for kind in ({}, {"kind": "flow", "latent": 3 * 256**2}):
        path = damaged(trained.save(tmp_path / "p.safetensors"), facts=largest | kind)
        with refused("file-damaged", tmp_path):
            TrainedPrior.load(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with refused("file-missing"):
            TrainedPrior.load(path)


def test_weights_within_the_bound_make_numbers(trained: TrainedPrior, tmp_path: Path) -> None:
    largest = {n: torch.full_like(v, 1e4) for n, v in trained.weights.items()}
    largest["last.weight"][::2] *= -1
    path = damaged(trained.save(tmp_path / "p.safetensors"), **largest)
    assert TrainedPrior.load(path).sample([0, 1, 2], seed=0).isfinite().all()


def test_what_a_prior_says_of_its_source_is_one_printable_line(
    trained: TrainedPrior, tmp_path: Path
) -> None:
    said = {"source": "\x1b[2Jdigits\nsplit"}
    found = TrainedPrior.load(damaged(trained.save(tmp_path / "p.safetensors"), facts=said))
    assert found.facts.source.isprintable() and found.text.isprintable()


def test_fingerprints_that_are_nearly_the_image_end_in_time() -> None:
    """Each of very many rows comes close to every variant of a flat image, and none is one."""
    near = torch.zeros(20_000, 64, dtype=torch.uint8)
    near[:, 9] = NEAR + 1
    assert not copies_among(torch.zeros(1, 1, 16, 16), near).any()
    near[-1, 9] = 0
    assert copies_among(torch.zeros(1, 1, 16, 16), near).all()


def test_fingerprints_are_the_reduced_image_in_256_steps() -> None:
    image = torch.zeros(1, 1, 16, 16)
    image[..., :2, :2] = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    found = fingerprints(image)
    assert found.shape == (1, 64) and found.dtype == torch.uint8
    assert found[0].tolist() == [64, *[0] * 63]


def test_a_prior_is_made_with_the_digest_of_what_it_knows() -> None:
    facts = PriorFacts(
        image_shape=(1, 8, 8), latent=1, width=1, source="x", images=2, digest="0" * 64
    )
    known = torch.zeros(2, 64, dtype=torch.uint8)
    made = make_prior(facts, Decoder((1, 8, 8), latent=1, width=1), known)
    # sha256 of 128 zero bytes
    assert made.facts.digest.startswith("38723a2e5e8a17aa7950dc008209944e")


def test_priors_of_version_1_are_autoencoders() -> None:
    old = {"schema": 1, "image_shape": [1, 8, 8], "latent": 4, "width": 2, "source": "digits"}
    found = PriorFacts.parse(old | {"images": 3, "digest": "0" * 64}, source="old")
    assert (found.schema_version, found.generator, found.latent) == (2, "autoencoder", 4)
