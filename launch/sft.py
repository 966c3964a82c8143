"""`rocstar sft RECIPE`: the cold start, with the sandbox executing its demonstrations.

Consumes    an SFT recipe
Produces    the model's folder; a line per report
Waits for   the sandbox, then the optimizer
Invariant   observations in demonstrations come from the same sandbox that training uses
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

from launch.cold_start import ColdStartSettings, cold_start
from launch.config import ConfigError, read_toml, validate
from learner.sft import SftProgress
from sandbox.local import Sandbox


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

    with Sandbox() as sandbox:
        execute = cache(lambda code: sandbox.run(code).to_text())  # many demonstrations share a program
        print(f"model in {cold_start(settings, execute, report)}")
