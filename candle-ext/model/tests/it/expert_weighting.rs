//! Weights of experts on their input, as Megatron-LM's `moe_apply_probs_on_input`.

use std::cell::Cell;

use candle_core::{DType, Device, Result, Tensor, Var};
use candlewick_model::{Config, ExpertCall, Model, TokenExchange, TokenParallel, checkpoint::Checkpoint};
use candlewick_ops::Tape;
use serde_json::Value;

use crate::tiny::{Reference, Tiny, assert_close, fixture};

/// Compares the experts of each layer with a computation of one token after the other, and with candle's gradients.
struct ChecksExperts<'a> {
    tiny: &'a Tiny,
    next_layer: Cell<usize>,
}

impl TokenParallel for ChecksExperts<'_> {
    fn experts(&self, call: &ExpertCall, meanwhile: &mut dyn FnMut(TokenExchange) -> Result<()>) -> Result<Tensor> {
        meanwhile(TokenExchange::Dispatch)?;
        meanwhile(TokenExchange::Combine)?;
        let layer = self.next_layer.replace(self.next_layer.get() + 1);
        let name = |name: &str| format!("model.layers.{layer}.mlp.experts.{name}");
        let weight = |matrix: &str| Var::from_tensor(&self.tiny.value(&name(matrix)).unwrap());
        let [gate_up, down] = [weight("gate_up_proj")?, weight("down_proj")?];
        let [x, weights] = [Var::from_tensor(call.x)?, Var::from_tensor(&call.routing.weights)?];
        let experts = call.routing.assignment.experts.to_vec2::<u32>()?;
        let (d, f) = (x.dim(1)?, down.dim(1)?);
        let of_token = |token: usize| {
            let expert = experts[token][0] as usize;
            let x = x.narrow(0, token, 1)?.broadcast_mul(&weights.narrow(0, token, 1)?)?;
            let gate_up = x.matmul(&gate_up.narrow(0, expert * 2 * f, 2 * f)?.t()?)?;
            let gated = (gate_up.narrow(1, 0, f)?.silu()? * gate_up.narrow(1, f, f)?)?;
            gated.matmul(&down.narrow(0, expert * d, d)?.t()?)
        };
        let want = Tensor::cat(&(0..x.dim(0)?).map(of_token).collect::<Result<Vec<_>>>()?, 0)?;
        let dy = Tensor::randn(0f32, 1., want.shape(), &Device::Cpu)?;
        let theirs = (&want * &dy)?.sum_all()?.backward()?;

        let tape = Tape::record(&[call.x, &call.routing.weights], || call.compute())?;
        let got = tape.output().clone();
        assert_close(&format!("layer {layer}"), &got, &want);
        let ours = tape.backward(&dy)?;
        assert_close("dx", ours.get(call.x).unwrap(), theirs.get(&x).unwrap());
        assert_close("d_weights", ours.get(&call.routing.weights).unwrap(), theirs.get(&weights).unwrap());
        assert_close("d_gate_up", &self.tiny.grad(&name("gate_up_proj")), theirs.get(&gate_up).unwrap());
        assert_close("d_down", &self.tiny.grad(&name("down_proj")), theirs.get(&down).unwrap());
        Ok(got)
    }
}

#[test]
fn a_weight_multiplies_the_input_of_its_expert() {
    let config = std::fs::read(fixture("olmoe").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["num_experts_per_tok"] = 1.into();
    let checkpoint = Checkpoint::open(&fixture("olmoe")).unwrap();
    let tiny = |config: &Value| {
        let model = Model::new(Config::from_json(config.clone()).unwrap(), None).unwrap();
        Tiny::with_weights(model, |param| checkpoint.param(param, DType::F32, &Device::Cpu).unwrap())
    };
    let Reference { ids, lengths, .. } = Reference::load("olmoe");
    let on_output = tiny(&config).logits(&ids, &lengths);
    config["moe_apply_probs_on_input"] = true.into();
    let on_input = tiny(&config);
    let checks = ChecksExperts { tiny: &on_input, next_layer: Cell::new(0) };
    on_input.normed_with(&ids, &lengths, &checks).unwrap();
    assert_eq!(checks.next_layer.get(), 2);
    let difference = (on_input.logits(&ids, &lengths) - on_output).unwrap().abs().unwrap().max_all().unwrap();
    assert!(difference.to_scalar::<f32>().unwrap() > 1e-3, "the place of the weights matters");
}
