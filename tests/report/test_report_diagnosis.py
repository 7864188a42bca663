"""What the signals of one attack say, each cause by itself."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reporting import gather

from bract.report import findings as module
from bract.report import write_report
from bract.report.findings import findings
from bract.schema import AuditResult
from bract.schema.audit import Signals

PERFECT = {"cosine": 1.0, "scale": 1.0, "exact": True, "tried": {}}
QUIET = {
    "scale": 1.0,
    "layers": {"a": {"cosine": 1.0, "size": 1.0}, "b": {"cosine": 1.0, "size": 0.5}},
    "zero": 0.0,
    "dead": 0.1,
    "negative": 1,
    "unbalanced": 0.0,
    "unsure": 0.8,
    "images": {"declared": 1, "searched": 1},
    "steps": {"declared": 1, "simulated": 1},
    "norm": 1.0,
    "norm_ratio": None,
    "falling": 0.0,
}


def found(cosine: float = 0.999, defense: str | None = None, **signals: Any) -> dict[str, str]:
    tier, read_as = signals.pop("tier", "oblivious"), signals.pop("read_as", None)
    audit = AuditResult(
        round=1,
        client="a",
        attack="ig",
        tier=tier,
        read_as=read_as,
        defenses=[defense] if defense else [],
        gradient_cosine=cosine,
        scored=2,
        signals=Signals.model_validate({**QUIET, **signals}),
    )
    return {f.code: f.text for f in findings(audit, leaked=0, scored=2)}


@pytest.mark.parametrize(
    ("code", "signals"),
    [
        ("ambiguous", {}),
        ("stuck", {"cosine": 0.5}),
        ("unfinished", {"cosine": 0.5, "falling": 0.2}),
        ("scale", {"scale": 5.0}),
        ("sign", {"negative": 9}),
        ("unbalanced", {"unbalanced": 0.3}),
        ("many-images", {"images": {"declared": 60, "searched": 8}}),
        ("many-steps", {"steps": {"declared": 54, "simulated": 1}}),
        ("optimizer", {"optimizer": "adam"}),
        ("dead", {"dead": 0.95}),
        ("vanished", {"layers": {"a": {"size": 1.0}, "b": {"size": 1e-9}}}),
        ("learned", {"unsure": 0.01}),
        ("converged", {"norm_ratio": 0.01}),
        ("context-right", {"truth_check": PERFECT}),
        ("context-scale", {"truth_check": {**PERFECT, "scale": 0.2}}),
        ("context-sign", {"truth_check": {**PERFECT, "cosine": -1.0}}),
        ("context-wrong", {"truth_check": {**PERFECT, "cosine": 0.7}}),
        ("defense-ignored", {"defense": "guardian"}),
        ("distorted", {"defense": "guardian", "truth_check": {**PERFECT, "cosine": 0.3}}),
        ("recovered", {"defense": "adadefense", "tier": "adaptive", "truth_check": PERFECT}),
        (
            "not-recovered",
            {
                "defense": "guardian",
                "tier": "adaptive",
                "truth_check": {**PERFECT, "cosine": 0.3},
            },
        ),
    ],
)
def test_each_cause_is_named_by_its_signal_and_not_without_it(
    code: str, signals: dict[str, Any]
) -> None:
    assert code in found(**signals)
    if code != "ambiguous":
        assert code not in found()


def test_an_aggregate_of_defended_updates_is_read_obliviously() -> None:
    check: dict[str, Any] = {"truth_check": {**PERFECT, "cosine": 0.3}, "defense": "guardian"}
    assert "not-recovered" in found(tier="colluding", **check)
    both = found(tier="colluding", read_as="oblivious", **check)
    assert "distorted" in both and "defense-ignored" in both and "not-recovered" not in both


def test_another_context_is_named_where_it_fits_ten_times_better() -> None:
    check = {**PERFECT, "cosine": 0.9, "tried": {"norm_mode: eval": 0.9999999, "other": 0.5}}
    assert "with norm_mode: eval" in found(truth_check=check)["context-wrong"]
    check = {**PERFECT, "cosine": 0.9995, "tried": {"norm_mode: eval": 0.9996}}
    assert set(found(truth_check=check)) == {"context-right", "ambiguous"}


STEPS: dict[str, Any] = {"steps": {"declared": 32, "simulated": 1}, "optimizer": "adam"}


def test_a_failed_search_is_told_from_local_steps_by_the_true_images() -> None:
    failed = found(cosine=0.70, truth_match=0.95, **STEPS)
    assert "search-failed" in failed and "0.950 against 0.700" in failed["search-failed"]
    assert "many-steps" not in failed and "optimizer" not in failed
    blurred = found(cosine=0.80, truth_match=0.62, **STEPS)
    assert {"many-steps", "optimizer", "simulation"} <= set(blurred)
    assert "search-failed" not in blurred
    unknown = found(cosine=0.80, **STEPS)
    assert {"many-steps", "stuck"} <= set(unknown)
    assert not {"search-failed", "simulation"} & set(unknown)


def test_little_information_is_an_estimate_and_no_reassurance() -> None:
    estimate = {"psnr": 12.0, "prior_psnr": 10.8, "numbers": 1500, "pixels": 784}
    text = found(estimate=estimate)["little-information"]
    assert "12.0 dB" in text and "10.8 dB" in text
    assert "no bound" in text and "at most" not in text and "does not show" in text
    assert "little-information" not in found(estimate={**estimate, "psnr": 14.0})


def test_later_epochs_of_unknown_order_convict_no_context() -> None:
    check = {**PERFECT, "cosine": 0.7, "exact": False}
    assert not [code for code in found(truth_check=check) if code.startswith("context")]


def test_what_leaked_whole_or_was_never_measured_needs_no_explanation() -> None:
    audit = AuditResult(round=1, client="a", attack="ig", scored=2, gradient_cosine=0.1)
    assert findings(audit, leaked=0, scored=2) == []
    measured = audit.model_copy(update={"signals": AuditResult.model_validate(
        {"round": 1, "client": "a", "attack": "ig", "signals": QUIET}).signals})  # fmt: skip
    assert findings(measured, leaked=2, scored=2) == []
    assert findings(measured, leaked=0, scored=2)


def test_the_page_shows_the_causes_beside_the_upload(
    make_run: Any, writers: Any, parse: Any
) -> None:
    root = make_run(rounds=1, audit=False)
    signals = {**QUIET, "truth_check": {**PERFECT, "cosine": 0.7}}
    writers.audit(root, 1, "client-0", noise=1.2, signals=signals, gradient_cosine=0.5)
    (observation,) = gather(root)["observations"]
    assert {f["source"] for f in observation["diagnosis"]} == {"attacker", "scorer"}
    text = parse(write_report(root).read_text()).text
    assert "Why it got no further" in text
    assert "The true images do not give this update" in text
    assert "measured with the originals" in text


def codes() -> Iterator[str]:
    """Yield the codes that `findings` can give, from its source."""
    for call in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        if call.func.id in ("_found", "finding") and call.args:
            first = call.args[0]
            named = (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,)
            yield from (str(n.value) for n in named if isinstance(n, ast.Constant))


def test_the_documents_explain_every_cause() -> None:
    """docs/guide/why-attacks-fail.md, which the page names, has a line for each code, no other."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "why-attacks-fail.md").read_text()
    table = text.partition("| code |")[2].partition("\n\n")[0]
    first = [line.split("|")[1] for line in table.splitlines()[2:]]
    explained = [code for cell in first for code in re.findall(r"`([\w-]+)`", cell)]
    assert len(explained) > 15
    assert sorted(explained) == sorted(set(codes()))
