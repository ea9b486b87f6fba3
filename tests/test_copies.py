"""What two scripts both define under one name is one text, letter for letter."""

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROBLEM = {  # from pixels or from state vectors
    "SETTINGS", "PUBLISHED_SCORES", "CHANGEABLE", "train", "ActorCritic", "ActorCritic.__init__",
    "ActorCritic.forward", "make_batch", "rollout", "update", "evaluate", "parse_args", "main",
}  # fmt: skip

DIFFER = {  # where a pair's problems or algorithms differ, and what they say of it
    ("ppo_atari", "ppo_continuous"): PROBLEM | {
        "PUBLISHED_BY", "standardise", "ppo_loss", "anneal", "choose_compile",
    },
    ("ppo_atari", "trpo_continuous"): PROBLEM | {"PUBLISHED_BY", "standardise"},
    ("ppo_continuous", "trpo_continuous"): {
        "SETTINGS", "TASKS", "PUBLISHED_SCORES", "CHANGEABLE", "train", "surrogate", "update",
        "main",
    },
}  # fmt: skip

EVERYWHERE = {  # what all three have, the same
    "gae", "estimate_advantages", "Run", "Run.__init__", "Run.__exit__", "Run.iterations",
    "Run.score", "Run.reached", "Run.log", "Run._write", "Run.save", "Run._save", "Run.draw",
    "write_whole", "load_checkpoint", "restore", "newest_run", "derive_seed", "fail",
    "make_parser", "SCRIPT", "ROWS", "at the end",
}  # fmt: skip


def definitions(path):
    """{name: source} of a script's functions, its classes' methods, its classes' beginnings, its
    constants, and what it does when it is run."""
    text = path.read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": source(text, method) for method in methods}
            found[node.name] = source(text, node).split("\n    def ")[0]
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = source(text, node)
        elif isinstance(node, ast.Assign):
            found |= {target.id: source(text, node) for target in node.targets}
        elif isinstance(node, ast.If):
            found["at the end"] = source(text, node)
    return found


def source(text, node):
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def test_every_pair_of_scripts_is_compared():
    names = sorted(path.stem for path in ROOT.glob("*.py"))
    assert list(itertools.combinations(names, 2)) == list(DIFFER)


@pytest.mark.parametrize("first, second", DIFFER)
def test_what_two_scripts_share_is_the_same(first, second):
    """And a name that needs no exception any more leaves the list."""
    one, other = (definitions(ROOT / f"{name}.py") for name in (first, second))
    shared = one.keys() & other.keys()
    assert len(shared) > (50 if "ppo_atari" not in (first, second) else 32)
    assert {name for name in shared if one[name] != other[name]} == DIFFER[first, second]
    assert shared - DIFFER[first, second] >= EVERYWHERE
    for script in (one, other):
        assert {name for name in script if name.split(".")[0] == "Run"} <= EVERYWHERE


def test_the_sections_of_the_three_stand_in_one_order():
    """So that their difference shows what the algorithms and problems are."""
    orders = []
    for path in sorted(ROOT.glob("*.py")):
        lines = path.read_text().splitlines()
        orders.append([line for line in lines if line.startswith(("# ---", "# ==="))])
    assert len(orders) == 3 and len(orders[0]) > 9 and orders == orders[:1] * 3
