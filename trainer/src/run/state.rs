//! The engine's tensors in a checkpoint: master weights and optimizer states of every trainable parameter, buffers, and the state
//! of FP8 scales.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use candlewick_ops::{Fp8Layers, HostBuffer, copy_into, with_bytes};
use candlewick_parallel::Engine;

use crate::checkpoint::{BUFFER, FP8_STATE, MASTER, StateError, TensorChunk, TensorMeta, TrainState, optimizer_part};

/// The training state by global name, such as "master/model.norm.weight".
pub(super) struct EngineState {
    tensors: Vec<TensorMeta>,
    chunks: Vec<TensorChunk>,
    /// The chunks that this rank writes.
    to_write: Vec<TensorChunk>,
    /// Flat views of the chunks, with the index of their first element.
    views: HashMap<String, (usize, Tensor)>,
}

impl EngineState {
    /// Creates views of the state in the engine's store. Reads and loads access the store directly.
    pub(super) fn of(engine: &Engine) -> candle_core::Result<Self> {
        let params = || engine.model().units().iter().flat_map(|unit| &unit.params);
        let trained = params().filter(|spec| spec.trainable);
        let tensors = trained.flat_map(|spec| {
            let slots = engine.store().slots(spec).iter().map(|slot| optimizer_part(slot.name));
            let parts = [MASTER.to_owned()].into_iter().chain(slots);
            parts.map(|part| meta(&part, &spec.name, &spec.shape)).collect::<Vec<_>>()
        });
        let buffers = params().filter(|spec| spec.is_buffer()).map(|spec| meta(BUFFER, &spec.name, &spec.shape));
        let tensors = tensors.chain(buffers).collect();
        let mut state = Self { tensors, chunks: Vec::new(), to_write: Vec::new(), views: HashMap::new() };
        for param in engine.store().states()? {
            let slots = param.slots.into_iter().map(|(slot, view)| (optimizer_part(slot), view));
            for (part, view) in [(MASTER.to_owned(), param.master)].into_iter().chain(slots) {
                let tensor = meta(&part, &param.name, &param.shape);
                let (columns, range) = (param.columns.clone(), param.range.clone());
                let chunk = TensorChunk { tensor, row_len: param.row_len, columns, range };
                state.to_write.extend(param.writes_checkpoint.then(|| chunk.clone()));
                state.add(chunk, view);
            }
        }
        for buffer in engine.store().buffers()? {
            let row_len = buffer.shape.last().copied().unwrap_or(1);
            let (tensor, range) = (meta(BUFFER, &buffer.name, &buffer.shape), buffer.range);
            let chunk = TensorChunk { tensor, row_len, columns: 0..row_len, range };
            state.to_write.extend(buffer.writes_checkpoint.then(|| chunk.clone()));
            state.add(chunk, buffer.value);
        }
        state.add_fp8(engine)?;
        Ok(state)
    }

    /// Adds the scales of delayed scaling and their amax histories. All ranks hold all of them; the first writes them.
    fn add_fp8(&mut self, engine: &Engine) -> candle_core::Result<()> {
        let layers = engine.store().fp8().map_or(Ok(Vec::new()), Fp8Layers::states)?;
        for layer in layers {
            for (name, view) in [("amax_history", layer.amax_history), ("scale", layer.scales)] {
                let tensor = meta(FP8_STATE, &format!("{}.{name}", layer.module), view.dims());
                let chunk = TensorChunk::full(tensor.clone());
                self.to_write.extend(engine.is_first_rank().then(|| chunk.clone()));
                self.tensors.push(tensor);
                self.add(chunk, view.flatten_all()?);
            }
        }
        Ok(())
    }

    fn add(&mut self, chunk: TensorChunk, view: Tensor) {
        self.views.insert(chunk.tensor.name.clone(), (chunk.range.start, view));
        self.chunks.push(chunk);
    }

    fn part(&self, name: &str, start: usize, n_values: usize) -> Result<Tensor, StateError> {
        let (first, view) =
            self.views.get(name).ok_or_else(|| format!("this rank has no chunk of the tensor {name}"))?;
        let start =
            start.checked_sub(*first).ok_or_else(|| format!("this rank has {name} only from element {first} on"))?;
        Ok(view.narrow(0, start, n_values)?)
    }
}

fn meta(part: &str, name: &str, shape: &[usize]) -> TensorMeta {
    TensorMeta { name: format!("{part}/{name}"), shape: shape.to_vec() }
}

impl TrainState for EngineState {
    fn tensors(&self) -> Vec<TensorMeta> {
        self.tensors.clone()
    }

    fn chunks(&self) -> Vec<TensorChunk> {
        self.chunks.clone()
    }

    fn chunks_to_write(&self) -> Vec<TensorChunk> {
        self.to_write.clone()
    }

    fn read(&self, name: &str, start: usize, n_values: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError> {
        let chunk = HostBuffer::start(&self.part(name, start, n_values)?.to_dtype(DType::F32)?)?.into_host()?;
        with_bytes(&chunk, |bytes| {
            take(bytemuck::cast_slice(bytes));
            Ok(())
        })?;
        Ok(())
    }

    fn load(&mut self, name: &str, start: usize, values: Vec<f32>) -> Result<(), StateError> {
        let chunk = self.part(name, start, values.len())?;
        copy_into(&chunk, &Tensor::from_vec(values, chunk.dims(), chunk.device())?)?;
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candlewick_comm::Solo;
    use candlewick_model::{Config, Model};
    use candlewick_parallel::{ActivationCheckpointing, ParamDtypes, ParamStore, ShardingGroups, StoreMode};

    #[test]
    fn loaded_values_reach_the_store_and_read_back() {
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 5, "max_position_embeddings": 8,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        });
        let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
        let dtypes = ParamDtypes::computing_in(DType::F32);
        let store =
            ParamStore::new(&model, dtypes, StoreMode::Train, &Device::Cpu, ShardingGroups::single_rank()).unwrap();
        let engine =
            Engine::new(model, store, vec![ActivationCheckpointing::None], std::sync::Arc::new(Solo), Device::Cpu);
        let mut state = EngineState::of(&engine).unwrap();
        assert_eq!(state.tensors().len(), 3 * (1 + 9 + 1));
        let name = "optimizer.exp_avg/model.embed_tokens.weight";
        state.load(name, 7, vec![1.0, 2.0, 3.0]).unwrap();
        let mut back: Vec<f32> = Vec::new();
        state.read(name, 6, 5, &mut |values| back.extend(values)).unwrap();
        assert_eq!(back, [0.0, 1.0, 2.0, 3.0, 0.0]);
        let embedding = engine.store().states().unwrap().remove(0);
        assert_eq!(embedding.slots[0].1.to_vec1::<f32>().unwrap()[6..11], back);
        let refused = |name, start| state.read(name, start, 5, &mut |_| unreachable!()).is_err();
        assert!(refused("optimizer.exp_avg/nothing", 0));
        assert!(refused(name, 38));
    }
}
