"""What options of methods mean: β over the epochs, the reach of a multiplier, wrong values; heads of `local`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parlay import AugmentedLagrangian, Delayed, InputError, Penalty, Replay
from parlay.link.states import Pair
from parlay.methods.local import head


def objective(method: Any, x: torch.Tensor, pair: Pair) -> float:
    b = method.stiffness(torch.tensor(method.beta), x[0].numel(), x.square().mean())
    return float(method.objective(x, pair, b))


def test_outputs_that_run_away_from_their_states_gain_nothing() -> None:
    """s² follows the outputs, so that the penalty comes to β and no further, while ⟨κ, x⟩ falls with them."""
    state, κ = torch.randn(2, 6, 3, 2, 2, generator=torch.Generator().manual_seed(3))
    for size in (10.0**n for n in range(1, 7)):
        assert objective(AugmentedLagrangian(), state - size * κ, Pair(state, κ)) > 0
    assert objective(AugmentedLagrangian(reach=1e9), state - 1e6 * κ, Pair(state, κ)) < -1e6


def test_one_beta_serves_features_of_any_size() -> None:
    state, x = torch.randn(2, 6, 3, 2, 2, generator=torch.Generator().manual_seed(3))
    losses = [objective(Penalty(), size * x, Pair(size * state, None)) for size in (0.01, 1.0, 100.0)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_beta_is_constant_or_grows_geometrically_to_the_final_one_in_the_last_epoch() -> None:
    assert [Penalty(beta=2.0).weight(epoch, 5) for epoch in range(5)] == [2.0] * 5
    method = AugmentedLagrangian(beta=1.0, beta_final=16.0)
    assert [method.weight(epoch, 5) for epoch in range(5)] == pytest.approx([1, 2, 4, 8, 16])
    assert method.weight(0, 1) == 1.0


@pytest.mark.parametrize(
    ("make", "options", "told"),
    [
        (AugmentedLagrangian, {"beta": 0.0}, "beta is 0.0: write a number greater than 0"),
        (AugmentedLagrangian, {"reach": float("inf")}, "reach is inf: write a finite number"),
        (Penalty, {"beta_final": 0.0}, "beta-final is 0.0: write a number greater than 0"),
        (Penalty, {"detail": float("nan")}, "detail is nan: write a finite number"),
        (Replay, {"beta": -1.0}, "beta is -1.0: write a number of at least 0"),
        (Delayed, {"predict": -1.0}, "predict is -1.0: write a number of at least 0"),
        (Delayed, {"accumulate": 0}, "accumulate is 0: write a number of at least 1"),
    ],
)
def test_a_wrong_option_is_named_with_what_to_write(make: Callable[..., Any], options: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        make(**options)


@pytest.mark.parametrize("shape", [(16, 8, 8), (8, 4, 3), (4, 1, 1), (7,), (5, 7)])
@pytest.mark.parametrize("outputs", [(3,), (2, 5)])
def test_a_head_takes_what_any_stage_puts_out(shape: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    for rows in (1, 4):
        assert head(shape, outputs)(torch.randn(rows, *shape)).shape == (rows, *outputs)
