"""The networks have the literature's sizes, take the data sets' shapes, and are flat lists of plain blocks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.errors import InputError
from parlay.models import build, is_vae
from parlay.models.resnet import ResidualBlock
from parlay.models.resnet_vae import LOG_VARIANCE_BOUND, Latent, Reconstruction, ReconstructionAndKL

DIGITS, MNIST, CIFAR, ODD = (1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 11, 7)


def on_meta(name: str, shape: tuple[int, int, int] = CIFAR, classes: int = 10) -> nn.Sequential:
    """The network without numbers: sizes and shapes are all that is asked of it."""
    with torch.device("meta"):
        return build(name, shape, classes)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "blocks", "count"),
    [
        ("resnet8", 5, 77_850),
        ("resnet20", 11, 272_282),  # 0.27 M (He et al. 2016a, table 6)
        ("resnet110", 56, 1_730_522),  # 1.7 M
        ("resnet1202", 602, 19_423_834),  # 19.4 M
        ("wrn-10-1", 5, 77_850),
        ("wrn-16-2", 8, 691_674),  # 0.7 M (Zagoruyko and Komodakis 2016)
        ("wrn-28-10", 14, 36_479_194),  # 36.5 M
        ("wrn-40-10", 20, 55_841_754),  # 55.8 M
    ],
)
def test_a_network_has_the_literatures_number_of_parameters(name: str, blocks: int, count: int) -> None:
    model = on_meta(name)
    assert (len(model), parameters(model)) == (blocks, count)


def test_a_hundred_classes_add_ninety_rows_to_the_output_layer() -> None:
    assert parameters(on_meta("resnet110", classes=100)) - parameters(on_meta("resnet110")) == 90 * 65


@pytest.mark.parametrize("name", ["resnet8", "wrn-10-1", "wrn-10-2"])
@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR, ODD, (1, 1, 1)])
def test_a_classifier_gives_a_score_per_class(name: str, shape: tuple[int, int, int]) -> None:
    assert build(name, shape, 7)(torch.randn(2, *shape)).shape == (2, 7)
    assert build(name, shape, 7).eval()(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR, ODD])
def test_an_auto_encoder_gives_back_its_inputs_shape(shape: tuple[int, int, int]) -> None:
    reconstruction, mean, log_variance = build("resnet8-vae", shape, 10)(torch.randn(2, *shape))
    assert reconstruction.shape == (2, *shape)
    assert mean.shape == log_variance.shape
    assert mean.shape[0] == 2


def test_only_the_second_and_third_group_halve_the_sides() -> None:
    x = torch.empty(1, *CIFAR, device="meta")
    shapes = []
    for block in on_meta("resnet14")[:-1]:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 2 + [(64, 8, 8)] * 2


def test_a_block_is_its_input_plus_the_residual() -> None:
    torch.manual_seed(0)
    block = ResidualBlock(4, 4).eval()
    x = torch.randn(2, 4, 5, 5)
    residual = block.conv2(F.relu(block.norm2(block.conv1(F.relu(block.norm1(x))))))
    assert torch.equal(block(x), residual + x)


def test_a_block_that_changes_the_shape_projects_the_activated_input() -> None:
    torch.manual_seed(0)
    block = ResidualBlock(4, 8, stride=2).eval()
    x = torch.randn(2, 4, 5, 5)
    nn.init.zeros_(block.conv2.weight)  # the shortcut alone is left
    assert block.projection is not None
    assert torch.equal(block(x), block.projection(F.relu(block.norm1(x))))


def test_convolutions_are_drawn_with_the_variance_of_their_fan_out() -> None:
    torch.manual_seed(0)
    weight = build("resnet8", CIFAR, 10)[3].conv1.weight  # from 32 to 64 channels
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)


@pytest.mark.parametrize("name", ["resnet8", "wrn-10-2", "resnet8-vae"])
def test_channels_last_goes_through_the_whole_encoder(name: str) -> None:
    x = torch.randn(2, *CIFAR).to(memory_format=torch.channels_last)
    for block in build(name, CIFAR, 10).to(memory_format=torch.channels_last)[:-1]:
        x = block(x)
        assert x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["resnet8", "wrn-10-2", "resnet8-vae"])
def test_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, DIGITS, 10)
    images = torch.randn(4, *DIGITS)
    output = model(images)
    loss = ReconstructionAndKL()(output, images) if is_vae(name) else output.square().mean()
    loss.backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", ["resnet8", "wrn-10-2", "resnet8-vae"])
def test_the_same_seed_builds_the_same_weights(name: str) -> None:
    def weights() -> list[Tensor]:
        torch.manual_seed(3)
        return list(build(name, DIGITS, 10).parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(), weights(), strict=True))


def test_the_plain_auto_encoder_has_the_encoder_of_resnet110() -> None:
    encoder, classifier = on_meta("resnet-vae", MNIST)[:-1], on_meta("resnet110", MNIST)[:-1]
    assert [(k, p.shape) for k, p in encoder.named_parameters()] == [
        (k, p.shape) for k, p in classifier.named_parameters()
    ]


def test_an_auto_encoder_samples_in_training_and_takes_the_mean_in_evaluation() -> None:
    torch.manual_seed(0)
    last = build("resnet8-vae", DIGITS, 10)[-1]
    features = torch.randn(4, 64, 2, 2)
    assert not torch.equal(last(features)[0], last(features)[0])
    last.eval()
    assert torch.equal(last(features)[0], last.decoder(last(features)[1]))


def test_the_log_variance_stays_bounded_when_the_weights_explode() -> None:
    torch.manual_seed(0)
    latent = Latent(4, (2, 2), 3)
    nn.init.normal_(latent.linear.weight, std=1000.0)
    assert latent(torch.randn(8, 4, 2, 2))[1].abs().max() <= LOG_VARIANCE_BOUND


def test_the_test_loss_is_the_mean_square_error_alone() -> None:
    images, zeros = torch.full((2, 1, 2, 2), 3.0), torch.zeros(2, 5)
    assert Reconstruction()((images - 2, zeros + 9, zeros), images).item() == 4.0


def test_the_training_loss_adds_the_divergence_per_pixel() -> None:
    images = torch.randn(3, 2, 4, 4)
    mean, log_variance = torch.randn(3, 5), torch.randn(3, 5)
    posterior = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    prior = torch.distributions.Normal(torch.zeros(3, 5), torch.ones(3, 5))
    kl = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
    loss = ReconstructionAndKL(kl_weight=0.5)((images + 1, mean, log_variance), images)
    torch.testing.assert_close(loss, 1 + 0.5 * kl / 32)


def test_the_training_loss_is_the_mean_over_the_samples() -> None:
    torch.manual_seed(0)
    images, output = torch.randn(4, 1, 3, 3), (torch.randn(4, 1, 3, 3), torch.randn(4, 2), torch.randn(4, 2))
    loss = ReconstructionAndKL()
    each = [loss(tuple(t[i : i + 1] for t in output), images[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(loss(output, images), torch.stack(each).mean())


def test_only_auto_encoders_are_their_own_target() -> None:
    names = ("resnet-vae", "resnet8-vae", "resnet20", "wrn-16-2", "nothing")
    assert [is_vae(name) for name in names] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("resnet21", "write resnet20 or resnet26"),
        ("resnet2", "write resnet8"),
        ("resnet0", "write resnet8"),
        ("resnet111-vae", "write resnet110-vae or resnet116-vae"),
        ("wrn-41-10", "write wrn-40-10 or wrn-46-10"),
        ("wrn-4-2", "write wrn-10-2"),
        ("wrn-40-0", "write wrn-40-1 or a larger width"),
        ("ResNet-110", "write resnet110 "),
        ("resent20", "write resnet20 "),
        ("wrn_40_10", "write wrn-40-10 "),
        ("resnet_vae", "write resnet-vae "),
        ("transformer", "write resnet{6n+2}, wrn-{6n+4}-{k} or resnet-vae"),
        ("", "write resnet{6n+2}, wrn-{6n+4}-{k} or resnet-vae"),
    ],
)
def test_a_wrong_name_is_answered_with_what_to_write(name: str, advice: str) -> None:
    with pytest.raises(InputError) as error:
        build(name, CIFAR, 10)
    assert advice in f"{error.value} "
    assert repr(name) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "classes", "advice"),
    [((32, 32), 10, "(channels, height, width)"), ((3, 0, 32), 10, "at least 1"), (CIFAR, 0, "classes")],
)
def test_a_wrong_shape_or_class_count_is_refused(shape: tuple[int, int, int], classes: int, advice: str) -> None:
    with pytest.raises(InputError) as error:
        build("resnet8", shape, classes)
    assert advice in str(error.value)
