"""README.md says what is so: its pointers, flags, commands and files."""

import ast
import re
from pathlib import Path

import pytest

import ppo_atari
import ppo_continuous

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def source_of(name):
    """The source of a top-level definition of ppo_atari.py, its comments and docstring too."""
    text = (ROOT / "ppo_atari.py").read_text()
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        names = [node.name] if hasattr(node, "name") else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if name in names:
            return "".join(lines[node.lineno - 1 : node.end_lineno])
    raise AssertionError(f"{name} is not in ppo_atari.py")


POINTERS = re.findall(r"^\| ((?:Algorithm|Eq\.|Table|Sec\.)[^|]*) \| `(\w+)` \|$", README, re.M)


def test_the_guide_has_pointers():
    assert len(POINTERS) >= 12


@pytest.mark.parametrize("place, name", POINTERS)
def test_pointers_point_at_the_right_place(place, name):
    """Each part of a pointer ("Sec. 6.4, [Mni+16]") stands in the source that it points at."""
    source = " ".join(source_of(name).split())
    for part in place.split(", "):
        number = part.removeprefix("Eq. ")
        pattern = rf"Eq\. (\d+, )*{number}\b" if number != part else rf"{re.escape(part)}(?!\w)"
        assert re.search(pattern, source), (part, name)


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"@[A-Z]+@|TODO|XXX", README)


def test_flags_exist():
    parsers = [script.make_parser() for script in (ppo_atari, ppo_continuous)]
    flags = {flag for p in parsers for action in p._actions for flag in action.option_strings}
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", README))
    assert mentioned - flags - {"--logdir", "--only"} == set()


def test_continuous_integration_runs_the_same_test_command():
    [command] = re.findall(r"^python3 -m venv .* -m pytest$", README, re.M)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_files_exist():
    for name in re.findall(r"\]\(((?!http)[^)]+)\)", README) + re.findall(
        r"\bplots/\w+\.py", README
    ):
        assert (ROOT / name).exists(), name


def test_defaults_named_in_readme():
    args, _ = ppo_atari.parse_args([])
    assert f"| epochs K | {args.num_epochs} | 4 |" in README
    assert f"norm clipped at {args.max_grad_norm}" in README
    assert f"Adam's ε {args.adam_eps:.0e}".replace("e-05", "e-5") in README
