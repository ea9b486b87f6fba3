"""The parts of ppo_atari.py against independent references: the scalar environment, definitions
written out, finite differences, and probe tasks with a known answer."""

import copy
import csv
import functools
import inspect
import itertools
import math
from types import SimpleNamespace

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from processes import Clock, events

import ppo_atari
from ppo_atari import FIRE, ActorCritic, Games, act, gae, make_batch, make_scalar_env, rollout

GAMES = ["Breakout", "Pong", "Seaquest", "SpaceInvaders", "Freeway", "MontezumaRevenge"]


def settings(*flags):
    return ppo_atari.parse_args(list(flags))[0]


# --------------------------------------------------------------------------------- Environment


@pytest.mark.parametrize("name", [*GAMES, "ALE/Backgammon-v5", "ALE/VideoCheckers-v5"])
def test_games_play_as_the_scalar_environment(name, monkeypatch):
    """Same actions: same frames, rewards, lost lives, game ends, scores and lengths. The last two
    have FIRE as their first action, and no-ops only after it."""
    env_id = name if "/" in name else f"{name}NoFrameskip-v4"
    exact = ppo_atari.game_settings(env_id) | {"repeat_action_probability": 0.0}
    monkeypatch.setattr(ppo_atari, "game_settings", lambda env_id: exact)
    make = functools.partial(gym.make, repeat_action_probability=0.0)
    monkeypatch.setattr(ppo_atari.gym, "make", make)
    games = Games(env_id, num_envs=2, threads=2, noop_max=0)
    games.reset(seed=7)
    scalars = [make_scalar_env(env_id, noop_max=0) for _ in range(2)]
    starts = [env.reset() for env in scalars]
    obs, infos = [s[0] for s in starts], [s[1] for s in starts]
    has_fire = scalars[0].unwrapped.get_action_meanings()[FIRE] == "FIRE"
    raw, lengths, fire = [0.0, 0.0], [0, 0], [False, False]
    rng = np.random.default_rng(3)
    lost = ended = 0
    ends = name in ("Breakout", "Seaquest", "SpaceInvaders")  # within 900 steps
    for _ in range(900 if ends else 300):
        assert games.press_fire.tolist() == fire
        actions = rng.integers(0, games.num_actions, 2)
        rewards, terminated, truncated, final_obs, finished = games.step(actions)
        expected_finished = []
        for i, env in enumerate(scalars):
            lives = infos[i]["lives"]
            action = FIRE if fire[i] else actions[i]
            obs[i], reward, over, cut, infos[i] = env.step(action)
            assert (rewards[i], truncated[i]) == (reward, cut)
            life_lost = infos[i]["lives"] < lives
            assert terminated[i] == (over or life_lost)
            raw[i] += reward
            lengths[i] += 1
            fire[i] = has_fire and life_lost and not over
            lost += life_lost
            if over or cut:
                np.testing.assert_array_equal(final_obs[i], obs[i])
                expected_finished.append((raw[i], lengths[i]))
                raw[i], lengths[i] = 0.0, 0
                obs[i], infos[i] = env.reset()
                ended += 1
            np.testing.assert_array_equal(games.frames[i].numpy(), obs[i].transpose(1, 2, 0))
        assert finished == expected_finished
    assert not ends or lost > ended > 0


def test_a_game_without_noop_can_be_watched():
    env = make_scalar_env("ALE/Backgammon-v5")
    assert env.unwrapped.get_action_meanings()[0] == "FIRE"
    obs, _ = env.reset(seed=1)
    assert obs.shape == (4, 84, 84)


def test_a_game_starts_with_fire_and_a_random_number_of_noops():
    games = Games("BreakoutNoFrameskip-v4", num_envs=8, threads=2)
    games.reset(seed=11)
    noops = games.frame_numbers - 1  # the other frame is that of FIRE
    assert 0 <= noops.min() < noops.max() < 30
    assert inspect.signature(Games).parameters["noop_max"].default == 30
    assert inspect.signature(make_scalar_env).parameters["noop_max"].default == 30
    env = make_scalar_env("BreakoutNoFrameskip-v4", noop_max=30)
    for i, n in enumerate(noops[noops > 0]):
        env.unwrapped.np_random = SimpleNamespace(integers=lambda low, high, n=n: n)
        frames = games.frames[noops > 0][i].numpy()
        np.testing.assert_array_equal(frames, env.reset()[0].transpose(1, 2, 0))


