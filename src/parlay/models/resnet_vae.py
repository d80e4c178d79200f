"""A variational auto-encoder whose encoder is a residual network, and its losses (the paper's image generation).

In: the shape of one image. Out: `nn.Sequential(input layer, residual blocks, latent and decoder)`. Only the encoder is
cut, so everything from the latent on is one last block; it returns (reconstruction, mean, log variance).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.models.resnet import WIDTHS, ResidualBlock, encoder

# Enough for MNIST: 20 and 32 end alike, at 0.126 and 0.124 on 1,000 test images (resnet8-vae, 240 steps of 64 images,
# Adam at 0.01 and then 0.001, one seed).
LATENT = 20
LOG_VARIANCE_BOUND = 8.0

Output = tuple[Tensor, Tensor, Tensor]  # reconstruction, mean, log variance


def halved(side: int) -> int:
    """What a convolution with stride 2 leaves of a side."""
    return (side + 1) // 2


class Latent(nn.Module):
    """From the encoder's features to mean and log variance of the latent: BN-ReLU, flattened, linear."""

    def __init__(self, channels: int, sides: tuple[int, int], latent: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.linear = nn.Linear(channels * sides[0] * sides[1], 2 * latent)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.linear(F.relu(self.norm(x), inplace=True).flatten(1)).chunk(2, dim=1)
        # Adam at the paper's rate 0.01 moves a sum over thousands of inputs by tens in one step, and this one is
        # exponentiated. The bound is smooth, so that its gradient never is zero.
        return mean, LOG_VARIANCE_BOUND * torch.tanh(log_variance / LOG_VARIANCE_BOUND)


class Decoder(nn.Module):
    """From the latent to the image: the encoder's groups mirrored, nearest upsampling in the place of strides.

    One residual block per group, whatever the encoder's depth. The decoder is part of the last stage and never cut: as
    deep as the encoder it would hold half of all the work, and no K could give the paper's speed-up of 2.33.
    """

    def __init__(self, shape: tuple[int, int, int], latent: int) -> None:
        super().__init__()
        channels, height, width = shape
        full = (height, width)
        half = (halved(height), halved(width))
        self.sides = ((halved(half[0]), halved(half[1])), half, full)
        small, middle, large = WIDTHS
        self.linear = nn.Linear(latent, large * self.sides[0][0] * self.sides[0][1])
        self.groups = nn.ModuleList(
            ResidualBlock(channels_in, channels_out)
            for channels_in, channels_out in ((large, large), (large, middle), (middle, small))
        )
        self.norm = nn.BatchNorm2d(small)
        self.conv = nn.Conv2d(small, channels, kernel_size=3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x: Tensor = self.linear(z).unflatten(1, (-1, *self.sides[0]))
        for group, side in zip(self.groups, self.sides, strict=True):
            if x.shape[2:] != side:
                x = F.interpolate(x, size=side)
            x = group(x)
        reconstruction: Tensor = self.conv(F.relu(self.norm(x), inplace=True))
        return reconstruction


class LatentAndDecoder(nn.Module):
    """The last block: the latent's distribution, a sample of it (its mean in eval mode), and the decoded image."""

    def __init__(self, shape: tuple[int, int, int], latent: int = LATENT) -> None:
        super().__init__()
        self.decoder = Decoder(shape, latent)
        self.latent = Latent(WIDTHS[-1], self.decoder.sides[0], latent)

    def forward(self, x: Tensor) -> Output:
        mean, log_variance = self.latent(x)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance) if self.training else mean
        return self.decoder(z), mean, log_variance


def resnet_vae(shape: tuple[int, int, int], n: int) -> nn.Sequential:
    """The encoder of a ResNet of depth 6n+2 and the block that decodes: 3n+2 blocks."""
    return nn.Sequential(*encoder(shape[0], n), LatentAndDecoder(shape))


class Reconstruction(nn.Module):
    """Mean over samples and pixels of (reconstruction − image)²: the paper's test loss. The target is the image."""

    def forward(self, output: Output, target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target)


class ReconstructionAndKL(nn.Module):
    """The training loss: mean over samples of the mean square error plus `kl_weight` · KL / pixels.

    KL is that of the latent's distribution from the standard normal, in nats per sample. Both terms are per pixel (and
    channel), so one weight serves images of any size; with weight 1 this is the evidence lower bound, up to sign
    and constants, of a decoder whose pixels have Gaussian noise of variance 1/2.
    """

    def __init__(self, kl_weight: float = 1.0) -> None:
        super().__init__()
        self.kl_weight = kl_weight

    def forward(self, output: Output, target: Tensor) -> Tensor:
        reconstruction, mean, log_variance = output
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1).mean()
        return F.mse_loss(reconstruction, target) + self.kl_weight * kl / target[0].numel()
