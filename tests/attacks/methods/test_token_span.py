from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import check_refusal, refused
from text_uploads import DECODER, ENCODER, END, SCHEMA, START, texts, upload
from torch import Tensor

from bract import Observation
from bract.attacks import Budget, Case, Refusal, attack, reconstruct
from bract.attacks.adaptive.guardian import guardian as guardian_attacker
from bract.attacks.methods.token_span import causal_texts, stages, token_span
from bract.attacks.methods.token_span.bags import bags_of
from bract.attacks.methods.token_span.beam_search import likeliest_texts
from bract.attacks.methods.token_span.noise import rows_that_stand_out
from bract.attacks.methods.token_span.orders import with_all
from bract.attacks.methods.token_span.prefixes import Prefixes
from bract.attacks.methods.token_span.pursuit import embeddings, pursue
from bract.attacks.methods.token_span.separating import separating
from bract.attacks.methods.token_span.tied_rows import NextTokens
from bract.attacks.methods.token_span.token_span import TokenSpan
from bract.attacks.reading.span import span_of, span_of_rounds
from bract.attacks.task import AttackTask, open_cases
from bract.client.defenses import ProtectContext, build_defense
from bract.config.text import TextSchema
from bract.data.tokens import as_example, ids_of
from bract.models import create_model
from bract.models.initialise import initialise

pytest.importorskip("transformers")


def found(seen: Observation, count: int, schema: TextSchema = SCHEMA) -> set[tuple[int, ...]]:
    result = attack("token-span")(seen, budget=Budget(max_images=count))
    return {tuple(row.tolist()) for row in ids_of(result.images, schema)}


def wanted(ids: Tensor) -> set[tuple[int, ...]]:
    return {tuple(row.tolist()) for row in ids}


@pytest.mark.parametrize("count", [1, 3])
def test_texts_of_an_encoder_come_back_exactly(count: int) -> None:
    ids = texts(count, seed=1)
    assert found(upload(ENCODER, ids), count) == wanted(ids)


@pytest.mark.parametrize("where", ["inside", "before"])
def test_an_encoders_texts_may_have_padding_before_their_end(where: str) -> None:
    ids = texts(2, seed=1)
    if where == "inside":
        ids[0, 2] = SCHEMA.padding
    else:
        ids[0] = ids[0].roll(int((ids[0] == SCHEMA.padding).sum()))
    assert found(upload(ENCODER, ids), 2) == wanted(ids)


@pytest.mark.parametrize("count", [1, 3])
def test_texts_of_a_classifying_decoder_come_back_exactly(count: int) -> None:
    ids = texts(count, seed=2)
    assert found(upload(DECODER, ids), count) == wanted(ids)


@pytest.mark.parametrize("name", [DECODER, "text-decoder(width=64, depth=2, heads=2, lora=4)"])
def test_prefixes_pass_on_what_whole_sequences_do(name: str) -> None:
    model: Any = create_model(name, classes=3, channels=10, image_size=1, text=SCHEMA)
    initialise(model.eval(), "default", 3)
    modules = [n for n, _ in model.named_modules() if n.endswith(("attn.c_proj", "mlp.c_proj"))]
    grown, tokens = Prefixes(model, modules), torch.tensor([5, 9, 40])
    with torch.no_grad():
        for parents, last in (([0, 0], [1, 3]), ([1, 0, 1], [5, 6, 7]), ([2, 1], [9, 9])):
            parts = list(grown.followed_by(tokens))
            own = [torch.cat([part[i] for part in parts]) for i in range(len(modules))]
            whole = torch.cat(
                [
                    grown.ids.repeat_interleave(len(tokens), 0),
                    tokens.repeat(len(grown.ids))[:, None],
                ],
                dim=1,
            )
            wanted = stages.inputs_of(model, modules, whole)
            for module, value in zip(modules, own, strict=True):
                torch.testing.assert_close(value, wanted[module][:, -1], atol=1e-6, rtol=1e-4)
            grown.keep(torch.tensor(parents), torch.tensor(last))
    assert grown.ids.tolist() == [[3, 7, 9], [1, 6, 9]]


def test_prefixes_compute_one_token_at_a_time() -> None:
    model: Any = create_model(DECODER, classes=3, channels=10, image_size=1, text=SCHEMA)
    grown = Prefixes(model, ["body.transformer.h.0.mlp.c_proj"])
    grown.keep(torch.tensor([0]), torch.tensor([4]))
    seen: list[int] = []
    block = model.body.transformer.h[0]
    block.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    with torch.no_grad():
        list(grown.followed_by(torch.tensor([5, 6])))
    assert seen == [1]