def test_reset_in_mid_game_equals_a_new_process():
    """Exact resume rests on this."""
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 4, (300, 3))
    seen = []
    for warm_up in (0, 137):
        games = Games("ALE/Breakout-v5", num_envs=3, threads=2)  # sticky actions are random too
        games.reset(seed=1)
        for a in actions[:warm_up]:
            games.step(a)
        games.reset(seed=5)
        trace = []
        for a in actions:
            rewards, terminated, _, _, finished = games.step(a)
            trace.append((games.frames.sum(dtype=torch.int64).item(), rewards.tolist(),
                          terminated.tolist(), finished))  # fmt: skip
        seen.append(trace)
    assert seen[0] == seen[1]


def test_sticky_actions_are_those_of_the_id():
    assert ppo_atari.game_settings("BreakoutNoFrameskip-v4")["repeat_action_probability"] == 0
    assert ppo_atari.game_settings("ALE/Breakout-v5")["repeat_action_probability"] == 0.25
    traces = []
    for env_id in ("BreakoutNoFrameskip-v4", "ALE/Breakout-v5"):
        courses = []
        for seed in (1, 2):  # with no random start, only sticky actions depend on the seed
            games = Games(env_id, num_envs=1, threads=1, noop_max=0)
            games.reset(seed=seed)
            rng = np.random.default_rng(0)
            courses.append([games.step(rng.integers(0, 4, 1)) and games.frames.clone()
                            for _ in range(50)])  # fmt: skip
        traces.append(all(torch.equal(a, b) for a, b in zip(*courses, strict=True)))
    assert traces == [True, False]


@pytest.mark.parametrize("number, over", [(1, False), (0, True), (-1, True)])
def test_a_game_is_over_when_its_frame_number_does_not_rise(number, over):
    """Since the last step, that is: a new game may start with more no-ops than the first."""
    games = Games("BreakoutNoFrameskip-v4", 1, 1)
    games.reset(1)
    numbers = [games.frame_numbers + 10, games.frame_numbers + 10 + number]
    step = games.envs.step

    def with_number(actions):
        *result, info = step(actions)
        return *result, info | {"episode_frame_number": numbers.pop(0)}

    games.envs.step = with_number
    *_, finished = games.step(np.array([0]))
    assert finished == []
    *_, finished = games.step(np.array([0]))
    assert finished == ([(0, 2)] if over else [])


def test_a_truncated_game_bootstraps_from_what_it_showed_last(monkeypatch):
    """At the frame limit the batch holds V(final frames), not V(first frames of the next game)."""
    short = ppo_atari.game_settings("PongNoFrameskip-v4") | {"max_num_frames_per_episode": 99}
    monkeypatch.setattr(ppo_atari, "game_settings", lambda env_id: short)
    games = Games("PongNoFrameskip-v4", num_envs=2, threads=1, noop_max=0)
    games.reset(seed=1)
    batch = make_batch(60, 2, torch.device("cpu"))

    def policy(frames):  # its "value" names the frames exactly
        assert frames.stride()[-1] == 1
        v = frames.double().mul(torch.arange(1, frames[0].numel() + 1).view(frames[0].shape))
        v = (v.sum((1, 2, 3)) % 1009).float()
        return torch.zeros(len(frames), dtype=torch.int64), torch.zeros(len(frames)), v

    rollout(games, policy, batch)
    t = int(batch.truncated[:, 0].nonzero()[0])
    assert t == 24  # 99 frames: one of FIRE, then 4 a step
    assert not batch.terminated.any()
    make = functools.partial(gym.make, max_num_frames_per_episode=99)
    monkeypatch.setattr(ppo_atari.gym, "make", make)
    env = make_scalar_env("PongNoFrameskip-v4", noop_max=0)
    env.reset()
    for _ in range(t + 1):
        obs, _, terminated, truncated, _ = env.step(0)
    assert truncated and not terminated
    expected = policy(torch.from_numpy(obs).permute(1, 2, 0).unsqueeze(0).contiguous())[2]
    assert batch.final_values[t, 0] == expected != batch.values[t + 1, 0]

    ppo_atari.estimate_advantages(batch, 0.5, 0.9)
    torch.testing.assert_close(batch.targets[t, 0], batch.rewards[t, 0] + 0.5 * expected[0])


