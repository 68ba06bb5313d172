//! Groups whose tensors lie on a GPU. Without a GPU, or NCCL, nothing is tested; `scripts/gpu-check` makes sure that they are.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

mod cases;
#[path = "cases/through.rs"]
mod through;

use std::sync::Arc;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{Device, Tensor};
use candlewick_comm::store::{Client, Server};
use candlewick_comm::{Collective, Error, Options, Reduce, Result, Solo, Staged, World, nccl, threads};
use libloading::Library;
use through::Through;

const PATIENT: Options = Options { timeout: Duration::from_secs(30), record: true };

/// The first GPU, if there is one.
fn gpu() -> Option<Device> {
    // SAFETY: the driver's library may be loaded by any program. Without it the driver's functions panic.
    let driver = unsafe { Library::new("libcuda.so.1") };
    if driver.is_err() || CudaContext::device_count().unwrap_or(0) == 0 {
        eprintln!("skipped: there is no GPU here");
        return None;
    }
    let device = Device::new_cuda_with_stream(0).unwrap();
    if let Device::Cuda(cuda) = &device {
        // SAFETY: as in a run, everything but NCCL's part is on one stream, and its part is waited for by events.
        unsafe { cuda.disable_event_tracking() };
    }
    Some(device)
}

/// What the cases see as a group of the CPU, whose tensors all lie on `device`.
fn on(device: &Device, group: Arc<dyn Collective>) -> Through {
    let device = device.clone();
    let check = {
        let device = device.clone();
        move |y: Tensor| {
            assert!(y.device().same_device(&device), "a result on {:?}", y.device());
            Ok(y.to_device(&Device::Cpu)?)
        }
    };
    Through::new(group, move |x| Ok(x.to_device(&device)?), check)
}

/// A world of one rank over NCCL.
fn alone(device: &Device) -> Result<World> {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = Client::connect("127.0.0.1", server.port(), PATIENT.timeout).unwrap();
    nccl::join(&store, 0, 1, device, Some(server), PATIENT)
}

#[test]
fn one_rank_over_nccl_does_all() {
    let Some(device) = gpu() else { return };
    let digest = cases::check(&Solo).unwrap();
    for _ in 0..2 {
        let world = alone(&device).unwrap();
        assert_eq!(cases::check(&on(&device, world.group())).unwrap(), digest, "tensors of the GPU");
        assert_eq!(cases::check(&*world.group()).unwrap(), digest, "tensors of the CPU");
        world.leave().unwrap();
    }
}

#[test]
fn one_rank_over_nccl_keeps_a_nan() {
    let Some(device) = gpu() else { return };
    let world = alone(&device).unwrap();
    for op in [Reduce::Max, Reduce::Min, Reduce::Sum] {
        let x = Tensor::new(&[1f32, f32::NAN, -2.0], &device).unwrap();
        let y = world.group().all_reduce(&x, op).unwrap().to_vec1::<f32>().unwrap();
        assert!(y[0] == 1.0 && y[1].is_nan() && y[2] == -2.0, "{y:?}");
    }
    world.leave().unwrap();
}

#[test]
fn what_was_started_is_waited_for_on_the_device() {
    let Some(device) = gpu() else { return };
    let world = alone(&device).unwrap();
    let group = world.group();
    let mut x = Tensor::ones(1 << 22, candle_core::DType::F32, &device).unwrap();
    for _ in 0..50 {
        let pending = group.start_all_reduce(&x, Reduce::Sum).unwrap();
        x = (pending.wait().unwrap() + 1.0).unwrap();
    }
    let [low, high] = [x.min_all(), x.max_all()].map(|y| y.unwrap().to_scalar::<f32>().unwrap());
    assert_eq!([low, high], [51.0; 2]);
    assert_eq!(world.calls().len(), 50);
    drop(group);
    world.leave().unwrap();
}

#[test]
fn nccl_takes_only_its_own_gpu() {
    let Some(device) = gpu() else { return };
    let joined = alone(&Device::Cpu);
    assert!(matches!(joined, Err(Error::Join { .. })), "{:?}", joined.err());
    let world = alone(&device).unwrap();
    assert!(world.group().check_device(&device).is_ok() && world.group().check_device(&Device::Cpu).is_ok());
    world.leave().unwrap();
}

#[test]
fn two_ranks_share_a_gpu_through_the_host() {
    let Some(device) = gpu() else { return };
    let plain = threads::run(2, PATIENT, |world| cases::check(&*world.group())).unwrap();
    let staged =
        threads::run(2, PATIENT, |world| cases::check(&on(&device, Arc::new(Staged::new(world.group(), &device)))));
    assert_eq!(staged.unwrap(), plain);
}
