//! The phases of a run, and the moment of each at which it needs most.

use candlewick_ops::rope_cost;
use candlewick_parallel::{Action, Residency, Timetable};
use serde::Serialize;

use super::account::{Account, Class};
use super::block::Block;
use super::{Place, Setup, head, parameters, program, tasks};
use crate::plan::residency;

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Buffers are made and weights set.
    Load,
    /// Forward, loss and backward of a micro-batch.
    Step,
    /// The update.
    Optimizer,
    /// Held-out data.
    Evaluation,
    /// Tasks.
    Tasks,
    /// Checkpoints.
    Save,
}

impl Phase {
    /// Its name in a table.
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

/// The memory of a phase at its worst moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseEstimate {
    /// Which one.
    pub phase: Phase,
    /// Its bytes by class.
    pub account: Account,
}

/// The memory of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// The stage of the pipeline whose ranks need that much; 0 without one.
    pub stage: usize,
    /// The phases that the plan has, in their order.
    pub phases: Vec<PhaseEstimate>,
    /// What lies elsewhere meanwhile: inputs of blocks, in temporary files or in the RAM of a GPU's host.
    pub parked: u64,
    /// What a run on a GPU needs of the machine's RAM; `None` on the CPU, where everything is RAM.
    pub host: Option<u64>,
}

impl Estimate {
    /// The phase that needs most.
    pub fn peak(&self) -> &PhaseEstimate {
        self.phases.iter().rev().max_by_key(|phase| phase.account.total()).expect("every run loads")
    }

    /// The bytes of that phase.
    pub fn peak_bytes(&self) -> u64 {
        self.peak().account.total()
    }
}

/// Estimates the memory of a setup: of the rank that needs most.
pub fn estimate(setup: &Setup) -> Estimate {
    let of_stage = |stage| estimate_stage(&Setup { stage, ..setup.clone() });
    let stages = (1..setup.layout.n_stages()).map(of_stage);
    stages.fold(of_stage(0), |most, other| {
        let (host, parked) = (most.host.max(other.host), most.parked.max(other.parked));
        let most = if other.peak_bytes() > most.peak_bytes() { other } else { most };
        Estimate { host, parked, ..most }
    })
}

/// Estimates the memory of a rank of the stage that is looked at.
pub fn estimate_stage(setup: &Setup) -> Estimate {
    let program = Account::default().with(Class::Program, program::on_device(setup));
    let copied = parameters::copied(setup);
    let copied_here = if setup.place == Place::Cpu { copied } else { 0 };
    let resident = program.clone().plus(&parameters::resident(setup)).with(Class::Copy, copied_here);
    let whole_weights = Account::default().with(Class::Exchange, parameters::whole_weights(setup));
    let passing = step(setup).with(Class::Exchange, parameters::travelling(setup));
    let slack = program::slack(setup.place, passing.total());
    let mut phases = vec![
        (Phase::Load, program.plus(&load(setup))),
        (Phase::Step, resident.clone().plus(&passing).with(Class::Allocator, slack)),
        (Phase::Optimizer, resident.clone().with(Class::Exchange, parameters::gathered(setup))),
    ];
    if setup.evaluates {
        phases.push((Phase::Evaluation, resident.clone().plus(&evaluation(setup)).plus(&whole_weights)));
    }
    if let Some(asking) = setup.asking {
        phases.push((Phase::Tasks, resident.clone().plus(&tasks::asked(setup, asking)).plus(&whole_weights)));
    }
    if !setup.saves.is_empty() {
        phases.push((Phase::Save, resident.plus(&save(setup))));
    }
    let parked = parked(setup);
    let host = || program::on_gpu_host(setup) + transfer(setup) + parameters::bytes_on_host(setup) + parked + copied;
    Estimate {
        stage: setup.stage,
        phases: phases.into_iter().map(|(phase, account)| PhaseEstimate { phase, account }).collect(),
        parked,
        host: (setup.place == Place::Gpu).then(host),
    }
}

/// The store's buffers; on the CPU the zeros of gradients and moments take no memory until they are written. A parameter
/// is read or drawn in f32 and copied into its place (`candlewick_inference::weights`).
fn load(setup: &Setup) -> Account {
    let resident = parameters::resident(setup);
    match setup.place {
        Place::Gpu => resident.with(Class::Transfer, transfer(setup)),
        Place::Cpu => Account::default()
            .with(Class::Weights, resident.of(Class::Weights))
            .with(Class::Masters, resident.of(Class::Masters))
            .with(Class::Transfer, transfer(setup)),
    }
}

fn transfer(setup: &Setup) -> u64 {
    4 * parameters::largest(setup)
}

