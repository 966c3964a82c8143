"""What generates and what chooses.

problems   -> chat, episode   a problem becomes a rollout: turns, calls, observations, a score
engine     -> rollout         one vLLM engine; the long-lived actor that leases rollouts and streams their turns
weights    -> version_follower -> engine      a published version reaches the engine while requests run
live       -> rollout         settings that are turned while it runs
roc        -> roc_filter      which rollouts of a finished group are kept, and the role that says so to the buffer
"""
