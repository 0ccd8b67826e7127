"""A greedy order of tasks on every rank: backwards first, then the oldest microbatch.

For several stages per rank, if no periodic order keeps all ranks busy. It follows the recurrence: a batch's
forwards on a stage start after the last backward of two batches ago. It is not optimal.
"""

import heapq
from collections import Counter

from _layout import Layout

from titan_async.pipelining.simulation import Task, Timing

__all__ = ["greedy_programs"]


def greedy_programs(
    layout: Layout, timing: Timing, microbatches: int, batches: int, most: int
) -> list[list[Task]]:
    """Each rank's tasks in their order of execution.

    Args:
        layout: the stages of each rank.
        timing: durations, with `latency`, for which the order is determined; `simulate` can use others.
        microbatches: per batch, m.
        batches: number of batches.
        most: maximum number of microbatches in flight, from the first forward to the last backward.
    """
    return _Greedy(layout, timing, microbatches, batches, most).run()


class _Greedy:
    def __init__(self, layout: Layout, timing: Timing, microbatches: int, batches: int, most: int) -> None:
        self.layout, self.timing, self.microbatches, self.most = layout, timing, microbatches, most
        self.programs: list[list[Task]] = [[] for _ in range(layout.ranks)]
        self.ready: list[set[Task]] = [set() for _ in range(layout.ranks)]
        self.ready[0] = {Task("F", 0, b, i) for b in range(batches) for i in range(microbatches)}
        self.running: list[Task | None] = [None] * layout.ranks
        self.backwards: Counter[tuple[int, int]] = Counter()  # done, by stage and batch
        self.in_flight = 0
        self.events: list[tuple[float, Task, bool]] = []  # time, task, whether it ends or arrives

    def run(self) -> list[list[Task]]:
        self._start(0, 0.0)
        while self.events:
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                _, task, ends = heapq.heappop(self.events)
                touched.add(self.layout.rank_of(task.stage))
                if ends:
                    self._end(task, now)
                else:
                    self.ready[self.layout.rank_of(task.stage)].add(task)
            for rank in sorted(touched):
                if self.running[rank] is None:
                    self._start(rank, now)
        return self.programs

    def _start(self, rank: int, now: float) -> None:
        allowed = [task for task in self.ready[rank] if self._may_run(task)]
        if not allowed:
            return
        task = min(allowed, key=lambda t: (t.kind, t.batch, t.microbatch))  # "B" sorts before "F"
        self.ready[rank].remove(task)
        self.running[rank] = task
        self.programs[rank].append(task)
        self.in_flight += task.kind == "F" and task.stage == 0
        heapq.heappush(self.events, (now + self.timing.seconds(task), task, True))

    def _may_run(self, task: Task) -> bool:
        if task.kind == "B":
            return True
        if task.batch >= 2 and self.backwards[task.stage, task.batch - 2] < self.microbatches:
            return False
        return task.stage > 0 or self.in_flight < self.most

    def _end(self, task: Task, now: float) -> None:
        rank = self.layout.rank_of(task.stage)
        self.running[rank] = None
        if task.kind == "B":
            self.backwards[task.stage, task.batch] += 1
            self.in_flight -= task.stage == 0
        following = self._following(task)
        if following is None:
            return
        if self.layout.rank_of(following.stage) == rank:
            self.ready[rank].add(following)
        else:
            heapq.heappush(self.events, (now + self.timing.latency, following, False))

    def _following(self, task: Task) -> Task | None:
        if task.kind == "B":
            return task._replace(stage=task.stage - 1) if task.stage else None
        if task.stage == self.layout.stages - 1:
            return task._replace(kind="B")
        return task._replace(stage=task.stage + 1)
