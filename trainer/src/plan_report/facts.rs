//! Derived numbers of a plan, for the user: parameters, global batch and steps.

use candlewick_comm::mesh::Degrees;
use candlewick_text::quantity::{counted, grouped};

use crate::data::{DataPlan, EpochSize, Horizon, Packing, TrainSteps};
use crate::estimate::{DeviceKind, Setup, active_parameter_count, parameter_counts};
use crate::plan::{EVAL_LOSS, Plan};
use crate::schedule::FEW_STEPS;
use crate::step_fraction::RunLength;

impl Plan {
    /// Returns the facts that are known before the data are read: a name and a text each.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let (steps, per_epoch) = match self.data.horizon {
            Horizon::Steps(steps) => (grouped(steps), ""),
            Horizon::Tokens(tokens) => (counted(tokens, "token"), UNKNOWN),
            Horizon::Epochs(1.0) => ("1 epoch".to_owned(), UNKNOWN),
            Horizon::Epochs(epochs) => (format!("{epochs} epochs"), UNKNOWN),
        };
        let parameters = self.parameters().map(|parameters| ("parameters", parameters));
        parameters.into_iter().chain([("global batch", self.global_batch()), ("steps", steps + per_epoch)]).collect()
    }

    /// Returns the numbers of all, of active (with experts) and of trained parameters; `None` before the model's config is
    /// known.
    pub fn parameters(&self) -> Option<String> {
        let (frozen, trained) = self.parameter_counts()?;
        let total = frozen + trained;
        let share = 100.0 * trained as f64 / total as f64;
        let trained =
            if frozen == 0 { "all".to_owned() } else { format!("{} ({share:.2}%)", grouped(trained as usize)) };
        let active = self.active_parameters().map(|active| format!(", active: {}", grouped(active as usize)));
        Some(format!("{}{}, trained: {trained}", grouped(total as usize), active.unwrap_or_default()))
    }

    /// Returns the numbers of frozen and of trained parameters; `None` before the model's config is known.
    pub(crate) fn parameter_counts(&self) -> Option<(u64, u64)> {
        Some(parameter_counts(&Setup::of(self, DeviceKind::Cpu).ok()?))
    }

    /// Returns the number of parameters that a token uses; `None` for a dense model, or before the model's config is known.
    pub(crate) fn active_parameters(&self) -> Option<u64> {
        active_parameter_count(&Setup::of(self, DeviceKind::Cpu).ok()?)
    }

    /// Returns the degrees of the device mesh by name, in the order of its axes.
    pub(crate) fn mesh(&self) -> [(&'static str, usize); 8] {
        let Degrees { pp, dp_replicate, dp_shard, cp, sp, tp, ep, etp } = self.ranks.degrees();
        [
            ("pp", pp),
            ("dp_replicate", dp_replicate),
            ("dp_shard", dp_shard),
            ("cp", cp),
            ("sp", sp),
            ("tp", tp),
            ("ep", ep),
            ("etp", etp),
        ]
    }

    /// Describes the rows and tokens of a step.
    pub(crate) fn global_batch(&self) -> String {
        let data = &self.data;
        let factors = [
            (data.micro_batch_size, "micro_batch_size"),
            (data.gradient_accumulation_steps, "gradient_accumulation_steps"),
            (data.data_ranks, "data ranks"),
        ];
        let factors: Vec<String> = factors.iter().map(|(n, name)| format!("{name} {}", grouped(*n))).collect();
        let rows = data.rows_per_step();
        let tokens = match data.max_length {
            0 => String::new(),
            length => format!(", at most {}", counted(rows * length, "token")),
        };
        format!("{} a step{tokens} ({})", counted(rows, "row"), factors.join(" x "))
    }

    /// Describes the steps of a run whose data are counted. Further lines warn about a run that can hardly learn.
    pub fn steps(&self, stream: &TrainSteps) -> Vec<String> {
        let total = stream.total_steps();
        let Some(size) = stream.epoch_size() else {
            let (total, rows) = (counted(total, "step"), grouped(stream.n_streamed_rows().unwrap_or_default()));
            return vec![format!("{total}; {rows} rows are read and tokenized while training")];
        };
        let EpochSize { rows, steps: in_epoch, .. } = size;
        let (about, of_epoch) = match self.data.epochs_vary() {
            true => ("about ", format!("in epoch {}", stream.cursor().epoch)),
            false => ("", "an epoch".to_owned()),
        };
        let epochs = match self.data.horizon {
            Horizon::Epochs(epochs) => format!("{epochs:.2} epochs"),
            Horizon::Steps(_) | Horizon::Tokens(_) => format!("{about}{:.2} epochs", total as f64 / in_epoch as f64),
        };
        let mut lines = vec![format!(
            "{}, {epochs}: {} {of_epoch}, {} a step, {} {of_epoch}",
            counted(total, "step"),
            counted(rows, "row"),
            counted(self.data.rows_per_step().min(rows), "row"),
            counted(in_epoch, "step"),
        )];
        if self.data.rows_per_step() > rows {
            let wanted = grouped(self.data.rows_per_step());
            lines.push(format!("a step has {} instead of {wanted}: the data have no more", counted(rows, "row")));
        }
        let warnings = [
            few_steps(&self.data, total, size),
            idle_ranks(&self.data, rows),
            self.idle_early_stopping(total, in_epoch),
        ];
        lines.extend(warnings.into_iter().flatten().map(|warning| format!("warning: {warning}")));
        lines
    }

    /// Returns true if an interval is a fraction of the run or of an epoch.
    pub fn has_fractions(&self) -> bool {
        let evaluations = self.eval.iter().chain(self.tasks.iter().map(|tasks| &tasks.when));
        evaluations
            .map(|when| when.fraction)
            .chain(self.checkpoints.iter().map(|plan| plan.save_fraction))
            .any(|it| it.is_some())
    }

    /// Returns the plan with steps in place of fractions.
    #[must_use]
    pub fn with_counted_steps(&self, run: RunLength) -> Self {
        let mut plan = self.clone();
        let evaluations = plan.eval.iter_mut().chain(plan.tasks.iter_mut().map(|tasks| &mut tasks.when));
        evaluations.for_each(|when| when.count_steps(run));
        plan.checkpoints.iter_mut().for_each(|checkpoint| checkpoint.count_steps(run));
        plan
    }

    /// Returns a warning if the run ends before early stopping could end it.
    fn idle_early_stopping(&self, total_steps: usize, epoch_steps: usize) -> Option<String> {
        let run = RunLength { total_steps, epoch_steps };
        let (plan, patience) = (self.with_counted_steps(run), self.early_stopping.as_ref()?.patience);
        let is_loss = self.early_stopping.as_ref()?.watched.metric.as_deref() == Some(EVAL_LOSS);
        let when = if is_loss { plan.eval? } else { plan.tasks?.when };
        let n = when.n_evaluations(run);
        // The first evaluation always improves, and the last one is at the end of the run.
        (n <= patience + 1).then(|| {
            format!(
                "early_stopping cannot end this run: its patience is {}, and the run has {n}; set evals_per_epoch or \
                 eval_interval, or lower early_stopping.patience",
                counted(patience, "evaluation")
            )
        })
    }
}

