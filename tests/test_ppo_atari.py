"""The parts of ppo_atari.py against independent references: the scalar environment, definitions
written out, finite differences, and a probe task with a known answer."""

import copy
import functools
import math
from types import SimpleNamespace

import cases
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from processes import SCRIPTS, events, load, main, rows, same, shorten_games, small

import ppo_atari
from ppo_atari import FIRE, ActorCritic, Args, Games, act, rollout

torch.set_num_threads(1)
BREAKOUT = "BreakoutNoFrameskip-v4"
each_script = pytest.mark.parametrize("script", SCRIPTS)

# --------------------------------------------------------------------------------- Environment


class FireAtStart(gym.Wrapper):
    """Press FIRE at a game's start, before the no-ops, as `Games` does."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        meanings = self.env.unwrapped.get_action_meanings()
        if "FIRE" in meanings:
            obs, _, _, _, info = self.env.step(meanings.index("FIRE"))
        return obs, info


def scalar_env(env_id, noop_max):
    """One game, in Python alone, that shows what one of `Games` should."""
    env = FireAtStart(gym.make(env_id, frameskip=1))
    env = wrappers.AtariPreprocessing(env, noop_max=noop_max)
    return wrappers.FrameStackObservation(env, 4, padding_type="zero")


def limit_games(monkeypatch, frames):
    """Have gymnasium's games, and so those of `Games`, end after so many frames."""
    limited = functools.partial(gym.make, max_num_frames_per_episode=frames)
    monkeypatch.setattr(ppo_atari.gym, "make", limited)


@pytest.mark.parametrize("env_id, limit", [
    (BREAKOUT, 108_000),
    pytest.param("SeaquestNoFrameskip-v4", 108_000, marks=pytest.mark.slow),
    ("MsPacmanNoFrameskip-v4", 108_000),  # has lives, but no FIRE
    ("PongNoFrameskip-v4", 399),  # meets its frame limit, which counts as its end
    ("ALE/Backgammon-v5", 108_000),  # has FIRE as its first action, and no NOOP
])  # fmt: skip
def test_games_play_as_the_scalar_environment(env_id, limit, monkeypatch):
    """Same actions: same frames, rewards, lost lives, game ends, scores and lengths."""
    same = {"repeat_action_probability": 0.0, "max_num_frames_per_episode": limit}
    exact = ppo_atari.game_settings(env_id) | same
    monkeypatch.setattr(ppo_atari, "game_settings", lambda env_id: exact)
    monkeypatch.setattr(ppo_atari.gym, "make", functools.partial(gym.make, **same))
    games = Games(env_id, num_envs=2, threads=2, noop_max=0)
    games.reset(seed=7)
    scalars = [scalar_env(env_id, noop_max=0) for _ in range(2)]
    obs, infos = map(list, zip(*(env.reset() for env in scalars), strict=True))
    has_fire = scalars[0].unwrapped.get_action_meanings()[FIRE] == "FIRE"
    scores, lengths, fire = [0.0, 0.0], [0, 0], [False, False]
    rng = np.random.default_rng(3)
    lost = cuts = ended = 0
    ends = env_id[:5] in ("Break", "Seaqu", "MsPac")
    for _ in range(450 if ends else 220):
        assert games.press_fire.tolist() == fire
        actions = rng.integers(0, games.num_actions, 2)
        rewards, terminated, finished = games.step(actions)
        expected_finished = []
        for i, env in enumerate(scalars):
            lives = infos[i]["lives"]
            obs[i], reward, over, cut, infos[i] = env.step(FIRE if fire[i] else actions[i])
            life_lost = infos[i]["lives"] < lives
            assert (rewards[i], terminated[i]) == (reward, over or cut or life_lost)
            scores[i], lengths[i] = scores[i] + reward, lengths[i] + 1
            fire[i] = has_fire and life_lost and not over
            if over or cut:
                expected_finished.append((scores[i], lengths[i]))
                scores[i], lengths[i] = 0.0, 0
                obs[i], infos[i] = env.reset()
            lost, ended, cuts = lost + life_lost, ended + (over or cut), cuts + cut
            np.testing.assert_array_equal(games.frames[i].numpy(), obs[i])
        assert finished == expected_finished
    assert lost > ended > 0 if ends else cuts == ended == (4 if limit == 399 else 0)


