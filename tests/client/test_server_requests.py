"""A server that asks for more than a run is: what it would learn, and that the site refuses."""

import itertools
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from PIL import Image
from refusals import check_named
from torch import nn

import bract.client.app as client_app
from bract.client import REFUSED
from bract.client.answered import Answered, Request
from bract.client.answers import Answers
from bract.client.policy import PolicyError, SitePolicy
from bract.config import build_config, dump_config
from bract.data.views import client_data, data_spec
from bract.errors import BractError
from bract.installed import release
from bract.models import create_model
from bract.models.initialise import initialise
from bract.protocol import records
from bract.protocol.arrays import from_arrays, to_arrays
from bract.protocol.fused import FUSED_TYPE, write_fused
from bract.seeds import derive_seed
from bract.server.loopback import LoopbackGrid
from bract.updates.update import flatten

RUN = 7


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def linear() -> Any:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def configured(**changes: Any) -> Any:
    return build_config(
        {
            "name": "asked",
            "clients": 2,
            "rounds": 5,
            "data": {"image_size": 8, "validation": 0.1},
            "model": {"name": "test_server_requests:linear"},
            "training": {"lr": 0.1, "local_steps": 1},
            **changes,
        }
    ).as_own_word()


class Server:
    """A server with one site, that may send what it likes."""

    def __init__(
        self, config: Any, folder: Any = None, *, policy: Any = None, run_id: Any = RUN
    ) -> None:
        node: dict[str, Any] = {"partition-id": 0, "models": "test_server_requests:linear"}
        if folder is not None:
            node["state-dir"] = str(folder / "state")
        if policy is not None:
            (folder / "policy.yaml").write_text(policy)
            node["policy"] = str(folder / "policy.yaml")
        self.config = config
        self.grid = LoopbackGrid(
            client_app.app, [node], {"federation": dump_config(config)}, run_id=run_id
        )
        self.nonces = itertools.count()

    def first_model(self, seed: Any = None) -> Any:
        config = self.config
        spec = data_spec(config.data)
        model = create_model(
            config.model.name, classes=spec.classes, channels=1, image_size=8, activation="sigmoid"
        )
        seed = derive_seed(config.seed, "model") if seed is None else seed
        return initialise(model, config.model.init, seed).state_dict()

    def ask(
        self,
        kind: Any = "train",
        number: Any = 1,
        arrays: Any = None,
        nonce: Any = None,
        **more: Any,
    ) -> Any:
        nonce = next(self.nonces) if nonce is None else nonce
        instructions = {
            records.ROUND_KEY: number,
            records.VERSION_KEY: release(),
            "nonce": nonce,
            **more,
        }
        content = RecordDict(
            {
                records.ARRAYS: to_arrays(self.first_model() if arrays is None else arrays),
                records.CONFIG: ConfigRecord(instructions),
            }
        )
        return self.send(content, kind)

    def send(self, content: Any, kind: Any) -> Any:
        (reply,) = self.grid.send_and_receive([self.grid.create_message(content, kind, 1, "")])
        return reply


def update(reply: Any) -> Any:
    return flatten(from_arrays(reply.content[records.UPDATE]))


def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "admit", lambda *_, **__: None)
    monkeypatch.setattr(Answers, "commit", lambda *_, **__: None)


FEDBOOSTING = {"name": "fedboosting"}


# --- Averaging the noise of one round away ---

NOISY = {"defenses": [{"name": "noise", "std": 0.08, "clip": 1.0}]}


def cosine_after_averaging(server: Any, requests: Any) -> Any:
    replies = [server.ask() for _ in range(requests)]
    heard = [update(reply) for reply in replies if reply.has_content()]
    true = update(Server(configured()).ask())
    mean = torch.stack(heard).mean(0)
    return len(heard), float(torch.cosine_similarity(mean, true, dim=0))


@pytest.mark.slow
def test_asking_for_one_round_again_and_again_does_not_average_the_noise_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, cosine = cosine_after_averaging(Server(configured(**NOISY), tmp_path), 20)
    assert heard == 1
    assert cosine < 0.3
    # What it is worth: without the record, sixty requests give the update away.
    unguarded(monkeypatch)
    heard, cosine = cosine_after_averaging(Server(configured(**NOISY)), 60)
    assert heard == 60
    assert cosine > 0.55