def test_prefixes_compete_where_none_lies_in_a_later_layers_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So it is where an update has more tokens than a later gradient has rows.
    monkeypatch.setattr(causal_texts, "extend", lambda *_: [])
    ids = texts(2, seed=2)
    assert found(upload(DECODER, ids), 2) == wanted(ids)


def test_texts_of_a_tied_language_model_are_read_where_they_fill_later_subspaces() -> None:
    schema = replace(SCHEMA, vocabulary=1000, length=16, task="language-model")
    ids = texts(8, seed=5, schema=schema)
    assert int((ids != schema.padding).sum()) > 64
    assert found(upload(DECODER, ids, schema=schema, classes=1), 8, schema) == wanted(ids)


def test_one_layer_whose_values_fall_slowly_does_not_hide_that_later_subspaces_are_full() -> None:
    schema = replace(SCHEMA, vocabulary=1000, length=16, task="language-model")
    ids = texts(8, seed=5, schema=schema)
    seen = upload(DECODER, ids, schema=schema, classes=1)
    name = "body.transformer.h.0.attn.c_proj.weight"
    left, values, right = torch.linalg.svd(seen.update[name].double(), full_matrices=False)
    values[-1] = values[-2] / 10.0
    seen.update[name].copy_(left @ values.diag() @ right)
    assert found(seen, 8, schema) == wanted(ids)


def test_texts_of_a_language_model_come_back_but_for_the_token_that_nothing_follows() -> None:
    schema = replace(SCHEMA, task="language-model")
    ids = texts(3, seed=3, schema=schema)
    back = found(upload(DECODER, ids, schema=schema, classes=1), 3, schema)
    cut = ids.clone()
    cut[torch.arange(3), (ids != 0).sum(dim=1) - 1] = 0
    assert back == wanted(cut)


@pytest.mark.parametrize("rows", ["zero", "equal", "padding alone"])
@pytest.mark.parametrize("count", [1, 2])
def test_rows_of_a_tied_embedding_that_name_no_token_are_refused(rows: str, count: int) -> None:
    schema = replace(SCHEMA, task="language-model")
    seen = upload(DECODER, texts(2, seed=3, schema=schema), schema=schema, classes=1)
    generator = torch.Generator().manual_seed(0)
    noise = {n: torch.randn(v.shape, generator=generator) for n, v in seen.update.items()}
    tied = noise["body.transformer.wte.weight"]
    tied.fill_(1.0 if rows == "equal" else 0.0)
    if rows == "padding alone":
        tied[schema.padding] = 1.0
    with refused("attack-unsolved", "body.transformer.wte"):
        found(replace(seen, update=noise), count, schema)


def test_a_beam_without_a_number_ends_without_a_text() -> None:
    schema = replace(SCHEMA, task="language-model")
    model = create_model(DECODER, classes=1, channels=10, image_size=1, text=schema).eval()
    rows = torch.full((schema.vocabulary, 64), torch.nan)
    for tokens in (torch.arange(1, 9), torch.empty(0, dtype=torch.int64)):
        got = likeliest_texts(
            model,
            "body.lm_head",
            NextTokens(rows),
            tokens,
            length=10,
            special=torch.tensor([START, END]),
            count=2,
            stop=lambda: False,
        )
        assert got == []


def test_parameters_that_overflow_are_refused() -> None:
    seen = upload(DECODER, texts(1, seed=3))
    parameters = {n: v * 1e38 if "wte" in n else v for n, v in seen.parameters.items()}
    with refused("attack-evidence", "/a"):
        found(replace(seen, parameters=parameters), 1)


def test_a_low_rank_adapter_gives_away_its_tokens_once_it_has_been_trained() -> None:
    name = "text-encoder(width=64, depth=2, heads=2, lora=8)"
    ids = texts(1, seed=4)
    # Which of two tokens was at which of two places is lost where the adapter has few ranks.
    (row,) = found(upload(name, ids, steps=2), 1)
    there = set(ids[0].tolist()) - {SCHEMA.padding}
    assert there <= set(row) and len(set(row) - there) <= 1
    with refused("attack-evidence", "adapters"):
        found(upload(name, ids), 1)


