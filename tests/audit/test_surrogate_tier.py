"""The surrogate tier: an audit by an attacker who trained a generator on public images."""

from pathlib import Path
from typing import Any

import pytest
from audited import request_of, with_keys
from refusals import check_named, refused
from reporting import gather
from test_audit import execute
from test_audit import run as run  # a fixture
from torch.nn import functional as F

from bract.attacks import PublicPrior
from bract.attacks.problem import public_prior
from bract.audit.audit import Audit
from bract.cli.audit_requests import audit_requests
from bract.config import DataConfig
from bract.config.config import AuditRequest
from bract.data import Source
from bract.data.sources import open_source
from bract.errors import BractError
from bract.registry import Registry
from bract.schema import AuditResult
from bract.schema.audit import Baseline
from bract.scores.leaks import PRIOR_NEAREST, LeakRule
from bract_priors.prior_facts import PriorKind
from bract_priors.prior_training import PriorSettings, train_prior
from bract_priors.trained_prior import TrainedPrior


def trained(source: Source, count: int, kind: PriorKind = "autoencoder") -> TrainedPrior:
    images = source.images(range(count), channels=1, size=16)
    settings = PriorSettings(kind=kind, latent=4, width=4, epochs=2)
    return train_prior(images, source.labels[:count], settings, source="digits", classes=10)


@pytest.fixture
def prior(tmp_path: Path) -> Path:
    """A generator of test images; clients hold training images."""
    source = open_source(DataConfig(name="digits"), "test")
    return trained(source, 100).save(tmp_path / "prior.safetensors")


def choice(prior: Path | None, **changes: Any) -> AuditRequest:
    made = AuditRequest(
        attacks=["gias"], iterations=10, device="cpu", tier="surrogate", prior=prior
    )
    return with_keys(made, **changes)


def test_an_audit_with_public_images_says_so_and_stands_beside_what_they_give(
    run: Any, prior: Path
) -> None:
    results = execute(run, choice(prior))
    assert [r["tier"] for r in results] == ["surrogate", "surrogate"]
    for facts in results:
        assert facts["refused"] is None and facts["chosen_attack"] == "gias"
        assert {"prior_sample", PRIOR_NEAREST, "prior_only"} < set(facts["baselines"])
        assert facts["settings"]["prior"]["images"] == 100
        assert any("100 public images (digits); none of this" in note for note in facts["notes"])
        for image in facts["images"]:
            nearest, one = (image["baselines"][n]["psnr"] for n in (PRIOR_NEAREST, "prior_sample"))
            assert nearest >= one
    assert (run.audit / "gias-surrogate").is_dir()
    facts = gather(run.root)
    tier = next(t for t in facts["verdict"]["tiers"] if t["tier"] == "surrogate")
    assert tier["tried"] and "public images" in tier["meaning"]
    (row,) = [r for r in facts["threat_model"]["saw"] if r["question"].startswith("Similar")]
    assert row["answer"] == "yes" and "100 public images" in row["detail"]
    again = Audit(run, choice(prior), resume=True)
    assert not again.plan()


@pytest.mark.thorough
def test_an_audit_with_a_flow_attacks_through_it(run: Any, tmp_path: Path) -> None:
    source = open_source(DataConfig(name="digits"), "test")
    path = trained(source, 100, "flow").save(tmp_path / "flow.safetensors")
    request = request_of(run.root, tier="surrogate", prior=path)
    assert request.attacks == ["flow"]
    for facts in execute(run, choice(path, attacks=["flow"])):
        assert facts["refused"] is None and facts["chosen_attack"] == "flow"
        assert {"prior_sample", PRIOR_NEAREST, "prior_only"} < set(facts["baselines"])
        assert facts["settings"]["prior"]["kind"] == "flow"
    for facts in execute(run, choice(path)):
        check_named(facts["refused"], "kind autoencoder", "kind flow")


@pytest.mark.thorough
def test_another_prior_makes_results_again(run: Any, prior: Path, tmp_path: Path) -> None:
    execute(run, choice(prior))
    source = open_source(DataConfig(name="digits"), "test")
    other = trained(source, 60).save(tmp_path / "other.safetensors")
    assert Audit(run, choice(other), resume=True).plan()


