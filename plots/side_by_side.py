r"""Draw plots/side_by_side.html: each equation of the papers beside the lines that compute it.

  python plots/side_by_side.py             draw it, and renew the line numbers in README.md's links
  python plots/side_by_side.py --check     only say whether one of them is out of date

The page is one file, which needs nothing from elsewhere. EQUATIONS has the papers' formulas in
LaTeX and what is to be said of each; VIEWS says which lines of which function of a script belong
to each; SYMBOLS which names in the code are which symbols. A line that is not found stops the
drawing, so the page cannot drift from the scripts. README.md links a definition as
[`name`](script.py#L123).
"""

import ast
import html
import re
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import latex2mathml.converter
from pygments import lex
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

ROOT = Path(__file__).resolve().parent.parent
PAGE, README = ROOT / "plots" / "side_by_side.html", ROOT / "README.md"
PPO, TRPO = "https://arxiv.org/pdf/1707.06347#page=", "https://arxiv.org/pdf/1502.05477#"

# ----------------------------------------------------------------------------------- Equations

OLD, E, A_T = r"\theta_\text{old}", r"\hat{\mathbb{E}}_t", r"\hat{A}_t"
PI, PI_OLD = r"\pi_\theta(\cdot\,|\,s_t)", r"\pi_{\theta_\text{old}}(\cdot\,|\,s_t)"
KL, DKL = rf"\text{{KL}}[{PI_OLD},\ {PI}]", rf"\overline{{D}}_\text{{KL}}({OLD},\theta)"
STATES = r"\mathbb{E}_{s \sim \rho_{" + OLD + "}"
SURROGATE = rf"{{r_t(\theta)\,{A_T}}}"  # {...}: one part, to be marked as a whole
CLIPPED = r"{\text{clip}(r_t(\theta), 1-\epsilon, 1+\epsilon)}"

