//! A fixture: the model, its weights with gradient sinks, and torch's results.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_model::{
    AdapterFolder, Config, ForwardContext, FsdpUnit, LoraConfig, Model, ParallelOps, ParamSpec, RouterContext,
    RouterDtype, RouterSettings, SingleDevice, TokenParallel, UnitWeights, checkpoint::Checkpoint,
};
use candlewick_ops::{CrossEntropy, CuSeqlens, GradSink, LossGrad, Reduction, Tape, Weight, linear_cross_entropy};

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A model with its weights, unit by unit.
pub(crate) struct Tiny {
    pub(crate) model: Model,
    pub(crate) weights: Vec<UnitWeights>,
    router: RouterSettings,
    dropout_key: Option<u64>,
    params: HashMap<String, Weight>,
    sinks: HashMap<String, GradSink>,
}

impl Tiny {
    pub(crate) fn load(name: &str) -> Self {
        let model = Model::new(Config::read(&fixture(name)).unwrap(), None).unwrap();
        let checkpoint = Checkpoint::of_model(&fixture(name), model.config()).unwrap();
        assert!(checkpoint.check(model.base_params()).unwrap().is_empty());
        Self::with_weights(model, |param| read(&checkpoint, param))
    }

    pub(crate) fn load_with_adapter(name: &str, adapter: &Path) -> Self {
        let config = AdapterFolder::open(adapter).unwrap().config;
        Self::load_with_lora(name, adapter, config)
    }

    /// Loads an adapter, and replaces the dropout probability of its config.
    pub(crate) fn load_with_dropout(name: &str, adapter: &Path, p: f64, key: Option<u64>) -> Self {
        let mut config = AdapterFolder::open(adapter).unwrap().config.to_json();
        config["lora_dropout"] = p.into();
        Self::load_with_lora(name, adapter, LoraConfig::from_json(&config).unwrap()).with_dropout_key(key)
    }

    fn load_with_lora(name: &str, adapter: &Path, config: LoraConfig) -> Self {
        let adapter = AdapterFolder::open(adapter).unwrap();
        let model = Model::new(Config::read(&fixture(name)).unwrap(), Some(config)).unwrap();
        let checkpoint = Checkpoint::of_model(&fixture(name), model.config()).unwrap();
        model.check_adapter(&adapter.weights).unwrap();
        let factors: Vec<String> = model.adapter_params().map(|param| param.name.clone()).collect();
        Self::with_weights(model, |param| match factors.contains(&param.name) {
            true => read(&adapter.weights, param),
            false => read(&checkpoint, param),
        })
    }

    pub(crate) fn with_weights(model: Model, fetch: impl Fn(&ParamSpec) -> Tensor) -> Self {
        let (mut weights, mut sinks) = (HashMap::new(), HashMap::new());
        for param in model.units().iter().flat_map(|unit| &unit.params) {
            let weight = match param.trainable {
                true => {
                    let zeros = Tensor::zeros(param.shape.as_slice(), DType::F32, &Device::Cpu).unwrap();
                    let sink = GradSink::new(zeros).unwrap();
                    sinks.insert(param.name.clone(), sink.clone());
                    Weight::trainable(fetch(param), sink)
                }
                false => Weight::frozen(fetch(param)),
            };
            weights.insert(param.name.clone(), weight);
        }
        let of_unit = |unit: &FsdpUnit| UnitWeights::new(unit, weights.clone()).unwrap();
        let units = model.units().iter().map(of_unit).collect();
        Self { model, weights: units, router: RouterSettings::default(), dropout_key: None, params: weights, sinks }
    }

    /// Sets the key of the dropout masks; `None` for no dropout.
    pub(crate) fn with_dropout_key(self, dropout_key: Option<u64>) -> Self {
        Self { dropout_key, ..self }
    }

    pub(crate) fn with_router_dtype(self, dtype: RouterDtype) -> Self {
        Self { router: RouterSettings { dtype, ..RouterSettings::default() }, ..self }
    }

    /// Returns the value of a parameter, if the model has it.
    pub(crate) fn value(&self, name: &str) -> Option<Tensor> {
        self.params.get(name).map(|weight| weight.value().unwrap())
    }

    pub(crate) fn grad(&self, name: &str) -> Tensor {
        self.sinks[name].grad().unwrap()
    }

    pub(crate) fn n_sinks(&self) -> usize {
        self.sinks.len()
    }

    /// Returns the final norm's output for sequences of the given lengths.
    pub(crate) fn normed(&self, ids: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        self.normed_with(ids, lengths, &SingleDevice)
    }

