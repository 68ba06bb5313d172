//! Terminal output: one line per step in ArcticTraining's format, and a progress bar below the lines.
//!
//! Everything goes to stderr; stdout is for results.

use std::time::Instant;

use candlewick_runtime::progress::{ProgressUnit, WorkProgress, show_bar};
use candlewick_runtime::terminal::{FIELD_SEPARATOR, print_log};
use candlewick_runtime::terminal_width::stderr_width;
use candlewick_text::quantity::decimal_bytes;
use indicatif::{ProgressBar, ProgressStyle};

use super::format::{clock, duration, exponent, quantity, tflops};
use super::gpu::GpuMemory;
use super::memory::Memory;
use super::plan::Console;
use super::record::{EvalRecord, StepRecord, TasksRecord};

/// Prints lines and a progress bar. Clones share the bar.
#[derive(Clone, Debug)]
pub struct Terminal {
    bar: ProgressBar,
    console: Console,
    total_steps: usize,
    /// The start of the first step, and the number of steps before it.
    started: (Instant, usize),
}

impl Terminal {
    /// Shows a progress bar at `done` of `total_steps`, if stderr is a terminal.
    pub fn new(console: Console, done: usize, total_steps: usize) -> Self {
        let has_bar = console == Console::Full && stderr_width().is_some();
        let bar = if has_bar { show_bar(ProgressBar::new(total_steps as u64)) } else { ProgressBar::hidden() };
        let bar = bar.with_style(style()).with_position(done as u64);
        Self { bar, console, total_steps, started: (Instant::now(), done) }
    }

    /// Prints a line above the bar.
    pub fn line(&self, text: &str) {
        if self.console != Console::Quiet {
            print_log(text);
        }
    }

    /// Prints the line of a step. In a terminal it has one row, and the bar has the remaining time.
    pub fn step_line(&self, record: &StepRecord) {
        let fields = match self.console {
            Console::Lines => detailed_step_fields(record, self.total_steps),
            Console::Full | Console::Quiet => step_fields(record, self.total_steps),
        };
        let eta = format!("ETA: {}", clock(self.eta_seconds(record.iter)));
        match self.row_width() {
            Some(width) => self.line(&first_fields(&fields, width)),
            None => self.line(&[fields, vec![eta]].concat().join(FIELD_SEPARATOR)),
        }
    }

    /// Prints the line of an evaluation.
    pub fn eval_line(&self, record: &EvalRecord) {
        let fields = eval_fields(record, self.total_steps);
        self.line(&self.row_width().map_or_else(|| fields.join(FIELD_SEPARATOR), |width| first_fields(&fields, width)));
    }

    /// Returns the columns of a line that must not break: those of a terminal with a bar.
    fn row_width(&self) -> Option<usize> {
        stderr_width().filter(|_| self.console == Console::Full)
    }

    /// Sets the position and the message of the bar.
    pub fn advance_to(&self, step: usize, loss: f64) {
        let (elapsed, left) = (clock(self.started.0.elapsed().as_secs_f64()), clock(self.eta_seconds(step)));
        self.bar.set_message(format!("loss: {loss:.4} | {elapsed} | ETA: {left}"));
        self.bar.set_position(step as u64);
    }

    /// Estimates the seconds of the steps after `iter` from the mean step time.
    fn eta_seconds(&self, iter: usize) -> f64 {
        let (started, done) = self.started;
        let pace = started.elapsed().as_secs_f64() / iter.saturating_sub(done).max(1) as f64;
        pace * self.total_steps.saturating_sub(iter) as f64
    }