def test_rollout_stores_what_happened():
    games = Games("BreakoutNoFrameskip-v4", num_envs=4, threads=2)
    games.reset(seed=3)
    torch.manual_seed(0)
    net = ActorCritic(games.num_actions, "paper")
    batch = make_batch(200, 4, torch.device("cpu"))
    finished = rollout(games, lambda frames: act(net, frames), batch)

    twin = Games("BreakoutNoFrameskip-v4", num_envs=4, threads=1)
    twin.reset(seed=3)
    expected = []
    for t in range(200):
        torch.testing.assert_close(batch.frames[t], twin.frames, rtol=0, atol=0)
        assert batch.policy_mask[t].tolist() == (~twin.press_fire).tolist()
        rewards, terminated, truncated, _, over = twin.step(batch.actions[t].numpy())
        assert batch.rewards[t].tolist() == np.sign(rewards).tolist()
        assert batch.terminated[t].tolist() == terminated.tolist()
        expected += [(t, score, length) for score, length in over]
    assert finished == expected != []
    assert 0 < (1 - batch.policy_mask).sum() <= batch.terminated.sum()
    with torch.no_grad():
        logits, values = net(batch.frames.flatten(0, 1))
        last_value = net(twin.frames)[1]
    log_probs = torch.distributions.Categorical(logits=logits).log_prob(batch.actions.flatten())
    torch.testing.assert_close(batch.log_probs.flatten(), log_probs)
    torch.testing.assert_close(batch.values[:-1].flatten(), values)
    torch.testing.assert_close(batch.values[-1], last_value)


def test_rewards_are_cut_to_their_sign(monkeypatch):
    games = Games("BreakoutNoFrameskip-v4", num_envs=4, threads=1)
    games.reset(seed=3)
    step, rewards = games.step, np.array([-7, 0, 0.5, 30], np.float32)
    monkeypatch.setattr(games, "step", lambda actions: (rewards, *step(actions)[1:]))
    batch = make_batch(1, 4, torch.device("cpu"))
    rollout(games, lambda frames: (torch.zeros(4, dtype=torch.int64), *torch.zeros(2, 4)), batch)
    assert batch.rewards.tolist() == [[-1, 0, 1, 1]]


# ------------------------------------------------------------------------------------- Network


@pytest.mark.parametrize("network, weights", [
    ("paper", 16 * (4 * 64 + 1) + 32 * (16 * 16 + 1) + 256 * (2592 + 1) + 5 * (256 + 1)),
    ("nature", 32 * (4 * 64 + 1) + 64 * (32 * 16 + 1) + 64 * (64 * 9 + 1) + 512 * (3136 + 1)
     + 5 * (512 + 1)),
])  # fmt: skip
def test_networks_are_the_published_ones(network, weights):
    torch.manual_seed(0)
    net = ActorCritic(4, network)
    assert sum(p.numel() for p in net.parameters()) == weights
    logits, values = net(torch.randint(0, 256, (3, 84, 84, 4), dtype=torch.uint8))
    assert logits.shape == (3, 4) and values.shape == (3,)
    for layer in net.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            w = layer.weight.flatten(1)
            w = w if w.shape[0] <= w.shape[1] else w.T
            gain = (
                0.01 if layer is net.policy_head else 1 if layer is net.value_head else math.sqrt(2)
            )
            torch.testing.assert_close(w @ w.T, gain**2 * torch.eye(len(w)), rtol=0, atol=1e-4)
            assert not layer.bias.any()
    plain = ActorCritic(4, network, orthogonal=False)
    assert plain.policy_head.weight.abs().max() > 0.02 and plain.policy_head.bias.any()
    kinds = [type(layer).__name__ for layer in net.trunk]
    kinds.remove("Flatten")  # its place between the last convolution and Linear changes no value
    assert kinds == ["Conv2d", "ReLU"] * (2 + (network == "nature")) + ["Linear", "ReLU"]


def test_forward_scales_pixels_to_one_and_bf16_is_close():
    torch.manual_seed(0)
    net = ActorCritic(6, "paper", orthogonal=False)
    frames = torch.randint(0, 256, (5, 84, 84, 4), dtype=torch.uint8)
    x = net.trunk((frames.double() / 255).float().permute(0, 3, 1, 2))
    logits, values = net(frames)
    torch.testing.assert_close(logits, net.policy_head(x))
    torch.testing.assert_close(values, net.value_head(x)[:, 0])
    net.bf16 = True
    rounded, _ = net(frames)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - logits).abs().max() < 0.02


def test_act_samples_the_softmax_policy():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0])
    actions, log_probs, values = act(
        lambda frames: (logits.expand(20_000, 3), frames), torch.arange(20_000)
    )
    pi = logits.exp() / logits.exp().sum()
    frequencies = torch.bincount(actions, minlength=3) / 20_000
    assert (frequencies - pi).abs().max() < 4 * 0.5 / math.sqrt(20_000)
    torch.testing.assert_close(log_probs, pi.log()[actions])
    assert torch.equal(values, torch.arange(20_000))


# ---------------------------------------------------------------------------------- Advantages


