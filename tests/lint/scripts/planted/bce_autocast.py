"""Binary cross-entropy on probabilities under autocast."""
# ruff: noqa

import torch
from torch import nn

generator = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh()).cuda()
critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1), nn.Sigmoid()).cuda()
g_opt = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
d_opt = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler("cuda")
criterion = nn.BCELoss()


def train(loader):
    for real, _ in loader:
        real = real.flatten(1).cuda()
        noise = torch.randn(len(real), 128, device="cuda")
        one, zero = torch.ones(len(real), 1, device="cuda"), torch.zeros(len(real), 1, device="cuda")
        d_opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = generator(noise)
            d_loss = criterion(critic(real), one) + criterion(critic(fake.detach()), zero)  # lint: bce-autocast
        scaler.scale(d_loss).backward()
        scaler.step(d_opt)
        g_opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            g_loss = criterion(critic(fake), one)  # lint: bce-autocast
        scaler.scale(g_loss).backward()
        scaler.step(g_opt)
        scaler.update()
