"""The guard of a site: what it lets leave, what it tells, and what its policy may hold."""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
import yaml
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from refusals import refused
from text_uploads import ENCODER, SCHEMA, texts, upload

import bract.client.app as client_app
from bract import DefenseMod, Observation, ObservationStore
from bract.attacks import base
from bract.client import REFUSED, Guard, answered, answers, guard_policy, guarding, policy_checks
from bract.client import guard as guard_module
from bract.client import policy as site_policy
from bract.client.defending import defenses_of
from bract.client.guard_attack import Inspection
from bract.client.site import Site
from bract.config import DataConfig, build_config, dump_config
from bract.data.tokens import as_example
from bract.data.views import test_data as load_test_data
from bract.defenses import entries
from bract.errors import BractError
from bract.inputs import Truth
from bract.models import create_model
from bract.process import clock as clocks
from bract.rundir import RunDirectory
from bract.scores import ssim
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid
from experiments.harness.rows import send_rows

NOISE = {"name": "noise", "std": 0.2, "clip": 1.0}
PRUNING = {"name": "pruning", "ratio": 0.99}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


class Machine:
    """Has a wall's clock and a processor's, which move only where something takes time.

    Parameters
    ----------
    busy
        Wall seconds in which a thread gets one second of the processor.
    """

    def __init__(self, busy: float = 1.0) -> None:
        self.busy = busy
        self.now = self.worked = 0.0

    def work(self, seconds: float) -> None:
        """Let the thread work for so many seconds of the processor."""
        self.worked += seconds
        self.now += seconds * self.busy

    def sleep(self, seconds: float) -> None:
        """Let seconds pass on the wall."""
        self.now += seconds

    def clock(self) -> clocks.ProcessorClock:
        """Return a guard's clock here; reading it is work too."""

        def worked() -> float:
            self.work(1e-4)
            return self.worked

        return clocks.ProcessorClock(wall=lambda: self.now, processor=worked)


def climbed(
    ladder: list[Any],
    above: Mapping[str, bool],
    *,
    margin: int = 0,
    takes: float = 0.3,
    needs: float = 0.0,
    level: int = 0,
    busy: float = 1.0,
) -> tuple[guard_module.Passed | None, list[str], float]:
    """Return what a guard lets leave, the steps that it judged, and the wall seconds it took."""
    machine = Machine(busy)

    def make(step: guard_policy.Step) -> guard_module.Candidate | None:
        return guard_module.Candidate({}, {}, torch.zeros(1), torch.zeros(1), 1)

    def inspect(
        candidate: guard_module.Candidate, step: guard_policy.Step, seconds: float
    ) -> guard_module.Finding:
        machine.work(takes)
        if seconds < needs:
            return guard_module.Finding(above=True, unfinished=True)
        return guard_module.Finding(above=above.get(step.name, True))

    policy = guard_policy.GuardPolicy(ladder=ladder, margin=margin)
    guard = guard_module.Ladder(policy, inspect, make, machine.clock, machine.sleep)
    passed = guard.passed(level)
    return passed, [name for name, _ in guard.findings], machine.now


def test_the_first_step_below_the_limit_leaves() -> None:
    passed, judged, _ = climbed([PRUNING, NOISE], {"noise std 0.2 clip 1.0": False})
    assert passed is not None and passed.level == 2 and not passed.skipped
    assert judged == ["as it is", "pruning ratio 0.99", "noise std 0.2 clip 1.0"]


def test_what_no_step_helps_does_not_leave_and_skip_sends_zeros() -> None:
    assert climbed([PRUNING], {})[0] is None
    passed, judged, _ = climbed([PRUNING, "skip"], {})
    assert passed is not None and passed.skipped
    assert judged == ["as it is", "pruning ratio 0.99"]


def test_a_later_update_begins_where_the_run_is_but_not_at_a_skip() -> None:
    assert climbed([PRUNING, NOISE], {}, level=2)[1] == ["noise std 0.2 clip 1.0"]
    assert climbed([PRUNING, "skip"], {}, level=2)[1] == ["pruning ratio 0.99"]


@pytest.mark.parametrize("above", [{"as it is": False}, {"pruning ratio 0.99": False}, {}])
def test_the_time_is_the_same_whatever_was_found(above: Mapping[str, bool]) -> None:
    assert climbed([PRUNING, NOISE], above)[2] == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("busy", [1.1, 2.9, 20.0])
