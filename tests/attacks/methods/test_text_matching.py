from dataclasses import replace
from itertools import permutations

import pytest
import torch
from refusals import refused
from text_uploads import DECODER, ENCODER, SCHEMA, texts, upload

from bract.attacks import Budget, Problem, attack
from bract.attacks.problem.case import open_case
from bract.data.tokens import as_example, ids_of
from bract_papers.text_matching.embedded import embedded
from bract_papers.text_matching.objectives import LayerCosine, SquaredAndAbsolute
from bract_papers.text_matching.orders import another_order

pytest.importorskip("transformers")


def problem_of(model: str, count: int = 1) -> tuple[Problem, torch.Tensor]:
    ids = texts(count, seed=1)
    case = open_case(upload(model, ids), tier="oblivious", max_images=count)
    return Problem.stack([(case, 0)], seed=0, device=torch.device("cpu")), ids


@pytest.mark.parametrize("model", [ENCODER, DECODER])
def test_embeddings_of_a_text_have_its_gradient_in_all_but_the_embedding(model: str) -> None:
    problem, ids = problem_of(model)
    given = embedded(problem, SCHEMA)
    length = int((ids[0] != SCHEMA.padding).sum())
    assert given.length == length
    labels = torch.nn.functional.one_hot(torch.zeros(1, 1, dtype=torch.int64), 3).float()
    tokens = given.table[0][ids[0, :length]][None, None]
    found = given.problem.simulate(tokens[..., None], labels, {})
    lacking = set(problem.target) - set(given.problem.target)
    assert len(lacking) == 1
    assert lacking.pop().endswith(("word_embeddings.weight", "wte.weight"))
    for name, value in given.problem.target.items():
        assert torch.allclose(found[name], value, atol=1e-6), name
    assert given.nearest(tokens, SCHEMA)[0, 0].tolist() == ids[0, :length].tolist()


def test_padding_is_never_found_within_a_text_and_fills_the_rest() -> None:
    seen = upload(ENCODER, texts(1, seed=1))
    ids = ids_of(attack("tag")(seen, budget=Budget(iterations=3)).images, SCHEMA)[0]
    length = int((texts(1, seed=1)[0] != SCHEMA.padding).sum())
    assert bool((ids[:length] != SCHEMA.padding).all())
    assert bool((ids[length:] == SCHEMA.padding).all())


def test_a_batch_and_two_restarts_run_side_by_side() -> None:
    seen = upload(ENCODER, texts(2, seed=2))
    found = attack("sim")(seen, budget=Budget(iterations=3, restarts=2, max_images=2))
    assert found.images.shape == as_example(texts(2, seed=2), SCHEMA).shape


@pytest.mark.parametrize("name", ["sim", "tag", "lamp"])
def test_a_declaration_without_texts_is_refused(name: str) -> None:
    seen = upload(ENCODER, texts(1, seed=7))
    with refused("input-mismatch"):
        attack(name)(replace(seen, declaration=replace(seen.declaration, text=None)))


def test_objectives_have_the_values_worked_out_by_hand() -> None:
    one = {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[1.0, 0.0]])}
    other = {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[0.0, 2.0]])}
    assert float(SquaredAndAbsolute(absolute=0.1)(one, other, None)) == pytest.approx(5.3)
    assert float(LayerCosine()(one, other, None)) == pytest.approx(0.5)


def test_orders_are_permutations_and_any_of_three_is_reached() -> None:
    generator = torch.Generator().manual_seed(0)
    seen = {tuple(another_order(3, generator).tolist()) for _ in range(300)}
    assert seen == set(permutations(range(3)))


def test_the_cosine_of_layers_is_that_of_pytorch_and_zeros_tell_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (2, 3, 4), "b": (2, 5)}
    simulated, captured = (
        {n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(2)
    )
    wanted = torch.stack(
        [
            1
            - torch.nn.functional.cosine_similarity(simulated[n].flatten(1), captured[n].flatten(1))
            for n in shapes
        ]
    ).mean(dim=0)
    assert torch.allclose(LayerCosine()(simulated, captured, None), wanted, atol=1e-6)
    zeros = {n: torch.zeros_like(v) for n, v in captured.items()}
    assert LayerCosine()(simulated, zeros, None).tolist() == [0.0, 0.0]
