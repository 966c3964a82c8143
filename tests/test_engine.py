"""The engine against the model it serves: log-probs over swaps, version runs, prefix cache, cancelling, dying."""

import asyncio
import os
import signal
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from actors.engine import Engine, EngineDied, Generation, start_llm
from actors.settings import RolloutSettings, WeightsSettings
from actors.weights import Staged
from buffer.schema import TensorSpec, WeightsManifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

SETTINGS = RolloutSettings(dtype="float32", device="cpu", max_length=512, max_new_tokens=300, concurrency=40)
VOCABULARY = 300
LENGTHS = (40, 80, 120, 160)


def tiny_model(seed: int, near: Any = None) -> Any:
    """A Qwen3 with tied embeddings and far from uniform; `near` another one when given, as the next version is."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM has CPU attention for
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=7,
        initializer_range=0.15,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float().eval()
    if near is not None:
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), near.parameters(), strict=True):
                parameter.copy_(other + 0.2 * parameter)
    return model


def stage(model: Any, lineage: int, version: int) -> Staged:
    """What a learner would publish, received."""
    places, blob = [], b""
    for name, parameter in model.named_parameters():
        data = parameter.detach().numpy().tobytes()
        places.append(
            TensorSpec(name=name, dtype="F32", shape=tuple(parameter.shape), offset=len(blob), num_bytes=len(data))
        )
        blob += data
    manifest = WeightsManifest(
        lineage=lineage,
        version=version,
        bucket_bytes=(len(blob),),
        bucket_crc32=(zlib.crc32(blob),),
        tensors=tuple(places),
        checksum=0,
    )
    staged = Staged.create(manifest)
    staged.write(0, blob)
    return staged


async def load(engine: Engine, model: Any, lineage: int, version: int) -> float:
    with stage(model, lineage, version) as staged:
        return await engine.swap(staged)


def context(index: int, length: int = 40) -> list[int]:
    return [10 + (index * 37 + 11 * i) % (VOCABULARY - 10) for i in range(length)]


def differences(generation: Generation, prompt: list[int], models: dict[int, Any]) -> list[float]:
    """|engine - trainer| for each token, the trainer's model being that of the token's version."""
    ids = torch.tensor([prompt + generation.token_ids.tolist()])
    found, at = [], 0
    for run in generation.version_runs:
        with torch.no_grad():
            logits = models[run.version](input_ids=ids).logits[0]
        expected = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        for i in range(at, at + run.num_tokens):
            found.append(abs(float(expected[i, generation.token_ids[i]]) - float(generation.logprobs[i])))
        at += run.num_tokens
    return found


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model(0).config.save_pretrained(directory)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(model_directory: Path) -> AsyncIterator[Any]:
    llm = await asyncio.to_thread(start_llm, model_directory, SETTINGS, 1)
    yield llm
    await Engine(llm, SETTINGS, WeightsSettings()).close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(llm: Any) -> Engine:
    return Engine(llm, SETTINGS, WeightsSettings())


async def over_swaps(engine: Engine, models: dict[int, Any]) -> list[tuple[list[int], Generation]]:
    """Requests of four lengths; each time the shorter ones have ended, a new version is loaded under the others."""
    await load(engine, models[0], 1, 0)
    requests: list[list[asyncio.Task[Generation]]] = [
        [
            asyncio.create_task(engine.generate(context(8 * row + i), max_new_tokens=length, stop_ids=[]))
            for i in range(8)
        ]
        for row, length in enumerate(LENGTHS)
    ]
    results: list[tuple[list[int], Generation]] = []
    for row, tasks in enumerate(requests):
        results += [(context(8 * row + i), generation) for i, generation in enumerate(await asyncio.gather(*tasks))]
        if row + 1 < len(requests):
            await load(engine, models[row + 1], 1, row + 1)
    return results


async def test_an_engine_without_a_version_refuses_to_generate(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="load a version"):
        await engine.generate(context(0), max_new_tokens=4, stop_ids=[])


async def test_each_token_has_the_logprob_of_its_own_version_over_three_swaps(engine: Engine, llm: Any) -> None:
    models: dict[int, Any] = {0: tiny_model(0)}
    for version in range(1, 4):
        models[version] = tiny_model(version, near=models[version - 1])
    results = await over_swaps(engine, models)
    worst = [difference for prompt, generation in results for difference in differences(generation, prompt, models)]
    assert len(worst) == 8 * sum(LENGTHS) >= 1000
    assert max(len(generation.version_runs) for _, generation in results) == 4
    assert max(worst) <= 1e-3

    # the same with the KV of older versions kept: the test above must be able to fail
    kept = await over_swaps(Engine(llm, SETTINGS, WeightsSettings(kv="keep")), models)
    mixed = [difference for prompt, generation in kept for difference in differences(generation, prompt, models)]
    assert max(mixed) > 1e-2
    single = [g for g in kept if len(g[1].version_runs) == 1]
    assert max(d for prompt, generation in single for d in differences(generation, prompt, models)) <= 1e-3


async def test_a_skipped_version_and_a_higher_lineage_are_named_in_the_runs(engine: Engine) -> None:
    await load(engine, tiny_model(0), 1, 3)
    assert engine.loaded == (1, 3)
    await load(engine, tiny_model(0), 2, 9)
    generation = await engine.generate(context(0), max_new_tokens=5, stop_ids=[])
    assert [(r.lineage, r.version, r.num_tokens) for r in generation.version_runs] == [(2, 9, 5)]
    assert generation.token_ids.dtype == np.int32
    assert generation.logprobs.dtype == np.float32


async def test_the_prefix_cache_is_shared_within_a_version_and_not_between_versions(engine: Engine) -> None:
    model, prompt = tiny_model(0), context(99, length=200)
    cached = []
    for version in (20, 20, 21):
        if engine.loaded[1] != version:
            await load(Engine(engine._llm, SETTINGS, WeightsSettings(kv="keep")), model, 2, version)
            engine.loaded, engine._label = (2, version), f"2.{version}"
        cached.append((await engine.generate(prompt, max_new_tokens=2, stop_ids=[])).cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= 160
    assert cached[2] == 0


async def test_only_the_given_stop_tokens_end_a_turn(engine: Engine) -> None:
    """The configuration's eos (7) is an ordinary token here; a turn ends with its stop token included."""
    await load(engine, tiny_model(0), 3, 0)
    everything = list(range(VOCABULARY))
    stopped = await engine.generate(context(1), max_new_tokens=50, stop_ids=everything)
    assert (stopped.stopped, len(stopped.token_ids)) == (True, 1)
    many = await asyncio.gather(*(engine.generate(context(i), max_new_tokens=60, stop_ids=[]) for i in range(30)))
    assert all(len(generation.token_ids) == 60 and not generation.stopped for generation in many)
    assert any(7 in generation.token_ids for generation in many)