def test_a_busy_machine_changes_neither_what_leaves_nor_that_the_time_is_the_same(
    busy: float,
) -> None:
    """Its attacks have their seconds of the processor, until four times as many have gone by."""
    ladder, taken = [PRUNING, NOISE, "skip"], set[float]()
    quick = 0.3 if busy < 4.0 else 0.05
    for above in ({"as it is": False}, {"pruning ratio 0.99": False}, {}):
        here, there = (climbed(ladder, above, takes=quick, busy=one)[0] for one in (1.0, busy))
        assert here is not None and there is not None and here.level == there.level
        taken.add(round(climbed(ladder, above, takes=quick, busy=busy)[2], 1))
    late = 1.9 if busy < 4.0 else 1.9 * 4.0 / busy
    taken.add(round(climbed([], {}, takes=late, busy=busy)[2], 1))  # an attack that overran
    assert taken == {{1.1: 3.0, 2.9: 6.0, 20.0: 8.0}[busy]}


@dataclass(frozen=True, kw_only=True)
class Deaf(base.Attack):
    """Never looks at the clock."""

    name: ClassVar[str] = "deaf"

    def solve(self, problem: Any, run: Any) -> Any:
        begun = time.process_time()
        while time.process_time() < begun + 30.0:
            sum(range(10_000))
        raise AssertionError("it was cut off before")


class DeafAlone(Inspection):
    """Has one attack, which never looks at the clock."""

    def _methods(self, case: Any) -> Any:
        return [], [Deaf()]


def test_the_time_holds_in_a_thread_whatever_an_attack_does() -> None:
    """A SuperNode's app may run in any thread."""
    found: list[tuple[guard_module.Passed | None, float]] = []

    def run() -> None:
        inspect, candidate = inspection_of_rows(DeafAlone, guard_policy.GuardPolicy(seconds=0.5))
        begun = time.monotonic()
        ladder = guard_module.Ladder(
            guard_policy.GuardPolicy(seconds=0.5), inspect, lambda _: candidate
        )
        found.append((ladder.passed(), time.monotonic() - begun))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((passed, seconds),) = found
    assert passed is None and seconds < 15.0


class ReadingsAlone(Inspection):
    """Has no search, as for texts."""

    def _methods(self, case: Any) -> Any:
        return super()._methods(case)[0], []


@pytest.mark.thorough
def test_the_time_of_an_answer_does_not_depend_on_the_step() -> None:
    """Real closed forms on rows: as they are, behind a step that helps, and refused.

    Sleep moves the clock alone, so that a busy machine has time for the attacks.
    """
    ladder: Any = [{"name": "truncated-svd", "energy": 0.5}]
    taken: dict[int | None, float] = {}
    for limit, steps in ((1.1, ladder), (0.99, ladder), (0.99, [])):
        policy = guard_policy.GuardPolicy(limit={"features": limit}, seconds=90.0, ladder=steps)
        inspect, candidate = inspection_of_rows(ReadingsAlone, policy)
        slept: list[float] = []

        def make(
            step: guard_policy.Step, made: guard_module.Candidate = candidate
        ) -> guard_module.Candidate:
            return replace(made, update=step.chain.protect(made.update, {}))

        def wall(slept: list[float] = slept) -> float:
            return time.monotonic() + sum(slept)

        begun, clock = wall(), partial(clocks.ProcessorClock, 1.0, wall)
        passed = guard_module.Ladder(policy, inspect, make, clock, slept.append).passed()
        taken[None if passed is None else passed.level] = wall() - begun
    assert set(taken) == {0, 1, None}
    assert max(taken.values()) - min(taken.values()) < 0.5, taken


def test_what_overran_is_padded_to_whole_halves_of_the_time() -> None:
    assert climbed([], {}, takes=2.2)[2] == pytest.approx(3.0, abs=0.01)


def test_what_a_first_look_does_not_read_is_attacked_with_the_rest_of_the_time() -> None:
    _, judged, _ = climbed([PRUNING], {"as it is": False})
    assert judged == ["as it is", "as it is"]


def test_a_look_for_which_a_share_of_the_time_is_too_short_gets_the_rest() -> None:
    passed, judged, _ = climbed([PRUNING], {"as it is": False}, needs=0.9)
    assert passed is not None and passed.level == 0 and judged == ["as it is", "as it is"]
    assert climbed([], {"as it is": False}, needs=5.0)[0] is None


def test_a_closed_form_that_was_done_is_not_run_on_the_same_update_again() -> None:
    ran: list[str] = []

    class Counting(Inspection):
        def _methods(self, case: Any) -> Any:
            readings, _ = super()._methods(case)
            ran.append(f"{len(self._finished[1])} of {len(readings)} done")
            return readings, []

    inspect, candidate = inspection_of_rows(
        Counting, guard_policy.GuardPolicy(limit={"features": 1.1})
    )
    for one in (candidate, candidate, replace(candidate)):
        assert not inspect(one, guard_policy.AS_IT_IS, 90.0).above
    first, again, other = ran
    assert first == other and first.startswith("0 of")
    done, count = again.removesuffix(" done").split(" of ")
    assert done == count != "0"


