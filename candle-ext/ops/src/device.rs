//! Dispatch of an op by device.

/// Runs the arm of the tensor's device. The `cuda` arm exists with the feature `cuda`, and with `emulate` for CPU
/// tensors inside [`emulate`](crate::emulate).
macro_rules! on_device {
    ($op:expr, $tensor:expr, { cpu => $cpu:expr, cuda => $cuda:expr $(,)? }) => {
        match $tensor.device() {
            #[cfg(feature = "emulate")]
            candle_core::Device::Cpu if $crate::cuda::emulator::is_on() => $cuda,
            candle_core::Device::Cpu => $cpu,
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => $cuda,
            #[allow(unreachable_patterns, reason = "not in every build")]
            other => candle_core::bail!("{}: there is no kernel for {:?}", $op, other.location()),
        }
    };
}
pub(crate) use on_device;
