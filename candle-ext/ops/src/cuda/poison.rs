//! Outputs on a device that begin as NaN, as the emulator's do: an element that a kernel forgets to write does not go
//! unnoticed.

use std::cell::Cell;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, result};
use candle_core::{CudaDevice, Error, Result};

use crate::thread_value::with_value;

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with every output of a kernel on a device filled with NaN before it is written. For tests.
pub fn poison<T>(f: impl FnOnce() -> T) -> T {
    with_value(&ON, true, f)
}

/// Sets all bits, which is NaN in every float format, if this thread is inside of [`poison`].
pub(super) fn fill<T>(device: &CudaDevice, slice: &CudaSlice<T>) -> Result<()> {
    if !ON.get() {
        return Ok(());
    }
    let stream = device.cuda_stream();
    let (address, _guard) = slice.device_ptr(&stream);
    // SAFETY: the slice was allocated on this stream, and any bits are a value of the formats that kernels write.
    unsafe { result::memset_d8_async(address, 0xff, slice.num_bytes(), stream.cu_stream()) }
        .map_err(|error| Error::Msg(format!("fill an output with NaN: {error}")))
}
