//! Metrics of a run: the trackers (metrics.jsonl, TensorBoard, W&B, MLflow), the terminal, run.json.
//!
//! The training loop passes a `StepRecord` for each step to the `Reporter`. Nothing here measures time.

mod console;
mod description;
mod earlier_files;
mod experts;
mod flops;
mod format;
mod gpu;
mod host;
mod jsonl;
mod memory;
mod peak_rate;
mod plan;
mod record;
mod reporter;
mod run_json;
mod tracker;
mod trackers;
mod tracking_plan;
mod wall_clock;

pub use console::{Terminal, tasks_line};
pub use description::RunDescription;
pub use earlier_files::KEPT_BATCHES;
pub(crate) use earlier_files::numbered_files;
pub use experts::{ExpertLoad, LayerLoad};
pub use flops::{AttentionPairs, FlopFactors, LayerShape, ModelShape, Recomputed, flops, gpu_peak, recomputed_flops};
pub use format::{clock, duration, quantity};
pub use gpu::{GpuMemory, GpuMonitor};
pub use host::{HostInfo, Versions};
pub use memory::Memory;
pub use peak_rate::PeakRate;
pub use plan::{Console, LogPlan};
pub use record::{
    CheckpointRecord, EvalRecord, Fp8Record, Fp8TensorRecord, LossSpikeEvent, LossSpikeRecord, ResumeRecord,
    SampleGeneration, SamplesRecord, StepRecord, TasksRecord,
};
pub use reporter::{Reporter, TrackerFailure};
pub use run_json::{RunExit, RunJson, RunReport};
pub use tracker::{RunStart, name_as_evaluation};
pub use tracking_plan::{Credentials, MlflowPlan, Secret, TrackingPlan, WandbMode, WandbPlan};
pub use wall_clock::WallClockTimes;
