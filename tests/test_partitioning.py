"""Stages are slices of the model, cuts are the best ones, interfaces have the paper's sizes, and mistakes are named."""

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from parlay.coupling import Replay
from parlay.errors import InputError
from parlay.models import build
from parlay.partitioning import Partition, block_costs, cost_cuts, even_cuts, partition

GIB = 2**30


def small() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return build("resnet8", (1, 8, 8), 10), torch.randn(4, 1, 8, 8)


def linear(blocks: int) -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(blocks))), torch.randn(2, 3)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


class Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


# Stages


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_run_in_turn_equal_the_model_bit_for_bit(stages: int) -> None:
    model, images = small()
    cut = partition(model, stages, images)
    model.eval()
    x = images
    for stage in cut.stages:
        x = stage(x)
    assert len(cut) == len(cut.stages) == stages
    assert torch.equal(x, model(images))


def test_stages_share_the_models_parameters_under_their_global_names() -> None:
    model, images = small()
    pieces = [p for stage in partition(model, 3, images).stages for p in stage.named_parameters()]
    assert [name for name, _ in pieces] == [name for name, _ in model.named_parameters()]
    assert all(a is b for (_, a), b in zip(pieces, model.parameters(), strict=True))


def test_stages_keep_the_names_a_user_gave_his_blocks() -> None:
    model = nn.Sequential(OrderedDict(stem=nn.Linear(3, 4), head=nn.Linear(4, 2)))
    names = [list(stage.state_dict()) for stage in partition(model, 2, torch.randn(2, 3)).stages]
    assert names == [["stem.weight", "stem.bias"], ["head.weight", "head.bias"]]


def test_a_users_subclass_of_sequential_can_be_cut() -> None:
    class Net(nn.Sequential):
        def __init__(self, width: int) -> None:
            super().__init__(nn.Linear(3, width), nn.Linear(width, 2))

    assert partition(Net(5), 2, torch.randn(2, 3)).shapes == ((5,),)


def test_stages_are_in_the_models_mode() -> None:
    model, images = small()
    model.eval()
    assert not any(module.training for stage in partition(model, 2, images).stages for module in stage.modules())


def test_a_block_used_twice_in_one_stage_runs_twice() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(nn.Linear(3, 3), shared, shared)
    assert [len(stage) for stage in partition(model, 2, torch.randn(2, 3), by=[1]).stages] == [1, 2]


# Interfaces


@pytest.mark.parametrize(
    ("name", "stages", "cuts", "shapes", "gib"),
    [
        ("resnet110", 2, (28,), ((32, 16, 16),), 1.53),
        ("resnet110", 3, (19, 37), ((16, 32, 32), (32, 16, 16)), 4.58),
        ("wrn-40-10", 3, (7, 13), ((160, 32, 32), (320, 16, 16)), 45.78),
    ],
)
def test_interfaces_have_the_papers_memory(
    name: str, stages: int, cuts: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], gib: float
) -> None:
    with torch.device("meta"):
        cut = partition(build(name, (3, 32, 32), 10), stages, torch.empty(2, 3, 32, 32))
    assert (cut.cuts, cut.shapes) == (cuts, shapes)
    elements = sum(torch.Size(shape).numel() for shape in cut.shapes)
    assert round(50_000 * elements * 4 / GIB, 2) == gib


def test_one_stage_has_no_interface() -> None:
    model, images = small()
    for by in ("even", "cost", ()):
        assert partition(model, 1, images, by=by) == Partition(model, (), ())


def test_the_last_block_may_return_anything() -> None:
    images = torch.randn(4, 1, 8, 8)
    model = build("resnet8-vae", (1, 8, 8), 10)
    assert partition(model, 3, images).shapes == ((16, 8, 8), (32, 4, 4))
    assert len(partition(model, 3, images, by="cost")) == 3


def test_a_model_that_begins_with_whole_numbers_can_be_cut() -> None:
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    words = torch.randint(7, (2, 3))
    assert partition(model, 2, words).shapes == ((3, 5),)
    assert partition(model, 2, words, by="cost").cuts == (1,)


# Cuts


@pytest.mark.parametrize(
    ("blocks", "stages", "cuts"),
    [(56, 1, ()), (56, 2, (28,)), (56, 3, (19, 37)), (20, 3, (7, 13)), (11, 3, (4, 7)), (4, 4, (1, 2, 3))],
)
def test_even_cuts_are_the_rounded_multiples(blocks: int, stages: int, cuts: tuple[int, ...]) -> None:
    assert even_cuts(blocks, stages) == cuts


def test_even_cuts_leave_no_stage_empty_and_differ_by_at_most_one_rounding() -> None:
    for blocks in range(1, 40):
        for stages in range(1, blocks + 1):
            sizes = [b - a for a, b in itertools.pairwise((0, *even_cuts(blocks, stages), blocks))]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 2


