//! The thread backend through its public API.

use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candlewick_comm::threads::run;
use candlewick_comm::{Collective, CollectiveCall, Error, Op, Options, Recv, Reduce, Result, Solo, World};

/// Timeout that no test is meant to reach.
const PATIENT: Options = Options { timeout: Duration::from_secs(60), record: false };
/// Timeout of ranks that reach it, or are busy for longer.
const HASTY: Options = Options { timeout: Duration::from_secs(2), record: false };

#[track_caller]
fn check(size: usize) {
    let digests = || run(size, PATIENT, |world| crate::cases::check(&*world.group())).unwrap();
    let first = digests();
    assert!(first.iter().all(|digest| *digest == first[0]), "the ranks differ bitwise");
    assert_eq!(digests(), first, "the second run differs bitwise");
}

#[test]
fn one_rank_passes_all_cases() {
    check(1);
}

#[test]
fn two_ranks_pass_all_cases() {
    check(2);
}

#[test]
fn three_ranks_pass_all_cases() {
    check(3);
}

#[test]
fn four_ranks_pass_all_cases() {
    check(4);
}

#[test]
fn eight_ranks_pass_all_cases() {
    check(8);
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()
}

fn ones_from(from: usize, shape: &[usize]) -> Recv {
    Recv::like(&ones(shape), from)
}

/// Runs ranks of which some fail before the timeout. Returns the failure that all of them report.
#[track_caller]
fn failure(size: usize, options: Options, rank: impl Fn(&World) -> Result<()> + Sync) -> (usize, String) {
    let began = Instant::now();
    let reported = Mutex::new(Vec::new());
    let ended = run(size, options, |world| {
        let done = rank(world);
        if let Err(Error::Failed(failure)) = &done {
            reported.lock().unwrap().push(failure.clone());
        }
        done
    });
    let Err(Error::Failed(root)) = ended else { panic!("{ended:?}") };
    let reported = reported.into_inner().unwrap();
    assert!(!reported.is_empty() && reported.iter().all(|failure| *failure == root), "{reported:?} against {root:?}");
    assert!(began.elapsed() < PATIENT.timeout / 2, "the ranks waited for the timeout");
    (root.rank, root.message)
}

#[test]
fn mismatched_calls_are_both_named() {
    let (rank, message) = failure(3, PATIENT, |world| {
        let group = world.group();
        group.barrier()?;
        match world.rank() {
            2 => group.all_gather(&ones(&[4])).map(drop),
            _ => group.all_reduce(&ones(&[3]), Reduce::Sum).map(drop),
        }
    });
    assert_eq!(rank, 2);
    let (what, seen_by) = message.split_once(" (seen by rank ").unwrap();
    assert!(seen_by.len() == 2, "{message}");
    assert!(what.starts_with("finish all_") && what.contains(" 2 ("), "{message}");
    assert!(what.contains("in group world of ranks [0, 1, 2]: "), "{message}");
    let both = "rank 0 calls all_reduce 2 (sum, f32 [3]), rank 2 calls all_gather 2 (f32 [4])";
    assert!(what.ends_with(both), "{message}");
}

#[track_caller]
fn mismatch(what: &str, call: impl Fn(&dyn Collective) -> Result<()> + Sync) {
    let (_, message) = failure(2, PATIENT, |world| call(&*world.group()));
    assert!(message.contains(what), "{message}");
}

#[test]
fn the_rank_that_differs_from_most_is_the_cause() {
    let (rank, message) = failure(3, PATIENT, |world| match world.rank() {
        0 => world.group().barrier(),
        _ => world.group().all_reduce(&ones(&[3]), Reduce::Sum).map(drop),
    });
    assert!(rank == 0 && message.contains("rank 0 calls barrier 1, rank 1 calls all_reduce 1"), "{message}");
}

