//! An optimizer of whole matrices, with AdamW for the other parameters, equals one rank's on every mesh, and fails with a faulty
//! collective. Its checkpoints load on another mesh.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::Mesh;
use candlewick_comm::{Options, World, sum, threads};
use candlewick_model::{Config, Model};
use candlewick_ops::{DeviceKind, GradPolicy, GradScaler, copy_into};
use candlewick_parallel::{
    CpuOffload, Engine, EngineSpec, LossScale, MasterRounding, ParallelGroups, ParamDtypes, PipelineLayout,
};
use serde_json::json;
use trainer::estimate::{Category, Setup, estimate};
use trainer::recipe::Loaded;

use super::case::{Batching, MODELS, QWEN3_MOE, micros};
use super::orthogonal_momentum::{of_pattern, orthogonal_projections};
use super::rank::{FEW_STEPS, LR, Strategy, compare, compare_tensors, data_rank, engine, run_with, shards, unsharded};
use super::*;
use crate::recipes::resolve;

const BATCHING: Batching = Batching::Accumulated(2);

/// Returns a strategy with the optimizer of whole matrices.
fn orthogonal(strategy: Strategy) -> Strategy {
    Strategy { optimizer: orthogonal_projections, ..strategy }
}

/// Returns a strategy in which it also updates the embedding, whose rows tensor parallel ranks split unevenly.
fn with_embedding(strategy: Strategy) -> Strategy {
    Strategy { optimizer: || of_pattern(r"_proj\.weight$|embed_tokens|lm_head"), ..strategy }
}

/// Compares with one rank, and checks that a fault in each collective is detected.
#[track_caller]
fn check(strategy: Strategy, batching: Batching, known: &[&str]) {
    let alone = Strategy { optimizer: strategy.optimizer, ..Strategy::ONE_RANK };
    let run = |strategy, fault| run_with(strategy, MODELS[1], batching, FEW_STEPS, fault);
    let (ours, one_rank) = (run(strategy, None).unwrap(), run(alone, None).unwrap());
    compare(&ours, &one_rank).unwrap_or_else(|difference| panic!("{strategy:?}: {difference}"));
    let names: Vec<String> = ours.used.iter().map(GroupOp::to_string).collect();
    assert!(known.iter().all(|known| names.iter().any(|name| name == known)), "{strategy:?} uses {names:?}");
    for fault in &ours.used {
        let faulty = run(strategy, Some(fault));
        let is_detected = faulty.is_err() || compare(&faulty.unwrap(), &one_rank).is_err();
        assert!(is_detected, "{strategy:?}: a corrupted {fault} is not detected");
    }
}

#[test]
fn orthogonal_updates_differ_from_those_of_adamw() {
    let run = |strategy| run_with(strategy, MODELS[1], BATCHING, FEW_STEPS, None).unwrap();
    assert!(compare(&run(orthogonal(Strategy::ONE_RANK)), &run(Strategy::ONE_RANK)).is_err());
}

#[test]
fn whole_matrices_of_data_parallel_ranks_and_of_the_first_zero_stages() {
    check(orthogonal(dp(2)), BATCHING, &[DP_ALL_REDUCE]);
    check(orthogonal(zero(2, ZeroStage::One)), BATCHING, &ZERO_OPS);
    check(orthogonal(zero(3, ZeroStage::Two)), BATCHING, &ZERO_OPS);
}

#[test]
fn whole_matrices_of_sharded_weights() {
    check(orthogonal(zero(2, ZeroStage::Three)), BATCHING, &ZERO_OPS);
    check(orthogonal(hybrid(2, 2, ZeroStage::Three)), BATCHING, &ZERO_OPS);
}

/// Without sequence parallelism, only the optimizer gathers over the tensor axis.
#[test]
fn whole_matrices_of_tensor_parallel_slices_are_gathered() {
    let tp = Strategy { degrees: Degrees { tp: 2, ..ONE }, ..Strategy::ONE_RANK };
    check(orthogonal(tp), BATCHING, &[TP_OPS[0]]);
    check(with_embedding(Strategy { degrees: Degrees { tp: 4, ..ONE }, ..tp }), BATCHING, &[TP_OPS[0]]);
    let sharded = Degrees { tp: 2, dp_shard: 2, ..ONE };
    check(orthogonal(Strategy { degrees: sharded, zero_stage: Some(ZeroStage::Three), ..tp }), BATCHING, &[TP_OPS[0]]);
}

