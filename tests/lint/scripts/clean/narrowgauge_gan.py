"""A GAN with an engine for each network, evaluation, and checkpoints of both engines."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import narrowgauge as ng
from pictures import Critic, Generator, Pictures


class Gan:
    def __init__(self, recipe="bf16-lean"):
        self.generator, self.critic = Generator(128).cuda(), Critic().cuda()
        self.g_engine = ng.Engine(self.generator, torch.optim.AdamW(self.generator.parameters(), lr=1e-4), recipe)
        self.c_engine = ng.Engine(self.critic, torch.optim.AdamW(self.critic.parameters(), lr=4e-4), recipe)

    def noise(self, count):
        return torch.randn(count, 128, device="cuda")

    def train_critic(self, real):
        with self.c_engine.forward():
            fake = self.generator(self.noise(len(real))).detach()
            loss = F.relu(1 - self.critic(real)).mean() + F.relu(1 + self.critic(fake)).mean()
        self.c_engine.backward(loss)
        return self.c_engine.step()

    def train_generator(self, count):
        with self.g_engine.forward():
            loss = -self.critic(self.generator(self.noise(count))).mean()
        self.g_engine.backward(loss)
        self.critic.zero_grad()
        return self.g_engine.step()

    def sample(self, count):
        with self.g_engine.evaluating():
            return self.generator(self.noise(count))

    def save(self, path):
        torch.save({"generator": self.g_engine.state_dict(), "critic": self.c_engine.state_dict()}, path)


def main(folder, epochs=100, every=5):
    gan = Gan()
    for epoch in range(epochs):
        for index, real in enumerate(DataLoader(Pictures(folder), batch_size=64, shuffle=True)):
            gan.train_critic(real.cuda())
            if index % every == 0:
                gan.train_generator(len(real))
        gan.sample(16)
        gan.save(f"epoch{epoch}.pt")


if __name__ == "__main__":
    main("pictures")
