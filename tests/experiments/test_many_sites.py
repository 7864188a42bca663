"""The slow link of an experiment, and the cost of a site."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from experiments.harness.link import QUEUE, Direction
from experiments.many_sites import FITTED, Watch, a_site, pss

PACKET = bytes(1000)
"""One takes 8 ms at a million bits a second."""


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Direction]:
    target = os.open(tmp_path / "delivered", os.O_RDWR | os.O_CREAT)
    yield Direction(-1, target, 1e6, 0.0, 0.05, random.Random(3))
    os.close(target)


def arrived(link: Direction) -> int:
    return os.fstat(link.target).st_size // len(PACKET)


def test_packets_take_the_time_that_the_rate_and_the_delay_say(link: Direction) -> None:
    for _ in range(3):
        link.add(PACKET, 10.0)
    assert link.deliver(10.057) == pytest.approx(0.001)
    assert arrived(link) == 0
    assert link.deliver(10.0581) == pytest.approx(0.0079)
    assert arrived(link) == 1
    link.deliver(10.0661)
    assert arrived(link) == 2


def test_what_waits_longer_than_the_queue_is_dropped(link: Direction) -> None:
    for _ in range(100):
        link.add(PACKET, 10.0)
    link.deliver(20.0)
    assert arrived(link) == QUEUE / 0.008 // 1 + 1


def test_a_share_of_the_packets_is_lost_and_a_cut_link_lets_none_pass(link: Direction) -> None:
    link.loss = 0.25
    for number in range(400):
        link.add(PACKET, 10.0 + number)
    link.deliver(1000.0)
    assert 270 < (before := arrived(link)) < 330
    link.cut = True
    link.add(PACKET, 2000.0)
    link.deliver(3000.0)
    assert arrived(link) == before


def test_the_cost_of_a_site_is_the_slope_over_the_numbers_of_sites() -> None:
    rows = [{"sites": sites, **dict.fromkeys(FITTED, 7.0 + 0.5 * sites)} for sites in (10, 25, 50)]
    found = a_site(rows)
    assert found["SuperLink MB"] == pytest.approx(0.5)
    assert found["SuperLink MB at none"] == pytest.approx(7.0)


def test_a_look_at_a_process_gives_its_memory_and_files() -> None:
    own = psutil.Process()
    watch = Watch(own)
    watch.look()
    assert watch.megabytes == pytest.approx(pss(own), rel=0.2) and watch.files > 0
