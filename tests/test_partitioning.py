"""Stages are slices of the model, cuts are the best ones, links have the paper's sizes, and mistakes are named."""

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from parlay.costs import block_costs
from parlay.errors import InputError
from parlay.methods.replay import Replay
from parlay.models import build
from parlay.partitioning import cost_cuts, even_cuts, partition

GIB = 2**30


def small() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return build("resnet8", (1, 8, 8), 10), torch.randn(4, 1, 8, 8)


def linear(blocks: int) -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(blocks))), torch.randn(2, 3)


class Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)  # type: ignore[operator]


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)  # type: ignore[no-any-return]


# Stages


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_run_in_turn_equal_the_model_and_share_its_parameters_under_their_names(stages: int) -> None:
    model, images = small()
    cut = partition(model.eval(), stages, images)
    x = images
    for stage in cut.stages:
        x = stage(x)
    assert len(cut) == len(cut.stages) == len(cut.cuts) + 1 == len(cut.shapes) + 1 == stages
    assert torch.equal(x, model(images))
    pieces = [p for stage in cut.stages for p in stage.named_parameters()]
    assert [name for name, _ in pieces] == [name for name, _ in model.named_parameters()]
    assert all(a is b for (_, a), b in zip(pieces, model.parameters(), strict=True))
    assert not any(module.training for stage in cut.stages for module in stage.modules())


def test_a_users_own_sequential_is_cut_and_its_names_are_kept() -> None:
    class Net(nn.Sequential):
        def __init__(self, width: int) -> None:
            super().__init__(OrderedDict(stem=nn.Linear(3, width), head=nn.Linear(width, 2)))

    cut = partition(Net(5), 2, torch.randn(2, 3))
    assert cut.shapes == ((5,),)
    assert [next(iter(stage.state_dict())) for stage in cut.stages] == ["stem.weight", "head.weight"]


def test_a_block_used_twice_in_one_stage_runs_twice() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(nn.Linear(3, 3), shared, shared)
    assert [len(stage) for stage in partition(model, 2, torch.randn(2, 3), by=[1]).stages] == [1, 2]


@pytest.mark.parametrize(
    ("name", "stages", "cuts", "shapes", "gib"),
    [
        ("resnet110", 3, (19, 37), ((16, 32, 32), (32, 16, 16)), 4.58),
        ("wrn-40-10", 3, (7, 13), ((160, 32, 32), (320, 16, 16)), 45.78),
    ],
)
def test_states_have_the_papers_memory(
    name: str, stages: int, cuts: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], gib: float
) -> None:
    with torch.device("meta"):
        cut = partition(build(name, (3, 32, 32), 10), stages, torch.empty(2, 3, 32, 32))
    assert (cut.cuts, cut.shapes) == (cuts, shapes)
    assert round(50_000 * sum(torch.Size(shape).numel() for shape in cut.shapes) * 4 / GIB, 2) == gib


@pytest.mark.parametrize("by", ["even", "cost"])
def test_the_first_block_may_take_whole_numbers_and_the_last_may_return_anything(by: str) -> None:
    words = torch.randint(7, (2, 3))
    assert partition(nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)), 2, words, by=by).shapes == ((3, 5),)
    assert len(partition(build("resnet8-vae", (1, 8, 8), 10), 3, torch.randn(4, 1, 8, 8), by=by)) == 3


# Cuts


def test_even_cuts_are_the_rounded_multiples_and_leave_no_stage_empty() -> None:
    assert [even_cuts(56, 1), even_cuts(56, 3), even_cuts(4, 4)] == [(), (19, 37), (1, 2, 3)]
    for blocks, stages in ((b, s) for b in range(1, 40) for s in range(1, b + 1)):
        sizes = [b - a for a, b in itertools.pairwise((0, *even_cuts(blocks, stages), blocks))]
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 2


