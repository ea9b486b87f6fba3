"""plots/exercise.py: right functions pass, blanks and wrong ones fail with a sentence that names
the case, and each planted error shows as its text says."""

import ast
import re

import cases
import exercise
import pytest
import torch

torch.set_num_threads(1)
PPO, TRPO = "ppo_continuous", "trpo_continuous"


def tree(path):
    """{name: node} of the exercises in a file."""
    return exercise.functions(path)


def check(folder, name="all"):
    """Grade a folder. Returns the exit status, of which 0 is False."""
    with pytest.raises(SystemExit) as end:
        exercise.main([str(folder), "--check", name])
    return end.value.code


@pytest.fixture
def student(tmp_path):
    """A folder with blanks."""
    exercise.main([str(tmp_path / "work")])
    return tmp_path / "work"


def test_blanks_keep_all_but_the_code(student):
    """Arguments, docstrings and the equations' names; the rest of a script is as it was."""
    for script in exercise.SCRIPTS:
        path, original = student / f"{script}.py", exercise.ROOT / f"{script}.py"
        blanks, solved = tree(path), tree(original)
        assert blanks.keys() == solved.keys() and "gae" in blanks
        for name, node in blanks.items():
            for part in (ast.get_docstring, lambda node: ast.unparse(node.args)):
                assert part(node) == part(solved[name])
            kept, full = (ast.get_source_segment(p.read_text("utf-8"), n)
                          for p, n in ((path, node), (original, solved[name])))  # fmt: skip
            equations = re.findall(r"Eq\. \d+", full)
            assert re.findall(r"Eq\. \d+", kept)[: len(equations)] == equations
            code = node.body[1:]
            assert len(code) == 1 and exercise.EQUATIONS[name] in ast.unparse(code[0])
        rest = [ast.dump(ast.Module([node for node in ast.parse(p.read_text("utf-8")).body
                                     if getattr(node, "name", "") not in solved], []))
                for p in (path, original)]  # fmt: skip
        assert rest[0] == rest[1]


def test_blanks_fail_with_a_sentence_and_are_never_overwritten(student, capsys):
    capsys.readouterr()
    assert check(student)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(exercise.EQUATIONS)
    for line, equation in zip(lines, exercise.EQUATIONS.values(), strict=True):
        assert equation in line
    path = student / "trpo_continuous.py"
    path.write_text("my work")
    (student / "ppo_atari.py").unlink()
    with pytest.raises(SystemExit, match=path.name):
        exercise.main([str(student)])
    assert path.read_text() == "my work" and not (student / "ppo_atari.py").exists()


def test_the_projects_own_functions_pass(student, capsys):
    """gae in one script of three is enough, and those that are still blank are named."""
    for script in exercise.SCRIPTS[::2]:
        (student / f"{script}.py").write_text(exercise.source(script), "utf-8")
    capsys.readouterr()
    assert not check(student)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(exercise.EQUATIONS)
    named = [re.findall(r"\w+\.py", line) for line in lines]
    assert named[0] == ["ppo_continuous.py", "ppo_atari.py"]
    assert named[2] == ["ppo_continuous.py", "trpo_continuous.py", "ppo_atari.py"]