#[test]
fn every_difference_is_a_mismatch() {
    let x = |group: &dyn Collective| ones(&[2 + 2 * group.rank(), 2]);
    mismatch("f32 [2, 2]), rank 1 calls all_reduce 1 (sum, f32 [4, 2])", |g| {
        g.all_reduce(&x(g), Reduce::Sum).map(drop)
    });
    mismatch("rank 1 calls all_gather 1 (f32 [4, 2])", |g| g.all_gather(&x(g)).map(drop));
    mismatch("rank 1 calls reduce_scatter 1 (f32 [4, 2])", |g| g.reduce_scatter(&x(g)).map(drop));
    mismatch("rank 1 calls broadcast 1 (from rank 0, f32 [4, 2])", |g| g.broadcast(&x(g), 0).map(drop));
    mismatch("(from rank 0, f32 [1]), rank 1 calls broadcast 1 (from rank 1, f32 [1])", |g| {
        g.broadcast(&ones(&[1]), g.rank()).map(drop)
    });
    mismatch("rank 1 calls all_reduce 1 (max, f32 [1])", |g| {
        g.all_reduce(&ones(&[1]), [Reduce::Sum, Reduce::Max][g.rank()]).map(drop)
    });
    mismatch("(sum, f32 [1]), rank 1 calls all_reduce 1 (sum, bf16 [1])", |g| {
        g.all_reduce(&ones(&[1]).to_dtype([DType::F32, DType::BF16][g.rank()])?, Reduce::Sum).map(drop)
    });
    mismatch("with different lists", |g| {
        let lists = [vec![vec![0, 1]], vec![vec![1, 0]]];
        g.split("part", &lists[g.rank()]).map(drop)
    });
    mismatch("rank 1 sends 1 rows to rank 0, which expects 2", |g| match g.rank() {
        0 => g.all_to_all(&ones(&[2]), &[1, 1], &[1, 2]).map(drop),
        _ => g.all_to_all(&ones(&[2]), &[1, 1], &[1, 1]).map(drop),
    });
    mismatch("rank 0 calls barrier 1, rank 1 calls send_recv 1 (from rank 0)", |g| match g.rank() {
        0 => g.barrier(),
        _ => g.send_recv(None, None, Some(ones_from(0, &[2]))).map(drop),
    });
}

#[test]
fn a_tensor_of_another_dtype_or_shape_than_expected_is_named() {
    let check = |sent: Tensor, dtype: DType, shape: &[usize]| {
        let (sent_shape, expected) = (sent.dims(), dtype.as_str());
        let what = format!(": rank 0 sends f32 {sent_shape:?}, rank 1 expects {expected} {shape:?} (seen by rank 1)");
        mismatch(&what, |g| match g.rank() {
            0 => g.send_recv(Some(&sent), Some(1), None).and_then(|_| g.barrier()),
            _ => g.send_recv(None, None, Some(Recv { from: 0, dtype, shape: shape.to_vec() })).map(drop),
        });
    };
    check(ones(&[2, 3]), DType::F32, &[3, 2]);
    check(ones(&[3]), DType::F32, &[4]);
    check(ones(&[0]), DType::F32, &[]);
    check(ones(&[3]), DType::U32, &[3]);
    // Larger than an inline tensor.
    check(ones(&[40_000]), DType::F32, &[30_000]);
    check(ones(&[3]), DType::F32, &[30_000]);
}

#[test]
fn a_failed_rank_aborts_the_others() {
    let (rank, message) = failure(4, PATIENT, |world| match world.rank() {
        2 => Err(Error::Tensor(candle_core::Error::Msg("read row 17".to_owned()))),
        _ => world.group().all_reduce(&ones(&[3]), Reduce::Sum).map(drop),
    });
    assert_eq!((rank, message.as_str()), (2, "continue: rank 2 failed to read row 17"));
}