def test_a_repeated_round_is_refused_also_where_the_site_has_no_folder() -> None:
    server = Server(configured(**NOISY))
    assert server.ask().has_content()
    again = server.ask()
    assert "train of round 1 was asked for, but round 1 of this run was answered" in (
        again.error.reason
    )


def test_a_restarted_client_remembers_what_it_answered(tmp_path: Path) -> None:
    assert Server(configured(**NOISY), tmp_path).ask().has_content()
    restarted = Server(configured(**NOISY), tmp_path)
    assert not restarted.grid.contexts[1].state
    assert "was answered" in restarted.ask(nonce=99).error.reason
    assert restarted.ask(number=2).has_content()
    assert "was answered" in restarted.ask(number=1).error.reason


@pytest.mark.parametrize(("number", "answered"), [(0, False), (5, True), (6, False), (-1, False)])
def test_rounds_that_the_run_does_not_declare_are_refused(number: Any, answered: Any) -> None:
    reply = Server(configured()).ask(number=number)
    assert reply.has_content() is answered
    if not answered:
        check_named(reply.error.reason, 1, 5)


def test_a_message_without_a_round_is_refused() -> None:
    reply = Server(configured()).ask(number="first")
    assert "server-round is 'first', expected a whole number" in reply.error.reason


def test_a_run_does_not_change_its_configuration_to_declare_more_rounds(tmp_path: Path) -> None:
    assert Server(configured(), tmp_path).ask(number=5).has_content()
    longer = Server(configured(rounds=500), tmp_path)
    assert "has another configuration" in longer.ask(number=6).error.reason


def test_a_run_under_another_name_begins_no_second_time(tmp_path: Path) -> None:
    """The name is the server's to choose; Flower's run id is not."""
    assert Server(configured(), tmp_path).ask(number=1).has_content()
    renamed = Server(configured(name="again"), tmp_path)
    check_named(renamed.ask(number=1).error.reason, RUN, "configuration")


def test_a_resumed_run_goes_on_and_may_repeat_the_round_whose_reply_never_counted(
    tmp_path: Path,
) -> None:
    first = Server(configured(), tmp_path)
    for number in (1, 2):
        assert first.ask(number=number).has_content()
    resumed = Server(configured(), tmp_path, run_id=RUN + 1)
    for number in (2, 3, 4, 5):
        assert resumed.ask(number=number).has_content()


# --- The same message once more ---


def test_the_same_message_once_more_gets_the_same_bytes_and_no_new_noise(tmp_path: Path) -> None:
    server = Server(configured(**NOISY), tmp_path)
    first = server.ask(nonce=0)
    # The reply was lost, and so was the process.
    again = Server(configured(**NOISY), tmp_path).ask(nonce=0)
    assert torch.equal(update(first), update(again))
    assert dict(first.content[records.METRICS]) == dict(again.content[records.METRICS])
    assert list(first.content) == list(again.content)


def test_without_a_folder_the_same_message_is_refused_rather_than_answered_anew() -> None:
    server = Server(configured(**NOISY))
    assert server.ask(nonce=0).has_content()
    assert "was answered" in server.ask(nonce=0).error.reason


def test_the_record_is_private_and_never_read_when_it_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(configured(), tmp_path)
    server.ask()
    files = sorted((tmp_path / "state").iterdir())
    kept = [file for file in files if not file.name.endswith(".lock")]
    assert [file.name for file in kept] == ["client-0-answered.json", "client-0-train.reply"]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in kept)
    kept[0].chmod(0o644)
    assert REFUSED in server.ask(number=2).error.reason
    assert "chmod 600" in caplog.text
    kept[0].chmod(0o600)
    kept[0].write_text('{"totals": {"train": "none"}}')
    assert REFUSED in server.ask(number=2).error.reason
    assert "is damaged" in caplog.text