    /// Returns [`Tiny::normed`] with these collectives.
    pub(crate) fn normed_with(&self, ids: &Tensor, lengths: &[usize], tokens: &dyn TokenParallel) -> Result<Tensor> {
        let mut cu = vec![0];
        lengths.iter().for_each(|n| cu.push(cu[cu.len() - 1] + n));
        let positions: Vec<u32> = lengths.iter().flat_map(|&n| 0..n as u32).collect();
        let (cos, sin) = self.model.rope(&positions, &self.model.length_classes(&positions), &Device::Cpu)?;
        let seqs = CuSeqlens::packed(cu)?;
        let context = ForwardContext {
            dropout_key: self.dropout_key,
            router: RouterContext { settings: &self.router, ..RouterContext::default() },
            parallel_ops: ParallelOps { tokens, ..ParallelOps::SINGLE_DEVICE },
            ..ForwardContext::on_single_device([&cos, &sin], &seqs)
        };
        let mut x = self.model.embed(&self.weights[0], ids, &SingleDevice)?;
        for block_idx in 0..self.model.n_blocks() {
            x = self.model.block(&self.weights[block_idx + 1], &x, &context)?;
        }
        self.model.final_norm(self.head(), &x)
    }

    pub(crate) fn head(&self) -> &UnitWeights {
        &self.weights[self.weights.len() - 1]
    }

    pub(crate) fn logits(&self, ids: &Tensor, lengths: &[usize]) -> Tensor {
        self.model.logits(self.head(), &self.normed(ids, lengths).unwrap()).unwrap()
    }

    /// Returns the mean loss; its gradients are added to the sinks.
    pub(crate) fn loss_and_grads(&self, reference: &Reference) -> f32 {
        let tape = Tape::record(&[], || self.normed(&reference.ids, &reference.lengths)).unwrap();
        let normed = tape.output();
        let spec = CrossEntropy { reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0, chunk: 5 };
        let lm_head = self.model.lm_head(self.head()).unwrap();
        let out = linear_cross_entropy(normed, &lm_head, &reference.targets(), &spec, LossGrad::Scalar(1.0)).unwrap();
        tape.backward(&out.dx.unwrap()).unwrap();
        out.loss.to_scalar().unwrap()
    }
}

pub(crate) fn read(checkpoint: &Checkpoint, param: &ParamSpec) -> Tensor {
    checkpoint.param(param, DType::F32, &Device::Cpu).unwrap()
}

/// Results of torch.
pub(crate) struct Reference {
    tensors: HashMap<String, Tensor>,
    pub(crate) ids: Tensor,
    pub(crate) lengths: Vec<usize>,
}

impl Reference {
    pub(crate) fn load(name: &str) -> Self {
        Self::open(&format!("{name}/reference.safetensors"))
    }

    pub(crate) fn open(file: &str) -> Self {
        let path = fixture(file);
        let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let ids = tensors["ids"].to_dtype(DType::U32).unwrap();
        let lengths = tensors["lengths"].to_vec1::<i64>().unwrap().into_iter().map(|n| n as usize).collect();
        Self { tensors, ids, lengths }
    }

    pub(crate) fn get(&self, name: &str) -> &Tensor {
        &self.tensors[name]
    }

    pub(crate) fn grads(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().filter_map(|(name, grad)| Some((name.strip_prefix("grad.")?, grad)))
    }

    /// Returns the targets: the next token, none for the last of a sequence.
    fn targets(&self) -> Tensor {
        let labels = self.tensors["labels"].to_vec1::<i64>().unwrap();
        let mut targets = Vec::new();
        let mut start = 0;
        for length in &self.lengths {
            targets.extend_from_slice(&labels[start + 1..start + length]);
            targets.push(-100);
            start += length;
        }
        Tensor::new(targets, &Device::Cpu).unwrap()
    }
}

/// Returns |a - b| / |b|, or |a| where b is zero.
pub(crate) fn relative_error(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let norm = |x: Tensor| {
        let x = x.to_dtype(DType::F64).unwrap();
        x.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt()
    };
    let (difference, size) = (norm((a - b).unwrap()), norm(b.clone()));
    if size == 0.0 { difference } else { difference / size }
}

#[track_caller]
pub(crate) fn assert_close(what: &str, a: &Tensor, b: &Tensor) {
    let error = relative_error(a, b);
    assert!(error < 1e-5, "{what}: relative error {error:.2e}");
}
