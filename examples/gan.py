"""A generative adversarial network that draws small images, in the manner of DCGAN."""

import torch
import torch.nn.functional as F
from torch import nn

import hpctrain
from hpctrain.data import digits

LATENT = 64  # numbers behind an image


def options():
    parser = hpctrain.options(description=__doc__)
    group = parser.add_argument_group("options of this example")
    group.add_argument("--lr", type=float, default=1e-3, metavar="X", help="(%(default)s)")
    return parser


def generator_of(height, width):
    """Return a model that makes images (N, 1, height, width) of noise (N, LATENT).

    Group norm, unlike batch norm, does not depend on the number of images on a rank.
    """
    return nn.Sequential(
        nn.Linear(LATENT, 64 * (height // 4) * (width // 4)),
        nn.Unflatten(1, (64, height // 4, width // 4)),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
    )


def discriminator_of(height, width):
    """Return a model that gives each image a number: above 0 for a real one."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1),
        nn.GroupNorm(8, 64),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 1),
    )


def noise_for(session, images, draws):
    """Return noise (N, LATENT) for the N images of this rank.

    All ranks draw the noise of all ranks, and each takes its own part. So a step has the same noise
    on any number of ranks.
    """
    noise = torch.randn(session.world.world_size, len(images), LATENT, generator=draws)
    return noise[session.world.rank].to(images)


def save_images(path, images):
    """Write 64 images (64, 1, height, width) as one grey image, in the PGM format."""
    grid = images.float().unflatten(0, (8, 8)).squeeze(2).transpose(1, 2).flatten(0, 1).flatten(1)
    low, high = grid.aminmax()
    pixels = (grid - low).div(high - low).mul(255).byte().cpu()
    path.write_bytes(b"P5 %d %d 255\n" % pixels.T.shape + pixels.numpy().tobytes())


def main():
    args = options().parse_args()
    with hpctrain.Session(args) as session:
        train_set, _ = digits()
        loader = session.loader(train_set)
        generator = generator_of(*train_set.size)
        discriminator = discriminator_of(*train_set.size)
        adam = {"lr": args.lr, "betas": (0.5, 0.999)}
        first = torch.optim.Adam(generator.parameters(), **adam)
        second = torch.optim.Adam(discriminator.parameters(), **adam)
        generator, discriminator, first, second = session.prepare(
            generator, discriminator, first, second
        )
        draws = torch.Generator().manual_seed(session.options.seed)
        shown = torch.randn(64, LATENT, generator=draws).to(next(generator.parameters()))

        with session.run(state={"draws": draws}) as run:
            for epoch in run.epochs(5):
                for images, _ in run.batches(loader):
                    with session.autocast():
                        made = generator(noise_for(session, images, draws))
                        real, fake = discriminator(images), discriminator(made.detach())
                        found = F.softplus(-real).mean() + F.softplus(fake).mean()
                    session.backward(found)
                    second.step()
                    second.zero_grad()

                    discriminator.requires_grad_(False)  # this loss trains the generator alone
                    with session.autocast():
                        fooled = F.softplus(-discriminator(made)).mean()
                    session.backward(fooled)
                    first.step()
                    first.zero_grad()
                    discriminator.requires_grad_(True)
                    run.log(discriminator_loss=found, generator_loss=fooled)
                if session.is_main:
                    with torch.no_grad(), session.autocast():
                        save_images(run.directory.path / f"epoch-{epoch}.pgm", generator(shown))


if __name__ == "__main__":
    main()
