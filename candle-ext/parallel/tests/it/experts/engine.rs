//! A model of a known family whose MLP matrices are experts, trained by the engine.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_comm::{Options, threads};
use candlewick_model::{Config, Dim, Model, ParamGroupKind};
use candlewick_ops::{CuSeqlens, GradPolicy, GradScaler};
use candlewick_parallel::{
    ActivationCheckpointing, Engine, LossScale, MasterRounding, Micro, MicroColumns, ParallelGroups, ParamDtypes,
    ParamStore, PipelineLayout, SequenceParallel, StoreMode, StoreOptions, ZeroStage,
};
use serde_json::json;

use super::mixture::{D, LR, N_TOKENS, RoutedToken, V, initial, optimizer, tokens};
use super::{MAX_NORM, STAGES, TOLERANCE, degrees};

/// Returns the micro-batch of one data parallel rank, and the target count of all ranks.
fn micro(step: usize, rank: usize, n_ranks: usize) -> Micro {
    let tokens: Vec<RoutedToken> = tokens(step).into_iter().skip(rank).step_by(n_ranks).collect();
    Micro {
        ids: Tensor::from_iter(tokens.iter().map(|token| token.id), &Device::Cpu).unwrap(),
        targets: Tensor::from_iter(tokens.iter().map(|token| token.target), &Device::Cpu).unwrap(),
        // Sequences of one token each: any rank may have any of them.
        positions: vec![0; tokens.len()],
        seqs: CuSeqlens::packed((0..=tokens.len()).collect()).unwrap(),
        padding: Vec::new(),
        columns: MicroColumns::default(),
    }
}

/// Trains an engine whose MLP matrices are experts; returns the gradient norms of the steps and the final weights.
fn train_engine(mesh: Degrees, zero_stage: Option<ZeroStage>) -> (Vec<f64>, Vec<Vec<f32>>) {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": V, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "initializer_range": 0.3,
    });
    let mut ranks = threads::run(mesh.n_ranks(), Options::default(), |world| -> Result<_> {
        let model = Model::new(Config::from_json(config.clone()).unwrap(), None).unwrap();
        let mut units = model.units().to_vec();
        for spec in units.iter_mut().flat_map(|unit| &mut unit.params).filter(|spec| spec.name.contains(".mlp.")) {
            spec.group = ParamGroupKind::Expert;
            spec.dims.iter_mut().filter(|dim| **dim == Dim::Ffn).for_each(|dim| *dim = Dim::Experts);
        }
        let mesh = Mesh::new(mesh, world.size()).unwrap();
        let groups = ParallelGroups::new(&mesh, &*world.group())?.with_experts(&mesh, &*world.group())?;
        let sharding =
            groups.sharding_groups(zero_stage, PipelineLayout::single_stage(model.n_blocks()), SequenceParallel::Off);
        let dtypes = ParamDtypes::computing_in(DType::F32);
        let options = StoreOptions { optimizer: optimizer(), ..StoreOptions::new(dtypes, StoreMode::Train) };
        let store = ParamStore::of_units(&units, options, &Device::Cpu, sharding)?;
        store.fill(initial)?;
        let checkpointing = vec![ActivationCheckpointing::None, ActivationCheckpointing::Full];
        let engine = Engine::new(model, store, checkpointing, Arc::clone(&groups.loss), Device::Cpu);
        let policy = GradPolicy { max_norm: Some(MAX_NORM), ..GradPolicy::NO_CLIP_NO_SCALE };
        let scaler = GradScaler::new(policy, 0, &Device::Cpu)?;
        let mut norms = Vec::new();
        for step in 0..3 {
            engine.store().zero_grads()?;
            let micros = [micro(step, world.rank(), world.size()), micro(step + 1, world.rank(), world.size())];
            engine.forward_backward(&micros, &LossScale::mean_over(2.0 * N_TOKENS as f64), |_| 0)?;
            let squares = engine.store().grad_squares()?;
            norms.push(squares.sum_all()?.to_scalar::<f64>()?.sqrt());
            scaler.update(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?)?;
            engine.store().step(LR, &scaler, MasterRounding::Nearest)?;
        }
        let masters = engine.store().masters().map(|master| master?.1.flatten_all()?.to_vec1());
        Ok((norms, masters.collect::<Result<Vec<_>>>()?))
    });
    ranks.as_mut().unwrap().swap_remove(0)
}

#[test]
fn an_engine_trains_groups_with_other_numbers_of_shards_as_one_rank_does() {
    let (norms, weights) = train_engine(degrees(1, 1, 1), None);
    for zero_stage in STAGES {
        for mesh in [degrees(2, 2, 1), degrees(1, 4, 1)] {
            let (ours, other) = train_engine(mesh, zero_stage);
            let is_close = |a: f64, b: f64| (a - b).abs() <= TOLERANCE * b.abs();
            assert!(
                norms.iter().zip(&ours).all(|(a, b)| is_close(*a, *b)),
                "{mesh} {zero_stage:?}: {ours:?} {norms:?}"
            );
            for (a, b) in weights.iter().zip(&other) {
                let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                let off = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
                assert!(off <= TOLERANCE * norm(&mut a.iter().map(|x| f64::from(*x))), "{mesh} {zero_stage:?}");
            }
        }
    }
}
