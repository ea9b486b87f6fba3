"""What two scripts both define under one name is one text, letter for letter."""

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

DIFFER = {  # where the scripts' problems differ, and what they say of it
    "make_parser", "parse_args", "ActorCritic", "ActorCritic.__init__", "ActorCritic.forward",
    "make_batch", "rollout", "ppo_loss", "anneal", "update", "Records.save", "Records.draw",
    "Records.__init__", "evaluate", "main",
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


def pairs():
    return list(itertools.combinations(sorted(ROOT.glob("*.py")), 2))


@pytest.mark.parametrize("first, second", pairs(), ids=lambda path: path.stem)
def test_what_two_scripts_share_is_the_same(first, second):
    one, other = definitions(first), definitions(second)
    shared = one.keys() & other.keys() - DIFFER
    assert len(shared) > 10
    drifted = [name for name in sorted(shared) if one[name] != other[name]]
    assert not drifted, f"{first.name} and {second.name} differ in {', '.join(drifted)}"


def test_every_exception_is_one():
    """A name that needs no exception any more leaves the list."""
    needed = set()
    for first, second in pairs():
        one, other = definitions(first), definitions(second)
        needed |= {name for name in one.keys() & other.keys() if one[name] != other[name]}
    assert needed == DIFFER
