"""From stages, method and options to the engine of this process: own stages, links with their stores, workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from parlay.data.feed import Feed
from parlay.engine.engine import Engine
from parlay.engine.making import Making
from parlay.engine.options import Options
from parlay.engine.own import Own
from parlay.engine.rows import Rows
from parlay.engine.world import Processes, World
from parlay.errors import InputError
from parlay.lanes import Cuda, Lanes
from parlay.methods.method import Method
from parlay.partitioning import Partition
from parlay.stage.stage import Stage

COMPILED_FROM = 20_000  # steps: in a prototype compiling took a minute and saved 3 to 4 ms of each (ResNet-110, H200)


def build(
    partition: Partition,
    method: Method,
    feed: Feed,
    world: World,
    options: Options,
    folder: Path,
    steps: int = 0,
    say: Callable[[str], None] = print,
    lanes: Lanes | None = None,
) -> Engine:
    """`folder`: for stores that lie in files. `steps`: how many there will be; code is compiled for many."""
    if isinstance(world, Processes):
        if world.replicas > 1 and not method.takes_replicas:
            raise InputError(f"{type(method).__name__} takes no replicas: write replicas 1, or another method")
        world.open(options.device)
    modules, device = partition.stages, options.device
    stages = {k: Stage(modules[k], options.optimizer, device, options.autocast) for k in world.own}
    for k, module in enumerate(modules):
        if k not in stages:
            module.to("cpu")  # the other stages' weights are needed again when the model is put together
    if lanes is None:
        lanes = Cuda(device) if _captures(list(stages.values()), world, options, say) else Lanes()
    made = Making(partition, method, feed, world, options, folder, lanes)
    made.on_this_host = world.on_this_host(world.together(made.needed))  # what one cannot store all refuse
    links = world.together(made.links)  # a store that does not fit on one host is refused on all
    workers = world.together(lambda: made.workers(stages, links))
    own = Own(
        partition.model,
        modules,
        partition.shapes,
        method,
        options.loss,
        feed,
        world,
        device,
        workers,
        links,
        Rows(method, len(feed), len(modules), world.replica, world.replicas),
        min(options.batch_size, len(feed)),
        options.clip,
        lanes,
        say,
    )
    pays = steps >= COMPILED_FROM if options.compile is None else options.compile
    return Engine(own, compile=lanes.captures and pays, pipelined=options.pipelined, timeline=options.timeline)


def _captures(stages: list[Stage], world: World, options: Options, say: Callable[[str], None]) -> bool:
    if not options.capture or options.device.type != "cuda" or world.size > 1:
        return False
    if all(stage.optimiser.can_be_captured for stage in stages):
        return True
    say("steps are not captured as CUDA graphs: the optimiser is not a fused one")
    return False
