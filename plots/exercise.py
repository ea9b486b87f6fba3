"""Write the papers' equations yourself, and find planted errors; plots/exercises.md says how.

python plots/exercise.py DIR                 copy the three scripts, seven functions left blank
python plots/exercise.py DIR --check [gae]   grade the functions in DIR, or one of them
python plots/exercise.py DIR --bug 3         write DIR/bug3.py, a script with one error
python plots/exercise.py DIR --solution 3    what that error is
python plots/exercise.py DIR --table         run all errors in DIR, renew exercises.md's table
"""

import ast
import importlib.util
import io
import re
import sys
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # cases.py
PAGE = ROOT / "plots" / "exercises.md"
SCRIPTS = ("ppo_continuous", "ppo_atari", "trpo_continuous")
EQUATIONS = {  # of the functions to be written, in the order of the papers
    "ppo_loss": "PPO's Eq. 6, 7, 9, and on state vectors 8",
    "adapt_beta": "PPO's Sec. 4",
    "gae": "PPO's Eq. 11, 12",
    "surrogate": "TRPO's Eq. 14",
    "fisher_vector_product": "TRPO's App. C.1",
    "conjugate_gradient": "TRPO's App. C",
    "line_search": "TRPO's App. C",
}
SEEDS = (1, 2, 3)
SHOWN = {  # the table's scalars
    "ppo_continuous": "kl clip_fraction entropy explained_variance value_loss policy_loss score",
    "trpo_continuous": "kl step_fraction entropy explained_variance value_loss cg_residual score",
}

# ------------------------------------------------------------------------------- Planted errors


class Bug(SimpleNamespace):
    """An entry of bugs.toml."""

    def planted(self):
        """The script's text with the error in it."""
        text = source(self.script)
        assert text.count(self.right) == 1, f"{self.script}.py: need once {self.right!r}"
        return text.replace(self.right, self.wrong)

    def solution(self):
        lines = zip(source(self.script).splitlines(), self.planted().splitlines(), strict=True)
        k, right, wrong = next((k, *pair) for k, pair in enumerate(lines, 1) if pair[0] != pair[1])
        when = {"mean": "averaged over the run", "last": "at the last update"}[self.when]
        return (f"line {k} of {self.script}.py\n\n  right:  {right.strip()}\n"
                f"  wrong:  {wrong.strip()}\n\n{self.why.strip()}\n\nIt shows in {self.scalar}. "
                f"With {self.flags}, {when}, it is\n{self.side} {self.factor:g} × a healthy "
                f"run's, on each of three seeds.")  # fmt: skip


def source(script):
    return (ROOT / f"{script}.py").read_text("utf-8")


BUGS = [Bug(**bug) for bug in tomllib.loads((ROOT / "plots/bugs.toml").read_text("utf-8"))["bug"]]


def run(path, flags, seed, run_dir):
    """The scalars of each update of a short run."""
    script, rows = load(path), []

    class Run(script.Run):
        def log(self, episodes, stats):
            rows.append(stats)
            return super().log(episodes, stats)

        def save(self):
            """Nothing is needed but the scalars."""

    script.Run, own = Run, [*flags.split(), "--seed", str(seed), "--run-dir", str(run_dir)]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        script.train(script.parse_args(own)[0])
    return rows


def summary(rows, scalar):
    """A scalar at the first and the last update, and its mean over the run."""
    values = [row[scalar] for row in rows]
    return {"first": values[0], "mean": sum(values) / len(values), "last": values[-1]}