async def test_siblings_differ_although_they_share_prompt_and_engine(engine: Engine) -> None:
    many = await asyncio.gather(*(engine.generate(context(5), max_new_tokens=30, stop_ids=[]) for _ in range(16)))
    assert len({generation.token_ids.tobytes() for generation in many}) == 16


async def test_a_cancelled_request_leaves_the_engine(engine: Engine) -> None:
    task = asyncio.create_task(engine.generate(context(6), max_new_tokens=300, stop_ids=[]))
    await engine.generate(context(7), max_new_tokens=2, stop_ids=[])
    assert (await engine.occupancy()).running >= 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.generate(context(7), max_new_tokens=2, stop_ids=[])
    occupancy = await engine.occupancy()
    assert (occupancy.running, occupancy.waiting, occupancy.kv_tokens) == (0, 0, 0)


async def test_a_version_of_another_model_is_refused_and_ends_the_engine(engine: Engine) -> None:
    with stage(tiny_model(0), 4, 0) as whole:
        manifest = whole.manifest
        missing = tuple(t for t in manifest.tensors if "layers.1.mlp.down_proj" not in t.name)
        short = WeightsManifest(
            lineage=4,
            version=1,
            bucket_bytes=manifest.bucket_bytes,
            bucket_crc32=manifest.bucket_crc32,
            tensors=missing,
            checksum=0,
        )
        with pytest.raises(EngineDied, match=r"layers\.1\.mlp\.down_proj"):
            await engine.swap(Staged(manifest=short, descriptor=whole.descriptor))
        assert engine.loaded != (4, 1)
        await engine.swap(whole)  # its processes live: a whole version makes it right again


async def test_a_dead_engine_process_ends_every_request_with_engine_died(engine: Engine) -> None:
    """Last: it kills the module's engine."""
    tasks = [asyncio.create_task(engine.generate(context(i), max_new_tokens=300, stop_ids=[])) for i in range(4)]
    await engine.generate(context(9), max_new_tokens=2, stop_ids=[])
    children = psutil.Process().children(recursive=True)
    core = [child for child in children if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())]
    assert core
    for child in core:
        os.kill(child.pid, signal.SIGKILL)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineDied)
