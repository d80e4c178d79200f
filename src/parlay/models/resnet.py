"""Pre-activation residual networks of the CIFAR kind (He et al. 2016b) as a flat list of blocks.

In: the shape of one input, a depth and a number of classes. Out: `nn.Sequential(input layer, residual blocks, output
layer)`, every entry a module from one tensor to one tensor, so that any place between two entries is a place to cut.
"""

import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (16, 32, 64)  # channels of the three groups (He et al. 2016a, section 4.2)


def convolution(channels_in: int, channels_out: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias, since the next layer is a batch norm, drawn as in He et al. 2015."""
    layer = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class InputLayer(nn.Module):
    """From the image to the first feature map."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = convolution(channels_in, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.conv(x)
        return features


class ResidualBlock(nn.Module):
    """X + F(X) with F = BN-ReLU-conv-BN-ReLU-conv (figure of appendix A).

    Where the shape changes, the shortcut is a 1x1 convolution of the activated input. The other usual choice, zeros for
    the new channels, was about a point worse on ResNet-20 without augmentation (CIFAR-10, 30 epochs, two seeds each).
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = convolution(channels_in, channels_out, stride=stride)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.conv2 = convolution(channels_out, channels_out)
        changes = stride > 1 or channels_in != channels_out
        self.projection = convolution(channels_in, channels_out, kernel=1, stride=stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        # In place is safe: the backward of a batch norm reads its input, never its output.
        activated = F.relu(self.norm1(x), inplace=True)
        residual: Tensor = self.conv2(F.relu(self.norm2(self.conv1(activated)), inplace=True))
        return residual + (x if self.projection is None else self.projection(activated))


class OutputLayer(nn.Module):
    """From the last feature map to the class scores: BN-ReLU, mean over the pixels, linear."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.linear = nn.Linear(channels, classes)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        # A plain mean and not an adaptive pool, whose backward on CUDA is not deterministic.
        scores: Tensor = self.linear(F.relu(self.norm(x), inplace=True).mean((2, 3)))
        return scores


def encoder(channels_in: int, n: int, widths: tuple[int, int, int] = WIDTHS) -> list[nn.Module]:
    """The input layer and three groups of n residual blocks; the second and third group begin with stride 2."""
    blocks: list[nn.Module] = [InputLayer(channels_in, WIDTHS[0])]
    channels = WIDTHS[0]
    for group, width in enumerate(widths):
        for i in range(n):
            blocks.append(ResidualBlock(channels, width, stride=2 if group > 0 and i == 0 else 1))
            channels = width
    return blocks


def resnet(shape: tuple[int, int, int], classes: int, n: int) -> nn.Sequential:
    """ResNet of depth 6n+2: 3n+2 blocks."""
    return nn.Sequential(*encoder(shape[0], n), OutputLayer(WIDTHS[-1], classes))
