"""Networks that convolve the Fourier transform of their input."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SpectrogramNet(nn.Module):
    """A filter, a spectrogram, and an image classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(1, 1, 5, padding=2)
        self.image = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, 3)
        self.register_buffer("window", torch.hann_window(32))

    def forward(self, x: Tensor) -> Tensor:
        signal = self.filter(x)[:, 0]
        spectrum = torch.stft(signal, 32, 8, window=self.window, center=True, return_complex=True)
        power = torch.view_as_real(spectrum).square().sum(-1)
        return self.head(self.image(torch.log1p(power)[:, None]).relu().mean((2, 3)))


class FourierUnit(nn.Module):
    """The spectral transform of Chi, Jiang and Mu, "Fast Fourier Convolution", NeurIPS 2020: 1x1 over frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.spectral = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        n, c, h, w = x.shape
        z = torch.view_as_real(torch.fft.rfftn(x, dim=(-2, -1), norm="ortho"))
        z = self.spectral(z.permute(0, 1, 4, 2, 3).reshape(n, 2 * c, h, w // 2 + 1)).relu()
        z = z.reshape(n, c, 2, h, w // 2 + 1).permute(0, 1, 3, 4, 2).contiguous()
        return x + torch.fft.irfftn(torch.view_as_complex(z), s=(h, w), dim=(-2, -1), norm="ortho")
