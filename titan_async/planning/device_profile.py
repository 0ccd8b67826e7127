"""What `titan-async calibrate` finds out about a device, its file, and the cluster that a plan makes of it.

The file is JSON with what was timed beside what was fitted to it, so that a doubtful rate can be looked at.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from titan_async.errors import UserError
from titan_async.file_io import read_json, write_output
from titan_async.planning.hardware import ACHIEVABLE_BANDWIDTH, CLUSTERS, Accelerator, Cluster, Rates

__all__ = [
    "AttentionTiming",
    "Device",
    "DeviceProfile",
    "Elementwise",
    "FitError",
    "Link",
    "MessageTiming",
    "OfDtype",
    "ProductTiming",
    "calibrated_cluster",
    "read_profile",
    "write_profile",
]

FORMAT = "titan-async calibration"
VERSION = 1

_STRICT = ConfigDict(extra="forbid")
_LEAST, _MOST = 1e-12, 1e21
"""Between these lie all seconds, bytes and rates of any device."""
_SAME_MEMORY = 0.15
"""By how much the memory that a driver reports may differ from the data sheet's."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What was measured."""

    kind: Literal["cuda", "cpu"]
    name: str
    memory: int
    """Bytes of a GPU, or of the machine."""
    processors: int
    """Streaming multiprocessors, or cores that the process may use."""
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class FitError:
    """Factors by which fitted seconds are off from timed ones: 1.1 for a tenth."""

    mean: float
    worst: float
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class ProductTiming:
    """A product of m x k and k x n; of several at a time, each by another matrix, one of them."""

    m: int
    n: int
    k: int
    groups: int
    seconds: float
    fitted_seconds: float
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class AttentionTiming:
    """Forward and backward of attention."""

    batch: int
    heads: int
    head_size: int
    seq_len: int
    operations: float
    seconds: float
    fitted_seconds: float
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class OfDtype:
    """Rates of one dtype, and the timings that they were fitted to."""

    rates: Rates
    fastest_product: float
    """FLOP/s; the peak for MFU, unless the device is one of `CLUSTERS`."""
    product_error: FitError
    attention_error: FitError
    products: list[ProductTiming]
    attention: list[AttentionTiming]
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """What elementwise operations move."""

    bandwidth: float
    """Bytes a second, of the sum of two large tensors."""
    forward_passes: float | None
    """Times that those of a layer move what they leave behind; None where they are compiled, and the
    constants of `hardware` stay."""
    backward_passes: float | None
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class MessageTiming:
    """A message between two processes of this machine."""

    size: int
    """Bytes."""
    seconds: float
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Link:
    """Messages between two processes of this machine."""

    latency: float
    """Seconds of a small one."""
    bandwidth: float
    """Bytes a second of large ones."""
    messages: list[MessageTiming]
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """The content of a calibration's file."""

    format: Literal["titan-async calibration"] = FORMAT
    version: Literal[1] = VERSION
    torch: str
    device: Device
    float32: OfDtype
    bfloat16: OfDtype
    elementwise: Elementwise
    link: Link | None
    """None of a GPU: networks are those of `--gpu`."""
    __pydantic_config__ = _STRICT