def test_directions_of_joined_rounds_count_down_to_rounding_whatever_gaps_they_have() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(64, 10, generator=generator).double())[0].T
    values = torch.tensor([1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 2e-8, 1e-8, 5e-9, 2e-9]).double()
    found = span_of_rounds([values[:, None] * basis])
    assert found.rank == 6
    assert float(found.distance(basis[:6]).max()) < 1e-6


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_adapters_tokens_are_certain_once_rounds_span_as_many_dimensions(rounds: int) -> None:
    name = "text-decoder(width=64, depth=1, heads=2, lora=8)"
    seen = upload(name, texts(3, seed=4))
    model = create_model(name, classes=3, channels=SCHEMA.length, image_size=1, text=SCHEMA).eval()
    names = list(seen.parameters)
    layer = stages.find_stages(model, names, vocabulary=SCHEMA.vocabulary, length=8).local[0]
    ids = texts(3, seed=4)
    there = {(t, at) for row in ids.tolist() for at, t in enumerate(row) if t != SCHEMA.padding}
    tokens = torch.arange(1, SCHEMA.vocabulary)
    every = embeddings(model, layer, tokens, SCHEMA.length)
    inputs = torch.stack([every[t - 1, at] for t, at in sorted(there)])
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(8, len(inputs), generator=generator) @ inputs for _ in range(rounds)]
    found = pursue(
        model,
        layer,
        span_of_rounds(gradients),
        tokens,
        length=SCHEMA.length,
        most=len(there),
        each=3,
        stop=lambda: False,
    )
    chosen = set(zip(found.tokens.tolist(), found.positions.tolist(), strict=True))
    certain = 8 * rounds >= len(there)
    assert (chosen == there) is certain and (found.unexplained == 0) is certain


def test_an_adapters_earlier_rounds_are_joined() -> None:
    name = "text-decoder(width=64, depth=2, heads=2, lora=4)"
    ids = texts(3, seed=6)
    rounds = [replace(upload(name, ids, steps=1 + n), round=1 + n) for n in range(4)]
    whole = set(ids.flatten().tolist())

    def share(history: list[Observation]) -> float:
        budget = Budget(max_images=3)
        images = attack("token-span")(rounds[-1], budget=budget, history=history).images
        return len(whole & set(ids_of(images, SCHEMA).flatten().tolist())) / len(whole)

    assert share([]) + 0.2 < share(rounds[:-1])


def test_frozen_parameters_are_no_part_of_the_update() -> None:
    seen = upload("text-encoder(width=64, depth=2, heads=2, lora=4)", texts(1, seed=5), steps=1)
    assert all("lora" in name or "classifier" in name for name in seen.parameters)


def test_tied_weights_below_adapters_are_frozen_under_each_of_their_names() -> None:
    schema = replace(SCHEMA, task="language-model")
    model = create_model(
        "text-decoder(width=32, depth=1, heads=2, lora=4)",
        classes=1,
        channels=schema.length,
        image_size=1,
        text=schema,
    )
    assert all("lora" in name for name, _ in model.named_parameters())


def test_an_update_without_the_first_layers_is_refused_before_anything_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TokenSpan, "solve", lambda *_: pytest.fail("it was searched"))
    seen = upload("text-encoder(width=64, depth=2, heads=2, trained=last)", texts(1, seed=5))
    with refused("attack-unsuited", "trained"):
        found(seen, 1)


def test_noise_that_drowns_everything_is_refused() -> None:
    seen = upload(ENCODER, texts(1, seed=6))
    noisy = {n: torch.randn_like(v) for n, v in seen.update.items()}
    with refused("attack-unsolved", "stands"):
        found(replace(seen, update=noisy), 1)


def test_texts_of_a_decoder_come_back_through_faint_noise() -> None:
    ids = texts(2, seed=9)
    seen = upload("text-decoder(width=128, depth=2, heads=2)", ids)
    generator = torch.Generator().manual_seed(0)
    noisy = {
        n: v + 1e-6 * torch.randn(v.shape, generator=generator) for n, v in seen.update.items()
    }
    got = found(replace(seen, update=noisy), 2)
    right = sum(int((torch.tensor(one) == row).sum()) for row in ids for one in got)
    assert right >= 0.8 * float((ids != 0).sum())


def test_pruning_below_rounding_hides_nothing_from_an_attacker_who_knows_it() -> None:
    schema = replace(SCHEMA, vocabulary=2000, length=32)
    ids = texts(4, seed=1, schema=schema)
    pruning = ({"name": "pruning", "ratio": 0.2, "scope": "whole"},)
    seen = upload("text-decoder(width=128, depth=2, heads=2)", ids, schema=schema, defenses=pruning)
    zeros = [value == 0 for value in seen.update.values()]
    assert sum(map(torch.sum, zeros)) > 0.2 * sum(map(torch.numel, zeros))
    got = attack("token-span")(seen, tier="adaptive", budget=Budget(max_images=4))
    assert {tuple(row) for row in ids_of(got.images, schema).tolist()} == wanted(ids)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 4])
