//! NaN-filled kernel outputs on a GPU, as in the emulator, so that an element that a kernel fails to write is noticed.

use std::cell::Cell;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, result};
use candle_core::{CudaDevice, Error, Result};

use crate::thread_value::with_value;

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with every kernel output on a GPU filled with NaN before the launch. For tests.
pub fn poison<T>(f: impl FnOnce() -> T) -> T {
    with_value(&ON, true, f)
}

/// Fills the slice with NaN if this thread is inside [`poison`]. All bits set is NaN in every float dtype.
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
