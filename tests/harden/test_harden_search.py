"""The search: who gets which attack, what leaves the frontier, and that it goes on."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from bract.config import build_config
from bract_harden import comparing, work
from bract_harden import search as module
from bract_harden.page import PAGE, gather_hardening, site_policy, write_hardening
from bract_harden.records import Candidate, Measure, QuestionLeak
from bract_harden.search import Hardening, from_first_uploads
from bract_harden.space import Space
from bract_harden.space_file import SpaceFile
from bract_harden.study import finished, open_study
from bract_harden.work import here

pytest.importorskip("optuna")

STAGES = {10: "cheap", 20: "middle", 30: "full"}


class Fake:
    """Trains and attacks nothing; leakage follows from the defenses and the attack."""

    def __init__(self, *, crash: str | None = None, stop_after: int | None = None) -> None:
        self.crash, self.left = crash, stop_after
        self.trained: Counter[str] = Counter()
        self.attacked: list[tuple[str, str]] = []

    def train(self, config: Any, root: Path) -> float:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        if self.crash in [entry["name"] for entry in config.defenses]:
            raise RuntimeError("the loss\nis not finite")
        root.mkdir(parents=True)
        (root / "metrics.jsonl").touch()
        self.trained[root.parent.name] += 1
        return 1.0

    def attack(self, root: Path, settings: Any) -> None:
        stage = STAGES[settings["iterations"]]
        (root / "stage").write_text(stage)
        self.attacked.append((root.parent.name, stage))


def measured(root: Path, config: Any, seed: int, seconds: float | None) -> Measure:
    """Pruning seems to leak nothing until the full attack; noise costs accuracy."""
    kept = root / "stage"
    stage = kept.read_text() if kept.exists() else "trained"
    names = [entry["name"] for entry in config.defenses]
    noise = next((e["std"] for e in config.defenses if e["name"] == "noise"), 0.0)
    leak = max(0.0, 0.9 - 8.0 * noise)
    if "pruning" in names:
        leak = 0.95 if stage == "full" else 0.0
    level = "leaked" if leak > 0.5 else "none-leaked"
    leaked = 4 if leak > 0.5 else 0
    one = QuestionLeak(
        question="reconstruction",
        value=leak,
        levels=[level],
        leaked=leaked,
        scored=4,
        attack="GRNN (adaptive)",
    )
    lost = (
        0.2 * noise + (0.01 if "pruning" in names else 0.0) + (0.05 if "guardian" in names else 0)
    )
    accuracy = 0.9 - lost - 0.001 * seed
    return Measure(seed=seed, accuracy=accuracy, seconds=seconds, bytes=100.0, leaks=[one])


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "measure", measured)


def hardening(root: Path, federations: Any, **search: Any) -> Hardening:
    content = {
        "space": {},
        "defenses": [
            [],
            [{"name": "noise", "clip": 1.0, "std": {"low": 0.01, "high": 0.1}}],
            ["pruning"],
            ["guardian"],
        ],
        "search": {
            "trials": 12,
            "seeds": 2,
            "frontier": 0,
            "cheap": {"iterations": 10},
            "middle": {"iterations": 20},
            "full": {"iterations": 30},
            **search,
        },
    }
    base = build_config({"data": {"image_size": 16, "validation": 0.0}})
    root.mkdir(exist_ok=True)
    said: list[str] = []
    return Hardening(
        root, Space(base, SpaceFile.model_validate(content)), here(federations), say=said.append
    )


def read_candidates(root: Path) -> list[Candidate]:
    paths = root.glob("candidates/*/candidate.json")
    return [Candidate.parse_text(path.read_bytes(), source=str(path)) for path in paths]


def test_every_point_of_the_frontier_had_the_full_attack_with_all_seeds(tmp_path: Path) -> None:
    found = hardening(tmp_path, Fake())
    found.run()
    front = found.frontier(full=True)
    assert len(front) >= 3
    assert all(c.stage == "full" and len(c.measures) == 2 for c in front)
    stages = Counter(c.stage for c in found.candidates)
    assert stages["cheap"] > 0, "what another candidate beats gets no dear attack"


def test_a_point_that_a_stronger_attacker_breaks_drops_out_and_the_page_says_so(
    tmp_path: Path,
) -> None:
    found = hardening(tmp_path, Fake())
    found.run()
    (pruned,) = [c for c in found.candidates if c.title == "Pruning"]
    assert pruned.stage == "full"
    assert pruned.name not in [c.name for c in found.frontier(full=True)]
    assert pruned.dropped == "leakage rose from 0.00 to 0.95 under GRNN (adaptive)"
    facts, page = write_hardening(found)
    assert page == tmp_path / PAGE
    assert "leakage rose from 0.00 to 0.95" in page.read_text()
    assert facts.recommended is not None
    best = next(c for c in facts.candidates if c.name == facts.recommended)
    assert not best.violated
    assert best.title == "Gaussian noise"
    assert (tmp_path / "recommended.yaml").is_file()


def test_a_candidate_that_learns_too_little_is_not_attacked(tmp_path: Path) -> None:
    federations = Fake()
    found = hardening(tmp_path, federations, floor=0.97)  # guardian costs 0.05 of 0.9
    found.run()
    poor = [c for c in found.candidates if "guardian" in str(c.setting)]
    assert poor
    assert all(c.stage == "trained" and c.leak is None and c.accuracy for c in poor)
    assert not {c.name for c in poor} & {name for name, _ in federations.attacked}
    trained = sum(federations.trained.values())
    again = hardening(tmp_path, federations, floor=0.97)
    again.run()
    assert sum(federations.trained.values()) == trained


def test_no_point_within_the_constraints_is_said_and_nothing_recommended(tmp_path: Path) -> None:
    found = hardening(tmp_path, Fake())
    limits = found.space.file.constraints.model_copy(update={"accuracy_loss": 0.001})
    found.space.file = found.space.file.model_copy(update={"constraints": limits})
    found.run()
    facts = gather_hardening(found)
    assert facts.recommended is None
    assert facts.sentence.startswith("None was found within the space")
    assert facts.nearest in facts.frontier


def test_a_candidate_that_crashes_is_recorded_and_the_search_goes_on(tmp_path: Path) -> None:
    found = hardening(tmp_path, Fake(crash="guardian"))
    found.run()
    (crashed,) = [c for c in found.candidates if c.error]
    assert crashed.error == "RuntimeError: the loss is not finite"
    assert crashed.stage == "crashed"
    assert len(found.candidates) > 3
    assert "RuntimeError: the loss is not finite" in write_hardening(found)[1].read_text()


def test_an_interrupted_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = Fake(stop_after=4)
    with pytest.raises(KeyboardInterrupt):
        hardening(tmp_path, first).run()
    second = Fake()
    resumed = hardening(tmp_path, second)
    resumed.run()
    assert resumed.frontier(full=True)
    done = [name for name, count in first.trained.items() if count]
    assert len(done) >= 2
    control = resumed.control
    assert control is not None
    assert second.trained[control.name] == 0, "what was trained is not trained again"
    assert all(c.measures for c in resumed.candidates)
    again = hardening(tmp_path, Fake(stop_after=0))
    again.run()
    assert [c.name for c in again.frontier(full=True)] == [
        c.name for c in resumed.frontier(full=True)
    ]


def test_points_beyond_the_limit_are_named_and_left_out(tmp_path: Path) -> None:
    found = hardening(tmp_path, Fake(), points=1)
    found.run()
    assert all(c.stage == "full" for c in found.frontier(full=True))
    assert "did not get the full attack" in " ".join(found.notes)


def test_a_redacted_page_shows_no_image(tmp_path: Path) -> None:
    found = hardening(tmp_path, Fake())
    found.run()
    assert "data:image" not in write_hardening(found, redact=True)[1].read_text()


def test_defenses_that_no_adaptive_attacker_knows_are_never_recommended(tmp_path: Path) -> None:
    found = hardening(tmp_path, Fake())
    chain = [{"name": "guardian"}, {"name": "pruning"}, {"name": "noise", "std": 0.01}]
    config = build_config({"defenses": chain})
    said = comparing.violations(Candidate(name="c", stage="full"), config, found.space, None)
    assert said == ["no adaptive attacker knows these defenses together"]
    private = build_config({"training": {"private": {"epsilon": 1.0}}, "defenses": ["guardian"]})
    assert not comparing.adaptive(private)
    assert comparing.adaptive(build_config({"defenses": ["guardian"]}))


def test_the_site_policy_requires_the_defenses_and_their_settings() -> None:
    from bract.client.policy import SitePolicy
    from bract.parse import parse_yaml

    config = build_config(
        {"defenses": [{"name": "noise", "std": 0.01, "clip": 1.0}], "training": {"local_steps": 5}}
    )
    policy = SitePolicy.model_validate(parse_yaml(site_policy(config)))
    assert policy.require[0].name == "noise"
    assert policy.require[0].equal == {"std": 0.01, "clip": 1.0}


def test_an_earlier_search_of_another_space_is_not_resumed(tmp_path: Path) -> None:
    from bract.rundir import RunDirectory
    from bract_harden.configuration import _claim

    space = hardening(tmp_path, Fake()).space
    run = RunDirectory(tmp_path)
    _claim(run, space, resume=False, overwrite=False)
    with refused("file-taken", "--resume"):
        _claim(run, space, resume=False, overwrite=False)
    _claim(run, space, resume=True, overwrite=False)
    space.file = space.file.model_copy(update={"defenses": []})
    with refused("file-taken", tmp_path):
        _claim(run, space, resume=True, overwrite=False)
    (tmp_path / "search.json").write_text("{")
    with refused("file-damaged", "search.json", "--overwrite"):
        _claim(run, space, resume=True, overwrite=False)


def test_an_interruption_in_a_group_costs_no_finished_trial(tmp_path: Path) -> None:
    first = Fake(stop_after=2 + 6)  # the control's two federations, then six of the first eight
    with pytest.raises(KeyboardInterrupt):
        hardening(tmp_path, first).run()
    kept = {c.name for c in read_candidates(tmp_path) if c.measures}
    second = Fake()
    resumed = hardening(tmp_path, second)
    resumed.run()
    cheap = [name for name, stage in second.attacked if stage == "cheap"]
    assert len(kept) >= 4
    assert not set(cheap) & kept, "what was attacked is not attacked again"
    study = open_study(tmp_path / "study.db", trials=12, seed=0, starts=[], keys={})
    assert finished(study) == 12, "interrupted trials do not count as done"


def test_of_masked_uploads_the_sum_is_attacked_whatever_clients_are_named(tmp_path: Path) -> None:
    named = {"iterations": 30, "clients": ["client-1"]}
    settings = hardening(tmp_path, Fake(), full=named).settings
    plain, masked = (
        build_config({"encryption": {"scheme": scheme}}) for scheme in ("none", "masks")
    )
    for stage in ("cheap", "middle", "full"):
        assert module._settings(settings, stage, plain)["clients"] == ["client-1"]
        assert "clients" not in module._settings(settings, stage, masked)


@pytest.mark.parametrize(
    ("audited", "joins", "rounds"),
    [
        ({"rounds": [1], "clients": ["client-2"]}, {"client-2": 3}, [3]),
        ({"rounds": [1, 5], "clients": None}, {"client-2": 3}, [1, 3, 5]),
        ({"rounds": [4], "clients": ["client-2"]}, {"client-2": 3}, [4]),
        ({"rounds": None, "clients": None}, {"client-2": 3}, None),
        ({"rounds": [1], "clients": None}, {}, [1]),
    ],
)
def test_a_client_that_joins_later_is_attacked_in_its_first_round(
    audited: Any, joins: Any, rounds: Any
) -> None:
    config = build_config({"audit": audited, "strategy": {"joins": joins}})
    assert from_first_uploads({"iterations": 1}, config).get("rounds", audited["rounds"]) == rounds
    assert from_first_uploads(audited, config)["rounds"] == rounds


def test_a_search_begins_with_each_chain_on_the_configurations_own_settings(tmp_path: Path) -> None:
    found = hardening(tmp_path, Fake())
    found.run()
    first = [c.setting for c in found.candidates[1:4]]
    assert [s["defenses"] for s in first] == ["1: noise", "2: pruning", "3: guardian"]
    assert first[0]["defenses[1].noise.std"] == 0.055


def test_choices_that_are_no_plain_values_are_begun_with_and_varied_too(tmp_path: Path) -> None:
    keys = {
        "training.private": [None, {"epsilon": 8.0}],
        "training.local_steps": [None, 5],
        "training.batch_size": [8, 8],
    }
    found = hardening(tmp_path, Fake(), trials=6)
    content = found.space.file.model_dump() | {"space": keys}
    space = Space(found.space.base, SpaceFile.model_validate(content))
    search = Hardening(tmp_path, space, here(Fake()), say=lambda line: None)
    search.run()
    tried = [c.setting for c in search.candidates if c.setting]
    assert [s["training.private"] for s in tried[:2]] == [None, None]
    assert {"epsilon": 8.0} in [s["training.private"] for s in tried]


def test_a_frontier_with_few_points_is_searched_on_near_its_points(tmp_path: Path) -> None:
    """Only noise has a range here: every further point is one of its deviations."""
    few = hardening(tmp_path / "few", Fake(), trials=8, points=9)
    few.run()
    more = hardening(tmp_path / "more", Fake(), trials=8, points=9, frontier=6)
    more.run()
    assert len(few.frontier(full=True)) < 6
    assert len(more.frontier(full=True)) > len(few.frontier(full=True))
    assert len(more.candidates) <= 1 + 2 * 8
    assert {c.name for c in few.candidates} < {c.name for c in more.candidates}
    assert all(len(c.measures) == 2 for c in more.frontier(full=True))


def test_more_seeds_on_resuming_attack_the_further_federations_alone(tmp_path: Path) -> None:
    first, second = Fake(), Fake()
    hardening(tmp_path, first).run()
    again = hardening(tmp_path, second, seeds=5)
    again.run()
    front = again.frontier(full=True)
    assert all([m.seed for m in c.measures] == [0, 1, 2, 3, 4] for c in front)
    assert all(leak.scored == 5 * 4 for c in front for leak in c.leaks)
    assert again.control is not None
    assert second.trained[again.control.name] == 3
    assert not {stage for _, stage in second.attacked} - {"full"}


def test_the_search_finds_the_frontier_of_the_grid_with_fewer_full_attacks(tmp_path: Path) -> None:
    keys = {"std": [0.01, 0.03, 0.05, 0.07, 0.09]}
    chains: list[Any] = [[], ["pruning"], ["guardian"]]
    chains += [[{"name": "noise", "clip": 1.0, "std": std}] for std in keys["std"]]
    chains += [["guardian", {"name": "noise", "clip": 1.0, "std": std}] for std in keys["std"]]

    def of(root: Path, federations: Fake) -> Hardening:
        found = hardening(root, federations, trials=26, together=4)
        content = found.space.file.model_dump() | {"defenses": chains}
        space = Space(found.space.base, SpaceFile.model_validate(content))
        return Hardening(root, space, here(federations), say=lambda line: None)

    searched, grid = Fake(), Fake()
    quick, slow = of(tmp_path / "search", searched), of(tmp_path / "grid", grid)
    quick.run()
    slow.run_grid([{"defenses": name} for name in slow.space.names()])
    assert [c.name for c in quick.frontier(full=True)] == [c.name for c in slow.frontier(full=True)]
    full = [sum(stage == "full" for _, stage in one.attacked) for one in (searched, grid)]
    assert full[0] < full[1] == 2 * len(chains)


def test_the_chart_has_numbers_on_both_axes_where_the_dots_are(tmp_path: Path) -> None:
    found = hardening(tmp_path, Fake())
    found.run()
    facts, page = write_hardening(found)
    chart = page.read_text().split("<svg")[1].split("</svg>")[0]
    assert "aria-labelledby" in chart
    assert "<desc" in chart
    down = re.findall(r'<text x="-8" y="([0-9.]+)" [^>]*end">([0-9.]+)</text>', chart)
    across = re.findall(r'<text x="([0-9.]+)%" y="258" text-anchor="middle">([0-9.]+)</t', chart)
    (y0, low), (y1, high) = ((float(at), float(label)) for at, label in (down[0], down[-1]))
    (x0, first), (x1, last) = ((float(at), float(label)) for at, label in (across[0], across[-1]))
    assert (first, last) == (0.0, 1.0)
    assert len(set(down)) == len(down) >= 3
    dots = re.findall(r'cx="([0-9.]+)%" cy="([0-9.]+)" r="7"', chart)
    drawn = [
        (
            (float(x) - x0) / (x1 - x0),
            low + (high - low) * (float(y) - y0) / (y1 - y0),
        )
        for x, y in dots
    ]
    named = {c.name: c for c in facts.candidates}
    front = [(named[name].leak, named[name].accuracy) for name in facts.frontier]
    for (leak, right), (x, y) in zip(sorted(front), sorted(drawn), strict=True):
        assert x == pytest.approx(leak, abs=1e-3)
        assert y == pytest.approx(right, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("study.db", ("file-damaged", "study", "--resume")),
        ("before.json", ("file-damaged", "JSON", "--resume")),
        ("wall.json", ("file-damaged", "JSON", "--resume")),
    ],
)
def test_a_broken_file_of_a_search_is_one_line_and_removing_it_helps(
    tmp_path: Path, name: str, said: tuple[str, ...]
) -> None:
    federations = Fake()
    hardening(tmp_path, federations).run()
    trained = sum(federations.trained.values())
    (tmp_path / name).write_text("not what it was")
    with refused(*said) as caught:
        again = hardening(tmp_path, federations, points=13)
        again.run()
        assert again._before
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    (tmp_path / name).unlink()
    again = hardening(tmp_path, federations)
    again.run()
    assert again.frontier(full=True)
    assert sum(federations.trained.values()) == trained or name == "study.db"


def test_the_grid_of_the_benchmark_has_every_combination(tmp_path: Path) -> None:
    from experiments import hardening_grid as grid

    stages = {"cheap": {"iterations": 10}, "middle": {"iterations": 20}, "full": {"iterations": 30}}
    content = grid.SPACE | {"search": grid.SPACE["search"] | stages}
    space = Space(build_config(grid.BASE), SpaceFile.model_validate(content))
    combinations = grid.combinations(space)
    assert len({str(setting) for setting in combinations}) == len(combinations) == 2 * 2 * 10
    found = []
    for name in ("search", "grid"):
        (tmp_path / name).mkdir()
        found.append(Hardening(tmp_path / name, space, here(Fake()), say=lambda line: None))
    found[0].run()
    found[1].run_grid(combinations)
    search, whole = grid.row("search", *found), grid.row("grid", *reversed(found))
    assert whole["full"] == len(combinations)
    assert whole["federations"] == 3 * len(combinations)
    assert search["federations"] < whole["federations"]
    assert search["met"] <= search["of"] == search["points"]


def test_the_single_settings_of_the_benchmark_begin_with_their_control(tmp_path: Path) -> None:
    from experiments import hardening_grid as grid
    from experiments import hardening_settings as single

    expected = {
        "joins": ("joins", [{}, {"client-2": 3}, {"client-2": 5}]),
        "secret": ("secret_updates", [0, 1, 2, 8]),
    }
    for name, content in single.SPACES.items():
        (tmp_path / name).mkdir()
        base = build_config({"defenses": content["defenses"][0]})
        search = {"search": {"seeds": 1, "full": {"iterations": 30}}}
        space = Space(base, SpaceFile.model_validate(content | search))
        found = Hardening(tmp_path / name, space, here(Fake()), say=lambda line: None)
        found.run_grid(grid.combinations(space))
        rows = [single.row(found.config(one), one) for one in found.candidates]
        key, values = expected[name]
        assert [row[key] for row in rows] == values
