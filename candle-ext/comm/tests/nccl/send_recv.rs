//! Sends and receives over NCCL: concurrent with compute, and with mismatched tensors.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::cuda_backend::cudarc::driver::result::stream::launch_host_function;
use candle_core::{DType, Device, Storage, Tensor};
use candlewick_comm::{Recv, Result, World};

use crate::{PATIENT, failure, run};

/// Longest time of simulated compute.
const LONGEST: Duration = Duration::from_secs(5);

unsafe extern "C" fn await_end(end: *mut c_void) {
    // SAFETY: `compute` leaked the box for this one call.
    let end = unsafe { Box::from_raw(end.cast::<Receiver<()>>()) };
    let _ = end.recv_timeout(LONGEST);
}

/// Queues simulated compute on the device's stream. It ends when the returned sender sends, or after `LONGEST`.
fn compute(device: &Device) -> Sender<()> {
    let (sender, end) = channel();
    let Device::Cuda(cuda) = device else { unreachable!("the rank has a GPU") };
    let end: *mut Receiver<()> = Box::into_raw(Box::new(end));
    // SAFETY: the stream is valid, and the function owns the box.
    unsafe { launch_host_function(cuda.cuda_stream().cu_stream(), await_end, end.cast()) }.unwrap();
    sender
}

/// Waits until another stream reads `want` from `y`, for longer than the simulated compute lasts.
fn await_elements(device: &Device, y: &Tensor, want: &[f32]) {
    let Device::Cuda(cuda) = device else { unreachable!("the rank has a GPU") };
    let other = cuda.cuda_stream().context().new_stream().unwrap();
    let (storage, _) = y.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { unreachable!("the result is on the GPU") };
    let began = Instant::now();
    loop {
        let got = other.clone_dtoh(storage.as_cuda_slice::<f32>().unwrap()).unwrap();
        other.synchronize().unwrap();
        if got == want || began.elapsed() > 2 * LONGEST {
            return assert_eq!(got, want);
        }
        thread::yield_now();
    }
}

/// Exchanges tensors with the other rank while the device runs compute that was queued after the call.
fn exchange_during_compute(world: &World, device: &Device) -> Result<bool> {
    let (group, peer) = (world.group(), 1 - world.rank());
    let elements = |rank: usize| vec![rank as f32 + 0.5; 1 << 16];
    let x = Tensor::from_vec(elements(world.rank()), 1 << 16, device)?;
    let pending = group.start_send_recv(Some(&x), Some(peer), Some(Recv::like(&x, peer)))?;
    let computes = compute(device);
    let y = pending.wait()?.expect("a receive returns a tensor");
    await_elements(device, &y, &elements(peer));
    Ok(computes.send(()).is_ok())
}

#[test]
fn a_receive_completes_before_compute_queued_after_it() {
    for computes_still in run(2, PATIENT, exchange_during_compute).into_iter().flatten() {
        assert!(computes_still.unwrap(), "the receive came after the compute");
    }
}

#[track_caller]
fn check(sent: &[usize], dtype: DType, shape: &[usize]) {
    let ended = failure(2, PATIENT, |world, _| {
        let x = Tensor::ones(sent, DType::F32, &Device::Cpu)?;
        let recv = Recv { from: 0, dtype, shape: shape.to_vec() };
        match world.rank() {
            0 => drop(world.group().start_send_recv(Some(&x), Some(1), None)?),
            _ => drop(world.group().start_send_recv(None, None, Some(recv))?),
        }
        Err(world.await_failure(PATIENT.timeout).expect("the receiver aborts the world").into())
    });
    let Some((message, took)) = ended else { return };
    let expects = format!(" expects {} {shape:?} (seen by rank 1)", dtype.as_str());
    assert!(
        message.contains(&format!(" sends f32 {sent:?}, rank 1 (pid ")) && message.ends_with(&expects),
        "{message}"
    );
    assert!(took < PATIENT.timeout / 2, "the ranks waited for the timeout");
}

#[test]
fn a_mismatched_tensor_that_arrives_aborts_the_world() {
    check(&[2, 3], DType::F32, &[3, 2]);
    check(&[3], DType::U32, &[3]);
    check(&[4], DType::BF16, &[8]);
}

/// NCCL itself would hang.
#[test]
fn a_mismatched_tensor_that_hangs_aborts_the_world() {
    check(&[3], DType::F32, &[4]);
    check(&[1000], DType::F32, &[10]);
    check(&[0], DType::F32, &[3]);
}

/// Sends more shapes than the cache of descriptions holds.
#[test]
fn many_sends_of_many_shapes_arrive() {
    let ends = run(2, PATIENT, |world, device| {
        let (group, peer) = (world.group(), 1 - world.rank());
        let mut started = Vec::new();
        for n in 1..=80 {
            let x = Tensor::from_vec(vec![n as f32; n], n, device)?;
            started.push(group.start_send_recv(Some(&x), Some(peer), Some(Recv::like(&x, peer)))?);
        }
        for (i, pending) in started.into_iter().enumerate() {
            let y = pending.wait()?.expect("a receive returns a tensor").to_device(&Device::Cpu)?;
            assert_eq!(y.to_vec1::<f32>()?, vec![i as f32 + 1.0; i + 1]);
        }
        group.barrier()?;
        Ok(())
    });
    ends.into_iter().flatten().for_each(|end| end.unwrap());
}
