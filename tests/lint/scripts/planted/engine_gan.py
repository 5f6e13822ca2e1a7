"""A GAN whose two optimizers belong to one engine."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import narrowgauge as ng
from pictures import Critic, Generator, Pictures


def main(folder, epochs=100, every=5):
    loader = DataLoader(Pictures(folder), batch_size=64, shuffle=True, drop_last=True)
    generator, critic = Generator(128).cuda(), Critic().cuda()
    networks = nn.ModuleDict({"generator": generator, "critic": critic})
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-4, betas=(0.0, 0.9))
    engine = ng.Engine(networks, [g_optimizer, c_optimizer], recipe="bf16")  # lint: engine-two-networks
    for epoch in range(epochs):
        for index, real in enumerate(loader):
            with engine.forward():
                fake = generator(torch.randn(len(real), 128, device="cuda")).detach()
                loss = F.relu(1 - critic(real.cuda())).mean() + F.relu(1 + critic(fake)).mean()
            engine.backward(loss)
            engine.step()
            if index % every == 0:
                with engine.forward():
                    loss = -critic(generator(torch.randn(len(real), 128, device="cuda"))).mean()
                engine.backward(loss)
                engine.step()
