"""The epsilon of all updates together, against formulas and against Opacus."""

import math
from typing import Any

import pytest

from bract.client.accounting import Mechanism, mechanism_of, total_epsilon
from bract.client.defenses import build_defenses

DELTA = 1e-5


def gaussian(multiplier: Any) -> Any:
    return Mechanism("gaussian", multiplier)


def test_nothing_sent_spends_nothing() -> None:
    assert total_epsilon({}, DELTA) == 0.0
    assert total_epsilon({gaussian(1.0): 0}, DELTA) == 0.0


@pytest.mark.parametrize(("multiplier", "rounds"), [(1.0, 1), (5.0, 10), (50.0, 400), (0.5, 3)])
def test_gaussian_noise_composes_tighter_than_zero_concentrated_privacy_and_not_too_tight(
    multiplier: Any, rounds: Any
) -> None:
    found = total_epsilon({gaussian(multiplier): rounds}, DELTA)
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
    assert total_epsilon({gaussian(2.0): 4}, DELTA) == pytest.approx(
        total_epsilon({gaussian(1.0): 1}, DELTA)
    )
    mixed = {gaussian(2.0): 2, Mechanism("laplace", 2.0): 1}
    assert total_epsilon(mixed, DELTA) > total_epsilon({gaussian(2.0): 2}, DELTA)


def test_one_laplace_update_spends_its_own_epsilon_and_many_less_than_the_sum() -> None:
    assert total_epsilon({Mechanism("laplace", 2.0): 1}, DELTA) == pytest.approx(0.5)
    assert total_epsilon({Mechanism("laplace", 2.0): 400}, DELTA) < 0.5 * 400


def test_the_renyi_bound_of_laplace_noise_tends_to_its_pure_epsilon() -> None:
    assert Mechanism("laplace", 2.0).renyi(1e6) == pytest.approx(0.5, abs=1e-3)
    # Randomised response at epsilon 1: probabilities e / (1 + e) and 1 / (1 + e), by hand.
    p, q = math.e / (1.0 + math.e), 1.0 / (1.0 + math.e)
    assert Mechanism("laplace", 1.0).renyi(2.0) == pytest.approx(math.log(p**2 / q + q**2 / p))


def test_the_figure_is_that_of_opacus() -> None:
    accountants = pytest.importorskip("opacus.accountants")
    accountant = accountants.RDPAccountant()
    accountant.history = [(5.0, 1.0, 10)]
    found = total_epsilon(
        {gaussian(5.0): 9, Mechanism("laplace", 1e9): 1, gaussian(5.0001): 1}, DELTA
    )
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)


def test_the_mechanism_is_read_from_the_chain() -> None:
    def of(**noise: Any) -> Any:
        return mechanism_of(build_defenses([{"name": "noise", **noise}]))

    assert of(std=0.5, clip=2.0) == gaussian(0.125)
    assert of(epsilon=0.25, kind="laplace") == Mechanism("laplace", 4.0)
    assert of(std=0.5, clip=2.0, kind="laplace") is None
    assert of(std=0.5, clip=None) is None
    assert mechanism_of(build_defenses([{"name": "adadefense"}])) is None
    mechanism = of(epsilon=3.0)
    assert Mechanism.from_text(mechanism.to_text()) == mechanism
