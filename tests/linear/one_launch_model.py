"""A model of who waits for whom in kernels_cu/linear/one_launch.cu, of which every state is visited.

There is a cluster of CTAs, each with a producer and a few consumers. Every transfer that is under way, and every CTA
that may start late, is a process of its own. A process is a list of steps, and each step has a condition that it waits
for. A read takes two steps, so that whatever is written in between shows. Barriers have phases of one bit, as on a GPU.
`ScheduleError` is raised where memory is read or written too early or too late, and where all processes wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

State = dict[str, int]


class Step(NamedTuple):
    """A step of a process. One that `commutes` only lets others go on, so that no other order of it need be visited."""

    condition: Callable[[State], bool]
    action: Callable[[State], None]
    commutes: bool = False


EMPTY, COMING = -1, -2


class ScheduleError(Exception):
    """The model reached a state that must not be."""


class Model(NamedTuple):
    """The sizes of a model. `without` names a part of the kernel that is left out, to make a mistake."""

    ctas: int = 2
    consumers: int = 2
    stages: int = 2
    tiles: int = 3
    without: str = ""


def ALWAYS(_: State) -> bool:  # noqa: N802
    return True


def must(holds: bool, what: str) -> None:
    if not holds:
        raise ScheduleError(what)


def processes(model: Model) -> tuple[State, list[list[Step]]]:
    """Return the first state, and the steps of all processes."""
    ctas, consumers, stages, tiles = model.ctas, model.consumers, model.stages, model.tiles
    state: State = {}
    all_steps: list[list[Step]] = []
    left_out = model.without

    def set_to(name: str, value: int) -> Callable[[State], None]:
        def do(at: State) -> None:
            at[name] = value

        return do

    def count_up(name: str) -> Callable[[State], None]:
        def do(at: State) -> None:
            at[name] += 1

        return do

    def reached(name: str, count: int) -> Callable[[State], bool]:
        return lambda at: at[name] >= count

    def ended(name: str, phase: int, arrivals: int = 1) -> Callable[[State], bool]:
        """Return whether the phase has ended: as mbarrier.try_wait.parity sees it, the current parity is another."""
        return lambda at: at[name] // arrivals % 2 != phase

    def wait(condition: Callable[[State], bool], commutes: bool = True) -> Step:
        return Step(condition, lambda _: None, commutes)

    def living(at: State, cta: int) -> None:
        must(at[f"ready {cta}"] == 2, f"CTA {cta} is reached before its barriers are there")
        must(at[f"ended {cta}"] <= consumers, f"CTA {cta} is reached after its end")

    def transfer(sent: str, arrive: Callable[[State], None]) -> None:
        """Add a process that may arrive at any time after `sent`."""
        state[sent] = 0
        all_steps.append([Step(reached(sent, 1), arrive)])

    for cta in range(ctas):
        for name in ("started", "ready", "synchronised", "x", "reading x", "z", "known", "read", "met", "ended"):
            state[f"{name} {cta}"] = 0
        for stage in range(stages):
            state |= {f"ring {cta} {stage}": EMPTY, f"full {cta} {stage}": 0, f"empty {cta} {stage}": 0}
        for turn in range(2):
            state |= {f"partial {cta} {turn} {warp}": EMPTY for warp in range(consumers)}
        state |= {f"slot {cta} {slot}": 0 for slot in range(-(-tiles // ctas))}
        all_steps.append([Step(ALWAYS, set_to(f"started {cta}", 1))])
    state |= {f"y {tile}": 0 for tile in range(tiles)} | {"clusters": 0}
    everyone = ctas * (consumers + 1)

    def synchronise(cta: int) -> Iterator[Step]:
        yield Step(ALWAYS, count_up(f"synchronised {cta}"), True)
        yield wait(reached(f"synchronised {cta}", consumers + 1))
        if left_out != "cluster_start":
            yield Step(ALWAYS, count_up("clusters"), True)
            yield wait(reached("clusters", everyone))

    def meet(cta: int, meetings: list[int]) -> Iterator[Step]:
        yield Step(ALWAYS, count_up(f"met {cta}"), True)
        meetings[0] += 1
        yield wait(reached(f"met {cta}", consumers * meetings[0]))

    def producer(cta: int) -> Iterator[Step]:
        yield Step(reached(f"started {cta}", 1), count_up(f"ready {cta}"))
        for tile in range(tiles):
            stage = tile % stages
            if tile == min(stages, tiles):
                yield from synchronise(cta)
            if tile >= stages and left_out != "empty":
                phase = (tile // stages - (0 if left_out == "phase of empty" else 1)) % 2
                arrivals = 1 if left_out == "a warp of empty" else consumers
                yield wait(ended(f"empty {cta} {stage}", phase, arrivals), commutes=False)

            def issue(at: State, stage: int = stage, tile: int = tile) -> None:
                must(at[f"ring {cta} {stage}"] != COMING, "a stage is filled twice")
                at[f"ring {cta} {stage}"] = COMING
                at[f"filled {cta} {tile}"] = 1

            yield Step(ALWAYS, issue)
            if tile == 0:
                yield Step(ALWAYS, set_to(f"fetched {cta}", 1), True)
        if tiles <= stages:
            yield from synchronise(cta)
        yield Step(ALWAYS, count_up(f"ended {cta}"))

    def consumer(cta: int, warp: int) -> Iterator[Step]:
        meetings = [0]
        if warp == 0:
            yield Step(reached(f"started {cta}", 1), count_up(f"ready {cta}"))
        else:
            yield wait(reached(f"started {cta}", 1))
        yield from synchronise(cta)
        yield from meet(cta, meetings)  # partial statistics of rows are in shared memory
        if warp == 0:
            for other in range(ctas):
                yield Step(ALWAYS, set_to(f"statistics {cta} {other}", 1), True)
        if left_out != "known":
            yield wait(reached(f"known {cta}", ctas - (left_out == "a row")))
        if left_out != "arrived":
            yield wait(reached(f"x {cta}", 1))

        def read_x(at: State) -> None:
            must(at[f"x {cta}"] == 1, "x is read where it is not")
            must(at[f"known {cta}"] == ctas, "statistics are read that are not there")
            at[f"reading x {cta}"] += 1

        def has_read_x(at: State) -> None:
            must(at[f"x {cta}"] == 1, "x is overwritten while it is read")
            at[f"reading x {cta}"] -= 1
            at[f"z {cta}"] += 1

        yield Step(ALWAYS, read_x)
        yield Step(ALWAYS, has_read_x)
        if left_out != "meeting behind x":
            yield from meet(cta, meetings)
        if warp == 0:
            for other in range(ctas):
                yield Step(ALWAYS, set_to(f"x is read {cta} {other}", 1), True)
        for tile in range(tiles):
            stage, turn = tile % stages, 0 if left_out == "second set" else tile % 2
            if left_out != "full":
                yield wait(ended(f"full {cta} {stage}", tile // stages % 2), commutes=False)

            def is_there(at: State, stage: int = stage, tile: int = tile) -> None:
                must(at[f"ring {cta} {stage}"] == tile, "a stage is read that is not of this tile")

            def write(at: State, turn: int = turn, tile: int = tile) -> None:
                must(at[f"z {cta}"] == consumers, "partial sums overwrite x of this CTA")
                must(not at[f"reading {cta} {turn}"], "partial sums are overwritten while they are read")
                at[f"x {cta}"] = 2
                at[f"partial {cta} {turn} {warp}"] = tile

            yield Step(ALWAYS, is_there)
            yield Step(ALWAYS, is_there)
            if left_out != "give back":
                yield Step(ALWAYS, count_up(f"empty {cta} {stage}"))
            yield Step(ALWAYS, write)
            if left_out != "meeting of partial sums":
                yield from meet(cta, meetings)
            if tile % consumers != warp:
                continue

            def sum_up(at: State, turn: int = turn, tile: int = tile) -> None:
                all_there = all(at[f"partial {cta} {turn} {other_warp}"] == tile for other_warp in range(consumers))
                must(all_there, "partial sums are added that are not of this tile")
                at[f"reading {cta} {turn}"] = 1

            yield Step(ALWAYS, sum_up)
            yield Step(ALWAYS, set_to(f"reading {cta} {turn}", 0))
            if left_out != "x is read":
                yield wait(reached(f"read {cta}", ctas))
            yield Step(ALWAYS, set_to(f"sent {cta} {tile}", 1), True)
        for tile in range(cta, tiles, ctas):
            slot = tile // ctas
            if slot % consumers != warp:
                continue
            if left_out != "summed":
                yield wait(lambda at, slot=slot: at[f"slot {cta} {slot}"] == 2**ctas - 1)

            def store(at: State, slot: int = slot, tile: int = tile) -> None:
                must(at[f"slot {cta} {slot}"] == 2**ctas - 1, "y is stored without a part of its sum")
                at[f"y {tile}"] += 1

            yield Step(ALWAYS, store)
        yield Step(ALWAYS, count_up(f"ended {cta}"))

    for cta in range(ctas):
        state |= {f"reading {cta} {turn}": 0 for turn in range(2)}
        for tile in range(tiles):

            def land(at: State, cta: int = cta, tile: int = tile) -> None:
                must(at[f"ended {cta}"] <= consumers, f"a stage of CTA {cta} comes after its end")
                at[f"ring {cta} {tile % stages}"] = tile
                at[f"full {cta} {tile % stages}"] += 1

            def bring(at: State, cta: int = cta, tile: int = tile) -> None:
                owner = tile % ctas
                living(at, owner)
                must(at[f"z {owner}"] == consumers, "partial sums overwrite x of another CTA")
                at[f"x {owner}"] = 2
                at[f"slot {owner} {tile // ctas}"] |= 1 << cta

            transfer(f"filled {cta} {tile}", land)
            transfer(f"sent {cta} {tile}", bring)
        transfer(f"fetched {cta}", set_to(f"x {cta}", 1))
        for other in range(ctas):

            def tell(at: State, other: int = other) -> None:
                living(at, other)
                at[f"known {other}"] += 1

            def say(at: State, other: int = other) -> None:
                living(at, other)
                at[f"read {other}"] += 1

            transfer(f"statistics {cta} {other}", tell)
            transfer(f"x is read {cta} {other}", say)
    for cta in range(ctas):
        all_steps.append(list(producer(cta)))
        all_steps.extend(list(consumer(cta, warp)) for warp in range(consumers))
    return state, all_steps


def visit(model: Model) -> int:
    """Visit all states and return their number. Raise ScheduleError at one that must not be."""
    state, steps = processes(model)
    names = tuple(state)
    first = (tuple(state.values()), (0,) * len(steps))
    seen, waiting = {first}, [first]
    while waiting:
        values, places = waiting.pop()
        at = dict(zip(names, values, strict=True))
        ready = [
            process
            for process, place in enumerate(places)
            if place < len(steps[process]) and steps[process][place].condition(at)
        ]
        if not ready:
            waits = [process for process, place in enumerate(places) if place < len(steps[process])]
            must(not waits, f"processes {waits} wait for ever")
            stored = [at[f"y {tile}"] for tile in range(model.tiles)]
            must(stored == [1] * model.tiles, f"y is stored {stored} times")
        alone = next((process for process in ready if steps[process][places[process]].commutes), None)
        for process in ready if alone is None else (alone,):
            after = dict(at)
            steps[process][places[process]].action(after)
            following = (tuple(after.values()), (*places[:process], places[process] + 1, *places[process + 1 :]))
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return len(seen)
