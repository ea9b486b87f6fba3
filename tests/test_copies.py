"""What two scripts both define under one name is one text, letter for letter."""

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROBLEM = {  # from pixels or from state vectors
    "make_parser", "parse_args", "ActorCritic", "ActorCritic.__init__", "ActorCritic.forward",
    "make_batch", "rollout", "update", "Records.__init__", "Records.draw", "Records.save",
    "evaluate", "main",
}  # fmt: skip

DIFFER = {  # where a pair's problems or algorithms differ, and what they say of it
    ("ppo_atari", "ppo_continuous"): PROBLEM | {"ppo_loss", "anneal"},
    ("ppo_atari", "trpo_continuous"): PROBLEM,
    ("ppo_continuous", "trpo_continuous"): {
        "make_parser", "surrogate", "gradient_step", "update", "Records.draw", "main",
    },
}  # fmt: skip


def definitions(path):
    """{name: source} of a script's functions, its classes' methods and its classes' beginnings."""
    text = path.read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": source(text, method) for method in methods}
            found[node.name] = source(text, node).split("\n    def ")[0]
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = source(text, node)
    return found


def source(text, node):
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def test_every_pair_of_scripts_is_compared():
    names = sorted(path.stem for path in ROOT.glob("*.py"))
    assert list(itertools.combinations(names, 2)) == list(DIFFER)


@pytest.mark.parametrize("first, second", DIFFER)
def test_what_two_scripts_share_is_the_same(first, second):
    """And a name that needs no exception any more leaves the list."""
    one, other = (definitions(ROOT / f"{name}.py") for name in (first, second))
    shared = one.keys() & other.keys()
    assert len(shared) > (50 if "ppo_atari" not in (first, second) else 25)
    assert {name for name in shared if one[name] != other[name]} == DIFFER[first, second]