#[test]
fn whole_matrices_of_pipeline_stages() {
    let pp = Strategy { degrees: Degrees { pp: 2, ..ONE }, ..Strategy::ONE_RANK };
    check(orthogonal(pp), Batching::Accumulated(4), &[PP_OP]);
}

#[test]
fn whole_matrices_of_an_offloaded_optimizer_take_the_same_steps() {
    let run = |cpu_offload, strategy| {
        run_with(Strategy { cpu_offload, ..orthogonal(strategy) }, MODELS[1], BATCHING, FEW_STEPS, None).unwrap()
    };
    for (optimizer, weights) in [(0.5, false), (1.0, false), (1.0, true)] {
        for strategy in [Strategy::ONE_RANK, zero(2, ZeroStage::Three)] {
            let [apart, together] =
                [CpuOffload { optimizer, weights }, CpuOffload::default()].map(|it| run(it, strategy));
            assert_eq!(apart.weights, together.weights, "{optimizer} {weights}");
        }
    }
}

/// Whole master weights and optimizer states by part and parameter.
type SavedState = BTreeMap<String, Vec<f32>>;

/// Trains steps on the ranks of `strategy` from `from`, and returns the whole state.
fn train(strategy: Strategy, steps: std::ops::Range<usize>, from: Option<&SavedState>) -> SavedState {
    let rank = |world: &World| -> Result<_> {
        let engine = engine(world, strategy, MODELS[1], None)?;
        from.map_or(Ok(()), |saved| load(&engine, saved))?;
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, steps.start, &Device::Cpu)?;
        let (rank, n_ranks) = data_rank(world, strategy);
        for step in steps.clone() {
            let (micros, n_targets) = micros(BATCHING, step, rank, n_ranks);
            let n_targets = sum(engine.group(), n_targets)? / strategy.n_counts();
            engine.store().zero_grads()?;
            engine.forward_backward(&micros, &LossScale::mean_over(n_targets), |_| 5)?;
            scaler.update(&engine.store().grad_squares()?, &Tensor::zeros(1, DType::F32, &Device::Cpu)?)?;
            engine.store().step(LR, &scaler, MasterRounding::Nearest)?;
        }
        let mut parts = shards(&engine, |state| &state.master)?;
        for state in engine.store().states()? {
            let shard = parts.iter().find(|shard| shard.name() == state.name).unwrap().clone();
            for (slot, values) in &state.slots {
                parts.push(shard.with_values(format!("{slot}/{}", state.name), values.to_vec1()?));
            }
        }
        Ok(parts)
    };
    let options = Options { timeout: Duration::from_secs(120), record: false };
    let ranks = threads::run(strategy.degrees.n_ranks(), options, rank).unwrap();
    unsharded(ranks.iter().flatten())
}

/// Copies this rank's part of a whole state to its store.
fn load(engine: &Engine, saved: &SavedState) -> Result<()> {
    let own = shards(engine, |state| &state.master)?;
    for state in engine.store().states()? {
        let shard = own.iter().find(|shard| shard.name() == state.name).unwrap();
        let put = |name: &str, to: &Tensor| {
            let values: Vec<f32> = shard.positions().map(|at| saved[name][at]).collect();
            copy_into(to, &Tensor::new(values, &Device::Cpu)?)
        };
        put(&state.name, &state.master)?;
        state.slots.iter().try_for_each(|(slot, to)| put(&format!("{slot}/{}", state.name), to))?;
    }
    engine.store().refresh()
}

#[test]
fn the_state_of_whole_matrices_continues_on_another_mesh() {
    let tp = Strategy { degrees: Degrees { tp: 2, ..ONE }, ..Strategy::ONE_RANK };
    let meshes = [zero(3, ZeroStage::One), tp, zero(2, ZeroStage::Three)].map(orthogonal);
    let want = train(orthogonal(Strategy::ONE_RANK), 0..4, None);
    let is_momentum = |name: &&String| name.starts_with("momentum/") && name.ends_with("_proj.weight");
    assert!(want.keys().filter(is_momentum).count() > 6, "{:?}", want.keys());
    assert!(want.keys().all(|name| !(name.starts_with("exp_avg/") && name.ends_with("_proj.weight"))));
    for (first, second) in meshes.into_iter().zip(meshes.into_iter().cycle().skip(1)) {
        let saved = train(first, 0..2, None);
        let ours = train(second, 2..4, Some(&saved));
        compare_tensors("state", &ours, &want)
            .unwrap_or_else(|difference| panic!("{first:?} {second:?}: {difference}"));
    }
}

