"""Steps that are conditional on the device: skipped ones keep all bits, without synchronization."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.feedback_formulas import DECAY, propose_adamw, propose_lion
from tests.support.host_waits import HostWaits
from tests.support.muon_rule import muon_displacement
from tests.support.processes import Pools, WorkerPool
from titan_async.local_tensors import local_part
from titan_async.optim import ErrorFeedback, Lion, Muon, QKClip, QueryKey, compiled_adamw, set_found_inf

SHAPES = [(6, 4), (2, 3, 5)]
LR = 0.1
MUON = {"lr": LR, "weight_decay": DECAY, "compute_dtype": "float64", "adjust_lr": "match_rms_adamw"}


def adamw(params):
    return torch.optim.AdamW(params, LR, (0.9, 0.95), weight_decay=DECAY, fused=True)


def lion(params):
    return Lion(params, LR, (0.9, 0.99), weight_decay=DECAY)


OPTIMIZERS = {
    "adamw": adamw,  # torch's own, as the reference for the protocol
    "adamw in feedback": lambda params: ErrorFeedback(adamw(params)),
    "adamw in one pass with feedback": lambda params: ErrorFeedback(adamw(params), compile=True),
    "adamw in feedback of gradients": lambda params: ErrorFeedback(adamw(params), level="gradient"),
    "lion": lion,
    "lion in feedback": lambda params: ErrorFeedback(lion(params), 0.5),
    "muon": lambda params: Muon(params, **MUON),
    "muon with feedback": lambda params: Muon(params, **MUON, error_feedback=1.0),
    "muon with feedback of gradients": lambda params: Muon(
        params, **MUON, error_feedback=1.0, error_feedback_level="gradient"
    ),
    "muon in feedback": lambda params: ErrorFeedback(Muon(params, **MUON)),
    "cautious muon without nesterov": lambda params: Muon(
        params, **MUON, nesterov=False, cautious_weight_decay=True, error_feedback_dtype="bfloat16",
        error_feedback=1.0,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _without_compilation(monkeypatch):
    monkeypatch.setattr(compiled_adamw, "_compiled", lambda: compiled_adamw._update_and_correct_)


def values(shape, *seed):
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def parameters(dtype=torch.float64):
    params = [torch.nn.Parameter(values(shape, 9, i).to(dtype)) for i, shape in enumerate(SHAPES)]
    with torch.no_grad():
        params[0][0, :2] = torch.tensor([0.0, -0.0])  # a multiplication by 0 would not preserve these
    return params


def give_gradients(params, batch, bad=None):
    for i, param in enumerate(params):
        param.grad = values(param.shape, batch, i).to(param.dtype)
        if bad is not None:
            param.grad.view(-1)[::3] = bad


def propose_muon(x, g, lr, memory):
    m = memory.setdefault("m", torch.zeros_like(x))
    return muon_displacement(x, g, m, lr=lr, decay=DECAY, coefficient=0.95)


@pytest.mark.parametrize(
    ("name", "propose", "strength"),
    [
        ("adamw", propose_adamw, 0.0),
        ("adamw in feedback", propose_adamw, 1.0),
        ("adamw in one pass with feedback", propose_adamw, 1.0),
        ("lion", propose_lion, 0.0),
        ("lion in feedback", propose_lion, 0.5),
        ("muon", propose_muon, 0.0),
        ("muon with feedback", propose_muon, 1.0),
        ("muon in feedback", propose_muon, 1.0),
    ],
)
def test_run_with_skipped_steps_equals_a_run_without_their_batches(name, propose, strength):
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    found_inf = torch.zeros(())
    assert set_found_inf(optimizer, found_inf)
    expected = [param.detach().clone() for param in params]
    memories, last = [{} for _ in params], [None for _ in params]
    for batch in range(8):
        skipped = batch in (0, 3, 4, 6)
        give_gradients(params, batch, torch.nan if skipped else None)
        found_inf.fill_(skipped)
        optimizer.step()
        for i, param in enumerate(params):
            if not skipped:
                d = propose(expected[i], param.grad, LR, memories[i])
                expected[i] += d if last[i] is None else d + strength * (d - last[i])
                last[i] = d
            torch.testing.assert_close(param.detach(), expected[i], rtol=1e-11, atol=1e-11)


def bits(params, optimizer):
    """The content of a checkpoint, as bytes."""

    def frozen(value):
        if isinstance(value, torch.Tensor):
            return (
                value.dtype,
                value.shape,
                value.detach().contiguous().reshape(-1).view(torch.uint8).tolist(),
            )
        if isinstance(value, dict):
            return {key: frozen(item) for key, item in value.items()}
        return [frozen(item) for item in value] if isinstance(value, list) else value

    return frozen([list(params), optimizer.state_dict()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_keep_all_bits_and_others_are_ordinary_steps(name, dtype):
    params, twins = parameters(dtype), parameters(dtype)
    optimizer, twin = OPTIMIZERS[name](params), OPTIMIZERS[name](twins)
    found_inf = torch.zeros(())
    for batch in range(4):
        for each, own in ((optimizer, params), (twin, twins)):
            give_gradients(own, batch)
            each.step()
        if batch == 0:  # from here on there is state
            assert set_found_inf(optimizer, found_inf)
        assert bits(params, optimizer) == bits(twins, twin)
        before = bits(params, optimizer)
        if batch < 1:
            continue
        for bad in (torch.nan, torch.inf, None):
            give_gradients(params, 10 + batch, bad)
            found_inf.fill_(1)
            optimizer.step()
            assert bits(params, optimizer) == before
        found_inf.fill_(0)


@pytest.mark.parametrize("name", ["muon with feedback", "muon in feedback", "adamw in feedback"])
def test_skipped_step_neither_starts_nor_clears_a_history(name):
    """Although the history's flag is on the host."""
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    found_inf = torch.ones(())
    set_found_inf(optimizer, found_inf)
    key = "error_feedback_update_valid"
    for skipped, missing, valid in (
        (1, False, False), (0, False, True), (1, True, True), (0, True, False), (1, False, False),
    ):  # fmt: skip
        give_gradients(params, 1)
        if missing:
            params[1].grad = None
        found_inf.fill_(skipped)
        optimizer.step()
        state = optimizer.state.get(params[1], {})
        assert bool(state.get(key, False)) == valid
        if valid:
            assert state["error_feedback_update"].any()


