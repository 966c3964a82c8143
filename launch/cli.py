"""The `rocstar` command.

Consumes    arguments
Produces    an exit code: 0 goal reached, 1 failure, 2 usage or configuration, 75 interrupted and resumable
Waits for   the run that it starts
Invariant   a mistake of the user's is told within a second or two: torch, vLLM and Ray are imported behind the checks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from launch.config import ConfigError, load, parse, read_toml, to_toml
from launch.early import EXIT_FAILED, EXIT_USAGE

if TYPE_CHECKING:
    from launch.tree import Recipe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous GRPO-RoC. Exit codes: 0 goal reached, 1 failure, 2 usage or configuration, 75 interrupted.",
)
RecipePath = Annotated[Path, typer.Argument(help="Recipe: a TOML file.", metavar="RECIPE")]
RunDirectory = Annotated[Path, typer.Argument(help="Directory of a run.", metavar="RUN")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE or @FILE.toml, over the recipe; repeatable.")
]
Address = Annotated[str, typer.Option(help="Ray cluster to join, HOST:PORT; without it one is started here.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would happen, and what follows from it; do nothing.")
]


@app.command()
def run(recipe: RecipePath, overrides: Overrides = None, address: Address = "", dry_run: DryRun = False) -> None:
    """Trains: starts every role, waits for the goal, writes summary.json."""
    from launch import preflight

    tree = load(recipe, overrides or ())
    checked = preflight.check(tree, address=address)
    if dry_run:
        from launch.derive import derive, lines

        typer.echo(to_toml(tree))
        followed = lines(derive(tree, checked.shape, checked.device))
        typer.echo("# what follows\n" + "\n".join(f"# {line}" for line in followed))
        return
    _drive(tree, address=address, fingerprint=checked.problems.fingerprint())


@app.command()
def resume(
    directory: RunDirectory,
    overrides: Overrides = None,
    address: Address = "",
    anew: Annotated[
        bool, typer.Option("--rebuild-index", help="First make a damaged buffer/index.sqlite anew from buffer/spare/.")
    ] = False,
) -> None:
    """Goes on with a run that was interrupted or has failed; with --set run.steps=N, with one that is done."""
    from launch import preflight

    stored, place = _stored(directory), f"run.directory={json.dumps(str(directory))}"
    tree = parse(stored, [place, *(overrides or ())], str(directory))
    preflight.check_fixed(parse(stored, [place], str(directory)), tree)
    checked = preflight.check(tree, resume=True, address=address)
    if anew:
        from launch.copying import rebuild_index

        typer.echo(f"rocstar: {rebuild_index(directory)}")
    _drive(tree, address=address, fingerprint=checked.problems.fingerprint())


@app.command()
def copy(
    directory: RunDirectory, target: Annotated[Path, typer.Argument(help="Directory to make.", metavar="COPY")]
) -> None:
    """Copies a run, also one that goes on, so that the copy can be resumed."""
    from launch.copying import copy as copy_run

    _stored(directory)
    copy_run(directory, target)
    typer.echo(f"{target}: resume it with `rocstar resume {target}`")


@app.command()
def status(directory: RunDirectory) -> None:
    """What a run holds, from its files."""
    from launch.status import describe

    _stored(directory)
    typer.echo("\n".join(describe(directory)))


@app.command()
def monitor(
    run: Annotated[str, typer.Argument(help="Directory of a run, or http://HOST:PORT of its --web.", metavar="RUN")],
    once: Annotated[bool, typer.Option("--once", help="Print the screen once, as plain text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the snapshot and its advice as JSON.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve it to a browser on this host, until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of --web; 0: a free one.")] = 0,
    window_s: Annotated[float | None, typer.Option("--window", min=1, help="Seconds that rates are over.")] = None,
) -> None:
    """What limits a run and what to turn; live, finished or interrupted. In a terminal: ? explains, q quits."""
    if not (once or as_json or web or sys.stdout.isatty()):
        raise ConfigError("monitor: standard output is no terminal; say --once, --json or --web")
    if port and not web:
        raise ConfigError(f"monitor: --port {port} is of --web, which is not there; say --web, or leave the port out")
    from launch.monitor import show, sources, text
    from launch.tune.check import contradicted

    if web:
        from launch.monitor.web import serve

        return serve(Path(run), port, window_s, contradicted)
    source = sources.source_of(run, window_s, contradicted)
    if once or as_json:
        told = source.snapshot().decode()
        return typer.echo(told if as_json else "\n".join(text.screen(*show.read_json(told))))
    from launch.monitor import app as screen
    from launch.monitor.desk import Desk

    screen.show(Desk(source))


@app.command()
def trace(
    directory: RunDirectory,
    output: Annotated[Path, typer.Option(help="File to write, for ui.perfetto.dev or chrome://tracing.")],
    seconds: Annotated[float, typer.Option(min=0.001, help="How many, up to the last that was recorded.")] = 60.0,
) -> None:
    """Writes what a run recorded as one time line: rollouts, turns, calls, swaps, batches, learner steps."""
    from launch.monitor.trace import trace as record

    _stored(directory)
    told = record(directory, seconds)
    output.write_text(json.dumps(told, separators=(",", ":")) + "\n", encoding="utf-8")
    typer.echo(f"{output}: {len(told['traceEvents'])} events")


@app.command(name="set")
def set_(
    directory: RunDirectory,
    change: Annotated[str, typer.Argument(help="TABLE.KEY=VALUE, e.g. staleness.max_staleness=2.", metavar="CHANGE")],
) -> None:
    """Turns a live dial of a running training; it holds from the next step on, and stands at a resume."""
    from launch.turn import turn

    _stored(directory)
    typer.echo(turn(directory, change))


@app.command()
def tune(
    directory: RunDirectory,
    max_age: Annotated[float | None, typer.Option(min=0, help="Most mean age of trained tokens, in steps.")] = None,
    output: Annotated[Path | None, typer.Option(help="Overlay to write; by default RUN/tuned.toml.")] = None,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0,
) -> None:
    """Simulates the run under other settings, from what it recorded, and writes the best as an overlay of a recipe."""
    from launch.tune.show import tune as tell

    typer.echo("\n".join(tell(directory, max_age, output, seed)))


@app.command()
def sft(
    recipe: RecipePath,
    output: Annotated[Path | None, typer.Option(help="Folder of the model, over the recipe's own.")] = None,
) -> None:
    """Makes the model that training starts from: demonstrations, then supervised fine-tuning."""
    from launch.sft import fine_tune

    fine_tune(recipe, output)


@app.command()
def data(
    recipe: RecipePath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(min=1, help="How many to print.")] = 5,
    heldout: Annotated[bool, typer.Option("--heldout", help="The held-out ones.")] = False,
) -> None:
    """Prints a recipe's problems as JSON lines, in the order of training."""
    from dataclasses import asdict

    from launch.preflight import check_problems

    tree = load(recipe, overrides or ())
    stream = check_problems(tree)
    limit = len(stream.heldout) if heldout else stream.num_problems
    for index in range(count if limit is None else min(count, limit)):
        problem = stream.heldout[index] if heldout else stream.at(index)
        typer.echo(json.dumps(asdict(problem), ensure_ascii=False))


