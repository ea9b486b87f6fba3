"""What the scripts' command lines have in common."""

import json
import re
import subprocess
import sys
from pathlib import Path

import probes  # noqa: F401, for its tasks
import pytest
from processes import ROOT, Script, rows

import ppo_atari
import ppo_continuous
import trpo_continuous

SMALL = ["--num-envs", "2", "--num-steps", "16", "--minibatch-size", "32", "--num-epochs", "1",
         "--threads", "1"]  # fmt: skip


def test_import_does_nothing():
    """ppo_atari.py alone has torch compile the same code whatever the timings."""
    before = {path.name for path in ROOT.iterdir()}
    code = ("import ppo_atari, ppo_continuous, trpo_continuous\n"
            "import torch._inductor.config\n"
            "assert torch._inductor.config.deterministic")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in ROOT.iterdir()} - before <= {"__pycache__"}


@pytest.mark.parametrize("module", [ppo_atari, ppo_continuous, trpo_continuous])
def test_of_several_forbidden_flags_always_the_same_is_named(module, capsys):
    flags = ["--seed", 2, "--num-envs", 2, "--gamma", 0.9, "--env-id", "X", "--run-dir", "X"]
    words = "--env-id: leave it out; --resume goes by the checkpoint's settings"
    assert Script(module).refused(capsys, 2, ["--resume", "none", *flags], words)


@pytest.mark.parametrize("module, flags, steps", [
    (ppo_atari, [], "agent steps, of 4 frames each [10_000_000]"),
    (ppo_continuous, [], "agent steps [100_000]"),  # CartPole's own
    (ppo_continuous, ["--env-id", "HalfCheetah-v5"], "agent steps [1_000_000]"),
    (trpo_continuous, [], "agent steps [100_000]"),
    (trpo_continuous, ["--env-id", "Pendulum-v1"], "agent steps [300_000]"),
])  # fmt: skip
def test_help_shows_the_defaults_of_the_task_and_ends_with_examples(module, flags, steps, capsys):
    with pytest.raises(SystemExit) as leaving:
        module.main(["--help", *flags])
    assert not leaving.value.code
    out, err = capsys.readouterr()
    text = " ".join(out.split())
    assert err == "" and steps in text and "--gamma γ discount" in text
    assert text.index("examples:") > text.index("--video")
    assert out.rstrip().endswith(module.__doc__.rstrip().splitlines()[-1])


@pytest.mark.parametrize("module", [ppo_continuous, trpo_continuous])
def test_actions_are_clipped_to_their_box_unless_told_otherwise(module, tmp_path):
    """While training and when the policy plays; beyond the bounds of 0.1 are most of N(0, 1)."""
    for flag, clipped in (("--clip-actions", True), ("--no-clip-actions", False)):
        run_dir = tmp_path / flag
        module.main(["--env-id", "Effort-v0", *SMALL, "--total-steps", "64", flag,
                     "--run-dir", str(run_dir)])  # fmt: skip
        for returns in ([score for _, score, _ in rows(run_dir)],
                        module.main(["--evaluate", str(run_dir), "--episodes", "64"])):  # fmt: skip
            assert len(returns) == 64 and (min(returns) >= -0.11) == clipped


@pytest.mark.parametrize("module, env_id, other", [
    (ppo_atari, "CartPole-v1", "ppo_continuous.py"),
    (ppo_atari, "HalfCheetah-v5", "ppo_continuous.py"),
    (ppo_continuous, "BreakoutNoFrameskip-v4", "ppo_atari.py"),
    (ppo_continuous, "ALE/Pong-v5", "ppo_atari.py"),
    (trpo_continuous, "BreakoutNoFrameskip-v4", "ppo_atari.py"),
    (trpo_continuous, "ALE/Pong-v5", "ppo_atari.py"),
])  # fmt: skip
def test_a_task_of_the_other_kind_names_its_script(module, env_id, other, tmp_path, capsys):
    flags = ["--env-id", env_id, "--run-dir", tmp_path / "run"]
    assert Script(module).refused(capsys, 2, flags, "--env-id", env_id, other)


