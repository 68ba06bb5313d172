//! Dense and expert parameter groups, each reduced over its own ranks: training is independent of the number of ranks.

mod bias;
mod checkpoint;
mod engine;
mod mixture;

use std::ops::Range;

use candle_core::{DType, Device, Result};
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_comm::{Options, threads};
use candlewick_ops::{GradPolicy, GradScaler};
use candlewick_parallel::{
    CpuOffload, ParallelGroups, ParamDtypes, ParamStore, PipelineLayout, SequenceParallel, StoreMode, StoreOptions,
    ZeroStage,
};

use checkpoint::{SavedTensors, TensorShard, join, load, shards};
use mixture::{ExpertRank, ExpertSetup, units};

const N_STEPS: usize = 6;
const TOLERANCE: f64 = 1e-5;
/// Smaller than the gradient norm of every step, so that each is clipped.
const MAX_NORM: f64 = 0.2;

const STAGES: [Option<ZeroStage>; 4] = [None, Some(ZeroStage::One), Some(ZeroStage::Two), Some(ZeroStage::Three)];

/// Data parallel replicas and shards, and expert parallel ranks.
const fn degrees(dp_replicate: usize, dp_shard: usize, ep: usize) -> Degrees {
    Degrees { pp: 1, dp_replicate, dp_shard, cp: 1, sp: 1, tp: 1, ep, etp: 1 }
}

/// Adds expert tensor parallel ranks. These experts have no dimension that they split, so each has a copy.
const fn with_copies(degrees: Degrees, etp: usize) -> Degrees {
    Degrees { etp, ..degrees }
}

fn setup(degrees: Degrees, zero_stage: Option<ZeroStage>) -> ExpertSetup {
    ExpertSetup { degrees, zero_stage, cpu_offload: CpuOffload::default() }
}

/// Losses and gradient norms of some steps, and the state after them.
#[derive(Clone)]
struct Outcome {
    steps: Vec<[f64; 2]>,
    saved: SavedTensors,
}

/// Trains on a mesh, from a checkpoint if there is one.
fn train(setup: ExpertSetup, steps: Range<usize>, from: Option<&SavedTensors>) -> Outcome {
    let ranks = threads::run(setup.degrees.n_ranks(), Options::default(), |world| -> Result<_> {
        let rank = ExpertRank::new(world, setup)?;
        from.map_or(Ok(()), |saved| load(&rank.store, saved))?;
        let policy = GradPolicy { max_norm: Some(MAX_NORM), ..GradPolicy::NO_CLIP_NO_SCALE };
        let scaler = GradScaler::new(policy, steps.start, &Device::Cpu)?;
        let done = steps.clone().map(|step| rank.step(step, &scaler)).collect::<Result<Vec<_>>>()?;
        let shards = shards(&rank.store)?;
        for master in rank.store.masters() {
            let (spec, whole) = master?;
            let whole = whole.flatten_all()?.to_vec1::<f32>()?;
            let name = format!("master/{}", spec.name);
            let mine = shards.iter().filter(|shard| shard.name == name).flat_map(|shard| &shard.values);
            let is_same = mine.into_iter().all(|(at, value)| whole[*at] == *value);
            assert!(is_same, "an export has another {name}");
        }
        Ok((done, shards))
    });
    let (all, shards): (Vec<_>, Vec<_>) = ranks.unwrap().into_iter().unzip();
    assert!(all.iter().all(|steps| *steps == all[0]), "ranks differ: {all:?}");
    let shards: Vec<TensorShard> = shards.into_iter().flatten().collect();
    Outcome { steps: all[0].clone(), saved: join(&shards) }
}

#[track_caller]
fn assert_close(what: &str, ours: &Outcome, one_rank: &Outcome) {
    let from = one_rank.steps.len() - ours.steps.len();
    for (step, (ours, want)) in ours.steps.iter().zip(&one_rank.steps[from..]).enumerate() {
        let is_close = ours.iter().zip(want).all(|(a, b)| (a - b).abs() <= TOLERANCE * b.abs());
        assert!(is_close, "{what}: loss and norm of step {step} are {ours:?}, on one rank {want:?}");
    }
    for (name, want) in &one_rank.saved {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let scale = norm(&mut want.iter().map(|x| f64::from(*x)));
        let off = norm(&mut want.iter().zip(&ours.saved[name]).map(|(a, b)| f64::from(a - b)));
        assert!(scale > 0.0, "{name} is zero");
        assert!(off <= TOLERANCE * scale, "{what}: {name} is off by {:.1e} of its norm", off / scale);
    }
}