# key: (where in the paper and what; the paper's page, or "" if the paper lacks it; formulas, in
# which \\ is where a line may break; why it is there, and what else to know)
EQUATIONS = {
    "ppo-algorithm": ("Algorithm 1, the whole method", PPO + "5", [],
        "Collect a rollout, estimate advantages, take many steps on the rollout; then θ becomes "
        "θ_old and it begins anew. The line numbers are ours."),
    "table-5": ("Table 5, the settings on Atari", PPO + "10", [
        r"T = 128,\quad \\ \text{Adam } 2.5 \cdot 10^{-4}\,\alpha,\quad \\ K = 3,\quad \\ "
        r"M = 32 \times 8",
        r"\gamma = 0.99,\quad \lambda = 0.95,\quad \\ N = 8",
        r"\epsilon = 0.1\,\alpha,\quad \\ c_1 = 1,\quad c_2 = 0.01"],
        "How much data each update gets and how far it may go, in the table's order."),
    "table-3": ("Table 3, the settings on MuJoCo", PPO + "10", [
        r"T = 2048,\quad \\ \text{Adam } 3 \cdot 10^{-4},\quad \\ K = 10,\quad \\ M = 64",
        r"\gamma = 0.99,\quad \lambda = 0.95"],
        "How much data each update gets and how far it may go, in the table's order; it has no N."),
    "table-1": ("Table 1, the objectives compared", PPO + "6", [
        r"\epsilon = 0.2,\quad \\ d_\text{targ} = 0.01,\quad \\ \beta = 1"],
        "Three ways to stay near the old policy: clipping (ε = 0.2 came out best), a fixed penalty "
        "and an adaptive one (its best target is 0.01; its β begins at 1)."),
    "alpha": ("Table 5, annealing", PPO + "10", [r"\alpha = 1 - \frac{i}{I}"],
        "Steps get smaller towards the end: in iteration i of I, counted from 0, α multiplies "
        "Adam's step size and ε. It falls linearly from 1 to 0."),
    "alpha-mujoco": ("Annealing on MuJoCo", "", [r"\alpha = 1 - \frac{i}{I}"],
        "Steps get smaller towards the end: in iteration i of I, counted from 0, α multiplies "
        "Adam's step size, and ε too with --anneal both. The paper does so on Atari only."),
    "atari-network": ("Sec. 6.4, the networks", PPO + "8", [r"\pi_\theta(a\,|\,s),\quad V(s)"],
        "One network reads the screen for policy and value, which have a linear head each. First "
        "branch: Sec. 6.4's (--network paper); the default is Mnih et al.'s of 2015, larger."),
    "network": ("Sec. 6.1, the networks", PPO + "6", [r"\pi_\theta(a\,|\,s),\quad V(s)"],
        "The policy says how probable each action is, the value what return to expect. Two "
        "networks of two layers of 64 tanh units; the paper gives no size for V's. The standard "
        "deviation of a Gaussian does not depend on the state."),
    "act": ("Algorithm 1, line 3, acting", PPO + "5", [r"a_t ∼ " + PI_OLD],
        "The old policy collects the samples from which the new one is made. Softmax: add "
        "Gumbel noise to the logits, take the largest. Gaussian: mean plus std times normal noise. "
        "On vectors `act` runs in numpy, as `act_in_numpy`, which is faster. Eq. 6 and 12 need the "
        "log-probabilities and values."),
    "eq-12": ("Eq. 12, the error of the value", PPO + "5", [
        r"\delta_t = r_t + \gamma V(s_{t+1}) \\ {} - V(s_t)"],
        "It says how much better a step went than V expected. Not in the paper: the factor 1 − "
        "terminated, as nothing follows a terminal state; at a time limit, V of the last state (on "
        "Atari the limit counts as the end)."),
    "eq-11": ("Eq. 11, generalised advantage estimation", PPO + "5", [
        A_T + r" = \delta_t + (\gamma\lambda)\,\delta_{t+1} + \cdots \\ "
        r"{} + (\gamma\lambda)^{T-t-1}\,\delta_{T-1}",
        A_T + r" = \delta_t + \gamma\lambda\,\hat{A}_{t+1}"],
        "It says how much better an action was than the policy's average. A large λ adds noise, "
        "a small one the error of V. Summed from the end, by the second line. Not in the paper: "
        "the factors (1 − …), which end the sum with its episode. (Printed there: T−t+1.)"),
    "targets": ("Sec. 5, the value's target", PPO + "5", [
        r"V_t^\text{targ} = " + A_T + " + V(s_t)"],
        "V needs something to learn from in Eq. 9. The paper does not say what; this, the "
        "λ-return, is the usual choice."),
    "standardised": ("Standardised advantages", "", [
        A_T + r" \leftarrow (" + A_T + r" - \text{mean}) \,/\, \text{std}"],
        "Gradients then have a similar size whatever the scale of a task's rewards. PPO does it "
        "over the minibatch (or the rollout: --norm-adv rollout), TRPO over the rollout. On Atari "
        "the advantage is first set to 0 where FIRE was pressed instead of the policy's action."),
    "ratio": ("Eq. 6, the probability ratio", PPO + "3", [
        r"r_t(\theta) = \frac{\pi_\theta(a_t\,|\,s_t)}{\pi_{" + OLD + r"}(a_t\,|\,s_t)}"],
        "It says how much more probable an action is now than when it was taken; it is 1 at "
        "θ_old. Computed as the exponential of the difference of log-probabilities."),
    "cpi": ("Eq. 6, the surrogate without a constraint", PPO + "3", [
        r"L^{\text{CPI}}(\theta) = " + rf"{E}[{SURROGATE}]"],
        "At θ_old its gradient is the policy gradient: it says which way to go, but not how far. "
        "Eq. 7 and 8 change it sample by sample, before the mean."),
    "eq-7": ("Eq. 7, the clipped surrogate", PPO + "3", [
        r"L^{\text{CLIP}}(\theta) = \\ " + rf"{E}[\min({SURROGATE}, \\ {CLIPPED}\,{A_T})]"],
        "It removes the incentive to move the ratio out of [1 − ε, 1 + ε]. With a positive "
        "advantage the term stops growing at 1 + ε, with a negative one at 1 − ε: beyond, the "
        "clipped term is the smaller one, and it has no gradient. On the other side the minimum "
        "keeps the unclipped term, so a step that made things worse can be undone."),
    "eq-8": ("Eq. 8, the penalised surrogate", PPO + "4", [
        r"L^{\text{KLPEN}}(\theta) = \\ " + rf"{E}[{SURROGATE} - \\ \beta\,{KL}]"],
        "The alternative to clipping: distance from the old policy costs something."),
    "sec-4": ("Sec. 4, the adaptive penalty", PPO + "4", [
        rf"d = {E}[{KL}]",
        r"d < d_\text{targ} / 1.5\ \Rightarrow\ \beta \leftarrow \beta / 2",
        r"d > d_\text{targ} \times 1.5\ \Rightarrow\ \beta \leftarrow \beta \times 2"],
        "No one β suits every task, so β follows the distance that updates make. d, the mean KL "
        "over the whole rollout, says whether β is halved, doubled or kept for the next."),
    "eq-9": ("Eq. 9, the whole objective", PPO + "5", [
        r"L_t^{\text{CLIP+VF+S}}(\theta) = \\ " + E + r"[L_t^{\text{CLIP}}(\theta) - c_1\,"
        r"L_t^{\text{VF}}(\theta) \\ {} + c_2\,S[\pi_\theta](s_t)]",
        r"L_t^{\text{VF}}(\theta) = (V(s_t) - V_t^\text{targ})^2"],
        "One loss trains policy and value: the surrogate, less the value's squared error, plus "
        "the entropy, to keep the policy exploring. Optimisers minimise: the loss is minus this."),
    "epochs": ("Algorithm 1, line 6, the epochs", PPO + "5", [
        r"K\ \text{epochs},\quad \\ M \le N\,T"],
        "Each sample is used several times; Eq. 7 and 8 are what allows that. K passes over the "
        "T·N samples, each in another order, in minibatches of M: one step of Adam for each."),
    "trpo-algorithm": ("Sec. 6, the whole method", TRPO + "section.6", [],
        "Collect a rollout; take one step, in the direction that a quadratic model of the KL "
        "gives, as far as that model and a line search allow; fit the critic. The words are ours."),
    "trpo-settings": ("App. E, the settings", TRPO + "appendix.E", [
        r"\delta = 0.01,\quad \gamma = 0.99"],
        "δ, the size of the trust region, says how far an update may go. (10 iterations of "
        "conjugate gradient: App. C.1. The other values are Baselines' or Spinning Up's.)"),
    "trpo-network": ("App. D, the networks", TRPO + "appendix.D", [
        r"\pi_\theta(a\,|\,s),\quad V(s)"],
        "The policy says how probable each action is, the value what return to expect. The "
        "paper's policy is smaller; this one is PPO's. The critic V is not in the paper."),
    "sec-5-1": ("Sec. 5.1, acting, \"single path\"", TRPO + "section.5", [
        r"q(a\,|\,s) = \pi_{" + OLD + r"}(a\,|\,s)"],
        "The old policy collects the samples from which the new one is made, along whole "
        "trajectories. Softmax: add Gumbel noise to the logits, take the largest. Gaussian: mean "
        "plus std times normal noise. `act` runs in numpy, as `act_in_numpy`, which is faster."),
    "eq-14": ("Eq. 14, the surrogate", TRPO + "section.5", [
        r"\underset{\theta}{\text{maximise}}\quad \\ " + STATES + r",\,a \sim q} [\frac{"
        r"\pi_\theta(a\,|\,s)}{q(a\,|\,s)}\,Q_{" + OLD + r"}(s,a) ]"],
        "It estimates, from the old policy's samples, how good another policy would be; q is the "
        "old policy. Advantages stand for Q: subtracting V(s) changes it only by a constant."),
    "eq-14-kl": ("Eq. 14, the trust region", TRPO + "section.5", [
        r"\text{subject to}\quad \\ " + STATES + r"}[D_\text{KL}(\pi_{" + OLD
        + r"}(\cdot\,|\,s)\,\|\,\\ \pi_\theta(\cdot\,|\,s))] \le \delta"],
        "The surrogate can be trusted only near the old policy: the mean KL over the states, from "
        "the old policy to the new, is at most δ."),
    "gradient": ("App. C, the gradient", TRPO + "appendix.C", [
        r"g = \nabla_\theta L(\theta)\,|_{\theta=" + OLD + "}"],
        "It says which way the surrogate grows. At θ_old it is the policy gradient."),
    "fisher": ("App. C.1, the Fisher-vector product", TRPO + "appendix.C", [
        r"A\,y = \nabla_\theta\,(\nabla_\theta\," + DKL + r" \cdot y)\,|_{\theta=" + OLD + "}"],
        "A, the Hessian of the mean KL at θ_old, says how much the policy changes with its "
        "weights. For W weights it has W × W numbers, so only A y is computed. The paper names "
        "this way beside its own: differentiate the KL twice."),
    "cg": ("App. C, conjugate gradient", TRPO + "appendix.C", [r"s \approx A^{-1} g"],
        "The direction that gains most for a given KL, without inverting A: one product with A an "
        "iteration. Not in the paper: both early stops, and 0.1 added to A's diagonal (damping)."),
    "beta": ("App. C, the longest step", TRPO + "appendix.C", [
        r"\beta = \sqrt{2\delta\,/\,(s^T A\,s)}"],
        "It says how far along s the quadratic model of the KL, ½ β² sᵀA s, stays within δ. With "
        "the damping in A the step is a little shorter."),
    "line-search": ("App. C, the line search", TRPO + "appendix.C", [
        r"\theta = " + OLD + r" + \beta\,s",
        r"L_{" + OLD + r"}(\theta) - \mathcal{X}[" + DKL + r" \le \delta]"],
        "The model is only a model, so the true surrogate and KL decide: β shrinks until L is "
        "better than at θ_old and the KL at most δ. (𝒳 is 0 where its condition holds, infinite "
        "elsewhere.) Not in the paper: a limit of tries, after which θ_old is kept; a least "
        "improvement other than 0 (--accept-ratio)."),
    "critic": ("A critic", "", [r"(V(s_t) - V_t^\text{targ})^2"],
        "Advantages need V, which learns from their targets after the policy's step (Baselines)."),
}  # fmt: skip

