"""Fine-tuning of a torchvision ResNet-18: its new head first, then the whole model.

For example, with the weights of ImageNet from torchvision:

    python -c 'import torch; from torchvision.models import resnet18
    torch.save(resnet18("DEFAULT").state_dict(), "resnet18.pt")'
    python examples/finetune.py --weights resnet18.pt
"""

import torch
import torch.nn.functional as F
from torchvision import models

import hpctrain
from hpctrain.data import digits


def options():
    parser = hpctrain.options(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("options of this example").add_argument
    add("--lr", type=float, default=0.02, metavar="X", help="rate of the head (%(default)s)")
    add(
        "--unfreeze-epoch", type=int, default=1, metavar="N", help="train all from it (%(default)s)"
    )
    text = "rate of the backbone, as a part of --lr (%(default)s)"
    add("--weights", metavar="FILE", help="initial weights of a ResNet-18, without its head")
    add("--backbone-rate", type=float, default=0.1, metavar="X", help=text)
    return parser


def enlarge(batch):
    """Return grey images with three channels and twice the size."""
    images, targets = batch
    return F.interpolate(images.expand(-1, 3, -1, -1), scale_factor=2.0), targets


def evaluate(session, model, loader, classes):
    scores = session.classification(classes)
    with torch.no_grad(), session.autocast():
        for images, targets in loader:
            scores.update(model(images), targets)
    return scores.compute()


def main():
    args = options().parse_args()
    with hpctrain.Session(args) as session:
        train_set, test_set = digits()
        train_loader = session.loader(train_set, on_device=enlarge)
        test_loader = session.loader(test_set, train=False, on_device=enlarge)

        # In eval mode, batch norm keeps the statistics of the weights that it began with. So the
        # numbers do not depend on the micro-batch either.
        model = models.resnet18(num_classes=train_set.classes).eval()
        head = list(model.fc.parameters())
        backbone = [p for name, p in model.named_parameters() if not name.startswith("fc.")]
        slow = {"params": backbone, "lr": args.lr * args.backbone_rate}
        optimizer = torch.optim.SGD([{"params": head}, slow], lr=args.lr, momentum=0.9)
        model, optimizer = session.prepare(model, optimizer)
        if args.weights:
            session.load_weights(model, args.weights, skip=["fc.*"])

        with session.run() as run:
            for epoch in run.epochs(2):
                for parameter in backbone:
                    parameter.requires_grad_(epoch >= args.unfreeze_epoch)
                for images, targets in run.batches(train_loader):
                    with session.autocast():
                        loss = F.cross_entropy(model(images), targets)
                    session.step(loss)
                    run.log(loss=loss)
                run.log(**evaluate(session, model, test_loader, train_set.classes).metrics())


if __name__ == "__main__":
    main()
