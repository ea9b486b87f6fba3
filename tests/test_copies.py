"""What two scripts both define under one name is one text, letter for letter."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROBLEM = {  # from pixels or from state vectors
    "__doc__", "Args", "train", "ActorCritic", "make_batch", "rollout", "PUBLISHED_BY",
    "PUBLISHED_SCORES", "evaluate", "MAY_CHANGE", "parse_args", "main", "update",
}  # fmt: skip

DIFFER = {  # where a pair's problems or algorithms differ
    ("ppo_atari", "ppo_continuous"): PROBLEM | {"ppo_loss", "anneal"},
    ("ppo_atari", "trpo_continuous"): PROBLEM,
    ("ppo_continuous", "trpo_continuous"): {
        "__doc__", "Args", "TASKS", "train", "update", "PUBLISHED_SCORES", "MAY_CHANGE", "main",
    },
}  # fmt: skip


def definitions(name):
    """{name: source} of a script's functions, classes, constants and docstring."""
    text = (ROOT / f"{name}.py").read_text()
    tree = ast.parse(text)
    found = {"__doc__": ast.get_docstring(tree)}
    for node in tree.body:
        source = ast.get_source_segment(text, node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = (source, [ast.unparse(d) for d in node.decorator_list])
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target): source for target in node.targets}
        elif isinstance(node, ast.If) and "__main__" in source:
            found["at the end"] = source
    return found


@pytest.mark.parametrize("first, second", DIFFER)
def test_what_two_scripts_share_is_the_same(first, second):
    """And a name that needs no exception any more leaves the list."""
    one, other = definitions(first), definitions(second)
    shared = one.keys() & other.keys()
    assert {name for name in shared if one[name] != other[name]} == DIFFER[first, second]
    assert shared >= {"gae", "estimate_advantages", "standardise", "Run", "load_checkpoint"}


def test_the_sections_of_the_three_stand_in_one_order():
    """So that their difference shows what the algorithms and problems are."""
    orders = []
    for path in sorted(ROOT.glob("*.py")):
        lines = path.read_text().splitlines()
        orders.append([line for line in lines if line.startswith(("# ---", "# ==="))])
    assert len(orders) == 3 and len(orders[0]) > 9 and orders == orders[:1] * 3