# --------------------------------------------------------------------------------------- Lines

LOOP = ("train", "for iteration in", "break")
GAE = [
    ("eq-12", ("gae", "deltas ="), ("rollout", "batch.values", "batch.next_values =")),
    ("eq-11", ("gae", "decay =", "advantages[t] =")),
    ("targets", ("estimate_advantages", "batch.targets =")),
]  # fmt: skip
STANDARDISE, CRITIC = ("standardise", "return"), ("ActorCritic", "self.critic(obs)")
NETWORK = [("ActorCritic", "self.actor =", "self.log_std ="), ("mlp", "return"),
           ("ActorCritic", "out = self.actor", "self.log_std"),
           ("ActorCritic", "if self.discrete:", "return Independent"), CRITIC]  # fmt: skip
SAMPLE = [("rollout", "noise = draw_noise", "actions[t] ="), ("draw_noise", "noise =", "log_std"),
          ("act", "out =", "return"), ("rollout", "batch.obs =", "batch.values =")]  # fmt: skip
SURROGATE_LINE = ("ppo_loss", "surrogate =")
VIEWS = {  # script: (equation, (definition, a text of its first line, of its last), ...)
    "ppo_atari": [
        ("ppo-algorithm", ("", "Algorithm 1", "8  end for"), LOOP),
        ("table-5", ("Args", "num_steps:", "anneal:")),
        ("atari-network", ("ActorCritic", 'if network == "paper"', "self.value_head ="),
                          ("ActorCritic", "x = frames.to", "return self.policy_head")),
        ("act", ("rollout", "for t in range", "act_fn(net"),
                ("act", "logits, values =", "log_probs =")),
        ("eq-12", ("gae", "deltas ="), ("rollout", "frames = games", "batch.next_values =")),
        *GAE[1:],
        ("standardised", ("estimate_advantages", "(1 - batch.fired"),
                         ("ppo_loss", "args.norm_adv ==", "standardise("), STANDARDISE),
        ("ratio", ("ppo_loss", "logits, new_values =", " ratio =")),
        ("eq-7", ("ppo_loss", "clipped =", "l_clip =")),
        ("eq-9", ("ppo_loss", "value_errors =", "l_total =")),
        ("alpha", ("anneal", "alpha =", "return")),
        ("epochs", ("update", "for _ in range", "optimizer.step()")),
    ],
    "ppo_continuous": [
        ("ppo-algorithm", ("", "Algorithm 1", "8  end for"), LOOP),
        ("table-3", ("Args", "num_steps:", "num_envs:")),
        ("table-1", ("Args", "objective:", "kl_beta:")),
        ("network", *NETWORK),
        ("act", *SAMPLE),
        *GAE,
        ("standardised", ("ppo_loss", "args.norm_adv ==", "standardise("), STANDARDISE),
        ("ratio", ("ppo_loss", "pi, values =", " ratio =")),
        ("cpi", SURROGATE_LINE, ("ppo_loss", 'objective == "none"', "l_policy =")),
        ("eq-7", SURROGATE_LINE, ("ppo_loss", 'objective == "clip"', "torch.min(")),
        ("eq-8", SURROGATE_LINE, ("ppo_loss", "elif args.objective in", "l_policy =")),
        ("sec-4", ("mean_kl", "return"),
                  ("train", 'args.objective == "kl-adaptive"', "adapt_beta("),
                  ("adapt_beta", "if kl <", "return")),
        ("eq-9", ("ppo_loss", "l_vf =", "l_total =")),
        ("alpha-mujoco", ("anneal", "alpha =", "return")),
        ("epochs", ("update", "for epoch in range", "optimizer.step()"),
                   ("backpropagate", "minibatch =", "return")),
    ],
    "trpo_continuous": [
        ("trpo-algorithm", ("", "The practical", "6  end for"), LOOP),
        ("trpo-settings", ("Args", "max_kl:", "gamma:")),
        ("trpo-network", *NETWORK),
        ("sec-5-1", *SAMPLE),
        *GAE,
        ("standardised", ("update", "args.norm_adv ==", "standardise("), STANDARDISE),
        ("eq-14", ("surrogate", "ratio =", "return")),
        ("eq-14-kl", ("trust_region_step", "def measure", "kl_divergence"),
                     ("line_search", "if enough <", "return fraction")),
        ("gradient", ("trust_region_step", "l_old =", " g =")),
        ("fisher", ("fisher_vector_product", "pi = net.pi_params", "return product"),
                   ("trust_region_step", "args.fvp_fraction", "product =")),
        ("cg", ("conjugate_gradient", "def", "return x"),
               ("trust_region_step", "def damped", "s, residual =")),
        ("beta", ("trust_region_step", "s_a_s =", "full_step =")),
        ("line-search", ("line_search", "def", "return 0.0")),
        ("critic", ("fit_critic", "for _ in range", "optimizer.step()")),
    ],
}  # fmt: skip
LESSON = [  # how PPO becomes TRPO: (name, what to see, PPO's lines, TRPO's lines)
    ("The loop", "Both collect a rollout, estimate advantages and update. What differs is blue: "
     "another `update`, and PPO's settings that change from one iteration to the next.",
     [LOOP], [LOOP]),
    ("The update", "PPO takes many small steps: K passes over the samples, in minibatches. TRPO "
     "takes one step on the whole rollout, as large as allowed; then it fits its critic.",
     [("update", "for epoch in range", "optimizer.step()")],
     [("update", "stats = trust_region_step", "fit_critic(")]),
    ("The objective", "Both begin with the ratio times the advantage. PPO changes it so that going "
     "too far does not pay. TRPO leaves it as it is.",
     [("ppo_loss", " ratio =", "l_policy = (surr")], [("surrogate", "ratio =", "ret")]),
    ("The direction", "PPO follows the gradient; Adam scales it. TRPO turns the gradient g into "
     "A⁻¹g, the direction that gains most for a given change of the policy, not of its weights.",
     [("backpropagate", "minibatch =", "loss.backward")],
     [("trust_region_step", "l_old =", " g ="), ("trust_region_step", "product =", "s, residual")]),
    ("How far", "PPO sets no bound: a sample past 1 + ε (if A > 0) or 1 − ε (if A < 0) has "
     "no gradient. TRPO measures the KL and shortens the step until the KL is at most δ.",
     [("ppo_loss", "clipped =", "torch.min(")],
     [("trust_region_step", "s_a_s =", "full_step ="), ("line_search", "theta_old =", "ret")]),
    ("The value function", "PPO trains it in the same loss. TRPO's step is for the policy alone; "
     "the critic, which its paper does not have, is fitted afterwards.",
     [("ppo_loss", "l_vf =", "l_total =")], [("fit_critic", "for _", "optimizer.step()")]),
]  # fmt: skip
# steps that are not in the paper, beside those whose comment or docstring says so
EXTRA = {
    "ppo_atari": [("gae", "decay ="), ("ActorCritic", "else:", "nn.Linear(64 * 7 * 7")],
    "ppo_continuous": [("gae", "decay ="), ("train", "learning_rate, clip_eps =", "anneal(")],
    "trpo_continuous": [
        ("gae", "deltas =", "return"), ("estimate_advantages", "batch.advantages =", "V^targ"),
        ("rollout", "batch.values =", "batch.next_values ="), ("ActorCritic", "self.critic ="),
        CRITIC, ("conjugate_gradient", "enough ="), ("trust_region_step", "s_a_s ="),
        ("line_search", "enough ="), ("line_search", "parameters(theta_old, w", "return 0.0"),
        ("update", "fit_critic(")],
}  # fmt: skip

