"""plots/policies: trained policies that play at once, of the commands that plots/README.md says."""

import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"^\| `(\w+)\.pt` \| `(\w+)\.py ?(.*)` \| ([\d.]+) \|$",
                  (ROOT / "plots/README.md").read_text(), re.M)  # fmt: skip
SOLVED = {"cartpole": 475, "lunarlander": 200, "halfcheetah": 1500, "breakout": 200}
LARGEST = {"breakout": 4e6}  # bytes; of the others 1e5
MACHINE = {"run_dir", "compile", "evaluate", "resume"}  # these say nothing of the training


def test_every_policy_is_in_the_table():
    policies = {path.stem for path in (ROOT / "plots/policies").glob("*.pt")}
    assert policies == {name for name, *_ in ROWS} == SOLVED.keys()


@pytest.mark.parametrize("name, script, flags, score", ROWS)
def test_a_policy_is_of_the_command_and_has_learned(name, script, flags, score):
    """Ten episodes of the most probable actions; of Breakout, where these can play for ever, one of
    sampled ones, the shortest of seeds 1 to 9."""
    path, module = ROOT / f"plots/policies/{name}.pt", importlib.import_module(script)
    sampled = name == "breakout"
    how = ["--episodes", "1", "--seed", "9"] if sampled else ["--deterministic"]
    how += ["--threads", "1"]  # two may wait for each other where the cores are busy
    checkpoint = torch.load(path, weights_only=True)
    assert path.stat().st_size < LARGEST.get(name, 1e5) and f"{checkpoint['best']:.0f}" == score
    settings, made = vars(module.parse_args(flags.split())[0]), checkpoint["settings"]
    names = {name for name in made.keys() & settings.keys() if made[name] is not None} - MACHINE
    assert len(names) > 20 and {k: made[k] for k in names} == {k: settings[k] for k in names}
    assert not Path(made["run_dir"]).is_absolute()
    returns = module.main(["--evaluate", str(path), *how])
    assert len(returns) == (1 if sampled else 10) and sum(returns) / len(returns) >= SOLVED[name]
