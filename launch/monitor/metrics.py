"""The names of all figures: what Prometheus serves, what metrics/*.jsonl holds.

Produces    `FAMILIES`, `KEYS`; `python -m launch.monitor.metrics` prints them as Markdown (launch/METRICS.md)
Waits for   nothing
Invariant   every figure that a role tells is here, and every name here is told by a role: tests/test_metrics.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FAMILIES = {
    "rocstar_clock_seconds_total": "seconds a role spent in a `state`: busy, starved, blocked, sync, down",
    "rocstar_counter_total": "a role's counters, by `key`",
    "rocstar_gauge": "a role's present figures, by `key`",
    "rocstar_histogram": "a role's distributions, by `key` (with `_bucket`, `_sum`, `_count`)",
    "rocstar_cpu_seconds_total": "CPU seconds of a role's processes, of their children too",
    "rocstar_core_wait_seconds_total": "seconds in which a role's threads could have run but had no core",
    "rocstar_tickets": "active tickets by `state`: waiting, leased, finished, taken",
    "rocstar_tickets_bound": "B = (S + 1) P, the most tickets that may be active",
    "rocstar_next_step": "first step without a batch on record",
    "rocstar_acked_version": "least version that live engines have loaded",
    "rocstar_max_staleness": "S, as it is turned now",
}
"""name -> meaning; all but the last five have the labels `role` and `name`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One figure of a role."""

    role: str
    kind: str
    """counter | gauge | histogram"""
    key: str
    """`*` stands for what varies"""
    meaning: str

    def names(self, key: str) -> bool:
        """Whether a figure's key is this one."""
        return re.fullmatch(re.escape(self.key).replace(r"\*", ".+"), key) is not None


