//! The weights of a `sharded` checkpoint, read without an engine.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candlewick_model::{ModelError, ParamSpec, ParamValues};
use candlewick_ops::Fp8LinearScales;

use super::error::CheckpointError;
use super::find::{CompleteCheckpoint, open};
use super::fingerprint::FROZEN_WEIGHTS;
use super::load::{load_tensors, read_state, verify_rank_files};
use super::state::{BUFFER, FP8_STATE, MASTER, StateError, TensorMeta, TrainState};

/// The weights of a `sharded` checkpoint: f32 master weights and buffers.
pub struct CheckpointWeights {
    complete: CompleteCheckpoint,
    dtype: DType,
}

impl CheckpointWeights {
    /// Opens a checkpoint folder and verifies the hash of every file. `dtype` is the dtype of the run's exports.
    pub fn open(dir: &Path, dtype: DType) -> Result<Self, CheckpointError> {
        let complete = open(dir)?;
        verify_rank_files(&complete, (0, 1)).map_err(|reason| CheckpointError::damaged(dir, reason))?;
        Ok(Self { complete, dtype })
    }

    /// Checks that the frozen weights in the folder `base`, of which `found` is the hash, are those of the run, if the checkpoint
    /// records them: the base of an adapter, or the carried tensors of a multimodal model.
    pub fn check_frozen(&self, base: &Path, found: String) -> Result<(), CheckpointError> {
        let dir = &self.complete.dir;
        let run = read_state(&self.complete).map_err(|reason| CheckpointError::damaged(dir, reason))?;
        let trained_on =
            run.fingerprint.get(&format!("model.{FROZEN_WEIGHTS}")).and_then(|hash| Some(hash.as_str()?.to_owned()));
        match trained_on {
            Some(trained_on) if trained_on != found => {
                Err(CheckpointError::OtherBase { dir: dir.clone(), base: base.to_owned(), trained_on, found })
            }
            _ => Ok(()),
        }
    }

    /// Returns the FP8 scales that the next training step would use, by module name; `None` unless the run had delayed scaling.
    pub fn fp8_scales(&self) -> anyhow::Result<Option<BTreeMap<String, Vec<Fp8LinearScales>>>> {
        let mut scales = BTreeMap::new();
        for tensor in &self.complete.manifest.tensors {
            let name = tensor.name.strip_prefix(FP8_STATE).and_then(|name| name.strip_prefix('/'));
            let Some(module) = name.and_then(|name| name.strip_suffix(".scale")) else { continue };
            let slots = self.read(TensorMeta { name: tensor.name.clone(), shape: tensor.shape.clone() })?;
            scales.insert(module.to_owned(), Fp8LinearScales::of_slots(&slots));
        }
        Ok((!scales.is_empty()).then_some(scales))
    }

    /// Reads a tensor.
    fn read(&self, meta: TensorMeta) -> anyhow::Result<Vec<f32>> {
        let mut buffer = TensorBuffer { values: vec![0.0; meta.n_values()], meta };
        load_tensors(&self.complete, &mut buffer)?;
        Ok(buffer.values)
    }

    /// Returns the start of the run that wrote the checkpoint, in milliseconds since 1970.
    pub fn run_start(&self) -> u64 {
        self.complete.manifest.run_start
    }
}

impl ParamValues for CheckpointWeights {
    fn value(&self, param: &ParamSpec) -> Result<Tensor, ModelError> {
        let part = if param.is_buffer() { BUFFER } else { MASTER };
        let meta = TensorMeta { name: format!("{part}/{}", param.name), shape: param.shape.clone() };
        let values = self.read(meta).map_err(|error| {
            let folder = self.complete.dir.clone();
            ModelError::Mismatch { folder, problem: candlewick_runtime::exit::report(&error) }
        })?;
        Ok(Tensor::from_vec(values, param.shape.as_slice(), &Device::Cpu)?)
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }
}

/// A tensor that is loaded from a checkpoint.
struct TensorBuffer {
    meta: TensorMeta,
    values: Vec<f32>,
}

impl TrainState for TensorBuffer {
    fn tensors(&self) -> Vec<TensorMeta> {
        vec![self.meta.clone()]
    }

    fn read(&self, _name: &str, start: usize, n_values: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError> {
        take(&self.values[start..start + n_values]);
        Ok(())
    }

    fn load(&mut self, _name: &str, start: usize, values: Vec<f32>) -> Result<(), StateError> {
        self.values[start..start + values.len()].copy_from_slice(&values);
        Ok(())
    }
}