def test_texts_of_a_decoder_are_read_off_the_rows_that_adadefense_leaves_small(count: int) -> None:
    schema = replace(SCHEMA, vocabulary=500, length=16)
    ids = texts(count, seed=8, schema=schema)
    defense = build_defense({"name": "adadefense"})
    name = "text-decoder(width=128, depth=3, heads=2)"
    seen = upload(name, ids, schema=schema, defenses=(defense.public(),))
    sent = defense.protect(seen.update, {}, ProtectContext(round=1, seed=0))
    got = attack("token-span")(
        replace(seen, update=sent), tier="adaptive", budget=Budget(max_images=count)
    )
    assert {tuple(row) for row in ids_of(got.images, schema).tolist()} == wanted(ids)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2])
def test_where_no_reading_of_guardian_agrees_the_set_of_tokens_is_read_and_named_as_such(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian_attacker, "_HOPELESS", 0.0)
    schema = replace(SCHEMA, vocabulary=500)
    ids = texts(count, seed=8, schema=schema)
    defense = build_defense({"name": "guardian"})
    seen = upload(DECODER, ids, schema=schema, defenses=(defense.public(),))
    seen = replace(seen, update=defense.protect(seen.update, {}, ProtectContext()))
    got = attack("token-span")(seen, tier="adaptive", budget=Budget(max_images=count))
    assert set(ids_of(got.images, schema).flatten().tolist()) == set(ids.flatten().tolist())
    assert got.trials[0].components == ("rows of the embedding",)
    assert got.settings["evidence"]["scalars_agree"] is False


def test_tokens_that_found_texts_lack_are_returned_in_the_place_of_the_others() -> None:
    tokens, found = torch.arange(1, 21), token_span.Texts([torch.tensor([1, 5, 2])])
    made = found.with_present(tokens, 3)
    assert made.sequences[0] is found.sequences[0] and len(made.sequences) == 3
    assert set(torch.cat(made.sequences).tolist()) == set(range(1, 21))
    assert made.component == found.component
    most = token_span.Texts([torch.arange(1, 15)])
    assert most.with_present(tokens, 3) is most
    assert found.with_present(None, 3) is found
    assert [len(one) for one in found.with_present(tokens, 1).sequences] == [20]
    none = token_span.Texts([]).with_present(tokens, 2)
    assert len(none.sequences) == 2
    assert none.component == "rows of the embedding"


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_update_of_zeros_where_the_attack_reads_is_refused_by_name(everywhere: bool) -> None:
    guardian = build_defense({"name": "guardian"})
    seen = upload(DECODER, texts(1, seed=8), defenses=(guardian.public(),))
    sent = guardian.protect(seen.update, {}, ProtectContext())
    needs = TokenSpan().needs(seen) or frozenset()
    zeros = {n: torch.zeros_like(v) if everywhere or n in needs else v for n, v in sent.items()}
    (found,) = reconstruct(replace(seen, update=zeros), TokenSpan(), tier="adaptive", device="cpu")
    assert isinstance(found, Refusal)
    check_refusal(found, "attack-evidence", "a: ")


@pytest.mark.thorough
def test_a_defense_is_read_only_in_the_parameters_that_the_attack_needs() -> None:
    guardian = build_defense({"name": "guardian"})
    seen = upload(DECODER, texts(1, seed=8), defenses=(guardian.public(),))
    needs = TokenSpan().needs(seen)
    assert needs is not None
    last = {n for n in seen.parameters if ".h.1.mlp." in n}
    assert not needs & last
    assert {n for n in seen.parameters if n.endswith(("wte.weight", "score.weight"))} <= needs
    assert attack("auto").needs(seen) == needs
    sent = guardian.protect(seen.update, {}, ProtectContext())
    task = AttackTask(tier="adaptive", budget=Budget(max_images=1))
    ((case,), _) = open_cases(
        [replace(seen, update=sent)], task, attack="token-span", needs=lambda _: needs
    )
    assert isinstance(case, Case)
    assert set(case.evidence.target) == needs


def test_a_defense_with_unknowns_of_the_client_is_attacked() -> None:
    fedkl = build_defense({"name": "fedkl"}).public()
    seen = upload(DECODER, texts(1, seed=4), defenses=(fedkl,))
    got = attack("token-span")(seen, tier="adaptive", budget=Budget(max_images=1))
    assert got.images.shape == (1, SCHEMA.length, 1, 1)


