"""Reinforcement learning with four engines: actor and critic are trained, reference and reward only
run.
"""

import argparse
import copy
import json

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 20
WIDTH = 12


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens)))).squeeze(-1)


def log_probs(logits, tokens):
    return torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    parser.add_argument("--config")
    args = parser.parse_args()
    with open(args.config) as file:
        config = json.load(file)
    deepspeed.init_distributed()
    torch.manual_seed(13)
    actor_model = Policy()
    critic_model = Value()
    reward_model = Value()
    ref_model = copy.deepcopy(actor_model)
    frozen = {k: v for k, v in config.items() if k not in ("optimizer", "scheduler")}
    stage = config["zero_optimization"]["stage"]
    frozen["zero_optimization"] = {"stage": 3 if stage == 3 else 0}
    actor, *_ = deepspeed.initialize(
        model=actor_model, model_parameters=actor_model.parameters(), config=config
    )
    ref, *_ = deepspeed.initialize(model=ref_model, config=frozen)
    critic, *_ = deepspeed.initialize(
        model=critic_model, model_parameters=critic_model.parameters(), config=config
    )
    reward, *_ = deepspeed.initialize(model=reward_model, config=frozen)
    ref.eval()
    reward.eval()
    made = torch.Generator().manual_seed(60 + actor.global_rank)
    losses = []
    for _ in range(4):
        tokens = torch.randint(
            0, VOCAB, (actor.train_micro_batch_size_per_gpu(), 7), generator=made
        )
        actor.eval()
        critic.eval()
        with torch.no_grad():
            old = log_probs(actor(tokens), tokens)
            base = log_probs(ref(tokens), tokens)
            score = reward(tokens)[:, -1].float()
            values = critic(tokens)[:, :-1].float()
        actor.train()
        critic.train()
        rewards = -0.1 * (old - base)
        rewards[:, -1] += score
        returns = rewards.flip(1).cumsum(1).flip(1)
        advantages = returns - values
        ratio = torch.exp(log_probs(actor(tokens), tokens) - old)
        actor_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        actor.backward(actor_loss)
        actor.step()
        critic_loss = F.mse_loss(critic(tokens)[:, :-1].float(), returns)
        critic.backward(critic_loss)
        critic.step()
        losses += [actor_loss.item(), critic_loss.item()]
    if actor.global_rank == 0:
        with open(args.out, "w") as file:
            json.dump({"losses": losses}, file)


if __name__ == "__main__":
    main()
