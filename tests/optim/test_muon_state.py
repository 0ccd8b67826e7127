"""Muon's state: creation, loading, changing groups, copies and hooks."""

import copy
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.support.optim import (
    LEVELS,
    around,
    bits,
    give_gradients,
    inside,
    parameters,
    same_bits,
    state_bits,
)
from titan_async.optim import ErrorFeedback, Lion, Muon

SHAPES = [(6, 4), (3, 5), (2, 4, 3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("declared", [None, "bfloat16", "float32", "float64", torch.float32])
@pytest.mark.parametrize("level", LEVELS)
def test_state_is_created_in_the_given_dtype_and_keeps_it_when_loaded(level, declared, dtype):
    """torch.optim.Optimizer.load_state_dict would cast it to the dtype of the parameters."""
    name = str(declared).removeprefix("torch.")
    expected = torch.promote_types(dtype, torch.float32) if declared is None else getattr(torch, name)
    options = {"momentum_dtype": declared, "error_feedback_dtype": declared, "error_feedback": 0.5}
    params, others = parameters(SHAPES, dtype), parameters(SHAPES, dtype)
    optimizer, other = (Muon(each, error_feedback_level=level, **options) for each in (params, others))
    keys = {"momentum_buffer", f"error_feedback_{level}", f"error_feedback_{level}_valid"}
    for param in params:
        state = optimizer.state[param]
        assert set(state) == keys
        assert state["momentum_buffer"].dtype == state[f"error_feedback_{level}"].dtype == expected
        assert state[f"error_feedback_{level}_valid"].dtype == torch.bool
        assert not any(value.any() for value in state.values())
    give_gradients(params, 0)
    optimizer.step()
    for param in params:  # bits that a narrower dtype would round
        for key in ("momentum_buffer", f"error_feedback_{level}"):
            optimizer.state[param][key].add_(torch.finfo(expected).eps)
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(saved)
    assert same_bits(state_bits(params, optimizer), state_bits(others, other))


def test_loading_copies():
    params, others = parameters(SHAPES), parameters(SHAPES)
    optimizer, other = inside(params, "update"), inside(others, "update")
    other.load_state_dict(optimizer.state_dict())
    give_gradients(params, 0)
    optimizer.step()
    assert not other.state[others[0]]["momentum_buffer"].any()


def test_loading_state_of_a_frozen_parameter():
    params, others = parameters(SHAPES), parameters(SHAPES)
    optimizer, other = inside(params, "update"), inside(others, "update")
    give_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    others[1].requires_grad_(False)
    other.load_state_dict(saved)
    assert same_bits(state_bits(params, optimizer), state_bits(others, other))
    third = parameters(SHAPES)
    third[1].requires_grad_(False)
    last = inside(third, "update")
    last.load_state_dict(saved)
    third[1].requires_grad_(True)
    assert same_bits(state_bits(params, optimizer), state_bits(third, last))


def test_state_that_does_not_match_raises_without_changes():
    params = parameters(SHAPES)
    optimizer = inside(params, "update", lr=0.1)
    give_gradients(params, 0)
    optimizer.step()
    before = bits(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    saved["state"][0]["momentum_buffer"] += 1
    saved["state"][1]["momentum_buffer"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"momentum_buffer.*\[2, 2\]"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert same_bits(before, bits(params, optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})


@pytest.mark.parametrize("adjust_lr", [None, "original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("make", [Muon, lambda params, **options: around(params, "update", **options)])
def test_state_of_torch_muon_loads(make, adjust_lr):
    shapes = [(6, 4), (3, 5)]
    theirs, ours = parameters(shapes), parameters(shapes)
    options = {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.9, "nesterov": False, "ns_steps": 4}
    reference = torch.optim.Muon(theirs, adjust_lr_fn=adjust_lr, **options)
    for step in range(3):
        give_gradients(theirs, step)
        reference.step()
    optimizer = make(ours, ns_form="standard")
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in options} == options
    assert group["adjust_lr"] == {None: "original", "spectral_unclamped": "spectral"}.get(
        adjust_lr, adjust_lr
    )
    assert "adjust_lr_fn" not in group
    for their, our in zip(theirs, ours, strict=True):
        our.data.copy_(their.data)
        momenta = optimizer.state[our]["momentum_buffer"], reference.state[their]["momentum_buffer"]
        assert torch.equal(*momenta)
    give_gradients(theirs, 3)
    give_gradients(ours, 3)
    reference.step()
    optimizer.step()
    for their, our in zip(theirs, ours, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-6)


def test_loading_keeps_the_compute_options():
    saved = Muon(
        [*parameters([(2, 3)])], compute_dtype="float32", ns_form="standard", momentum=0.8
    ).state_dict()
    optimizer = Muon([*parameters([(2, 3)])])
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["compute_dtype"], group["ns_form"], group["momentum"]) == ("bfloat16", "auto", 0.8)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("first", "second"), [(inside, around), (around, inside)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checkpoints_with_feedback_in_muon_and_around_it_are_interchangeable(dtype, first, second, level):
    params = parameters(SHAPES, dtype)
    optimizer = first(params, level, lr=0.1)
    for step in range(3):
        give_gradients(params, step, missing=[1] if step == 2 else [])
        optimizer.step()
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = second(others, level, lr=0.7)
    give_gradients(others, 50)
    other.step()
    with torch.no_grad():
        for param, resumed in zip(params, others, strict=True):
            resumed.copy_(param)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for each, each_params in ((optimizer, params), (other, others)):
            give_gradients(each_params, step)
            each.step()
        assert same_bits(bits(params, optimizer), bits(others, other))


CREATED = {
    "muon": lambda params: Muon(params, 0.1),
    "muon update": lambda params: inside(params, "update", lr=0.1),
    "muon gradient": lambda params: inside(params, "gradient", lr=0.1),
    **{
        f"{level} around {name}": lambda params, level=level, build=build: ErrorFeedback(
            build(params), level=level
        )
        for level in LEVELS
        for name, build in {
            "muon": lambda params: Muon(params, 0.1),
            "adamw": lambda params: torch.optim.AdamW(params, 0.1),
            "lion": lambda params: Lion(params, 0.1),
        }.items()
    },
}


def create_by_hand(model, optimizer):
    """The step by which torch and torchtitan create state."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step(closure=None)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def create_by_torchtitan(model, optimizer):
    pytest.importorskip("torchtitan.components.optimizer.utils").init_optim_state(optimizer)


@pytest.mark.parametrize(
    "create", [create_by_hand, create_by_torchtitan, lambda *both: get_optimizer_state_dict(*both)]
)
@pytest.mark.parametrize("name", CREATED)
def test_creating_state_is_not_an_update(name, create):
    """Otherwise the first update would be corrected by a displacement of zero, that is, doubled."""

    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 3, bias=False))
        return model, list(model.parameters())

    model, params = build()
    optimizer = CREATED[name](params)
    create(model, optimizer)
    assert all(map(torch.equal, params, build()[1]))
    flags = [value for param in params for key, value in optimizer.state[param].items() if "valid" in key]
    assert len(flags) == (0 if name == "muon" else 2) and not any(flags)

    others = build()[1]
    bare = {"adamw": torch.optim.AdamW, "lion": Lion, "muon": Muon}
    plain = bare[next(kind for kind in bare if kind in name)](others, 0.1)
    if "adamw" in name:  # AdamW counts the step that creates state
        create_by_hand(torch.nn.ParameterList(others), plain)
    for each, each_params in ((optimizer, params), (plain, others)):
        give_gradients(each_params, 0)
        each.step()
    assert all(map(torch.equal, params, others))
    give_gradients(params, 1)
    optimizer.step()
    assert all(flags)


def test_groups_without_parameters():
    """As on a pipeline stage without matrices."""
    optimizer = Muon([{"params": []}], error_feedback=1.0)
    optimizer.step()
    assert not optimizer.step_was_skipped
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    [param] = parameters([(3, 4)])
    optimizer.add_param_group({"params": [param]})
    give_gradients([param], 0)
    before = param.detach().clone()
    optimizer.step()
    assert not torch.equal(param, before)
    with pytest.raises(ValueError, match="empty"):
        Muon([])


def test_parameters_without_elements():
    params = parameters([(0, 5), (5, 0), (3, 0, 4), (0, 3, 4), (4, 3)])
    optimizer = inside(params, "update")
    for step in range(2):
        give_gradients(params[:4], step) if step else None
        params[4].grad = torch.ones(4, 3)
        optimizer.step()
    assert params[4].isfinite().all()


def test_added_group_has_state():
    params = parameters(SHAPES)
    optimizer = inside(params[:1], "update")
    give_gradients(params, 0)
    optimizer.step()
    options = {"momentum_dtype": "bfloat16", "error_feedback_level": "gradient"}
    optimizer.add_param_group({"params": params[1:], **options})
    assert optimizer.state[params[1]]["momentum_buffer"].dtype == torch.bfloat16
    assert set(optimizer.state[params[2]]) == {
        "momentum_buffer",
        "error_feedback_gradient",
        "error_feedback_gradient_valid",
    }
    weights = [param.detach().clone() for param in params]
    give_gradients(params, 1)
    optimizer.step()
    assert not any(map(torch.equal, params, weights))


def test_replacing_a_group():
    """The plan of a parameter is not used for another shape or another split."""
    for shape, options in (((4, 7), {}), ((6, 4), {"split_sizes": (2, 4)})):
        first, second = *parameters([(6, 4)]), *parameters([shape])
        optimizer = Muon([{"params": [first]}], 0.1)
        give_gradients([first], 0)
        optimizer.step()
        optimizer.param_groups.pop()
        optimizer.add_param_group({"params": [second], **options})
        expected = torch.nn.Parameter(second.detach().clone())
        plain = Muon([expected], 0.1, **options)
        give_gradients([second], 1)
        give_gradients([expected], 1)
        optimizer.step()
        plain.step()
        assert torch.equal(second, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_freezing_and_unfreezing(level):
    params = parameters(SHAPES)
    params[1].requires_grad_(False)
    optimizer = inside(params, level, lr=0.1)
    assert params[1] not in optimizer.state
    weight = params[1].detach().clone()
    give_gradients(params, 0, missing=[1])
    optimizer.step()
    assert torch.equal(params[1], weight)
    params[1].requires_grad_(True)
    give_gradients(params, 1)
    optimizer.step()
    assert not torch.equal(params[1], weight)
    # Gradients from before freezing are used, as in torch's optimizers.
    params[2].requires_grad_(False)
    optimizer.step()
    # So are gradients of parameters that were never trainable.
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 3), requires_grad=False)]})
    late = optimizer.param_groups[1]["params"][0]
    late.grad = torch.ones(3, 3)
    optimizer.step()
    assert not torch.equal(late, torch.ones(3, 3))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("level", LEVELS)
def test_copies_are_independent(level, duplicate):
    params = parameters(SHAPES)
    optimizer = inside(params, level, lr=0.1, bucket_mb=2)
    give_gradients(params, 0)
    optimizer.step()
    others, other = duplicate((params, optimizer))
    assert other.param_groups[0]["params"][0] is others[0]
    before = bits(others, other)
    for step in range(1, 3):
        give_gradients(params, step)
        optimizer.step()
    assert same_bits(before, bits(others, other))
    for step in range(1, 3):
        give_gradients(others, step)
        other.step()
    assert same_bits(bits(params, optimizer), bits(others, other))
    assert str(other) == str(optimizer)


def test_hooks():
    params = parameters(SHAPES)
    optimizer = Muon(params)
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda self: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda self, saved: {**saved, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda self, saved: calls.append(saved["extra"]))
    optimizer.register_load_state_dict_post_hook(lambda self: calls.append("after loading"))
    give_gradients(params, 0)
    optimizer.step()
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", *["before saving", 1, "after loading"] * 2]


def test_hook_may_replace_the_loaded_state():
    params = parameters(SHAPES)
    optimizer = inside(params, "update")
    saved = copy.deepcopy(optimizer.state_dict())

    def fill(_, given):
        state = {n: {**e, "momentum_buffer": e["momentum_buffer"] + 2} for n, e in given["state"].items()}
        return {**given, "state": state}

    optimizer.register_load_state_dict_pre_hook(fill)
    optimizer.load_state_dict(saved)
    assert (optimizer.state[params[0]]["momentum_buffer"] == 2).all()


@pytest.mark.parametrize("make", [lambda params: Muon(params, 0.1), lambda params: around(params, "update")])
def test_closures(make):
    """Called once, with gradients enabled, before the update; `step` returns the loss."""
    params = parameters(SHAPES)
    optimizer = make(params)
    seen = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        seen.append(loss.item())
        return loss

    for _ in range(2):
        expected = sum(param.square().sum().item() for param in params)
        assert optimizer.step(closure).item() == pytest.approx(expected)
    assert len(seen) == 2 and seen[1] < seen[0]


def test_compiled_model():
    """With a fast backend, without code generation."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager")
    plain = copy.deepcopy(model)
    for run in (compiled, plain):
        optimizer = Muon(run.parameters(), 0.1, compute_dtype="float32")
        for step in range(3):
            run(torch.full((2, 4), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model[0].weight, plain[0].weight, rtol=0, atol=1e-5)
