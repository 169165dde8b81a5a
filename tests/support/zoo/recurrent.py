"""Networks with recurrent layers."""

from __future__ import annotations

from torch import Tensor, nn


class Crnn(nn.Module):
    """Convolutions, and LSTMs in both directions along the width, for lines of text (Shi et al. 2017).

    Images `[N, 1, 32, W]` give logits `[N, classes, W / 4 + 1]`.
    """

    def __init__(self, classes: int = 37, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        a, b, c, d = (width << i for i in range(4))
        squeeze = ((2, 2), (2, 1), (0, 1))  # halves the height alone
        self.features = nn.Sequential(
            *(nn.Conv2d(1, a, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(b, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()),
            *(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(*squeeze)),
            *(nn.Conv2d(c, d, 3, padding=1), nn.BatchNorm2d(d), nn.ReLU()),
            *(nn.Conv2d(d, d, 3, padding=1), nn.ReLU(), nn.MaxPool2d(*squeeze)),
            *(nn.Conv2d(d, d, 2), nn.BatchNorm2d(d), nn.ReLU()),
        )
        self.lstm = nn.LSTM(d, hidden, num_layers=2, bidirectional=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.lstm(self.features(x).squeeze(2).permute(2, 0, 1))
        return self.head(steps).permute(1, 2, 0)
