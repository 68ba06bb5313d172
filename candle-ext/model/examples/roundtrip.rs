//! Loads a model folder, perhaps with a PEFT adapter, and writes what others can check:
//!
//! ```sh
//! cargo run -p candlewick-model --example roundtrip -- MODEL OUT 1,2,3 [ADAPTER]
//! ```
//!
//! `OUT/logits.safetensors` holds the logits of the tokens, `OUT/model` the model written again in shards (an adapter
//! merged into it), `OUT/adapter` the adapter written again. tests/reference/peft_roundtrip.py compares them with
//! transformers and peft.

use std::{collections::HashMap, path::Path};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_model::{
    AdapterFolder, ForwardContext, Model, ParamSpec, SingleDevice, UnitWeights,
    checkpoint::{AuxiliaryFiles, Checkpoint, CheckpointExport, ExpertTensors},
};
use candlewick_ops::{CuSeqlens, Weight};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, out, ids, adapter @ ..] = args.as_slice() else {
        return Err("expected MODEL OUT IDS [ADAPTER]".into());
    };
    let (folder, out) = (Path::new(folder), Path::new(out));
    let ids = ids.split(',').map(str::parse).collect::<std::result::Result<Vec<u32>, _>>()?;
    let adapter = adapter.first().map(|path| AdapterFolder::open(Path::new(path))).transpose()?;

    let (config, checkpoint) = match &adapter {
        Some(adapter) => adapter.open_base(folder)?,
        None => Checkpoint::open_with_config(folder)?,
    };
    let model = Model::new(config, adapter.as_ref().map(|adapter| adapter.config.clone()))?;
    for note in checkpoint.check(model.base_params())? {
        eprintln!("{note}");
    }
    let mut values = read(&checkpoint, model.base_params())?;
    if let Some(adapter) = &adapter {
        model.check_adapter(&adapter.weights)?;
        values.extend(read(&adapter.weights, model.adapter_params())?);
    }

    std::fs::create_dir_all(out)?;
    let logits = HashMap::from([("logits".to_string(), logits(&model, &values, &ids)?)]);
    candle_core::safetensors::save(&logits, out.join("logits.safetensors"))?;
    let export = CheckpointExport {
        folder: &out.join("model"),
        config: model.config(),
        auxiliary_files: AuxiliaryFiles { folders: &[folder], chat_template: None, files: &[] },
        dtype: DType::F32,
        shard_bytes: checkpoint.n_bytes() as u64,
        expert_tensors: ExpertTensors::default(),
    };
    export.save(model.base_params(), |param| model.merged(&param.name, |name| Ok(values[name].clone())))?;
    if adapter.is_some() {
        AdapterFolder::save(&out.join("adapter"), &model, DType::F32, AuxiliaryFiles::default(), |param| {
            Ok(values[&param.name].clone())
        })?;
    }
    Ok(())
}

type Values = HashMap<String, Tensor>;

fn read<'a>(
    checkpoint: &Checkpoint,
    params: impl Iterator<Item = &'a ParamSpec>,
) -> std::result::Result<Values, candlewick_model::ModelError> {
    let value = |param: &ParamSpec| {
        let value = checkpoint.param(param, DType::F32, &Device::Cpu)?;
        Ok((param.name.clone(), value))
    };
    params.map(value).collect()
}

fn logits(model: &Model, values: &Values, ids: &[u32]) -> Result<Tensor> {
    let weights =
        |unit| UnitWeights::new(unit, values.iter().map(|(name, v)| (name.clone(), Weight::frozen(v.clone()))));
    let units = model.units().iter().map(weights).collect::<Result<Vec<_>>>()?;
    let positions: Vec<u32> = (0..ids.len() as u32).collect();
    let (cos, sin) = model.rope(&positions, &model.length_classes(&positions), &Device::Cpu)?;
    let seqs = CuSeqlens::packed(vec![0, ids.len()])?;
    let context = ForwardContext::on_single_device([&cos, &sin], &seqs);
    let mut x = model.embed(&units[0], &Tensor::new(ids, &Device::Cpu)?, &SingleDevice)?;
    for block_idx in 0..model.n_blocks() {
        x = model.block(&units[block_idx + 1], &x, &context)?;
    }
    let head = &units[units.len() - 1];
    model.logits(head, &model.final_norm(head, &x)?)
}