fn one_rank() -> Outcome {
    let outcome = train(setup(degrees(1, 1, 1), None), 0..N_STEPS, None);
    assert!(outcome.steps.iter().all(|[_, norm]| *norm > MAX_NORM), "not all steps are clipped: {:?}", outcome.steps);
    outcome
}

#[test]
fn experts_on_pairs_of_four_ranks_train_as_on_one_rank() {
    let want = one_rank();
    for zero_stage in STAGES {
        for mesh in [degrees(1, 4, 2), degrees(2, 2, 2), degrees(4, 1, 2), degrees(1, 4, 4), degrees(1, 4, 1)] {
            let setup = setup(mesh, zero_stage);
            assert_close(&format!("{setup:?}"), &train(setup, 0..N_STEPS, None), &want);
        }
    }
}

/// Copies of an expert on expert tensor parallel ranks see other tokens: their gradients are partial sums.
#[test]
fn copies_of_experts_train_as_on_one_rank() {
    let want = one_rank();
    for zero_stage in STAGES {
        for mesh in
            [with_copies(degrees(1, 4, 2), 2), with_copies(degrees(2, 2, 1), 2), with_copies(degrees(1, 4, 1), 4)]
        {
            let setup = setup(mesh, zero_stage);
            assert_close(&format!("{setup:?}"), &train(setup, 0..N_STEPS, None), &want);
        }
    }
}

#[test]
fn offloaded_experts_train_as_on_one_rank() {
    let want = one_rank();
    for (optimizer, weights, zero_stage) in [(0.5, false, ZeroStage::One), (1.0, true, ZeroStage::Three)] {
        let cpu_offload = CpuOffload { optimizer, weights };
        let setup = ExpertSetup { cpu_offload, ..setup(degrees(2, 2, 2), Some(zero_stage)) };
        assert_close(&format!("{setup:?}"), &train(setup, 0..N_STEPS, None), &want);
    }
}

#[test]
fn a_run_of_four_ranks_resumes_on_two_and_on_one() {
    let want = one_rank();
    for zero_stage in STAGES {
        let four = train(setup(degrees(2, 2, 2), zero_stage), 0..2, None);
        let copies = train(setup(with_copies(degrees(1, 4, 2), 2), zero_stage), 2..3, Some(&four.saved));
        let two = train(setup(degrees(1, 2, 2), zero_stage), 3..4, Some(&copies.saved));
        let one = train(setup(degrees(1, 1, 1), zero_stage), 4..N_STEPS, Some(&two.saved));
        assert_close(&format!("{zero_stage:?}"), &one, &want);
    }
}

#[test]
fn each_group_has_writers_of_its_own() {
    let writers = threads::run(4, Options::default(), |world| -> Result<[bool; 2]> {
        let rank = ExpertRank::new(world, setup(degrees(2, 2, 2), Some(ZeroStage::One)))?;
        let states = rank.store.states()?;
        Ok(["embed", "down"].map(|name| states.iter().any(|state| state.name == name && state.writes_checkpoint)))
    });
    // Two replicas of dense shards, one of the experts' shards.
    assert_eq!(writers.unwrap(), [[true, true], [true, true], [false, true], [false, true]]);
}

#[test]
fn experts_without_expert_groups_are_refused_by_name() {
    let groups = ParallelGroups::new(&Mesh::new(Degrees::default(), 1).unwrap(), &candlewick_comm::Solo).unwrap();
    let sharding = groups.sharding_groups(None, PipelineLayout::single_stage(1), SequenceParallel::Off);
    let options = StoreOptions::new(ParamDtypes::computing_in(DType::F32), StoreMode::Train);
    let refused = ParamStore::of_units(&units(), options, &Device::Cpu, sharding).err().unwrap().to_string();
    assert!(refused.contains("up belongs to an expert"), "{refused}");
}
