"""Texts of several through noise and pruning: ends, kinds of prefixes, and texts taken out."""

import pytest
import torch
from torch import Tensor

from bract.attacks.methods.token_span.deflating import deflate
from bract.attacks.methods.token_span.sequences import _special_where_they_stand_out, _unlike
from bract.config.text import TextSchema
from bract.models import create_model
from bract.models.initialise import initialise
from bract.models.losses import loss_of
from bract.updates.update import Tensors, parameters_of

pytest.importorskip("transformers")

SCHEMA = TextSchema(vocabulary=60, length=8, special=(0, 1, 2))
SPECIAL = torch.tensor(SCHEMA.special)
LOSS = loss_of("cross_entropy")
TEXTS = (
    torch.tensor([1, 7, 8, 9, 10, 2]),
    torch.tensor([1, 20, 21, 22, 23, 24, 25, 2]),
    torch.tensor([1, 7, 30, 31, 2]),
)
LABELS = (2, 0, 2)


def model() -> torch.nn.Module:
    made = create_model(
        "text-decoder(width=32,depth=2,heads=2)",
        classes=3,
        channels=SCHEMA.length,
        image_size=1,
        text=SCHEMA,
    )
    initialise(made, "default", 3)
    return made.eval()


def gradient(of: torch.nn.Module, text: Tensor, label: int) -> Tensors:
    of.zero_grad()
    LOSS.mean(of(text[None]), torch.tensor([label])).backward()
    return {n: p.grad.clone() for n, p in of.named_parameters() if p.grad is not None}


def blurred(of: torch.nn.Module, factor: float) -> Tensors:
    """The gradient of all texts times a factor, of which the smaller half is pruned."""
    parts = [gradient(of, text, label) for text, label in zip(TEXTS, LABELS, strict=True)]
    whole = {n: factor * torch.stack([part[n] for part in parts]).sum(dim=0) for n in parts[0]}
    flat = torch.cat([value.flatten() for value in whole.values()]).abs()
    limit = flat[flat > 0.0].median()
    return {name: torch.where(value.abs() < limit, 0.0, value) for name, value in whole.items()}


def embedding(of: torch.nn.Module) -> str:
    return next(n for n, v in parameters_of(of).items() if len(v) == SCHEMA.vocabulary)


def test_texts_are_taken_out_of_a_pruned_update_whatever_its_factor() -> None:
    own = model()
    name, factor = embedding(own), 0.17
    wrong = [torch.tensor([1, 9, 8, 10, 7, 2]), torch.tensor([1, 20, 8, 31, 23, 24, 25, 2])]
    left = blurred(own, factor)
    found = []
    for _ in TEXTS:
        rest = deflate(
            own,
            left,
            [*wrong, *TEXTS],
            embedding=name,
            special=SPECIAL,
            loss=LOSS,
            labels=range(3),
        )
        assert rest is not None
        found.append(rest[0].tolist())
        left = rest[1]
    assert sorted(found) == sorted(text.tolist() for text in TEXTS)


def test_a_text_that_goes_on_is_taken_for_the_beginning_that_explains_its_rows() -> None:
    own = model()
    seen = gradient(own, TEXTS[1], 1)
    short = torch.tensor([1, 20, 21, 22, 2])
    rest = deflate(
        own,
        seen,
        [short, TEXTS[1]],
        embedding=embedding(own),
        special=SPECIAL,
        loss=LOSS,
        labels=range(3),
    )
    assert rest is not None and torch.equal(rest[0], TEXTS[1])
    assert float(rest[1][embedding(own)].norm()) < 1e-4 * float(seen[embedding(own)].norm())


def test_no_text_is_taken_out_of_an_update_that_it_does_not_explain() -> None:
    own = model()
    seen = gradient(own, TEXTS[1], 1)
    others = [TEXTS[0], torch.tensor([1, 2])]
    given = {"embedding": embedding(own), "special": SPECIAL, "loss": LOSS, "labels": range(3)}
    assert deflate(own, seen, others, **given) is None  # type: ignore[arg-type]


def test_a_special_token_is_put_only_where_it_stands_out() -> None:
    apart = torch.full((3, 6), 0.4)
    apart[1] = torch.tensor([0.5, 0.45, 0.02, 0.5, 0.03, 0.5])  # an end at two places
    apart[2] = torch.tensor([0.5, 0.45, 0.41, 0.39, 0.5, 0.42])  # falls into no two groups
    found = _special_where_they_stand_out(apart, torch.tensor([False, True, True]))
    assert found[1].isfinite().tolist() == [False, False, True, False, True, False]
    # It is no nearer than the nearest other token, so that no text ends where another one does.
    assert torch.equal(found[1, [2, 4]], torch.tensor([0.4, 0.4]))
    assert torch.equal(found[[0, 2]], apart[[0, 2]])


def test_few_prefixes_of_a_kind_are_kept() -> None:
    one = torch.arange(10).repeat(6, 1)
    one[:, -1] = torch.arange(6)
    other = torch.arange(10, 20)[None]
    kept = _unlike(torch.cat([one, other]), most=7)
    assert 6 in kept.tolist() and len(kept) == 5
    assert len(_unlike(torch.cat([one, other]), most=3)) == 3