    /// Shows the progress of a long operation, unless quiet.
    pub fn progress(&self, what: &str, unit: &'static str) -> WorkProgress {
        match self.console {
            Console::Quiet => WorkProgress::hidden(),
            Console::Full | Console::Lines => WorkProgress::start(what, ProgressUnit::Count(unit), 0),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Returns the fields of a training step's line, the most important first.
fn step_fields(record: &StepRecord, total_steps: usize) -> Vec<String> {
    vec![
        format!("Train iter: {}", position(record.iter, total_steps)),
        format!("loss: {:.4}", record.loss),
        format!("lr: {}", exponent(record.lr)),
        format!("grad norm: {:.3}", record.grad_norm),
        format!("tok/s: {}", quantity(round(record.tokens_per_second))),
    ]
}

/// Returns all fields of a training step.
fn detailed_step_fields(record: &StepRecord, total_steps: usize) -> Vec<String> {
    let mut fields = step_fields(record, total_steps);
    fields.extend([
        format!("step time: {}", duration(record.step_time)),
        format!("step tflops: {}", tflops(record.step_tflops)),
    ]);
    fields.extend(record.expert_load.as_ref().map(|load| format!("busiest expert: {:.2}x mean", load.max_over_mean)));
    fields.extend(record.mfu.map(|mfu| format!("mfu: {:.1}%", 100.0 * mfu)));
    fields.push(format!("seqlen: {}", quantity(round(record.seqlen))));
    fields.push(format!("epoch: {}", record.epoch));
    fields.extend(record.gpu_memory.map(gpu_field));
    fields.extend(record.memory.map(memory_field));
    fields
}

/// Joins the fields that fit into one row of `width` columns.
fn first_fields(fields: &[String], width: usize) -> String {
    let mut line = fields.first().cloned().unwrap_or_default();
    for field in &fields[1..] {
        if line.chars().count() + FIELD_SEPARATOR.len() + field.chars().count() > width {
            break;
        }
        line += FIELD_SEPARATOR;
        line += field;
    }
    line
}

/// Returns the fields of an evaluation's line, the most important first.
fn eval_fields(record: &EvalRecord, total_steps: usize) -> Vec<String> {
    vec![
        format!("Eval iter: {}", position(record.iter, total_steps)),
        format!("loss/eval: {:.4}", record.loss),
        format!("targets: {}", quantity(record.n_targets as f64)),
        format!("eval time: {}", duration(record.eval_time)),
        format!("epoch: {}", record.epoch),
    ]
}

/// Formats the line of the task scores: the first metrics, without standard errors.
pub fn tasks_line(record: &TasksRecord, total_steps: usize) -> String {
    const MOST: usize = 8;
    let mut fields = vec![format!("Eval iter: {}", position(record.iter, total_steps))];
    let is_value = |name: &str| !name.split(',').next().unwrap_or_default().ends_with("_stderr");
    let values: Vec<_> = record.scores.iter().filter(|(name, _)| is_value(name)).collect();
    let shown = values.iter().take(MOST);
    fields.extend(shown.map(|(name, value)| format!("{}: {value:.4}", name.strip_prefix("eval/").unwrap_or(name))));
    fields.extend((values.len() > MOST).then(|| format!("and {} more", values.len() - MOST)));
    fields.push(format!("eval time: {}", duration(record.tasks_time)));
    fields.push(format!("epoch: {}", record.epoch));
    fields.join(FIELD_SEPARATOR)
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{wide_bar} {pos}/{len} {percent}% | {msg}").expect("the template is well-formed")
}

fn position(iter: usize, total_steps: usize) -> String {
    format!("{iter}/{total_steps} {}%", 100 * iter / total_steps.max(1))
}

/// Rounds values from 100 on to integers.
fn round(value: f64) -> f64 {
    if value < 100.0 { value } else { value.round() }
}

fn gpu_field(memory: GpuMemory) -> String {
    let (used, total) = (decimal_bytes(memory.gpu_used_bytes), decimal_bytes(memory.gpu_total_bytes));
    format!("GPU mem: {used} / {total}")
}

fn memory_field(memory: Memory) -> String {
    let percent = 100 * memory.node_used_bytes / memory.node_total_bytes.max(1);
    format!(
        "CPU mem: proc {}, peak {} / node {} ({percent}%)",
        decimal_bytes(memory.rss_bytes),
        decimal_bytes(memory.peak_rss_bytes),
        decimal_bytes(memory.node_used_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::record::example;

    #[test]
    fn a_steps_line() {
        insta::assert_snapshot!(step_fields(&example(), 10).join(FIELD_SEPARATOR), @"Train iter: 3/10 30% | loss: 1.2346 | lr: 1.000E-05 | grad norm: 0.512 | tok/s: 51.86K");
        insta::assert_snapshot!(detailed_step_fields(&example(), 10).join(FIELD_SEPARATOR), @"Train iter: 3/10 30% | loss: 1.2346 | lr: 1.000E-05 | grad norm: 0.512 | tok/s: 51.86K | step time: 1.234s | step tflops: 0.052 | seqlen: 32.00K | epoch: 0 | CPU mem: proc 2.10 GB, peak 2.40 GB / node 10.10 GB (12%)");
    }

    #[test]
    fn a_steps_line_fits_the_terminal() {
        let record = StepRecord { iter: 1234, ..example() };
        for (width, want) in [
            (60, "Train iter: 1234/9999 12% | loss: 1.2346 | lr: 1.000E-05"),
            (80, "Train iter: 1234/9999 12% | loss: 1.2346 | lr: 1.000E-05 | grad norm: 0.512"),
            (100, "Train iter: 1234/9999 12% | loss: 1.2346 | lr: 1.000E-05 | grad norm: 0.512 | tok/s: 51.86K"),
            (10, "Train iter: 1234/9999 12%"),
        ] {
            assert_eq!(first_fields(&step_fields(&record, 9999), width), want);
        }
    }

    #[test]
    fn a_steps_line_with_a_known_peak_and_no_memory() {
        let record = StepRecord { mfu: Some(0.4123), memory: None, ..example() };
        insta::assert_snapshot!(detailed_step_fields(&record, 10).join(FIELD_SEPARATOR), @"Train iter: 3/10 30% | loss: 1.2346 | lr: 1.000E-05 | grad norm: 0.512 | tok/s: 51.86K | step time: 1.234s | step tflops: 0.052 | mfu: 41.2% | seqlen: 32.00K | epoch: 0");
    }

    #[test]
    fn a_steps_line_on_a_gpu() {
        let gpu_memory = Some(GpuMemory { gpu_used_bytes: 31_400_000_000, gpu_total_bytes: 150_000_000_000 });
        let fields = detailed_step_fields(&StepRecord { gpu_memory, ..example() }, 10);
        assert!(fields.contains(&"GPU mem: 31.40 GB / 150.00 GB".to_owned()), "{fields:?}");
    }

    #[test]
    fn an_evaluations_line() {
        let record = EvalRecord { epoch: 1, iter: 4, loss: 2.5, n_targets: 12_345, eval_time: 75.0 };
        insta::assert_snapshot!(eval_fields(&record, 10).join(FIELD_SEPARATOR), @"Eval iter: 4/10 40% | loss/eval: 2.5000 | targets: 12.35K | eval time: 0:01:15 | epoch: 1");
    }

    #[test]
    fn a_line_of_tasks() {
        let names = ["a/acc", "a/acc_stderr", "b/match,strict", "b/match_stderr,strict"].map(str::to_owned);
        let many = (0..9).map(|i| format!("c{i}/acc"));
        let scores =
            |names: &mut dyn Iterator<Item = String>| names.map(|name| (format!("eval/{name}"), 0.5)).collect();
        let few = TasksRecord { epoch: 1, iter: 4, scores: scores(&mut names.into_iter()), tasks_time: 75.0 };
        insta::assert_snapshot!(tasks_line(&few, 10), @"Eval iter: 4/10 40% | a/acc: 0.5000 | b/match,strict: 0.5000 | eval time: 0:01:15 | epoch: 1");
        let many = TasksRecord { scores: scores(&mut many.into_iter()), ..few };
        assert!(tasks_line(&many, 10).contains(" | c7/acc: 0.5000 | and 1 more | "));
    }
}