def brute_force(costs: Sequence[int], work: Sequence[int]) -> tuple[int, ...]:
    """The least (maximum, sum of squares, cuts) of all partitions there are."""

    def merit(cuts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        bounds = itertools.pairwise((0, *cuts, len(costs)))
        sums = [factor * sum(costs[a:b]) for factor, (a, b) in zip(work, bounds, strict=True)]
        return max(sums), sum(s * s for s in sums), cuts

    return min(itertools.combinations(range(1, len(costs)), len(work) - 1), key=merit)


@pytest.mark.parametrize(("largest", "most_work"), [(1, 1), (3, 1), (1000, 1), (20, 4)])
def test_cost_cuts_are_the_best_of_all_partitions(largest: int, most_work: int) -> None:
    generator = random.Random(largest)
    for _ in range(150):
        costs = [generator.randint(0, largest) for _ in range(generator.randint(1, 9))]
        work = [generator.randint(1, most_work) for _ in range(generator.randint(1, len(costs)))]
        assert cost_cuts(costs, len(work), work) == brute_force(costs, work), (costs, work)


def test_cost_cuts_follow_work_and_single_blocks_and_not_the_rounding_of_sums() -> None:
    assert cost_cuts([1.0] * 14, 2) == (7,)
    assert cost_cuts([1.0] * 14, 2, [Replay().work(k, 2) for k in range(2)]) == (6,)  # it replays its first stage
    assert cost_cuts([1.0, 1.0, 9.0, 1.0, 1.0], 3) == (2, 3)
    for blocks, stages in ((7, 3), (10, 3), (23, 4)):
        assert cost_cuts([0.1] * blocks, stages) == cost_cuts([1.0] * blocks, stages)
    deep = cost_cuts([1.0 + i % 7 for i in range(602)], 200)  # at once
    assert list(deep) == sorted(set(deep))
    assert len(deep) == 199


def test_the_partition_by_cost_cuts_where_the_work_is() -> None:
    heavy = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    model = nn.Sequential(heavy, *(nn.Identity() for _ in range(7)))
    assert [partition(model, 2, torch.randn(256, 256), by=by).cuts for by in ("cost", "even")] == [(1,), (4,)]


# Costs


@pytest.mark.parametrize("by", ["even", "cost"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_partition_leaves_the_model_as_found(by: str, fails: bool) -> None:
    model, images = small()
    model = nn.Sequential(*model, *([nn.Linear(99, 1)] if fails else []))
    model[2].eval()
    model[1].conv1.weight.grad = torch.ones_like(model[1].conv1.weight)
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before, randomness = images.clone(), torch.get_rng_state()
    try:
        partition(model, 2, images, by=by)
    except InputError:
        assert fails
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [key for key, p in model.named_parameters() if p.grad is not None] == ["1.conv1.weight"]
    assert bool((model[1].conv1.weight.grad == 1).all())
    assert torch.equal(torch.get_rng_state(), randomness)
    assert torch.equal(images, before)
    assert not images.requires_grad


def test_blocks_that_work_in_place_are_measured_and_spare_the_example() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    example = torch.randn(4, 3)
    before = example.clone()
    assert len(partition(model, 2, example, by="cost")) == 2
    assert torch.equal(example, before)


def test_every_block_has_a_cost_frozen_ones_too() -> None:
    model, example = linear(3)
    costs = block_costs(model.requires_grad_(False), example, repeats=1)
    assert [0 < cost < 10 for cost in costs] == [True] * 3
    with pytest.raises(InputError, match="at least 1"):
        block_costs(model, example, repeats=0)


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


def refusal(model: nn.Module, stages: object, example: object, by: str | Sequence[object] = "even") -> str:
    with pytest.raises(InputError) as error:
        partition(model, stages, example, by=by)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("stages", "by", "told"),
    [
        *((count, "even", f"{count} stages of a model with 5 blocks") for count in (0, -2, 6)),
        (2.5, "even", "whole number"),
        (3, [2, 1], "do not increase: write 2 increasing whole numbers from 1 to 4"),
        (3, [2, 2], "do not increase"),
        (3, [0, 2], "do not lie inside a model of 5 blocks"),
        (3, [2, 5], "do not lie inside a model of 5 blocks"),
        (3, [2], "1 cuts make 2 stages, not 3"),
        (3, [1, 2, 3], "3 cuts make 4 stages, not 3"),
        (3, [1.5, 2], "not block indices"),
        *((3, by, f"write '{near}'") for by, near in (("costs", "cost"), ("evn", "even"), ("", "even"))),
    ],
)
def test_cuts_that_cannot_be_are_refused(stages: object, by: str | list[object], told: str) -> None:
    assert told in refusal(*(small()[0], stages, small()[1]), by)


def test_more_stages_than_blocks_and_costs_that_are_no_numbers_are_refused() -> None:
    for cut in (lambda: even_cuts(3, 4), lambda: cost_cuts([1.0] * 3, 4)):
        with pytest.raises(InputError, match="4 stages of a model with 3 blocks"):
            cut()
    with pytest.raises(InputError, match="cost of block 1 is nan"):
        cost_cuts([1.0, float("nan")], 2)


@pytest.mark.parametrize("by", ["even", "cost", (2,), (3,)])
def test_a_tuple_between_blocks_is_refused_with_the_blocks_name(by: str | Sequence[object]) -> None:
    pair, first = Function(lambda x: (x, x)), Function(lambda x: x[0])
    message = refusal(nn.Sequential(nn.Linear(3, 3), pair, first, nn.Linear(3, 3)), 2, torch.randn(2, 3), by)
    assert "block 1 (Function) returns a tuple" in message
    assert "one tensor" in message


def test_whole_numbers_at_a_cut_are_refused_and_inside_a_stage_are_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Function(lambda x: x.argmax(1)), nn.Embedding(3, 4), nn.Linear(4, 2))
    assert "block 1 (Function) returns torch.int64" in refusal(model, 2, torch.randn(2, 3), by=[2])
    assert partition(model, 2, torch.randn(2, 3), by=[3]).shapes == ((4,),)


def test_tied_weights_are_refused_across_a_cut_and_allowed_inside_a_stage() -> None:
    model, example = linear(4)
    model[3].weight = model[2].weight
    assert partition(model, 2, example).cuts == (2,)
    model[3].weight = model[0].weight
    message = refusal(model, 2, example)
    assert "block 0 (Linear) and block 3 (Linear) share the parameter '0.weight'" in message
    assert "another K" in message


@pytest.mark.parametrize("by", ["even", "cost"])
def test_models_and_examples_that_cannot_be_cut_are_told_how(by: str) -> None:
    model, example = linear(3)
    assert "Linear) is not an nn.Sequential: write it as nn.Sequential(*blocks)" in refusal(model[0], 2, example, by)
    assert "forward of its own" in refusal(Doubled(*model), 2, example, by)
    assert "block 0 (Linear) cannot take the example, there of shape (2, 4)" in refusal(model, 2, torch.randn(2, 4), by)
    for no_batch in (torch.randn(()), torch.empty(0, 3), [1.0, 2.0]):
        assert "samples along dimension 0" in refusal(model, 2, no_batch, by)
    turned = nn.Sequential(Function(lambda x: x.t()), Function(lambda x: x.t()))
    assert "block 0 (Function) returns the shape (3, 2) for 2 samples" in refusal(turned, 2, example, by)