def test_a_second_look_without_a_search_is_no_finding() -> None:
    policy = guard_policy.GuardPolicy(limit={"features": 1.1}, seconds=90.0, ladder=[NOISE])
    inspect, candidate = inspection_of_rows(ReadingsAlone, policy)
    passed = guard_module.Ladder(
        policy, inspect, lambda _: candidate, sleep=lambda _: None
    ).passed()
    assert passed is not None and passed.level == 0


def test_a_second_look_leaves_time_for_the_next_step() -> None:
    """What is read late is not refused for lack of time alone."""
    spent: list[float] = []

    def inspect(
        candidate: guard_module.Candidate, step: guard_policy.Step, seconds: float
    ) -> guard_module.Finding:
        machine.work(seconds)
        spent.append(seconds)
        return guard_module.Finding(above=step.name == "as it is" and len(spent) == 2)

    machine = Machine()
    policy = guard_policy.GuardPolicy(ladder=[PRUNING])
    made = guard_module.Candidate({}, {}, torch.zeros(1), torch.zeros(1), 1)
    passed = guard_module.Ladder(
        policy, inspect, lambda _: made, machine.clock, machine.sleep
    ).passed()
    assert passed is not None and passed.level == 1
    assert spent == pytest.approx([0.85, 0.85 * 2 / 3, 0.85 / 3], abs=0.01)


def test_a_step_that_there_is_no_time_to_attack_is_not_sent() -> None:
    passed, judged, _ = climbed([PRUNING], {"pruning ratio 0.99": False}, takes=1.9)
    assert passed is None and judged == ["as it is", "pruning ratio 0.99"]


WEAK_NOISE: dict[str, Any] = {"name": "noise", "std": 0.1, "clip": 1.0}
BATCH_64: dict[str, Any] = {"name": "batch", "size": 64}


@pytest.mark.parametrize(
    ("ladder", "passes", "margin", "sent"),
    [
        ([WEAK_NOISE, NOISE], "as it is", 1, "as it is"),
        ([WEAK_NOISE, NOISE], "noise std 0.1 clip 1.0", 1, "noise std 0.2 clip 1.0"),
        ([WEAK_NOISE, NOISE], "noise std 0.1 clip 1.0", 0, "noise std 0.1 clip 1.0"),
        ([WEAK_NOISE, NOISE], "noise std 0.2 clip 1.0", 1, "noise std 0.2 clip 1.0"),
        ([WEAK_NOISE, "skip"], "noise std 0.1 clip 1.0", 1, "noise std 0.1 clip 1.0"),
        ([BATCH_64, NOISE], "batches of 64", 1, "batches of 64, noise std 0.2 clip 1.0"),
        (
            [NOISE, PRUNING],
            "noise std 0.2 clip 1.0",
            1,
            "pruning ratio 0.99, noise std 0.2 clip 1.0",
        ),
        (
            [BATCH_64, WEAK_NOISE, NOISE],
            "batches of 64",
            5,
            "batches of 64, noise std 0.2 clip 1.0",
        ),
    ],
)
def test_what_was_read_leaves_a_step_further_than_the_first_that_passes(
    ladder: list[Any], passes: str, margin: int, sent: str
) -> None:
    passed, _, _ = climbed(ladder, {passes: False, sent: False}, margin=margin, takes=0.1)
    assert passed is not None and passed.step.name == sent


def test_a_run_does_not_climb_by_its_margin_alone() -> None:
    """The next update begins where the last one passed, not where it left."""
    above = {"noise std 0.1 clip 1.0": False, "noise std 0.2 clip 1.0": False}
    ladder = [WEAK_NOISE, NOISE, PRUNING]
    first, _, _ = climbed(ladder, above, margin=1)
    assert first is not None
    second, _, _ = climbed(ladder, above, margin=1, level=first.level)
    assert second is not None and second.step.name == first.step.name
    assert second.level == first.level == 1


def test_a_margin_that_is_read_itself_does_not_leave() -> None:
    passed, judged, _ = climbed(
        [WEAK_NOISE, PRUNING, NOISE],
        {"noise std 0.1 clip 1.0": False, "noise std 0.2 clip 1.0": False},
        margin=1,
        takes=0.1,
    )
    assert "pruning ratio 0.99, noise std 0.1 clip 1.0" in judged
    assert passed is not None and passed.step.name == "noise std 0.2 clip 1.0"