def test_a_record_that_cannot_be_written_lets_nothing_out(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "state").write_text("a file where the folder should be")
    else:
        (tmp_path / "state").mkdir(mode=0o500)
    reply = Server(configured(), tmp_path).ask()
    assert not reply.has_content()


# --- Reading an image by evaluating on it ---


def one_image(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the site a validation split of a single image; return it."""
    config = configured()
    data = client_data(config, 0)

    def single(*_: Any) -> Any:
        return type(data)(
            data.images, data.labels, data.validation_images[:1], data.validation_labels[:1]
        )

    monkeypatch.setattr("bract.client.session.client_data", single)
    spec = data_spec(config.data)
    return spec.normalise(data.validation_images[:1]).flatten()


def read_image(server: Any, scale: Any = 1.0, digits_read: Any = None) -> Any:
    """Ten messages for the label, one for each of the 64 pixels: the loss tells each number.

    A larger scale makes more of the digits that are told; what was told goes to ``digits_read``.
    """

    def loss(weight: Any, bias: Any) -> Any:
        number = next(server.nonces) + 1
        reply = server.ask("evaluate", number, {"1.weight": weight, "1.bias": bias})
        found = reply.content[records.METRICS]["loss"] if reply.has_content() else math.nan
        (digits_read if digits_read is not None else []).append(found)
        return found

    losses = [loss(torch.zeros(10, 64), 5.0 * row) for row in torch.eye(10)]
    label = min(range(10), key=lambda i: losses[i])
    pixels = torch.zeros(64)
    for i in range(64):
        weight = torch.zeros(10, 64)
        weight[label, i] = scale
        # The loss is -log q for q = e^sx / (e^sx + 9).
        q = math.exp(-loss(weight, torch.zeros(10)))
        pixels[i] = math.log(9.0 * q / (1.0 - q)) / scale if 0.0 < q < 1.0 else math.nan
    return pixels


def test_seventy_four_evaluations_do_not_read_the_one_image_of_a_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = one_image(monkeypatch)
    longer = configured(rounds=200)
    assert read_image(Server(longer, tmp_path)).isnan().all()
    assert REFUSED in Server(longer, tmp_path).ask("evaluate", 150).error.reason
    # What it is worth: without the bound the image is read to the last digit.
    (tmp_path / "off").mkdir()
    exact = "{min_validation_images: 1, metric_decimals: 15}"
    found = read_image(Server(longer, tmp_path / "off", policy=exact))
    torch.testing.assert_close(found, image, atol=1e-3, rtol=1e-3)
    # The run's own rounds bound it as well: a kind of message is answered once a round.
    (tmp_path / "short").mkdir()
    few = read_image(Server(configured(), tmp_path / "short", policy="min_validation_images: 1"))
    assert int(few.isnan().sum()) == 64


def test_a_score_of_too_few_images_is_left_out_of_the_train_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_image(monkeypatch)
    metrics = Server(configured()).ask().content[records.METRICS]
    assert not {"validation_loss", "validation_accuracy"} & set(metrics)
    open_site = Server(configured(), tmp_path, policy="min_validation_images: 1")
    assert "validation_loss" in open_site.ask().content[records.METRICS]


def test_declared_decimals_are_all_that_a_score_keeps_however_a_model_is_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = "{min_validation_images: 1, metric_decimals: 0}"
    image = one_image(monkeypatch)
    server = Server(configured(rounds=400), tmp_path, policy=policy)
    digits_read: list[float] = []
    for scale in (1.0, 1000.0):
        found = read_image(server, scale, digits_read)
        assert float((found - image).abs().nan_to_num(9.0).max()) > 0.5
    assert set(digits_read) <= {float(n) for n in range(11)}
    trained = server.ask("train", 5).content[records.METRICS]
    for name in ("train_accuracy", "validation_loss", "train_loss"):
        assert trained[name] == round(trained[name])
    many = configured(training={"lr": 0.1, "batch_size": 4, "local_epochs": 3})
    (tmp_path / "many").mkdir()
    steps = (
        Server(many, tmp_path / "many", policy=policy).ask().content[records.METRICS]["local_steps"]
    )
    assert steps > 100


def test_an_evaluation_of_a_round_is_answered_once_and_a_full_split_still_is() -> None:
    server = Server(configured())
    assert server.ask("evaluate", 0).has_content()
    assert server.ask("evaluate", 1).has_content()
    assert "evaluate of round 1" in server.ask("evaluate", 1).error.reason
    assert server.ask("train", 1).has_content()


def fused(server: Any, models: Any, number: Any = 1) -> Any:
    instructions = {records.ROUND_KEY: number, records.VERSION_KEY: release()}
    content = write_fused([to_arrays(server.first_model())] * models, ConfigRecord(instructions))
    return server.send(content, FUSED_TYPE)


def test_more_fused_models_than_clients_are_refused() -> None:
    server = Server(configured(strategy=FEDBOOSTING))
    scores = fused(server, 2, 1).content[records.METRICS]
    assert set(scores) == {"accuracy", "num-examples"}
    assert len(scores["accuracy"]) == 2
    check_named(fused(server, 3, 2).error.reason, 3, 2)


def test_one_message_does_not_give_four_hundred_scores(tmp_path: Path) -> None:
    many = {"clients": 400, "data": {"image_size": 8, "validation": 0.5}}
    assert "'fedavg' fuses none" in fused(Server(configured(**many)), 400).error.reason
    boosting = configured(**many, strategy=FEDBOOSTING)
    few = Server(boosting, tmp_path, policy="min_validation_images: 1")
    assert "allows max_fused_models: 64" in fused(few, 400).error.reason
    assert len(fused(few, 64).content[records.METRICS]["accuracy"]) == 64


def test_a_measurement_keeps_three_digits_where_no_policy_says_more(tmp_path: Path) -> None:
    server = Server(configured())
    exact = Server(configured(), tmp_path, policy="metric_decimals: 15")
    for kind in ("evaluate", "train"):
        rounded, whole = (dict(s.ask(kind).content[records.METRICS]) for s in (server, exact))
        names = [name for name in rounded if name.endswith(("loss", "accuracy"))]
        assert names
        for name in names:
            assert rounded[name] == float(f"{whole[name]:.3g}")
        assert any(rounded[name] != whole[name] for name in names)


def test_a_run_that_declares_more_gets_a_thousand_rounds_without_a_policy() -> None:
    def answered(policy: SitePolicy, declared: int | None) -> int:
        answers = Answers(RecordDict(), directory=None, site="a", policy=policy)
        for number in itertools.count(1):
            request = Request("train", number, str(number), RUN, "asked", "config", declared)
            try:
                answers.commit(request)
            except PolicyError as error:
                assert "max_rounds_per_run" in str(error)
                return number - 1
        raise AssertionError

    assert answered(SitePolicy(), 10**6) == 1000
    assert answered(SitePolicy(), None) == 20
    for declared in (10**6, None):
        assert answered(SitePolicy(max_rounds_per_run=30), declared) == 30


def test_the_log_says_once_a_run_which_caps_are_in_force(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bract")
    server = Server(configured())
    for number in (1, 2):
        assert server.ask(number=number).has_content()
    (said,) = [r.getMessage() for r in caplog.records if "max_rounds_per_run" in r.getMessage()]
    for key in ("max_rounds_total", "min_validation_images", "max_fused_models", "metric_decimals"):
        assert f"({key})" in said


# --- Reading what makes a client fail ---


def overflowing(pixel: int, scale: float) -> Any:
    """A model whose loss is NaN for an image of which ``pixel`` lies above 3.4e38 / ``scale``."""
    weight = torch.zeros(10, 64)
    weight[0, pixel] = scale
    return {"1.weight": weight, "1.bias": torch.zeros(10)}


def test_a_model_that_fails_on_some_images_costs_its_round_and_its_epsilon(tmp_path: Path) -> None:
    one = {"training": {"lr": 0.1, "local_steps": 1, "batch_size": 1}, **NOISY}
    server = Server(configured(**one), tmp_path)
    # Each message would be a bit: five of them bracket a pixel.
    pixel = 27
    assert REFUSED in server.ask(arrays=overflowing(pixel, math.inf)).error.reason
    for scale in (1e38, 2e38, 3e38):
        assert "was answered" in server.ask(arrays=overflowing(pixel, scale)).error.reason
    record = Answered.model_validate_json(
        (tmp_path / "state" / "client-0-answered.json").read_bytes()
    )
    assert record.totals == {"train": 1}
    assert sum(record.spent().values()) == 1
    assert server.ask(number=2).has_content()


def test_a_failure_reads_the_same_whatever_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(configured(**NOISY), tmp_path)
    causes = {
        "bract.client.session.train_locally": RuntimeError("pixel 27 is 0.9"),
        "bract.defenses.noise.Noise.protect": KeyError("27"),
        "bract.client.session.Session.validate": BractError("a loss of 3", code="usage"),
        "bract.client.sealing.PlainSealing.seal": ValueError("NaN in w"),
    }
    reasons = set()
    for number, (place, error) in enumerate(causes.items(), start=1):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            reasons.add(server.ask(number=number).error.reason)
    broken = {n: torch.full_like(v, math.nan) for n, v in server.first_model().items()}
    reasons.add(server.ask(number=5, arrays=broken).error.reason)
    (reason,) = reasons
    assert REFUSED in reason
    for detail in ("pixel 27 is 0.9", "a loss of 3", "NaN in w", "holds NaN"):
        assert detail not in reason
        assert detail in caplog.text


def test_a_client_that_is_killed_while_it_trains_has_spent_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    server = Server(configured(**NOISY), tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("bract.client.session.train_locally", killed)
        server.ask(nonce=0)
    restarted = Server(configured(**NOISY), tmp_path)
    assert "was answered" in restarted.ask(nonce=0).error.reason
    assert restarted.ask(number=2).has_content()


def test_a_refusal_that_rests_on_no_data_names_its_reason_and_costs_nothing() -> None:
    server = Server(configured())
    small = {"1.weight": torch.zeros(3, 3)}
    assert "do not fit model" in server.ask(arrays=small).error.reason
    assert server.ask().has_content()


@pytest.mark.parametrize("kind", ["evaluate", FUSED_TYPE])
def test_a_score_that_fails_costs_its_round(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(configured(strategy=FEDBOOSTING))

    def ask() -> Any:
        return fused(server, 1) if kind == FUSED_TYPE else server.ask(kind)

    def fail(*_: Any) -> None:
        raise ValueError("a loss of 3")

    with monkeypatch.context() as patch:
        patch.setattr("bract.client.session.Session.score", fail)
        assert REFUSED in ask().error.reason
    assert "was answered" in ask().error.reason


# --- Beside the update ---


OF_TRAINING = {"train_loss", "train_accuracy"}


def metrics_of(config: Any, folder: Any = None, policy: Any = None, **instructions: Any) -> Any:
    """Metrics beside the first update."""
    return dict(Server(config, folder, policy=policy).ask(**instructions).content[records.METRICS])


@pytest.mark.parametrize(
    ("policy", "plain", "defended"),
    [
        (None, True, False),
        ("train_metrics: auto", True, False),
        ("train_metrics: always", True, True),
        ("train_metrics: never", False, False),
    ],
)
def test_loss_and_accuracy_of_training_stay_at_home_beside_a_defended_update(
    tmp_path: Path, policy: Any, plain: Any, defended: Any
) -> None:
    for number, (config, sent) in enumerate(
        ((configured(), plain), (configured(**NOISY), defended))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = metrics_of(config, folder, policy)
        assert OF_TRAINING & set(found) == (OF_TRAINING if sent else set())
        assert found["local_steps"] == 1.0


def test_the_loss_of_one_image_would_be_an_equation_about_its_pixels(tmp_path: Path) -> None:
    # Of a linear model the loss is log sum exp(W x + b) - (W x + b)_y: exact to rounding.
    config = configured(training={"lr": 0.1, "local_steps": 1, "batch_size": 1})
    server = Server(config, tmp_path, policy="metric_decimals: 15")
    reply = server.ask()
    spec, data = data_spec(config.data), client_data(config, 0)
    order = torch.Generator().manual_seed(derive_seed(config.seed, "train", 0, 1))
    image = int(torch.randperm(len(data.images), generator=order)[0])
    state = server.first_model()
    x = spec.normalise(data.images[image]).flatten()
    logits = state["1.weight"] @ x + state["1.bias"]
    equation = logits.logsumexp(0) - logits[data.labels[image]]
    assert reply.content[records.METRICS]["train_loss"] == pytest.approx(float(equation), abs=1e-6)
    assert "train_loss" not in metrics_of(configured(**NOISY))


SCORED = {"training-score": True}


def test_fedboosting_gets_the_one_training_score_that_it_declares_rounded() -> None:
    many = {"training": {"lr": 0.1, "batch_size": 16, "local_steps": 1}}

    def scores(**strategy: Any) -> Any:
        found = metrics_of(configured(**NOISY, **many, **strategy), **SCORED)
        return {name: value for name, value in found.items() if name.startswith("trained_")}

    assert scores() == {}
    for signal in ("accuracy", "loss"):
        ((name, value),) = scores(strategy={**FEDBOOSTING, "signal": signal}).items()
        assert name == f"trained_{signal}"
        assert value == round(value, 2)


def test_a_training_score_of_few_images_stays_beside_a_defended_update_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few: Any = {"strategy": FEDBOOSTING, "training": {"lr": 0.1, "batch_size": 9, "local_steps": 1}}
    assert "trained_accuracy" in metrics_of(configured(**few), **SCORED)
    caplog.set_level(logging.WARNING, "bract")
    assert "trained_accuracy" not in metrics_of(configured(**NOISY, **few), **SCORED)
    assert "the training score of 9 images stays here" in caplog.text
    exact = {"strategy": {**FEDBOOSTING, "signal": "loss"}, "training": few["training"]}
    policy = "{train_metrics: always, metric_decimals: 15}"
    found = metrics_of(configured(**NOISY, **exact), tmp_path, policy, **SCORED)
    assert found["trained_loss"] != round(found["trained_loss"], 2)


@pytest.mark.parametrize(
    ("value", "images", "hidden", "policy", "sent"),
    [
        (0.12345, 10, True, {}, 0.12),
        (0.12345, 9, True, {}, None),
        (0.12345, 1, False, {}, 0.12),
        (1e9, 10, True, {}, 10.0),
        (0.12345, 1, True, {"train_metrics": "always"}, 0.12345),
        (0.12345, 99, False, {"train_metrics": "never"}, None),
        (0.12345, 9, True, {"min_validation_images": 9}, 0.12),
    ],
)
def test_a_training_score_is_cut_rounded_or_kept(
    value: Any, images: Any, hidden: Any, policy: Any, sent: Any
) -> None:
    assert SitePolicy(**policy).training_score(value, images, hidden=hidden) == sent


# --- The proximal term ---


def test_a_proximal_term_that_is_no_number_from_0_is_refused_by_its_key() -> None:
    server = Server(configured())
    for number, mu in enumerate((-0.5, math.inf, math.nan, "0.1"), start=1):
        reply = server.ask(number=number, **{"proximal-mu": mu})
        assert "the server sent proximal-mu" in reply.error.reason
    assert server.ask(number=1, **{"proximal-mu": 0.5}).has_content()


# --- The policy's limits over all runs ---


def test_a_new_run_id_does_not_reset_the_totals(tmp_path: Path) -> None:
    for run_id, answered in ((1, True), (2, True), (3, False)):
        server = Server(configured(), tmp_path, policy="max_rounds_total: 2", run_id=run_id)
        assert server.ask().has_content() is answered
    check_named(server.ask().error.reason, "max_rounds_total", 2)
    renamed = configured(name="another")
    reply = Server(renamed, tmp_path, policy="max_rounds_total: 2", run_id=4).ask()
    assert "max_rounds_total" in reply.error.reason


def test_a_policy_may_allow_fewer_rounds_than_the_run_declares(tmp_path: Path) -> None:
    server = Server(configured(), tmp_path, policy="max_rounds_per_run: 2")
    assert [server.ask(number=n).has_content() for n in (1, 2, 3)] == [True, True, False]


def test_the_epsilon_of_all_runs_is_counted_and_bounded(tmp_path: Path) -> None:
    noise = {"name": "noise", "epsilon": 4.0, "clip": 1.0}
    config = configured(rounds=100, defenses=[noise])
    policy = "max_epsilon: 6.0"
    answers = [
        Server(config, tmp_path, policy=policy, run_id=run).ask(number=number)
        for run in (1, 2)
        for number in (1, 2)
    ]
    assert [reply.has_content() for reply in answers] == [True, True, False, False]
    assert "would have spent epsilon" in answers[-1].error.reason


@pytest.mark.parametrize(
    "defenses", [[], ["adadefense"], [{"name": "noise", "std": 1.0, "clip": None}]]
)
def test_a_bounded_epsilon_refuses_updates_without_a_guarantee(
    tmp_path: Path, defenses: Any
) -> None:
    reply = Server(configured(defenses=defenses), tmp_path, policy="max_epsilon: 8").ask()
    assert "the run's updates have no guarantee" in reply.error.reason


def test_a_bounded_epsilon_refuses_statistics_that_no_noise_covers(tmp_path: Path) -> None:
    config = configured(
        model={"name": "lenet-bn"},
        data={"image_size": 16},
        defenses=[{"name": "noise", "epsilon": 1.0}],
    )
    server = Server(config, tmp_path, policy="max_epsilon: 8")
    spec = data_spec(config.data)
    model = create_model("lenet-bn", classes=10, channels=1, image_size=16, activation="sigmoid")
    assert spec.classes == 10
    reply = server.ask(arrays=model.state_dict())
    assert "leave without noise" in reply.error.reason
    (tmp_path / "policy.yaml").write_text("")
    assert records.BUFFERS in server.ask(arrays=model.state_dict()).content


def test_a_limit_over_all_runs_needs_a_record_that_outlives_a_restart(tmp_path: Path) -> None:
    server = Server(configured(), tmp_path, policy="max_epsilon: 8")
    del server.grid.contexts[1].node_config["state-dir"]
    check_named(server.ask().error.reason, "max_epsilon")


# --- What is trained, and on what ---


@pytest.mark.parametrize(
    ("policy", "changes", "said"),
    [
        ("plain_updates: false", {}, "encryption must be on"),
        ("models: [lenet, resnet20]", {}, "model.name must be one of"),
        ("data: {names: [mnist]}", {}, "data.name must be one of ['mnist'], the run has 'digits'"),
        ("data: {paths: [/srv/xrays]}", {}, "data.path is the site's to allow"),
        (
            "data: {paths: [/srv/xrays]}",
            {"data": {"image_size": 8, "path": "/srv/xrays/../home"}},
            "data.path is the site's to allow",
        ),
        (
            "data: {download: false}",
            {"data": {"image_size": 8, "download": True}},
            "data.download must be false",
        ),
        ("local_steps: {minimum: 2}", {}, "local steps must be at least 2, the run has 1"),
        (
            "local_epochs: {maximum: 1}",
            {"training": {"local_epochs": 2}},
            "training.local_epochs must be at most 1, the run has 2",
        ),
        (
            "batch_size: {minimum: 8}",
            {"training": {"batch_size": 1}},
            "a batch must be at least 8, the run has 1",
        ),
        ("require: [{name: noise}]", {}, "'noise' must be on"),
    ],
)
def test_what_the_policy_does_not_allow_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any, changes: Any, said: Any
) -> None:
    monkeypatch.setattr("bract.client.session.train_locally", None)
    reply = Server(configured(**changes), tmp_path, policy=policy).ask()
    assert "client-0: this site's policy refuses the run" in reply.error.reason
    assert said in reply.error.reason


@pytest.mark.parametrize(
    ("policy", "changes", "logged"),
    [
        ("local_steps: {minimum: 2}", {"training": {"batch_size": 10000}}, "the run has 1"),
        (
            "min_training_images: 20",
            {
                "data": {"image_size": 8, "partition": {"kind": "sizes", "sizes": [1, 9]}},
                "training": {"batch_size": 32},
            },
            "the run trains on 1",
        ),
    ],
)
def test_what_the_policy_does_not_allow_of_the_data_keeps_its_number_at_the_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str, changes: Any, logged: str
) -> None:
    reply = Server(configured(**changes), tmp_path, policy=policy).ask()
    assert REFUSED in reply.error.reason
    assert logged in caplog.text


def test_a_link_does_not_lead_out_of_an_allowed_folder(tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path)
    config = configured(data={"image_size": 8, "path": str(tmp_path / "allowed" / "link")})
    policy = f"data: {{paths: [{tmp_path}/allowed]}}"
    check_named(Server(config, tmp_path, policy=policy).ask().error.reason, "data.path")


def test_one_kind_of_message_under_two_names_is_answered_once(tmp_path: Path) -> None:
    server = Server(configured(), tmp_path)
    assert server.ask("train").has_content()
    assert "was answered" in server.ask("train.default").error.reason


def test_a_decoder_s_error_names_no_file_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("cannot identify image file DOE_JOHN.png")

    server = Server(configured(), tmp_path)
    monkeypatch.setattr("bract.client.session.client_data", fail)
    reason = server.ask().error.reason
    assert "DOE_JOHN" not in reason and REFUSED in reason


def test_a_crafted_first_model_is_refused_where_it_must_come_from_the_seed(tmp_path: Path) -> None:
    policy = "initial_model: from-seed"
    server = Server(configured(), tmp_path, policy=policy)
    crafted = server.first_model(seed=1)
    assert "not what seed 0 gives (1.bias, 1.weight differ)" in (
        server.ask(arrays=crafted).error.reason.replace("1.weight, 1.bias", "1.bias, 1.weight")
    )
    for kind, number in (("train", 2), ("train.default", 2), ("evaluate", 3)):
        refused = server.ask(kind, number=number, arrays=crafted).error.reason
        check_named(refused, number)
    assert "not what seed 0 gives" in server.ask("evaluate", number=0, arrays=crafted).error.reason
    assert server.ask().has_content()
    assert server.ask(number=2, arrays=crafted).has_content()
    resumed = Server(configured(rounds=7), tmp_path, policy=policy, run_id=RUN + 1)
    assert resumed.ask(number=6, arrays=crafted).has_content()
    for run_id, change in ((RUN + 2, {"seed": 9}), (RUN + 3, {"training": {"lr": 5.0}})):
        other = Server(configured(**change), tmp_path, policy=policy, run_id=run_id)
        check_named(other.ask(number=2, arrays=crafted).error.reason, "from-seed", 2)


def test_a_requirement_without_bounds_is_logged_once_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(configured(**NOISY), tmp_path, policy="require: [{name: noise}]")
    assert server.ask().has_content() and server.ask(number=2).has_content()
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "std" in r.message]
    assert len(warned) == 1


def test_a_crafted_first_model_that_cost_its_round_is_no_start(tmp_path: Path) -> None:
    """Where the classes are counted first, the round is counted before the model is compared."""
    for index in range(30):
        path = tmp_path / "images" / "train" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 8 * index, dtype=np.uint8)).save(path)
    section = {"name": "folder", "path": str(tmp_path / "images"), "image_size": 8}
    config = configured(data={**section, "channels": 1, "validation": 0.1})
    server = Server(config, tmp_path, policy="initial_model: from-seed")
    server.grid.contexts[1].node_config["data-paths"] = str(tmp_path)
    crafted = server.first_model(seed=1)
    assert REFUSED in server.ask(arrays=crafted).error.reason
    assert server.ask(number=2, arrays=crafted).has_error()
    honest = Server(config, tmp_path, policy="initial_model: from-seed", run_id=RUN + 1)
    honest.grid.contexts[1].node_config["data-paths"] = str(tmp_path)
    assert honest.ask().has_content() and honest.ask(number=2, arrays=crafted).has_content()