def test_a_game_starts_with_fire_and_a_random_number_of_noops():
    games = Games(BREAKOUT, num_envs=8, threads=2)
    games.reset(seed=11)
    noops = games.frame_numbers - 1  # the other frame is that of FIRE
    assert 0 <= noops.min() < 10 and 20 < noops.max() < 30
    env = scalar_env(BREAKOUT, noop_max=30)
    for i, n in enumerate(noops):
        if n > 0:
            env.unwrapped.np_random = SimpleNamespace(integers=lambda low, high, n=n: n)
            obs, _ = env.reset()
            np.testing.assert_array_equal(games.frames[i].numpy(), obs)


def test_sticky_actions_are_those_of_the_id():
    same = []
    for env_id in (BREAKOUT, "ale_py:ALE/Breakout-v5"):
        courses = []
        for seed in (1, 2):  # with no random start, only sticky actions depend on the seed
            games = Games(env_id, num_envs=1, threads=1, noop_max=0)
            games.reset(seed=seed)
            rng = np.random.default_rng(0)
            courses.append([games.step(rng.integers(0, 4, 1)) and games.frames.clone()
                            for _ in range(50)])  # fmt: skip
        same.append(all(torch.equal(a, b) for a, b in zip(*courses, strict=True)))
    assert same == [True, False]


def test_game_settings_are_those_of_the_task():
    """Of a registered task, too; what the vector environment cannot do is refused."""
    own = {"game": "pong", "full_action_space": True}
    gym.register("OwnPong-v0", "ale_py:AtariEnv", kwargs=own)
    expected = own | {"repeat_action_probability": 0.25}
    assert ppo_atari.game_settings("OwnPong-v0") == expected
    assert Games("OwnPong-v0", 1, 1).num_actions == 18
    frames = {"max_num_frames_per_episode": 108_000, "full_action_space": False}
    assert ppo_atari.game_settings("ale_py:ALE/Pong-v5") == expected | frames
    gym.register("Mode-v0", "ale_py:AtariEnv", kwargs={"game": "pong", "mode": 1})
    with pytest.raises(SystemExit, match="--env-id Mode-v0: .* usual mode "):
        ppo_atari.game_settings("Mode-v0")


def test_a_game_is_over_when_its_frame_number_does_not_rise():
    """Since the last step, that is: a new game may start with more no-ops than the first."""
    games = Games(BREAKOUT, 1, 1)
    games.reset(1)
    start, step = games.frame_numbers, games.envs.step
    numbers = [start + 10, start + 11, start + 11, start + 10]
    games.envs.step = lambda actions: (
        *step(actions)[:-1], {"episode_frame_number": numbers.pop(0)}
    )  # fmt: skip
    finished = [games.step(np.array([0]))[-1] for _ in range(4)]
    assert finished == [[], [], [(0, 3)], [(0, 1)]]


@pytest.mark.parametrize("env_id, lives", [(BREAKOUT, 5), ("MsPacmanNoFrameskip-v4", 0)])
def test_evaluation_presses_fire_at_a_life_s_start(env_id, lives, monkeypatch):
    """Or a policy that never does would wait for the ball for ever. Not in a game without FIRE,
    which is played with the most probable actions here."""
    limit_games(monkeypatch, 4000 if lives else 400)
    actions, make_env = [], ppo_atari.make_env

    def watched(args, **rendering):
        env = make_env(args, **rendering)
        return wrappers.TransformAction(env, lambda action: actions.append(action) or action, None)

    monkeypatch.setattr(ppo_atari, "make_env", watched)
    net = ActorCritic(4 if lives else 9, "paper")
    net.policy_head.bias.data[0] = 1000.0 if lives else 0.3  # NOOP
    args = Args(env_id, network="paper", episodes=1, evaluate="x", deterministic=not lives)
    ppo_atari.evaluate(args, {"net": net.state_dict(), "step": 0})
    fired = [k for k, action in enumerate(actions) if action == FIRE]
    assert len(fired) == lives and set(actions) <= {0, FIRE} and len(actions) < 600
    assert not lives or fired[0] == 0 and min(np.diff(fired)) > 9


def test_evaluation_without_noops_where_there_are_none():
    env = ppo_atari.make_env(Args("ALE/Backgammon-v5"))
    assert env.reset(seed=1)[0].shape == (4, 84, 84)


