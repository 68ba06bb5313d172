//! Tests over a stand-in for the driver, whose streams are threads and whose freed memory is NaN. `scripts/check-cublas` runs
//! them. Without the stand-in they pass.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use candle_core::cuda_backend::cudarc::driver::result::stream::launch_host_function;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{CudaDevice, DType, Device, Tensor};

use super::{CopyStream, MAX_SOURCES, OffloadedTensor};
use crate::accelerator::driver_has;
use crate::cuda::poison::poison;

const LEN: usize = 4096;

/// A device of the stand-in; `None` without it.
fn device() -> Option<(Device, CudaDevice)> {
    if !driver_has("stand_in_rules") {
        eprintln!("skipped: the driver is no stand-in");
        return None;
    }
    let device = Device::new_cuda_with_stream(0).unwrap();
    let cuda = device.as_cuda_device().unwrap().clone();
    // SAFETY: the code under test orders its streams by events of its own.
    unsafe { cuda.disable_event_tracking() };
    Some((device, cuda))
}

/// Work that occupies a stream until this value is dropped.
struct HeldStream(Option<Sender<()>>);

impl HeldStream {
    fn hold(stream: &CudaStream) -> Self {
        unsafe extern "C" fn wait(end: *mut c_void) {
            // SAFETY: `hold` made it with Box::into_raw, for this call.
            let end = unsafe { Box::from_raw(end.cast::<Receiver<()>>()) };
            let _ = end.recv();
        }
        let (release, end) = channel();
        stream.context().bind_to_thread().unwrap();
        // SAFETY: the function gets its receiver, and calls no CUDA.
        unsafe { launch_host_function(stream.cu_stream(), wait, Box::into_raw(Box::new(end)).cast()) }.unwrap();
        Self(Some(release))
    }

    fn release(mut self) {
        self.0.take();
    }
}

fn hold_compute(cuda: &CudaDevice) -> HeldStream {
    HeldStream::hold(&cuda.cuda_stream())
}

fn hold_copies(cuda: &CudaDevice) -> HeldStream {
    CopyStream::with(cuda, |copies| Ok(HeldStream::hold(&copies.stream))).unwrap()
}

/// Tensor of `LEN` elements `value`, computed on the device.
fn filled(value: f64, device: &Device) -> Tensor {
    Tensor::ones(LEN, DType::F32, device).unwrap().affine(value, 0.0).unwrap()
}

#[track_caller]
fn assert_all(x: &Tensor, want: f32) {
    let x = crate::to_host(x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(x.len(), LEN);
    let wrong = x.iter().position(|x| *x != want);
    assert!(wrong.is_none(), "element {wrong:?} is {}, not {want}", x[wrong.unwrap_or(0)]);
}

/// Fails after a minute if the event waits for a stream that this test holds.
#[track_caller]
fn assert_completes(event: &CudaEvent) {
    let end = Instant::now() + Duration::from_secs(60);
    while !event.is_complete() {
        assert!(Instant::now() < end, "the event waits for a held stream");
        std::thread::yield_now();
    }
}

#[test]
fn a_copy_waits_for_the_compute_before_it() {
    let Some((device, cuda)) = device() else { return };
    let held = hold_compute(&cuda);
    let x = filled(3.0, &device);
    let copy = OffloadedTensor::start(&x, &cuda).unwrap();
    held.release();
    assert_all(&copy.into_host().unwrap(), 3.0);
}

#[test]
fn compute_does_not_wait_for_a_copy() {
    let Some((device, cuda)) = device() else { return };
    let x = filled(4.0, &device);
    cuda.cuda_stream().synchronize().unwrap();
    let held = hold_copies(&cuda);
    let copy = OffloadedTensor::start(&x, &cuda).unwrap();
    let y = x.affine(2.0, 0.0).unwrap();
    assert_completes(&cuda.cuda_stream().record_event(None).unwrap());
    assert_all(&y, 8.0);
    held.release();
    assert_all(&copy.into_host().unwrap(), 4.0);
}

#[test]
fn a_tensor_is_alive_until_it_is_copied() {
    let Some((device, cuda)) = device() else { return };
    let held = hold_copies(&cuda);
    let n = MAX_SOURCES + 3;
    // Each tensor has been dropped when its copy begins.
    let copies: Vec<_> = (0..n).map(|i| OffloadedTensor::start(&filled(i as f64, &device), &cuda).unwrap()).collect();
    // Compute after that must not run before the memory is free.
    let later = filled(9.0, &device);
    held.release();
    for (i, copy) in copies.into_iter().enumerate() {
        assert_all(&copy.into_host().unwrap(), i as f32);
    }
    assert_all(&later, 9.0);
}

#[test]
fn a_released_tensor_is_freed_after_its_copy() {
    let Some((device, cuda)) = device() else { return };
    let x = filled(3.0, &device);
    let held = hold_copies(&cuda);
    let copy = OffloadedTensor::start(&x, &cuda).unwrap();
    drop(x);
    copy.release_sources().unwrap();
    let is_kept = CopyStream::with(&cuda, |copies| Ok(!copies.sources.is_empty())).unwrap();
    assert!(!is_kept, "a tensor is kept");
    let released = cuda.cuda_stream().record_event(None).unwrap();
    assert!(!released.is_complete(), "compute has freed the memory while a copy reads it");
    held.release();
    assert_all(&copy.into_host().unwrap(), 3.0);
}

#[test]
fn compute_waits_for_the_values_that_come_back() {
    let Some((device, cuda)) = device() else { return };
    for prefetches in [0, 1, 2] {
        let mut copy = OffloadedTensor::start(&filled(5.0, &device), &cuda).unwrap();
        let held = hold_copies(&cuda);
        (0..prefetches).for_each(|_| copy.prefetch().unwrap());
        let x = copy.into_device().unwrap();
        let y = x.affine(2.0, 0.0).unwrap();
        held.release();
        assert_all(&y, 10.0);
        assert_all(&x, 5.0);
    }
}

#[test]
fn values_come_back_after_earlier_compute_on_their_memory() {
    let Some((device, cuda)) = device() else { return };
    let mut copy = OffloadedTensor::start(&filled(6.0, &device), &cuda).unwrap();
    let held = hold_compute(&cuda);
    // The new memory is filled with NaN in the order of compute.
    poison(|| copy.prefetch()).unwrap();
    held.release();
    assert_all(&copy.into_device().unwrap(), 6.0);
}

#[test]
fn values_come_back_while_compute_runs() {
    let Some((device, cuda)) = device() else { return };
    let mut copy = OffloadedTensor::start(&filled(7.0, &device), &cuda).unwrap();
    copy.prefetch().unwrap();
    let held = hold_compute(&cuda);
    assert_completes(&copy.arriving.as_ref().unwrap().done);
    held.release();
    assert_all(&copy.into_device().unwrap(), 7.0);
}

#[test]
fn memory_of_values_that_are_dropped_is_reused_after_their_copy() {
    let Some((device, cuda)) = device() else { return };
    let held = {
        let mut copy = OffloadedTensor::start(&filled(8.0, &device), &cuda).unwrap();
        let held = hold_copies(&cuda);
        copy.prefetch().unwrap();
        held
    };
    let released = cuda.cuda_stream().record_event(None).unwrap();
    assert!(!released.is_complete(), "compute has freed the memory while a copy writes it");
    held.release();
    released.synchronize().unwrap();
}
