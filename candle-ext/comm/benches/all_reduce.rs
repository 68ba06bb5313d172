//! Bandwidth of all_reduce between processes of one node, compared with memory copies.
//!
//!     cargo bench -p candlewick-comm -- [ranks]
//!
//! Prints one line per size: the median time of an all_reduce of f32, its bandwidth, and the bandwidth of a copy of as many
//! bytes by one process.
#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::store::{Client, Server};
use candlewick_comm::{Collective, Options, Reduce, local};

const SIZES: [usize; 5] = [4, 1 << 16, 1 << 20, 1 << 24, 1 << 27];
const N_RUNS: usize = 15;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let numbers: Vec<usize> = words.iter().map(|word| word.parse().unwrap()).collect();
    match numbers[..] {
        [rank, size, port] => run(rank, size, port as u16).unwrap(),
        _ => start(numbers.first().copied().unwrap_or(2)),
    }
}

/// Starts one process per rank.
fn start(size: usize) {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let rank = |rank: usize| {
        let numbers = [rank, size, server.port() as usize].map(|number| number.to_string());
        Command::new(std::env::current_exe().unwrap()).args(numbers).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..size).map(rank).collect();
    ranks.into_iter().for_each(|mut rank| assert!(rank.wait().unwrap().success()));
}

fn run(rank: usize, size: usize, port: u16) -> Result<()> {
    let store = Client::connect("127.0.0.1", port, Duration::from_secs(60)).unwrap();
    let world = local::join(&store, rank, size, Options::default())?;
    let group = world.group();
    let mut lines = vec![format!("{:>12} {:>12} {:>12} {:>12}  ({size} ranks)", "bytes", "ms", "GB/s", "copy GB/s")];
    for n_bytes in SIZES {
        let x = Tensor::zeros(n_bytes / 4, DType::F32, &Device::Cpu)?;
        let reduced = median(&*group, || drop(group.all_reduce(&x, Reduce::Sum).unwrap()));
        let (from, mut to) = (vec![1u8; n_bytes], vec![0u8; n_bytes]);
        // Rank 0 copies while the others wait.
        let copied = if rank == 0 {
            median(&*group, || black_box(&mut to).copy_from_slice(black_box(&from)))
        } else {
            wait(&*group)
        };
        let speed = |time: Duration| n_bytes as f64 / time.as_secs_f64() / 1e9;
        let ms = reduced.as_secs_f64() * 1e3;
        lines.push(format!("{n_bytes:>12} {ms:>12.3} {:>12.2} {:>12.2}", speed(reduced), speed(copied)));
    }
    if rank == 0 {
        println!("{}", lines.join("\n"));
    }
    Ok(())
}

/// Returns the median time of `work`, which all ranks start together.
fn median(group: &dyn Collective, mut work: impl FnMut()) -> Duration {
    work();
    let mut times: Vec<Duration> = (0..N_RUNS)
        .map(|_| {
            group.barrier().unwrap();
            let began = Instant::now();
            work();
            began.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[N_RUNS / 2]
}

fn wait(group: &dyn Collective) -> Duration {
    (0..N_RUNS).for_each(|_| group.barrier().unwrap());
    Duration::MAX
}