@pytest.mark.parametrize("bf16, deterministic", [(False, True), (True, False)])
def test_evaluation_plays_the_saved_network_with_its_settings(bf16, deterministic, monkeypatch):
    played = []
    monkeypatch.setattr(ppo_atari, "play", lambda *given, sample: played.append((*given, sample))
                        or [(3.0, 9)])  # fmt: skip
    saved = ActorCritic(4, "paper", orthogonal=False).state_dict()
    args = Args(network="paper", evaluate="x", bf16=bf16, deterministic=deterministic)
    assert ppo_atari.evaluate(args, {"net": saved, "step": 0}) == [3.0]
    [(net, env, given, sample)] = played
    assert same(saved, net.state_dict()) and given is args and sample != deterministic
    frames = torch.from_numpy(env.reset(seed=1)[0][None])
    types, hook = [], lambda layer, given, result: types.append(result.dtype)
    net.trunk.register_forward_hook(hook)
    net(frames)
    assert types == [torch.bfloat16 if bf16 else torch.float32]


# ------------------------------------------------------------------------------------- Rollout


def test_rollout_stores_what_happened(monkeypatch):
    """Against a twin of the games. A game that meets its frame limit counts as over."""
    limited = ppo_atari.game_settings(BREAKOUT) | {"max_num_frames_per_episode": 280}
    monkeypatch.setattr(ppo_atari, "game_settings", lambda env_id: limited)
    games, twin = (Games(BREAKOUT, num_envs=4, threads=1) for _ in range(2))
    games.reset(seed=4), twin.reset(seed=4)
    step = games.step
    games.step = lambda actions: (lambda r, *rest: (-7 * r, *rest))(*step(actions))
    torch.manual_seed(0)
    net = ActorCritic(games.num_actions, "paper")
    strides = set()  # one layout, so that copies to a recording's frames are fast
    policy = lambda net, frames: strides.add(frames.stride()) or act(net, frames)
    batch, finished = rollout(games, net, policy, 75)
    assert strides == {torch.empty(4, 84, 84, 4).movedim(-1, 1).stride()}

    expected = []
    for t in range(75):
        assert torch.equal(batch.frames[t], twin.frames)
        assert batch.fired[t].tolist() == twin.press_fire.tolist()
        rewards, terminated, over = twin.step(batch.actions[t].numpy())
        assert batch.rewards[t].tolist() == (-np.sign(rewards)).tolist()
        assert batch.terminated[t].tolist() == terminated.tolist()
        expected += [(t, *episode) for episode in over]
    with torch.no_grad():
        logits, values = net(torch.cat((batch.frames.flatten(0, 1), twin.frames)))
    log_probs = torch.distributions.Categorical(logits=logits[:-4])
    log_probs = log_probs.log_prob(batch.actions.flatten())
    torch.testing.assert_close(batch.log_probs.flatten(), log_probs)
    torch.testing.assert_close(batch.values.flatten(), values[:-4])
    torch.testing.assert_close(batch.next_values.flatten(), values[4:])
    assert finished == expected != [] and any(length > 60 for *_, length in finished)
    assert 0 < batch.fired.sum() <= batch.terminated.sum() and batch.rewards.any()


# ------------------------------------------------------------------------------------- Network


@pytest.mark.parametrize("network, weights", [
    ("paper", 16 * (4 * 64 + 1) + 32 * (16 * 16 + 1) + 256 * (2592 + 1) + 5 * (256 + 1)),
    ("nature", 32 * (4 * 64 + 1) + 64 * (32 * 16 + 1) + 64 * (64 * 9 + 1) + 512 * (3136 + 1)
     + 5 * (512 + 1)),
])  # fmt: skip
def test_networks_are_the_published_ones(network, weights):
    """Their layers, their first weights, pixels from 0 to 1; bfloat16 changes little."""
    torch.manual_seed(0)
    net = ActorCritic(4, network)
    assert sum(p.numel() for p in net.parameters()) == weights
    gains = {net.policy_head: 0.01, net.value_head: 1}
    for layer in net.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            w = layer.weight.flatten(1)
            w = w if w.shape[0] <= w.shape[1] else w.T
            square = gains.get(layer, math.sqrt(2)) ** 2 * torch.eye(len(w))
            torch.testing.assert_close(w @ w.T, square, rtol=0, atol=1e-4)
            assert not layer.bias.any()
    kinds = [type(layer).__name__ for layer in net.trunk]
    kinds.remove("Flatten")  # its place between the last convolution and Linear changes no value
    assert kinds == ["Conv2d", "ReLU"] * (2 + (network == "nature")) + ["Linear", "ReLU"]

    plain = ActorCritic(4, network, orthogonal=False)
    assert plain.policy_head.weight.abs().max() > 0.02 and plain.policy_head.bias.any()
    frames = torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8)
    x = plain.trunk((frames.double() / 255).float())
    logits, values = plain(frames)
    torch.testing.assert_close(logits, plain.policy_head(x))
    torch.testing.assert_close(values, plain.value_head(x)[:, 0])
    plain.bf16 = True
    rounded, _ = plain(frames)
    assert rounded.dtype == torch.float32 and 0 < (rounded - logits).abs().max() < 0.02


