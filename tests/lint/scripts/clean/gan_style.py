"""A GAN with a gradient penalty: two optimizers, one scaler, clipping of each."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from pictures import Critic, Generator, Pictures


def penalty(critic, real, fake, scaler):
    mix = torch.rand(len(real), 1, 1, 1, device=real.device)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        score = critic(between).sum()
    scaled = torch.autograd.grad(outputs=scaler.scale(score), inputs=between, create_graph=True)[0]
    gradient = scaled * (1.0 / scaler.get_scale())
    return (gradient.flatten(1).norm(2, dim=1) - 1).square().mean()


def main(folder, epochs=100, every=5):
    loader = DataLoader(Pictures(folder), batch_size=64, shuffle=True, drop_last=True, num_workers=8)
    generator, critic = Generator(128).cuda(), Critic().cuda()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-4, betas=(0.0, 0.9))
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for index, real in enumerate(loader):
            real = real.cuda(non_blocking=True)
            critic_optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                with torch.no_grad():
                    fake = generator(torch.randn(len(real), 128, device="cuda"))
                critic_loss = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake)).mean()
            critic_loss = critic_loss + 10 * penalty(critic, real, fake, scaler)
            scaler.scale(critic_loss).backward()
            scaler.unscale_(critic_optimizer)
            nn.utils.clip_grad_norm_(critic.parameters(), 10.0)
            scaler.step(critic_optimizer)
            if index % every == 0:
                generator_optimizer.zero_grad(set_to_none=True)
                with torch.autocast("cuda", dtype=torch.float16):
                    generator_loss = -critic(generator(torch.randn(len(real), 128, device="cuda"))).mean()
                scaler.scale(generator_loss).backward()
                scaler.unscale_(generator_optimizer)
                nn.utils.clip_grad_norm_(generator.parameters(), 10.0)
                scaler.step(generator_optimizer)
            scaler.update()
        torch.save(
            {
                "generator": generator.state_dict(),
                "critic": critic.state_dict(),
                "optimizers": [generator_optimizer.state_dict(), critic_optimizer.state_dict()],
                "scaler": scaler.state_dict(),
            },
            f"epoch{epoch}.pt",
        )
