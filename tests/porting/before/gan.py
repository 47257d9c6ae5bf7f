"""A GAN with two optimizers, started by torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from hpctrain.data import digits

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
train_set, _ = digits()
train_set = Subset(train_set, range(192))
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Tanh())
critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
generator = DistributedDataParallel(generator.to(device))
critic = DistributedDataParallel(critic.to(device))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
noise = torch.Generator().manual_seed(rank)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, _ in loader:
        images = images.to(device)
        fakes = generator(torch.randn(len(images), 8, generator=noise).to(device))
        scores = critic(torch.cat([images.flatten(1), fakes.detach()]))
        labels = torch.cat([torch.ones(len(images), 1), torch.zeros(len(images), 1)]).to(device)
        critic_loss = F.binary_cross_entropy_with_logits(scores, labels)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        scores = critic(fakes)
        generator_loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
    if rank == 0:
        losses = critic_loss.item(), generator_loss.item()
        print("epoch {}  critic {:.4f}  generator {:.4f}".format(epoch, *losses))
if rank == 0:
    torch.save([generator.module.state_dict(), critic.module.state_dict()], "model.pt")
dist.destroy_process_group()