STRONG_NOISE = {"name": "noise", "std": 0.3, "clip": 1.0}


@pytest.mark.parametrize(
    ("further", "sent"),
    [
        ({"std": 0.1}, "noise std 0.3 clip 1.0"),
        ({"std": 0.3, "clip": 2.0}, "noise std 0.3 clip 1.0"),
        ({"std": 0.4, "kind": "laplace"}, "noise std 0.3 clip 1.0"),
        ({"std": 0.6, "clip": 2.0}, "noise std 0.6 clip 2.0"),
    ],
)
def test_a_margin_is_never_weaker_than_what_was_judged(further: dict[str, Any], sent: str) -> None:
    """It may leave without an attack of its own, where no time is left."""
    step = [PRUNING, {"name": "noise", **further}]
    name = f"pruning ratio 0.99, {sent}"
    above = {"noise std 0.3 clip 1.0": False, name: False}
    passed, _, _ = climbed([STRONG_NOISE, step], above, margin=1)
    assert passed is not None and passed.step.name == name


def test_a_step_that_adds_nothing_is_no_margin() -> None:
    name = "pruning ratio 0.99, noise std 0.3 clip 1.0"
    above = {"noise std 0.3 clip 1.0": False, name: False}
    passed, _, _ = climbed([STRONG_NOISE, WEAK_NOISE, PRUNING], above, margin=1)
    assert passed is not None and passed.step.name == name


@pytest.mark.parametrize(
    ("name", "strong", "weak"),
    [
        ("pruning", {"ratio": 0.9}, {"ratio": 0.5}),
        ("truncated-svd", {"energy": 0.5}, {"energy": 0.9}),
        ("noise", {"epsilon": 1.0}, {"epsilon": 2.0}),
        ("noise", {"epsilon": 1.0, "kind": "laplace"}, {"std": 9.0, "kind": "laplace"}),
        ("noise", {"std": 0.1}, {"std": 0.1, "clip": None}),
        ("pruning", {"ratio": 0.5, "scope": "tensor"}, {"ratio": 0.9, "scope": "whole"}),
        ("guardian", {"beta": 0.5}, {"beta": 0.6}),
    ],
)
def test_settings_of_a_defense_are_compared_where_that_can_be_told(
    name: str, strong: Any, weak: Any
) -> None:
    first, second = (entries.read_defense({"name": name, **one}) for one in (strong, weak))
    assert first.at_least(first) and not second.at_least(first)


@pytest.mark.thorough
def test_an_update_leaves_with_the_margin_that_its_site_asks_for(tmp_path: Path) -> None:
    """Real attacks: noise of 0.2 stops them, and noise of 0.4 leaves."""
    more = {"name": "noise", "std": 0.4, "clip": 1.0}
    for margin, sent in ((0, "std 0.2"), (1, "std 0.4")):
        folder = tmp_path / str(margin)
        federate(folder, {"ladder": [NOISE, more], "margin": margin, "seconds": 4.0})
        (line,) = log_of(folder)
        assert line["margin"] == margin and line["sent"].endswith(sent)
        answered_in = json.loads((folder / "state-0" / "client-0-answered.json").read_text())
        (run,) = answered_in["runs"].values()
        assert run["guard"] == 1


@pytest.mark.parametrize(
    ("guard", "recorded", "words"),
    [
        ({}, True, []),
        ({}, False, ["state-dir"]),
        ({"ladder": [NOISE]}, True, ["margin"]),
        ({"ladder": [NOISE, "skip"]}, True, ["margin"]),
        ({"ladder": [NOISE], "margin": 0}, True, []),
        ({"ladder": [WEAK_NOISE, NOISE]}, True, []),
    ],
)
def test_a_policy_cautions_where_its_guard_forgets_or_has_no_margin(
    guard: Any, recorded: bool, words: list[str]
) -> None:
    cautions = site_policy.SitePolicy.model_validate({"guard": guard}).cautions(recorded=recorded)
    assert len(cautions) == len(words)
    for caution, word in zip(cautions, words, strict=True):
        assert "guard" in caution and word in caution


def test_a_site_without_a_folder_is_cautioned_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in (None, tmp_path):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="bract"):
            record_of({}, folder).admit(asked(1))
            apps_own = answers.Answers(
                RecordDict(), directory=folder, site="app", policy=site_policy.SitePolicy()
            )
            apps_own.check_guard(asked(1), guard_policy.GuardPolicy())
        assert caplog.text.count("state-dir") == (0 if folder else 4)


