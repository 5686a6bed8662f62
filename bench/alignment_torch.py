"""The alignment study's base condition written plainly in PyTorch: deterministic policy gradient, one seed.

The peer of bench/alignment.py. What it computes is what algos/aligned.py and studies/alignment_run.py do.
"""

import copy
import math

import torch
from torch import nn

GAMMA, TARGET_RATE, LEARNING_RATE, NOISE = 0.99, 0.005, 1e-3, 0.3
WIDTH, UNITS, SHARED, WEIGHT, HORIZON = 32, 64, 16, 0.2, 5

torch.set_num_threads(1)


def net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, UNITS), nn.ReLU(), nn.Linear(UNITS, outputs))


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.actor, self.critic = net(4, WIDTH), net(WIDTH, 1), net(WIDTH + 1, 1)
        self.model_encoder, self.step = net(4, WIDTH), net(WIDTH + 1, WIDTH)
        self.decoder, self.reward = net(WIDTH, 4), net(WIDTH, 1)


def start(episodes: int) -> torch.Tensor:
    return 0.577 * torch.randn(episodes, 4)


def step(state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s0, s1, s2, s3 = state.unbind(-1)
    means = [0.8 * s0 + 0.5 * action[..., 0], 0.9 * s1, torch.sin(s2 + 0.5), torch.cos(s3 + 0.5)]
    state = torch.stack(means, -1) + 0.1 * torch.randn(state.shape)
    return state, 1 - state[..., 0] ** 2 - state[..., 1] ** 2


def play(agent: Agent, episodes: int, noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Observations [T + 1, B, 4], actions [T, B, 1] and rewards [T, B]."""
    states, actions, rewards = [start(episodes)], [], []
    with torch.no_grad():
        for _ in range(HORIZON):
            action = torch.tanh(agent.actor(agent.encoder(states[-1])))
            if noise:
                action = torch.clamp(action + noise * torch.randn(action.shape), -1, 1)
            state, reward = step(states[-1], action)
            states.append(state)
            actions.append(action)
            rewards.append(reward)
    return torch.stack(states), torch.stack(actions), torch.stack(rewards)


def unit(code: torch.Tensor) -> torch.Tensor:
    return code * torch.rsqrt(torch.sum(code**2, -1, keepdim=True) + 1e-12)


def loss(agent: Agent, slow: Agent, obs: torch.Tensor, action: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    """Of one episode: [T + 1, 4], [T, 1], [T]."""
    model_code, code = agent.model_encoder(obs), agent.encoder(obs)
    predicted = agent.step(torch.cat([model_code[:-1], action], -1))
    dynamics = torch.mean(
        torch.sum((agent.decoder(predicted) - obs[1:]) ** 2, -1)
        + torch.mean((predicted - model_code[1:].detach()) ** 2, -1)
    )
    earned = torch.mean((agent.reward(predicted)[:, 0] - reward) ** 2)
    with torch.no_grad():
        slow_code = slow.encoder(obs[1:])
        later = slow.critic(torch.cat([slow_code, torch.tanh(slow.actor(slow_code))], -1))[:, 0]
        going_on = torch.ones(HORIZON)
        going_on[-1] = 0
        target = reward + GAMMA * going_on * later
    value = torch.mean((agent.critic(torch.cat([code[:-1], action], -1))[:, 0] - target) ** 2)
    for parameter in agent.critic.parameters():
        parameter.requires_grad_(False)
    policy = -torch.mean(agent.critic(torch.cat([code[:-1].detach(), torch.tanh(agent.actor(code[:-1]))], -1)))
    for parameter in agent.critic.parameters():
        parameter.requires_grad_(True)
    gap = unit(model_code[:, :SHARED]) - unit(code[:, :SHARED])
    return dynamics + earned + value + policy + WEIGHT * torch.mean(torch.sum(gap**2, -1))


def measure(agent: Agent, episodes: int) -> dict[str, torch.Tensor]:
    obs, action, reward = play(agent, episodes, 0.0)
    with torch.no_grad():
        code, promised = agent.model_encoder(obs[0]), torch.zeros(episodes)
        for _ in range(HORIZON):
            dreamt = torch.tanh(agent.actor(agent.encoder(agent.decoder(code))))
            code = agent.step(torch.cat([code, dreamt], -1))
            promised += agent.reward(code)[:, 0]
        code, errors, reward_errors = agent.model_encoder(obs[0]), [], []
        for h in range(HORIZON):
            code = agent.step(torch.cat([code, action[h]], -1))
            errors.append(torch.mean((agent.decoder(code) - obs[h + 1]) ** 2, 0))
            reward_errors.append(torch.mean((agent.reward(code)[:, 0] - reward[h]) ** 2))
        seen = obs.transpose(0, 1).reshape(-1, 4)[:256]
        model_code, policy_code = agent.model_encoder(seen), agent.encoder(seen)
        cosine = torch.sum(unit(model_code[:, :SHARED]) * unit(policy_code[:, :SHARED]), -1).mean()
        a, b = model_code - model_code.mean(0), policy_code - policy_code.mean(0)
        cka = (a.T @ b).square().sum() / torch.sqrt((a.T @ a).square().sum() * (b.T @ b).square().sum())
    shares = []
    for encoder in (agent.model_encoder, agent.encoder):
        jacobian = torch.func.vmap(torch.func.jacfwd(encoder))(seen)
        squares = jacobian.detach().square().sum((0, 1))
        shares.append(squares / squares.sum())
    returns = reward.sum(0)
    return {
        "return": returns.mean(), "return_error": returns.std() / math.sqrt(episodes), "promised": promised.mean(),
        "error": torch.stack(errors), "error_reward": torch.stack(reward_errors), "cosine": cosine, "cka": cka,
        "jacobian_model": shares[0], "jacobian_policy": shares[1],
    }  # fmt: skip


def run(seed: int, episodes: int, points: int, measured: int) -> float:
    """Trains and evaluates one seed; returns its last mean return."""
    torch.manual_seed(seed)
    agent = Agent()
    slow = copy.deepcopy(agent).requires_grad_(False)
    adam = torch.optim.Adam(agent.parameters(), LEARNING_RATE)
    pairs = [
        (target, online)
        for name in ("encoder", "actor", "critic")
        for target, online in zip(getattr(slow, name).parameters(), getattr(agent, name).parameters(), strict=True)
    ]
    targets, onlines = map(list, zip(*pairs, strict=True))
    found = measure(agent, measured)
    for _ in range(points):
        for _ in range(episodes // points):
            obs, action, reward = play(agent, 1, NOISE)
            adam.zero_grad()
            loss(agent, slow, obs[:, 0], action[:, 0], reward[:, 0]).backward()
            adam.step()
            torch._foreach_lerp_(targets, onlines, TARGET_RATE)
        found = measure(agent, measured)
    return float(found["return"])