def write_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a profile as JSON, whole or not at all.

    Raises:
        UserError: if it cannot be written.
    """
    with write_output(path, "--out") as partial:
        partial.write_text(json.dumps(dataclasses.asdict(profile), indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> DeviceProfile:
    """Read what `write_profile` has written.

    Raises:
        UserError: if the file cannot be read, is none of a calibration, or is damaged.
    """
    try:
        record = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; titan-async calibrate --out {path} writes one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): calibrate anew") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is no calibration: give a file that titan-async calibrate has written")
    if record.get("version") != VERSION:
        raise UserError(
            f"{path} is a calibration of version {record.get('version')}, and this program reads {VERSION}: "
            "calibrate anew"
        )
    try:
        # By way of JSON: of Python's values the strict check would take instances alone.
        profile = TypeAdapter(DeviceProfile).validate_json(json.dumps(record), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is damaged at {where} ({first['msg']}): calibrate anew") from None
    if profile.device.kind == "cpu" and profile.link is None:
        raise UserError(f"{path} is damaged at link (a CPU has one): calibrate anew")
    for where, number in _numbers(dataclasses.asdict(profile)):
        if not _LEAST < number < _MOST:
            raise UserError(f"{path} is damaged at {where} (it is {number}): calibrate anew")
    return profile


def _numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, int | float):
        yield where, value if math.isfinite(value) else math.nan


def calibrated_cluster(profile: DeviceProfile, gpu: str | None, file: str) -> Cluster:
    """The cluster that a plan is made for: this device's rates, and a network.

    Of a GPU the network is that of `gpu`, by default that of the kind which the device is; of a CPU, whose
    file has one, a node is the machine and a rank one of its cores.

    Args:
        profile: of the device.
        gpu: a name of `CLUSTERS`.
        file: the profile's, for messages.

    Raises:
        UserError: if the device and `gpu` do not go together, or it takes a `gpu` to know the network.
    """
    name = profile.device.name
    if profile.device.kind == "cpu":
        if gpu is not None:
            raise UserError(
                f"{file} was measured on a CPU, which has no network of --gpu {gpu}: leave out --gpu"
            )
        return _cpu_cluster(profile)
    own = next((key for key, cluster in CLUSTERS.items() if _is_kind(profile.device, key, cluster)), None)
    if gpu is None and own is None:
        raise UserError(
            f"{file} was measured on {name}, whose network is not known: give --gpu with the name whose "
            f"nodes are most like yours, of {', '.join(CLUSTERS)}"
        )
    if gpu is not None and own is not None and gpu.lower() != own:
        raise UserError(
            f"{file} was measured on {name}, which is {own} and not {gpu}: leave out --gpu, or calibrate "
            "on one of those"
        )
    cluster = CLUSTERS[own or gpu.lower()]  # type: ignore[union-attr]
    sheet = cluster.accelerator
    known: dict[str, Any] = {"watts": 0.0}
    if own is not None:
        peaks = {"matrix_peak": sheet.matrix_peak, "float32_peak": sheet.float32_peak}
        known = {**peaks, "name": sheet.name, "memory": sheet.memory, "watts": sheet.watts}
    return dataclasses.replace(cluster, accelerator=_accelerator(profile, **known))


def _is_kind(device: Device, key: str, cluster: Cluster) -> bool:
    """Whether a GPU is that of a cluster: by its name, memory and multiprocessors, for SXM and PCI Express
    models of one name differ."""
    gpu = cluster.accelerator
    return (
        key.partition("-")[0] in device.name.lower().replace(" ", "")
        and device.processors == gpu.processors
        and abs(device.memory / gpu.memory - 1) < _SAME_MEMORY
    )


def _accelerator(profile: DeviceProfile, **known: Any) -> Accelerator:
    device, elementwise = profile.device, profile.elementwise
    measured = {"float32": profile.float32.rates, "bfloat16": profile.bfloat16.rates}
    values = {
        "name": device.name,
        "memory": device.memory,
        "matrix_peak": profile.bfloat16.fastest_product,
        "float32_peak": profile.float32.fastest_product,
        "processors": device.processors,
        **known,
    }
    passes = {
        name: value
        for name, value in dataclasses.asdict(elementwise).items()
        if name != "bandwidth" and value is not None
    }
    return Accelerator(
        **values,
        **passes,
        memory_bandwidth=elementwise.bandwidth,
        measured=measured,
        calibrated_on=device.name,
        achievable=measured["bfloat16"].products / values["matrix_peak"],
        attention=measured["bfloat16"].attention / values["matrix_peak"],
    )


def _cpu_cluster(profile: DeviceProfile) -> Cluster:
    link, cores = profile.link, profile.device.processors
    assert link is not None  # as `read_profile` has seen
    accelerator = _accelerator(
        profile, name="CPU core", memory=profile.device.memory // cores, processors=1, watts=0.0, on_cpu=True
    )
    bandwidth = link.bandwidth / ACHIEVABLE_BANDWIDTH  # of which plans take that share
    return Cluster(
        accelerator=accelerator,
        per_node=cores,
        link_bandwidth=bandwidth,
        link_latency=link.latency,
        # Plans of more ranks than cores are refused, so that nothing leaves the machine.
        network_bandwidth=bandwidth,
        network_latency=link.latency,
        link_blocks=0,
        network_blocks=0,
        collective_blocks=0,
    )
