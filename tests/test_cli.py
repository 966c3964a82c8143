"""The command line on bad input: a clear message and exit code 2, before anything starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.problems import ProblemStream
from launch import cli, early
from launch.config import load, to_toml
from launch.run_directory import RunDirectory

Say = Callable[..., tuple[int, str, str]]

PROBLEMS = [{"id": f"p{number}", "problem": f"{number} + 1?", "answer": str(number + 1)} for number in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tiny model with its tokenizer and template."""
    from launch.tiny import TinySettings, new_model, train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    settings = TinySettings(vocabulary=300, num_layers=1, width=32, num_heads=2, num_kv_heads=1, mlp_width=32)
    tokenizer = train_tokenizer(settings, ["user\n1 + 1?", "assistant\n2"] * 10)
    new_model(settings, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    """A recipe without a fault."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
[run]
directory = "{tmp_path / "run"}"
[model]
path = "{model}"
[problems]
source = "jsonl"
path = "{problems}"
num_heldout = 2
[rollout]
max_length = 256
max_new_tokens = 128
dtype = "float32"
[chat]
max_observation_tokens = 64
"""
    )
    return path


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `rocstar ARGUMENTS` in this process: (exit code, output, errors)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rocstar", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def refused(say: Say, *arguments: object) -> str:
    code, _, errors = say("run", *arguments)
    assert code == 2
    assert "Traceback" not in errors
    return errors


def test_a_dry_run_prints_the_tree_and_what_follows(say: Say, recipe: Path, tmp_path: Path) -> None:
    code, output, _ = say("run", recipe, "--dry-run")
    assert code == 0
    assert "max_staleness = 1" in output
    assert "# tickets              16 groups, 256 rollouts" in output
    assert not (tmp_path / "run").exists()