def brute_force(costs: Sequence[int], stages: int, work: Sequence[int] | None = None) -> tuple[int, ...]:
    """The least (maximum, sum of squares, cuts) of all partitions there are."""
    factors = work or [1] * stages

    def merit(cuts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        bounds = itertools.pairwise((0, *cuts, len(costs)))
        sums = [factor * sum(costs[a:b]) for factor, (a, b) in zip(factors, bounds, strict=True)]
        return max(sums), sum(s * s for s in sums), cuts

    return min(itertools.combinations(range(1, len(costs)), stages - 1), key=merit)


@pytest.mark.parametrize("largest", [1, 3, 1000])
def test_cost_cuts_are_the_best_of_all_partitions(largest: int) -> None:
    generator = random.Random(largest)
    for _ in range(150):
        costs = [generator.randint(0, largest) for _ in range(generator.randint(1, 9))]
        stages = generator.randint(1, len(costs))
        assert cost_cuts(costs, stages) == brute_force(costs, stages), (costs, stages)


def test_cost_cuts_of_stages_that_work_more_are_the_best_of_all_partitions() -> None:
    generator = random.Random(0)
    for _ in range(150):
        costs = [generator.randint(0, 20) for _ in range(generator.randint(1, 9))]
        work = [generator.randint(1, 4) for _ in range(generator.randint(1, len(costs)))]
        assert cost_cuts(costs, len(work), work) == brute_force(costs, len(work), work), (costs, work)


def test_a_stage_that_replays_gets_fewer_blocks() -> None:
    work = [Replay().work(k, 2) for k in range(2)]
    assert cost_cuts([1.0] * 14, 2, work) == (6,)
    assert cost_cuts([1.0] * 14, 2) == (7,)


def test_cost_cuts_are_not_misled_by_the_rounding_of_sums() -> None:
    for blocks, stages in ((7, 3), (10, 3), (23, 4)):
        assert cost_cuts([0.1] * blocks, stages) == cost_cuts([1.0] * blocks, stages)


def test_cost_cuts_of_a_very_deep_network_come_at_once() -> None:
    cuts = cost_cuts([1.0 + i % 7 for i in range(602)], 200)
    assert list(cuts) == sorted(set(cuts))
    assert len(cuts) == 199


def test_a_dear_block_gets_a_stage_of_its_own() -> None:
    assert cost_cuts([1.0, 1.0, 9.0, 1.0, 1.0], 3) == (2, 3)


def test_the_partition_by_cost_cuts_where_the_work_is() -> None:
    heavy = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    model = nn.Sequential(heavy, *(nn.Identity() for _ in range(7)))
    assert partition(model, 2, torch.randn(256, 256), by="cost").cuts == (1,)
    assert partition(model, 2, torch.randn(256, 256), by="even").cuts == (4,)


def test_the_given_cuts_are_taken() -> None:
    model, images = small()
    cut = partition(model, 3, images, by=[1, 4])
    assert (cut.cuts, cut.shapes) == ((1, 4), ((16, 8, 8), (64, 2, 2)))


# Costs


def test_every_block_has_a_positive_cost() -> None:
    model, images = small()
    costs = block_costs(model, images, repeats=1)
    assert len(costs) == len(model)
    assert all(0 < cost < 10 for cost in costs)


@pytest.mark.parametrize("by", ["even", "cost"])
@pytest.mark.parametrize("name", ["resnet8", "resnet8-vae"])
def test_a_partition_leaves_the_model_as_found(name: str, by: str) -> None:
    torch.manual_seed(0)
    model, images = build(name, (1, 8, 8), 10), torch.randn(4, 1, 8, 8)
    model[2].eval()
    model[1].conv1.weight.grad = torch.ones_like(model[1].conv1.weight)
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before, randomness = images.clone(), torch.get_rng_state()

    partition(model, 2, images, by=by)

    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [key for key, p in model.named_parameters() if p.grad is not None] == ["1.conv1.weight"]
    assert bool((model[1].conv1.weight.grad == 1).all())
    assert torch.equal(torch.get_rng_state(), randomness)
    assert torch.equal(images, before)
    assert not images.requires_grad


def test_a_failed_partition_leaves_the_model_as_found_too() -> None:
    model, images = small()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    broken = nn.Sequential(*model, nn.Linear(99, 1))
    with pytest.raises(InputError):
        block_costs(broken, images)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_blocks_that_work_in_place_are_measured_and_spare_the_example() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    example = torch.randn(4, 3)
    before = example.clone()
    assert len(partition(model, 2, example, by="cost")) == 2
    assert torch.equal(example, before)


def test_frozen_blocks_are_measured() -> None:
    model, example = linear(3)
    model.requires_grad_(False)
    assert len(block_costs(model, example, repeats=1)) == 3


def test_a_surrounding_autocast_still_trains_after_a_partition() -> None:
    model, example = linear(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        partition(model, 2, example, by="cost")
        model(example).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_costs_on_the_gpu_are_those_of_the_device_not_of_the_launches() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 1)).cuda()
    dear, cheap = block_costs(model, torch.randn(8192, 4096, device="cuda"))
    assert dear > 10 * cheap > 0


