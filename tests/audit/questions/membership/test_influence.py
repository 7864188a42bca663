"""The final model with one client's updates on and off."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import request_of
from hypothesis import given
from hypothesis import strategies as st

from bract import Audit
from bract.attacks import membership as attackers
from bract.audit import global_models, observations
from bract.audit.questions.membership import candidates, influence
from bract.report import facts
from bract.report.page import render
from bract.rundir import RunDirectory
from bract.schema import membership
from experiments.membership import Setting, federation

SITE = Setting(*("test", "lenet-strided", 30, 40, 3, 4), size=8, data="digits", seed=3, final=True)


@given(st.integers(2, 6), st.integers(0, 1000), st.floats(0.1, 2.0))
def test_leaving_a_client_out_is_the_sum_without_it(clients: int, seed: int, rate: float) -> None:
    """``w - rate * sum p_i u_i`` without one client: the other weights over their sum."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(clients, generator=generator).double() + 0.1
    shares = shares / shares.sum()
    updates = [{"w": torch.randn(50, generator=generator).double()} for _ in range(clients)]
    step = {"w": rate * sum(p * u["w"] for p, u in zip(shares, updates, strict=True))}
    weights = influence.weights_of(step, iter(updates), [None] * clients)
    assert torch.allclose(torch.tensor(weights).double(), rate * shares, atol=1e-4)
    others = sum(p * u["w"] for p, u in zip(shares[1:], updates[1:], strict=True))
    off = rate * others / shares[1:].sum()
    change = influence.change_without(step, updates[0], weights[0], sum(weights))["w"]
    assert torch.allclose(step["w"] - change, off, atol=1e-4)


def test_a_step_that_is_no_sum_of_the_uploads_has_no_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    updates = [{"w": torch.randn(50, generator=generator)} for _ in range(3)]
    clipped = {"w": torch.stack([u["w"] for u in updates]).mean(dim=0).clamp(-0.1, 0.1)}
    with pytest.raises(influence._NoWeightsError, match="weighted"):
        influence.weights_of(clipped, updates, [1, 1, 1])


def test_an_update_of_zeros_has_its_declared_weight_and_none_without() -> None:
    generator = torch.Generator().manual_seed(1)
    updates = [{"w": torch.randn(50, generator=generator)} for _ in range(3)]
    updates[1] = {"w": torch.zeros(50)}
    step = {"w": 0.2 * updates[0]["w"] + 0.5 * updates[2]["w"]}
    weights = influence.weights_of(step, updates, [20, 30, 50])
    assert weights == pytest.approx([0.2, 0.3, 0.5], rel=1e-5)
    with pytest.raises(influence._NoWeightsError, match="several"):
        influence.weights_of(step, updates, [1, 1, 1])


def test_clients_that_sent_the_same_have_no_weights_but_declared_ones() -> None:
    one = {"w": torch.arange(1.0, 9.0)}
    updates = [one, {"w": torch.ones(8)}, {"w": 2.0 * one["w"]}]
    step = {"w": 0.5 * updates[0]["w"] + 0.3 * updates[1]["w"] + 0.2 * updates[2]["w"]}
    assert influence.weights_of(step, updates, [5, 3, 2]) == pytest.approx([0.5, 0.3, 0.2])
    with pytest.raises(influence._NoWeightsError, match="several"):
        influence.weights_of(step, updates, [None, 3, 2])


def test_an_upload_that_is_not_finite_is_named_as_such() -> None:
    updates = [{"w": torch.ones(4)}, {"w": torch.tensor([1.0, float("nan"), 0.0, 0.0])}]
    with pytest.raises(influence._NoWeightsError, match="finite"):
        influence.weights_of({"w": torch.ones(4)}, updates, [1, 1])


def asked(root: Path, **settings: Any) -> tuple[RunDirectory, membership.MembershipAnswer]:
    run, _ = federation(Setting(**{**vars(SITE), **settings}), root)
    request = request_of(run.root, {"questions": ["membership"], "device": "cpu"})
    audit = Audit(run, request)
    (found,) = audit.execute(audit.plan())
    assert isinstance(found, membership.MembershipAnswer)
    return run, found


