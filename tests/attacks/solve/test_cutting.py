"""Work that never looks at the clock is cut off, in every thread."""

import signal
import sys
import threading
import time

import pytest
import torch

from bract.attacks import result
from bract.attacks.solve import cutting
from bract.process import clock

LONG = 20.0


def deaf(seconds: float) -> None:
    """Work on, whatever the time, in steps that Python can end between."""
    begun = time.process_time()
    while time.process_time() < begun + seconds:
        try:
            sum(range(10_000))
        except Exception:  # noqa: BLE001 - what an attack catches must not be the end of it
            continue


def cut(found: list[str]) -> None:
    try:
        with cutting.cut_off_after(0.1):
            deaf(LONG)
        found.append("ran to its end")
    except result.CutOffError:
        found.append("cut off")


def in_thread(*works: object) -> None:
    threads = [threading.Thread(target=work) for work in works]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("where", ["main", "thread"])
def test_work_that_never_looks_at_the_clock_is_cut_off(where: str) -> None:
    found: list[str] = []
    begun = time.process_time()
    if where == "main":
        cut(found)
    else:
        in_thread(lambda: cut(found))
    assert found == ["cut off"]
    assert time.process_time() - begun < LONG / 2


@pytest.mark.parametrize("where", ["main", "thread"])
def test_seconds_are_of_the_clock_that_was_chosen(where: str) -> None:
    """What others take of the processor is not taken from the work."""
    ran: list[float] = []

    def work() -> None:
        made = clock.ProcessorClock(patience=10.0)
        with clock.timed_by(made):
            try:
                with cutting.cut_off_after(0.1):
                    time.sleep(0.5)  # the processor is another's
                    ran.append(made())
                    deaf(LONG)
            except result.CutOffError:
                ran.append(made())

    if where == "main":
        work()
    else:
        in_thread(work)
    waited, worked = ran
    assert waited < 0.1 <= worked < LONG / 2


def test_a_thread_is_cut_off_alone() -> None:
    found: list[str] = []
    ended = threading.Event()

    def other() -> None:
        with cutting.cut_off_after(LONG):
            ended.wait(LONG)
        found.append("ended by itself")

    def short() -> None:
        cut(found)
        ended.set()

    in_thread(other, short)
    assert sorted(found) == ["cut off", "ended by itself"]


def test_the_inner_of_two_limits_leaves_the_outer_one_in_force() -> None:
    found: list[str] = []

    def both() -> None:
        try:
            with cutting.cut_off_after(0.4):
                cut(found)
                deaf(LONG)
        except result.CutOffError:
            found.append("outer")

    in_thread(both)
    both()
    assert found == ["cut off", "outer"] * 2


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_cut_leaves_the_recording_of_gradients_as_it_was(where: str) -> None:
    """A cut within `torch.no_grad` may fall before it restores the mode."""
    found: list[bool] = []

    def interrupted() -> None:
        try:
            with cutting.cut_off_after(0.1):
                torch.set_grad_enabled(False)
                deaf(LONG)
        except result.CutOffError:
            found.append(torch.is_grad_enabled())
        finally:
            torch.set_grad_enabled(True)

    if where == "main":
        interrupted()
    else:
        in_thread(interrupted)
    assert found == [True]


def test_work_that_ends_in_time_is_left_alone_afterwards() -> None:
    found: list[str] = []

    def quick() -> None:
        for _ in range(200):
            try:
                with cutting.cut_off_after(0.0005):
                    time.sleep(0.0005)
            except result.CutOffError:
                continue
        deaf(0.05)
        found.append("went on")

    in_thread(quick)
    assert found == ["went on"]


class Closing:
    """Takes its time when it is freed: Python drops every error that is raised there."""

    def __del__(self) -> None:
        deaf(0.5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_cut_that_falls_into_a_del_is_made_again(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[type[BaseException]] = []
    # That of pytest keeps the error.
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: dropped.append(lost.exc_type))
    found: list[str] = []

    def closes() -> None:
        try:
            with cutting.cut_off_after(0.2):
                made = Closing()
                del made
                deaf(LONG / 4)
            found.append("ran to its end")
        except result.CutOffError:
            found.append("cut off")

    if where == "main":
        closes()
    else:
        in_thread(closes)
    assert dropped, "the cut did not fall into it"
    assert found == ["cut off"]


@pytest.mark.parametrize("where", ["main", "thread"])
def test_what_gathers_findings_on_a_cut_is_not_cut_again(where: str) -> None:
    found: list[str] = []

    def gathers() -> None:
        try:
            with cutting.cut_off_after(0.1):
                try:
                    deaf(LONG)
                except result.CutOffError:
                    deaf(4 * cutting.AGAIN)
                    found.append("gathered")
                    raise
                finally:
                    deaf(4 * cutting.AGAIN)
                    found.append("closed")
        except result.CutOffError:
            found.append("cut off")

    if where == "main":
        gathers()
    else:
        in_thread(gathers)
    assert found == ["gathered", "closed", "cut off"]


def test_an_alarm_of_others_goes_on_after_a_block() -> None:
    seen: list[float] = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.1)
    try:
        with cutting.cut_off_after(LONG):
            deaf(0.05)
        deadline = time.monotonic() + 5.0
        while len(seen) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(seen) >= 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