def test_an_upload_of_an_image_that_made_the_prior_is_refused(run: Any, tmp_path: Path) -> None:
    source = open_source(DataConfig(name="digits"), "train")
    whole = trained(source, len(source.labels)).save(tmp_path / "all.safetensors")
    for facts in execute(run, choice(whole)):
        check_named(facts["refused"], "2 of 2", "digits")


def test_an_upload_of_a_copy_of_an_image_that_made_the_prior_is_refused(
    run: Any, tmp_path: Path
) -> None:
    source = open_source(DataConfig(name="digits"), "train")
    images = source.images(range(len(source.labels)), channels=1, size=16).flip(-1)
    images = F.pad(images, (0, 2, 1, 0))[..., :16, 2:]
    settings = PriorSettings(latent=4, width=4, epochs=1)
    whole = train_prior(images, source.labels, settings, source="copies", classes=10)
    for facts in execute(run, choice(whole.save(tmp_path / "copies.safetensors"))):
        check_named(facts["refused"], "2 of 2", "copies")


def test_without_a_truth_the_page_says_that_nothing_was_compared(run: Any, prior: Path) -> None:
    for path in run.truth.rglob("*.safetensors"):
        path.unlink()
    for facts in execute(run, choice(prior)):
        assert any("was not checked" in note for note in facts["notes"])


def test_tier_and_prior_go_together(run: Any, prior: Path) -> None:
    with refused("usage", "--prior"):
        request_of(run.root, tier="surrogate")
    with refused("usage", "--prior", "--tier", "surrogate", "oblivious"):
        request_of(run.root, prior=prior)
    with refused("usage", "--prior"):
        Audit(run, choice(None))
    assert request_of(run.root, tier="surrogate", prior=prior).attacks == [
        "ggl",
        "gias",
        "learned-inverter",
    ]
    tiers = [c.tier for c in audit_requests(run.root, tier="all", prior=prior)]
    assert tiers == ["oblivious", "surrogate"]
    assert "surrogate" not in [c.tier for c in audit_requests(run.root, tier="all")]


def test_without_a_package_that_reads_priors_the_line_that_installs_one_is_named(
    run: Any, prior: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Registry[type[PublicPrior]] = Registry("prior", group="bract.priors")
    monkeypatch.setattr(public_prior, "PRIORS", nothing)
    monkeypatch.setattr("bract.registry.plugins", lambda group: iter(()))
    line = ("bract[priors]", "./plugins/bract-priors")
    with refused("package-missing", *line):
        request_of(run.root, tier="surrogate", prior=prior)
    with refused("package-missing", *line):
        Audit(run, choice(prior))


def test_beside_a_prior_of_another_package_the_line_that_installs_bract_s_is_named(
    prior: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(PublicPrior):
        name = "others"

        @classmethod
        def load(cls, path: Path) -> Any:
            raise BractError(f"{path}: no prior of others", code="file-damaged")

    others: Registry[type[PublicPrior]] = Registry("prior", group="bract.priors")
    others.register("others")(Other)  # type: ignore[type-abstract]
    monkeypatch.setattr(public_prior, "PRIORS", others)
    monkeypatch.setattr("bract.registry.plugins", lambda group: iter(()))
    with refused("file-damaged", prior, "others", "bract[priors]", "./plugins/bract-priors"):
        public_prior.load_prior(prior)


def test_a_picture_that_a_sample_of_the_prior_equals_is_no_leak(run: Any, prior: Path) -> None:
    (facts, _) = execute(run, choice(prior, iterations=2))
    record = AuditResult.parse(facts, source="test")
    image = record.images[0]
    assert image.scores is not None and image.retrieval is not None
    scored = image.model_copy(
        update={
            "scores": image.scores.model_copy(update={"psnr": 30.0, "ssim": 0.9}),
            "retrieval": image.retrieval.model_copy(
                update={"chance": 1e-9, "least": 1e-9, "nearest": True}
            ),
        }
    )
    for nearest, leaked in ((29.0, True), (31.0, False)):
        baselines = scored.baselines | {PRIOR_NEAREST: Baseline(psnr=nearest)}
        one = record.model_copy(
            update={"images": [scored.model_copy(update={"baselines": baselines})]}
        )
        ((decision,),) = LeakRule().decide([one])
        assert (decision.reason is not None) == leaked