# its LaTeX, its names in the code, each with its shape if it is a tensor, and it in words; @ in a
# shape: of the samples in a function, which SAMPLES has
SYMBOLS = [
    (r"\gamma", "gamma", "discount"), (r"\lambda", "gae_lambda", "1: trust rewards; 0: trust V"),
    (r"\epsilon", "clip_eps", "how far the ratio may move from 1"),
    (r"\alpha", "alpha", "falls from 1 to 0"), ("r_t", "ratio:@", "probability ratio"),
    (A_T, "advantage:N advantages:@", "estimated advantage"),
    (SURROGATE, "surrogate:@", "each sample's surrogate"), (CLIPPED, "clipped:@", "clipped ratio"),
    (r"\delta_t", "deltas:@", "error of V over one step"),
    (r"\delta", "max_kl", "bound on the mean KL"), (r"\beta", "beta kl_beta", "penalty's weight"),
    (r"\beta", "fraction", "length of the step, here as a share of the longest"),
    (OLD, "theta_old:W", "weights before the step"), ("c_1", "vf_coef", "weight of V's error"),
    ("c_2", "ent_coef", "weight of the entropy"), ("T", "num_steps", "steps of each actor"),
    ("N", "num_envs", "number of actors"), ("M", "minibatch_size", "samples in a minibatch"),
    ("K", "num_epochs", "passes over a rollout"),
    ("V", "values:@ next_values:@ new_values:@ critic value_head", "value of a state"),
    (r"V_t^\text{targ}", "targets:@", "what V should be"),
    (r"\pi_\theta", "pi log_pi:@,actions log_prob policy_head actor", "policy that is trained"),
    (r"\pi_{" + OLD + "}", "log_probs:@ act_fn pi_old:@,parameters", "policy that acted"),
    ("q", "log_probs:@", "policy that acted"), ("r_t", "rewards:@", "reward"),
    ("S", "entropy", "entropy of the policy"), (r"L_t^{\text{VF}}", "l_vf", "squared error of V"),
    (r"L^{\text{CLIP}}", "l_clip l_policy", "clipped surrogate"),
    (r"L_t^{\text{CLIP}}", "l_clip l_policy", "surrogate of Eq. 7"),
    (r"L^{\text{CPI}}", "l_policy", "surrogate"),
    (r"L^{\text{KLPEN}}", "l_policy", "penalised surrogate"),
    ("d", "kl", "mean KL of the last update"), (r"d_\text{targ}", "kl_target", "the d to aim at"),
    (r"\text{KL}", "kl:@ kl_divergence", "distance from the old policy to the new"),
    (r"D_\text{KL}", "kl kl_divergence", "distance from the old policy to the new"),
    (r"\overline{D}_\text{KL}", "kl", "mean KL over the states"),
    (r"Q_{" + OLD + "}", "advantages:@", "how good an action is"),
    ("g", "g:W b:W", "gradient of the surrogate"), ("y", "y:W", "any vector"),
    ("A", "product a_p:W damped", "Hessian of the KL, as a function y → A y"),
    ("s", "s:W", "direction of the step"),
    ("s", "obs:@,observation_size frames:@,4,84,84", "state, as the network sees it"),
]  # fmt: skip
SAMPLES = {
    "gae": "T,N",
    "rollout": "T,N",
    "estimate_advantages": "T,N",
    "mean_kl": "T,N",
    "act": "N",
    "ppo_loss": "M",
    "standardise": "M",
    "update": "T·N",
    "surrogate": "T·N",
    "trust_region_step": "T·N",
    "fit_critic": "T·N",
    "rollout.obs": "...",
    "rollout.frames": "...",
}  # of one step, and of all in the batch


