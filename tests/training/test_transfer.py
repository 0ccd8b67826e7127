"""Copies between host and device, with simulated streams, events and pinned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from titan_async.training.transfer import Deferred, HostCopy, Upload

DEVICE = torch.device("meta")


class Stream:
    """Records its operations, in one list with those of all streams and copies."""

    def __init__(self, notes: list[Any], name: str) -> None:
        self._notes, self.name = notes, name

    def __enter__(self) -> None:
        self._notes.append(("enter", self.name))

    def __exit__(self, *_: object) -> None:
        self._notes.append(("exit", self.name))

    def wait_stream(self, other: Stream) -> None:
        self._notes.append((self.name, "waits for", other.name))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    compute = Stream(found, "compute")
    to = Tensor.to

    def copied(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(("to", args[0].type, kwargs))
        return to(tensor, *args, **kwargs)

    def pinned(tensor: Tensor) -> Tensor:
        found.append("pin")
        return tensor

    monkeypatch.setattr(torch, "Stream", lambda device: Stream(found, "side"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)
    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "to", copied)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: found.append(("used by", stream.name))
    )
    return found


def test_a_batch_is_copied_from_pinned_memory_on_another_stream(notes: list[Any]) -> None:
    groups = [[({"input": torch.ones(2), "positions": torch.ones(2)}, torch.ones(2))]]
    (((fields, labels),),), tokens = Upload(DEVICE)(groups, torch.tensor(2))
    assert {each.device for each in (*fields.values(), labels, tokens)} == {DEVICE}
    copy = ["pin", ("to", "meta", {"non_blocking": True})]
    assert notes == [
        ("enter", "side"), *copy * 4, ("exit", "side"), ("compute", "waits for", "side"),
        *[("used by", "compute")] * 4,
    ]  # fmt: skip


class OnDevice(Tensor):
    """A tensor that reports another device."""

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_a_copy_holds_the_value_at_its_creation(notes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, kind: str) -> None: ...

        def record(self, stream: Stream) -> None:
            notes.append(("recorded", stream.name))

        def synchronize(self) -> None:
            notes.append("synchronized")

    empty, copy = torch.empty, Tensor.copy_

    def copied(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        notes.append(("copy", kwargs))
        return copy(tensor, *args, **kwargs)

    def pinned(*args: Any, pin_memory: bool, **kwargs: Any) -> Tensor:
        notes.append(("empty", pin_memory))
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(torch, "empty", pinned)
    value = torch.tensor(2.0).as_subclass(OnDevice)
    read = HostCopy(value)
    assert notes == [("empty", True), ("copy", {"non_blocking": True}), ("recorded", "compute")]
    value.add_(1)
    assert float(read.read()) == 2 and notes[3:] == ["synchronized"]


def test_deferred_actions_run_in_order() -> None:
    later, done = Deferred(), []
    for step in (1, 1, 2, 3):
        later.add(step, lambda step=step: done.append(step))  # type: ignore[misc]
    later.run(before=2)
    assert done == [1, 1]
    later.run()
    assert done == [1, 1, 2, 3]