/// Returns a warning if a run of whole epochs has few steps, with the cause and the remedies.
fn few_steps(data: &DataPlan, total: usize, EpochSize { rows, samples, .. }: EpochSize) -> Option<String> {
    let Horizon::Epochs(epochs) = data.horizon else { return None };
    if data.overfit_first_batch || (total >= FEW_STEPS && total as f64 > epochs) {
        return None;
    }
    let is_packed = data.packing != Packing::Off && samples > rows;
    let packed =
        is_packed.then(|| format!("packing puts {} into {}", counted(samples, "sample"), counted(rows, "row")));
    let per_step = data.rows_per_step();
    let of_step = (per_step > 1).then(|| format!("a step has {}", counted(per_step, "row")));
    let of_data = (!is_packed && per_step == 1).then(|| format!("the data have {}", counted(rows, "row")));
    let causes: Vec<String> = [packed, of_step, of_data].into_iter().flatten().collect();
    let unpacked = (samples.div_ceil(per_step) as f64 * epochs).ceil() as usize;
    let remedies = [
        (is_packed && data.packing == Packing::Exact, "lower data.max_length".to_owned()),
        (
            is_packed && data.packing != Packing::Exact,
            format!("set data.pack_samples: false ({} steps)", grouped(unpacked)),
        ),
        (data.gradient_accumulation_steps > 1, "lower gradient_accumulation_steps".to_owned()),
        (data.micro_batch_size > 1, "lower micro_batch_size".to_owned()),
        (data.data_ranks > 1, "start fewer ranks".to_owned()),
        (true, "raise epochs".to_owned()),
    ];
    let remedies: Vec<String> = remedies.into_iter().filter(|(helps, _)| *helps).map(|(_, remedy)| remedy).collect();
    let (steps, causes, remedies) = (counted(total, "step"), causes.join(", and "), remedies.join(", or "));
    Some(format!("{steps} can teach little: {causes}. For more steps, {remedies}"))
}

/// Returns a warning if the rows of a step are too few for all ranks.
fn idle_ranks(data: &DataPlan, rows: usize) -> Option<String> {
    let (n_ranks, n_micro_batches) = (data.data_ranks, rows.div_ceil(data.micro_batch_size));
    let lower = if data.micro_batch_size > 1 { ", or lower micro_batch_size" } else { "" };
    (n_micro_batches < n_ranks).then(|| {
        format!(
            "{} have no row in any step: the data have {}. Start at most {}{lower}",
            counted(n_ranks - n_micro_batches, "data rank"),
            counted(rows, "row"),
            counted(n_micro_batches, "data rank"),
        )
    })
}

const UNKNOWN: &str = "; `trainer preprocess RECIPE` reads the data and counts the steps";
