//! A line of metrics.jsonl: ArcticTraining's fields and additional ones.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candlewick_ops::Fp8TensorStats;
use candlewick_parallel::Fp8LayerStats;
use serde::{Deserialize, Serialize};

use super::experts::ExpertLoad;
use super::gpu::GpuMemory;
use super::memory::Memory;
use super::wall_clock::WallClockTimes;
use crate::recipe::SpikeAction;

/// A finished optimizer step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Epochs done before this step's first batch.
    pub epoch: usize,
    /// Optimizer steps done, this one included.
    pub iter: usize,
    /// The learning rate of this step.
    pub lr: f64,
    /// The learning rate of each group of `optimizer.groups`, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lr_groups: BTreeMap<String, f64>,
    /// Mean loss over the step's target tokens, of all micro-batches and ranks.
    pub loss: f64,
    /// Mean of each auxiliary loss by name, without its coefficient.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub auxiliary_losses: BTreeMap<String, f64>,
    /// Metrics of the training objective by name, if it has any.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub objective: BTreeMap<String, f64>,
    /// Load of the experts, for a model with experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_load: Option<ExpertLoad>,
    /// The gradient norm before clipping.
    pub grad_norm: f64,
    /// Gradient elements that are zero, with `log_num_zeros_in_grad`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_zeros: Option<u64>,
    /// The loss scale of the next step, in half precision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Mean tokens of a micro-batch, with padding.
    pub seqlen: f64,
    /// `step_time` per micro-batch.
    pub iter_time: f64,
    /// TFLOPS during `iter_time`, with recomputation.
    pub iter_tflops: f64,
    /// Seconds from the start of the step to its end, with the wait for its data, without evaluation and checkpoints. A GPU
    /// starts a step when the step before is done.
    pub step_time: f64,
    /// TFLOPS during `step_time`, with recomputation.
    pub step_tflops: f64,
    /// Tokens of the step, without padding.
    pub tokens: u64,
    /// Target tokens of the step: the divisor of the loss.
    pub n_targets: u64,
    /// `tokens` over `step_time`.
    pub tokens_per_second: f64,
    /// Model FLOPs utilization, between 0 and 1, if the device's peak is known. A GPU's peak comes from its name, a
    /// CPU's from matmuls in the training dtype at the start of the run, and again after a step that is faster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Memory after the step, if the system reports it.
    #[serde(flatten)]
    pub memory: Option<Memory>,
    /// GPU memory after the step, in a run on a GPU.
    #[serde(flatten)]
    pub gpu_memory: Option<GpuMemory>,
    /// Milliseconds of the step's phases on rank 0, with `wall_clock_breakdown`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall_clock_ms: Option<WallClockTimes>,
    /// Energy of rank 0's GPU since the step before, in joules, if the GPU reports it. It includes evaluations and
    /// checkpoints in between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_energy_joules: Option<f64>,
}

/// An evaluation on the eval data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// Optimizer steps done.
    pub iter: usize,
    /// Epochs done. A step counts those before it.
    #[serde(rename = "epoch/eval", alias = "epoch")]
    pub epoch: usize,
    /// Mean loss over all target tokens.
    #[serde(rename = "loss/eval")]
    pub loss: f64,
    /// The number of target tokens.
    #[serde(rename = "n_targets/eval", alias = "n_targets")]
    pub n_targets: u64,
    /// Seconds of the evaluation.
    pub eval_time: f64,
}

/// Statistics of the tensors that a step has quantized to FP8, over all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fp8Record {
    /// Epochs done before the step's first batch.
    pub epoch: usize,
    /// The step's number, counted from 1.
    pub iter: usize,
    /// The statistics of each linear layer by its module name, and of its `input`, `weight` and `grad_output`.
    pub fp8: BTreeMap<String, BTreeMap<String, Fp8TensorRecord>>,
}

