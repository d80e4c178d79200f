"""The updates of states and multipliers are those of section 2 of the design, formula by formula."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parlay import AugmentedLagrangian, Coupling, InputError, Penalty
from parlay.coupling import Pair

SHAPE = (6, 3, 2, 2)
ELEMENTS = 12
BETAS = [0.01, 1.0, 3.0, 100.0]
WIDE = 1e9  # a trust region that never cuts
METHODS: list[type[Coupling]] = [AugmentedLagrangian, Penalty]


def joint(**options: object) -> Penalty:
    return Penalty(order="joint", **options)


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """λ, κ, x, p: all different."""
    random = torch.Generator().manual_seed(3)
    state, κ, x, p = (torch.randn(SHAPE, generator=random) for _ in range(4))
    return state, κ, x, p


Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
ONE = torch.tensor(1.0)


def rms(t: Tensor) -> Tensor:
    return t.flatten(1).square().mean(1).sqrt()


# The local loss


@pytest.mark.parametrize("b", [0.5, 2.0])
def test_the_local_loss_is_the_mean_over_the_samples_of_the_printed_one(tensors: Tensors, b: float) -> None:
    state, κ, x, _ = tensors
    distance = sum(float((state[i] - x[i]).square().sum()) for i in range(6)) / 6
    signal = sum(float((κ[i] * x[i]).sum()) for i in range(6)) / 6
    stiffness = torch.tensor(b)
    assert float(Penalty().local_loss(x, Pair(state, None), stiffness)) == pytest.approx(b * distance, rel=1e-5)
    both = float(AugmentedLagrangian(reach=WIDE).local_loss(x, Pair(state, κ), stiffness))
    assert both == pytest.approx(b * distance + signal, rel=1e-5)


def test_the_gradient_of_the_local_loss_is_per_sample_what_the_lagrangian_says(tensors: Tensors) -> None:
    state, κ, x, _ = tensors
    x = x.clone().requires_grad_()
    AugmentedLagrangian(reach=WIDE).local_loss(x, Pair(state, κ), torch.tensor(2.0)).backward()
    torch.testing.assert_close(6 * x.grad, 4.0 * (x.detach() - state) + κ)


@pytest.mark.parametrize("reach", [0.1, 0.25])
def test_a_multiplier_counts_less_with_the_square_of_the_distance_beyond_its_reach(
    tensors: Tensors, reach: float
) -> None:
    state, κ, x, _ = tensors
    unit = (x / rms(x).view(-1, 1, 1, 1)) * rms(state).view(-1, 1, 1, 1)  # as large as the states
    distance = torch.tensor([0.0, 0.05, 0.0999, 0.5, 2.0, 1e3])
    x = (state + distance.view(-1, 1, 1, 1) * unit).requires_grad_()
    AugmentedLagrangian(reach=reach).local_loss(x, Pair(state, κ), torch.tensor(0.0)).backward()
    weights = torch.tensor([1.0, 1.0, 1.0, *((reach / distance[3:]) ** 2)])
    torch.testing.assert_close(6 * x.grad, weights.view(-1, 1, 1, 1) * κ)


def test_a_state_of_zeros_that_the_output_has_kept_has_its_multiplier_in_full(tensors: Tensors) -> None:
    _, κ, x, _ = tensors
    zero = torch.zeros_like(x).requires_grad_()
    AugmentedLagrangian().local_loss(zero, Pair(torch.zeros_like(x), κ), torch.tensor(1.0)).backward()
    torch.testing.assert_close(6 * zero.grad, κ)


@pytest.mark.parametrize("reach", [0.0, -1.0, float("inf")])
def test_a_wrong_reach_is_named(reach: float) -> None:
    with pytest.raises(InputError, match=f"reach is {reach}: write a number greater than 0"):
        AugmentedLagrangian(reach=reach)


@pytest.mark.parametrize("form", ["relative", "mean"])
def test_outputs_that_run_away_from_their_states_gain_nothing(tensors: Tensors, form: str) -> None:
    """s² follows the outputs, so that the relative penalty comes to β and no further, while ⟨κ, x⟩ falls with them."""
    state, κ, _, _ = tensors

    def loss(size: float, reach: float) -> float:
        method, x = AugmentedLagrangian(form=form, reach=reach), state - size * κ
        b = method.stiffness(torch.tensor(method.beta), ELEMENTS, x.square().mean())
        return float(method.local_loss(x, Pair(state, κ), b))

    sizes = [10.0**n for n in range(1, 7)]
    assert all(loss(size, 0.25) > 0 for size in sizes)
    if form == "relative":
        assert loss(1e6, WIDE) < -1e6


# The augmented Lagrangian


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("trust", [0.01, 1.0, WIDE])
def test_full_steps_send_the_multiplier_to_the_adjoint_and_the_state_to_the_output(
    tensors: Tensors, beta: float, trust: float
) -> None:
    state, κ, x, p = tensors
    new = AugmentedLagrangian(trust=trust).update(Pair(state, κ), x, p, torch.tensor(beta), ONE)
    assert torch.equal(new.multiplier, p)
    assert torch.equal(new.state, x)  # the violation right after the update is zero


@pytest.mark.parametrize("beta", BETAS)
def test_a_part_of_the_multiplier_step_leaves_the_rest_of_the_pull_to_the_state(tensors: Tensors, beta: float) -> None:
    state, κ, x, p = tensors
    b = torch.tensor(beta)
    new = AugmentedLagrangian(multiplier_step=0.25, trust=WIDE).update(Pair(state, κ), x, p, b, ONE)
    torch.testing.assert_close(new.multiplier, κ + 0.25 * (p - κ))
    torch.testing.assert_close(new.state, x - (p - new.multiplier) / (2 * b))


@pytest.mark.parametrize("beta", BETAS)
def test_hestenes_is_the_step_of_the_multiplier_from_the_solved_state(tensors: Tensors, beta: float) -> None:
    """κ − 2b (λ* − x) with λ* = x − (p − κ)/(2b), which is p."""
    state, κ, x, p = tensors
    b = torch.tensor(beta)
    solved = x - (p - κ) / (2 * b)
    new = AugmentedLagrangian().update(Pair(state, κ), x, p, b, ONE)
    torch.testing.assert_close(κ - 2 * b * (solved - x), new.multiplier, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("beta", BETAS)
def test_printed_solves_for_the_state_first_and_follows_the_printed_formula(tensors: Tensors, beta: float) -> None:
    state, κ, x, p = tensors
    b, η = torch.tensor(beta), 0.3
    method = AugmentedLagrangian(multiplier="printed", multiplier_step=η, trust=WIDE)
    new = method.update(Pair(state, κ), x, p, b, ONE)
    torch.testing.assert_close(new.state, x - (p - κ) / (2 * b))
    torch.testing.assert_close(new.multiplier, κ - η / (2 * b) * (new.state - x))


def test_a_start_from_outputs_has_no_multipliers_yet(tensors: Tensors) -> None:
    _, _, x, _ = tensors
    state, κ = AugmentedLagrangian().start(x)
    assert torch.equal(state, x)
    assert torch.equal(κ, torch.zeros_like(x))
    assert torch.equal(Penalty().start(x).state, x)
    assert Penalty().start(x).multiplier is None


# The penalty


@pytest.mark.parametrize("beta", BETAS)
def test_the_joint_penalty_displaces_the_output_by_the_adjoint(tensors: Tensors, beta: float) -> None:
    state, _, x, p = tensors
    new = joint(trust=WIDE).update(Pair(state, None), x, p, torch.tensor(beta), ONE)
    torch.testing.assert_close(new.state, x - p / (2 * beta))


def test_red_black_displaces_an_input_and_replaces_a_target(tensors: Tensors) -> None:
    state, _, x, p = tensors
    method, pair, b = Penalty(), Pair(state, None), torch.tensor(2.0)
    assert torch.equal(method.update(pair, x, None, b, ONE).state, x)
    torch.testing.assert_close(method.update(pair, None, p, b, ONE).state, state - p / 4)


# Steps of the state


@pytest.mark.parametrize("make", [joint, lambda **o: AugmentedLagrangian(multiplier="printed", **o)])
@pytest.mark.parametrize("α", [0.0, 0.3, 1.0])
def test_a_state_step_goes_that_part_of_the_way(tensors: Tensors, make: Callable[..., Coupling], α: float) -> None:
    state, κ, x, p = tensors
    full = make(trust=WIDE).update(Pair(state, κ), x, p, torch.tensor(2.0), ONE).state
    part = make(trust=WIDE, state_step=α).update(Pair(state, κ), x, p, torch.tensor(2.0), ONE).state
    torch.testing.assert_close(part, state + α * (full - state))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("η", [0.001, 0.1])
def test_a_state_rate_is_the_gradient_step_of_the_paper(tensors: Tensors, beta: float, η: float) -> None:
    state, κ, x, p = tensors
    b = torch.tensor(beta)
    penalty = joint(state_rate=η, trust=WIDE).update(Pair(state, None), x, p, b, ONE).state
    lagrangian = AugmentedLagrangian(multiplier="printed", state_rate=η, trust=WIDE)
    both = lagrangian.update(Pair(state, κ), x, p, b, ONE).state
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(penalty, state - η * (2 * b * (state - x) + p), **close)
    torch.testing.assert_close(both, state - η * (2 * b * (state - x) + p - κ), **close)


# The trust region


@pytest.mark.parametrize("s2", [0.25, 4.0])
@pytest.mark.parametrize("τ", [0.1, 0.5])
def test_the_trust_region_cuts_each_displacement_to_its_size_and_keeps_its_direction(
    tensors: Tensors, τ: float, s2: float
) -> None:
    _, _, x, pull = tensors
    pull = pull * torch.tensor([1e-6, 1e-3, 1.0, 10.0, 1e3, 0.0]).view(-1, 1, 1, 1)
    b, radius = torch.tensor(0.5), τ * s2**0.5
    d = joint(trust=τ).displaced(torch.zeros_like(x), pull, b, torch.tensor(s2))
    small = rms(pull) < radius
    assert small.tolist() == [True, True, False, False, False, True]
    assert torch.equal(d[small], -pull[small])  # smaller ones are left alone, and a zero does not become a nan
    torch.testing.assert_close(rms(d)[~small], torch.full((3,), radius))
    cosine = torch.nn.functional.cosine_similarity(d.flatten(1)[~small], -pull.flatten(1)[~small])
    torch.testing.assert_close(cosine, torch.ones(3))


# β and b


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("form", "b"), [("sum", 3.0), ("mean", 3.0 / ELEMENTS), ("relative", 3.0 / (ELEMENTS * 0.5))])
def test_a_form_gives_this_stiffness(method: type[Coupling], form: str, b: float) -> None:
    found = method(beta=1.0, form=form).stiffness(torch.tensor(3.0), ELEMENTS, torch.tensor(0.5))
    assert float(found) == pytest.approx(b)


def test_the_relative_form_is_the_same_for_features_of_any_size(tensors: Tensors) -> None:
    state, _, x, _ = tensors
    losses = []
    for size in (0.01, 1.0, 100.0):
        b = Penalty().stiffness(torch.tensor(3.0), ELEMENTS, (size * x).square().mean())
        losses.append(float(Penalty().local_loss(size * x, Pair(size * state, None), b)))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_beta_is_constant_unless_a_final_one_is_given() -> None:
    assert [Penalty(beta=2.0).beta_at(epoch, 5) for epoch in range(5)] == [2.0] * 5


def test_beta_grows_geometrically_to_the_final_one_in_the_last_epoch() -> None:
    method = AugmentedLagrangian(beta=1.0, beta_final=16.0)
    assert [method.beta_at(epoch, 5) for epoch in range(5)] == pytest.approx([1, 2, 4, 8, 16])
    assert method.beta_at(0, 1) == 1.0


# Wrong values

WRONG = [
    ({"beta": 0.0}, "beta is 0.0: write a number greater than 0"),
    ({"beta": -1.0}, "beta is -1.0"),
    ({"beta": float("nan")}, "beta is nan"),
    ({"beta": float("inf")}, "beta is inf"),
    ({"beta_final": 0.0}, "beta-final is 0.0"),
    ({"trust": 0.0}, "trust is 0.0"),
    ({"state_rate": -0.1}, "state-rate is -0.1"),
    ({"state_step": 1.5}, "state-step is 1.5: write a number between 0 and 1"),
    ({"state_step": -0.5}, "state-step is -0.5"),
    ({"state_step": float("nan")}, "state-step is nan"),
    ({"form": "relativ"}, "'relativ': write one of relative, mean, sum"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("options", "message"), WRONG)
def test_a_wrong_value_is_named_with_what_to_write(
    method: type[Coupling], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        method(**options)


@pytest.mark.parametrize("step", [-0.1, float("nan"), float("inf")])
def test_a_wrong_multiplier_step_is_named(step: float) -> None:
    with pytest.raises(InputError, match=f"multiplier-step is {step}: write a number of at least 0"):
        AugmentedLagrangian(multiplier_step=step)


def test_unknown_orders_and_multipliers_are_named() -> None:
    with pytest.raises(InputError, match="'black-red': write red-black or joint"):
        Penalty(order="black-red")
    with pytest.raises(InputError, match="'powell': write hestenes or printed"):
        AugmentedLagrangian(multiplier="powell")
