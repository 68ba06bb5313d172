//! Launch order, and groups that cannot be created or closed, observed through the stand-in for NCCL.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candlewick_comm::{Collective, Error, Recv, Reduce, Result, World};

use crate::stand_in::StandIn;
use crate::{PATIENT, failure, ones, run};

/// The launches take different times, and each group launches from its own thread.
#[test]
fn groups_launch_in_the_order_of_the_calls() {
    let Some(stand_in) = StandIn::open() else { return };
    let launched = run(2, PATIENT, |world, device| {
        let part = |name: &str| world.group().split(name, &[vec![0, 1]]);
        let (one, other, x) = (part("one")?, part("other")?, ones(device));
        world.group().barrier()?;
        let n_before = stand_in.launches(world.rank()).len();
        let mut started = Vec::new();
        for group in [&one, &other, &one].into_iter().cycle().take(60) {
            started.push(group.start_all_reduce(&x, Reduce::Sum)?);
        }
        started.into_iter().try_for_each(|pending| pending.wait().map(drop))?;
        Ok(stand_in.launches(world.rank())[n_before..].to_vec())
    });
    let launched: Vec<Vec<u64>> = launched.into_iter().flatten().map(|rank| rank.unwrap()).collect();
    let want: Vec<u64> = launched[0][..2].iter().chain(&launched[0][..1]).copied().cycle().take(60).collect();
    assert_ne!(want[0], want[1]);
    assert_eq!(launched, [want.clone(), want]);
}

/// Checks the failure of a world in which an NCCL function fails while a group is created, used and closed.
#[track_caller]
fn check(function: &str, want: [&str; 2]) {
    let Some(stand_in) = StandIn::open() else { return };
    let ended = failure(2, PATIENT, |world, device| {
        world.group().barrier()?;
        if world.rank() == 0 {
            stand_in.fail_next(function);
        }
        world.group().barrier()?;
        let pair = world.group().split("pair", &[vec![0, 1]])?;
        pair.all_reduce(&ones(device), Reduce::Sum)?;
        drop(pair);
        Err(world.await_failure(PATIENT.timeout).expect("one of the ranks aborts the world").into())
    });
    let message = ended.unwrap().0;
    assert!(message.starts_with(want[0]) && message.contains(want[1]), "{message}");
}

#[test]
fn a_group_that_cannot_be_closed_is_named() {
    let want = ["close group pair of ranks [0, 1]: rank ", "): NCCL: rejected by the stand-in for NCCL"];
    check("ncclCommDestroy", want);
    check("ncclCommFinalize", want);
}

#[test]
fn a_group_that_cannot_be_connected_is_named() {
    let want = [
        "finish split 3 in group world of ranks [0, 1]: rank ",
        "): connect group pair of ranks [0, 1]: NCCL: rejected",
    ];
    check("ncclCommInitRankConfig", want);
}

/// Runs the sends and receives of a 1F1B schedule with three stages. Each edge and direction is a group of its own.
fn one_forward_one_backward(world: &World, device: &Device) -> Result<()> {
    const N_MICROS: usize = 4;
    let (stage, is_first, is_last) = (world.rank(), world.rank() == 0, world.rank() == 2);
    let edges = |name: &str| -> Result<[Arc<dyn Collective>; 2]> {
        let first = world.group().split(name, &[vec![0, 1], vec![2]])?;
        Ok([first, world.group().split(name, &[vec![0], vec![1, 2]])?])
    };
    let (forward, backward) = (edges("activations")?, edges("gradients")?);
    let hidden = |micro: usize| Tensor::from_vec(vec![micro as f32; 1 << 10], 1 << 10, device);
    let receive = |edge: &dyn Collective, from: usize, micro: usize| {
        let y =
            edge.send_recv(None, None, Some(Recv::like(&hidden(micro)?, from)))?.expect("a receive returns a tensor");
        assert_eq!(y.to_device(&Device::Cpu)?.to_vec1::<f32>()?, vec![micro as f32; 1 << 10]);
        Ok::<_, Error>(())
    };
    let mut sent = Vec::new();
    let mut run = |is_forward: bool, micro: usize| {
        let x = hidden(micro)?;
        match is_forward {
            true if !is_first => receive(&*forward[stage - 1], 0, micro)?,
            false if !is_last => receive(&*backward[stage], 1, micro)?,
            _ => {}
        }
        match is_forward {
            true if !is_last => sent.push(forward[stage].start_send_recv(Some(&x), Some(1), None)?),
            false if !is_first => sent.push(backward[stage - 1].start_send_recv(Some(&x), Some(0), None)?),
            _ => {}
        }
        Ok::<_, Error>(())
    };
    let n_ahead = 2 - stage;
    (0..n_ahead).try_for_each(|micro| run(true, micro))?;
    (n_ahead..N_MICROS).try_for_each(|micro| run(true, micro).and_then(|()| run(false, micro - n_ahead)))?;
    (N_MICROS - n_ahead..N_MICROS).try_for_each(|micro| run(false, micro))?;
    sent.into_iter().try_for_each(|pending| pending.wait().map(drop))
}

/// A stage sends before it receives, and its neighbours receive before they send.
#[test]
fn pipeline_stages_do_not_deadlock() {
    for end in run(3, PATIENT, one_forward_one_backward).into_iter().flatten() {
        end.unwrap();
    }
}