def record_of(guard: Any, folder: Path | None) -> answers.Answers:
    policy = site_policy.SitePolicy.model_validate({"guard": guard})
    return answers.Answers(RecordDict(), directory=folder, site="s", policy=policy)


def asked(run: int) -> answered.Request:
    return answered.Request("train", 1, "digest", run, "federation", "config", last_round=1)


@pytest.mark.parametrize(("reads", "left"), [(False, 6), (True, 0)])
def test_updates_at_the_same_time_share_the_bound_and_are_refused_for_stops_alone(
    reads: bool, left: int, tmp_path: Path
) -> None:
    """Six runs at once under two stops: all leave, or two are stopped and no other attacked."""
    policy = guard_policy.GuardPolicy(seconds=0.2)
    together, lock = threading.Barrier(6), threading.Lock()
    sent: list[int] = []
    attacked: list[int] = []

    def answer(run: int) -> None:
        def inspect(
            candidate: guard_module.Candidate, step: guard_policy.Step, seconds: float
        ) -> guard_module.Finding:
            with lock:
                attacked.append(run)
            return guard_module.Finding(above=reads)

        made = guard_module.Candidate({}, {}, torch.zeros(1), torch.zeros(1), 1)
        record = record_of({}, tmp_path)
        together.wait()
        with contextlib.suppress(site_policy.PolicyError):
            record.check_guard(asked(run), policy)
            ledger = guarding.RunLedger(record, asked(run), policy)
            ladder = guard_module.Ladder(policy, inspect, lambda _: made)
            guard_module.send_or_refuse(ladder, ledger, {}, None, "s")
            with lock:
                sent.append(run)

    threads = [threading.Thread(target=answer, args=(run,)) for run in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sent) == left
    assert len(set(attacked)) == (2 if reads else 6)
    held = json.loads((tmp_path / "s-answered.json").read_text())
    assert held["stops"] == (2 if reads else 0)


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        ({"limits": "leaked"}, ["guard.limits", "limit"]),
        ({"limit": {"psnr": 20, "ssim": 0.5}}, ["guard.limit"]),
        ({"limit": {"sharpness": 1}}, ["guard.limit"]),
        ({"ladder": [{"name": "noize", "std": 1.0}]}, ["noize", "noise"]),
        ({"ladder": ["skip", {"name": "noise", "std": 1.0}]}, ["skip"]),
        ({"ladder": [{"name": "batch", "size": 1}]}, ["batch"]),
        ({"ladder": [{"name": "soteria"}]}, ["soteria"]),
        ({"margin": -1}, ["guard.margin"]),
        ({"margin": "1"}, ["guard.margin"]),
        ({"margin": True}, ["guard.margin"]),
    ],
)
def test_a_guard_that_cannot_be_is_refused_by_its_key(
    tmp_path: Path, guard: Any, words: list[str]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump({"guard": guard}))
    with refused("config-value", path, *words):
        site_policy.load_policy(path)


@pytest.mark.parametrize("other", [{"max_epsilon": 8.0}, {"canaries": 10}])
def test_no_epsilon_is_claimed_of_what_a_guard_chose(tmp_path: Path, other: Any) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump({"guard": {}, **other}))
    with refused("config-value", path, "guard", next(iter(other))):
        site_policy.load_policy(path)


def federate(
    folder: Path,
    guard: Any,
    *,
    rounds: int = 1,
    name: str = "run",
    others: Any = None,
    **changes: Any,
) -> tuple[RunDirectory, LoopbackGrid]:
    """Run one client, whose policy holds a guard, on one image a round through one layer."""
    folder.mkdir(exist_ok=True)
    policy = (others or {}) | ({} if guard is None else {"guard": guard})
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    config = build_config(
        {
            "clients": 1,
            "rounds": rounds,
            "seed": 3,
            "data": {"image_size": 16, "validation": 0.2},
            "model": {"name": "linear"},
            "training": {"algorithm": "fedsgd", "lr": 0.1, "batch_size": 1},
            **changes,
        }
    )
    run = RunDirectory(folder / name)
    run.create(config)
    nodes: Any = [
        {
            "partition-id": i,
            "policy": str(folder / "policy.yaml"),
            "state-dir": str(folder / f"state-{i}"),
        }
        for i in range(config.clients)
    ]
    grid = LoopbackGrid(client_app.app, nodes, {"federation": dump_config(config)})
    Federation(config, run).train(grid)
    return run, grid


def log_of(folder: Path) -> list[Any]:
    path = folder / "state-0" / "client-0-guard.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    return [json.loads(line) for line in path.read_text().splitlines()]