@pytest.mark.parametrize("module", [ppo_atari, ppo_continuous])
@pytest.mark.parametrize("flags, found, chosen, said", [
    (["--total-steps", "500000"], True, True, "compiling, which takes"),
    (["--total-steps", "500000"], False, False, "not compiling, which may be faster"),
    (["--total-steps", "499999"], True, False, ""),
    (["--total-steps", "500000", "--no-compile"], True, False, ""),
    (["--total-steps", "5000", "--compile"], True, True, ""),
])  # fmt: skip
def test_long_runs_are_compiled_where_a_compiler_is_found(
    module, flags, found, chosen, said, capsys, monkeypatch
):
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/g++" if found else None)
    args, _ = module.parse_args(flags)
    assert module.choose_compile(args) is chosen
    out = capsys.readouterr().out
    assert out.startswith(said) and len(out.splitlines()) == bool(said)


@pytest.mark.parametrize("module", [ppo_atari, ppo_continuous, trpo_continuous])
def test_checkpoints_are_about_15_in_a_run_and_4_iterations_apart(module):
    """In a short run no episode would end if every iteration began with new ones."""
    for iterations, every in ((1, 4), (20, 4), (75, 5), (3000, 200)):
        args, _ = module.parse_args([*SMALL, "--total-steps", str(32 * iterations)])
        assert (args.num_iterations, args.checkpoint_every) == (iterations, every)


@pytest.mark.parametrize("module, goal", [(ppo_atari, -1), (ppo_continuous, 1)])
def test_the_choice_to_compile_is_kept_and_holds_on_resuming(
    module, goal, tmp_path, capsys, monkeypatch
):
    """With a compiler that changes nothing: what is compiled is asked for once, and again after."""
    compiled, run_dir, script = [], tmp_path / "run", Script(module)
    if module is ppo_atari:  # 100 games are soon over
        settings = module.game_settings
        short = {"max_num_frames_per_episode": 40}
        monkeypatch.setattr(module, "game_settings", lambda env_id: settings(env_id) | short)
    monkeypatch.setattr(
        module.torch, "compile", lambda function, **kwargs: compiled.append(function) or function
    )
    script.main(*SMALL, "--total-steps", 500_000, "--goal-score", goal, "--run-dir", run_dir)
    count = len(compiled)
    config = json.loads((run_dir / "config.json").read_text())
    assert config["settings"]["compile"] is True and count
    script.main("--resume", run_dir)
    assert len(compiled) == 2 * count
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert script.refused(capsys, 2, ["--resume", run_dir], "C++ compiler", "--no-compile")
    script.main("--resume", run_dir, "--no-compile")
    assert len(compiled) == 2 * count


@pytest.mark.parametrize("module", [ppo_atari, ppo_continuous, trpo_continuous])
def test_an_error_of_words_alone_is_told(module, tmp_path, capsys, monkeypatch):
    """moviepy's has neither a number nor a file."""

    def broken(*_):
        raise OSError("the encoder is gone")

    monkeypatch.setattr(module, "train", broken)
    flags = [*SMALL, "--total-steps", 64, "--run-dir", tmp_path / "run"]
    assert Script(module).refused(capsys, 2, flags, "the encoder is gone")


@pytest.mark.parametrize("module", [ppo_atari, ppo_continuous, trpo_continuous])
def test_without_a_path_the_newest_run_plays(module, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, small = Script(module), [*SMALL, *["--network", "paper"] * (module is ppo_atari)]
    assert script.refused(capsys, 2, ["--evaluate"], "--evaluate", "no run", "runs/")
    script.main(*small, "--total-steps", 64)
    [older] = (tmp_path / "runs").iterdir()
    newest = Path("runs/a run of this name")
    script.main(*small, "--total-steps", 64, "--run-dir", newest)
    older.touch()
    for name, config in (("new", f'{{"script": "{script.name}.py"}}'), ("other", "{}")):
        (tmp_path / "runs" / name).mkdir()  # begun just now, of another script
        (tmp_path / "runs" / name / "config.json").write_text(config)
    (tmp_path / "runs/other/checkpoint.pt").touch()
    capsys.readouterr()
    [score] = script.main("--evaluate", "--episodes", 1)
    assert isinstance(score, float)
    assert re.match(f"playing {newest}/(best|checkpoint).pt$", capsys.readouterr().out, re.M)
    assert script.refused(capsys, 2, ["--evaluate", ""], "--evaluate", "need a whole checkpoint")
    assert script.refused(capsys, 2, ["--resume"], "--resume", "expected one argument")