def test_act_samples_the_softmax_policy():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0])
    frames = torch.arange(20_000)
    actions, log_probs, values = act(lambda x: (logits.expand(20_000, 3), x), frames)
    pi = logits.exp() / logits.exp().sum()
    frequencies = torch.bincount(actions, minlength=3) / 20_000
    assert (frequencies - pi).abs().max() < 4 * 0.5 / math.sqrt(20_000)
    torch.testing.assert_close(log_probs, pi.log()[actions])
    assert torch.equal(values, frames)


# ---------------------------------------------------------------------------------- Advantages


@each_script
def test_gae_is_eq_11_with_ends_in_every_place(script):
    assert cases.first_failure("gae", script) is None


def test_where_fire_was_pressed_the_advantage_is_0():
    """But the value learns from it. Every end is terminal: T = 2, γ = 0.5, λ = 0.8, by hand."""
    batch = SimpleNamespace(
        rewards=torch.tensor([[1.0, 0, 1], [-1, 1, 0]]),
        values=torch.tensor([[2.0, 1, 0], [4, 2, 1]]),
        next_values=torch.tensor([[4.0, 2, 1], [6, 8, 2]]),
        terminated=torch.tensor([[0.0, 0, 1], [0, 1, 0]]),
        fired=torch.tensor([[0.0, 1, 0], [1, 0, 0]]))  # fmt: skip
    ppo_atari.estimate_advantages(batch, 0.5, 0.8)
    unmasked = torch.tensor([[1 + 0.4 * -2, 0 + 0.4 * -1, 1], [-2, -1, 0.0]])
    torch.testing.assert_close(batch.targets, batch.values + unmasked)
    torch.testing.assert_close(batch.advantages, unmasked * (1 - batch.fired))


@each_script
def test_standardise(script):
    x = torch.randn(50) * 3 + 2
    expected = (x.numpy() - x.numpy().mean()) / x.numpy().std()
    np.testing.assert_allclose(script.standardise(x), expected, rtol=1e-4, atol=1e-6)
    assert not script.standardise(torch.ones(9)).any()  # and not nan


# -------------------------------------------------------------------------------------- Update


def test_loss_and_gradient_are_eq_9():
    assert cases.first_failure("ppo_loss", ppo_atari) is None


def test_defaults_and_annealing_are_those_of_table_5():
    args = ppo_atari.parse_args([])[0]
    assert (args.num_steps, args.learning_rate, args.num_epochs) == (128, 2.5e-4, 3)
    assert (args.minibatch_size, args.gamma, args.gae_lambda, args.num_envs) == (256, 0.99, 0.95, 8)
    assert (args.clip_eps, args.vf_coef, args.ent_coef, args.anneal) == (0.1, 1, 0.01, "both")
    steps = 1000 * 128 * 8 + 1023  # of 1000 iterations; the rest is less than a rollout
    for kind, falls in (("both", (1, 1)), ("learning-rate", (1, 0)), ("none", (0, 0))):
        args = Args(anneal=kind, total_steps=steps)
        for iteration, alpha in ((0, 1.0), (500, 0.5), (999, 0.001)):
            expected = 2.5e-4 * alpha ** falls[0], 0.1 * alpha ** falls[1]
            assert ppo_atari.anneal(args, iteration) == pytest.approx(expected)


