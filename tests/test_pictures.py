"""plots/page/pictures.js: what the moving pictures compute and say, against torch and numpy."""

import copy
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import record
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence

import ppo_continuous as ppo
import trpo_continuous as trpo

FOLDER = Path(__file__).parent.parent / "plots/page"
RECORDED = json.loads((FOLDER / "recorded.json").read_text())
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
in_a_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome")

RS, ADVANTAGES, EPSILONS = (0, 0.5, 0.8, 0.9, 1, 1.1, 1.2, 1.7), (-1.5, 0, 1), (0.1, 0.2, 0.5)
DISCOUNTS = [(0.99, 0.95), (1, 0), (0.9, 0.5), (0.99, 1), (1, 1)]
REGIONS = [(0.01, 0), (0.1, 0), (0.3, 0), (1, 0), (0.01, 0.1), (0.3, 0.02)]  # δ, damping
STEPS = [[0, 0], [0.5, -0.2], [-2, 1], [4, 3]]
SCRIPT = """
const asked = ASKED, found = {}, { clipTerm, gaeWeights, twoWeights } = pictures;
const divs = [...document.querySelectorAll(".moving")];
const one = Object.fromEntries(divs.map(div => [div.dataset.picture, div]));
function move(kind, values) {  // as a hand would; what the picture then shows
  for (const [name, value] of Object.entries(values)) {
    const slider = one[kind].querySelector(`[name=${name}]`);
    slider.value = value;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  }
  const says = one[kind].querySelector("[aria-live]").textContent;
  if (one[kind].querySelector("svg").getAttribute("aria-label") !== says) throw "not its label";
  return { says, open: one[kind].querySelectorAll("circle.open").length,
           heights: [...one[kind].querySelectorAll("rect")].map(r => +r.getAttribute("height")) };
}
found.kinds = divs.map(div => [div.dataset.picture, div.querySelectorAll("svg").length,
  [...div.querySelectorAll("input")].every(x => x.type === "range" && x.closest("label")
                                           && x.nextElementSibling.textContent)]);
found.clip = asked.clip.map(x => [clipTerm(...x), move("clip", { r: x[0], advantage: x[1],
                                                                 eps: x[2] }).open]);
found.gae = asked.gae.map(([gamma, lambda]) => [gaeWeights(gamma, lambda, 51),
                                                move("gae", { gamma, lambda })]);
const { trust } = JSON.parse(document.getElementById("recorded").textContent);
const { g, fisher, after, attempt } = twoWeights(trust);
found.trust = { g, fisher, after: asked.steps.map(after) };
found.regions = asked.regions.map(x => [...Array(10).keys()].map(k => attempt(...x, k)));
found.says = move("trust", { power: -0.5, damping: 0, k: 1 });
found.update = asked.epochs.map(epoch => move("update", { epoch }));
for (const kind of ["trust", "update"]) one[kind].querySelector("button").click();
setTimeout(() => {  // by now the buttons have done their walks
  found.fraction = one.trust.querySelector("[name=k]").value;
  found.epoch = one.update.querySelector("[name=epoch]").value;
  window.matchMedia = () => ({ matches: true });  // someone prefers no motion
  one.update.querySelector("button").click();
  found.atOnce = one.update.querySelector("[name=epoch]").value;
  const handle = one.clip.querySelector(".handle");
  const box = one.clip.querySelector("svg").getBoundingClientRect();
  handle.hasPointerCapture = () => true;
  const [clientX, clientY] = [box.x + box.width * 150 / 360, box.y];  // of 30 to 350, r = 0 to 2
  handle.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
  found.dragged = one.clip.querySelector("[name=r]").value;
  document.body.innerHTML = "<pre></pre>";
  document.body.firstChild.textContent = JSON.stringify(found);
}, 12000);
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the pictures computed and showed in a browser. Time passes there as fast as it can."""
    clips = [(r, a, eps) for r in RS for a in ADVANTAGES for eps in EPSILONS]
    asked = {"clip": clips, "gae": DISCOUNTS, "steps": STEPS, "regions": REGIONS,
             "epochs": [*range(11)]}  # fmt: skip
    kinds = ("clip", "gae", "trust", "update", "gae")
    divs = "".join(f'<div class="moving" data-picture="{kind}">...</div>' for kind in kinds)
    page = tmp_path_factory.mktemp("page") / "page.html"
    page.write_text(f"""<!DOCTYPE html><meta charset="utf-8"><body>{divs}
<script type="application/json" id="recorded">{json.dumps(RECORDED)}</script>
<script>{(FOLDER / "pictures.js").read_text()}</script>
<script>{SCRIPT.replace("ASKED", json.dumps(asked))}</script>""")
    command = [BROWSER, "--headless", "--no-sandbox", "--dump-dom", "--virtual-time-budget=15000"]
    shown = subprocess.run([*command, page], capture_output=True, text=True, timeout=60).stdout
    found = json.loads(html.unescape(re.search("<pre>(.*?)</pre>", shown, re.S)[1]))
    return SimpleNamespace(**found, asked=asked)


