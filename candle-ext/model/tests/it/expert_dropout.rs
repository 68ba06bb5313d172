//! Dropout of adapters on single experts, compared with a computation of one token after the other.

use std::cell::Cell;
use std::collections::HashSet;

use candle_core::{DType, Device, Result, Tensor, Var};
use candlewick_model::{
    Config, ExpertCall, LayerSpec, LoraConfig, Model, SingleDevice, TokenExchange, TokenParallel,
    checkpoint::Checkpoint,
};
use candlewick_ops::{Dropout, Tape, derive_key, dropout, route};
use serde_json::json;

use crate::tiny::{Reference, Tiny, assert_close, fixture};

const P: f64 = 0.4;
/// Key of the dropout masks of the micro-batch.
const KEY: u64 = 9;

/// Compares the experts of each layer and their gradients with candle's.
struct ChecksExperts<'a> {
    tiny: &'a Tiny,
    next_layer: Cell<usize>,
    /// Number of routers whose adapter was compared.
    n_routers: Cell<usize>,
}

/// One matrix of all experts with its adapters.
struct Matrix<'a> {
    tiny: &'a Tiny,
    layer: LayerSpec,
    /// Index of the matrix: gate and up, or down.
    idx: usize,
    weight: Tensor,
    factors: Vec<[Var; 2]>,
}

impl<'a> Matrix<'a> {
    /// Reads the matrix of the layer with experts `layer_idx`.
    fn new(tiny: &'a Tiny, layer_idx: usize, idx: usize) -> Result<Self> {
        let layer = tiny.model.layers().filter(|layer| layer.n_experts().is_some()).nth(layer_idx).unwrap().clone();
        let spec = layer.expert_matrices().nth(idx).unwrap();
        let value = |name: &str| tiny.value(name).unwrap();
        let factors = spec.adapters.iter().map(|adapter| {
            Ok([
                Var::from_tensor(&value(&adapter.adapter.a_name()))?,
                Var::from_tensor(&value(&adapter.adapter.b_name()))?,
            ])
        });
        let (weight, factors) = (value(&spec.name), factors.collect::<Result<_>>()?);
        Ok(Self { tiny, layer, idx, weight, factors })
    }

    /// Computes a row of expert `expert`, whose masks have a key: [1, in] -> [1, out].
    fn of_row(&self, x: &Tensor, expert: usize, key: i64) -> Result<Tensor> {
        let spec = self.layer.expert_matrices().nth(self.idx).unwrap();
        let mut y = x.matmul(&self.weight.narrow(0, expert * spec.out, spec.out)?.t()?)?;
        for (adapter, [a, b]) in spec.adapters.iter().zip(&self.factors) {
            let (r, columns) = (adapter.adapter.r, adapter.columns.clone());
            let key = derive_key(key as u64, fnv1a(&adapter.adapter.module));
            let mask = dropout(&Tensor::ones(x.shape(), DType::F32, &Device::Cpu)?, Dropout { p: P, key })?;
            let down = (x * mask)?.matmul(&a.narrow(0, expert * r, r)?.t()?)?;
            let up = down.matmul(&b.narrow(0, expert * columns.len(), columns.len())?.t()?)?;
            let up = (up * adapter.adapter.scaling)?;
            y = (y + up.pad_with_zeros(1, columns.start, spec.out - columns.end)?)?;
        }
        Ok(y)
    }

    fn check_grads(&self, theirs: &candle_core::backprop::GradStore) {
        let spec = self.layer.expert_matrices().nth(self.idx).unwrap();
        for (adapter, factors) in spec.adapters.iter().zip(&self.factors) {
            for (name, factor) in [adapter.adapter.a_name(), adapter.adapter.b_name()].iter().zip(factors) {
                assert_close(name, &self.tiny.grad(name), theirs.get(factor).unwrap());
            }
        }
    }
}

impl ChecksExperts<'_> {
    /// Compares experts and weights with those of a router whose adapter's input has a mask.
    fn check_router(&self, layer: &LayerSpec, call: &ExpertCall) -> Result<()> {
        let (Some(moe), Some(router)) = (self.tiny.model.config().moe(), layer.router()) else { return Ok(()) };
        let Some(adapter) = &router.adapter else { return Ok(()) };
        let [weight, a, b] =
            [router.weight_name(), adapter.a_name(), adapter.b_name()].map(|name| self.tiny.value(&name).unwrap());
        let key = derive_key(KEY, fnv1a(&adapter.module));
        let mask = dropout(&Tensor::ones(call.x.shape(), DType::F32, &Device::Cpu)?, Dropout { p: P, key })?;
        let of_adapter = (call.x * mask)?.matmul(&a.t()?)?.matmul(&b.t()?)?;
        let logits = (call.x.matmul(&weight.t()?)? + (of_adapter * adapter.scaling)?)?;
        let want = route(&logits, None, moe.router)?;
        let experts = |routing: &candlewick_ops::Routing| routing.assignment.experts.to_vec2::<u32>();
        assert_eq!(experts(call.routing)?, experts(&want)?, "{}", adapter.module);
        assert_close(&adapter.module, &call.routing.weights, &want.weights);
        self.n_routers.set(self.n_routers.get() + 1);
        Ok(())
    }
}