def test_supported_optimizers():
    params = parameters()
    flag = torch.zeros(())
    for build, supported in (
        (torch.optim.AdamW, False),
        (torch.optim.Adamax, False),
        (lambda ps: torch.optim.Adam(ps, fused=True), True),
        (lambda ps: torch.optim.SGD(ps, fused=True), True),
        (lambda ps: torch.optim.SGD(ps, momentum=0.9), False),
        (Lion, True),
    ):
        for optimizer in (build(params), ErrorFeedback(build(params))):
            assert set_found_inf(optimizer, flag) == supported
            assert (getattr(optimizer, "found_inf", None) is flag) == supported
            assert set_found_inf(optimizer, None) == supported
            assert getattr(optimizer, "found_inf", None) is None


def test_sgd_with_momentum_is_supported_after_its_first_step():
    """torch allocates the momentum in the first step; if skipped, it would be uninitialized."""
    params = parameters()
    sgd = torch.optim.SGD(params, momentum=0.9, fused=True)
    assert not set_found_inf(sgd, torch.ones(()))
    give_gradients(params, 0)
    sgd.step()
    assert set_found_inf(sgd, torch.ones(()))


def move_to_meta(optimizer, params):
    """Move parameters and state to the meta device, except error feedback's flags; returns these."""
    flags = []
    for param in params:
        for key, value in optimizer.state[param].items():
            if key.endswith("_valid"):
                flags.append(value)
            elif isinstance(value, torch.Tensor):
                torch.utils.swap_tensors(value, value.to("meta"))
        grad, param.grad = param.grad, None
        torch.utils.swap_tensors(param, torch.nn.Parameter(param.detach().to("meta")))
        param.grad = grad.to("meta")
    return flags


