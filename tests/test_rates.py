"""Learning rates: the share of the initial rate at a moment of training."""

import math

import pytest

from parlay.config.rates import KINDS, Rate
from parlay.errors import InputError

VALUES = {  # over eight epochs, the last two of them a serial tail
    "cosine": {0: 1.0, 1: 0.5 * (1 + math.cos(math.pi / 8)), 2: 0.5 * (1 + math.sqrt(0.5)), 4: 0.5, 8: 0.0},
    "step": {0: 1.0, 1.99: 1.0, 2: 0.1, 3.99: 0.1, 4: 0.01, 6: 0.001, 7.99: 0.001, 8: 0.001},
    "constant": {0: 1.0, 3.5: 1.0, 8: 1.0},
    "hold": {0: 1.0, 3: 1.0, 5.999: 1.0, 6: 1.0, 7: 0.5, 8: 0.0},
    "hold:0.3": {0: 0.3, 5.999: 0.3, 6: 1.0, 7: 0.5, 8: 0.0},
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_rate_has_these_values_over_eight_epochs(kind: str) -> None:
    shares = VALUES[kind]
    assert [Rate(kind).at(epoch, 8, tail=2) for epoch in shares] == pytest.approx(list(shares.values()), abs=1e-15)


def test_without_a_tail_or_with_nothing_else_a_held_rate_is_a_cosine() -> None:
    cosine = [Rate().at(n, 4) for n in range(5)]
    assert Rate() == Rate("cosine", 0.0)
    assert [Rate("hold:0.3").at(n, 4) for n in range(5)] == [Rate("hold").at(n, 4, tail=4) for n in range(5)] == cosine


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_up_rises_linearly_from_zero_and_then_leaves_the_shape_alone(kind: str) -> None:
    for epoch, rise in [(0, 0.0), (0.5, 0.25), (1, 0.5), (2, 1.0), (5, 1.0)]:
        assert Rate(kind, warmup=2).at(epoch, 8) == pytest.approx(rise * Rate(kind).at(epoch, 8))
    shares = [Rate(kind).at(step / 10, 5) for step in range(51)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("kind", ["hold:", "hold:2", "hold:0", "hold:-1", "hold:nan", "hold:a"])
def test_a_share_that_is_none_is_an_input_error(kind: str) -> None:
    with pytest.raises(InputError, match=f"'{kind}': write a share above 0 and up to 1, as in hold:0.3"):
        Rate(kind)


@pytest.mark.parametrize("kind", ["cosinus", "cosine:0.3", ""])
def test_an_unknown_kind_is_answered_with_those_that_there_are(kind: str) -> None:
    with pytest.raises(InputError, match=f"'{kind}': write one of cosine, step, constant"):
        Rate(kind)


def test_a_negative_warm_up_is_an_input_error() -> None:
    with pytest.raises(InputError, match="warmup is -1"):
        Rate(warmup=-1)
