//! Derived numbers of a plan, for the user: parameters, global batch and steps.

use candlewick_comm::mesh::Degrees;
use candlewick_text::quantity::{counted, grouped};

use super::Plan;
use crate::data::{EpochSize, Horizon, TrainSteps};
use crate::estimate::{DeviceKind, Setup, active_parameter_count, parameter_counts};

impl Plan {
    /// Returns the facts that are known before the data are read: a name and a text each.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let (steps, per_epoch) = match self.data.horizon {
            Horizon::Steps(steps) => (grouped(steps), ""),
            Horizon::Tokens(tokens) => (counted(tokens, "token"), UNKNOWN),
            Horizon::Epochs(epochs) => (counted(epochs, "epoch"), UNKNOWN),
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

    /// Describes the steps of a run whose data are counted. A second line reports a step with fewer rows than planned.
    pub fn steps(&self, stream: &TrainSteps) -> Vec<String> {
        let total = stream.total_steps();
        let Some(EpochSize { rows, steps: in_epoch }) = stream.epoch_size() else {
            let (total, rows) = (counted(total, "step"), grouped(stream.n_streamed_rows().unwrap_or_default()));
            return vec![format!("{total}; {rows} rows are read and tokenized while training")];
        };
        let epochs = total as f64 / in_epoch as f64;
        let mut lines = vec![format!(
            "{}, {epochs:.2} epochs: {} an epoch, {} a step, {} an epoch",
            counted(total, "step"),
            counted(rows, "row"),
            counted(self.data.rows_per_step().min(rows), "row"),
            counted(in_epoch, "step"),
        )];
        if self.data.rows_per_step() > rows {
            let wanted = grouped(self.data.rows_per_step());
            lines.push(format!("a step has {} instead of {wanted}: the data have no more", counted(rows, "row")));
        }
        lines
    }
}

const UNKNOWN: &str = "; `trainer preprocess RECIPE` reads the data and counts the steps";
