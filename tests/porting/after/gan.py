"""A GAN with two optimizers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import hpctrain
from hpctrain.data import digits

args = hpctrain.options().parse_args()
with hpctrain.Session(args) as session:
    train_set, _ = digits()
    train_set = Subset(train_set, range(192))
    loader = DataLoader(train_set, batch_size=8)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Tanh())
    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    noise = torch.Generator().manual_seed(session.world.rank)
    generator, critic, generator_optimizer, critic_optimizer, loader = session.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader
    )

    with session.run(state={"noise": noise}) as run:
        for _ in run.epochs(2):
            for images, _ in run.batches(loader):
                device = images.device
                with session.autocast():
                    fakes = generator(torch.randn(len(images), 8, generator=noise).to(device))
                    scores = critic(torch.cat([images.flatten(1), fakes.detach()]))
                    labels = torch.cat([torch.ones(len(images), 1), torch.zeros(len(images), 1)])
                    critic_loss = F.binary_cross_entropy_with_logits(scores, labels.to(device))
                critic_optimizer.zero_grad()
                session.backward(critic_loss)
                critic_optimizer.step()

                with session.autocast():
                    scores = critic(fakes)
                    generator_loss = F.binary_cross_entropy_with_logits(
                        scores, torch.ones_like(scores)
                    )
                generator_optimizer.zero_grad()
                session.backward(generator_loss)
                generator_optimizer.step()
                run.log(critic=critic_loss, generator=generator_loss)
    if session.is_main:
        torch.save([generator.state_dict(), critic.state_dict()], "model.pt")