#[test]
fn a_panicked_rank_aborts_the_others() {
    let (rank, message) = failure(3, PATIENT, |world| {
        let part = world.group().split("part", &[vec![0, 1], vec![2]])?;
        if world.rank() == 1 {
            let _kept = part.start_all_reduce(&ones(&[2]), Reduce::Sum)?;
            panic!("index out of bounds");
        }
        part.barrier()?;
        world.group().barrier()
    });
    // Rank 0's barrier mismatches rank 1's all_reduce, unless the panic is first. Both failures are valid.
    let panicked = "continue: rank 1 failed to finish: it panicked: index out of bounds";
    assert!(rank == 1 && (message == panicked || message.contains("rank 1 calls all_reduce 1")), "{message}");
}

/// Makes no call until the world is aborted.
fn wait_for_abort(world: &World) -> Result<()> {
    world.await_failure(PATIENT.timeout).map(drop).ok_or_else(|| panic!("the world was not aborted"))
}

#[test]
fn an_absent_rank_is_named_with_the_call() {
    // Start together: on a busy machine a thread may start late.
    let begun = Barrier::new(3);
    let (rank, message) = failure(3, HASTY, |world| {
        begun.wait();
        match world.rank() {
            1 => wait_for_abort(world),
            _ => world.group().all_reduce(&ones(&[3]), Reduce::Sum).map(drop),
        }
    });
    assert_eq!(rank, 1);
    let what = "finish all_reduce 1 (sum, f32 [3]) in group world of ranks [0, 1, 2]: rank 1 timed out after 2s without a heartbeat";
    assert!(message.starts_with(what), "{message}");
}

/// Runs ranks of which one is busy for longer than the timeout. A busy machine may suspend the others for as long, so one of
/// five runs must succeed.
#[track_caller]
fn succeeds_once<T: Send>(rank: impl Fn(&World) -> Result<T> + Sync) -> Vec<T> {
    let last = || run(3, HASTY, &rank).unwrap();
    (0..4).find_map(|_| run(3, HASTY, &rank).ok()).unwrap_or_else(last)
}

fn be_busy(world: &World) {
    assert_eq!(world.keep_alive().during(|| world.await_failure(HASTY.timeout * 3 / 2)), None);
}

#[test]
fn a_busy_rank_does_not_time_out() {
    let sums = succeeds_once(|world| {
        if world.rank() == 2 {
            be_busy(world);
        }
        world.group().all_reduce(&ones(&[3]), Reduce::Sum)?.to_vec1::<f32>().map_err(Error::from)
    });
    assert_eq!(sums, vec![vec![3.0; 3]; 3]);
}

#[test]
fn an_absent_rank_is_named_while_another_is_busy() {
    let (rank, message) = failure(3, HASTY, |world| match world.rank() {
        1 => wait_for_abort(world),
        2 => world.keep_alive().during(|| wait_for_abort(world)),
        _ => world.group().all_reduce(&ones(&[3]), Reduce::Sum).map(drop),
    });
    assert!(
        rank == 1 && message.contains(": rank 1 timed out after 2s without a heartbeat (seen by rank 0)"),
        "{message}"
    );
}

#[test]
fn a_transitively_busy_rank_does_not_time_out() {
    succeeds_once(|world| {
        let group = world.group();
        match world.rank() {
            0 => group.send_recv(None, None, Some(ones_from(1, &[3]))).map(drop),
            1 => {
                let x = group.send_recv(None, None, Some(ones_from(2, &[3])))?;
                group.send_recv(x.as_ref(), Some(0), None).map(drop)
            }
            _ => {
                be_busy(world);
                group.send_recv(Some(&ones(&[3])), Some(1), None).map(drop)
            }
        }
    });
}

#[test]
fn a_send_without_a_receive_times_out() {
    let (rank, message) = failure(2, HASTY, |world| match world.rank() {
        0 => world.group().send_recv(Some(&ones(&[3])), Some(1), None).map(drop),
        _ => wait_for_abort(world),
    });
    assert_eq!(rank, 1);
    assert!(message.contains("send_recv 1 (to rank 1, f32 [3])") && message.contains("rank 1 timed out"), "{message}");
}