@cache
def tokens(script):
    """A script's lines, each a list of Pygments' (type, text)."""
    lines = [[]]
    for kind, text in lex((ROOT / f"{script}.py").read_text("utf-8"), PythonLexer(stripnl=False)):
        first, *rest = text.split("\n")
        lines[-1].append((kind, first))
        lines += [[(kind, part)] for part in rest]
    return lines


def text_of(line, comments=True):
    return "".join(text for kind, text in line if comments or kind not in Comment).rstrip()


@cache
def statements(script):
    """All statements, of whatever depth."""
    tree = ast.parse((ROOT / f"{script}.py").read_text("utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def statement(script, number):
    """The innermost statement on a line."""
    nodes = [node for node in statements(script) if node.lineno <= number <= node.end_lineno]
    return min(nodes, key=lambda node: node.end_lineno - node.lineno)


def definition(script, name):
    """The numbers of the lines of a function, class or Class.method; of the file: ""."""
    if not name:
        return range(1, len(tokens(script)) + 1)
    outer, _, inner = name.rpartition(".")
    within = definition(script, outer)
    for node in statements(script):
        named = getattr(node, "name", "") == inner and node.col_offset == 4 * bool(outer)
        if named and node.lineno in within:
            return range(node.lineno, node.end_lineno + 1)
    raise ValueError(f"{script}.py has no {name}")


def excerpt(script, name, first, last=None):
    """The numbers of the lines of a definition, less docstrings, from the first that has one text,
    with comments above it, to the next that has another, or the end of its simple statement."""
    text = [text_of(line) for line in ["", *tokens(script)]]

    def find(part, after):
        for n in definition(script, name):
            if n >= after and part in text[n]:
                return n
        raise ValueError(f"{script}.{name} has no line with {part!r}")

    start = find(first, 0)
    stop = find(last or first, start)
    node = statement(script, stop)
    stop = stop if hasattr(node, "body") or not name else node.end_lineno
    while text[start - 1].lstrip().startswith("#"):
        start -= 1
    docs = [node.body[0] for node in statements(script)
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]  # fmt: skip
    doc = {n for node in docs for n in range(node.lineno, node.end_lineno + 1)}
    return [n for n in range(start, stop + 1) if n not in doc]


@cache
def not_in_the_paper(script):
    """The numbers of the lines of steps that are not in the paper: those of EXTRA, functions whose
    docstring says so, statements with such a comment or below it (of a loop: the first line)."""
    found = {n for place in EXTRA[script] for n in excerpt(script, *place)}
    says = re.compile("not in the (PPO )?paper", re.I).search
    for node in statements(script):
        if isinstance(node, ast.FunctionDef) and says(ast.get_docstring(node) or ""):
            found |= {*range(node.lineno, node.end_lineno + 1)}
    code = [text_of(line, comments=False).strip() for line in tokens(script)]
    for n, line in enumerate(tokens(script), 1):
        if any(kind in Comment and says(text) for kind, text in line):
            node = statement(script, n + next(k for k, text in enumerate(code[n - 1 :]) if text))
            loop = isinstance(node, (ast.For, ast.While))
            found |= {*range(min(n, node.lineno), 1 + (node.lineno if loop else node.end_lineno))}
    return found


# ---------------------------------------------------------------------------------------- HTML

KINDS = [(Comment, "c"), (String.Doc, "d"), (String, "s"), (Number, "m"), (Keyword, "k"),
         (Operator.Word, "k"), (Name.Function, "f"), (Name.Class, "f")]  # fmt: skip


def formula(latex, symbols=()):
    """MathML, in parts at each \\\\; symbols: what the elements to be marked hold, as text. One
    may be part of another in braces, as r_t is of r_t(θ) Â_t."""
    ET.register_namespace("", "http://www.w3.org/1998/Math/MathML")

    def mark(element):
        for child in element:
            if (text := "".join(child.itertext())) in symbols:
                child.set("data-s", text)
            if text not in symbols or child.tag.endswith("mrow"):
                mark(child)

    parts = []
    for part in latex.split(r" \\ "):
        root = ET.fromstring(latex2mathml.converter.convert(part))
        root.set("displaystyle", "true")
        mark(root)
        parts.append(ET.tostring(root, encoding="unicode"))
    return "<wbr>".join(parts)


CONTENTS = ["".join(ET.fromstring(formula(latex)).itertext()) for latex, *_ in SYMBOLS]


def symbols_of(formulas, words):
    """[(a symbol's number, its names)] of those that both formulas and code, its words, have; a
    name belongs to the first of its symbols."""
    marked = "".join(formula(latex, CONTENTS) for latex in formulas)
    found = {html.unescape(text) for text in re.findall('data-s="(.*?)"', marked)}
    symbols, free = [], set(words)
    for k, (_, names, _) in enumerate(SYMBOLS):
        names = [name for name in names.split() if name.split(":")[0] in free]
        if names and CONTENTS[k] in found:
            symbols.append((k, names))
            free -= {name.split(":")[0] for name in names}
    return symbols


def code(script, numbers, symbols=(), common=None):
    """Lines of a script. symbols: {name: symbol} to mark; common: lines that are no change."""
    lines = [tokens(script)[n - 1] for n in numbers]
    texts = [text_of(line) for line in lines]
    margin = min(len(t) - len(t.lstrip()) for t in texts if t.strip())
    shown = []
    for n, line, text in zip(numbers, lines, texts, strict=True):
        parts, skip = [], margin
        for kind, part in line:
            part, skip = part[skip:], max(0, skip - len(part))
            css = next((css for parent, css in KINDS if kind in parent), "")
            same = f' data-s="{symbols[part]}"' if not css and part in symbols else ""
            css = f' class="{css}"' if css else ""
            part = html.escape(part, quote=False)
            parts.append(f"<span{css}{same}>{part}</span>" if css or same else part)
        css = " extra" * (n in not_in_the_paper(script))
        css += " changed" * (common is not None and text_of(line, comments=False) not in common)
        indent = max(0, len(text) - len(text.lstrip()) - margin)
        shown.append(f'<span class="line{css}" style="--i:{indent}">'
                     f'<i aria-hidden="true">{n}</i>{"".join(parts)}\n</span>')  # fmt: skip
    return f"<pre><code>{''.join(shown)}</code></pre>"


def figures(script, places, symbols=(), common=None):
    """The lines of some places, each below the name of its function."""
    shown = []
    for place in places:
        part = excerpt(script, *place)
        lines = f"line {part[0]}" if len(part) == 1 else f"lines {part[0]} to {part[-1]}"
        name = f"<code>{place[0]}</code>" if place[0] else "docstring"
        shown.append(f"<figure><figcaption>{name}, {lines}</figcaption>"
                     f"{code(script, part, symbols, common)}</figure>")  # fmt: skip
    return "".join(shown)


def prose(text):
    """HTML, with subscripts as in θ_old, and `code`."""
    text = re.sub(r"\b([πθδÂd])_(\w+)", r"\1<sub>\2</sub>", html.escape(text, quote=False))
    return re.sub("`(.*?)`", r"<code>\1</code>", text)


FIGURE_1 = """<figure><figcaption>Figure 1 of the paper: one term of L<sup>CLIP</sup> against the
ratio r. The dot is θ<sub>old</sub>, where r = 1.</figcaption><svg viewBox="0 0 340 125" role="img"
aria-label="For a positive advantage the term grows up to 1 + ε, and is flat beyond. For a negative
one it is flat up to 1 − ε, and falls beyond."><path d="M15 105h140M15 15v105"/>
<path d="M80 105V65M106 105V49" stroke-dasharray="3"/>
<polyline points="15,105 54,81 80,65 106,49 145,49"/><circle cx="80" cy="65" r="4"/>
<text x="80" y="119">1</text><text x="106" y="119">1 + ε</text>
<text x="153" y="119">r</text><text x="39" y="22">A &gt; 0</text><path d="M190 25h140M190 15v105"/>
<path d="M255 25V65M229 25V49" stroke-dasharray="3"/>
<polyline points="190,49 229,49 255,65 281,81 320,105"/><circle cx="255" cy="65" r="4"/>
<text x="255" y="20">1</text><text x="229" y="20">1 − ε</text>
<text x="328" y="20">r</text><text x="214" y="118">A &lt; 0</text></svg></figure>"""


def row(script, equation, *places):
    """An equation and its lines."""
    title, extra = title_of(script, equation)
    _, link, formulas, says = EQUATIONS[equation]
    words = [{text for n in excerpt(script, *place) for _, text in tokens(script)[n - 1]}
             for place in places]  # fmt: skip
    symbols = symbols_of(formulas, set().union(*words))
    keys, marks = "", {}
    for k, names in symbols:
        shown = []
        for name, _, shape in (name.partition(":") for name in names):
            place = next(p[0] for p, part in zip(places, words, strict=True) if name in part)
            samples = SAMPLES.get(f"{place}.{name}") or SAMPLES.get(place, "...")
            shape = shape.replace("@", samples).replace("_", " ")
            shape = f" ({shape.replace(',', ', ')}{',' * (',' not in shape)})" if shape else ""
            shown.append(f"<code>{name}</code>{shape}")
            marks[name] = CONTENTS[k]
        keys += (f'<li><button type="button" data-s="{CONTENTS[k]}">{formula(SYMBOLS[k][0])} '
                 f"{', '.join(shown)}</button> {prose(SYMBOLS[k][2])}")  # fmt: skip
    body = [f'<p class="formula">{formula(latex, marks.values())}</p>' for latex in formulas]
    page = f' <a href="{link}">In&nbsp;the&nbsp;paper</a>' if link else ""
    return f"""<section class="row{extra}" id="{script}-{equation}">
<div class="paper"><h3><a href="#{script}-{equation}">{title}</a></h3>
{"".join(body)}<p>{prose(says)}{page}</p><ul class="keys">{keys}</ul></div>
<div class="code">{figures(script, places, marks)}{FIGURE_1 if equation == "eq-7" else ""}</div>
</section>
"""


def title_of(script, equation):
    """A row's title, and its class, if the paper of the script does not have it."""
    title, link, *_ = EQUATIONS[equation]
    if not link:
        return f"{title} (not in the paper)", " extra"
    if script.startswith("trpo") and link.startswith(PPO):
        return title.replace(",", " of the PPO paper,", 1), " extra"
    return title, ""


def lesson():
    """PPO beside TRPO, and the names of the definitions that are the same in both."""
    scripts, shown = {"PPO": "ppo_continuous", "TRPO": "trpo_continuous"}, ""
    lines = [{text_of(line, comments=False) for line in tokens(s)} for s in scripts.values()]
    for k, (name, words, *places) in enumerate(LESSON):
        common = None if k else lines[0] & lines[1]
        sides = [f'<div class="code"><h4>{key}</h4>{figures(scripts[key], part, (), common)}</div>'
                 for key, part in zip(scripts, places, strict=True)]  # fmt: skip
        shown += f"""<section class="both" id="difference-{k}">
<h3><a href="#difference-{k}">{name}</a></h3><p>{prose(words)}</p>{"".join(sides)}</section>
"""
    sources = [{node.name: ast.unparse(node) for node in statements(s)
                if hasattr(node, "name") and node.lineno < definition(s, "update")[-1]
                and not node.col_offset} for s in scripts.values()]  # fmt: skip
    same = [f"<code>{k}</code>" for k, v in sources[0].items() if v == sources[1].get(k)]
    return f"{shown}<p>The same in both scripts: {', '.join(same)}.</p>"


def page():
    """The whole page, as a string."""
    tabs = panels = ""
    names = ["PPO on Atari", "PPO", "TRPO", "PPO ↔ TRPO"]
    for name, view in zip(names, [*VIEWS, "difference"], strict=True):
        tabs += f'<a href="#{view}">{name}</a>'
        rows = [(key, *title_of(view, key)) for key, *_ in VIEWS.get(view, [])]
        rows = rows or [(k, part[0], "") for k, part in enumerate(LESSON)]
        body = "".join(row(view, *places) for places in VIEWS.get(view, [])) or lesson()
        contents = "".join(f'<li class="{extra}"><a href="#{view}-{key}">{title}</a>'
                           for key, title, extra in rows)  # fmt: skip
        panels += f"""<div id="{view}">
<h2>{f"{view}.py" if view in VIEWS else "One loop, two updates"}</h2>
<ul class="contents">{contents}</ul>{body}</div>
"""
    return TEMPLATE.replace("@TABS@", tabs).replace("@PANELS@", panels)


TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>PPO and TRPO: paper and code, side by side</title>
<style>
body { --back: light-dark(#fff, #0d1117); --panel: light-dark(#f6f8fa, #161b22);
  --rule: light-dark(#d0d7de, #30363d); --soft: light-dark(#57606a, #9ea7b3);
  --link: light-dark(#0550ae, #79c0ff); --extra: light-dark(#bc4c00, #ffa657);
  --mark: light-dark(#ffe58a, #6b5300); --red: light-dark(#a40e26, #ff7b72);
  color-scheme: light dark; color: light-dark(#1b1f24, #e6edf3); background: var(--back);
  margin: 0 auto; max-width: 96rem; padding: 1rem 1.5rem; font: 1rem/1.5 system-ui, sans-serif }
h1, h2, h3, h4 { font-size: 1rem; margin: 0 } h1 { font-size: 1.5rem }
h2 { font-size: 1.2rem; padding-top: 1rem }
a { color: var(--link) } h3 a { color: inherit; text-decoration: none } p { margin: .6rem 0 }
nav { position: sticky; top: 0; background: var(--back); padding: .5rem 0; z-index: 1;
  border-bottom: 1px solid var(--rule); display: flex; gap: .4rem }
nav a, button { font: inherit; color: inherit; background: none; border: 1px solid var(--rule);
  border-radius: .4rem; padding: .1rem .5rem; text-decoration: none }
[aria-current=true] { border-color: var(--link); box-shadow: inset 0 -3px var(--link) }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
.contents { list-style: none; padding: 0; columns: 18rem } .contents li { padding-left: .8rem }
.row, .both { display: grid; gap: 1rem 2rem; border-top: 1px solid var(--rule); padding: 1.2rem 0 }
.row { grid-template-columns: minmax(0, 2fr) minmax(0, 3fr) }
.row:has(.d) { grid-template-columns: minmax(0, 1fr) }
.both { grid-template-columns: repeat(2, minmax(0, 1fr)) } .both h3 { grid-column: 1 / -1 }
.both h3 ~ p { grid-column: 1 / -1; margin: 0 } [id] { scroll-margin-top: 2.7rem }
.formula { text-align: center; line-height: 1.8 } .formula math { font-size: 1.15em }
.keys { list-style: none; padding: 0; color: var(--soft); font-size: .9rem }
.keys button { color: canvastext; margin: .15rem .3rem .15rem 0; text-align: left }
figure { margin: 0 0 .8rem } figcaption { color: var(--soft); font-size: .85rem }
svg { max-width: 24rem; stroke: currentColor; fill: none; font-size: 11px; text-anchor: middle }
polyline { stroke: var(--link); stroke-width: 3 } text, circle { fill: currentColor; stroke: none }
pre { margin: .2rem 0; padding: .5rem 0; background: var(--panel); border-radius: .4rem;
  font: .75rem/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.line { --indent: calc((9 + var(--i)) * 1ch); display: block; padding: 0 .5rem 0 var(--indent);
  text-indent: calc(-1 * var(--indent)); border-left: 3px solid transparent }
.line i { display: inline-block; width: 4ch; padding-right: 1.5ch; text-align: right;
  color: var(--soft); font-style: normal; user-select: none; text-indent: 0 }
.line.extra { border-left-color: var(--extra) }
.row.extra, li.extra { box-shadow: inset 3px 0 var(--extra) } .row.extra { padding-left: .8rem }
.changed { background: light-dark(#ddf4ff, #0c2d4b); box-shadow: inset -3px 0 var(--link) }
.c { color: var(--soft) } .s { color: light-dark(#0a5c2b, #7ee787) } .k { color: var(--red) }
.m { color: var(--link) } .f { color: light-dark(#6639ba, #d2a8ff) }
[data-s] { border-radius: .2rem; cursor: help }
.code [data-s] { text-decoration: underline dotted var(--soft); text-underline-offset: .2em }
.on { background: var(--mark); outline: 1px solid var(--mark) }
@media (max-width: 60rem) { .row, .both { grid-template-columns: minmax(0, 1fr) } }
@media (max-width: 30rem) { body { padding: 1rem } nav { font-size: .85rem } }
@media print { nav, .contents { display: none } [hidden] { display: block !important }
  .row, .both { display: block } h2, h3, h4, figcaption { break-after: avoid }
  .line, p, li, svg { break-inside: avoid; print-color-adjust: exact } :root { font-size: 12px } }
</style>
<h1>PPO and TRPO: paper and code, side by side</h1>
<p>The equations of <a href="https://arxiv.org/abs/1707.06347">PPO</a> and
<a href="https://arxiv.org/abs/1502.05477">TRPO</a>, and the lines that compute them. Point at a
symbol or a name, and both are marked. An orange edge: a step that is not in the paper. Shapes: T
steps of N actors; M samples of a minibatch; W weights of the policy.</p>
<nav>@TABS@</nav>
<main>@PANELS@</main>
<script>
const tabs = document.querySelectorAll("nav a"), panels = document.querySelectorAll("main > div");
function go() {  // where the address says: #trpo_continuous, #ppo_atari-eq-7
  const place = document.getElementById(location.hash.slice(1));
  const shown = place?.closest("main > div") ?? panels[0];
  panels.forEach((panel, k) => {
    panel.hidden = panel !== shown;
    tabs[k].setAttribute("aria-current", panel === shown);
  });
  place?.scrollIntoView();
}
addEventListener("hashchange", go);
go();

function mark(event) {  // a symbol that is pointed at, or whose button has the focus
  const pointed = event.type === "mouseover" && event.target.closest("[data-s]");
  const one = pointed || document.activeElement.closest("[data-s]");
  for (const old of document.querySelectorAll(".on")) old.classList.remove("on");
  const same = one ? one.closest(".row").querySelectorAll(`[data-s="${one.dataset.s}"]`) : [];
  for (const each of same) each.classList.add("on");
}
for (const type of ["mouseover", "focusin", "focusout"]) document.addEventListener(type, mark);
</script>
</html>
"""

# ------------------------------------------------------------------------------- Page and links


def renew(text):
    """README with its links at the first lines of the definitions that they name."""
    return re.sub(r"(\[`([\w.]+)`\]\((\w+)\.py#L)\d+",
                  lambda link: link[1] + str(definition(link[3], link[2])[0]), text)  # fmt: skip


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv not in ([], ["--check"]):
        sys.exit(__doc__)
    for path, made in ((PAGE, lambda old: page()), (README, renew)):
        old = path.read_text("utf-8")
        new = made(old)
        if argv and new != old:
            sys.exit(f"{path.name} is out of date; run: .venv/bin/python plots/side_by_side.py")
        if new != old:
            path.write_text(new, "utf-8", newline="\n")


if __name__ == "__main__":
    main()