def logged_update(learning_rate=2.5e-4, **settings):
    """`update` on a batch of 64 random samples: what each minibatch of 16 held and gave."""
    args = Args(num_envs=4, num_steps=16, minibatch_size=16, **settings)
    torch.manual_seed(0)
    net = ActorCritic(3, "paper")
    net.policy_head.weight.data.mul_(100)  # a policy that is not nearly uniform
    optimizer = torch.optim.Adam(net.parameters(), eps=args.adam_eps, fused=True)
    frames = torch.randint(256, (16, 4, 84, 84, 4), dtype=torch.uint8).movedim(-1, 2)
    with torch.no_grad():
        actions, log_probs, values = (x.view(16, 4) for x in act(net, frames.flatten(0, 1)))
    batch = SimpleNamespace(
        frames=frames, actions=actions, log_probs=log_probs, values=values,
        fired=(frames[:, :, 0, 0, 0] <= 50).float(), targets=torch.randn(16, 4))  # fmt: skip
    batch.advantages = (batch.targets - batch.values) * (1 - batch.fired)
    log = SimpleNamespace(
        net=net, before=copy.deepcopy(net), batch=batch, args=args, seen=[], references=[]
    )

    def backpropagate(net, args, clip_eps, **minibatch):
        log.seen.append(minibatch)
        with torch.no_grad():
            now = net(minibatch["frames"])
        log.references.append(
            cases.reference_loss(cases.Logits(*now), minibatch, args, clip_eps.item())[1]
        )
        return ppo_atari.backpropagate(net, args, **minibatch, clip_eps=clip_eps)

    log.stats = ppo_atari.update(backpropagate, net, optimizer, batch, learning_rate, 0.1, args)
    return log


def test_update_returns_means_over_its_minibatches():
    """The first of them has ratio 1; the others' ratios are on both sides of the clip."""
    log = logged_update(learning_rate=1e-3)
    first = log.references[0]
    assert first["approx_kl"] == pytest.approx(0, abs=1e-6) and first["clip_fraction"] == 0
    for name in first:
        mean = np.mean([stats[name] for stats in log.references])
        assert log.stats[name] == pytest.approx(mean, rel=1e-4, abs=1e-6), name
    assert 0.05 < log.stats["clip_fraction"] < 0.95
    values, targets = log.batch.values.numpy(), log.batch.targets.numpy()
    explained = 1 - np.var(targets - values) / np.var(targets)
    assert log.stats["explained_variance"] == pytest.approx(explained, rel=1e-4)
    logged = [log.stats[name] for name in ("learning_rate", "clip_eps")]
    assert logged == [1e-3, 0.1]


@pytest.mark.parametrize("norm_adv", ["minibatch", "rollout"])
def test_every_epoch_sees_every_sample_once_in_a_new_order(norm_adv):
    """And a minibatch holds what belongs together. With --norm-adv rollout the advantages, some of
    them 0 for pressed FIREs, are standardised once."""
    log = logged_update(norm_adv=norm_adv)
    assert len(log.seen) == 3 * 4
    raw = log.batch.advantages.flatten()
    scaled = (raw - raw.mean()) / raw.std(correction=0) if norm_adv == "rollout" else raw
    frames = log.batch.frames.flatten(0, 1)
    places = [int((frames == frame).flatten(1).all(1).nonzero()) for minibatch in log.seen
              for frame in minibatch["frames"]]  # fmt: skip
    for name in ("actions", "log_probs", "values", "targets", "advantages"):
        whole = scaled if name == "advantages" else getattr(log.batch, name).flatten()
        given = torch.cat([minibatch[name] for minibatch in log.seen])
        torch.testing.assert_close(given, whole[places], rtol=1e-4, atol=1e-5)
    epochs = [places[:64], places[64:128], places[128:]]
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert len({*map(tuple, epochs), tuple(range(64))}) == 4


