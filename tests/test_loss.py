import math

import pytest
import torch
from pydantic import ValidationError

from learner.loss import SUMS, loss_figures, token_loss
from learner.settings import LossSettings


def evaluate(logp, engine, advantage, mask=None, entropy=None, **settings):
    """(loss sum, gradient with respect to logp, named sums, largest difference)"""
    logp_M = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    mask_M = torch.ones_like(logp_M) if mask is None else torch.tensor(mask, dtype=torch.float64)
    entropy_M = torch.zeros_like(logp_M) if entropy is None else torch.tensor(entropy, dtype=torch.float64)
    loss, sums_S, diff = token_loss(
        logp_M,
        torch.tensor(engine, dtype=torch.float64),
        torch.tensor(advantage, dtype=torch.float64),
        mask_M,
        entropy_M,
        LossSettings(**settings),
    )
    loss.backward()
    return loss.item(), logp_M.grad.tolist(), dict(zip(SUMS, sums_S.tolist(), strict=True)), float(diff)


def ln(*ratios):
    return [math.log(ratio) for ratio in ratios]


def test_on_policy_loss_and_gradient_are_the_advantage():
    loss, gradient, sums, diff = evaluate([-1.0, -2.0], [-1.0, -2.0], [1.5, -0.5])
    assert loss == pytest.approx(-1.0)
    assert gradient == pytest.approx([-1.5, 0.5])
    assert (sums["tokens"], sums["ratio"], sums["clipped"], diff) == (2, 2, 0, 0)


def test_direct_by_hand():
    """Ratios 1.2 in range, 1.5 clipped from above for A > 0 only, 0.5 clipped from below for A < 0 only."""
    loss, gradient, sums, _ = evaluate(ln(1.2, 1.5, 1.5, 0.5, 0.5), [0.0] * 5, [2.0, 2.0, -2.0, 2.0, -2.0])
    assert loss == pytest.approx(-(1.2 * 2 + 1.28 * 2 - 1.5 * 2 + 0.5 * 2 - 0.8 * 2))
    assert gradient == pytest.approx([-2.4, 0.0, 3.0, -1.0, 0.0])
    assert sums["clipped"] == 2
    assert sums["capped"] == 0


def test_direct_caps_a_large_ratio_at_the_cap():
    """With A < 0 the clip bounds nothing above: the cap does. Ratio 5 counts as 2, in loss and in gradient."""
    loss, gradient, sums, _ = evaluate(ln(5.0, 1.9), [0.0, 0.0], [-1.0, -1.0])
    assert loss == pytest.approx(2.0 + 1.9)
    assert gradient == pytest.approx([2.0, 1.9])
    assert (sums["capped"], sums["masked"]) == (1, 0)
    assert sums["ratio"] == pytest.approx(6.9), "logged before capping"


def test_direct_masks_a_large_ratio_when_asked():
    loss, gradient, sums, _ = evaluate(ln(5.0, 1.9), [0.0, 0.0], [-1.0, -1.0], tis_mode="mask")
    assert loss == pytest.approx(1.9)
    assert gradient == pytest.approx([0.0, 1.9])
    assert (sums["capped"], sums["masked"], sums["tokens"]) == (0, 1, 2), "a masked token still counts in N"


def test_decoupled_weighs_by_the_truncated_ratio_and_never_clips_in_the_only_update():
    loss, gradient, sums, _ = evaluate(ln(1.5, 0.5, 5.0), [0.0] * 3, [2.0, 2.0, -1.0], correction="decoupled")
    assert loss == pytest.approx(-(1.5 * 2 + 0.5 * 2 - 2.0))
    assert gradient == pytest.approx([-3.0, -1.0, 2.0])
    assert (sums["clipped"], sums["capped"]) == (0, 1)


def test_none_ignores_the_engine():
    loss, gradient, _, diff = evaluate(ln(1.5, 0.5), [0.0, 0.0], [2.0, 1.0], correction="none")
    assert loss == pytest.approx(-3.0)
    assert gradient == pytest.approx([-2.0, -1.0])
    assert diff == pytest.approx(math.log(2))


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    loss, gradient, sums, _ = evaluate(ln(5.0, 1.5), [0.0, 0.0], [-1.0, -1.0], dual_clip=3.0, tis_cap=10.0)
    assert loss == pytest.approx(3.0 + 1.5)
    assert gradient == pytest.approx([0.0, 1.5])
    assert sums["clipped"] == 1


def test_filler_adds_nothing():
    loss, gradient, sums, diff = evaluate([-9.0, -1.0], [0.0, -1.0], [3.0, 1.0], mask=[0.0, 1.0], entropy=[7.0, 0.5])
    assert loss == pytest.approx(-1.0)
    assert gradient == pytest.approx([0.0, -1.0])
    assert (sums["tokens"], sums["entropy"], diff) == (1, 0.5, 0)


def test_a_hopeless_token_stays_finite():
    for mode in ("cap", "mask"):
        loss, gradient, _, _ = evaluate([0.0, -1.0], [-900.0, -1.0], [-1.0, 1.0], tis_mode=mode)
        assert math.isfinite(loss)
        assert all(math.isfinite(value) for value in gradient)


def test_figures_of_parts_add_up_to_those_of_the_whole():
    logp, engine, advantage = ln(1.2, 3.0, 0.5, 0.9), [0.0] * 4, [1.0, -1.0, 1.0, -1.0]
    entropy = [1.0, 2.0, 3.0, 4.0]
    *_, diff = evaluate(logp, engine, advantage)
    whole = evaluate(logp, engine, advantage, entropy=entropy)[2]
    parts = [
        evaluate(logp[cut], engine[cut], advantage[cut], entropy=entropy[cut])[2] for cut in (slice(0, 1), slice(1, 4))
    ]
    assert {key: parts[0][key] + parts[1][key] for key in SUMS} == pytest.approx(whole)
    figures = loss_figures(torch.tensor([whole[key] for key in SUMS], dtype=torch.float64), diff)
    assert figures["ess"] == pytest.approx((1.2 + 3.0 + 0.5 + 0.9) ** 2 / (4 * (1.44 + 9 + 0.25 + 0.81)))
    assert figures["ratio_mean"] == pytest.approx(5.6 / 4)
    assert figures["capped_share"] == 0.25
    assert figures["entropy"] == 2.5
    assert figures["logprob_diff_max"] == pytest.approx(math.log(3))
    assert figures["logprob_diff_mean"] == pytest.approx((math.log(1.2 * 3 * 2 / 0.9)) / 4)


def test_no_correction_is_refused_as_soon_as_tokens_may_be_stale():
    LossSettings(correction="none").refuse_uncorrected(0)
    LossSettings(correction="direct").refuse_uncorrected(4)
    with pytest.raises(ValueError, match=r"max_staleness = 2.*direct"):
        LossSettings(correction="none").refuse_uncorrected(2)


def test_unknown_settings_are_refused():
    with pytest.raises(ValidationError, match="kl_weight"):
        LossSettings(kl_weight=0.1)