@in_a_browser
def test_every_div_becomes_a_picture_with_labelled_sliders(found):
    assert found.kinds == [[k, 1, True] for k in ("clip", "gae", "trust", "update", "gae")]


@in_a_browser
def test_clip_is_eq_7_and_says_where_its_gradient_ends(found):
    for (r, advantage, eps), (term, is_open) in zip(found.asked["clip"], found.clip, strict=True):
        ratio = torch.tensor(r, dtype=torch.float64, requires_grad=True)
        clipped = ratio.clamp(1 - eps, 1 + eps)
        torch.min(ratio * advantage, clipped * advantage).backward()
        expected = min(r * advantage, np.clip(r, 1 - eps, 1 + eps) * advantage)
        assert (term["l"], term["slope"]) == pytest.approx((expected, ratio.grad.item()))
        assert is_open == (ratio.grad.item() == 0)
    assert float(found.dragged) == pytest.approx(0.75)


@in_a_browser
def test_gae_shows_the_weights_of_eq_11(found):
    for (gamma, gae_lambda), (computed, shown) in zip(DISCOUNTS, found.gae, strict=True):
        rewards, zeros = torch.zeros(2, 51, 1, dtype=torch.float64)
        weights = []
        for k in range(51):  # V = 0, and a reward of 1 after k steps: δ_{t+k} = 1
            rewards.zero_()[k] = 1
            weights.append(ppo.gae(rewards, *[zeros] * 4, gamma, gae_lambda)[0].item())
        assert computed["weights"] == pytest.approx(weights)
        assert shown["heights"] == pytest.approx([136 * weight for weight in weights])
        if gamma * gae_lambda < 1:
            everything = (gamma * gae_lambda) ** np.arange(10_000)
            half = np.argmax(everything.cumsum() >= everything.sum() / 2) + 1
            assert computed["sum"] == pytest.approx(everything.sum()) and computed["half"] == half
            assert f"{everything.sum():.1f}" in shown["says"]


class TwoWeights(nn.Module):
    """The recorded policy, as trpo_continuous.py takes one."""

    log_std = None

    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        self.actor.weight.data[0] = torch.tensor(RECORDED["trust"]["theta"])

    def pi_params(self, obs):
        return nn.functional.pad(self.actor(obs), (1, 0))

    def distribution(self, pi_params):
        return Categorical(logits=pi_params)

    def pi(self, obs):
        return self.distribution(self.pi_params(obs))


@pytest.fixture
def policy():
    """The recorded policy and its samples."""
    net, columns = TwoWeights(), torch.tensor(RECORDED["trust"]["samples"], dtype=torch.float64).T
    obs, actions, advantages = columns[:2].T, columns[2], columns[3]
    pi_old = net.pi_params(obs).detach()
    log_probs = net.distribution(pi_old).log_prob(actions)
    return net, SimpleNamespace(obs=obs, actions=actions, advantages=advantages, pi_old=pi_old,
                                log_probs=log_probs)  # fmt: skip


@in_a_browser
def test_trust_computes_l_kl_g_and_the_fisher_matrix(found, policy):
    net, samples = policy
    l_old = trpo.surrogate(net.pi(samples.obs), samples)
    (g,) = torch.autograd.grad(l_old, net.actor.weight)
    product = trpo.fisher_vector_product(net, samples.obs, [net.actor.weight])
    fisher = torch.stack([product(y) for y in torch.eye(2).double()])
    assert found.trust["g"] == pytest.approx(g[0].tolist())
    assert np.array(found.trust["fisher"]) == pytest.approx(fisher.numpy())
    theta_old = net.actor.weight.data.clone()
    for step, after in zip(STEPS, found.trust["after"], strict=True):
        net.actor.weight.data = theta_old + torch.tensor([step], dtype=torch.float64)
        pi = net.pi(samples.obs)
        gain = (trpo.surrogate(pi, samples) - l_old).item()
        kl = kl_divergence(net.distribution(samples.pi_old), pi).mean().item()
        assert (after["gain"], after["kl"]) == pytest.approx((gain, kl), rel=1e-9, abs=1e-12)