impl TokenParallel for ChecksExperts<'_> {
    fn experts(&self, call: &ExpertCall, meanwhile: &mut dyn FnMut(TokenExchange) -> Result<()>) -> Result<Tensor> {
        meanwhile(TokenExchange::Dispatch)?;
        meanwhile(TokenExchange::Combine)?;
        let layer = self.next_layer.replace(self.next_layer.get() + 1);
        let [gate_up, down] = [Matrix::new(self.tiny, layer, 0)?, Matrix::new(self.tiny, layer, 1)?];
        self.check_router(&gate_up.layer, call)?;
        let x = Var::from_tensor(call.x)?;
        let experts = call.routing.assignment.experts.to_vec2::<u32>()?;
        let (weights, keys) = (call.routing.weights.to_vec2::<f32>()?, call.dropout_keys.unwrap().to_vec2::<i64>()?);
        let n_masks = keys.iter().flatten().collect::<HashSet<_>>().len();
        assert_eq!(n_masks, call.routing.assignment.n_slots(), "each expert of a token has a mask of its own");
        let of_token = |token: usize| {
            let row = x.narrow(0, token, 1)?;
            let mut sum = row.zeros_like()?;
            for (slot, expert) in experts[token].iter().enumerate() {
                let (expert, key) = (*expert as usize, keys[token][slot]);
                let hidden = gate_up.of_row(&row, expert, key)?;
                let f = hidden.dim(1)? / 2;
                let gated = (hidden.narrow(1, 0, f)?.silu()? * hidden.narrow(1, f, f)?)?;
                sum = (sum + (down.of_row(&gated, expert, key)? * f64::from(weights[token][slot]))?)?;
            }
            Ok(sum)
        };
        let want = Tensor::cat(&(0..x.dim(0)?).map(of_token).collect::<Result<Vec<_>>>()?, 0)?;
        let dy = Tensor::randn(0f32, 1., want.shape(), &Device::Cpu)?;
        let theirs = (&want * &dy)?.sum_all()?.backward()?;

        let tape = Tape::record(&[call.x], || call.compute())?;
        let got = tape.output().clone();
        assert_close(&format!("layer {layer}"), &got, &want);
        let ours = tape.backward(&dy)?;
        assert_close("dx", ours.get(call.x).unwrap(), theirs.get(&x).unwrap());
        gate_up.check_grads(&theirs);
        down.check_grads(&theirs);
        Ok(got)
    }
}

#[test]
fn the_input_of_an_experts_adapter_has_dropout() {
    for (base, adapter) in [("mixtral", "mixtral-experts-lora"), ("qwen2_moe", "qwen2_moe-up-lora")] {
        let Reference { ids, lengths, .. } = Reference::load(adapter);
        let tiny = |p, key| Tiny::load_with_dropout(base, &fixture(adapter), p, key);
        let dropped = tiny(P, Some(KEY));
        let checks = ChecksExperts { tiny: &dropped, next_layer: Cell::new(0), n_routers: Cell::new(0) };
        dropped.normed_with(&ids, &lengths, &checks).unwrap();
        assert!(checks.next_layer.get() > 0);
        assert_eq!(checks.n_routers.get() > 0, base == "mixtral");
        let outputs = |tiny: &Tiny| tiny.normed_with(&ids, &lengths, &SingleDevice).unwrap();
        let values = |tiny: &Tiny| outputs(tiny).to_vec2::<f32>().unwrap();
        assert_eq!(values(&dropped), values(&tiny(P, Some(KEY))));
        assert_ne!(values(&dropped), values(&tiny(P, Some(8))));
        // Without a key, as in evaluation, and with a probability of zero there is none.
        let plain = values(&Tiny::load_with_adapter(base, &fixture(adapter)));
        assert_eq!((values(&tiny(P, None)), values(&tiny(0.0, Some(KEY)))), (plain.clone(), plain));
    }
}

/// The gates of the shared experts have the only adapters.
#[test]
fn the_input_of_the_shared_experts_gate_has_dropout() {
    let (folder, Reference { ids, lengths, .. }) = (fixture("qwen2_moe"), Reference::load("qwen2_moe"));
    let outputs = |p: f64, key| {
        let lora = json!({"r": 2, "lora_alpha": 4, "lora_dropout": p, "target_modules": ["shared_expert_gate"]});
        let model = Model::new(Config::read(&folder).unwrap(), Some(LoraConfig::from_json(&lora).unwrap())).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let tiny = Tiny::with_weights(model, |param| match param.trainable {
            true => Tensor::full(0.1f32, param.shape.as_slice(), &Device::Cpu).unwrap(),
            false => checkpoint.param(param, DType::F32, &Device::Cpu).unwrap(),
        });
        assert!(tiny.n_sinks() > 0);
        tiny.with_dropout_key(key).normed(&ids, &lengths).unwrap().to_vec2::<f32>().unwrap()
    };
    let dropped = outputs(P, Some(KEY));
    assert_eq!(dropped, outputs(P, Some(KEY)));
    assert_ne!(dropped, outputs(P, Some(8)));
    let plain = outputs(0.0, None);
    assert_ne!(dropped, plain);
    assert_eq!((outputs(P, None), outputs(0.0, Some(KEY))), (plain.clone(), plain));
}

/// Returns the FNV-1a hash.
fn fnv1a(text: &str) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325;
    text.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
