"""What a checkpoint keeps of an engine, and taking it back at any number of stages and processes.

stage-k     weights, buffers and optimiser state, by global names: stages of any cut find theirs
link-k      the states of the link before stage k; with replicas one part for each
worker-k    a worker's own networks; and with batches on their way, what it and its links keep of them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from parlay.engine.clock import Clock
from parlay.engine.own import Own
from parlay.stage.worker import SIDE

Parts = Mapping[str, dict[str, Tensor]]
OTHER_NETWORKS = "the checkpoint has no such networks beside these stages: they begin anew"
OTHER_BATCHES = "the checkpoint's batches on their way are of another cut or method: they are left out"
BEFORE, AFTER = "before/", "after/"
FORMER = {"interface": "link", "station": "worker"}
"""Names that older checkpoints have."""


def parts(own: Own, clock: Clock, with_states: bool) -> dict[str, dict[str, Tensor]]:
    """Those of this process; a stage with replicas is kept by the first of them."""
    found: dict[str, dict[str, Tensor]] = {}
    if own.world.replica == 0:
        found |= {f"stage-{k}": worker.stage.tensors() for k, worker in own.workers.items()}
    if with_states and all(link.filled for link in own.links):
        found |= {_link_part(own, link.k): link.tensors() for link in own.links if link.starts and link.end.upper}
    for k, worker in own.workers.items():
        kept = worker.learned()
        if with_states and (clock.batches or worker.pending):
            kept |= {"mark": worker.mark()} | worker.tensors() | clock.tensors() | _streamed(own, k)
        if kept:
            found[f"worker-{k}"] = kept
    return found


def _link_part(own: Own, k: int) -> str:
    of = f"-replica-{own.world.replica}-of-{own.world.replicas}" if own.world.replicas > 1 else ""
    return f"link-{k}{of}"


def _streamed(own: Own, k: int) -> dict[str, Tensor]:
    """What the links on both sides keep of batches on their way, each once in a process."""
    found: dict[str, Tensor] = {}
    for link in own.links:
        if link.k == k:
            found |= {BEFORE + name: value for name, value in link.tensors().items()}
        elif link.k == k + 1 and not link.end.upper:
            found |= {AFTER + name: value for name, value in link.tensors().items()}
    return found


def load(own: Own, clock: Clock, kept: Parts, say: Callable[[str], None]) -> None:
    """Take what engines of any number of stages and processes gave; states only where they fit."""
    kept = {_renamed(name): part for name, part in kept.items()}
    weights = stage_tensors(kept)
    for stage in own.stages:
        stage.load(weights)
    _load_states(own, kept)
    _load_batches(own, clock, kept, say)


def _load_states(own: Own, kept: Parts) -> None:
    stored = [link for link in own.links if link.starts]
    count = sum(name.startswith("link-") for name in kept)
    as_many = count == (own.world.stages - 1) * own.world.replicas
    fits = as_many and all(link.load(kept.get(_link_part(own, link.k), {})) for link in stored)
    everywhere = all(own.world.gather(lambda: fits))
    for link in stored:
        link.filled = everywhere


def _load_batches(own: Own, clock: Clock, kept: Parts, say: Callable[[str], None]) -> None:
    found = {k: kept.get(f"worker-{k}", {}) for k in range(own.world.stages)}
    learned = [worker.load_learned(found[k]) for k, worker in own.workers.items()]
    if not all(own.world.gather(lambda: all(learned))):
        say(OTHER_NETWORKS)
    same = f"worker-{own.world.stages}" not in kept and all(
        "mark" in found[k] and int(found[k]["mark"]) == int(worker.mark()) for k, worker in own.workers.items()
    )
    if not all(own.world.gather(lambda: same)):
        if any("way/step" in part for part in kept.values()):
            say(OTHER_BATCHES)
        return
    clock.load(found[0])
    for k, worker in own.workers.items():
        worker.load(found[k])
    for link in own.links:
        link.load(_after(found[link.k - 1], AFTER) | _after(found[link.k], BEFORE))


def _after(part: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in part.items() if name.startswith(prefix)}


def _renamed(name: str) -> str:
    kind, _, rest = name.partition("-")
    return f"{FORMER.get(kind, kind)}-{rest}"


def stage_tensors(kept: Parts) -> dict[str, Tensor]:
    """What the stages of any cut have kept, in one dictionary: the names are global."""
    return {name: value for part in kept if part.startswith("stage-") for name, value in kept[part].items()}


def without_states(kept: Parts) -> dict[str, dict[str, Tensor]]:
    """What is left of a checkpoint at other cuts, where states may have the same shapes and be those of other places.

    Of streamed methods side networks are left, and how far the batches had come.
    """
    left: dict[str, dict[str, Tensor]] = {}
    for name, part in kept.items():
        if _renamed(name).startswith("worker-"):
            left[name] = {key: value for key, value in part.items() if key.startswith((SIDE, "way/"))}
        elif not _renamed(name).startswith("link-"):
            left[name] = part
    return left
