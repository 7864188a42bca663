"""The epsilon of all updates together, against formulas and against Opacus."""

import math
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from bract.client import accounting
from bract.client import answered as records
from bract.client.defenses import build_defenses
from bract.defenses import accountants as counting
from bract.disk import LockedRecord

DELTA = 1e-5


def gaussian(multiplier: Any) -> Any:
    return accounting.Mechanism("gaussian", multiplier)


def test_nothing_sent_spends_nothing() -> None:
    assert accounting.total_epsilon({}, DELTA) == 0.0
    assert accounting.total_epsilon({gaussian(1.0): 0}, DELTA) == 0.0


@pytest.mark.parametrize(("multiplier", "rounds"), [(1.0, 1), (5.0, 10), (50.0, 400), (0.5, 3)])
def test_gaussian_noise_composes_tighter_than_zero_concentrated_privacy_and_not_too_tight(
    multiplier: Any, rounds: Any
) -> None:
    found = accounting.total_epsilon({gaussian(multiplier): rounds}, DELTA)
    rho = rounds / (2.0 * multiplier**2)
    assert found < rho + 2.0 * math.sqrt(rho * math.log(1.0 / DELTA))
    # The exact delta of the composed Gaussian mechanism (Balle and Wang 2018, theorem 8) at this
    # epsilon must not be above the one that was asked for.
    mu = math.sqrt(rounds) / multiplier

    def phi(x: Any) -> Any:
        return 0.5 * math.erfc(-x / math.sqrt(2.0))

    exact = phi(mu / 2 - found / mu) - math.exp(found) * phi(-mu / 2 - found / mu)
    assert exact <= DELTA


def test_rounds_of_different_noise_add_up() -> None:
    assert accounting.total_epsilon({gaussian(2.0): 4}, DELTA) == pytest.approx(
        accounting.total_epsilon({gaussian(1.0): 1}, DELTA)
    )
    mixed = {gaussian(2.0): 2, accounting.Mechanism("laplace", 2.0): 1}
    assert accounting.total_epsilon(mixed, DELTA) > accounting.total_epsilon(
        {gaussian(2.0): 2}, DELTA
    )


def test_one_laplace_update_spends_its_own_epsilon_and_many_less_than_the_sum() -> None:
    assert accounting.total_epsilon(
        {accounting.Mechanism("laplace", 2.0): 1}, DELTA
    ) == pytest.approx(0.5)
    assert accounting.total_epsilon({accounting.Mechanism("laplace", 2.0): 400}, DELTA) < 0.5 * 400


def test_the_renyi_bound_of_laplace_noise_tends_to_its_pure_epsilon() -> None:
    assert accounting.Mechanism("laplace", 2.0).renyi(1e6) == pytest.approx(0.5, abs=1e-3)
    # Randomised response at epsilon 1: probabilities e / (1 + e) and 1 / (1 + e), by hand.
    p, q = math.e / (1.0 + math.e), 1.0 / (1.0 + math.e)
    assert accounting.Mechanism("laplace", 1.0).renyi(2.0) == pytest.approx(
        math.log(p**2 / q + q**2 / p)
    )


def test_the_figure_is_that_of_opacus() -> None:
    accountants = pytest.importorskip("opacus.accountants")
    accountant = accountants.RDPAccountant()
    accountant.history = [(5.0, 1.0, 10)]
    found = accounting.total_epsilon(
        {gaussian(5.0): 9, accounting.Mechanism("laplace", 1e9): 1, gaussian(5.0001): 1}, DELTA
    )
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)


def test_the_mechanism_is_read_from_the_chain() -> None:
    def of(**noise: Any) -> Any:
        return accounting.mechanism_of(build_defenses([{"name": "noise", **noise}]))

    assert of(std=0.5, clip=2.0) == gaussian(0.125)
    assert of(epsilon=0.25, kind="laplace") == accounting.Mechanism("laplace", 4.0)
    assert of(std=0.5, clip=2.0, kind="laplace") is None
    assert of(std=0.5, clip=None) is None
    assert accounting.mechanism_of(build_defenses([{"name": "adadefense"}])) is None
    mechanism = of(epsilon=3.0)
    assert accounting.Mechanism.from_text(mechanism.to_text()) == mechanism