def test_gae_is_eq_11_with_ends_in_every_place():
    """Every pattern of going on, terminated, truncated over 5 steps: 243 actors, one each."""
    patterns = torch.tensor(list(itertools.product((0, 1, 2), repeat=5))).T
    terminated, truncated = (patterns == 1).double(), (patterns == 2).double()
    rng = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn(3, 5, 243, dtype=torch.float64, generator=rng)
    gamma, lam = 0.9, 0.7
    result = gae(rewards, values, next_values, terminated, truncated, gamma, lam)
    for n in range(243):
        for t in range(5):
            advantage = 0.0
            for k in range(t, 5):  # Â_t = Σ_k (γλ)^(k−t) δ_k, up to the end of the episode
                successor = 0.0 if terminated[k, n] else next_values[k, n].item()
                delta = rewards[k, n].item() + gamma * successor - values[k, n].item()
                advantage += (gamma * lam) ** (k - t) * delta
                if terminated[k, n] or truncated[k, n]:
                    break
            assert result[t, n].item() == pytest.approx(advantage, abs=1e-12)


def test_gae_at_its_two_ends():
    """λ = 1 is the discounted return minus the value (Eq. 10), λ = 0 is δ."""
    rng = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 6, 1, dtype=torch.float64, generator=rng)
    values_now, next_values = values, torch.cat((values[1:], torch.ones(1, 1)))
    zero = torch.zeros(6, 1, dtype=torch.float64)
    monte_carlo = gae(rewards, values_now, next_values, zero, zero, 0.9, 1.0)
    returns = sum(0.9**k * rewards[k, 0] for k in range(6)) + 0.9**6
    torch.testing.assert_close(monte_carlo[0, 0], returns - values[0, 0])
    one_step = gae(rewards, values_now, next_values, zero, zero, 0.9, 0.0)
    torch.testing.assert_close(one_step, rewards + 0.9 * next_values - values_now)