@app.command(context_settings={"help_option_names": ["--help"]})
def node(
    role: Annotated[str, typer.Argument(help="head, buffer, sandbox, rollout or learner.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of the head; the head itself: the port it listens at.")] = "",
    count: Annotated[int, typer.Option(min=1, help="How many of the role this node offers.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or rocm.")] = "auto",
    token: Annotated[Path | None, typer.Option(help="File with the cluster's token; the head makes it.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Joins this host to the Ray cluster, offering one role's resource, until it is ended."""
    from launch.node import Node, serve

    raise typer.Exit(serve(Node.of(role, address=address, count=count, device=device, token=token), dry_run=dry_run))


@app.command()
def doctor() -> None:
    """Checks that this host can run RoCstar."""
    from launch.doctor import examine

    findings = examine()
    for finding in findings:
        typer.echo(f"{'ok  ' if finding.good else 'FAIL'} {finding.what}: {finding.says}")
    raise typer.Exit(0 if all(finding.good for finding in findings) else EXIT_FAILED)


def _drive(tree: Recipe, *, address: str, fingerprint: str) -> NoReturn:
    from launch.driver import drive

    raise typer.Exit(drive(tree, address=address, fingerprint=fingerprint))


def _stored(directory: Path) -> dict[str, object]:
    """The recipe that a run was started with."""
    if not (directory / "recipe.toml").is_file():
        raise ConfigError(f"{directory}: holds no run (no recipe.toml)")
    return read_toml(directory / "recipe.toml")


def main() -> None:
    """Entry point: a `ConfigError` becomes its lines and exit code 2."""
    try:
        app()
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"rocstar: {line}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