def image_read_off(run: RunDirectory) -> torch.Tensor:
    """Return the image that one row of the layer's gradient over its bias shows."""
    (seen,) = ObservationStore(run.captures)
    weight, bias = (next(v for n, v in seen.update.items() if n.endswith(k)) for k in ("t", "s"))
    row = int(bias.abs().argmax())
    return (weight[row] / bias[row]).nan_to_num().clamp(0.0, 1.0).reshape(1, 1, 16, 16)


@pytest.mark.thorough
def test_an_image_that_can_be_read_off_does_not_leave_and_its_grade_stays(tmp_path: Path) -> None:
    bare, _ = federate(tmp_path / "bare", None)
    run, _ = federate(tmp_path / "held", {"ladder": [PRUNING, NOISE], "seconds": 6.0})
    assert float(ssim(image_read_off(run), image_read_off(bare))) < 0.5
    (line,) = log_of(tmp_path / "held")
    assert line["findings"][0]["above"] and line["findings"][0]["attack"] == "analytic"
    assert line["sent"] != "as it is"
    (seen,), (before,) = ObservationStore(run.captures), ObservationStore(bare.captures)
    # The run's own defenses are declared, and no key tells what the guard did.
    assert seen.declaration.defenses == ()
    metrics = set(seen.provenance["metrics"])
    assert metrics == set(before.provenance["metrics"]) - {"train_loss", "train_accuracy"}
    assert not [text for text in ("guard", "psnr", "ssim") if text in repr(seen.provenance)]


@pytest.mark.thorough
def test_a_refusal_is_constant_and_counts_until_nothing_more_is_answered(tmp_path: Path) -> None:
    with pytest.raises(BractError) as first:
        federate(tmp_path, {"ladder": [], "max_stops": 1})
    assert REFUSED in str(first.value)
    assert log_of(tmp_path)[0]["sent"] == "nothing"
    answered = json.loads((tmp_path / "state-0" / "client-0-answered.json").read_text())
    assert answered["stops"] == 1
    # An attack on the next run's first update is not even begun, and the words are the same.
    with pytest.raises(BractError) as second:
        federate(tmp_path, {"ladder": [], "max_stops": 1}, name="next")
    assert str(second.value) == str(first.value)
    assert len(log_of(tmp_path)) == 1


@pytest.mark.thorough
def test_after_two_stops_a_site_answers_nothing_by_default(tmp_path: Path) -> None:
    with pytest.raises(BractError) as refusal:
        federate(tmp_path, {"ladder": ["skip"]}, rounds=3)
    assert REFUSED in str(refusal.value)
    assert [line["sent"] for line in log_of(tmp_path)] == ["skip", "skip"]


@pytest.mark.thorough
def test_a_guard_that_may_climb_no_more_begins_at_the_highest_step(tmp_path: Path) -> None:
    ladder = {"ladder": [PRUNING, NOISE], "limit": {"psnr": 25.0}, "max_climbs": 1}
    for name in ("first", "second"):
        federate(tmp_path, ladder, name=name)
    first, second = log_of(tmp_path)
    assert first["findings"][0]["step"] == "as it is"
    (begins,) = {found["step"] for found in second["findings"]}
    assert begins.startswith("noise")
    answered = json.loads((tmp_path / "state-0" / "client-0-answered.json").read_text())
    assert answered["climbs"] == 1


def test_bounds_that_are_set_need_a_record_over_all_runs_and_defaults_do_not() -> None:
    assert guard_policy.GuardPolicy().needs_record is None
    assert guard_policy.GuardPolicy(max_stops=None).needs_record is None
    assert guard_policy.GuardPolicy(max_stops=3).needs_record == "max_stops"
    assert guard_policy.GuardPolicy(max_climbs=0).needs_record == "max_climbs"


@pytest.mark.thorough
def test_a_skip_sends_zeros_and_the_run_goes_on(tmp_path: Path) -> None:
    run, _ = federate(tmp_path, {"ladder": ["skip"]}, rounds=2)
    for seen in ObservationStore(run.captures):
        assert not any(bool(value.any()) for value in seen.update.values())
    assert [line["sent"] for line in log_of(tmp_path)] == ["skip", "skip"]


@pytest.mark.thorough
def test_a_larger_batch_is_trained_on_and_declared(tmp_path: Path) -> None:
    ladder = [{"name": "batch", "size": 64}]
    run, _ = federate(tmp_path, {"limit": {"psnr": 30.0}, "ladder": ladder})
    (seen,) = ObservationStore(run.captures)
    assert seen.declaration.num_examples == 64
    assert log_of(tmp_path)[0]["sent"] == "batches of 64"


