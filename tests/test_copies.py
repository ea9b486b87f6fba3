"""What two scripts both define under one name is one text, letter for letter."""

import ast
import itertools
from pathlib import Path

ROOT = Path(__file__).parent.parent

CONTINUOUS = ("ppo_continuous", "trpo_continuous")
DIFFER = {  # where the problems or the algorithms differ
    "__doc__", "Args", "check", "TASKS", "train", "ActorCritic", "act", "rollout",
    "estimate_advantages", "ppo_loss", "anneal", "backpropagate", "update", "make_env",
    "LIBRARIES", "PUBLISHED_BY", "PUBLISHED_SCORES", "play", "evaluate", "parse_args", "main",
}  # fmt: skip
SAME = {  # of these, in the two scripts of one problem
    "ActorCritic", "act", "rollout", "estimate_advantages", "make_env", "LIBRARIES", "PUBLISHED_BY",
    "play", "evaluate", "parse_args",
}  # fmt: skip


def definitions(name):
    """{name: source} of a script's functions, classes, constants and docstring."""
    text = (ROOT / f"{name}.py").read_text()
    tree, lines = ast.parse(text), text.splitlines()
    found = {"__doc__": ast.get_docstring(tree)}
    for node in tree.body:
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = (source, [ast.unparse(d) for d in node.decorator_list])
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target): source for target in node.targets}
        elif isinstance(node, ast.If) and "__main__" in source:
            found["at the end"] = source
    return found


def test_what_two_scripts_share_is_the_same():
    """And a name that needs no exception any more leaves the list."""
    scripts = {name: definitions(name) for name in ("ppo_atari", *CONTINUOUS)}
    differing = set()
    for pair in itertools.combinations(scripts, 2):
        one, other = (scripts[name] for name in pair)
        shared = one.keys() & other.keys()
        found = {name for name in shared if one[name] != other[name]}
        assert found == (DIFFER - SAME if pair == CONTINUOUS else DIFFER) & shared, pair
        assert shared >= {"gae", "standardise", "Run", "load_checkpoint", "Output", "at the end"}
        differing |= found
    assert differing == DIFFER


def test_the_sections_of_the_three_stand_in_one_order():
    """So that their difference shows what the algorithms and problems are."""
    orders = []
    for path in sorted(ROOT.glob("*.py")):
        lines = path.read_text().splitlines()
        orders.append([line for line in lines if line.startswith(("# ---", "# ==="))])
    assert len(orders) == 3 and len(orders[0]) > 9 and orders == orders[:1] * 3