/// Statistics of a quantized tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fp8TensorRecord {
    /// The largest magnitude.
    pub amax: f64,
    /// The share of the elements that are not zero but become zero.
    pub underflow: f64,
    /// The share of the elements beyond the largest number of their scale.
    pub overflow: f64,
    /// The mean square of the rounding errors.
    pub mse: f64,
}

impl Fp8Record {
    /// Returns the record of a step.
    pub fn of(epoch: usize, iter: usize, layers: Vec<Fp8LayerStats>) -> Self {
        let tensor = |(name, stats): (&str, Option<Fp8TensorStats>)| {
            let Fp8TensorStats { amax, underflow, overflow, mse } = stats?;
            Some((name.to_owned(), Fp8TensorRecord { amax, underflow, overflow, mse }))
        };
        let of_layer = |layer: Fp8LayerStats| {
            let tensors = ["input", "weight", "grad_output"].into_iter().zip(layer.tensors);
            (layer.module, tensors.filter_map(tensor).collect())
        };
        let measured = layers.into_iter().filter(|layer| layer.tensors.iter().any(Option::is_some));
        Self { epoch, iter, fp8: measured.map(of_layer).collect() }
    }
}

/// The scores of the tasks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TasksRecord {
    /// Optimizer steps done.
    pub iter: usize,
    /// Epochs done. A step counts those before it.
    #[serde(rename = "epoch/tasks")]
    pub epoch: usize,
    /// The value of each metric and its standard error, as `eval/TASK/METRIC`.
    #[serde(flatten)]
    pub scores: BTreeMap<String, f64>,
    /// Seconds of all tasks.
    pub tasks_time: f64,
}

/// A loss spike that the loss watchdog found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LossSpikeRecord {
    /// Epochs done before the step's first batch.
    pub epoch: usize,
    /// The step's number, counted from 1.
    pub iter: usize,
    /// The spike and the reaction.
    pub loss_spike: LossSpikeEvent,
}

/// A loss spike and the reaction to it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LossSpikeEvent {
    /// The loss of the step.
    pub loss: f64,
    /// Its limit.
    pub max_loss: f64,
    /// The reaction: `skip`, `rewind` or `stop`.
    pub action: SpikeAction,
    /// The step of the checkpoint that was loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rewound_to: Option<usize>,
    /// The file with the batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<PathBuf>,
}

/// Sample generations after an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SamplesRecord {
    /// Epochs done.
    pub epoch: usize,
    /// Optimizer steps done.
    pub iter: usize,
    /// The samples, in the order of the prompts.
    pub samples: Vec<SampleGeneration>,
}

/// The reply to a prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SampleGeneration {
    /// The prompt: the text, or the last message.
    pub prompt: String,
    /// The sampling temperature; 0 is greedy decoding.
    pub temperature: f64,
    /// The reply.
    pub text: String,
}

/// A finished checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    /// Epochs done.
    pub epoch: usize,
    /// Optimizer steps done: the checkpoint's tag.
    pub iter: usize,
    /// The checkpoint folder.
    pub saved: PathBuf,
    /// Seconds until the checkpoint was on disk. `None` if the process was killed before it recorded them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save_time: Option<f64>,
    /// The time in UTC, of a record that was read from a file.
    #[serde(default, skip_serializing)]
    pub time: Option<String>,
}

/// A run that resumes from a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResumeRecord {
    /// Epochs done.
    pub epoch: usize,
    /// Optimizer steps done.
    pub iter: usize,
    /// The checkpoint folder.
    pub resumed_from: PathBuf,
    /// Seconds to verify and load the checkpoint.
    pub resume_time: f64,
    /// The time in UTC, of a record that was read from a file.
    #[serde(default, skip_serializing)]
    pub time: Option<String>,
}