def test_estimate_advantages_picks_the_true_successor():
    """Value of a task of reward 1 a step, cut after step 1 and terminated after step 3."""
    batch = make_batch(5, 1, torch.device("cpu"))
    batch.rewards += 1
    batch.values[:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    batch.truncated[1] = batch.terminated[3] = 1
    batch.final_values[1] = 10
    assert ppo_atari.estimate_advantages(batch, 0.5, 0.0) is None
    successors = torch.tensor([[2.0], [10.0], [4.0], [0.0], [6.0]])
    targets, errors = 1 + 0.5 * successors, 1 + 0.5 * successors - batch.values[:-1]
    torch.testing.assert_close(batch.targets, targets)
    torch.testing.assert_close(batch.advantages, errors)


# -------------------------------------------------------------------------------------- Update


def random_minibatch(size=12, actions=3):
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(size, actions, dtype=torch.float64, generator=rng)
    values, old_values, advantages, targets = torch.randn(
        4, size, dtype=torch.float64, generator=rng
    )
    batch = SimpleNamespace(
        actions=torch.randint(actions, (size,), generator=rng),
        values=old_values,
        advantages=advantages,
        targets=targets,
        policy_mask=torch.ones(size, dtype=torch.float64),
    )
    batch.policy_mask[2::5] = 0
    drift = torch.linspace(-0.5, 0.5, size, dtype=torch.float64)[
        torch.randperm(size, generator=rng)
    ]
    log_pi = logits.log_softmax(-1).gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
    batch.log_probs = log_pi - drift  # ratios from 0.6 to 1.6, for advantages of both signs
    return logits, values, batch


def reference_loss(logits, values, b, eps, c1, c2, norm_adv, clip_value_loss):
    """Eq. 6, 7 and 9, one sample after the other."""
    own = [i for i in range(len(values)) if b.policy_mask[i]]
    advantages = b.advantages.tolist()
    if norm_adv == "minibatch":
        mean = sum(advantages[i] for i in own) / len(own)
        std = math.sqrt(sum((advantages[i] - mean) ** 2 for i in own) / len(own))
        advantages = [(a - mean) / (std + 1e-8) for a in advantages]
    l_clip = entropy = kl = outside = l_vf = 0.0
    for i in own:
        row = logits[i].tolist()
        log_z = math.log(sum(math.exp(x) for x in row))
        log_pi = [x - log_z for x in row]
        ratio = math.exp(log_pi[b.actions[i]] - b.log_probs[i].item())
        clipped = min(max(ratio, 1 - eps), 1 + eps)
        l_clip += min(ratio * advantages[i], clipped * advantages[i]) / len(own)
        entropy -= sum(math.exp(x) * x for x in log_pi) / len(own)
        kl += (ratio - 1 - math.log(ratio)) / len(own)
        outside += (abs(ratio - 1) > eps) / len(own)
    for i, v in enumerate(values.tolist()):
        old, target = b.values[i].item(), b.targets[i].item()
        error = (v - target) ** 2
        if clip_value_loss:
            near = old + min(max(v - old, -eps), eps)
            error = max(error, (near - target) ** 2)
        l_vf += error / len(values)
    return -(l_clip - c1 * l_vf + c2 * entropy), (-l_clip, l_vf, entropy, kl, outside)


@pytest.mark.parametrize("norm_adv", ["minibatch", "rollout", "none"])
@pytest.mark.parametrize("clip_value_loss", [False, True])
def test_loss_and_gradient_are_eq_9(norm_adv, clip_value_loss):
    logits, values, batch = random_minibatch()
    args = (0.2, 0.7, 0.03, norm_adv, clip_value_loss)
    logits.requires_grad_(), values.requires_grad_()
    loss, stats = ppo_atari.ppo_loss(logits, values, batch, *args)
    expected, expected_stats = reference_loss(logits, values, batch, *args)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert stats.tolist() == pytest.approx(expected_stats, rel=1e-9, abs=1e-12)
    assert 0 < expected_stats[4] < 1  # some ratios clipped, some not
    loss.backward()
    h = 1e-6
    for tensor in (logits, values):
        for k in range(tensor.numel()):
            ends = []
            for shift in (h, -h):
                moved = tensor.detach().clone()
                moved.view(-1)[k] += shift
                now = (moved, values) if tensor is logits else (logits, moved)
                ends.append(reference_loss(*now, batch, *args)[0])
            slope = (ends[0] - ends[1]) / (2 * h)
            assert tensor.grad.view(-1)[k].item() == pytest.approx(slope, abs=1e-7)


def test_a_pressed_fire_teaches_the_value_alone():
    logits, values, batch = random_minibatch()
    logits.requires_grad_(), values.requires_grad_()
    ppo_atari.ppo_loss(logits, values, batch, 0.2, 0.5, 0.01, "minibatch", False)[0].backward()
    assert (logits.grad[[2, 7]] == 0).all() and (logits.grad.abs().sum(-1) > 0).sum() > 4
    assert (values.grad[[2, 7]] != 0).all()


def test_clipped_value_loss_holds_the_value():
    """Beyond ε of the old value on the way to the target, there is no gradient any more."""
    logits, _, batch = random_minibatch(size=3)
    batch.values = torch.zeros(3, dtype=torch.float64)
    batch.targets = torch.ones(3, dtype=torch.float64)
    values = torch.tensor([0.05, 0.3, -0.3], dtype=torch.float64, requires_grad=True)
    ppo_atari.ppo_loss(logits, values, batch, 0.1, 1.0, 0.0, "none", True)[0].backward()
    assert values.grad[0] < 0 and values.grad[1] == 0 and values.grad[2] < 0


def test_annealing_of_table_5():
    steps = str(1000 * 128 * 8 + 1023)  # of 1000 iterations; the rest is less than a rollout
    both, lr_only, none = (
        settings("--anneal", a, "--total-steps", steps) for a in ("both", "learning-rate", "none")
    )
    assert (both.batch_size, both.num_iterations) == (1024, 1000)
    for iteration, alpha in ((0, 1.0), (500, 0.5), (999, 0.001)):
        assert ppo_atari.anneal(both, iteration) == pytest.approx((2.5e-4 * alpha, 0.1 * alpha))
        assert ppo_atari.anneal(lr_only, iteration) == pytest.approx((2.5e-4 * alpha, 0.1))
        assert ppo_atari.anneal(none, iteration) == pytest.approx((2.5e-4, 0.1))


def test_defaults_are_table_5():
    args = settings()
    assert (args.num_steps, args.learning_rate, args.num_epochs) == (128, 2.5e-4, 3)
    assert (args.minibatch_size, args.gamma, args.gae_lambda, args.num_envs) == (256, 0.99, 0.95, 8)
    assert (args.clip_eps, args.vf_coef, args.ent_coef, args.anneal) == (0.1, 1, 0.01, "both")
    assert (args.network, args.total_steps) == ("nature", 10_000_000)


class UpdateLog:
    """Runs `update` on random frames and keeps what each minibatch held and gave."""

    def __init__(self, *flags, learning_rate=2.5e-4, spoil=None):
        args = settings("--num-envs", "4", "--num-steps", "16", "--minibatch-size", "16", *flags)
        torch.manual_seed(0)
        self.net = ActorCritic(3, "paper")
        self.net.policy_head.weight.data.mul_(100)  # a policy that is not nearly uniform
        optimizer = torch.optim.Adam(self.net.parameters(), fused=True)
        batch = make_batch(16, 4, torch.device("cpu"))
        batch.frames.random_(0, 256)
        batch.policy_mask = (batch.frames[:, :, 0, 0, 0] > 50).float()
        with torch.no_grad():
            for t in range(16):
                batch.actions[t], batch.log_probs[t], batch.values[t] = act(
                    self.net, batch.frames[t]
                )
        batch.values[16] = 100  # no minibatch holds the value after the rollout
        batch.targets = torch.randn(16, 4)
        batch.advantages = batch.targets - batch.values[:-1]
        self.seen, self.stats, self.references = [], [], []
        self.before, self.batch = copy.deepcopy(self.net), batch

        def loss(minibatch, clip_eps):
            assert clip_eps.item() == pytest.approx(0.1)
            self.seen.append(minibatch)
            now = (*self.net(minibatch.frames), minibatch)
            value, stats = ppo_atari.ppo_loss(*now, clip_eps, 1.0, 0.01, args.norm_adv, False)
            self.stats.append(stats)
            self.references.append(reference_loss(*now, 0.1, 1.0, 0.01, args.norm_adv, False)[1])
            return (value * spoil if spoil else value), stats

        self.targets = batch.targets.flatten()
        self.means = ppo_atari.update(loss, self.net, optimizer, batch, learning_rate, 0.1, args)


def test_first_minibatch_has_ratio_one_and_later_ones_move():
    log = UpdateLog()
    first = dict(zip(ppo_atari.STATS, log.stats[0].tolist(), strict=False))
    assert first["approx_kl"] == pytest.approx(0, abs=1e-6) and first["clip_fraction"] == 0
    assert first["policy_loss"] == pytest.approx(0, abs=1e-5)  # normalised advantages, ratio 1
    assert log.stats[-1][3] > 1e-6


def test_update_returns_means_over_its_minibatches():
    """Against the losses of the minibatches, each written out sample by sample."""
    log = UpdateLog(learning_rate=1e-3)
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    assert (*names, "grad_norm") == ppo_atari.STATS
    for k, name in enumerate(names):
        mean = float(np.mean([stats[k] for stats in log.references]))
        assert log.means[name] == pytest.approx(mean, rel=1e-4, abs=1e-6), name
    assert 0.05 < log.means["clip_fraction"] < 0.95
    assert log.means["learning_rate"] == 1e-3
    values, targets = log.batch.values[:-1].numpy(), log.batch.targets.numpy()
    explained = 1 - np.var(targets - values) / np.var(targets)
    assert log.means["explained_variance"] == pytest.approx(explained, rel=1e-4)
    others = {"weight_norm", "explained_variance", "learning_rate"}
    assert set(log.means) == {*ppo_atari.STATS, *others}


def test_minibatches_hold_what_belongs_together():
    for minibatch in UpdateLog("--num-epochs", "1").seen:
        torch.testing.assert_close(minibatch.values + minibatch.advantages, minibatch.targets)
        assert torch.equal(minibatch.policy_mask, (minibatch.frames[:, 0, 0, 0] > 50).float())


def test_every_epoch_sees_every_sample_once_in_a_new_order():
    log = UpdateLog("--num-epochs", "3")
    assert len(log.seen) == 3 * 4
    targets = [minibatch.targets for minibatch in log.seen]
    epochs = [torch.cat(targets[4 * k : 4 * k + 4]) for k in range(3)]
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, log.targets.sort().values)
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], log.targets)


