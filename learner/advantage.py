"""Advantages of a group's kept rollouts: how much better each did than its siblings.

Consumes    the rewards of the rollouts that the RoC filter kept
Produces    one number per rollout, the same for all its tokens
Waits for   nothing: a pure function
Invariant   the advantages of a group sum to zero; equal rewards give zeros
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6
"""Added to the standard deviation, so that equal rewards divide by it and not by zero."""


def group_advantages(
    rewards: Sequence[float], std: Literal["population", "sample", "none"] = "population"
) -> npt.NDArray[np.float64]:
    """(reward - mean) / (std + 1e-6) over the group.

    Args:
        rewards: of the kept rollouts, [G].
        std: population divides the squares by G, sample by G - 1; none leaves the centred rewards as they are.

    Example:
        group_advantages([1.0, 0.0, 0.0, 1.0])    # mean 0.5, population std 0.5: [1, -1, -1, 1] (less 2 millionths)
    """
    values = np.asarray(rewards, dtype=np.float64)  # [G]
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"rewards = {list(rewards)}: a group needs at least one reward, all of them finite")
    centred = values - values.mean()
    if std == "none":
        return centred
    degrees = 1 if std == "sample" and values.size > 1 else 0
    return centred / (values.std(ddof=degrees) + EPSILON)