def test_texts_too_short_for_a_probe_are_refused() -> None:
    schema = TextSchema(vocabulary=120, length=2)
    with refused("attack-unsuited", 2, 3):
        found(upload(ENCODER, torch.tensor([[5, 6]]), schema=schema), 1, schema)


def test_other_inputs_are_refused_by_name() -> None:
    seen = upload(ENCODER, texts(1, seed=7))
    with refused("input-mismatch"):
        attack("token-span")(replace(seen, declaration=replace(seen.declaration, text=None)))


def test_a_span_holds_the_rows_that_made_it_and_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 16, generator=generator)
    gradient = torch.randn(8, 5, generator=generator) @ inputs
    span = span_of([gradient])
    assert span.rank == 5
    assert float(span.distance(inputs).max()) < 1e-5
    assert float(span.distance(torch.randn(3, 16, generator=generator)).min()) > 0.3


def test_the_values_of_noise_are_left_out_of_a_span() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 40, generator=generator)
    gradient = torch.randn(120, 6, generator=generator) @ inputs
    noise = 0.3 * torch.randn(120, 40, generator=generator)
    for deviations in ([], [torch.full((120,), 0.3)]):
        span = span_of([gradient + noise], deviations)
        assert span.rank == 6 and not span.clean
        assert float(span.distance(inputs).max()) < 0.2


def test_rows_with_a_gradient_stand_out_of_zeros_and_of_noise() -> None:
    generator = torch.Generator().manual_seed(2)
    gradient = torch.zeros(500, 32)
    gradient[[3, 70]] = 1.0
    assert rows_that_stand_out(gradient).tolist() == [3, 70]
    noisy = gradient + 0.1 * torch.randn(500, 32, generator=generator)
    assert rows_that_stand_out(noisy).tolist() == [3, 70]
    tied = torch.rand(500, 1, generator=generator) * torch.ones(500, 32)
    assert len(rows_that_stand_out(tied)) == 500


def test_tokens_go_with_those_of_their_text() -> None:
    generator = torch.Generator().manual_seed(3)
    token, position = (torch.randn(n, 64, generator=generator) for n in (20, 8))
    inputs = token[:, None] + position[None]
    # Token 0 begins every text, 1 is in the first two; the others are in one text each.
    rows = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 8, 9, 1, 10, 11], [0, 12, 13, 14, 15, 16, 17]]
    directions = torch.linalg.qr(torch.randn(24, 3, generator=generator))[0].T
    gradient = torch.zeros(24, 64)
    for text, row in enumerate(rows):
        for place, one in enumerate(row):
            slope = directions[text] + 0.05 * torch.randn(24, generator=generator)
            gradient += slope[:, None] * inputs[one, place][None]
    bags = bags_of(
        torch.arange(18),
        inputs[:18],
        gradient,
        count=3,
        special=torch.tensor([0]),
        generator=generator,
    )
    got = sorted(tuple(sorted(bag.tokens.tolist())) for bag in bags)
    assert got == [(1, 2, 3, 4, 5, 6, 7), (1, 8, 9, 10, 11), (12, 13, 14, 15, 16, 17)]
    assert sorted(bag.length for bag in bags) == [6, 7, 8]


def test_tokens_that_lack_take_the_places_of_superfluous_ones() -> None:
    special = torch.tensor([1])
    assert with_all(
        torch.tensor([1, 5, 5, 6, 1]), torch.tensor([5, 6, 7, 7]), special
    ).tolist() == [1, 5, 7, 6, 1, 7]


def test_a_threshold_lies_in_the_widest_gap() -> None:
    assert separating(torch.tensor([1e-6, 2e-6, 0.5, 0.6]), 4) == pytest.approx(1e-3, rel=0.1)
    assert separating(torch.tensor([0.3, 0.4, 0.5]), 3) is None


def test_token_ids_survive_as_numbers() -> None:
    schema = TextSchema(vocabulary=1 << 20, length=2)
    ids = torch.tensor([[0, 1], [(1 << 20) - 1, 777_777]])
    assert torch.equal(ids_of(as_example(ids, schema), schema), ids)


def test_a_declared_model_with_a_huge_frozen_base_is_not_built() -> None:
    seen = upload("text-encoder(width=64, depth=2, heads=2, lora=4)", texts(1, seed=8))
    huge = "text-encoder(width=4096, depth=48, heads=2, lora=1)"
    with refused("model-mismatch"):
        found(replace(seen, declaration=replace(seen.declaration, model=huge)), 1)
