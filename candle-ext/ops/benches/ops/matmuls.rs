//! Bursts and sustained runs of matmuls, which another program requests: `ops-bench --matmuls`.
//!
//! A line of standard input holds t, k, n and `burst` or `sustained`. The answer is a line of JSON: the speed, or the error.

use std::io::{BufRead, Write};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use serde_json::{Value, json};

use crate::linear::linears;
use crate::measure::BenchRun;

/// Durations of the two kinds of runs.
#[derive(Clone, Copy)]
pub(crate) struct MatmulTimes {
    /// Idle time before a burst.
    idle: Duration,
    /// Duration of a burst, at least: ten runs of a matmul of 8192 in each dim take 16 ms.
    burst: Duration,
    sustained: Duration,
}

impl MatmulTimes {
    pub(crate) const FULL: Self =
        Self { idle: Duration::from_secs(1), burst: Duration::from_millis(10), sustained: Duration::from_secs(2) };
    pub(crate) const QUICK: Self =
        Self { idle: Duration::ZERO, burst: Duration::from_millis(1), sustained: Duration::from_millis(4) };

    /// Answers every line of the input.
    pub(crate) fn answer(self, device: &Device, input: impl BufRead, mut output: impl Write) -> Result<()> {
        for line in input.lines() {
            let answer = match self.measure(device, &line?) {
                Ok(answer) => answer,
                Err(error) => json!({ "error": format!("{error:#}") }),
            };
            writeln!(output, "{answer}")?;
            output.flush()?;
        }
        Ok(())
    }

    fn measure(self, device: &Device, line: &str) -> Result<Value> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let &[t, k, n, kind] = &words[..] else { bail!("expected t, k, n and burst or sustained, found `{line}`") };
        let size = |text: &str| text.parse::<usize>().with_context(|| format!("failed to read the size `{text}`"));
        let [t, k, n] = [size(t)?, size(k)?, size(n)?];
        let run = (linears(DType::BF16, t, k, n).swap_remove(0).make)(device)?.run;
        // The first run selects an algorithm.
        seconds(device, &run, 2)?;
        let a_run = seconds(device, &run, 3)?;
        let (n_runs, a_run) = match kind {
            "burst" => {
                sleep(self.idle);
                let n_runs = n_runs(self.burst, a_run).max(10);
                (n_runs, seconds(device, &run, n_runs)?)
            }
            "sustained" => self.sustain(device, &run, a_run)?,
            _ => bail!("expected burst or sustained, found `{kind}`"),
        };
        let flops = 2.0 * (t * k * n) as f64;
        Ok(json!({ "tflop_s": flops / a_run / 1e12, "ms": a_run * 1e3, "runs": n_runs }))
    }

    /// Returns the runs of the second half, and the seconds of one. The clocks fall in the first half.
    fn sustain(self, device: &Device, run: &BenchRun, a_run: f64) -> Result<(usize, f64)> {
        let (began, batch) = (Instant::now(), n_runs(self.sustained / 20, a_run));
        let (mut n_runs, mut total) = (0, 0.0);
        while n_runs == 0 || began.elapsed() < self.sustained {
            let of_batch = seconds(device, run, batch)? * batch as f64;
            if began.elapsed() >= self.sustained / 2 {
                n_runs += batch;
                total += of_batch;
            }
        }
        Ok((n_runs, total / n_runs as f64))
    }
}

/// Returns the number of runs that fill a time.
fn n_runs(time: Duration, a_run: f64) -> usize {
    (time.as_secs_f64() / a_run.max(1e-6)).ceil().clamp(1.0, 10_000.0) as usize
}

/// Returns the seconds of one of n runs.
fn seconds(device: &Device, run: &BenchRun, n: usize) -> Result<f64> {
    device.synchronize()?;
    let began = Instant::now();
    // A result lives until the next run.
    let mut kept = None;
    for _ in 0..n {
        kept = Some(run()?.result);
    }
    device.synchronize()?;
    drop(kept);
    Ok(began.elapsed().as_secs_f64() / n as f64)
}
