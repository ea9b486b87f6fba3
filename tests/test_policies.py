"""plots/policies: trained policies that play at once."""

import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
POLICIES = sorted((ROOT / "plots/policies").glob("*.pt"))
SOLVED = {"cartpole": 475, "lunarlander": 200, "halfcheetah": 1500}


def test_every_policy_is_tested():
    assert {path.stem for path in POLICIES} == SOLVED.keys()


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_policy_plays_and_has_learned(path, capsys):
    """Ten episodes, in which the policy takes its most probable actions."""
    checkpoint = torch.load(path, weights_only=True)
    assert path.stat().st_size < 1e5 and not Path(checkpoint["settings"]["run_dir"]).is_absolute()
    script = importlib.import_module(Path(checkpoint["script"]).stem)
    flags = ["--evaluate", str(path), "--deterministic"]
    returns = script.main(flags)
    assert len(returns) == 10 and sum(returns) / 10 >= SOLVED[path.stem]
    assert capsys.readouterr().out.startswith(f"playing {path}\n")
