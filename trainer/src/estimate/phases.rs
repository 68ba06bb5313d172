//! The phases of a run and the peak memory of each.

use candlewick_ops::DeviceKind;
use candlewick_parallel::StepBytes;
use serde::Serialize;

use super::memory_breakdown::{Category, MemoryBreakdown};
use super::{Setup, costs, parameters, program, tasks};

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Allocation of buffers, and loading of weights.
    Load,
    /// Forward, loss and backward of a micro-batch.
    Step,
    /// The optimizer step.
    Optimizer,
    /// The evaluation loss.
    Evaluation,
    /// Task evaluation.
    Tasks,
    /// Checkpoints.
    Save,
}

impl Phase {
    /// Returns its name in a table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Step => "step",
            Self::Optimizer => "optimizer",
            Self::Evaluation => "evaluation",
            Self::Tasks => "tasks",
            Self::Save => "save",
        }
    }
}

/// The peak memory of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseEstimate {
    /// The phase.
    pub phase: Phase,
    /// Its bytes by category.
    #[serde(rename = "account")]
    pub breakdown: MemoryBreakdown,
}

/// The memory of a run on the rank that needs most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// The pipeline stage of that rank; 0 without a pipeline.
    pub stage: usize,
    /// The phases that the plan has, in their order.
    pub phases: Vec<PhaseEstimate>,
    /// The bytes of offloaded block inputs, in temporary files or in the RAM of a GPU's host.
    #[serde(rename = "parked")]
    pub offloaded: u64,
    /// The bytes of host RAM that a GPU run needs; `None` on the CPU, where everything is RAM.
    pub host: Option<u64>,
}

impl Estimate {
    /// Returns the phase that needs most.
    pub fn peak(&self) -> &PhaseEstimate {
        self.phases.iter().rev().max_by_key(|phase| phase.breakdown.total()).expect("every run has a load phase")
    }

    /// Returns the bytes of that phase.
    pub fn peak_bytes(&self) -> u64 {
        self.peak().breakdown.total()
    }
}

/// Estimates the memory of the rank that needs most.
pub fn estimate(setup: &Setup) -> Estimate {
    let of_stage = |stage| estimate_stage(&Setup { stage, ..setup.clone() });
    let stages = (1..setup.layout.n_stages()).map(of_stage);
    stages.fold(of_stage(0), |most, other| {
        let (host, offloaded) = (most.host.max(other.host), most.offloaded.max(other.offloaded));
        let most = if other.peak_bytes() > most.peak_bytes() { other } else { most };
        Estimate { host, offloaded, ..most }
    })
}

/// Estimates the memory of a rank of the pipeline stage `setup.stage`.
pub fn estimate_stage(setup: &Setup) -> Estimate {
    let program = MemoryBreakdown::default().with(Category::Program, program::bytes_on_device(setup));
    let copied = parameters::copied(setup);
    let copied_on_device = if setup.compute_device == DeviceKind::Cpu { copied } else { 0 };
    let resident = program.clone().plus(&parameters::resident(setup)).with(Category::Copy, copied_on_device);
    let whole_weights = MemoryBreakdown::default().with(Category::Exchange, parameters::whole_weights(setup));
    let step = costs::step(setup);
    let temporary = breakdown(step.training())
        .with(Category::Exchange, parameters::exchange_buffers(setup))
        .with(Category::Fp8Weights, parameters::fp8_copies(setup));
    let lasting_copies = parameters::lasting_fp8_copies(setup);
    let slack = program::slack(setup.compute_device, temporary.total());
    let after_step = resident.clone().with(Category::Fp8Weights, lasting_copies);
    let mut phases = vec![
        (Phase::Load, program.plus(&load(setup))),
        (Phase::Step, resident.plus(&temporary).with(Category::Allocator, slack)),
        (Phase::Optimizer, after_step.clone().with(Category::Exchange, parameters::gathered(setup))),
    ];
    if setup.evaluates {
        phases.push((Phase::Evaluation, after_step.clone().plus(&breakdown(step.evaluation())).plus(&whole_weights)));
    }
    if let Some(eval_load) = setup.eval_load {
        phases
            .push((Phase::Tasks, after_step.clone().plus(&tasks::worst_batch(setup, eval_load)).plus(&whole_weights)));
    }
    if !setup.saves.is_empty() {
        phases.push((Phase::Save, after_step.plus(&save(setup))));
    }
    let offloaded = step.offloaded_bytes();
    let host =
        || program::bytes_on_gpu_host(setup) + transfer(setup) + parameters::bytes_on_host(setup) + offloaded + copied;
    Estimate {
        stage: setup.stage,
        phases: phases.into_iter().map(|(phase, breakdown)| PhaseEstimate { phase, breakdown }).collect(),
        offloaded,
        host: (setup.compute_device == DeviceKind::Gpu).then(host),
    }
}

/// Returns the peak while weights are loaded. On the CPU, zeroed gradients and moments use no memory until they are
/// written. A parameter is read or initialized in f32 and copied into the store (`candlewick_inference::weights`).
fn load(setup: &Setup) -> MemoryBreakdown {
    let resident = parameters::resident(setup);
    match setup.compute_device {
        DeviceKind::Gpu => resident.with(Category::Transfer, transfer(setup)),
        DeviceKind::Cpu => MemoryBreakdown::default()
            .with(Category::Weights, resident.of(Category::Weights))
            .with(Category::Masters, resident.of(Category::Masters))
            .with(Category::Transfer, transfer(setup)),
    }
}

fn transfer(setup: &Setup) -> u64 {
    4 * parameters::largest(setup)
}

/// Returns the categories of the bytes that are live at one moment of a step or an evaluation.
fn breakdown(bytes: StepBytes) -> MemoryBreakdown {
    let StepBytes { activations, layer, logits } = bytes;
    MemoryBreakdown::default()
        .with(Category::Activations, activations)
        .with(Category::Block, layer)
        .with(Category::Logits, logits)
}

/// Returns the peak of a checkpoint, written in chunks of 4 MiB. A chunk exists in its dtype, in f32, as a vector and
/// as bytes (`checkpoint::shard`).
fn save(setup: &Setup) -> MemoryBreakdown {
    const CHUNKS: u64 = 4 * (4 << 20);
    MemoryBreakdown::default()
        .with(Category::Transfer, if setup.compute_device == DeviceKind::Cpu { CHUNKS } else { CHUNKS / 4 })
}
