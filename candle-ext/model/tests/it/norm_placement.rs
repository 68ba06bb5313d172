//! Norms before, after and around the sublayers, and the residual scale, compared with candle's autograd.
//!
//! Each sequence has one token, so attention returns the values and RoPE rotates by zero.
//!
//! Dimensions: t tokens, d hidden size, f intermediate size

use std::collections::HashMap;

use candle_core::{D, Device, Result, Tensor, Var};
use candlewick_model::{Config, ForwardContext, Model, NormPlacement, UnitWeights};
use candlewick_ops::{CuSeqlens, Tape, Weight};
use serde_json::json;

const EPS: f64 = 1e-3;
const N_TOKENS: usize = 5;

/// A model of one layer, and its values.
struct OneLayer {
    model: Model,
    values: HashMap<String, Tensor>,
}

impl OneLayer {
    fn new(norms: NormPlacement, residual_scale: f64) -> Self {
        let config = Config::from_json(json!({
            "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12,
            "num_attention_heads": 2, "vocab_size": 16, "rms_norm_eps": EPS, "initializer_range": 0.5,
        }))
        .unwrap();
        let mut layer = config.layer(0);
        (layer.norms, layer.residual_scale) = (norms, residual_scale);
        let model = Model::with_layers(config, vec![layer]);
        let values = model.units()[1].params.iter().map(|param| {
            let mut values = vec![0f32; param.numel()];
            param.initialise(3, &mut values);
            // Norms' weights differ from one.
            values.iter_mut().enumerate().for_each(|(i, x)| *x += 0.1 * (i as f32).sin());
            (param.name.clone(), Tensor::from_vec(values, param.shape.as_slice(), &Device::Cpu).unwrap())
        });
        Self { values: values.collect(), model }
    }

    fn value(&self, name: &str) -> &Tensor {
        &self.values[&format!("model.layers.0.{name}.weight")]
    }

    fn norm(&self, x_td: &Tensor, name: &str) -> Result<Tensor> {
        let mean = x_td.sqr()?.mean_keepdim(D::Minus1)?;
        x_td.broadcast_div(&(mean + EPS)?.sqrt()?)?.broadcast_mul(self.value(name))
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        x.matmul(&self.value(name).t()?)
    }

    fn mixer(&self, x_td: &Tensor) -> Result<Tensor> {
        self.linear(&self.linear(x_td, "self_attn.v_proj")?, "self_attn.o_proj")
    }

    fn mlp(&self, x_td: &Tensor) -> Result<Tensor> {
        let gated_tf = (self.linear(x_td, "mlp.gate_proj")?.silu()? * self.linear(x_td, "mlp.up_proj")?)?;
        self.linear(&gated_tf, "mlp.down_proj")
    }

    /// Computes the layer as the model does.
    fn ours(&self, x_td: &Tensor) -> Result<Tensor> {
        let weights = self.values.iter().map(|(name, value)| (name.clone(), Weight::frozen(value.clone())));
        let weights = UnitWeights::new(&self.model.units()[1], weights)?;
        let positions = [0; N_TOKENS];
        let (cos, sin) = self.model.rope(&positions, &self.model.length_classes(&positions), &Device::Cpu)?;
        let seqs = CuSeqlens::packed((0..=N_TOKENS).collect())?;
        self.model.block(&weights, x_td, &ForwardContext::on_single_device([&cos, &sin], &seqs))
    }
}

/// Compares output and input gradient of a layer with those of `want`.
#[track_caller]
fn check(layer: &OneLayer, want: impl Fn(&OneLayer, &Tensor) -> Result<Tensor>) {
    let x = Tensor::arange(0f32, (N_TOKENS * 8) as f32, &Device::Cpu).unwrap().affine(0.7, 0.3).unwrap().sin().unwrap();
    let x_td = x.reshape((N_TOKENS, 8)).unwrap();
    let dy_td = x_td.affine(1.0, 0.5).unwrap().cos().unwrap();
    let var = Var::from_tensor(&x_td).unwrap();
    let y_td = want(layer, &var).unwrap();
    let grads = (&y_td * &dy_td).unwrap().sum_all().unwrap().backward().unwrap();
    let tape = Tape::record(&[&x_td], || layer.ours(&x_td)).unwrap();
    assert_close("output", tape.output(), &y_td);
    let dx_td = tape.backward(&dy_td).unwrap().remove(&x_td).unwrap();
    assert_close("gradient", &dx_td, grads.get(&var).unwrap());
}

/// f32 sums of at most 12 terms in another order.
#[track_caller]
fn assert_close(what: &str, ours: &Tensor, want: &Tensor) {
    let norm = |x: &Tensor| x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
    let off = norm(&(ours - want).unwrap()) / norm(want);
    assert!(off < 1e-5, "{what} is off by {off:.1e}");
}

#[test]
fn norms_before_sublayers_are_those_of_llama() {
    check(&OneLayer::new(NormPlacement::Pre, 1.0), |layer, x| {
        let x = (x + layer.mixer(&layer.norm(x, "input_layernorm")?)?)?;
        &x + layer.mlp(&layer.norm(&x, "post_attention_layernorm")?)?
    });
}

#[test]
fn norms_after_sublayers_are_those_of_olmo_2() {
    check(&OneLayer::new(NormPlacement::Post, 1.0), |layer, x| {
        let x = (x + layer.norm(&layer.mixer(x)?, "post_attention_layernorm")?)?;
        &x + layer.norm(&layer.mlp(&x)?, "post_feedforward_layernorm")?
    });
}

#[test]
fn norms_around_sublayers_are_those_of_gemma_2() {
    check(&OneLayer::new(NormPlacement::Sandwich, 1.0), |layer, x| {
        let mixed = layer.mixer(&layer.norm(x, "input_layernorm")?)?;
        let x = (x + layer.norm(&mixed, "post_attention_layernorm")?)?;
        let y = layer.mlp(&layer.norm(&x, "pre_feedforward_layernorm")?)?;
        &x + layer.norm(&y, "post_feedforward_layernorm")?
    });
}

#[test]
fn a_residual_scale_multiplies_the_outputs_of_sublayers() {
    check(&OneLayer::new(NormPlacement::Pre, 0.22), |layer, x| {
        let mixed = layer.mixer(&layer.norm(x, "input_layernorm")?)?;
        let x = (x + mixed.affine(0.22, 0.0)?)?;
        &x + layer.mlp(&layer.norm(&x, "post_attention_layernorm")?)?.affine(0.22, 0.0)?
    });
}
