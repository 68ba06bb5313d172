//! The backend `nccl` through its public API. Most tests need two GPUs and are skipped without them.
//! `scripts/check-nccl` runs them with stand-ins for CUDA and NCCL, which have four devices.
#![allow(clippy::unwrap_used)]

mod cases;
mod gpus;
#[path = "nccl/launches.rs"]
mod launches;
#[path = "cases/mapped.rs"]
mod mapped;
#[path = "nccl/send_recv.rs"]
mod send_recv;
#[path = "gpus/stand_in.rs"]
mod stand_in;

use std::io::{self, Write};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{DType, Device, Tensor};
use candlewick_comm::store::{Client, Server};
use candlewick_comm::{Error, Options, Recv, Reduce, Result, World, nccl, threads};
use gpus::{n_gpus, on, open};

const PATIENT: Options = Options { timeout: Duration::from_secs(60), record: true };
/// The timeout also covers joining.
const HASTY: Options = Options { timeout: Duration::from_secs(5), record: true };

/// Lock that allows one world at a time, because opening a GPU synchronizes with it.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a world of `size` threads with one GPU each. Returns `None` if there are fewer GPUs.
fn run<T: Send>(
    size: usize,
    options: Options,
    rank: impl Fn(&World, &Device) -> Result<T> + Sync,
) -> Option<Vec<Result<T>>> {
    if n_gpus() < size {
        let _ = writeln!(io::stderr(), "skipped: there are fewer than {size} GPUs here");
        return None;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let server = Server::bind("127.0.0.1:0").unwrap();
    let port = server.port();
    let one = |i: usize| {
        let device = open(i);
        let store = Client::connect("127.0.0.1", port, PATIENT.timeout)?;
        nccl::join(&store, i, size, &device, None, options)?.run(|world| rank(world, &device))
    };
    Some(thread::scope(|scope| {
        let ranks: Vec<_> = (0..size).map(|i| scope.spawn(move || one(i))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    }))
}

/// Compares all cases with the thread backend, for CPU and GPU tensors.
#[track_caller]
fn check(size: usize) {
    let over_nccl = run(size, PATIENT, |world, device| {
        let group = world.group();
        Ok([cases::check(&*group)?, cases::check(&on(device, group))?])
    });
    let Some(over_nccl) = over_nccl else { return };
    let over_threads = threads::run(size, PATIENT, |world| cases::check(&*world.group())).unwrap();
    for (digests, want) in over_nccl.into_iter().zip(over_threads) {
        assert_eq!(digests.unwrap(), [want; 2]);
    }
}

#[test]
fn two_ranks_pass_all_cases() {
    check(2);
}

/// On real GPUs, NCCL's reductions of more than two ranks have another order and other bits.
#[test]
fn three_and_four_ranks_do_all() {
    if n_gpus() > 0 && CudaContext::new(0).unwrap().name().unwrap() == "stand-in" {
        check(3);
        check(4);
    }
}

/// Sums bf16 vectors of this many ranks in the dtype; compares the sums with those that round each partial sum in rank order.
#[track_caller]
fn check_sums_in_dtype(size: usize) {
    let n = 3 * size;
    let inputs: Vec<Tensor> = (0..size).map(|rank| cases::input(rank, DType::BF16, &[n])).collect();
    let want = inputs[1..].iter().fold(inputs[0].clone(), |sum, x| (sum + x).unwrap());
    let sums = run(size, PATIENT, |world, device| {
        let (group, own) = (world.group(), inputs[world.rank()].to_device(device)?);
        let whole = group.start_all_reduce_in_dtype(&own)?.wait()?.to_device(&Device::Cpu)?;
        let shard = group.start_reduce_scatter_in_dtype(&own)?.wait()?.to_device(&Device::Cpu)?;
        Ok((whole, shard))
    });
    for (rank, sums) in sums.into_iter().flatten().enumerate() {
        let (whole, shard) = sums.unwrap();
        cases::same(&whole, &want, "an all-reduce");
        cases::same(&shard, &want.narrow(0, 3 * rank, 3).unwrap(), "a reduce-scatter");
    }
}

/// On real GPUs, NCCL adds more than two ranks in another order.
#[test]
fn sums_in_the_dtype_are_sent_in_bf16() {
    check_sums_in_dtype(2);
    if n_gpus() > 0 && CudaContext::new(0).unwrap().name().unwrap() == "stand-in" {
        check_sums_in_dtype(3);
        check_sums_in_dtype(4);
    }
}

#[test]
fn a_buffer_is_gathered_in_its_own_memory() {
    let gathered = run(2, PATIENT, |world, device| {
        let (group, me) = (world.group(), world.group().rank());
        for dtype in [DType::F32, DType::BF16] {
            for shape in [&[1][..], &[5, 3], &[70_001]] {
                let parts = [0, 1].map(|rank| cases::input(rank, dtype, shape));
                let place = |rank: usize| if rank == me { Ok(parts[rank].clone()) } else { parts[rank].zeros_like() };
                let whole = Tensor::cat(&[place(0)?, place(1)?], 0)?.to_device(device)?;
                assert!(group.all_gather_in_place(&whole)?);
                let got = whole.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                let want = Tensor::cat(&parts, 0)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                assert!(got == want, "{dtype:?} {shape:?}");
            }
        }
        // A tensor in host memory, and rows that ranks cannot share equally, are left alone.
        let on_cpu = Tensor::ones(4, DType::F32, &Device::Cpu)?;
        let odd = Tensor::ones(3, DType::F32, device)?;
        Ok([group.all_gather_in_place(&on_cpu)?, group.all_gather_in_place(&odd)?])
    });
    let Some(gathered) = gathered else { return };
    gathered.into_iter().for_each(|rank| assert_eq!(rank.unwrap(), [false; 2]));
}

#[test]
fn recorded_sequences_are_equal_across_ranks() {
    let called = run(2, PATIENT, |world, device| {
        let (group, x) = (world.group(), Tensor::ones(3, DType::F32, device)?);
        group.split("part", &[vec![0, 1]])?.start_all_gather(&x)?.wait()?;
        group.all_reduce(&x, Reduce::Max)?;
        Ok(world.calls().iter().map(|call| format!("{}: {call}", call.group)).collect::<Vec<_>>())
    });
    let Some(called) = called else { return };
    for calls in called {
        assert_eq!(
            calls.unwrap(),
            ["world: split 1", "part: all_gather 1 (f32 [3])", "world: all_reduce 2 (max, f32 [3])"]
        );
    }
}

/// An operation on a result that has not arrived yet waits for it on the device.
#[test]
fn results_are_waited_for_on_the_device() {
    let sums = run(2, PATIENT, |world, device| {
        let mut x = Tensor::ones(1 << 16, DType::F32, device)?;
        for _ in 0..20 {
            x = world.group().start_all_reduce(&x, Reduce::Sum)?.wait()?.affine(0.5, 1.0)?;
        }
        Ok(x.to_device(&Device::Cpu)?.to_vec1::<f32>()?)
    });
    for sum in sums.into_iter().flatten() {
        assert!(sum.unwrap().iter().all(|x| *x == 21.0));
    }
}

#[test]
fn a_dropped_pending_still_completes() {
    let sums = run(2, PATIENT, |world, device| {
        let x = Tensor::ones(1 << 16, DType::F32, device)?;
        match world.rank() {
            0 => drop(world.group().start_all_reduce(&x, Reduce::Sum)?),
            _ => assert_eq!(
                world.group().all_reduce(&x, Reduce::Sum)?.to_device(&Device::Cpu)?.to_vec1::<f32>()?[7],
                2.0
            ),
        }
        Ok(())
    });
    sums.into_iter().flatten().for_each(|ended| ended.unwrap());
}

/// Returns the failure that all ranks report, and the time until then.
fn failure(
    size: usize,
    options: Options,
    rank: impl Fn(&World, &Device) -> Result<()> + Sync,
) -> Option<(String, Duration)> {
    let began = OnceLock::new();
    let ends = run(size, options, |world, device| {
        began.get_or_init(Instant::now);
        rank(world, device)
    })?;
    let reported: Vec<String> = ends.into_iter().map(|end| end.unwrap_err().to_string()).collect();
    assert!(reported.iter().all(|message| *message == reported[0]), "{reported:?}");
    Some((reported[0].clone(), began.get()?.elapsed()))
}

fn ones(device: &Device) -> Tensor {
    Tensor::ones(3, DType::F32, device).unwrap()
}

#[test]
fn a_failed_rank_aborts_the_others() {
    let ended = failure(2, PATIENT, |world, device| match world.rank() {
        1 => Err(Error::Tensor(candle_core::Error::Msg("read row 17".to_owned()))),
        _ => world.group().all_reduce(&ones(device), Reduce::Sum).map(drop),
    });
    let Some((message, took)) = ended else { return };
    assert_eq!(message, "continue: rank 1 failed to read row 17");
    assert!(took < PATIENT.timeout / 2, "the ranks waited for the timeout");
}

/// Running operations are aborted. A subgroup that does not wait for the failed rank fails too.
#[test]
fn a_failed_rank_aborts_ranks_that_do_not_wait_for_it() {
    if n_gpus() < 4 {
        return;
    }
    let ended = failure(4, PATIENT, |world, device| {
        let part = world.group().split("pair", &[vec![0, 1], vec![2, 3]])?;
        match world.rank() {
            3 => return Err(Error::Tensor(candle_core::Error::Msg("read row 17".to_owned()))),
            1 => world.group().send_recv(None, None, Some(Recv::like(&ones(device), 2))).map(drop)?,
            _ => part.all_reduce(&ones(device), Reduce::Sum).map(drop)?,
        }
        Ok(())
    });
    let Some((message, took)) = ended else { return };
    assert_eq!(message, "continue: rank 3 failed to read row 17");
    assert!(took < PATIENT.timeout / 2, "the ranks waited for the timeout");
}

/// NCCL does not detect mismatched calls: the timeout does.
#[test]
fn mismatched_calls_time_out() {
    let ended = failure(2, HASTY, |world, device| match world.rank() {
        0 => world.group().all_gather(&ones(device)).map(drop),
        _ => world.group().all_reduce(&ones(device), Reduce::Sum).map(drop),
    });
    let Some((message, _)) = ended else { return };
    assert!(
        message.contains("in group world of ranks [0, 1]: timed out after 5s: ") && message.contains("all_gather 1"),
        "{message}"
    );
}

#[test]
fn a_busy_rank_does_not_time_out() {
    let ends = run(2, HASTY, |world, device| {
        if world.rank() == 1 {
            assert_eq!(world.keep_alive().during(|| world.await_failure(2 * HASTY.timeout)), None);
        }
        world.group().all_reduce(&ones(device), Reduce::Sum).map(drop)
    });
    ends.into_iter().flatten().for_each(|end| end.unwrap());
}

#[test]
fn an_absent_rank_is_named() {
    let ended = failure(2, HASTY, |world, device| {
        if world.rank() == 1 {
            return Err(world.await_failure(PATIENT.timeout).expect("the other rank aborts the world").into());
        }
        world.group().all_reduce(&ones(device), Reduce::Sum).map(drop)
    });
    let Some((message, _)) = ended else { return };
    assert!(message.contains("in group world of ranks [0, 1]: timed out after 5s: rank 1 (pid "), "{message}");
    assert!(message.ends_with(") has not entered the call; it has made no call yet (seen by rank 0)"), "{message}");
}

#[test]
fn different_lists_are_rejected() {
    let ended = failure(2, PATIENT, |world, _| {
        let lists = [vec![vec![0, 1]], vec![vec![1, 0]]];
        world.group().split("part", &lists[world.rank()]).map(drop)
    });
    let Some((message, _)) = ended else { return };
    assert!(message.contains("with different lists than another rank"), "{message}");
}

#[test]
fn two_ranks_on_one_gpu_are_rejected() {
    if n_gpus() == 0 {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let server = Server::bind("127.0.0.1:0").unwrap();
    let join = |rank: usize| {
        let store = Client::connect("127.0.0.1", server.port(), PATIENT.timeout).unwrap();
        nccl::join(&store, rank, 2, &open(0), None, PATIENT).map(drop)
    };
    let joined =
        thread::scope(|scope| [0, 1].map(|rank| scope.spawn(move || join(rank))).map(|rank| rank.join().unwrap()));
    for refused in joined {
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("have the same GPU") && message.contains("ddp_backend: staged"), "{message}");
    }
}
