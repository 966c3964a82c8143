"""Tiny models from nothing: a tokenizer trained on demonstrations, a chat template, a configuration.

Consumes    `TinySettings`, the texts that the model will read and write
Produces    a tokenizer and an untrained model, as transformers knows them
Waits for   nothing
Invariant   every digit is one token, every tag of the template is one special token, and any text can be encoded
"""

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TAGS = ("reason", "tool_call", "tool_response", "answer")
TAG_TOKENS = tuple(token for tag in TAGS for token in (f"<{tag}>", f"</{tag}>"))

CHATML = """{%- if tools %}<|im_start|>system
<tools>{{ tools | tojson }}</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HEADERS = """{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

STYLES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "template": CHATML,
        "pad": "<|endoftext|>",
        "end": "<|im_end|>",
        "begin": None,
        "tokens": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "tied": True,
    },
    "llama": {
        "template": HEADERS,
        "pad": "<|end_of_text|>",
        "end": "<|eot_id|>",
        "begin": "<|begin_of_text|>",
        "tokens": ("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "tied": False,
    },
}


class TinySettings(BaseModel):
    """The `[tiny]` table of an SFT recipe; the defaults are 0.85 million parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    style: Literal["qwen3", "llama"] = "qwen3"
    """Architecture and the chat template that goes with it; llama has an output layer of its own, qwen3 shares its
    embeddings with it."""
    vocabulary: int = Field(default=640, ge=300)
    """Most tokens; 256 are bytes, so that any text can be encoded."""
    num_layers: int = Field(default=4, ge=1)
    width: int = Field(default=128, ge=16)
    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    mlp_width: int = Field(default=384, ge=16)
    max_length_tokens: int = Field(default=512, ge=64)


def train_tokenizer(settings: TinySettings, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges cross spaces: a phrase that always recurs becomes one token, and episodes short."""
    style = STYLES[settings.style]
    special = [*style["tokens"], *TAG_TOKENS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=8,
        show_progress=False,
    )
    boundary = re.compile("|".join(map(re.escape, special)))
    tokenizer.train_from_iterator((piece for text in texts for piece in boundary.split(text) if piece), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=style["pad"],
        eos_token=style["end"],
        bos_token=style["begin"],
        extra_special_tokens=[t for t in special if t not in (style["pad"], style["end"], style["begin"])],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = style["template"]
    return wrapped


def new_model(settings: TinySettings, tokenizer: Any, seed: int) -> Any:
    """An untrained model whose initial weights depend on the seed alone."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        settings.style,
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.width // settings.num_heads,
        intermediate_size=settings.mlp_width,
        max_position_embeddings=settings.max_length_tokens,
        tie_word_embeddings=STYLES[settings.style]["tied"],
        initializer_range=settings.width**-0.5,  # transformers' 0.02 is meant for widths in the thousands
        rope_theta=10_000.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return AutoModelForCausalLM.from_config(config)