@pytest.mark.parametrize("script, name, right, wrong, case", [
    (TRPO, "gae", "next_values - values", "next_values + values", "one step"),
    (TRPO, "gae", "gamma * gae_lambda * (1", "gamma * (1", "two steps"),
    (TRPO, "gae", "gamma * (1 - terminated) * next", "gamma * next", "terminal"),
    (TRPO, "gae", "gae_lambda * (1 - terminated) *", "gae_lambda *", "terminal"),
    (TRPO, "gae", "* (1 - truncated)\n", "\n", "time limit"),
    (TRPO, "gae", ") * next_values", ") * (1 - truncated) * next_values", "time limit"),
    (TRPO, "gae", "return torch.from_numpy(advantages)", "return advantages", "one step"),
    (TRPO, "gae", "return torch.from_numpy(advantages)", "return None", "one step"),
    (TRPO, "gae", "advantages[t] = advantage", "advantages[t] = advantage[0]", "two actors"),
    (PPO, "ppo_loss", "return -l_total", "return l_total", "Eq. 6"),
    (PPO, "ppo_loss", "surrogate = ratio", "surrogate = -ratio", "Eq. 6"),
    (PPO, "ppo_loss", "torch.min(", "torch.max(",
     "Eq. 7, L^CLIP, with ε = 0.2: one sample whose ratio is 1.5 and whose Â is 2:"),
    (PPO, "ppo_loss", "torch.min(surrogate, clipped * advantages)", "(clipped * advantages)",
     "Eq. 7, L^CLIP, with ε = 0.2: one sample whose ratio is 1.5 and whose Â is −2:"),
    (PPO, "ppo_loss", "clipped * advantages).mean()", "clipped * advantages).sum()", "two samples"),
    (PPO, "ppo_loss", "targets).square().mean()", "targets).square().mean() / 2", "value loss"),
    (PPO, "ppo_loss", "net.value(obs)", "net.critic(obs)", "value loss"),
    (PPO, "ppo_loss", "+ args.ent_coef", "- args.ent_coef", "entropy"),
    (PPO, "ppo_loss", "surrogate - beta", "surrogate + beta", "Eq. 8"),
    (PPO, "ppo_loss", "net.distribution(pi_old), pi)", "pi, net.distribution(pi_old))", "Eq. 8"),
    (PPO, "ppo_loss", "(pi.log_prob(", "(getattr(pi, 'base_dist', pi).log_prob(", "normal"),
    (PPO, "ppo_loss", "advantages = standardise(advantages)", "pass", "standardises"),
    (PPO, "ppo_loss", "log_probs).exp()", "log_probs).exp().detach()", "whole"),
    (PPO, "ppo_loss", '"clip_fraction": clip_fraction', "", "the statistics"),
    ("ppo_atari", "ppo_loss", "torch.min(ratio", "torch.max(ratio", "1.5 and whose Â is 2:"),
    ("ppo_atari", "ppo_loss", "entropy = -(log_pi", "entropy = (log_pi", "entropy bonus"),
    (PPO, "adapt_beta", "beta = beta / 2", "beta = beta * 2", "KL 0 "),
    (PPO, "adapt_beta", "beta = beta * 2", "beta = beta / 2", "KL 9 "),
    (PPO, "adapt_beta", "kl > kl_target * 1.5", "kl > kl_target", "KL 0.02249 "),
    (PPO, "adapt_beta", "kl < kl_target / 1.5", "kl < kl_target", "KL 0.01 "),
    (TRPO, "surrogate", "samples.log_probs).exp()", "samples.log_probs)", "one sample"),
    (TRPO, "surrogate", "samples.advantages).mean()", "samples.advantages).sum()", "two samples"),
    (TRPO, "fisher_vector_product", "create_graph=True", "create_graph=False", "s = 2"),
    (TRPO, "fisher_vector_product", "net.distribution(pi.detach())", "net.distribution(pi)",
     "s = 2"),
    (TRPO, "fisher_vector_product", "net.distribution(pi)).mean()", "net.distribution(pi)).sum()",
     "s = 2 and s = −1"),
    (TRPO, "fisher_vector_product", ", retain_graph=True", "", "s = 2"),
    (TRPO, "conjugate_gradient", "residual -= alpha * a_p", "pass", "identity"),
    (TRPO, "conjugate_gradient", "residual_sq <= enough", "residual_sq > enough", "identity"),
    (TRPO, "conjugate_gradient", "residual, p = b.clone()", "residual, p = b", "identity"),
    (TRPO, "conjugate_gradient", "residual_sq / curvature", "curvature / residual_sq",
     "A = diag(1, 4), b = (1, 2), one iteration"),
    (TRPO, "conjugate_gradient", "residual_sq / previous", "previous / residual_sq",
     "two iterations"),
    (TRPO, "conjugate_gradient", "residual_sq.sqrt()", "residual_sq",
     "A = diag(1, 4), b = (1, 2), one iteration"),
    (TRPO, "conjugate_gradient", "enough = tolerance * residual_sq", "enough = tolerance",
     "tolerance is 1"),
    (TRPO, "line_search", "enough < improvement < inf", "improvement < enough", "first try"),
    (TRPO, "line_search", "enough < improvement < inf", "enough <= improvement", "as it was"),
    (TRPO, "line_search", " and kl <= args.max_kl", "", "KL is above δ"),
    (TRPO, "line_search", "kl <= args.max_kl", "kl < args.max_kl", "exactly δ"),
    (TRPO, "line_search", "fraction *= args", "fraction = args", "first two tries"),
    (TRPO, "line_search", "to_parameters(theta_old, weights)", "to_parameters(theta_old + "
     "fraction * full_step, weights)", "every try"),
    (TRPO, "line_search", "return 0.0, 0.0, 0.0", "return fraction, improvement, kl", "every try"),
])  # fmt: skip
def test_a_wrong_answer_fails_at_the_case_it_gets_wrong(script, name, right, wrong, case, tmp_path):
    """In a sentence that says what was expected and what came, or which line raised what."""
    path, text = tmp_path / f"{script}.py", exercise.source(script)
    node, lines = tree(exercise.ROOT / path.name)[name], text.splitlines(keepends=True)
    body = slice(node.lineno - 1, node.end_lineno)
    function = "".join(lines[body])
    assert function.count(right) == 1
    lines[body] = [function.replace(right, wrong)]
    path.write_text("".join(lines), "utf-8")
    failure = cases.first_failure(name, exercise.load(path), 1e-4, Exception)
    assert case in failure and len(failure.splitlines()) == 1