#[test]
fn a_rank_that_leaves_early_does_not_cause_a_timeout() {
    let (rank, message) = failure(2, PATIENT, |world| match world.rank() {
        1 => Ok(()),
        _ => world.group().barrier(),
    });
    assert_eq!(rank, 1);
    assert!(
        message.starts_with("finish barrier 1 in group world of ranks [0, 1]: rank 1 has left the process group"),
        "{message}"
    );
}

#[test]
fn a_dropped_pending_still_completes() {
    let sums = run(2, PATIENT, |world| {
        let group = world.group();
        match world.rank() {
            0 => group.start_all_reduce(&ones(&[2]), Reduce::Sum).map(|_| vec![]),
            _ => Ok(group.all_reduce(&ones(&[2]), Reduce::Sum)?.to_vec1::<f32>()?),
        }
    });
    assert_eq!(sums.unwrap(), [vec![], vec![2.0, 2.0]]);
}

#[test]
fn an_error_is_reported_before_started_operations_are_joined() {
    let (rank, message) = failure(3, PATIENT, |world| {
        let part = world.group().split("part", &[vec![0, 1], vec![2]])?;
        if world.rank() == 0 {
            let _started = part.start_all_reduce(&ones(&[2]), Reduce::Sum)?;
            return Err(Error::Tensor(candle_core::Error::Msg("read row 17".to_owned())));
        }
        world.group().barrier()
    });
    assert_eq!((rank, message.as_str()), (0, "continue: rank 0 failed to read row 17"));
}

#[test]
fn leaving_reports_the_failure_of_a_dropped_pending() {
    let dropped = Mutex::new(None);
    let ended = run(2, PATIENT, |world| match world.rank() {
        0 => world.group().start_all_reduce(&ones(&[2]), Reduce::Sum).map(drop),
        _ => {
            *dropped.lock().unwrap() = Some(world.group().barrier().unwrap_err().to_string());
            Ok(())
        }
    });
    assert_eq!(ended.unwrap_err().to_string(), dropped.into_inner().unwrap().unwrap());
}

#[test]
fn a_world_of_one_rank_keeps_its_failure() {
    let world = World::solo();
    assert_eq!(world.failure(), None);
    let first = world.fail("open the data");
    world.fail("close it");
    assert_eq!((world.failure(), world.await_failure(Duration::MAX)), (Some(first.clone()), Some(first)));
    assert!(world.leave().is_err());
}

#[test]
fn no_result_has_a_gradient() {
    let weight = candle_core::Var::from_tensor(&ones(&[2, 2])).unwrap();
    for x in [weight.as_tensor().clone(), weight.affine(2.0, 0.0).unwrap()] {
        let results = [
            Solo.all_reduce(&x, Reduce::Sum),
            Solo.all_gather(&x),
            Solo.reduce_scatter(&x),
            Solo.broadcast(&x, 0),
            Solo.all_to_all(&x, &[2], &[2]),
        ];
        assert!(results.into_iter().all(|got| !got.unwrap().track_op()));
    }
    let plain = ones(&[2]);
    assert_eq!(Solo.all_gather(&plain).unwrap().id(), plain.id());
}

#[test]
fn a_failed_world_stays_failed() {
    let ended = run(2, PATIENT, |world| {
        let group = world.group();
        world.fail("open the data");
        let first = group.barrier().unwrap_err().to_string();
        assert_eq!(group.all_reduce(&ones(&[1]), Reduce::Sum).unwrap_err().to_string(), first);
        assert_eq!(world.fail("close it").message, first);
        Ok::<_, Error>(())
    });
    let message = ended.unwrap_err().to_string();
    assert!(message.starts_with("continue: rank ") && message.ends_with(" failed to open the data"), "{message}");
}

