"""Settings of a rollout actor that are turned while it runs.

Consumes    the dials' records (buffer/dials.py), the version that the engine has loaded
Produces    the settings that hold for that version
Waits for   nothing: pure
Invariant   a record takes effect with the first version that is at least its step, so that a change falls on a swap; an
            engine that starts takes the newest
"""

from collections.abc import Sequence

from actors.settings import RolloutSettings, WeightsSettings
from buffer.wire import NEWEST, Turned, value_at

__all__ = ["NEWEST", "obey"]


def obey(
    turned: Sequence[Turned], version: int, rollout: RolloutSettings, weights: WeightsSettings
) -> tuple[RolloutSettings, WeightsSettings]:
    """The settings at `version`; what is on no record stays as it is."""
    concurrency = value_at(turned, "rollout.concurrency", version)
    ack_timeout_s = value_at(turned, "weights.ack_timeout_s", version)
    if concurrency is not None:
        rollout = rollout.model_copy(update={"concurrency": int(concurrency)})
    if ack_timeout_s is not None:
        weights = weights.model_copy(update={"ack_timeout_s": ack_timeout_s})
    return rollout, weights