/// Returns a record for the tests of this module.
#[cfg(test)]
pub(super) fn example() -> StepRecord {
    StepRecord {
        epoch: 0,
        iter: 3,
        lr: 1e-5,
        lr_groups: BTreeMap::new(),
        loss: 1.23456,
        auxiliary_losses: BTreeMap::new(),
        objective: BTreeMap::new(),
        expert_load: None,
        grad_norm: 0.5119,
        num_zeros: None,
        loss_scale: None,
        seqlen: 32_000.0,
        iter_time: 0.3,
        iter_tflops: 0.06,
        step_time: 1.2341,
        step_tflops: 0.0519,
        tokens: 64_000,
        n_targets: 1_200,
        tokens_per_second: 51_859.655,
        mfu: None,
        memory: Some(Memory {
            rss_bytes: 2_100_000_000,
            peak_rss_bytes: 2_400_000_000,
            node_used_bytes: 10_100_000_000,
            node_total_bytes: 80_000_000_000,
        }),
        gpu_memory: None,
        wall_clock_ms: None,
        gpu_energy_joules: None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_json_of_a_step_has_these_fields_in_this_order() {
        insta::assert_snapshot!(serde_json::to_string(&example()).unwrap(), @r#"{"epoch":0,"iter":3,"lr":0.00001,"loss":1.23456,"grad_norm":0.5119,"seqlen":32000.0,"iter_time":0.3,"iter_tflops":0.06,"step_time":1.2341,"step_tflops":0.0519,"tokens":64000,"n_targets":1200,"tokens_per_second":51859.655,"rss_bytes":2100000000,"peak_rss_bytes":2400000000,"node_used_bytes":10100000000,"node_total_bytes":80000000000}"#);
    }

    #[test]
    fn the_json_of_an_evaluation_has_these_fields() {
        let record = EvalRecord { epoch: 1, iter: 4, loss: 2.5, n_targets: 12, eval_time: 0.5 };
        insta::assert_snapshot!(serde_json::to_string(&record).unwrap(), @r#"{"iter":4,"epoch/eval":1,"loss/eval":2.5,"n_targets/eval":12,"eval_time":0.5}"#);
    }

    #[test]
    fn the_json_of_tasks_has_a_field_for_each_metric() {
        let scores = [("eval/b/acc", 0.5), ("eval/a/acc", 0.25)].map(|(name, value)| (name.to_owned(), value));
        let record = TasksRecord { epoch: 1, iter: 4, scores: scores.into(), tasks_time: 0.5 };
        insta::assert_snapshot!(serde_json::to_string(&record).unwrap(), @r#"{"iter":4,"epoch/tasks":1,"eval/a/acc":0.25,"eval/b/acc":0.5,"tasks_time":0.5}"#);
    }

    #[test]
    fn the_json_of_checkpoints_and_resumes_has_these_fields() {
        let record =
            CheckpointRecord { epoch: 1, iter: 4, saved: "out/global_step_4".into(), save_time: Some(0.5), time: None };
        insta::assert_snapshot!(serde_json::to_string(&record).unwrap(), @r#"{"epoch":1,"iter":4,"saved":"out/global_step_4","save_time":0.5}"#);
        let record =
            ResumeRecord { epoch: 1, iter: 4, resumed_from: "out/global_step_4".into(), resume_time: 0.5, time: None };
        insta::assert_snapshot!(serde_json::to_string(&record).unwrap(), @r#"{"epoch":1,"iter":4,"resumed_from":"out/global_step_4","resume_time":0.5}"#);
    }

    #[test]
    fn a_step_record_round_trips_with_and_without_memory() {
        for record in [
            example(),
            StepRecord { mfu: Some(0.5), memory: None, ..example() },
            StepRecord { gpu_memory: Some(GpuMemory { gpu_used_bytes: 1, gpu_total_bytes: 2 }), ..example() },
        ] {
            let line = serde_json::to_string(&record).unwrap();
            assert_eq!(serde_json::from_str::<StepRecord>(&line).unwrap(), record);
        }
    }
}
