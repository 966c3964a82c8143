"""One vLLM engine: generates turns, and changes weights while requests run.

Consumes    contexts (token ids) with limits; staged versions
Produces    `Generation`: sampled tokens, their log-probs, and which version sampled each
Waits for   the engine's processes: the end of a generation; a pause, a load, and a resume at a swap
Unblocked by the engine; `EngineDied` when its processes are gone
Invariant   every token carries the version that sampled it; the prefix cache is never shared between versions; with
            kv = "recompute" a token's log-prob is that of its version over a context computed by that same version

Weights come only as published versions: the engine starts with none (`load_format="dummy"`) and refuses to generate
until it has loaded one, so that a joiner needs no more than the model's configuration.
"""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors import platform
from actors.settings import RolloutSettings, WeightsSettings
from actors.weights import Staged
from buffer.schema import LogProbs, TokenIds, VersionRun

__all__ = ["Engine", "EngineDied", "Generation", "Occupancy", "start_llm"]

NO_VERSION = (-1, -1)


class EngineDied(RuntimeError):
    """The engine's processes are gone or hold half a version; the actor must exit, so that it is started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What a model made of a context."""

    token_ids: TokenIds
    """[T]"""
    logprobs: LogProbs
    """[T] of the full distribution at the sampling temperature"""
    version_runs: tuple[VersionRun, ...]
    """cover the T tokens in order"""
    stopped: bool
    """it ended with a stop token, which is the last of `token_ids`; False when it ran into its limit"""
    cached_tokens: int
    """context tokens whose KV was there already"""
    generate_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """How full an engine is, as it says itself."""

    running: int
    waiting: int
    kv_tokens: int
    kv_capacity_tokens: int


class Engine:
    """Use `await Engine.start(...)`, then `generate` and `swap`, at last `close`."""

    def __init__(self, llm: Any, settings: RolloutSettings, weights: WeightsSettings) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._llm = llm
        self._settings = settings
        self._recompute = weights.kv == "recompute"
        self._swap_timeout_s = weights.ack_timeout_s
        self._dead = EngineDeadError
        self._names = itertools.count()
        self._label = ""
        self.loaded: tuple[int, int] = NO_VERSION
        """(lineage, version)"""
        self.in_flight = 0
        """requests handed to the engine and not yet returned"""
        cache = llm.vllm_config.cache_config
        self.block_tokens: int = cache.block_size
        self.kv_capacity_tokens: int = cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size

    @classmethod
    async def start(cls, model: Path, settings: RolloutSettings, weights: WeightsSettings, *, seed: int) -> "Engine":
        """Start the engine's processes; takes 10 to 30 s, mostly imports, during which the event loop goes on.

        Args:
            model: directory with the model's config.json; neither weights nor a tokenizer are read.
            seed: of all sampling; different for each life of each engine, so that no two rollouts share their draws.
                (A seed per request would cost speed on every device, and on the CPU vLLM 0.32 dies when a seeded
                request's prefill is chunked, as it is after a swap.)
        """
        starting = asyncio.ensure_future(asyncio.to_thread(start_llm, model, settings, seed))
        try:
            llm = await asyncio.shield(starting)
        except asyncio.CancelledError:
            (await starting).shutdown()  # processes that are coming up must not outlive us
            raise
        return cls(llm, settings, weights)

    async def generate(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        temperature: float | None = None,
    ) -> Generation:
        """Let the model go on from `context`. Cancelling the call takes the request back.

        Raises:
            EngineDied: the engine's processes are gone.
        """
        from vllm.inputs.engine import tokens_input

        if self.loaded == NO_VERSION:
            raise RuntimeError("the engine has no weights yet: load a version before generating")
        sampling = _sampling(
            max_new_tokens, stop_ids, self._settings.temperature if temperature is None else temperature
        )
        prompt = tokens_input(list(context), cache_salt=self._label)
        started_s = time.monotonic()
        self.in_flight += 1
        try:
            final = None
            async for output in self._llm.generate(prompt, sampling, str(next(self._names))):
                final = output  # the only one; leaving the loop early would send an abort
            return _generation(final, time.monotonic() - started_s)
        except self._dead as error:
            raise EngineDied("the engine's processes are gone") from error
        finally:
            self.in_flight -= 1

    async def swap(self, staged: Staged) -> float:
        """Load a version while requests wait; returns the seconds without generation.

        Raises:
            EngineDied: the version could not be loaded whole, or not in time.
        """
        manifest = staged.manifest
        label = f"{manifest.lineage}.{manifest.version}"
        places = [(t.name, t.dtype, tuple(t.shape), t.offset) for t in manifest.tensors]
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._swap_timeout_s):
                await self._llm.pause_generation(mode="keep", clear_cache=self._recompute)
                await self._llm.collective_rpc("load_version", args=(staged.path, places))
                await self._llm.update_weight_version(label)
                self._label, self.loaded = label, (manifest.lineage, manifest.version)
                await self._llm.resume_generation()
        except TimeoutError as error:
            raise EngineDied(f"loading version {label} took over ack_timeout_s = {self._swap_timeout_s} s") from error
        except Exception as error:  # whatever happened inside the load, half a version may be in the model
            raise EngineDied(f"version {label} could not be loaded: {error}") from error
        return time.monotonic() - started_s

    async def occupancy(self) -> Occupancy:
        """Ask the engine how full it is; cheap enough for once a second."""
        try:
            running, blocks = (await self._llm.collective_rpc("occupancy"))[0]
        except self._dead as error:
            raise EngineDied("the engine does not answer") from error
        return Occupancy(
            running=running,
            waiting=max(0, self.in_flight - running),
            kv_tokens=blocks * self.block_tokens,
            kv_capacity_tokens=self.kv_capacity_tokens,
        )

    async def close(self) -> None:
        """End the engine's processes."""
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # it would report the end as a death
        await asyncio.to_thread(llm.shutdown)
        await asyncio.sleep(0)  # vLLM closes its sockets in the loop, and leaves their context to the collector
        resources = llm.engine_core.resources
        if all(end is None or end.closed for end in (resources.input_socket, resources.output_socket)):
            resources.ctx.term()