def test_a_guard_that_fails_lets_nothing_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the attack broke off")

    monkeypatch.setattr(Inspection, "__call__", broken)
    with pytest.raises(BractError) as error:
        federate(tmp_path, {"seconds": 0.1})
    assert REFUSED in str(error.value) and "broke off" not in str(error.value)
    assert log_of(tmp_path)[0]["sent"] == "nothing"


def test_a_run_with_noise_on_every_step_is_refused_before_any_data_are_open() -> None:
    policy = site_policy.load_policy(None).model_copy(update={"guard": guard_policy.GuardPolicy()})
    config = build_config({"clients": 2, "training": {"private": {"epsilon": 8.0}}})
    with refused("policy-refused", "training.private", "guard"):
        policy_checks.check_run(policy, Site(name="s", partition=0), config, defenses_of(config))


SUMS = {"min_summed_clients": 3}


@pytest.mark.thorough
def test_a_guard_does_not_rest_for_a_sum_of_whom_the_site_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BractError), caplog.at_level(logging.INFO, logger="bract"):
        federate(tmp_path, {"ladder": []}, clients=3, encryption="masks")
    assert "not attacked" not in caplog.text


@pytest.mark.thorough
def test_a_masked_update_is_not_attacked_as_the_server_reads_sums_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="bract"):
        federate(tmp_path, {"ladder": []}, clients=3, encryption="masks", others=SUMS)
    assert not (tmp_path / "state-0" / "client-0-guard.jsonl").exists()
    assert "sums alone" in caplog.text


def app_of(images: torch.Tensor, labels: torch.Tensor) -> Any:
    """Return an app that takes one step on these images, and its guard's examples."""

    def train(msg: Message, context: Context) -> Message:
        model = create_model("linear", classes=10, channels=1, image_size=8)
        received: Any = msg.content["arrays"]
        model.load_state_dict(received.to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        content: dict[str, Any] = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(images)}),
        }
        return Message(RecordDict(content), reply_to=msg)

    return train


def answered_by_app(mod: DefenseMod, node: Any = None) -> tuple[Any, Any]:
    """Return the state that an app was sent, and its reply."""
    images, labels = load_test_data(DataConfig(name="digits", image_size=8))
    app = ClientApp(mods=[mod])
    app.train()(app_of(images[:1], labels[:1]))
    torch.manual_seed(0)
    sent = create_model("linear", classes=10, channels=1, image_size=8).state_dict()
    grid = LoopbackGrid(app, [node or {}], run_id=1)
    content: dict[str, Any] = {
        "arrays": ArrayRecord(sent),
        "config": ConfigRecord({"server-round": 1}),
    }
    message = grid.create_message(RecordDict(content), "train", 1, "1")
    (reply,) = grid.send_and_receive([message])
    return sent, reply


def examples(msg: Message, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_test_data(DataConfig(name="digits", image_size=8))
    return images[:1], labels[:1]


def guard(**settings: Any) -> Guard:
    return Guard("linear", examples, classes=10, lr=0.1, local_steps=1, batch_size=1, **settings)


WEAK: dict[str, Any] = {"std": 1e-6, "clip": None}


@pytest.mark.thorough
def test_an_app_that_declares_itself_sends_no_image_that_can_be_read_off() -> None:
    sent, reply = answered_by_app(
        DefenseMod("noise", guard=guard(ladder=[{"name": "noise", "std": 0.5}]), **WEAK)
    )
    got = reply.content["arrays"].to_torch_state_dict()
    moved = {name: sent[name] - got[name] for name in sent}
    deviation = float(torch.cat([value.flatten() for value in moved.values()]).std())
    assert deviation > 0.4
    assert json.loads(reply.content["bract.defenses"]["chain"])[0]["std"] == 1e-6
    _, refusal = answered_by_app(DefenseMod("noise", guard=guard(), **WEAK))
    assert refusal.error.reason == REFUSED


def test_a_policy_with_a_guard_takes_no_app_that_declares_none(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump({"guard": {}}))
    _, reply = answered_by_app(DefenseMod("noise", **WEAK), {"policy": str(path)})
    assert "guard" in reply.error.reason


def test_a_mod_that_cannot_train_again_refuses_a_ladder_of_batches() -> None:
    mod = DefenseMod("noise", guard=guard(ladder=[{"name": "batch", "size": 8}]), **WEAK)
    assert answered_by_app(mod)[1].error.reason == REFUSED


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"limit": "often"}, "config-value"),
        ({"seconds": -1.0}, "config-value"),
        ({"defenses": ()}, "config-key"),
        ({"learning_rate": 0.1}, "declaration-wrong"),
    ],
)
def test_a_guard_of_an_app_that_cannot_be_is_refused(settings: Any, code: str) -> None:
    with refused(code, next(iter(settings))):
        guard(**settings)