def table(folder):
    """A row for each error and each healthy run, of three seeds; a cell: first / mean / last."""
    lines = []
    for script, names in SHOWN.items():
        lines += [f"| `{script}.py` | {names.replace(' ', ' | ')} |", "| --- " * 8 + "|"]
        for flags in dict.fromkeys(bug.flags for bug in BUGS if bug.script == script):
            same = [k for k, b in enumerate(BUGS, 1) if (b.script, b.flags) == (script, flags)]
            rows = {f"**healthy**, `{flags}`": ROOT / f"{script}.py"}
            for label, path in (rows | {f"bug {k}": folder / f"bug{k}.py" for k in same}).items():
                own = folder / f"run{len(lines)}"
                runs = [run(path, flags, seed, own / f"seed{seed}") for seed in SEEDS]
                cells = [cell([summary(rows, name) for rows in runs]) for name in names.split()]
                lines.append(f"| {label} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
        lines.append("")
    return "\n".join(lines[:-1])


def cell(summaries):
    """First / mean / last, averaged over the seeds."""
    means = [sum(s[when] for s in summaries) / len(SEEDS) for when in ("first", "mean", "last")]
    means = [0 if abs(x) < 1e-6 else x for x in means]
    return " / ".join(f"{x:.2g}" if abs(x) < 99.5 else f"{x:.0f}" for x in means)


# ---------------------------------------------------------------------------- Blanks and grades


def functions(path):
    """{name: node} of the exercises in a script."""
    try:
        body = ast.parse(path.read_text("utf-8")).body
    except SyntaxError as e:
        sys.exit(f"{path}, line {e.lineno}: {e.msg}")
    return {node.name: node for node in body if getattr(node, "name", None) in EQUATIONS}


def blank(script):
    """A script whose exercises have no code left: arguments, docstrings and comments stay."""
    lines = source(script).splitlines(keepends=True)
    for name, node in reversed(functions(ROOT / f"{script}.py").items()):
        body = slice(node.body[0].end_lineno, node.end_lineno)
        comments = [line[line.index("# ") :] for line in lines[body]
                    if re.search(r"^ *# |# .*(Eq\.|paper|θ)", line)]  # fmt: skip
        comments.append(f'raise NotImplementedError("{EQUATIONS[name]}")\n')
        lines[body] = ["    " + line for line in comments]
    return "".join(lines)


def write(texts):
    """Write {path: text}, and no file that is there already."""
    if old := [str(path) for path in texts if path.exists()]:
        sys.exit(f"{', '.join(old)}: already there, and not overwritten; name another folder")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    print("wrote", *texts)


def load(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.stem} of {path.parent}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grade(folder, name):
    """Test each copy of a function that is not blank. Prints one line; returns if it is right."""
    import cases  # and with it torch, which takes seconds

    written, empty = [], []
    for path in (folder / f"{script}.py" for script in SCRIPTS):
        if node := functions(path).get(name):
            blank = all(isinstance(x, ast.Expr | ast.Raise) for x in node.body)
            (empty if blank else written).append(path)
    for path in written:
        try:
            script = load(path)
        except Exception as e:
            sys.exit(f"{path} cannot be imported, {type(e).__name__}: {e}")
        if failure := cases.first_failure(name, script, rel=1e-4, caught=Exception):
            print(f"{name} in {path.name}: {failure}")
            return False
    right, empty = (", ".join(path.name for path in paths) for paths in (written, empty))
    if not written:
        print(f"{name}: not written yet; it is {EQUATIONS[name]} (in {empty})")
    else:
        print(f"{name}: right in {right}" + (f"; still to be written in {empty}" if empty else ""))
    return bool(written)


def main(argv=None):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--check", nargs="?", const="all", choices=["all", *EQUATIONS], metavar="NAME")
    for name in ("--bug", "--solution"):
        add(name, type=int, choices=range(1, len(BUGS) + 1), metavar="NUMBER")
    add("--table", action="store_true")
    args = parser.parse_args(argv)
    if args.check:
        if not all((args.folder / f"{script}.py").exists() for script in SCRIPTS):
            sys.exit(f"{args.folder} lacks one of the scripts: first run this without --check")
        right = [grade(args.folder, name) for name in EQUATIONS if args.check in ("all", name)]
        sys.exit(not all(right))
    elif args.bug:
        path, bug = args.folder / f"bug{args.bug}.py", BUGS[args.bug - 1]
        write({path: bug.planted()})
        print(f"compare  {path} {bug.flags}\nwith     {bug.script}.py {bug.flags}\n"
              "for some seeds; the table has the means of three")  # fmt: skip
    elif args.solution:
        print(f"bug {args.solution}:", BUGS[args.solution - 1].solution())
    elif args.table:
        write({args.folder / f"bug{k}.py": bug.planted() for k, bug in enumerate(BUGS, 1)})
        new = re.sub(r"(?s)(?<=<!-- bugs -->\n).*?(?=<!-- end -->)",
                     lambda _: table(args.folder) + "\n", PAGE.read_text("utf-8"))  # fmt: skip
        PAGE.write_text(new, "utf-8", newline="\n")
    else:
        write({args.folder / f"{script}.py": blank(script) for script in SCRIPTS})


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has not
        sys.stdout.reconfigure(errors="replace")  # one that cannot show δ shows ?
    main()
