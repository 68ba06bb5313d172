//! Timing of cases: batches of runs, with one device synchronisation around each batch.

use std::any::Any;
use std::time::{Duration, Instant};

use candle_core::{Device, Result};
use serde::Serialize;

/// Work that runs once.
pub(crate) type BenchRun = Box<dyn Fn() -> Result<BenchResult>>;

/// Result of a run. It lives until the same set's next turn, so that its memory is not reused at once.
pub(crate) struct BenchResult {
    pub(crate) result: Box<dyn Any>,
    /// Time of the run's preparation, which does not count.
    pub(crate) untimed: Duration,
}

/// Effort per measurement.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    pub(crate) n_batches: usize,
    /// Duration of a batch in milliseconds, approximately.
    pub(crate) batch_ms: f64,
    /// Minimum bytes that the sets of a case move together: several times a GPU's L2 cache.
    pub(crate) rotated_bytes: f64,
}

impl Effort {
    pub(crate) const FULL: Self = Self { n_batches: 7, batch_ms: 25.0, rotated_bytes: 256e6 };
    pub(crate) const QUICK: Self = Self { n_batches: 3, batch_ms: 1.0, rotated_bytes: 1e5 };

    /// Returns the number of sets of inputs and outputs to rotate through.
    pub(crate) fn n_sets(&self, bytes: f64) -> usize {
        (self.rotated_bytes / bytes).ceil().clamp(1.0, 64.0) as usize
    }
}

/// Milliseconds per run: in the median, the fastest and the slowest batch.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Timing {
    pub(crate) ms: f64,
    pub(crate) ms_min: f64,
    pub(crate) ms_max: f64,
    /// Milliseconds until the host had submitted the run. If near `ms`, the device waited for the host.
    pub(crate) host_ms: f64,
}

/// Times the runs, one per set.
pub(crate) fn time(device: &Device, runs: &[BenchRun], effort: Effort) -> Result<Timing> {
    let mut bench = Bench { device, runs, kept: runs.iter().map(|_| None).collect() };
    // The first runs load kernels, select algorithms and allocate memory.
    bench.batch(runs.len().max(2))?;
    let (once, _) = bench.batch(runs.len().max(2))?;
    let n = (effort.batch_ms / once.max(1e-6)).ceil().clamp(1.0, 10_000.0) as usize;
    let batches = (0..effort.n_batches).map(|_| bench.batch(n)).collect::<Result<Vec<_>>>()?;
    let mut totals: Vec<f64> = batches.iter().map(|(total, _)| *total).collect();
    let mut hosts: Vec<f64> = batches.iter().map(|(_, host)| *host).collect();
    [&mut totals, &mut hosts].into_iter().for_each(|all| all.sort_by(f64::total_cmp));
    let middle = totals.len() / 2;
    Ok(Timing { ms: totals[middle], ms_min: totals[0], ms_max: totals[totals.len() - 1], host_ms: hosts[middle] })
}

struct Bench<'a> {
    device: &'a Device,
    runs: &'a [BenchRun],
    kept: Vec<Option<Box<dyn Any>>>,
}

impl Bench<'_> {
    /// Returns the milliseconds of one of n runs, and those until the host had submitted it.
    fn batch(&mut self, n: usize) -> Result<(f64, f64)> {
        self.device.synchronize()?;
        let mut untimed = Duration::ZERO;
        let began = Instant::now();
        for i in 0..n {
            let set = i % self.runs.len();
            let run = self.runs[set]()?;
            untimed += run.untimed;
            self.kept[set] = Some(run.result);
        }
        let host = began.elapsed();
        self.device.synchronize()?;
        let per_run = |elapsed: Duration| (elapsed - untimed).as_secs_f64() * 1e3 / n as f64;
        Ok((per_run(began.elapsed()), per_run(host)))
    }
}