# Mistakes


def refusal(model: nn.Module, stages: int, example: Tensor, by: str | Sequence[int] = "even") -> str:
    with pytest.raises(InputError) as error:
        partition(model, stages, example, by=by)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("stages", [0, -2, 6])
def test_a_count_of_stages_out_of_range_is_refused_with_both_numbers(stages: int) -> None:
    model, images = small()
    message = refusal(model, stages, images)
    assert f"{stages} stages" in message
    assert "5 blocks" in message


def test_a_count_of_stages_that_is_no_whole_number_is_refused() -> None:
    model, images = small()
    assert "whole number" in refusal(model, 2.5, images)


def test_even_and_cost_cuts_refuse_more_stages_than_blocks() -> None:
    for cut in (lambda: even_cuts(3, 4), lambda: cost_cuts([1.0] * 3, 4)):
        with pytest.raises(InputError, match="4 stages of a model with 3 blocks"):
            cut()


def test_a_cost_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="cost of block 1 is nan"):
        cost_cuts([1.0, float("nan")], 2)


def test_a_model_that_is_no_sequential_is_told_how_to_become_one() -> None:
    message = refusal(nn.Linear(3, 3), 2, torch.randn(2, 3))
    assert "Linear" in message
    assert "nn.Sequential(*blocks)" in message


def test_a_sequential_with_a_forward_of_its_own_is_refused() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    message = refusal(Doubled(nn.Linear(3, 3), nn.Linear(3, 3)), 2, torch.randn(2, 3))
    assert "forward of its own" in message


@pytest.mark.parametrize("by", ["even", "cost", (2,), (3,)])
def test_a_tuple_between_blocks_is_refused_with_the_blocks_name(by: str | Sequence[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Pair(), First(), nn.Linear(3, 3))
    message = refusal(model, 2, torch.randn(2, 3), by)
    assert "block 1 (Pair) returns a tuple" in message
    assert "one tensor" in message


def test_whole_numbers_at_a_cut_are_refused_and_inside_a_stage_are_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Function(lambda x: x.argmax(1)), nn.Embedding(3, 4), nn.Linear(4, 2))
    message = refusal(model, 2, torch.randn(2, 3), by=[2])
    assert "block 1 (Function) returns torch.int64" in message
    assert "gradients" in message
    assert partition(model, 2, torch.randn(2, 3), by=[3]).shapes == ((4,),)


def test_a_state_without_the_samples_in_front_is_refused() -> None:
    model = nn.Sequential(Function(lambda x: x.t()), Function(lambda x: x.t()))
    assert "block 0 (Function) returns the shape (3, 2) for 2 samples" in refusal(model, 2, torch.randn(2, 3))


def test_tied_weights_across_a_cut_are_refused_with_both_blocks() -> None:
    model, example = linear(4)
    model[3].weight = model[0].weight
    message = refusal(model, 2, example)
    assert "block 0 (Linear) and block 3 (Linear) share the parameter '0.weight'" in message
    assert "move the cut" in message
    assert "another K" in message


def test_tied_weights_inside_a_stage_are_allowed() -> None:
    model, example = linear(4)
    model[3].weight = model[2].weight
    assert partition(model, 2, example).cuts == (2,)


@pytest.mark.parametrize(
    ("cuts", "flaw"),
    [
        ([2, 1], "do not increase"),
        ([2, 2], "do not increase"),
        ([0, 2], "do not lie inside a model of 5 blocks"),
        ([2, 5], "do not lie inside a model of 5 blocks"),
        ([2], "1 cuts make 2 stages, not 3"),
        ([1, 2, 3], "3 cuts make 4 stages, not 3"),
        ([1.5, 2], "not block indices"),
    ],
)
def test_wrong_cuts_are_refused(cuts: list[int], flaw: str) -> None:
    model, images = small()
    message = refusal(model, 3, images, by=cuts)
    assert flaw in message
    assert "write 2 increasing whole numbers from 1 to 4" in message


@pytest.mark.parametrize(("by", "near"), [("costs", "cost"), ("evn", "even"), ("EVEN", "even"), ("", "even")])
def test_an_unknown_way_to_cut_is_answered_with_the_nearest(by: str, near: str) -> None:
    model, images = small()
    assert f"write '{near}'" in refusal(model, 3, images, by=by)


def test_an_example_that_does_not_fit_names_the_block() -> None:
    model, _ = linear(3)
    message = refusal(model, 2, torch.randn(2, 4))
    assert "block 0 (Linear) cannot take the example" in message
    assert "(2, 4)" in message


def test_an_example_that_is_no_batch_is_refused() -> None:
    model, _ = linear(3)
    for example in (torch.randn(()), torch.empty(0, 3), [1.0, 2.0]):
        for by in ("even", "cost"):
            assert "samples along dimension 0" in refusal(model, 2, example, by)


def test_no_repeats_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        block_costs(*linear(2), repeats=0)