@pytest.mark.parametrize("max_grad_norm", [0.05, 0.0])
def test_update_is_adam_on_clipped_gradients(max_grad_norm, monkeypatch):
    """The same minibatches through the textbook's Adam, written out, in float32. As if the mean
    gradient over torchrun's processes were k times as long as this one's in the k-th step: what is
    clipped is the mean."""
    averaged = []

    def average(tensors):
        averaged.append(tensors)
        if len(averaged) <= 8:
            torch._foreach_mul_(tensors, len(averaged))

    monkeypatch.setattr(ppo_atari, "average", average)
    log = logged_update(num_epochs=2, max_grad_norm=max_grad_norm, adam_eps=1e-6)
    net, moments, norms = log.before, {}, []
    for count, minibatch in enumerate(log.seen, 1):
        eps = torch.tensor(0.1)
        loss, _ = ppo_atari.ppo_loss(net, **minibatch, clip_eps=eps, args=log.args)
        gradients = [count * g for g in torch.autograd.grad(loss, list(net.parameters()))]
        norms.append(math.sqrt(sum(g.double().square().sum().item() for g in gradients)))
        scale = min(1, max_grad_norm / norms[-1]) if max_grad_norm else 1
        for p, g in zip(net.parameters(), gradients, strict=True):
            m, v = moments.get(p, (0, 0))
            m, v = 0.9 * m + 0.1 * scale * g, 0.999 * v + 0.001 * (scale * g).square()
            moments[p] = m, v
            step = m / (1 - 0.9**count) / ((v / (1 - 0.999**count)).sqrt() + 1e-6)
            p.data -= 2.5e-4 * step
    assert log.stats["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-3)
    assert min(norms) > 0.05 and [len(tensors) for tensors in averaged] == [10] * 8 + [1]
    for p, q in zip(net.parameters(), log.net.parameters(), strict=True):
        assert (p - q).abs().max() < 2e-4  # of eight steps of up to 2.5e-4
        assert (p - q).abs().mean() < 2e-6


def test_take_is_indexing_and_keeps_the_layout():
    """Channels last, as the convolutions want them."""
    frames = torch.randint(256, (3, 5, 84, 84, 4), dtype=torch.uint8).movedim(-1, 2).flatten(0, 1)
    for x in (frames, torch.randn(15)):
        for indices in (torch.randperm(15)[:7], torch.tensor([14, 0, 0])):
            taken = ppo_atari.take(x, indices)
            assert torch.equal(taken, torch.stack([x[i] for i in indices.tolist()]))
            assert taken.stride()[1:] == x.stride()[1:] and taken.stride()[0] == x.stride()[0]


# ------------------------------------------------------------------------------ Whole training


class Signal:
    """A probe: a bright half of the picture says which of two actions earns 1; the other, −1.

    A return lasts one step, so the value of every state is 1 once the policy knows.
    """

    num_actions = 2

    def __init__(self, num_envs):
        self.press_fire = np.zeros(num_envs, dtype=bool)
        self.rng = np.random.default_rng(0)
        self.draw()

    def draw(self):
        self.right = self.rng.integers(0, 2, len(self.press_fire))
        self.frames = torch.zeros(len(self.right), 4, 84, 84, dtype=torch.uint8)
        for frames, side in zip(self.frames, self.right, strict=True):
            frames[..., 42 * side : 42 * side + 42] = 255

    def step(self, actions):
        rewards = np.where(actions == self.right, 5, -5)
        self.draw()
        return rewards, np.ones(len(actions), dtype=bool), []


def test_probe_a_pixel_policy_learns_what_the_picture_says():
    args = Args(num_envs=16, num_steps=16, minibatch_size=64)
    torch.manual_seed(0)
    games, net = Signal(16), ActorCritic(2, "paper")
    optimizer = torch.optim.Adam(net.parameters(), eps=1e-5, fused=True)
    rewards = []
    for _ in range(12):
        batch, _ = rollout(games, net, act, 16)
        rewards.append(batch.rewards.mean().item())
        ppo_atari.estimate_advantages(batch, 0.99, 0.95)
        ppo_atari.update(ppo_atari.backpropagate, net, optimizer, batch, 1e-3, 0.2, args)
    assert np.mean(rewards[-3:]) > 0.9
    assert (batch.values - 1).abs().mean() < 0.3


def test_train_hands_every_setting_to_where_it_belongs(tmp_path, monkeypatch):
    """In 3 iterations and one that resumes: to the network, Adam, the advantages, the loss, the
    games; and each episode's step."""
    shorten_games(monkeypatch)
    seen = {}

    def spied(function):
        def call(*args, **kwargs):
            seen.setdefault(function.__name__, []).append((*args, *kwargs.values()))
            return function(*args, **kwargs)

        return call

    for name in ("ActorCritic", "act", "gae", "ppo_loss", "update"):
        monkeypatch.setattr(ppo_atari, name, spied(getattr(ppo_atari, name)))
    monkeypatch.setattr(Games, "reset", spied(Games.reset))
    own = {"num_envs": 1, "num_steps": 32, "minibatch_size": 32, "num_epochs": 1,
           "orthogonal": False, "bf16": True, "adam_eps": 1e-3, "gamma": 0.9, "gae_lambda": 0.8,
           "run_dir": str(tmp_path / "run")}  # fmt: skip
    args = Args(total_steps=96, **own)
    run = ppo_atari.train(args)
    assert run.step == 96 and args == Args(total_steps=96, **own)
    assert torch.initial_seed() == ppo_atari.derive_seed(ppo_atari.derive_seed(1, 0), 0)
    steps, _, lengths = zip(*rows(tmp_path / "run"), strict=True)
    assert len(steps) > 3 and list(steps) == np.cumsum(lengths).tolist()
    ppo_atari.train(Args(total_steps=128, **own), load(tmp_path / "run" / "checkpoint.pt"))
    seeds = [ppo_atari.derive_seed(ppo_atari.derive_seed(1, iteration), 0) for iteration in (0, 3)]
    assert torch.initial_seed() == seeds[1] and [seed for _, seed in seen["reset"]] == seeds
    assert seen["ActorCritic"] == [(4, "nature", False, True)] * 2
    assert [call[-2:] for call in seen["gae"]] == [(0.9, 0.8)] * 4
    assert seen["ppo_loss"][0][-1].adam_eps == 1e-3 and len(seen["act"]) == 4 * 33
    annealed = [(2.5e-4 * a, 0.1 * a) for a in (1, 2 / 3, 1 / 3, 1 / 4)]
    np.testing.assert_allclose([call[4:6] for call in seen["update"]], annealed)
    _, net, optimizer, *_ = seen["update"][0]
    [group] = optimizer.param_groups
    assert group["eps"] == 1e-3 and len(group["params"]) == len(list(net.parameters()))


def test_eval_every_logs_a_score_and_changes_no_bit(tmp_path, monkeypatch):
    """That of the most probable actions, in the iteration that meets each multiple of 100."""
    limit_games(monkeypatch, 100)
    played, play = [], ppo_atari.play

    def watched(net, env, args, sample):
        played.append((sample, list(play(net, env, args, sample))))
        return [(score + 2 * k * len(played), length)
                for k, (score, length) in enumerate(played[-1][1])]  # fmt: skip

    monkeypatch.setattr(ppo_atari, "play", watched)
    for name, every in (("a", 0), ("b", 100)):
        flags = small(ppo_atari, 3, "--eval-every", every, "--episodes", 2)
        main(ppo_atari, *flags, "--run-dir", tmp_path / name)
    one, other = (load(tmp_path / name / "checkpoint.pt") for name in "ab")
    assert all(same(one[part], other[part]) for part in ("net", "optimizer"))
    assert rows(tmp_path / "a") == rows(tmp_path / "b") != []
    [(sample, games)] = played
    assert not sample and all(score == 0 and 9 < length < 26 for score, length in games)
    [event] = events(tmp_path / "b")["eval_score"]
    assert (event.step, event.value) == (128, 1)
    assert "eval_score" not in events(tmp_path / "a")


def test_a_loss_that_is_not_finite_stops_the_run_with_a_sentence(tmp_path, monkeypatch):
    real = ppo_atari.ppo_loss

    def spoiled(*args, **kwargs):
        loss, stats = real(*args, **kwargs)
        return loss * math.nan, stats

    monkeypatch.setattr(ppo_atari, "ppo_loss", spoiled)
    with pytest.raises(SystemExit, match="^ppo_atari.py: .*nan"):
        main(ppo_atari, *small(ppo_atari, 9), "--run-dir", tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


@each_script
def test_seeds_differ_with_each_of_their_numbers(script):
    seeds = {script.derive_seed(a, b) for a in range(20) for b in range(20)}
    assert len(seeds) == 400 and all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)


@each_script
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_check_finite(bad, script):
    script.check_finite(one=1.5, two=np.ones((2, 3)), three=torch.zeros(4))
    for value in (bad, np.array([[0, bad]]), torch.tensor([1.0, bad])):
        with pytest.raises(FloatingPointError, match=f"^two is {bad}$"):
            script.check_finite(one=1.5, two=value)


@each_script
def test_steps_may_be_floats(script):
    args = script.Args(total_steps=1e6, eval_every=2.5e4)
    assert (args.total_steps, args.eval_every) == (1_000_000, 25_000)
    assert type(args.total_steps) is type(args.eval_every) is int
    assert args.num_iterations == 1_000_000 // args.batch_size
