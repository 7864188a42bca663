"""Work with a budget in seconds reads one clock, which whoever gives the budget chooses."""

import ast
import threading
import time
from pathlib import Path

import pytest

import bract.attacks
from bract.process import clock

BUSY = 0.2


def test_without_a_choice_it_is_the_walls() -> None:
    before = time.perf_counter()
    assert before <= clock.now() <= time.perf_counter()
    with clock.timed_by(lambda: 7.0):
        assert clock.now() == clock.current()() == 7.0
    assert clock.now() >= before


def test_a_choice_is_of_one_thread() -> None:
    found: list[float] = []
    with clock.timed_by(lambda: -1.0):
        thread = threading.Thread(target=lambda: found.append(clock.now()))
        thread.start()
        thread.join()
    assert found[0] >= 0.0


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="one clock of the system")
def test_what_others_took_of_the_processor_does_not_count() -> None:
    """Known answer: a thread that sleeps works for nobody; one that computes does."""
    made = clock.ProcessorClock(patience=1e9)
    time.sleep(BUSY)
    assert made() < BUSY / 4 and made.wall() >= BUSY
    before, begun = made(), time.thread_time()
    while time.thread_time() - begun < BUSY:
        pass
    assert BUSY <= made() - before < 1.1 * BUSY


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="one clock of the system")
def test_another_thread_reads_that_of_the_thread_that_made_it() -> None:
    made, found = clock.ProcessorClock(patience=1e9), list[float]()

    def work() -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < BUSY:
            pass
        found.append(made())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] < BUSY / 4


def test_it_runs_at_a_share_of_the_walls_rate_at_least() -> None:
    wall, worked = [100.0], [5.0]
    made = clock.ProcessorClock(4.0, lambda: wall[0], lambda: worked[0])
    wall[0] += 8.0
    assert (made(), made.wall()) == (2.0, 8.0)
    worked[0] += 3.0
    assert made() == 3.0


def test_a_system_that_has_no_such_clock_has_the_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "pthread_getcpuclockid", raising=False)
    wall = [0.0]
    made = clock.ProcessorClock(wall=lambda: wall[0])
    wall[0] = 2.0
    assert made() == 2.0


def test_a_clock_faster_than_the_walls_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.5"):
        clock.ProcessorClock(0.5)


def test_no_attack_times_itself_by_a_clock_of_its_own() -> None:
    """One that did would have less time on a busy machine than a guard gives it."""
    allowed = {"checks.py", "cutting.py"}  # tests of the contract; timers of the system
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(bract.attacks.__path__[0]).rglob("*.py")
        if path.name not in allowed
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("perf_counter", "monotonic")
    ]
    assert not found
