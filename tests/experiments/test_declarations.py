"""Declarations: complete, readable, converted as the papers' metrics want it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from refusals import refused

from experiments.papers.catalog import HERE, experiments, find, read
from experiments.papers.declaration import Experiment
from experiments.papers.runners import runner

NUMBERS = {
    "adadefense": {"table": range(1, 5), "figure": range(1, 3)},
    "fedkl": {"table": range(1, 8), "figure": range(1, 5)},
    "guardian": {"table": range(1, 10), "figure": range(1, 7)},
    "grnn": {"table-3": range(1, 17), "figure-3": range(1, 7)},
    "fedboosting": {"table-4": range(1, 4), "figure-4": range(1, 7)},
}
"""Tables and figures as the five works number them."""


@pytest.mark.parametrize("paper", NUMBERS)
def test_every_table_and_figure_of_a_paper_is_declared(paper: str) -> None:
    wanted = {f"{paper}/{k}-{n}" for k, numbers in NUMBERS[paper].items() for n in numbers}
    assert wanted <= set(experiments())


def test_every_row_has_settings_that_its_runner_takes_at_every_scale() -> None:
    for experiment in experiments().values():
        for scale in experiment.scales:
            for row in experiment.rows_at(scale):
                settings = experiment.settings_at(scale, row)
                runner(experiment.kind).parse(settings, where=f"{experiment.name} {row.name}")


def test_every_runnable_experiment_has_a_smoke_scale() -> None:
    for experiment in experiments().values():
        assert not experiment.scales or "smoke" in experiment.scales, experiment.name


def test_a_printed_rmse_is_converted_to_the_true_psnr() -> None:
    (table,) = find(["adadefense/table-4"])
    printed = table.rows[0].published[0]
    assert printed.values["psnr_printed"] == 50.11
    assert table.converted(printed)["psnr"] == pytest.approx(51.87, abs=0.01)


def test_a_psnr_of_a_mean_squared_error_stays_as_it_is_printed() -> None:
    (table,) = find(["grnn/table-3-4"])
    assert table.converted(table.rows[1].published[0])["psnr"] == 56.61


def test_a_paper_stands_for_its_experiments_and_a_wrong_name_is_told_the_nearest() -> None:
    assert {e.paper for e in find(["guardian"])} == {"guardian"}
    with refused("unknown-name", "adadefense/table-4"):
        find(["adadefence/table-4"])


def write(folder: Path, text: str) -> Path:
    path = folder / "mine" / "table-1.yaml"
    path.parent.mkdir()
    path.write_text(text)
    return path


WHOLE = """
number: Table 1
title: a table
kind: reconstruction
rows: [{name: one}, {name: two}]
scales: {smoke: {over: {iterations: 1}}}
rules: [{kind: order, says: more, metric: ssim, more: one, less: two}]
"""


def test_a_declaration_is_named_after_its_folder_and_file(tmp_path: Path) -> None:
    assert read(write(tmp_path, WHOLE)).name == "mine/table-1"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("less: two", "less: three"), ("config-value", "three")),
        (("{name: two}", "{name: one}"), ("config-value",)),
        (("kind: reconstruction", "kind: diagram"), ("config-value",)),
        (("title: a table", "titel: a table"), ("config-value",)),
        (("smoke: {over: {iterations: 1}}", "laptop: {}"), ("config-value",)),
        (("number: Table 1", "number: [1"), ("text-malformed", "YAML")),
    ],
)
def test_a_wrong_declaration_names_its_file_and_what_is_wrong(
    change: tuple[str, str], said: tuple[str, ...], tmp_path: Path
) -> None:
    path = write(tmp_path, WHOLE.replace(*change))
    with refused(*said) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_row_overrides_its_scale_and_the_scale_can_fix_a_setting(tmp_path: Path) -> None:
    text = WHOLE.replace("{name: one}", "{name: one, set: {iterations: 7, batch: 3}}")
    found: Experiment = read(
        write(tmp_path, text.replace("{over: {iter", "{set: {batch: 2}, over: {iter"))
    )
    assert found.settings_at("smoke", found.rows[0]) == {"iterations": 1, "batch": 3}


def test_a_row_has_the_paper_s_own_data_at_full_size() -> None:
    (table,) = find(["grnn/table-3-2"])
    faces = table.rows[2]
    assert table.settings_at("laptop", faces)["data"] == "faces"
    assert table.settings_at("gpu", faces)["data"] == "lfw"
    assert table.settings_at("smoke", faces)["data"] == "digits"


def test_declarations_lie_beside_the_code() -> None:
    assert (HERE / "adadefense" / "table-4.yaml").is_file()


def test_what_is_not_run_here_names_the_command_that_would() -> None:
    for experiment in experiments().values():
        if experiment.needs is not None:
            assert "`python -m experiments.papers run " in experiment.needs, experiment.name
        named = re.findall(
            r"python -m experiments.papers run (\S+) --scale gpu", experiment.needs or ""
        )
        for name in named:
            assert name in experiments(), experiment.name
            assert "gpu" in find([name])[0].scales or "until then" in (experiment.needs or "")


def test_every_experiment_with_rules_states_its_claims_and_a_rule_covers_each() -> None:
    for experiment in experiments().values():
        assert bool(experiment.rules) == bool(experiment.claims), experiment.name
        for claim in experiment.claims:
            covered = any(claim.covered_by(rule) for rule in experiment.rules)
            assert covered != (claim.untested is not None), (experiment.name, claim.says)