HEAVY = """
import sys, launch.cli
try:
    launch.cli.main()
finally:
    print(sorted({"ray", "vllm", "torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_mistake_is_told_before_anything_heavy_is_imported(recipe: Path) -> None:
    command = [sys.executable, "-c", HEAVY, "run", str(recipe)]
    wrong = subprocess.run([*command, "--set", "a.b=1"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "[]\n")
    right = subprocess.run([*command, "--dry-run"], capture_output=True, text=True)
    assert right.returncode == 0
    assert right.stdout.endswith("\n['transformers']\n")


def test_usage(say: Say) -> None:
    assert say("rum")[0] == 2
    assert say("run")[0] == 2


def test_an_unknown_key(say: Say, recipe: Path) -> None:
    assert "did you mean rollout.concurrency?" in refused(say, recipe, "--set", "rollout.concurency=3")


def test_a_wrong_type(say: Say, recipe: Path) -> None:
    assert "run.steps = 1.5 must be a valid integer" in refused(say, recipe, "--set", "run.steps=1.5")


def test_impossible_sizes(say: Say, recipe: Path) -> None:
    assert "2 * roc.min_per_side" in refused(say, recipe, "--set", "groups.group_size=3")
    assert "model's 512 positions" in refused(say, recipe, "--set", "rollout.max_length=513")
    told = refused(say, recipe, "--set", "rollout.kv_cache_mib=1", "--set", "rollout.max_length=512", *_large(recipe))
    assert "raise it to" in told


def _large(recipe: Path) -> list[str]:
    """A model of the same folder whose KV of one rollout exceeds a MiB."""
    folder = recipe.parent / "large"
    folder.mkdir()
    source = Path(recipe.read_text().split('path = "')[1].split('"')[0])
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 40}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return ["--set", f"model.path={folder}"]


def test_a_missing_model(say: Say, recipe: Path, tmp_path: Path) -> None:
    assert "nowhere: no such folder" in refused(say, recipe, "--set", f"model.path={tmp_path / 'nowhere'}")
    (tmp_path / "hollow").mkdir()
    assert "hollow: holds no config.json" in refused(say, recipe, "--set", f"model.path={tmp_path / 'hollow'}")


def test_a_tokenizer_without_a_template(say: Say, recipe: Path, model: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).write_bytes(file.read_bytes())
    stated = json.loads((plain / "tokenizer_config.json").read_text())
    stated.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(stated))
    assert "has no chat template" in refused(say, recipe, "--set", f"model.path={plain}")


def test_problem_files_that_are_empty_malformed_or_repeat_an_id(say: Say, recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    good = file.read_text()
    file.write_text("")
    assert "problems.jsonl holds no problem" in refused(say, recipe)
    file.write_text(good + '{"id": "x"\n')
    assert "problems.jsonl:9: not JSON" in refused(say, recipe)
    file.write_text(good + '{"id": "x", "problem": "?"}\n')
    assert 'problems.jsonl:9: field "answer" is missing' in refused(say, recipe)
    file.write_text(good + json.dumps(PROBLEMS[2]) + "\n")
    assert 'problems.jsonl:9: id "p2" is used already' in refused(say, recipe)
    file.write_text("".join(good.splitlines(keepends=True)[:2]))
    assert "lower it" in refused(say, recipe)
    assert "cannot be read" in refused(say, recipe, "--set", f"problems.path={tmp_path / 'none.jsonl'}")


def test_a_port_in_use(say: Say, recipe: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"buffer.port = {port} is in use" in refused(say, recipe, "--set", f"buffer.port={port}")
        told = refused(say, recipe, "--set", f"metrics.prometheus_port={port}")
        assert f"metrics.prometheus_port = {port} is in use" in told


def test_a_directory_that_holds_another_run(say: Say, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "buffer").mkdir(parents=True)
    assert "holds another run" in refused(say, recipe)


def test_a_resume_with_other_problems_than_the_run_began_with(say: Say, recipe: Path, tmp_path: Path) -> None:
    tree, run, file = load(recipe), tmp_path / "run", tmp_path / "problems.jsonl"
    began = ProblemStream(tree.problems, tree.run.seed).fingerprint()
    RunDirectory.open(tree, began).lock.close()
    (run / "buffer").mkdir()
    content = file.read_text()
    file.write_text(content.replace("7 + 1?", "7 + 0?"))
    code, _, errors = say("resume", run)
    assert code == 2
    assert f"problems.path = {file} gives problems with fingerprint sha256:" in errors
    assert f"began with {began}" in errors
    assert "restore the content, or start another run in another run.directory" in errors
    assert (run / "recipe.toml").read_text() == to_toml(tree)
    file.write_text(content + "\n")  # the same problems in other bytes
    assert ProblemStream(tree.problems, tree.run.seed).fingerprint() == began


def test_a_resume_whose_stored_recipe_was_edited_to_other_problems(say: Say, recipe: Path, tmp_path: Path) -> None:
    tree, run = load(recipe), tmp_path / "run"
    RunDirectory.open(tree, ProblemStream(tree.problems, tree.run.seed).fingerprint()).lock.close()
    (run / "buffer").mkdir()
    stored = run / "recipe.toml"
    stored.write_text(stored.read_text().replace("num_heldout = 2", "num_heldout = 3"))
    code, _, errors = say("resume", run)
    assert code == 2
    assert "problems.num_heldout = 3, the run in " in errors
    assert "began with 2: it is fixed for a run" in errors


def test_a_resume_of_nothing(say: Say, tmp_path: Path) -> None:
    code, _, errors = say("resume", tmp_path)
    assert code == 2
    assert "holds no run" in errors


def test_data_shows_the_problems_in_order_without_the_held_out(say: Say, recipe: Path) -> None:
    code, output, _ = say("data", recipe, "--count", 100)
    assert code == 0
    trained = {json.loads(line)["id"] for line in output.splitlines()}
    code, output, _ = say("data", recipe, "--count", 100, "--heldout")
    held = {json.loads(line)["id"] for line in output.splitlines()}
    assert (len(trained), len(held)) == (6, 2)
    assert not trained & held


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_anything_is_started_ends_as_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "recipe.toml")
    with subprocess.Popen(
        [sys.executable, "-m", "launch", "run", str(tmp_path / "recipe.toml")], stderr=subprocess.PIPE, text=True
    ) as process:
        with open(tmp_path / "recipe.toml", "wb"):  # opens once the command reads it
            process.send_signal(number)
            assert process.wait(30.0) == 75
        assert process.stderr is not None
        assert process.stderr.read() == "rocstar: interrupted before anything was started\n"


@pytest.mark.slow
def test_a_signal_while_a_resume_checks_leaves_the_run_as_it_was(recipe: Path, tmp_path: Path) -> None:
    tree, run, file = load(recipe), tmp_path / "run", tmp_path / "problems.jsonl"
    RunDirectory.open(tree, ProblemStream(tree.problems, tree.run.seed).fingerprint()).lock.close()
    before = sorted(run.rglob("*"))
    file.unlink()
    os.mkfifo(file)
    command = [sys.executable, "-m", "launch", "resume", str(run)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process, open(file, "wb"):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 75
    assert sorted(run.rglob("*")) == before


def test_a_signal_once_there_is_a_run_names_it() -> None:
    assert early.told(Path("runs/a")).endswith("before any role was started; go on with `rocstar resume runs/a`")