def inspected(
    seen: Observation, truth: Truth, known: Truth, seconds: float = 4.0
) -> guard_module.Finding:
    """Return what the guard's attack finds of an undefended update."""
    inspect = Inspection(guard_policy.GuardPolicy(seconds=seconds), seen, known, defenses=[])
    candidate = guard_module.Candidate(
        seen.update, seen.returned_buffers, truth.images, truth.labels, len(truth.images)
    )
    return inspect(candidate, guard_policy.AS_IT_IS, seconds)


@pytest.mark.thorough
def test_rows_and_texts_that_are_read_are_above_the_limit() -> None:
    sent, others = send_rows("wine", 4, seed=1), send_rows("wine", 60, seed=2)
    found = inspected(sent.captured, sent.truth, others.truth)
    assert found.above and found.attack in ("row-span", "analytic", "spear")
    ids, many = texts(2, seed=1), texts(40, seed=2)
    found = inspected(
        upload(ENCODER, ids),
        Truth(as_example(ids, SCHEMA), torch.arange(2) % 3),
        Truth(as_example(many, SCHEMA), torch.arange(40) % 3),
    )
    assert found.above and found.attack == "token-span"


class SearchesAlone(Inspection):
    """Has no closed form that reads an update."""

    def _methods(self, case: Any) -> Any:
        return [], super()._methods(case)[1]


def inspection_of_rows(
    kind: type[Inspection], policy: guard_policy.GuardPolicy
) -> tuple[Inspection, guard_module.Candidate]:
    """Return an attacker of four rows' update, and the update."""
    sent, others = send_rows("wine", 4, seed=1), send_rows("wine", 60, seed=2)
    inspect = kind(policy, sent.captured, others.truth, defenses=[])
    candidate = guard_module.Candidate(
        sent.captured.update,
        sent.captured.returned_buffers,
        sent.truth.images,
        sent.truth.labels,
        len(sent.truth.images),
    )
    return inspect, candidate


def test_an_update_that_no_search_had_time_to_look_at_is_above_the_limit() -> None:
    inspect, candidate = inspection_of_rows(
        SearchesAlone, guard_policy.GuardPolicy(limit={"features": 0.99})
    )
    found = inspect(candidate, guard_policy.AS_IT_IS, 1e-6)
    assert found.above and found.value is None


@pytest.mark.parametrize("kind", ["query", "evaluate"])
@pytest.mark.parametrize("at", ["app", "site"])
def test_no_model_leaves_beside_a_guard(kind: str, at: str, tmp_path: Path) -> None:
    images, labels = load_test_data(DataConfig(name="digits", image_size=8))
    path = tmp_path / "policy.yaml"
    path.write_text("guard: {}" if at == "site" else "")
    app = ClientApp(mods=[DefenseMod([], guard=guard())])
    getattr(app, kind)()(app_of(images[:1], labels[:1]))
    node: Any = {"policy": str(path), "state-dir": str(tmp_path)}
    grid = LoopbackGrid(app, [node], run_id=1)
    sent = create_model("linear", classes=10, channels=1, image_size=8).state_dict()
    content: Any = {
        "arrays": ArrayRecord(sent),
        "config": ConfigRecord({"server-round": 1}),
    }
    message = grid.create_message(RecordDict(content), kind, 1, "1")
    (reply,) = grid.send_and_receive([message])
    assert reply.has_error() and REFUSED in str(reply.error.reason)


class Stops:
    """Counts as a site's record does."""

    def __init__(self) -> None:
        self.stops = 0

    def guarding(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin_guard(self) -> int:
        self.stops += 1
        return 0

    def end_guard(self, begun: int, ended: int, *, stopped: bool) -> None:
        self.stops -= not stopped


def test_an_error_in_what_the_app_declared_counts_as_a_stop_and_the_log_stays_in_its_folder(
    tmp_path: Path,
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such batch")

    ledger, folder = Stops(), tmp_path / "state"
    folder.mkdir()
    broken: Any = guard_module.Ladder(guard_policy.GuardPolicy(), cast(Any, fails), fails)
    with pytest.raises(RuntimeError):
        guard_module.send_or_refuse(broken, ledger, {}, folder, "../else/where")
    assert ledger.stops == 1
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    (log,) = (path for path in folder.iterdir() if path.suffix == ".jsonl")
    assert json.loads(log.read_text())["sent"] == "nothing"
