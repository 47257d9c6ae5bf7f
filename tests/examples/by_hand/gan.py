"""The training of examples/gan.py in plain torch, in one process."""

import torch
import torch.nn.functional as F


def train(generator, discriminator, batches, latent, lr, seed):
    first = torch.optim.Adam(generator.parameters(), lr, betas=(0.5, 0.999))
    second = torch.optim.Adam(discriminator.parameters(), lr, betas=(0.5, 0.999))
    draws = torch.Generator().manual_seed(seed)
    torch.randn(64, latent, generator=draws)  # for the images that the example shows
    for images in batches:
        ones, zeros = torch.ones(len(images), 1).to(images), torch.zeros(len(images), 1).to(images)
        noise = torch.randn(len(images), latent, generator=draws).to(images)
        fake = generator(noise)

        second.zero_grad()
        F.binary_cross_entropy_with_logits(discriminator(images), ones).backward()
        F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros).backward()
        second.step()

        first.zero_grad()
        F.binary_cross_entropy_with_logits(discriminator(fake), ones).backward()
        first.step()
