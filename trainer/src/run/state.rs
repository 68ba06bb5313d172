//! The engine's tensors as a save sees them: master weights and both moments of every trained parameter.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{copy_into, with_bytes};
use candlewick_parallel::Resident;

use crate::checkpoint::{StateError, TensorMeta, TrainState};

/// Flat views of the training state by name: "master/model.norm.weight".
pub(super) struct EngineState {
    metas: Vec<TensorMeta>,
    views: HashMap<String, Tensor>,
}

impl EngineState {
    /// Takes views of the state in `store`; reading and loading go to the store itself.
    pub(super) fn of(store: &Resident) -> candle_core::Result<Self> {
        let (mut metas, mut views) = (Vec::new(), HashMap::new());
        for param in store.states()? {
            let parts = [("master", &param.master), ("exp_avg", &param.exp_avg), ("exp_avg_sq", &param.exp_avg_sq)];
            for (part, tensor) in parts {
                let name = format!("{part}/{}", param.name);
                metas.push(TensorMeta { name: name.clone(), shape: tensor.dims().to_vec() });
                views.insert(name, tensor.flatten_all()?);
            }
        }
        Ok(Self { metas, views })
    }

    fn piece(&self, name: &str, start: usize, n_values: usize) -> Result<Tensor, StateError> {
        let view = self.views.get(name).ok_or_else(|| format!("there is no tensor {name}"))?;
        Ok(view.narrow(0, start, n_values)?)
    }
}

impl TrainState for EngineState {
    fn tensors(&self) -> Vec<TensorMeta> {
        self.metas.clone()
    }

    fn read(&self, name: &str, start: usize, n_values: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError> {
        let piece = self.piece(name, start, n_values)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
        with_bytes(&piece, |bytes| {
            take(bytemuck::cast_slice(bytes));
            Ok(())
        })?;
        Ok(())
    }

    fn load(&mut self, name: &str, start: usize, values: Vec<f32>) -> Result<(), StateError> {
        let piece = self.piece(name, start, values.len())?;
        copy_into(&piece, &Tensor::from_vec(values, piece.dims(), piece.device())?)?;
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candlewick_model::{Config, Model};
    use candlewick_parallel::{Formats, Mode};

    #[test]
    fn what_is_loaded_is_read_back_and_reaches_the_store() {
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 5, "max_position_embeddings": 8,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        });
        let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
        let store = Resident::new(&model, Formats::computing_in(DType::F32), Mode::Train, &Device::Cpu).unwrap();
        let mut state = EngineState::of(&store).unwrap();
        assert_eq!(state.tensors().len(), 3 * (1 + 9 + 1));
        let name = "exp_avg/model.embed_tokens.weight";
        state.load(name, 7, vec![1.0, 2.0, 3.0]).unwrap();
        let mut back: Vec<f32> = Vec::new();
        state.read(name, 6, 5, &mut |values| back.extend(values)).unwrap();
        assert_eq!(back, [0.0, 1.0, 2.0, 3.0, 0.0]);
        let embedding = store.states().unwrap().remove(0);
        assert_eq!(embedding.exp_avg.flatten_all().unwrap().to_vec1::<f32>().unwrap()[6..11], back);
        let refused = |name, start| state.read(name, start, 5, &mut |_| unreachable!()).is_err();
        assert!(refused("exp_avg/nothing", 0));
        assert!(refused(name, 38));
    }
}
