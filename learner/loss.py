"""The loss of design section 6, on tokens: clipped ratios, corrected for the version that sampled each token.

Consumes    log-probs of the trained policy and of the engine, advantages, the loss mask
Produces    the sum over tokens (the caller divides by the step's global token count) and sums for the log
Waits for   nothing: pure torch; no model, no ranks
Invariant   sums add up: over micro-batches and ranks they give the figures of the whole step

Legend of suffixes: _M the loss tokens of a micro-batch (all rows' sampled tokens, one after the other); _S the
columns of SUMS.

A step is one optimizer update. Hence the policy at the step's start ("prox") is the policy of the forward pass
itself, detached, whatever the micro-batch: no second forward is needed, neither for the cap of `direct` nor for
`decoupled`, and a log-linear interpolation between engine and current policy would give the same values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.settings import LossSettings

SUMS = ("tokens", "loss", "ratio", "ratio_squared", "capped", "masked", "clipped", "logprob_diff", "entropy")
"""What `token_loss` sums over loss tokens, in this order."""

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond +-20 (a factor of 5e8) are held there: exp stays finite, and such a token has no gradient."""


def token_loss(
    logp_M: Tensor,
    engine_logp_M: Tensor,
    advantage_M: Tensor,
    mask_M: Tensor,
    entropy_M: Tensor,
    settings: LossSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """-sum_t m_t w_t min(rho_t A, clip(rho_t) A) over one micro-batch.

    Args:
        logp_M: log-prob of each token under the trained policy at the sampling temperature; carries the gradient.
        engine_logp_M: log-prob the engine returned at sampling.
        advantage_M: advantage of the rollout the token belongs to.
        mask_M: 1.0 on loss tokens, 0.0 on filler.
        entropy_M: of the policy's distribution at each token, for the log only.

    Returns:
        The loss sum (scalar with gradient), [S] float64 sums as named in SUMS, the largest |log-prob difference|.
    """
    start_logp_M = logp_M.detach()
    start_ratio_M = _ratio(start_logp_M, engine_logp_M)
    behind_M = engine_logp_M if settings.correction == "direct" else start_logp_M
    ratio_M = _ratio(logp_M, behind_M)
    weight_M, above_M = _weight(start_ratio_M, settings)

    unclipped_M = ratio_M * advantage_M
    bounded_M = torch.clamp(ratio_M, 1 - settings.clip_low, 1 + settings.clip_high) * advantage_M
    objective_M = torch.minimum(unclipped_M, bounded_M)
    clipped_M = bounded_M < unclipped_M
    if settings.dual_clip is not None:
        floor_M = settings.dual_clip * advantage_M
        low_M = (advantage_M < 0) & (objective_M < floor_M)
        objective_M = torch.where(low_M, floor_M, objective_M)
        clipped_M = clipped_M | low_M
    loss_sum = -(mask_M * weight_M * objective_M).sum()

    with torch.no_grad():
        diff_M = (start_logp_M - engine_logp_M).abs() * mask_M
        capped_M = above_M if settings.tis_mode == "cap" else torch.zeros_like(above_M)
        masked_M = above_M if settings.tis_mode == "mask" else torch.zeros_like(above_M)
        columns = [torch.ones_like(mask_M), -weight_M * objective_M, start_ratio_M, start_ratio_M**2]
        columns += [capped_M.to(mask_M), masked_M.to(mask_M), clipped_M.to(mask_M), diff_M, entropy_M]
        sums_S = torch.stack([(column * mask_M).double().sum() for column in columns])
    return loss_sum, sums_S, diff_M.max()


def _ratio(logp_M: Tensor, behind_M: Tensor) -> Tensor:
    return torch.exp(torch.clamp(logp_M - behind_M, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _weight(start_ratio_M: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The detached weight of each token, and which tokens were above the cap.

    `direct` carries the importance ratio in rho, so its weight only brings a token above the cap down to it;
    `decoupled` carries it in the weight, truncated at the cap.
    """
    ones_M = torch.ones_like(start_ratio_M)
    if settings.correction == "none":
        return ones_M, torch.zeros_like(start_ratio_M, dtype=torch.bool)
    above_M = start_ratio_M > settings.tis_cap
    weight_M = ones_M if settings.correction == "direct" else start_ratio_M
    if settings.tis_mode == "mask":
        limited_M = torch.zeros_like(start_ratio_M)
    else:
        limited_M = settings.tis_cap * (1 / start_ratio_M if settings.correction == "direct" else ones_M)
    return torch.where(above_M, limited_M, weight_M), above_M


def loss_figures(sums_S: Tensor, max_logprob_diff: float) -> dict[str, float]:
    """Figures of a whole step from sums over all its micro-batches and ranks.

    `ess` is the effective sample size of the uncapped ratios as a share of the tokens: 1 on-policy, towards 0 when
    few tokens carry all the weight.
    """
    total = dict(zip(SUMS, sums_S.tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    return {
        "loss": total["loss"] / tokens,
        "ratio_mean": total["ratio"] / tokens,
        "ess": total["ratio"] ** 2 / max(tokens * total["ratio_squared"], 1e-30),
        "capped_share": total["capped"] / tokens,
        "masked_share": total["masked"] / tokens,
        "clipped_share": total["clipped"] / tokens,
        "logprob_diff_mean": total["logprob_diff"] / tokens,
        "logprob_diff_max": max_logprob_diff,
        "entropy": total["entropy"] / tokens,
    }
