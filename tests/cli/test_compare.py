"""``bract compare``: what runs, in which folders, and what happens where one fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused

from bract.audit.captures import Capture
from bract.cli import audit, audit_requests, comparison_plan
from bract.cli.compare import Steps, command_steps, compare_defenses, count_tested
from bract.cli.comparison_plan import parse_defense, plan
from bract.client.defenses import DEFENSES, build_defenses
from bract.config import FederationConfig, build_config
from bract.config.config import AuditRequest
from bract.errors import BractError, RunFailedError
from bract.report.comparison.variants import ExampleCounts
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.schema.metrics import ClientRow, GlobalRow, MetricsRow


def config(**changes: Any) -> FederationConfig:
    return build_config({"name": "mine", "clients": 2, "rounds": 1, **changes})


class Recorder:
    """Steps that leave a run directory without processes, and note what was asked."""

    def __init__(self, failures: dict[str, Exception] | None = None) -> None:
        self.failures = failures or {}
        self.trained: list[FederationConfig] = []
        self.audited: list[str] = []
        self.reported: list[str] = []

    def steps(self) -> Steps:
        return Steps(self.train, self.audit, self.report)

    def train(self, config: FederationConfig, runs: Path) -> Path:
        self.trained.append(config)
        if isinstance(self.failures.get(config.name), BractError):
            raise self.failures[config.name]
        run = RunDirectory(runs / config.name)
        run.create(config)
        run.update_state(status="finished", name=config.name)
        client = ClientRow(seconds=1.0, local_steps=4, validation_accuracy=0.5)
        judged = GlobalRow(loss=1.0, accuracy=0.5)
        run.append_metrics(
            MetricsRow(round=1, seconds=1.0, evaluation=judged, clients={"client-0": client})
        )
        return run.root

    def audit(self, root: Path) -> None:
        self.audited.append(root.name)
        if f"audit {root.name}" in self.failures:
            raise self.failures[f"audit {root.name}"]

    def report(self, root: Path) -> None:
        self.reported.append(root.name)
        (root / "report.html").write_text("")


def rows(page: Path) -> dict[str, dict[str, Any]]:
    facts = json.loads((page.parent / "comparison.json").read_text())
    return {row["variant"]: row for row in facts["rows"]}


def test_one_run_undefended_and_one_under_each_defense(tmp_path: Path) -> None:
    recorder = Recorder()
    page = compare_defenses(
        config(), tmp_path, recorder.steps(), defenses=["guardian", "pruning:ratio=0.5"]
    )
    assert page == tmp_path / "mine-compare" / "report.html"
    assert [c.name for c in recorder.trained] == ["undefended", "guardian", "pruning-ratio-0.5"]
    assert recorder.audited == recorder.reported == [c.name for c in recorder.trained]
    assert [c.defenses for c in recorder.trained] == [
        [],
        [{"name": "guardian"}],
        [{"name": "pruning", "ratio": 0.5}],
    ]
    found = rows(page)
    assert found["pruning-ratio-0.5"]["settings"] == "ratio 0.5"
    assert found["pruning-ratio-0.5"]["defenses"] == [
        {"name": "pruning", "ratio": 0.5, "scope": "whole"}
    ]
    assert found["guardian"]["report"] == "guardian/report.html"


def test_everything_but_name_defenses_and_model_is_the_same_for_all() -> None:
    base = config(seed=7, training={"lr": 0.05}, defenses=["guardian"])
    planned = plan(base)
    for variant in planned.configs:
        restored = variant.model_copy(
            update={"name": base.name, "defenses": base.defenses, "model": base.model}
        )
        assert restored == base


def test_by_default_each_known_defense_is_compared_with_settings_that_build() -> None:
    names = [c.name for c in plan(config()).configs]
    assert names == ["undefended", "adadefense", "guardian", "fedkl", "noise", "pruning"]
    for variant in plan(config()).configs:
        build_defenses(variant.defenses)


def test_a_default_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: DEFENSES[name] for name in DEFENSES if name != "pruning"}
    monkeypatch.setattr(comparison_plan, "DEFENSES", known)
    assert "pruning" not in [c.name for c in plan(config()).configs]


def test_the_configs_own_settings_and_chain_are_compared_too() -> None:
    own = [{"name": "guardian", "beta": 3.0}, {"name": "noise", "std": 0.2}]
    planned = {c.name: c.defenses for c in plan(config(defenses=own)).configs}
    assert planned["guardian"] == [own[0]] and planned["noise"] == [own[1]]
    assert planned["guardian-noise"] == own
    assert plan(config(defenses=own), ["guardian"]).configs[1].defenses == [own[0]]


def test_a_chain_and_its_settings_are_read() -> None:
    assert parse_defense("adadefense:alpha=0.02+noise:std=0.05,kind=laplace", {}) == [
        {"name": "adadefense", "alpha": 0.02},
        {"name": "noise", "std": 0.05, "kind": "laplace"},
    ]
    assert parse_defense("noise", {})[0]["std"] == 0.01


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gardian", "Did you mean 'guardian'?"),
        ("guardian:beta", "expected NAME:key=value"),
        ("guardian:bta=3", "Did you mean 'beta'?"),
        ("guardian+adadefense", "each replace the whole update"),
        ("noise:kind=gaussian", "give either std or epsilon"),
    ],
)
def test_a_defense_that_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, text: str, message: str
) -> None:
    recorder = Recorder()
    with pytest.raises(BractError) as caught:
        compare_defenses(config(), tmp_path, recorder.steps(), defenses=[text])
    assert message in str(caught.value)
    assert not recorder.trained and not list(tmp_path.iterdir())


def test_the_same_defense_twice_is_refused() -> None:
    with refused("usage", "guardian"):
        plan(config(), ["guardian", "guardian"])


def test_fedkl_moves_every_variant_to_the_normalised_model() -> None:
    planned = plan(config(model={"name": "lenet-strided"}), ["pruning", "fedkl"])
    assert {c.model.name for c in planned.configs} == {"lenet-strided-bn"}
    assert "FedKL cannot do without" in planned.notes[0]
    assert "the undefended one too" in planned.notes[0]


def test_without_fedkl_the_configured_model_stays() -> None:
    planned = plan(config(), ["guardian"])
    assert {c.model.name for c in planned.configs} == {"lenet"}
    assert planned.notes == ()


def test_a_model_that_is_normalised_already_stays() -> None:
    planned = plan(config(model={"name": "resnet20"}), ["fedkl"])
    assert {c.model.name for c in planned.configs} == {"resnet20"}
    assert planned.notes == ()


def test_the_server_scales_defended_updates_where_the_defense_asks_for_it() -> None:
    planned = plan(config(), ["adadefense:alpha_at=server,alpha=0.02", "guardian"])
    assert [c.strategy.server_lr for c in planned.configs] == [1.0, 0.02, 1.0]


def test_a_variant_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    recorder = Recorder({"guardian": BractError("this client demands noise", code="usage")})
    with refused("run-failed", 1, 3, "guardian", "--resume"):
        compare_defenses(config(), tmp_path, recorder.steps(), defenses=["guardian", "pruning"])
    assert recorder.audited == ["undefended", "pruning"]
    found = rows(tmp_path / "mine-compare" / "report.html")
    assert found["guardian"]["error"] == "this client demands noise"
    assert found["pruning"]["error"] is None and found["pruning"]["accuracy"] == 0.5


def test_an_audit_that_fails_keeps_the_run_in_its_row(tmp_path: Path) -> None:
    recorder = Recorder({"audit pruning": BractError("no capture to attack", code="usage")})
    with pytest.raises(RunFailedError):
        compare_defenses(config(), tmp_path, recorder.steps(), defenses=["pruning"])
    found = rows(tmp_path / "mine-compare" / "report.html")
    assert found["pruning"]["error"] == "no capture to attack"
    assert found["pruning"]["accuracy"] == 0.5


def test_a_failed_undefended_run_does_not_stop_the_others(tmp_path: Path) -> None:
    recorder = Recorder({"undefended": RunFailedError("client-0 failed")})
    with pytest.raises(RunFailedError):
        compare_defenses(config(), tmp_path, recorder.steps(), defenses=["pruning"])
    assert recorder.audited == ["pruning"]


def test_a_federation_that_cannot_start_is_bad_input(tmp_path: Path) -> None:
    recorder = Recorder({"undefended": BractError("data.name: not found", code="usage")})
    with refused("usage") as caught:
        compare_defenses(config(), tmp_path, recorder.steps(), defenses=["pruning"])
    assert not isinstance(caught.value, RunFailedError)
    assert len(recorder.trained) == 1


def test_an_interrupt_is_not_taken_for_a_failed_variant(tmp_path: Path) -> None:
    recorder = Recorder()

    def interrupted(root: Path) -> None:
        raise KeyboardInterrupt

    steps = Steps(recorder.train, interrupted, recorder.report)
    with pytest.raises(KeyboardInterrupt):
        compare_defenses(config(), tmp_path, steps, defenses=["pruning"])
    assert len(recorder.trained) == 1


def test_earlier_runs_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    compare_defenses(config(), tmp_path, Recorder().steps(), defenses=["pruning"])
    mark = tmp_path / "mine-compare" / "pruning" / "mark"
    mark.write_text("")
    again = Recorder()
    with refused("file-taken", "pruning", "--resume", "--overwrite"):
        compare_defenses(config(), tmp_path, again.steps(), defenses=["pruning"])
    assert not again.trained and mark.exists()
    compare_defenses(config(), tmp_path, again.steps(), defenses=["pruning"], resume=True)
    assert mark.exists()
    compare_defenses(config(), tmp_path, again.steps(), defenses=["pruning"], overwrite=True)
    assert not mark.exists()


def test_runs_of_another_federation_are_not_resumed(tmp_path: Path) -> None:
    page = compare_defenses(config(), tmp_path, Recorder().steps(), defenses=["pruning"])
    before = page.read_bytes()
    again = Recorder()
    with refused("file-taken", tmp_path):
        compare_defenses(config(seed=9), tmp_path, again.steps(), defenses=["pruning"], resume=True)
    assert not again.trained and page.read_bytes() == before


def test_json_goes_to_stdout_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder({"pruning": RunFailedError("client-0 failed")})
    with pytest.raises(RunFailedError):
        compare_defenses(config(), tmp_path, recorder.steps(), defenses=["pruning"], as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["schema"] == 4
    assert [row["variant"] for row in facts["rows"]] == ["undefended", "pruning"]


def test_accuracies_are_measured_on_counted_examples() -> None:
    # 1797 digits: 360 are test data; of 1437, 718 or 719 a client, a tenth is validation.
    assert count_tested(config()) == ExampleCounts(360, {"client-0": 71, "client-1": 71})


def test_each_variant_is_attacked_once_for_each_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, bool]] = []

    def audit_run(root: Path, choice: AuditRequest, *, resume: bool) -> None:
        asked.append((root.name, choice.tier, resume))

    monkeypatch.setattr(audit, "audit_run", audit_run)
    steps = command_steps(resume=True, redact=False, tiers=["oblivious", "adaptive"])
    recorder = Recorder()
    mixed = Steps(recorder.train, steps.audit, recorder.report)
    compare_defenses(config(), tmp_path, mixed, defenses=["pruning"])
    assert asked == [
        ("undefended", "oblivious", True),
        ("undefended", "adaptive", True),
        ("pruning", "oblivious", True),
        ("pruning", "adaptive", True),
    ]


def test_all_tiers_are_those_that_apply_to_the_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def audit_run(root: Path, choice: AuditRequest, *, resume: bool) -> None:
        asked.append((root.name, choice.tier))

    def of_run(run: RunDirectory) -> Any:
        named = [{"name": "pruning"}] if run.root.name == "pruning" else []
        return SimpleNamespace(index=[Capture(1, "a", ClientDeclaration(defenses=tuple(named)))])

    monkeypatch.setattr(audit, "audit_run", audit_run)
    monkeypatch.setattr(audit_requests, "Captures", SimpleNamespace(of_run=of_run))
    steps = command_steps(resume=False, redact=False)
    recorder = Recorder()
    mixed = Steps(recorder.train, steps.audit, recorder.report)
    compare_defenses(config(), tmp_path, mixed, defenses=["pruning"])
    assert asked == [
        ("undefended", "oblivious"),
        ("pruning", "oblivious"),
        ("pruning", "adaptive"),
    ]


def test_an_unknown_tier_is_refused_with_the_nearest() -> None:
    with refused("unknown-name", "adaptive"):
        command_steps(resume=False, redact=False, tiers=["adaptve"])