@in_a_browser
@pytest.mark.parametrize("k", range(len(REGIONS)))
def test_trust_takes_the_step_of_trpo_continuous(found, policy, k):
    (net, samples), tries, (max_kl, damping) = policy, found.regions[k], REGIONS[k]
    theta_old = net.actor.weight.data.clone()
    stats = trpo.trust_region_step(net, samples, trpo.Args(max_kl=max_kl, cg_damping=damping))
    last = next(one for one in tries if one["accepted"])
    assert last["alpha"] == pytest.approx(stats["step_fraction"])
    assert last["gain"] == pytest.approx(stats["improvement"], rel=1e-4)
    assert last["kl"] == pytest.approx(stats["kl"], rel=1e-4)
    moved = (net.actor.weight.data - theta_old)[0].numpy()
    assert np.array(last["step"]) == pytest.approx(moved, rel=1e-4)
    step, g = np.array(last["gradient"]), np.array(found.trust["g"])
    assert step @ found.trust["fisher"] @ step / 2 == pytest.approx(max_kl)  # KL δ, by the model
    assert step / np.linalg.norm(step) == pytest.approx(g / np.linalg.norm(g))


@in_a_browser
def test_trust_says_what_it_computed_and_its_button_searches(found, policy):
    net, samples = policy
    max_kl = 10**-0.5
    stats = trpo.trust_region_step(net, samples, trpo.Args(max_kl=max_kl, cg_damping=0))
    assert 0.8 ** int(found.fraction) == pytest.approx(stats["step_fraction"])
    assert int(found.fraction) > 1, "the recorded step should be one that shrinks"
    assert found.says["open"] == 1 and f"{max_kl * 0.64:.3g}" in found.says["says"]


@in_a_browser
def test_update_says_the_recorded_numbers(found):
    for epoch, shown in enumerate(found.update):
        for objective in ("clip", "none") if epoch else ():
            assert f"{100 * RECORDED['update'][objective][epoch][3]:.1f}" in shown["says"]
    assert found.epoch == found.atOnce == "10"


def test_the_recorded_ratios_begin_at_1_and_their_tails_are_the_clip_fraction():
    for rows in RECORDED["update"].values():
        assert len(rows) == 11 and rows[0][0][22] == 2048
        assert rows[0][1:] == pytest.approx([0, 0, 0], abs=1e-6)
        for counts, _, _, clip_fraction in rows:
            assert sum(counts) == 2048
            outside = sum(counts[:18]) + sum(counts[27:])  # below 0.8, above 1.2
            assert outside / 2048 == pytest.approx(clip_fraction, rel=1e-3)
    assert (FOLDER / "recorded.json").stat().st_size < 25_000


def test_an_update_is_recorded_epoch_by_epoch(monkeypatch):
    """As `update` makes its K epochs at once; L^CLIP, KL and histogram computed in numpy."""
    args = ppo.Args(num_steps=64, minibatch_size=16, num_epochs=3, total_steps=64,
                    learning_rate=0.01, clip_eps=0.01)  # fmt: skip
    update, whole, seen = ppo.update, [], []

    def watched(fn, net, optimizer, batch, *others):
        if not whole:
            whole.extend(copy.deepcopy((net, optimizer)))
            state = torch.get_rng_state()
            update(fn, *whole, batch, *others[:-1], args)
            torch.set_rng_state(state)
        seen[:] = net, batch
        return update(fn, net, optimizer, batch, *others)

    monkeypatch.setattr(ppo, "update", watched)
    recorded = record.one_update(args)
    net, batch = seen
    for at_once, by_epochs in zip(whole[0].parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(at_once, by_epochs, rtol=0, atol=0)

    with torch.no_grad():
        logits = torch.stack([batch.pi_old, net.actor(batch.obs)]).double().numpy()
    old, new = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    taken = batch.actions.numpy()[..., None]
    ratio = (np.take_along_axis(new, taken, -1) / np.take_along_axis(old, taken, -1)).flatten()
    advantages = batch.advantages.double().numpy().flatten()
    advantages = (advantages - advantages.mean()) / advantages.std()
    l_clip = np.minimum(ratio * advantages, ratio.clip(0.99, 1.01) * advantages).mean()
    kl = (old * np.log(old / new)).sum(-1).mean()
    counts, *numbers = recorded[-1]
    assert len(recorded) == 4 and counts == np.histogram(ratio, record.EDGES)[0].tolist()
    assert numbers == pytest.approx([l_clip, kl, np.mean(abs(ratio - 1) > 0.01)], rel=2e-3)
    assert numbers[2] > 0


def test_a_rollout_is_recorded_with_its_policy():
    args = trpo.Args(num_steps=50, total_steps=50, minibatch_size=50)
    samples = np.array(record.trust_region(args)["samples"])
    assert samples.shape == (50, 4) and set(samples[:, 2]) == {0, 1}
    assert samples[:, 3].mean() == pytest.approx(0, abs=1e-3)
    assert samples[:, 3].std() == pytest.approx(1, abs=1e-3)