/// The worst moment of a step (`parallel::Engine::forward_backward`): a pass over a run of blocks, beside what the runs keep
/// that were gone through and not yet back.
fn step(setup: &Setup) -> Account {
    let runs: Vec<_> = (0..setup.layout.n_chunks()).map(|chunk| run(setup, chunk)).collect();
    let table = Timetable::new(setup.schedule, setup.layout.n_stages(), setup.layout.n_chunks(), setup.n_micros);
    let (mut kept, mut moments) = (0, Vec::new());
    for action in table.of_stage(setup.stage) {
        let (Action::Forward(pass) | Action::Backward(pass)) = action;
        let run = &runs[pass.chunk];
        let others = match action {
            Action::Forward(_) => kept,
            Action::Backward(_) => kept - run.kept,
        };
        moments.push(run.worst.clone().with(Class::Activations, others));
        kept = if matches!(action, Action::Forward(_)) { kept + run.kept } else { others };
    }
    moments.into_iter().max_by_key(Account::total).unwrap_or_default()
}

/// What a run of blocks needs, there and back.
struct Run {
    /// Between forward and backward.
    kept: u64,
    /// The worst moment: the loss, or some block's backward.
    worst: Account,
}

fn run(setup: &Setup, chunk: usize) -> Run {
    let run = setup.layout.blocks(setup.stage, chunk);
    let blocks: Vec<Block> = run.clone().map(|block_idx| Block::new(setup, block_idx)).collect();
    let rests = &residencies(setup)[run];
    let input = Block::new(setup, 0).activation();
    // What came in stays to the end: it is the first block's input.
    let mut kept = input + rope(setup);
    let mut moments = Vec::new();
    let mut moment = |kept: u64, at_work: u64| {
        moments.push(Account::default().with(Class::Activations, kept).with(Class::Block, at_work));
    };
    for (i, (block, rest)) in blocks.iter().zip(rests).enumerate() {
        // An input that is the output at the end of a kept tape is there already.
        let is_there = i == 0 || rests[i - 1] == Residency::Keep;
        if *rest == Residency::Offload {
            // While it is computed it is there all the same.
            moment(kept, input + block.forward().max(input + block.backward()));
            kept += if setup.parks_in_memory { input } else { 0 };
            continue;
        }
        kept += if is_there { 0 } else { input };
        // The gradient that comes in has the size of an input.
        moment(kept, input + block.backward());
        match rest {
            Residency::Keep => kept += block.tape(),
            Residency::Selective => {
                kept += block.attention_output();
                moment(kept, block.forward());
            }
            _ => moment(kept, block.forward()),
        }
    }
    if setup.layout.is_last(setup.stage, chunk) {
        let output = if rests.last() == Some(&Residency::Keep) { 0 } else { input };
        let logits = Account::default().with(Class::Activations, kept).with(Class::Block, output);
        moments.push(logits.with(Class::Logits, head::backward(setup)));
    }
    Run { kept, worst: moments.into_iter().max_by_key(Account::total).unwrap_or_default() }
}

/// One forward that records nothing, then the losses (`parallel::Engine::evaluate`).
fn evaluation(setup: &Setup) -> Account {
    let block = Block::new(setup, 0);
    let activations = block.activation() + rope(setup);
    let (block, logits) = (block.forward(), if setup.has_head() { head::forward(setup) } else { 0 });
    let account = Account::default().with(Class::Activations, activations);
    if block > logits { account.with(Class::Block, block) } else { account.with(Class::Logits, logits) }
}

/// Values leave in pieces of 4 MiB: as they are, in f32, as a vector and as bytes (`checkpoint::shard`).
fn save(setup: &Setup) -> Account {
    const PIECES: u64 = 4 * (4 << 20);
    Account::default().with(Class::Transfer, if setup.place == Place::Cpu { PIECES } else { PIECES / 4 })
}

/// Sines and cosines.
pub(super) fn rope(setup: &Setup) -> u64 {
    rope_cost(setup.tokens(), setup.model.config().head_dim() as u64).saved_bytes
}

fn parked(setup: &Setup) -> u64 {
    let is_here = |block_idx: usize| setup.layout.stage_of(block_idx + 1) == setup.stage;
    let residencies = residencies(setup).into_iter().enumerate();
    let n_parked =
        residencies.filter(|(block_idx, rest)| is_here(*block_idx) && *rest == Residency::Offload).count() as u64;
    let table = Timetable::new(setup.schedule, setup.layout.n_stages(), setup.layout.n_chunks(), setup.n_micros);
    // Of several runs all that are live at once, as if each were the largest.
    let n_live = table.most_live(setup.stage).div_ceil(setup.layout.n_chunks()) as u64;
    n_parked * n_live * setup.tokens_outside() * setup.model.config().hidden_size() as u64 * setup.compute.n_bytes()
}

fn residencies(setup: &Setup) -> Vec<Residency> {
    residency(setup.modes.activations, setup.model.n_blocks())
}
