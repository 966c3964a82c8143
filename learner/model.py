"""The trained model: a Hugging Face causal language model that scores given tokens.

Consumes    a model directory; token ids, positions to score, target tokens
Produces    log-prob and entropy of each target at the sampling temperature, in float32
Waits for   nothing
Invariant   logits exist for scored positions only, and never more than LOGITS_BYTES of them in float32 at a time;
            the forward has no randomness (dropout is off)

Legend of suffixes: B rows, T columns, H width, M scored tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_BYTES = 256 * 2**20
"""Float32 logits of one chunk; a larger micro-batch is scored in chunks whose logits the backward pass recomputes."""


class ScoringModel(nn.Module):
    """A causal language model whose forward returns log-probs of given tokens instead of logits."""

    def __init__(self, hf: nn.Module, temperature: float) -> None:
        super().__init__()
        self.hf = hf
        self.temperature = temperature
        self.vocab_size = int(hf.get_output_embeddings().weight.shape[0])

    def forward(self, ids_BT: Tensor, index_M: Tensor, targets_M: Tensor, num_chunks: int) -> tuple[Tensor, Tensor]:
        """(log-prob [M], entropy [M]) of `targets_M`, predicted at `index_M` of the flattened rows."""
        # Rows are padded on the right only, so the causal mask alone keeps padding out and no mask is built.
        hidden_BTH = self.hf.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        hidden_MH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]).index_select(0, index_M)
        if num_chunks == 1:
            return self._score(hidden_MH, targets_M)
        parts = []
        for hidden_CH, targets_C in _chunks(hidden_MH, targets_M, num_chunks):
            parts.append(checkpoint(self._score, hidden_CH, targets_C, use_reentrant=False, preserve_rng_state=False))
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _score(self, hidden_CH: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = self.hf.get_output_embeddings()(hidden_CH).float() / self.temperature
        norm_C = torch.logsumexp(logits_CV, dim=-1)
        logp_C = logits_CV.gather(-1, targets_C[:, None]).squeeze(-1) - norm_C
        with torch.no_grad():
            probs_CV = torch.exp(logits_CV - norm_C[:, None])
            entropy_C = norm_C - (probs_CV * logits_CV).sum(-1)
        return logp_C, entropy_C


def _chunks(hidden_MH: Tensor, targets_M: Tensor, num_chunks: int) -> list[tuple[Tensor, Tensor]]:
    """Exactly `num_chunks` pairs; when there are fewer tokens than chunks, some are empty."""
    return list(zip(torch.tensor_split(hidden_MH, num_chunks), torch.tensor_split(targets_M, num_chunks), strict=True))


def num_score_chunks(most_loss_tokens: int, vocab_size: int) -> int:
    """Chunks in which a micro-batch is scored; from the largest rank's count, so that all ranks use as many."""
    return max(1, -(-most_loss_tokens * vocab_size * 4 // LOGITS_BYTES))


def load_model(
    directory: Path, *, dtype: torch.dtype, attention: str, temperature: float, activation_checkpointing: bool
) -> ScoringModel:
    """Build the model with the weights in `directory`.

    Raises:
        ValueError: the architecture transforms its logits after the output layer, which scoring does not reproduce.
    """
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention, local_files_only=True
    )
    _refuse_scaled_logits(hf.config)
    hf.config.use_cache = False
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    if activation_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hf.train()  # gradient checkpointing works in training mode only
    return ScoringModel(hf, temperature)


def _refuse_scaled_logits(config: Any) -> None:
    for field in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(config, field, None)
        if value not in (None, 1, 1.0):
            raise ValueError(
                f"model config {field} = {value}: the learner applies the output layer alone, so its log-probs would "
                f"differ from the engine's. Use an architecture without {field}."
            )
