//! Expert biases: updates, exports and checkpoint shards on every mesh.

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_comm::{Options, threads};
use candlewick_model::{Config, Model, RouterSettings};
use candlewick_ops::{GradPolicy, GradScaler};
use candlewick_parallel::{Engine, EngineSpec, ParallelGroups, ParamDtypes, PipelineLayout, ZeroStage};
use serde_json::json;

use super::{STAGES, degrees};

const RATE: f64 = 0.25;
/// Layers 1 to 3 have experts.
const N_MOE_LAYERS: usize = 3;
/// An initial bias that bf16 would round, and its values after a step with the counts 9, 1, 5, 5.
const BEFORE: [f32; 4] = [1.0 + 1.0 / 1024.0, 2.0, 3.0, 4.0];
const AFTER: [f32; 4] = [0.75 + 1.0 / 1024.0, 2.25, 3.0, 4.0];

fn model() -> Model {
    let config = json!({
        "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 20,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": true,
    });
    Model::new(Config::from_json(config).unwrap(), None).unwrap()
}

/// Calls `f` with the engine of each rank, which computes in bf16.
fn on_ranks<T: Send>(
    degrees: Degrees,
    zero_stage: Option<ZeroStage>,
    f: impl Fn(&Engine) -> Result<T> + Sync,
) -> Vec<T> {
    threads::run(degrees.n_ranks(), Options::default(), |world| {
        let mesh = Mesh::new(degrees, world.size()).unwrap();
        let groups = ParallelGroups::new(&mesh, &*world.group())?.with_experts(&mesh, &*world.group())?;
        let model = model();
        let layout = PipelineLayout::balanced(model.n_blocks(), degrees.pp, 1, 0.0);
        let router = RouterSettings { bias_update_rate: RATE, ..RouterSettings::default() };
        let dtypes = ParamDtypes::computing_in(DType::BF16);
        let spec = EngineSpec { zero_stage, router, ..EngineSpec::training(dtypes, layout) };
        let engine = spec.build(model, &groups, Device::Cpu)?;
        engine.store().fill(|spec| match spec.is_buffer() {
            true => Tensor::new(&BEFORE, &Device::Cpu),
            false => Tensor::zeros(spec.shape.as_slice(), DType::F32, &Device::Cpu),
        })?;
        f(&engine)
    })
    .unwrap()
}

/// Returns the biases of all layers as an export reads them.
fn exported(engine: &Engine) -> Result<Vec<Vec<f32>>> {
    let masters = engine.store().masters().collect::<Result<Vec<_>>>()?;
    masters.into_iter().filter(|(spec, _)| spec.is_buffer()).map(|(_, bias)| bias.to_vec1()).collect()
}

/// Updates the biases after a step whose loss is `loss`.
fn update(engine: &Engine, loss: f32) -> Result<()> {
    let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu)?;
    let squares = Tensor::zeros(1, DType::F64, &Device::Cpu)?;
    scaler.update(&squares, &Tensor::new(&[loss], &Device::Cpu)?)?;
    let counts = Tensor::new(&[9f32, 1.0, 5.0, 5.0], &Device::Cpu)?;
    engine.update_layers(&vec![counts; N_MOE_LAYERS], &scaler)
}

fn meshes() -> impl Iterator<Item = (Degrees, Option<ZeroStage>)> {
    let meshes = [degrees(1, 1, 1), degrees(1, 3, 1), degrees(2, 2, 2), Degrees { pp: 2, ..degrees(1, 2, 2) }];
    STAGES.into_iter().flat_map(move |stage| meshes.map(|mesh| (mesh, stage)))
}

#[test]
fn expert_biases_are_updated_and_exported_in_f32_on_every_mesh() {
    for (mesh, zero_stage) in meshes() {
        let results = on_ranks(mesh, zero_stage, |engine| {
            let before = exported(engine)?;
            update(engine, 1.0)?;
            // A fetched layer reads the new values.
            (0..engine.model().units().len()).for_each(|unit_idx| engine.store().release(unit_idx));
            Ok((before, exported(engine)?))
        });
        for (before, after) in results {
            assert_eq!(before, vec![BEFORE; N_MOE_LAYERS], "{mesh} {zero_stage:?}");
            assert_eq!(after, vec![AFTER; N_MOE_LAYERS], "{mesh} {zero_stage:?}");
        }
    }
}

#[test]
fn a_skipped_step_keeps_the_expert_biases() {
    for biases in on_ranks(degrees(1, 2, 1), Some(ZeroStage::Three), |engine| {
        update(engine, f32::NAN)?;
        exported(engine)
    }) {
        assert_eq!(biases, vec![BEFORE; N_MOE_LAYERS]);
    }
}

#[test]
fn a_checkpoint_has_each_expert_bias_once() {
    for (mesh, zero_stage) in meshes() {
        let mut written: Vec<(String, usize)> = on_ranks(mesh, zero_stage, |engine| {
            let buffers = engine.store().buffers()?;
            let written = buffers.into_iter().filter(|buffer| buffer.writes_checkpoint);
            Ok(written.flat_map(|buffer| buffer.range.map(move |at| (buffer.name.clone(), at))).collect::<Vec<_>>())
        })
        .concat();
        written.sort();
        let name = |layer_idx| format!("model.layers.{layer_idx}.mlp.gate.e_score_correction_bias");
        let all = (1..=N_MOE_LAYERS).flat_map(|layer_idx| (0..4).map(move |at| (name(layer_idx), at)));
        assert_eq!(written, all.collect::<Vec<_>>(), "{mesh} {zero_stage:?}");
    }
}