_TEXT = """
rollout counter turns: turns made
rollout counter tokens_generated: tokens that engines sampled
rollout counter turns_of_several_versions: turns during which a version was loaded
rollout counter calls/*: tool calls by typed status
rollout counter rollouts_finished: rollouts with a score
rollout counter rollouts_excluded: rollouts that could not be finished, and not by the model's fault
rollout counter excluded/*: those by reason
rollout counter ended/*: finished rollouts by what ended them: answer, no_call, length, turns
rollout counter verdict/*: finished rollouts by verdict
rollout counter rollouts_stopped: rollouts given up because they are in other hands
rollout counter rollouts_lease_over: rollouts whose lease was over when they had something to say
rollout counter rollouts_refused/*: rollouts refused by the buffer, by reason
rollout counter leases_refused/*: requests for leases that were refused, by reason
rollout counter leases_of_other_versions: leases that the engine could not begin on its version
rollout counter buffer_silent: times that the buffer did not answer
rollout counter swaps: versions loaded
rollout counter weights_failed: versions that could not be received
rollout counter context_tokens: tokens of contexts given to the engine
rollout counter context_tokens_cached: those of them that its prefix cache had
rollout counter rate_tokens@*: tokens generated while about so many generations ran
rollout counter rate_s@*: seconds that those generations took
rollout gauge rollouts: rollouts in hand
rollout gauge room: rollouts that may be leased now
rollout gauge requests_running: generations that the engine computes
rollout gauge requests_waiting: generations that it queues
rollout gauge kv_tokens: tokens in the KV cache
rollout gauge kv_capacity_tokens: its size
rollout gauge lineage: lineage of the loaded version
rollout gauge version: the loaded version
rollout histogram generate_s: seconds of a generation
rollout histogram turn_tokens: tokens of a generation
rollout histogram tool_queue_s: seconds that a call waited in the sandbox's queue
rollout histogram tool_run_s: seconds that it ran
rollout histogram tool_s: seconds of calls of a rollout
rollout histogram push_s: seconds until a turn was durable
rollout histogram rollout_tokens: tokens of a finished rollout
rollout histogram receive_s: seconds to receive a version, while generating
rollout histogram pause_s: seconds without generating, for a version
sandbox counter calls: calls that came
sandbox counter checks: answers that came to be graded
sandbox counter refused: calls refused because the queue was full
sandbox counter status/*: calls by typed status
sandbox counter cpu_s: CPU seconds of calls
sandbox counter lost_placements: calls whose process was lost
sandbox counter zygote_restarts: warm interpreters started anew
sandbox counter sessions_evicted: sessions ended to make room
sandbox counter shard_restarts: shards started anew
sandbox gauge waiting: calls in the queue
sandbox gauge placed: calls that shards have
sandbox gauge clients: clients heard lately
sandbox gauge shards: shards (workers) that run
sandbox histogram queue_s: seconds that calls waited
sandbox histogram run_s/*: seconds that calls ran, by typed status
sandbox histogram check_s: seconds from an answer's arrival to its verdict
filter counter groups_kept: groups kept
filter counter groups_dropped/*: groups dropped, by reason
filter counter rollouts_seen: rollouts looked at
filter counter rollouts_absent: rollouts that their groups lacked
filter counter rollouts_kept: rollouts kept
filter counter rollouts_right: right ones looked at
filter counter rollouts_right_kept: right ones kept
filter histogram p_err_*: RoC's penalty for failed calls, of right rollouts before and after (`_kept`)
filter histogram p_format_*: RoC's penalty for form, likewise
buffer counter turns: durable turns
buffer counter tokens_generated: tokens of durable turns
buffer counter payload_bytes: bytes of payload written
buffer counter rollouts_leased: leases given
buffer counter rollouts_finished/*: scored rollouts: train, eval_start, eval_end
buffer counter rollouts_excluded/*: excluded rollouts by reason
buffer counter rollouts_taken: kept rollouts of batches
buffer counter reward/*: sum of rewards, by the same
buffer counter calls/*: tool calls by the same and typed status
buffer counter calls_in_correct/*: those in right rollouts
buffer counter groups_kept: groups that RoC kept
buffer counter groups_dropped/*: groups dropped, by reason
buffer counter groups_taken: groups in batches: the run's throughput
buffer counter tokens_taken: sampled tokens of batches
buffer counter peers_*: lives of peers that ended, by how (dead, failed, gone) and role
buffer counter refused/*: requests refused, by reason
buffer counter metrics_failed/*: figures that could not be written, by reason
buffer counter replies_lost: replies whose peer was gone
buffer gauge age_max: greatest age of a token at training
buffer histogram age: ages of tokens at training, in steps
buffer histogram age_in_flight: their part up to RoC's decision
buffer histogram age_in_queue: their part from there
buffer histogram queue_s: seconds from RoC's decision to the batch
buffer histogram commit_s: seconds of a group commit
buffer histogram publish_lag_s: seconds from a publication until all live engines had it
buffer histogram publish_lag_versions: newer versions that there were by then
learner counter steps: steps in the weights
learner counter steps_recomputed: steps computed again after a restart
learner counter trajectories_trained: trajectories in the weights
learner counter tokens_trained: their tokens
learner counter loss_tokens_trained: those of them that carry loss
learner gauge version: the version published last
learner gauge loss: of the newest step, as all that follow
learner gauge ratio_mean: mean ratio of the policy to the engine's
learner gauge ess: effective sample size, as a share
learner gauge capped_share: share of tokens whose weight was capped
learner gauge masked_share: share of tokens that were masked
learner gauge clipped_share: share of tokens that were clipped
learner gauge logprob_diff_mean: mean difference of log-probs to the engine's
learner gauge logprob_diff_max: greatest difference
learner gauge entropy: nats per token
learner gauge grad_norm: norm of the gradient before clipping
learner gauge lr: learning rate
learner gauge micro_batches: forward passes of this rank
learner gauge groups: groups in the batch
learner gauge trajectories: trajectories in the batch
learner gauge tokens: tokens in the batch
learner gauge loss_tokens: tokens that carry loss
learner gauge reward_mean: mean reward of the batch
learner gauge age_mean: mean age of its tokens
learner gauge age_max: greatest age of its tokens
learner gauge token_age_max: greatest age of all tokens trained
learner gauge weights_*: the weight server's counts: requests, bytes sent, undelivered, malformed
learner histogram train_s: seconds of a step without fetching
learner histogram fetch_s: seconds to fetch its trajectories
learner histogram checkpoint_s: seconds of a checkpoint
learner histogram publish_s: seconds to publish a version
learner histogram token_age: ages of trained tokens, in steps
"""


def _read(text: str) -> tuple[Key, ...]:
    keys = []
    for line in text.strip().splitlines():
        head, _, meaning = line.partition(": ")
        role, kind, key = head.split()
        keys.append(Key(role=role, kind=kind, key=key, meaning=meaning))
    return tuple(keys)


KEYS = _read(_TEXT)
"""of all roles"""


def markdown() -> str:
    """launch/METRICS.md."""
    lines = [
        "# Metrics",
        "",
        "`metrics.prometheus_port` serves these on loopback; `launch/grafana.json` is a dashboard over them. "
        "`metrics/ROLE-N.jsonl` in a run directory holds the same figures, a line per second.",
        "",
        "| family | holds |",
        "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in FAMILIES.items()),
    ]
    for role in dict.fromkeys(key.role for key in KEYS):
        lines += ["", f"## {role}", "", "| kind | key | meaning |", "|---|---|---|"]
        lines += [f"| {key.kind} | `{key.key}` | {key.meaning} |" for key in KEYS if key.role == role]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
