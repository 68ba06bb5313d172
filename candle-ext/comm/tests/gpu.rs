//! Process groups of GPU tensors. The tests are skipped without a GPU or NCCL; `scripts/gpu-check` requires both.
#![allow(clippy::unwrap_used)]

mod cases;
mod gpus;
#[path = "cases/mapped.rs"]
mod mapped;

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Tensor};
use candlewick_comm::store::{Client, Server};
use candlewick_comm::{Error, Options, Reduce, Result, Solo, StagedGroup, World, nccl, threads};
use gpus::{n_gpus, on, open};

const PATIENT: Options = Options { timeout: Duration::from_secs(30), record: true };

/// Opens the first GPU, if there is one.
fn gpu() -> Option<Device> {
    if n_gpus() == 0 {
        let _ = writeln!(io::stderr(), "skipped: there is no GPU here");
        return None;
    }
    Some(open(0))
}

/// Joins a world of one rank over NCCL.
fn alone(device: &Device) -> Result<World> {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let store = Client::connect("127.0.0.1", server.port(), PATIENT.timeout).unwrap();
    nccl::join(&store, 0, 1, device, Some(server), PATIENT)
}

#[test]
fn one_rank_over_nccl_passes_all_cases() {
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
fn one_rank_over_nccl_propagates_nan() {
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
fn a_result_is_waited_for_on_the_device() {
    let Some(device) = gpu() else { return };
    let world = alone(&device).unwrap();
    let group = world.group();
    let mut x = Tensor::ones(1 << 22, candle_core::DType::F32, &device).unwrap();
    for _ in 0..50 {
        let pending = group.start_all_reduce(&x, Reduce::Sum).unwrap();
        x = (pending.wait().unwrap() + 1.0).unwrap();
    }
    assert!(x.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|x| *x == 51.0));
    assert_eq!(world.calls().len(), 50);
    drop(group);
    world.leave().unwrap();
}

#[test]
fn nccl_supports_its_own_gpu_only() {
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
    let staged = threads::run(2, PATIENT, |world| {
        cases::check(&on(&device, Arc::new(StagedGroup::new(world.group(), &device))))
    });
    assert_eq!(staged.unwrap(), plain);
}
