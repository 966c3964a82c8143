"""`rocstar sft RECIPE`: the cold start, with the sandbox executing its demonstrations.

Consumes    an SFT recipe
Produces    the model's folder; a line per report
Waits for   the sandbox, then the optimizer
Invariant   observations in demonstrations come from the same sandbox that training uses
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from launch.cold_start import ColdStartSettings, cold_start
from launch.config import ConfigError, read_toml, validate
from launch.demonstrations import Execute
from learner.sft import SftProgress
from sandbox.client import SandboxClient
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings


def fine_tune(recipe: Path, output: Path | None) -> None:
    """Runs it.

    Raises:
        ConfigError: the recipe is wrong, or the folder holds a model already.
    """
    tree = read_toml(recipe)
    if output is not None:
        tree["output"] = str(output)
    settings = validate(ColdStartSettings, tree, str(recipe))
    if (Path(settings.output) / "config.json").exists():
        raise ConfigError(
            f"output = {settings.output}: holds a model already; remove it, or name another with --output"
        )
    started_s = time.monotonic()

    def report(progress: SftProgress) -> None:
        print(
            f"[{time.monotonic() - started_s:6.1f}s] step {progress.step}/{progress.steps}, "
            f"loss {progress.loss_assistant:.4f} on the assistant's tokens, {progress.loss_all:.4f} on all",
            flush=True,
        )

    with sandbox() as execute:
        print(f"model in {cold_start(settings, execute, report)}")


@contextmanager
def sandbox() -> Iterator[Execute]:
    """A sandbox node of this process's own; what it gives runs a program and returns the observation's text."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="sandbox", daemon=True)
    thread.start()

    async def start() -> tuple[SandboxServer, SandboxClient]:
        server = SandboxServer(SandboxSettings())
        return server, SandboxClient([await server.start()])

    async def stop() -> None:
        await client.close()
        await server.stop()

    server, client = asyncio.run_coroutine_threadsafe(start(), loop).result()

    @cache
    def execute(code: str) -> str:
        return asyncio.run_coroutine_threadsafe(client.run(code), loop).result().to_text()

    try:
        yield execute
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