class Inside:
    """Give the influence question what the membership question gives it."""

    def __init__(self, run: RunDirectory) -> None:
        request = request_of(run.root, {"questions": ["membership"], "device": "cpu"})
        self.captures = Audit(run, request).plan()[0].captures
        self.seen = observations.Observations(run, request)
        self.candidates = {
            c.client: candidates.load_candidates(self.seen.truth_folder, c.client, c.declaration)
            for c in self.captures
        }
        self.left = list[str]()

    def influences(self) -> list[membership.InfluenceScore]:
        return influence.influences(self.seen, self.captures, self.candidates, self.left)

    def moved_at_once(self) -> dict[str, Any]:
        """Return losses moved, by client, with a model of each client held: the slow reference."""
        models = global_models.GlobalModels(self.seen.run, self.seen.captures)
        last = max(c.round for c in self.captures)
        first = next(c for c in self.captures if c.round == last)
        final = attackers.global_model(self.seen.captures.load(first), dict(models.after(last)))
        change = {c: {n: torch.zeros_like(final.local[n]) for n in final.update} for c in self.of}
        for number in range(1, last + 1):
            captures = self.seen.captures.of_round(number)
            loaded = [self.seen.captures.load(c) for c in captures]
            after = models.after(number)
            step = {n: v - after[n] for n, v in loaded[0].parameters.items()}
            updates = [one.update for one in loaded]
            examples = [c.declaration.num_examples for c in captures]
            weights = influence.weights_of(step, updates, examples)
            for capture, update, weight in zip(captures, updates, weights, strict=True):
                scale = sum(weights) / (sum(weights) - weight)
                for n, value in step.items():
                    change[capture.client][n] += value - scale * (value - weight * update[n])
        moved = {}
        for client, own in self.candidates.items():
            inputs = final.target.normalise(own.images)
            off = final.local | {n: final.local[n] + v for n, v in change[client].items()}
            kind = final.target.declaration.loss
            each = [
                attackers.losses(attackers.logits_of(final.model, s, inputs), own.labels, kind)
                for s in (final.local, off)
            ]
            moved[client] = (each[1] - each[0]).double()
        return moved

    @property
    def of(self) -> list[str]:
        return sorted(self.candidates)


MANY = Setting(
    *("test", "lenet-strided", 6, 8, 2, 1), size=8, data="digits", seed=3, clients=11, final=True
)


@pytest.mark.thorough
def test_few_clients_at_once_find_what_all_at_once_do(tmp_path: Path) -> None:
    run, _ = federation(MANY, tmp_path / "run")
    inside = Inside(run)
    found = {one.client: one for one in inside.influences()}
    wanted = inside.moved_at_once()
    assert sorted(found) == sorted(wanted) and len(found) == 11 > 2 * influence.HELD
    for client, moved in wanted.items():
        members = inside.candidates[client].first_round > 0
        assert found[client].rounds == [1, 2]
        for value, of in (
            (found[client].moved_members, members),
            (found[client].moved_others, ~members),
        ):
            assert value == pytest.approx(float(moved[of].mean()), rel=1e-9, abs=1e-9)
    assert inside.left == []


@pytest.mark.thorough
def test_models_held_do_not_grow_with_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the widest layer's size that are alive whenever an update was left out."""
    most = []
    for clients in (2 * influence.HELD, 5 * influence.HELD):
        settings = {**vars(MANY), "clients": clients}
        run, _ = federation(Setting(**settings), tmp_path / f"run-{clients}")
        inside, alive = Inside(run), list[int]()
        original = influence.change_without

        def counted(
            step: Any, *rest: Any, alive: list[int] = alive, original: Any = original
        ) -> Any:
            widest = max(step.values(), key=torch.numel).shape
            alive.append(
                sum(type(o) is torch.Tensor and o.shape == widest for o in gc.get_objects())
            )
            return original(step, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(influence, "change_without", counted)
            assert len(inside.influences()) == clients
        most.append(max(alive))
    assert most[0] == most[1]


@pytest.mark.thorough
def test_records_trained_on_lose_more_and_the_page_has_a_section(tmp_path: Path) -> None:
    run, found = asked(tmp_path / "run", epochs=12)
    assert [one.client for one in found.influence] == ["client-0", "client-1", "client-2"]
    for one in found.influence:
        assert one.rounds == [1, 2, 3] and (one.members, one.non_members) == (30, 40)
        assert one.moved_members is not None and one.moved_others is not None
        assert one.moved_members > one.moved_others
    assert min(one.chance or 0.0 for one in found.influence) < 0.05
    report = facts.gather(run.root)
    (question,) = report.questions
    (part,) = question.parts
    assert part.title == "A client's influence on the final model"
    assert [row[0] for row in part.table.rows] == ["client-0", "client-1", "client-2"]
    assert "final model</h3>" in render.render(run.root, report)


@pytest.mark.thorough
def test_records_that_were_not_trained_on_lose_as_much_as_others(tmp_path: Path) -> None:
    chances = []
    for seed in range(3):
        _, found = asked(tmp_path / f"run-{seed}", trained=False, seed=seed, rounds=1)
        chances += [one.chance for one in found.influence]
    assert len(chances) == 9 and sum(c is not None and c < 0.05 for c in chances) <= 3


@pytest.mark.thorough
def test_a_sum_that_is_hidden_has_no_influence_and_says_so(tmp_path: Path) -> None:
    """Robust strategies, and sites that are not captured, leave no weighted sum."""
    run, _ = federation(Setting(**{**vars(SITE), "rounds": 1}), tmp_path / "run")
    (gone, *_) = sorted(run.captures.glob("*/client-2"))
    for path in sorted(gone.rglob("*"), reverse=True):
        path.unlink()
    gone.rmdir()
    request = request_of(run.root, {"questions": ["membership"], "device": "cpu"})
    audit = Audit(run, request)
    (found,) = audit.execute(audit.plan())
    assert isinstance(found, membership.MembershipAnswer)
    assert found.influence == []
    assert any("influence" in note and "sum" in note for note in found.left_out)