def start_llm(model: Path, settings: RolloutSettings, seed: int) -> Any:
    """vLLM's engine as rollouts need it: dummy weights, full log-probs, nothing computed that is not used."""
    device = platform.detect() if settings.device == "auto" else settings.device
    platform.apply(platform.environment(device, settings))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=settings.dtype,
        max_model_len=settings.max_length,
        max_num_seqs=settings.concurrency,
        logprobs_mode="processed_logprobs",
        seed=seed,
        worker_extension_cls="actors.engine_worker.WorkerExtension",
        disable_log_stats=True,
        enable_log_requests=False,
        **platform.engine_arguments(device, settings),
    )
    return AsyncLLM.from_engine_args(arguments)


def _sampling(max_new_tokens: int, stop_ids: Sequence[int], temperature: float) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=temperature,
        top_p=1.0,
        max_tokens=max_new_tokens,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,  # the chat's stop tokens alone end a turn, whatever the model's configuration calls eos
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _generation(output: Any, generate_s: float) -> Generation:
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine ended a request with finish_reason = {completion.finish_reason}")
    ids = np.asarray(completion.token_ids, dtype=np.int32)
    flat = completion.logprobs
    # the sampled token comes first at each position
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)[np.asarray(flat.start_indices, dtype=np.int64)]
    runs = tuple(_version_run(span) for span in completion.weight_versions)
    if sum(run.num_tokens for run in runs) != len(ids) or len(logprobs) != len(ids):
        raise EngineDied(f"the engine returned {len(ids)} tokens, {len(logprobs)} log-probs and version runs {runs}")
    return Generation(
        token_ids=ids,
        logprobs=logprobs,
        version_runs=runs,
        stopped=completion.finish_reason == "stop",
        cached_tokens=output.num_cached_tokens or 0,
        generate_s=generate_s,
    )


def _version_run(span: Any) -> VersionRun:
    lineage, version = span.version.split(".")
    return VersionRun(lineage=int(lineage), version=int(version), num_tokens=span.end - span.start)


def seed_of_life(run: str, name: str, epoch: int) -> int:
    """Of the engine's sampling: another one for each engine and each of its lives."""
    return int.from_bytes(hashlib.blake2b(f"{run}/{name}/{epoch}".encode(), digest_size=4).digest()) >> 1
