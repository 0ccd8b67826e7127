"""Device profiles with round numbers, in the format of `titan-async calibrate`."""

from titan_async.planning.device_profile import (
    AttentionTiming,
    Device,
    DeviceProfile,
    Elementwise,
    FitError,
    Link,
    MessageTiming,
    OfDtype,
    ProductTiming,
)
from titan_async.planning.hardware import Rates

H100 = Device(kind="cuda", name="NVIDIA H100 80GB HBM3", memory=85_000_000_000, processors=132)
CORES = Device(kind="cpu", name="Some CPU", memory=16_000_000_000, processors=2)


def make_profile(device, *, faster=1.0):
    """The profile of a device that is `faster` times as fast as one with 100 TFLOP/s."""
    error = FitError(mean=1.05, worst=1.2)
    product = ProductTiming(m=64, n=64, k=64, groups=1, seconds=1e-6, fitted_seconds=1.1e-6)
    attention = AttentionTiming(
        batch=1, heads=2, head_size=64, seq_len=512, operations=1e9, seconds=1e-3, fitted_seconds=1e-3
    )

    def of_dtype(products):
        rates = Rates(
            products=products * faster, operands=1e12 * faster, attention=40e12 * faster, attention_ramp=300.0
        )
        return OfDtype(
            rates=rates,
            fastest_product=0.8 * products * faster,
            product_error=error,
            attention_error=error,
            products=[product],
            attention=[attention],
        )

    on_cpu = device.kind == "cpu"
    passes = {"forward_passes": 2.0 if on_cpu else None, "backward_passes": 5.0 if on_cpu else None}
    link = Link(latency=1e-4, bandwidth=2e9, messages=[MessageTiming(size=8, seconds=1e-4)])
    return DeviceProfile(
        torch="2.14.1",
        device=device,
        float32=of_dtype(50e12),
        bfloat16=of_dtype(100e12),
        elementwise=Elementwise(bandwidth=2e12 * faster, **passes),
        link=link if on_cpu else None,
    )