def test_an_exception_is_a_sentence_with_its_line(student, capsys):
    """And so is a file that cannot be read as Python, or imported."""
    path = student / "ppo_continuous.py"
    text = path.read_text("utf-8")
    mine = text.replace('raise NotImplementedError("PPO\'s Sec. 4")', "return beta / 0")
    path.write_text(mine, "utf-8")
    capsys.readouterr()
    assert check(student, "adapt_beta")
    [line] = capsys.readouterr().out.splitlines()
    number = mine[: mine.index("beta / 0")].count("\n") + 1
    assert "ZeroDivisionError" in line and re.findall(r"line (\d+)", line) == [str(number)]
    path.write_text(mine + "1 / 0\n", "utf-8")
    assert "ZeroDivisionError" in check(student, "adapt_beta")
    path.write_text(text + "def f(:\n", "utf-8")
    assert re.findall(r"line (\d+)", check(student, "gae")) == [str(text.count("\n") + 1)]


# ------------------------------------------------------------------------------- Planted errors

BUGS = range(1, len(exercise.BUGS) + 1)


def shows(bug, healthy, own):
    """Whether a run's scalars differ as they should from a healthy run's with that seed."""
    healthy, own = (exercise.summary(rows, bug.scalar)[bug.when] for rows in (healthy, own))
    return own > bug.factor * healthy if bug.side == "above" else own < bug.factor * healthy


def hold(numbers, seed, folder, *more):
    """Whether errors show as their solutions say, beside healthy runs with the same seed."""
    healthy = {}
    for number in numbers:
        bug = exercise.BUGS[number - 1]
        exercise.main([str(folder), "--bug", str(number)])
        flags = " ".join([bug.flags, *more])
        if (key := (bug.script, bug.flags)) not in healthy:
            path = exercise.ROOT / f"{bug.script}.py"
            healthy[key] = exercise.run(path, flags, seed, folder / f"healthy{number}")
        own = exercise.run(folder / f"bug{number}.py", flags, seed, folder / f"run{number}")
        assert shows(bug, healthy[key], own), number
        assert not shows(bug, healthy[key], healthy[key]), number


@pytest.mark.parametrize("number", BUGS)
def test_a_planted_error_is_one_line_that_its_solution_names(number, tmp_path, capsys):
    exercise.main([str(tmp_path), "--bug", str(number)])
    bug, path = exercise.BUGS[number - 1], tmp_path / f"bug{number}.py"
    right, wrong = exercise.source(bug.script).splitlines(), path.read_text("utf-8").splitlines()
    [line] = [k for k, pair in enumerate(zip(right, wrong, strict=True), 1) if len({*pair}) == 2]
    compile(path.read_text("utf-8"), path, "exec")
    told = capsys.readouterr().out
    assert bug.scalar not in told and bug.flags in told
    exercise.main([str(tmp_path), "--solution", str(number)])
    told = capsys.readouterr().out
    assert all(text in told for text in (f"line {line} ", wrong[line - 1].strip(), bug.scalar))
    with pytest.raises(SystemExit, match=path.name):
        exercise.main([str(tmp_path), "--bug", str(number)])


def test_two_planted_errors_show_in_three_updates(tmp_path):
    hold((2, 7), 1, tmp_path, "--total-steps 3072")


@pytest.mark.slow
@pytest.mark.parametrize("seed", exercise.SEEDS)
def test_all_planted_errors_show_as_their_solutions_say(seed, tmp_path):
    hold(BUGS, seed, tmp_path)


def test_the_page_has_a_row_for_each_error_and_each_healthy_run():
    """Else: .venv/bin/python plots/exercise.py DIR --table"""
    _, _, rest = exercise.PAGE.read_text("utf-8").partition("<!-- bugs -->")
    rows = rest.partition("<!-- end -->")[0]
    assert sorted(map(int, re.findall(r"^\| bug (\d+) \|", rows, re.M))) == list(BUGS)
    settings = {(bug.script, bug.flags) for bug in exercise.BUGS}
    assert len(re.findall(r"^\| \*\*healthy", rows, re.M)) == len(settings)
