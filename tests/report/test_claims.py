"""Claims of protection beside measurements, by hand and by an independent accountant."""

import math
from pathlib import Path

import pytest

from bract.audit.questions.epsilon.gaussian import gaussian_epsilon
from bract.report.claims import Measured as Found
from bract.report.claims import _row_of, local_noise
from bract.report.read import RunFiles
from bract.schema import ProtectionClaim
from bract.server.claimed import claims_in


def local(sensitivity: float, epsilon: float = 10.0) -> ProtectionClaim:
    return ProtectionClaim(
        by="LocalDpMod",
        where="app/client_app.py, line 9",
        place="client",
        epsilon=epsilon,
        delta=1e-5,
        clip=1.0,
        sensitivity=sensitivity,
    )


def test_the_noise_of_flower_s_mod_is_the_classical_bound_worked_by_hand() -> None:
    # 1e-4 sqrt(2 ln 125000) / 10 = 1e-4 * 4.844805 / 10
    assert local_noise(local(1e-4)) == pytest.approx(4.844805e-5, rel=1e-6)


def test_a_claim_for_a_change_that_is_larger_cannot_be(tmp_path: Path) -> None:
    row = _row_of(local(1e-4), RunFiles(tmp_path), Found(noise=4.9e-5, looked=True))
    assert row.standing == "impossible" and "213 million" in row.sentence
    assert row.unit == "one client's whole update, one round"


def test_a_claim_that_can_be_agrees_with_the_noise_that_is_found(tmp_path: Path) -> None:
    claim = local(1.0, epsilon=1.0)
    noise = local_noise(claim)
    assert noise is not None and gaussian_epsilon(1.0 / noise, 1e-5) < 1.0
    found = Found(noise=noise * 1.02, looked=True)
    assert _row_of(claim, RunFiles(tmp_path), found).standing == "agrees"
    less = Found(noise=noise / 10, looked=True)
    assert _row_of(claim, RunFiles(tmp_path), less).standing == "contradicted"
    none = Found(looked=True, exact=True)
    assert _row_of(claim, RunFiles(tmp_path), none).standing == "contradicted"


@pytest.mark.parametrize("multiplier", [0.7, 1.0, 4.0])
def test_epsilon_is_that_of_opacus_accountant(multiplier: float) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    account = accountants.PRVAccountant()
    account.step(noise_multiplier=multiplier, sample_rate=1.0)
    assert gaussian_epsilon(1.0 / multiplier, 1e-5) == pytest.approx(
        account.get_epsilon(1e-5), abs=0.02
    )


def test_a_mod_in_the_app_s_code_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "client_app.py"
    path.write_text(
        "from flwr.clientapp.mod import LocalDpMod as Dp\nraise SystemExit\n"
        "app = ClientApp(mods=[Dp(1.0, sensitivity=1e-4, epsilon=10, delta=DELTA)])\n"
    )
    (claim,) = claims_in(path, tmp_path)
    assert (claim.clip, claim.sensitivity, claim.epsilon, claim.delta) == (1.0, 1e-4, 10.0, None)
    assert claim.where == "client_app.py, line 3" and not math.isnan(claim.epsilon or 0)
