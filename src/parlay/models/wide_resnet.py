"""Wide residual networks (Zagoruyko and Komodakis 2016): few blocks with k times the channels, as a flat list.

In: the shape of one input, depth, width and number of classes. Out: the same kind of `nn.Sequential` as in `resnet`.
"""

from torch import nn

from parlay.models.resnet import WIDTHS, OutputLayer, encoder


def wide_resnet(shape: tuple[int, int, int], classes: int, n: int, k: int) -> nn.Sequential:
    """WRN-(6n+4)-k: 3n+2 blocks. The input layer keeps 16 channels."""
    widths = (WIDTHS[0] * k, WIDTHS[1] * k, WIDTHS[2] * k)
    return nn.Sequential(*encoder(shape[0], n, widths), OutputLayer(widths[-1], classes))
