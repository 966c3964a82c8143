"""Runs the plain loop: `python -m tests.reference MODEL RECIPE --seed 1 --steps 60 [--roc off] [--json FILE]`.

Prints a line per step; every `--eval-every` steps, and at both ends, the score on the held-out problems.
"""

import argparse
import dataclasses
import json
import time
import tomllib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.chat import Chat, ChatSettings
from actors.problems import ProblemSettings, ProblemStream
from actors.roc import RocSettings
from tests.reference.execute import Executor
from tests.reference.loop import LoopSettings, SyncLoop, evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("recipe", type=Path, help="for its [chat] and [problems]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--roc", default="paper")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    recipe = tomllib.loads(args.recipe.read_text())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    chat = Chat(tokenizer, ChatSettings.model_validate(recipe.get("chat", {})))
    problems = ProblemStream(ProblemSettings.model_validate(recipe["problems"]), args.seed)
    settings = LoopSettings(
        roc=RocSettings(mode=args.roc), learning_rate=args.learning_rate, groups_per_step=args.groups_per_step
    )
    records = []
    with Executor() as executor:
        loop = SyncLoop(model, chat, problems, executor.run, settings, args.seed)

        def heldout(step: int) -> None:
            generator = torch.Generator().manual_seed(args.seed)
            found = evaluate(model, chat, problems.heldout, executor.run, settings.limits, generator)
            records.append({"heldout_after_step": step, **dataclasses.asdict(found)})
            print(f"held-out after step {step}: {found}", flush=True)

        heldout(0)
        started = time.monotonic()
        for step in range(1, args.steps + 1):
            figures = loop.step()
            if figures is None:
                print("stopped: 40 groups dropped in a row")
                break
            records.append(dataclasses.asdict(figures))
            s = figures.sampled
            print(
                f"{time.monotonic() - started:6.1f}s step {step:3d} accuracy {s.accuracy:.3f} failed in correct "
                f"{s.tool_error_in_correct:.3f} calls {s.calls:.2f} tokens {s.tokens:.1f} unfinished "
                f"{s.unfinished:.3f} dropped {figures.groups_dropped:2d} loss {figures.loss:+.4f} "
                f"norm {figures.grad_norm:.3f}",
                flush=True,
            )
            if args.eval_every and step % args.eval_every == 0 and step < args.steps:
                heldout(step)
        heldout(loop.next_step)
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args), "records": records}, indent=1, default=str))


if __name__ == "__main__":
    main()