def test_noise_beyond_accounting_is_refused_before_anything_is_written() -> None:
    for noise in ({"clip": 1e-320, "std": 1.0}, {"clip": 1e-320, "std": 1e-9}):
        with refused("config-value"):
            accounting.mechanism_of(build_defenses([{"name": "noise", **noise}]))
    for multiplier in (math.inf, math.nan, 0.0, -1.0, 1e-320, 1e300):
        for kind in ("gaussian", "laplace", "sampled"):
            with refused("config-value", kind):
                accounting.Mechanism(kind, multiplier)
    for rate, steps in ((0.0, 1), (1.5, 1), (math.nan, 1), (0.5, 0), (0.5, 1 << 53)):
        with refused("config-value", steps):
            accounting.Mechanism("sampled", 1.0, rate, steps)


@pytest.mark.parametrize("multiplier", [1e-30, 1e-9, 1.0, 1e30])
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "sampled"])
def test_no_account_is_nan_and_every_mechanism_is_read_again(kind: Any, multiplier: float) -> None:
    mechanism = accounting.Mechanism(kind, multiplier, *((0.3, 7) if kind == "sampled" else ()))
    assert accounting.Mechanism.from_text(mechanism.to_text()) == mechanism
    for count in (1, (1 << 53) - 1):
        for counts in (
            {mechanism: count},
            {mechanism: count, accounting.Mechanism("laplace", 2.0): 1},
        ):
            assert accounting.total_epsilon(counts, DELTA) >= 0.0


def test_an_accountant_that_returns_nan_counts_as_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    monkeypatch.setattr(accountants.RDPAccountant, "get_epsilon", lambda *_, **__: math.nan)
    assert counting.spent_by([(1.25, 0.5, 3)], 1.5e-5).epsilon == math.inf


def test_prv_with_small_noise_gives_way_to_rdp_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At this noise its arrays had 1.4e8 points, and took 7.8 GB."""
    pytest.importorskip("opacus")
    small = accounting.Mechanism("sampled", 0.05, 0.5, 100, "prv")
    found = accounting.account({small: 1}, DELTA)
    assert found.epsilon == accounting.total_epsilon(
        {accounting.Mechanism("sampled", 0.05, 0.5, 100): 1}, DELTA
    )
    assert found.note
    assert found.note in caplog.text
    assert accounting.account(
        {accounting.Mechanism("sampled", 1e-20, 0.5, 100, "prv"): 1}, DELTA
    ).note
    large = accounting.account({accounting.Mechanism("sampled", 2.0, 0.05, 20, "prv"): 1}, DELTA)
    assert not large.note
    assert large.epsilon < accounting.total_epsilon(
        {accounting.Mechanism("sampled", 2.0, 0.05, 20): 1}, DELTA
    )


def test_the_search_for_noise_by_prv_is_bounded_too() -> None:
    pytest.importorskip("opacus")
    for epsilon in (3.0, 1e5):
        noise = counting.smallest_noise(epsilon, DELTA, 0.05, 4)
        assert noise is not None
        assert counting.spent_by([(noise, 0.05, 4)], DELTA, "prv").epsilon <= epsilon
    assert counting.smallest_noise(1e-9, DELTA, 1.0, 1000) is None


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_record_of_answers_is_written_only_if_it_can_be_read(
    on_disk: bool, tmp_path: Path
) -> None:
    path, memory = tmp_path / "answered.json" if on_disk else None, dict[str, str]()
    request = records.Request("train", 1, "d", 1, "f", "c")

    def record() -> Any:
        what, fix = records.WHAT, records.FIX
        return LockedRecord(records.Answered, path, memory, "answered", what=what, fix=fix)

    with refused("request-refused", "gaussian:inf"), record().changing() as answered:
        answered.mechanisms["gaussian:inf"] = 1
    with refused("request-refused"), record().changing() as answered:
        answered.totals["train"] = 1 << 53
    assert record().load() == records.Answered()
    with record().changing() as answered:
        answered.add(request)
        answered.charge(request, gaussian(2.0))
    assert record().load() == answered
    with refused("file-damaged", "x"):
        records.Answered.parse('{"mechanisms": {"gaussian:inf": 1}}', source="x")
