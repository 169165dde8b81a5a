"""Plain stacks of layers."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from tests.support.zoo.layers import Classifier, ConvNormAct


def mlp(*widths: int) -> list[nn.Module]:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return layers[:-1]


def small_cnn(size: int, width: int = 16, hidden: int | None = None, classes: int = 10) -> nn.Module:
    """Two convolutions, each pooled by two, and one or two linear layers, for gray images."""
    layers: list[nn.Module] = []
    for cin, cout in pairwise((1, width, 2 * width)):
        layers += [nn.Conv2d(cin, cout, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    flat = 2 * width * (size // 4) ** 2
    return nn.Sequential(*layers, nn.Flatten(), *mlp(*(n for n in (flat, hidden, classes) if n)))


def lenet(classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)]
    layers += [nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes))


def alexnet(classes: int = 1000) -> nn.Module:
    """Krizhevsky 2014."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    for cin, cout in pairwise((192, 384, 256, 256)):
        layers += [nn.Conv2d(cin, cout, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(3, 2), nn.Flatten(), *mlp(256 * 36, 4096, 4096, classes))


def vgg11(classes: int = 1000) -> nn.Module:
    """Simonyan and Zisserman 2015, with batch normalization and one linear layer after a mean instead of three."""
    layers: list[nn.Module] = []
    cin = 3
    for width, count in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(count):
            layers.append(ConvNormAct(cin, width, 3))
            cin = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, Classifier(512, classes))


def dqn(actions: int = 18) -> nn.Module:
    """Mnih et al. 2015."""
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *mlp(3136, 512, actions))