def test_advantages_are_standardised_once_a_rollout():
    """With --norm-adv rollout, over the steps whose action the policy chose."""
    log = UpdateLog("--norm-adv", "rollout", "--num-epochs", "1")
    raw, own = log.batch.advantages.flatten(), log.batch.policy_mask.flatten().bool()
    assert 0 < (~own).sum() < 20
    standard = (raw - raw[own].mean()) / raw[own].std(correction=0)
    given = torch.cat([minibatch.advantages for minibatch in log.seen])
    torch.testing.assert_close(given.sort().values, standard.sort().values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_grad_norm", [0.05, 0])
def test_update_is_adam_on_clipped_gradients(max_grad_norm):
    """The same minibatches through the textbook's Adam, written out, in float32."""
    log = UpdateLog("--num-epochs", "2", "--max-grad-norm", str(max_grad_norm))
    net, moments = log.before, {}
    norms = []
    for count, minibatch in enumerate(log.seen, 1):
        now = (*net(minibatch.frames), minibatch)
        loss, _ = ppo_atari.ppo_loss(*now, 0.1, 1.0, 0.01, "minibatch", False)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        norms.append(math.sqrt(sum(g.double().square().sum().item() for g in gradients)))
        scale = min(1, max_grad_norm / norms[-1]) if max_grad_norm else 1
        for p, g in zip(net.parameters(), gradients, strict=True):
            m, v = moments.get(p, (0, 0))
            m, v = 0.9 * m + 0.1 * scale * g, 0.999 * v + 0.001 * (scale * g).square()
            moments[p] = m, v
            step = m / (1 - 0.9**count) / ((v / (1 - 0.999**count)).sqrt() + 1e-8)
            p.data -= 2.5e-4 * step
    assert log.means["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-3)
    assert min(norms) > 0.05
    for p, q in zip(net.parameters(), log.net.parameters(), strict=True):
        assert (p - q).abs().max() < 2e-4  # of eight steps of up to 2.5e-4
        assert (p - q).abs().mean() < 2e-6
    norm = math.sqrt(sum(p.double().square().sum().item() for p in log.net.parameters()))
    assert log.means["weight_norm"] == pytest.approx(norm, rel=1e-5)


def test_update_refuses_what_is_not_finite():
    with pytest.raises(FloatingPointError, match="is nan"):
        UpdateLog(spoil=math.nan)
    with pytest.raises(FloatingPointError, match="weight_norm is"):  # spoiled by the last step
        UpdateLog("--num-epochs", "1", "--minibatch-size", "64", learning_rate=1e38)


# --------------------------------------------------------------------------------------- Probes


class Signal:
    """A probe: a bright half of the picture says which of two actions earns 1; the other, −1.

    A return lasts one step, so the value of every state is 1 once the policy knows.
    """

    num_actions = 2

    def __init__(self, num_envs):
        self.frames = torch.zeros(num_envs, 84, 84, 4, dtype=torch.uint8)
        self.press_fire = np.zeros(num_envs, dtype=bool)
        self.rng = np.random.default_rng(0)
        self._draw()

    def _draw(self):
        self.right = self.rng.integers(0, 2, len(self.frames))
        self.frames.zero_()
        for i, side in enumerate(self.right):
            self.frames[i, :, 42 * side : 42 * side + 42] = 255

    def step(self, actions):
        rewards = np.where(actions == self.right, 5, -5).astype(np.int32)
        self._draw()
        ends = np.ones(len(actions), dtype=bool)
        return rewards, ends, ~ends, None, [(int(r), 1) for r in rewards]


def test_probe_a_pixel_policy_learns_what_the_picture_says():
    args = settings("--num-envs", "16", "--num-steps", "16", "--minibatch-size", "64",
                    "--learning-rate", "1e-3")  # fmt: skip
    torch.manual_seed(0)
    games, net = Signal(16), ActorCritic(2, "paper")
    optimizer = torch.optim.Adam(net.parameters(), eps=1e-5, fused=True)
    batch = make_batch(16, 16, torch.device("cpu"))

    def loss(minibatch, clip_eps):
        now = (*net(minibatch.frames), minibatch)
        return ppo_atari.ppo_loss(*now, clip_eps, 1.0, 0.01, "minibatch", False)

    for _ in range(15):
        rollout(games, lambda frames: act(net, frames), batch)
        ppo_atari.estimate_advantages(batch, 0.99, 0.95)
        ppo_atari.update(loss, net, optimizer, batch, args.learning_rate, 0.2, args)
    rollout(games, lambda frames: act(net, frames), batch)
    assert batch.rewards.mean() > 0.9
    assert (batch.values[:-1] - 1).abs().mean() < 0.25


def test_the_emulator_has_the_actions_the_script_presses():
    assert ale_py.Action.FIRE.value == FIRE
    assert Games("BreakoutNoFrameskip-v4", 1, 1).has_fire
    assert not Games("FreewayNoFrameskip-v4", 1, 1).has_fire


def test_seeds_differ_with_the_seed_and_with_the_iteration():
    seeds = {
        ppo_atari.derive_seed(seed, iteration) for seed in range(20) for iteration in range(20)
    }
    assert len(seeds) == 400 and all(0 <= seed < 2**31 for seed in seeds)


def test_train_hands_every_setting_to_where_it_belongs(tmp_path, monkeypatch):
    """The settings that reach the network, Adam, the advantages and the loss in 4 iterations."""
    seen = {"eps": [], "loss": set(), "net": [], "adam": [], "gae": set()}
    loss, update, net = ppo_atari.ppo_loss, ppo_atari.update, ppo_atari.ActorCritic
    estimate_advantages = ppo_atari.estimate_advantages

    def spy_loss(*args):
        seen["loss"].add(args[4:])
        return loss(*args)

    def spy_update(f, network, optimizer, batch, learning_rate, clip_eps, args):
        seen["eps"].append(clip_eps)
        stats = update(f, network, optimizer, batch, learning_rate, clip_eps, args)
        seen["adam"].append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]))
        return stats

    def spy_net(*args):
        seen["net"].append(args)
        return net(*args)

    def spy_advantages(batch, *args):
        seen["gae"].add(args)
        return estimate_advantages(batch, *args)

    for name, spy in (("ppo_loss", spy_loss), ("update", spy_update), ("ActorCritic", spy_net),
                      ("estimate_advantages", spy_advantages)):  # fmt: skip
        monkeypatch.setattr(ppo_atari, name, spy)
    flags = "--num-envs 2 --num-steps 4 --minibatch-size 8 --num-epochs 1 --total-steps 32"
    extra = ("--network nature --no-orthogonal --adam-eps 1e-3 --vf-coef 0.3 --ent-coef 0.4 "
             "--gamma 0.9 --gae-lambda 0.8 --norm-adv none --clip-value-loss")  # fmt: skip
    ppo_atari.main([*flags.split(), *extra.split(), "--run-dir", str(tmp_path / "run")])
    assert seen["net"] == [(4, "nature", False, False)]
    assert seen["eps"] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert [lr for lr, _ in seen["adam"]] == pytest.approx(
        [2.5e-4 * a for a in (1, 0.75, 0.5, 0.25)]
    )
    assert {eps for _, eps in seen["adam"]} == {1e-3}
    assert seen["loss"] == {(0.3, 0.4, "none", True)}  # c1, c2, norm_adv, clip_value_loss
    assert seen["gae"] == {(0.9, 0.8)}