@pytest.mark.parametrize(
    ("name", "paused"),
    [*((name, False) for name in OPTIMIZERS), *((n, True) for n in OPTIMIZERS if "feedback" in n)],
)
def test_no_synchronization_with_the_device(name, paused):
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    if paused:
        optimizer.feedback_paused = True
    give_gradients(params, 0)
    optimizer.step()
    optimizer.zero_grad()
    give_gradients(params, 1)
    flags = move_to_meta(optimizer, params)
    set_found_inf(optimizer, torch.zeros((), device="meta"))
    with HostWaits(*flags) as host:
        for _ in range(2):
            optimizer.step()
    assert not host.waits
    if "muon" in name:  # without found_inf Muon checks its gradients
        set_found_inf(optimizer, None)
        with pytest.raises((RuntimeError, NotImplementedError)):
            optimizer.step()


def test_qk_clip_with_found_inf():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    layers = [QueryKey(weight, torch.ones(4, 3), heads=2)]
    optimizer = Muon([weight], lr=0.0)
    clip = QKClip(layers, lambda: [torch.tensor([80.0, 400.0])])
    optimizer.register_step_post_hook(clip)
    weight.grad = torch.ones_like(weight)
    for skipped, last in ((1.0, 1.0), (0.0, 0.5)):
        set_found_inf(optimizer, torch.tensor(skipped))
        optimizer.step()
        assert weight[:, 0].tolist() == [1.0, 1.0, last, last]

    on_device = [torch.nn.Parameter(torch.ones(4, 3, device="meta")) for _ in range(2)]
    clip = QKClip([QueryKey(*on_device, heads=2)], lambda: [torch.ones(2, device="meta")])
    clip.clip()
    with HostWaits() as host:
        clip.clip(torch.zeros((), device="meta"))
    assert not host.waits


meshes: dict[str, DeviceMesh] = {}


def make_meshes(rank, group):
    meshes["all"] = init_device_mesh("cpu", (2,))


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(2)
    pool.run(2, make_meshes, keeps=True)
    return pool


def train_sharded(rank, group, feedback):
    """Weights of runs without and with the skipped batches, and host waits of the last step."""
    runs = []
    for conditional in (False, True):
        mesh = meshes["all"]
        placements = [[Shard(0)], [Shard(0)], [Shard(1)], [Replicate()]]
        shapes = [(6, 4), (3, 5), (2, 4, 4), (4, 4)]
        params = [
            torch.nn.Parameter(distribute_tensor(values(shape, 5, i), mesh, each, src_data_rank=None))
            for i, (shape, each) in enumerate(zip(shapes, placements, strict=True))
        ]
        optimizer = Muon(params, **MUON, error_feedback=feedback)
        found_inf = torch.zeros(())
        if conditional:
            set_found_inf(optimizer, found_inf)
        for batch in range(5):
            skipped = batch in (1, 3)
            if skipped and not conditional:
                continue
            for i, (param, each) in enumerate(zip(params, placements, strict=True)):
                grad = values(param.shape, batch, i)
                param.grad = distribute_tensor(grad, mesh, each, src_data_rank=None)
                if skipped and rank:  # on one rank; found_inf is set on all
                    local_part(param.grad).fill_(torch.nan)
            found_inf.fill_(skipped)
            flags = [
                value for state in optimizer.state.values() for key, value in state.items() if "valid" in key
            ]
            with HostWaits(*flags) as host:
                optimizer.step()
        runs.append([local_part(param.detach()).tolist() for param in params])
    return runs, host.waits, host.collectives


@pytest.mark.parametrize("feedback", [0.0, 1.0])
def test_ranks_do_not_communicate_to_agree(pool, feedback):
    for (plain, conditional), waits, collectives in pool.run(2, train_sharded, feedback):
        assert plain == conditional
        assert not waits
        assert set(collectives) == {"alltoall_base_"}
