"""Small optimizers with properties of those of other packages, which a run must handle."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Averaged(torch.optim.Optimizer):
    """Momentum with bias correction; the number of steps is in the group, as in other packages."""

    def __init__(
        self, params: Any, lr: float = 0.1, beta: float = 0.9, name: str = "a", flag: bool = True
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "name": name, "flag": flag})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                assert not isinstance(param, DTensor) and not isinstance(param.grad, DTensor)
                state = self.state[param]
                if not state:
                    state["sums"] = [torch.zeros_like(param), {"last": torch.zeros_like(param)}]
                    state["note"] = None
                mean = state["sums"][0].lerp_(param.grad, 1 - group["beta"])
                state["sums"][1]["last"].copy_(param.grad)
                self.move(param, mean / (1 - group["beta"] ** group["step"]), group)

    def move(self, param: torch.Tensor, mean: torch.Tensor, group: dict[str, Any]) -> None:
        param.add_(mean, alpha=-group["lr"])


class Normed(Averaged):
    """Its update of a parameter has norm 1."""

    def move(self, param: torch.Tensor, mean: torch.Tensor, group: dict[str, Any]) -> None:
        param.add_(mean / mean.norm().clamp(min=1e-30), alpha=-group["lr"])


class Coupled(Averaged):
    """Clips by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm().clamp(min=1.0)
        for grad in grads:
            grad.div_(norm)
        super().step()


class Forgetful(Averaged):
    """Keeps state in an attribute that is not in `state_dict`."""

    count = 0

    def move(self, param: torch.Tensor, mean: torch.Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        super().move(param, mean / self.count, group)


class Closed(Averaged):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


class Restless(Averaged):
    def move(self, param: torch.Tensor, mean: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(0.99)


class Keeper(Averaged):
    def move(self, param: torch.Tensor, mean: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[param]["set"] = {1, 2}


class Rateless(Averaged):
    def __init__(self, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {"beta": 0.9})


class Loaded(Averaged):
    """Adds state at the second step."""

    def move(self, param: torch.Tensor, mean: torch.Tensor, group: dict[str, Any]) -> None:
        if group["step"] > 1:
            self.state[param].setdefault("late", torch.zeros_like(param)).add_(mean)
            mean = mean + self.state[param]["late"]
        super().move(param, mean, group)


class Idle(Averaged):
    """Changes nothing at its first step."""

    def move(self, param: torch.Tensor, mean: torch.Tensor, group: dict[str, Any]) -> None:
        if group["step"] > 1:
            param.add_(1.0, alpha=-group["lr"])