#[test]
fn parameters_that_are_no_matrices_are_refused_by_name() {
    let refused = |case: ModelCase, pattern: &'static str| {
        let model = case.model();
        let params = || model.units().iter().flat_map(|unit| &unit.params);
        let groups = of_pattern(pattern);
        groups.check_kinds(params()).and_then(|()| groups.check_patterns(params())).unwrap_err().to_string()
    };
    let norm = refused(MODELS[0], "layernorm|_proj");
    assert!(
        norm.contains("orthogonal_momentum updates matrices") && norm.contains("layernorm.weight is a vector"),
        "{norm}"
    );
    let experts = refused(QWEN3_MOE, "experts");
    assert!(experts.contains("holds the matrices of all experts"), "{experts}");
    let unused = refused(MODELS[0], "no_such_layer");
    assert!(unused.contains("pattern \"no_such_layer\""), "{unused}");
}

/// Returns the config of a model whose parameters need no padding.
fn aligned_config() -> Config {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    });
    Config::from_json(config).unwrap()
}

/// Returns the bytes by class that an estimate has in the optimizer step, and those of rank 0's store.
fn estimated_and_stored(n_ranks: usize, stage: u8, tp: usize) -> [[u64; 3]; 2] {
    let text = format!(
        "{{type: sft, micro_batch_size: 1, device: cpu, tensor_parallel_size: {tp}, \
         deepspeed: {{zero_optimization: {{stage: {stage}}}}}, \
         model: {{name_or_path: org/model, dtype: f32}}, data: {{sources: [a.jsonl], max_length: 32}}}}"
    );
    let loaded = Loaded::parse(Path::new("r.yaml"), text, &[]).unwrap();
    let plan = resolve(&loaded, aligned_config(), n_ranks);
    let setup = Setup { optimizer: orthogonal_projections(), ..Setup::of(&plan, DeviceKind::Cpu).unwrap() };
    let phase = estimate(&setup).phases.into_iter().find(|phase| phase.phase.name() == "optimizer").unwrap();
    let classes = [Category::Weights, Category::Gradients, Category::OptimizerStates];
    let degrees = Degrees { dp_shard: n_ranks / tp, tp, ..ONE };
    let rank = |world: &World| -> Result<_> {
        let mesh = Mesh::new(degrees, world.size()).unwrap();
        let groups = ParallelGroups::new(&mesh, &*world.group())?;
        let spec = EngineSpec {
            optimizer: orthogonal_projections(),
            zero_stage: plan.ranks.zero_stage(),
            sequence_parallel: plan.ranks.sequence_parallel(),
            ..EngineSpec::training(ParamDtypes::computing_in(DType::F32), PipelineLayout::single_stage(3))
        };
        let engine = spec.build(Model::new(aligned_config(), None).unwrap(), &groups, Device::Cpu)?;
        // Gradients of ZeRO 2 and 3 are allocated in a step.
        Ok(engine.store().device_bytes())
    };
    let options = Options { timeout: Duration::from_secs(120), record: false };
    let bytes = threads::run(n_ranks, options, rank).unwrap().remove(0);
    [classes.map(|class| phase.breakdown.of(class)), [bytes.weights, bytes.gradients, bytes.optimizer_states]]
}

#[test]
fn the_estimate_has_the_padding_of_whole_matrices() {
    for (n_ranks, stage, tp) in [(1, 1, 1), (2, 1, 1), (3, 1, 1), (8, 1, 1), (2, 3, 1), (8, 3, 1), (2, 1, 2), (4, 3, 2)]
    {
        let [[weights, gradients, states], stored] = estimated_and_stored(n_ranks, stage, tp);
        let is_near = |estimate: u64, stored: u64| estimate.abs_diff(stored) <= stored / 50;
        assert!(
            is_near(weights, stored[0]) && is_near(states, stored[2]),
            "{n_ranks} {stage} {tp}: {weights} {states} {stored:?}"
        );
        if stage == 1 {
            assert!(is_near(gradients, stored[1]), "{n_ranks} {stage} {tp}: {gradients} {stored:?}");
        }
    }
    // Seven matrices of a block on eight ranks: each shard has the length of the largest, 256 x 128.
    let states = |n_ranks| estimated_and_stored(n_ranks, 1, 1)[1][2];
    let adamw_of_others = |n_ranks: u64| 8 * (2 * 512 * 128 + 7 * 128) / n_ranks;
    assert_eq!(states(1), adamw_of_others(1) + 4 * 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128));
    assert!(states(8).abs_diff(adamw_of_others(8) + 4 * 3 * 256 * 128) < 8192, "{}", states(8));
}