def test_what_a_run_logs_is_what_happened(tmp_path, monkeypatch):
    """Every scalar in TensorBoard, from the minibatches, the parameters, the table and the clock;
    every row's seconds."""
    clock = Clock(monkeypatch, ppo_atari)
    game_settings, loss, update = ppo_atari.game_settings, ppo_atari.ppo_loss, ppo_atari.update
    short = {"max_num_frames_per_episode": 160}
    monkeypatch.setattr(ppo_atari, "game_settings", lambda env_id: game_settings(env_id) | short)
    minibatches, expected = [], []

    def spy_loss(logits, values, minibatch, clip_eps, *rest):
        minus_objective, stats = loss(logits, values, minibatch, clip_eps, *rest)
        leaves = list(net[0].parameters())
        gradients = torch.autograd.grad(minus_objective, leaves, retain_graph=True)
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        reference = reference_loss(logits, values, minibatch, clip_eps.item(), *rest)[1]
        minibatches.append((*reference, norm))
        return minus_objective, stats

    def spy_update(f, network, optimizer, batch, learning_rate, clip_eps, args):
        net[:], minibatches[:] = [network], []
        k = len(expected)
        seconds = 0.5 + 0.25 * k  # each iteration is slower than the one before
        clock.now += seconds
        stats = update(f, network, optimizer, batch, learning_rate, clip_eps, args)
        assert len(minibatches) == 4
        parameters = torch.cat([p.detach().flatten() for p in network.parameters()]).double()
        values, targets = batch.values[:-1].numpy(), batch.targets.numpy()
        means = np.mean(minibatches, axis=0)
        expected.append(dict(zip(ppo_atari.STATS, means, strict=True)) | {
            "weight_norm": parameters.norm().item(), "learning_rate": 0.01 * (1 - k / 8),
            "explained_variance": 1 - np.var(targets - values) / np.var(targets),
            "steps_per_second": 32 / seconds,
        })  # fmt: skip
        return stats

    net = []
    monkeypatch.setattr(ppo_atari, "ppo_loss", spy_loss)
    monkeypatch.setattr(ppo_atari, "update", spy_update)
    flags = ("--num-envs 2 --num-steps 16 --minibatch-size 16 --num-epochs 2 --total-steps 256 "
             "--learning-rate 0.01 --threads 1 --checkpoint-every 8")  # fmt: skip
    ppo_atari.main([*flags.split(), "--run-dir", str(tmp_path / "run")])

    with open(tmp_path / "run" / "episodes.csv") as file:
        table = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    assert len(table) == 6
    scalars = events(tmp_path / "run")
    assert set(scalars) == {*expected[0], "score"}
    for k, values in enumerate(expected):
        step = 32 * (k + 1)
        seconds = sum(0.5 + 0.25 * j for j in range(k + 1))
        new = [row for row in table if step - 32 < row["step"] <= step]
        assert [row["seconds"] for row in new] == pytest.approx([seconds] * len(new), abs=0.051)
        if returns := [row["return"] for row in table if row["step"] <= step]:
            values["score"] = np.mean(returns)
        for name, value in values.items():
            [logged] = [e.value for e in scalars[name] if e.step == step]
            assert logged == pytest.approx(value, rel=1e-3, abs=1e-5), (name, step)
    assert any(0 < values["clip_fraction"] < 1 for values in expected)
    assert len(scalars["score"]) == sum("score" in values for values in expected) < 8
