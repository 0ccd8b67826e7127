"""The result of `titan-async calibrate`, its file, and the cluster that a plan derives from it.

The file is JSON with the timings and the rates that were fitted to them, so that doubtful rates can be
checked.
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

_REPEAT = "repeat titan-async calibrate"

_STRICT = ConfigDict(extra="forbid")
_LEAST, _MOST = 1e-12, 1e21
"""Bounds of all seconds, bytes and rates of any device."""
_SAME_MEMORY = 0.15
"""Tolerance between the memory that a driver reports and the data sheet's."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The measured device."""

    kind: Literal["cuda", "cpu"]
    name: str
    memory: int
    """Bytes of a GPU, or of the machine."""
    processors: int
    """Streaming multiprocessors, or cores that the process may use."""
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class FitError:
    """Factors between fitted and measured seconds: 1.1 for 10 %."""

    mean: float
    worst: float
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class ProductTiming:
    """A product of m x k and k x n; of a grouped product, one of its products."""

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
    """Rates of one dtype, and the timings they were fitted to."""

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
    """Memory traffic of elementwise operations."""

    bandwidth: float
    """Bytes per second, of the sum of two large tensors."""
    forward_passes: float | None
    """Traffic of a layer's elementwise operations relative to its saved bytes; None if they are compiled, for
    the constants of `hardware`."""
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
    """Seconds of a small message."""
    bandwidth: float
    """Bytes per second of large messages."""
    messages: list[MessageTiming]
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """The content of a calibration file."""

    format: Literal["titan-async calibration"] = FORMAT
    version: Literal[1] = VERSION
    torch: str
    device: Device
    float32: OfDtype
    bfloat16: OfDtype
    elementwise: Elementwise
    link: Link | None
    """None for a GPU: its network is that of `--gpu`."""
    __pydantic_config__ = _STRICT


def write_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a profile as JSON, atomically.

    Raises:
        UserError: if it cannot be written.
    """
    with write_output(path, "--out") as partial:
        partial.write_text(json.dumps(dataclasses.asdict(profile), indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> DeviceProfile:
    """Read a file of `write_profile`.

    Raises:
        UserError: if the file cannot be read, is not a calibration file, or is damaged.
    """
    try:
        record = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; titan-async calibrate --out {path} writes one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): {_REPEAT}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is not a calibration file: give a file written by titan-async calibrate")
    if record.get("version") != VERSION:
        raise UserError(
            f"{path} has format version {record.get('version')}, but this program reads version {VERSION}: "
            f"{_REPEAT}"
        )
    try:
        # From JSON, because strict validation of Python values only accepts instances.
        profile = TypeAdapter(DeviceProfile).validate_json(json.dumps(record), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is damaged at {where} ({first['msg']}): {_REPEAT}") from None
    if profile.device.kind == "cpu" and profile.link is None:
        raise UserError(f"{path} is damaged at link (missing for a CPU): {_REPEAT}")
    for where, number in _numbers(dataclasses.asdict(profile)):
        if not _LEAST < number < _MOST:
            raise UserError(f"{path} is damaged at {where} (it is {number}): {_REPEAT}")
    return profile


def _numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, int | float):
        yield where, value if math.isfinite(value) else math.nan


def calibrated_cluster(profile: DeviceProfile, gpu: str | None, file: str) -> Cluster:
    """A cluster with this device's rates, and a network.

    A GPU's network is that of `gpu`, by default that of the device's own kind. For a CPU the network is in
    the profile; a node is the machine, and a rank one of its cores.

    Args:
        profile: of the device.
        gpu: a name of `CLUSTERS`.
        file: of the profile, for messages.

    Raises:
        UserError: if the device and `gpu` do not match, or the network is unknown without `gpu`.
    """
    name = profile.device.name
    if profile.device.kind == "cpu":
        if gpu is not None:
            raise UserError(
                f"{file} was measured on a CPU, which does not have the network of --gpu {gpu}: omit --gpu"
            )
        return _cpu_cluster(profile)
    own = next((key for key, cluster in CLUSTERS.items() if _is_kind(profile.device, key, cluster)), None)
    if gpu is None and own is None:
        raise UserError(
            f"{file} was measured on {name}, whose network is unknown: set --gpu to the kind with the most "
            f"similar nodes: {', '.join(CLUSTERS)}"
        )
    if gpu is not None and own is not None and gpu.lower() != own:
        raise UserError(
            f"{file} was measured on {name}, which is {own} and not {gpu}: omit --gpu, or calibrate on {gpu}"
        )
    cluster = CLUSTERS[own or gpu.lower()]  # type: ignore[union-attr]
    sheet = cluster.accelerator
    known: dict[str, Any] = {"watts": 0.0}
    if own is not None:
        peaks = {"matrix_peak": sheet.matrix_peak, "float32_peak": sheet.float32_peak}
        known = {**peaks, "name": sheet.name, "memory": sheet.memory, "watts": sheet.watts}
    return dataclasses.replace(cluster, accelerator=_accelerator(profile, **known))


def _is_kind(device: Device, key: str, cluster: Cluster) -> bool:
    """Whether a GPU is that of a cluster, by name, memory and multiprocessors: SXM and PCI Express models of
    one name differ."""
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
    assert link is not None  # checked by `read_profile`
    accelerator = _accelerator(
        profile, name="CPU core", memory=profile.device.memory // cores, processors=1, watts=0.0, on_cpu=True
    )
    bandwidth = link.bandwidth / ACHIEVABLE_BANDWIDTH  # plans multiply by that share
    return Cluster(
        accelerator=accelerator,
        per_node=cores,
        link_bandwidth=bandwidth,
        link_latency=link.latency,
        # Plans with more ranks than cores are refused, so no message leaves the machine.
        network_bandwidth=bandwidth,
        network_latency=link.latency,
        link_blocks=0,
        network_blocks=0,
        collective_blocks=0,
    )