#[test]
fn an_invalid_call_leaves_the_group_usable() {
    let refused = |group: &dyn Collective| {
        let word = |done: Result<Tensor>| done.unwrap_err().to_string();
        let too_large = Recv { from: 1, dtype: DType::F32, shape: vec![1 << 32, 1 << 30] };
        [
            word(group.all_gather(&ones(&[]))),
            word(group.reduce_scatter(&ones(&[3]))),
            word(group.all_to_all(&ones(&[3]), &[1, 1], &[1, 1])),
            word(group.all_to_all(&ones(&[3]), &[3], &[3])),
            word(group.all_to_all(&ones(&[3]), &[usize::MAX, 4], &[1, 1])),
            word(group.all_to_all(&ones(&[3]), &[2, 1], &[1 << 62, 1])),
            word(group.broadcast(&ones(&[3]), 2)),
            word(group.all_reduce(&ones(&[1; 9]), Reduce::Sum)),
            group.send_recv(Some(&ones(&[1])), None, None).unwrap_err().to_string(),
            group.send_recv(None, Some(1 - group.rank()), None).unwrap_err().to_string(),
            group.send_recv(None, None, Some(ones_from(group.rank(), &[3]))).unwrap_err().to_string(),
            group.send_recv(None, None, Some(ones_from(1, &[1; 9]))).unwrap_err().to_string(),
            group.send_recv(None, None, Some(too_large)).unwrap_err().to_string(),
            group.split("part", &[vec![0]]).err().unwrap().to_string(),
        ]
    };
    let words = run(2, PATIENT, |world| {
        let words = refused(&*world.group());
        world.group().barrier().map(|()| words)
    });
    let want = [
        "call all_gather: a scalar has no dim 0",
        "call reduce_scatter: 3 rows cannot be divided by 2 ranks",
        "call all_to_all: the send counts add up to 2, and the tensor has 3 rows",
        "call all_to_all: 1 send counts and 1 receive counts for 2 ranks",
        "call all_to_all: the send counts [18446744073709551615, 4] add up to more than the tensor's 3 rows",
        "call all_to_all: [4611686018427387904, 1] rows of 4 bytes to receive exceed the address space",
        "call broadcast: rank 2 is not in the group of 2 ranks",
        "call all_reduce: 9 dims, at most 8 are supported",
        "call send_recv: a tensor without a destination rank",
        "call send_recv: destination rank 1 without a tensor",
        "call send_recv: rank 0 cannot exchange tensors with itself",
        "call send_recv: 9 dims, at most 8 are supported",
        "call send_recv: f32 [4294967296, 1073741824] to receive exceeds the address space",
        "call split: [[0]] must contain each of the 2 ranks once",
    ];
    assert_eq!(words.unwrap()[0], want);
}

#[test]
fn recorded_sequences_are_equal_across_ranks() {
    let options = Options { record: true, ..PATIENT };
    let calls = run(3, options, |world| {
        let part = world.group().split("part", &[vec![0, 1, 2]])?;
        let pending = part.start_all_gather(&ones(&[2, 2]))?;
        world.group().all_reduce(&ones(&[3]), Reduce::Max)?;
        pending.wait()?;
        Ok::<_, Error>(world.calls())
    });
    let calls = calls.unwrap();
    assert!(calls.iter().all(|rank| *rank == calls[0]));
    let shown: Vec<String> = calls[0].iter().map(|call| format!("{}: {call}", call.group)).collect();
    assert_eq!(shown, ["world: split 1", "part: all_gather 1 (f32 [2, 2])", "world: all_reduce 2 (max, f32 [3])"]);
    let want = CollectiveCall { group: "world".into(), number: 1, op: Op::Split, dtype: None, shape: vec![] };
    assert_eq!(calls[0][0], want);
}

#[test]
fn nothing_is_recorded_by_default() {
    let calls = run(2, PATIENT, |world| world.group().barrier().map(|()| world.calls()));
    assert!(calls.unwrap().concat().is_empty());
}
