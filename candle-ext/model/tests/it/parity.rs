//! Every family compared with transformers: logits, loss and each parameter's gradient.

use candle_core::{DType, Device};
use candlewick_model::{Config, Init, Model, RouterDtype, checkpoint::Checkpoint};
use candlewick_ops::TopKOrder;
use serde_json::Value;

use crate::tiny::{Reference, Tiny, assert_close, fixture, relative_error};

#[track_caller]
fn check(name: &str) {
    check_model(&Tiny::load(name), &Reference::load(name));
}

#[track_caller]
fn check_model(tiny: &Tiny, reference: &Reference) {
    assert_close("logits", &tiny.logits(&reference.ids, &reference.lengths), reference.get("logits"));
    let (loss, want) = (tiny.loss_and_grads(reference), reference.get("loss").to_scalar::<f32>().unwrap());
    assert!(((loss - want) / want).abs() < 1e-5, "loss {loss}, want {want}");
    let mut n_grads = 0;
    for (parameter, grad) in reference.grads() {
        let ours = tiny.grad(parameter);
        // The matrices of experts are one matrix here.
        assert_close(parameter, &ours, &grad.reshape(ours.shape()).unwrap());
        n_grads += 1;
    }
    assert_eq!(n_grads, tiny.n_sinks(), "every parameter has a gradient");
}

#[test]
fn llama_with_biases_and_a_padding_token_is_transformers() {
    check("llama");
}

#[test]
fn llama3_with_scaled_rotation_and_tied_embeddings_is_transformers() {
    check("llama3");
}

#[test]
fn mistral_with_a_window_shorter_than_the_sequence_is_transformers() {
    check("mistral");
}

#[test]
fn qwen2_is_transformers() {
    check("qwen2");
}

#[test]
fn qwen3_with_a_window_in_its_later_layer_is_transformers() {
    check("qwen3");
}

#[test]
fn mixtral_is_transformers() {
    check("mixtral");
}

#[test]
fn mixtral_with_softmax_after_the_selection_is_transformers() {
    let config = std::fs::read(fixture("mixtral").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["moe_router_pre_softmax"] = false.into();
    let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
    assert_eq!(model.config().moe().unwrap().router.order, TopKOrder::TopKFirst);
    let checkpoint = Checkpoint::open(&fixture("mixtral")).unwrap();
    let tiny = Tiny::with_weights(model, |param| checkpoint.param(param, DType::F32, &Device::Cpu).unwrap());
    check_model(&tiny, &Reference::load("mixtral"));
}

#[test]
fn qwen2_moe_with_a_gated_shared_expert_and_a_dense_layer_is_transformers() {
    check("qwen2_moe");
}

#[test]
fn qwen3_moe_with_fused_experts_on_disk_is_transformers() {
    check("qwen3_moe");
}

#[test]
fn olmoe_with_norms_over_all_heads_is_transformers() {
    check("olmoe");
}

#[test]
fn dots1_with_groups_an_expert_bias_and_shared_experts_is_transformers() {
    check("dots1");
}

#[test]
fn glm4_moe_with_half_rotated_heads_and_a_shared_expert_is_transformers() {
    check("glm4_moe");
}

#[test]
fn the_text_of_qwen2_vl_with_its_keys_at_the_top_is_transformers() {
    check("qwen2_vl");
}

#[test]
fn the_text_of_qwen2_5_vl_with_a_window_in_its_later_layer_is_transformers() {
    check("qwen2_5_vl");
}

#[test]
fn the_text_of_qwen3_vl_with_tied_embeddings_is_transformers() {
    check("qwen3_vl");
}

#[test]
fn the_text_of_mistral3_is_transformers() {
    check("mistral3");
}

#[test]
fn routers_in_f64_change_results_by_rounding_only() {
    let mut n_changed = 0;
    for name in ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "dots1", "glm4_moe"] {
        let reference = Reference::load(name);
        let logits = |tiny: &Tiny| tiny.logits(&reference.ids, &reference.lengths).to_vec2::<f32>().unwrap();
        let tiny = Tiny::load(name).with_router_dtype(RouterDtype::F64);
        check_model(&tiny, &reference);
        n_changed += usize::from(logits(&tiny) != logits(&Tiny::load(name)));
    }
    // A kernel may round all logits of a small model as f64 does.
    assert!(n_changed >= 3, "routers compute in f32: {n_changed} of 6 models change");
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    for name in ["llama", "mistral", "qwen3", "dots1", "glm4_moe"] {
        let (tiny, reference) = (Tiny::load(name), Reference::load(name));
        let packed = tiny.logits(&reference.ids, &reference.lengths);
        let mut start = 0;
        for &length in &reference.lengths {
            let ids = reference.ids.narrow(0, start, length).unwrap();
            let alone = tiny.logits(&ids, &[length]);
            assert_close(name, &packed.narrow(0, start, length).unwrap(), &alone);
            start += length;
        }
    }
}

#[test]
fn only_matrices_decay_and_initial_values_follow_transformers() {
    let tiny = Tiny::load("llama");
    let mut n_vectors = 0;
    for param in tiny.model.units().iter().flat_map(|unit| &unit.params) {
        assert_eq!(param.decay, param.shape.len() == 2, "{}", param.name);
        assert_eq!(param.numel(), tiny.grad(&param.name).elem_count());
        match param.name.as_str() {
            "model.embed_tokens.weight" => {
                assert_eq!(param.init, Init::Normal { std: 0.2, zero_row: Some(5) });
            }
            name if name.ends_with("bias") => assert_eq!(param.init, Init::Zeros),
            name if name.contains("norm") => assert_eq!(param.init, Init::Ones),
            _ => assert_eq!(param.init, Init::Normal { std: 0.2, zero_row: None }),
        }
        n_vectors += usize::from(!param.decay);
    }
    assert_eq!(n_vectors, 1 + 2 * (2 + 7));
}

#[test]
fn a_block_in_bf16_stays_in_bf16_and_near_f32() {
    let reference = Reference::load("qwen3");
    let exact = Tiny::load("qwen3");
    let model = exact.model.clone();
    let rounded = Tiny::with_weights(model, |param| exact.value(&param.name).unwrap().to_dtype(DType::BF16).unwrap());
    let normed = rounded.normed(&reference.ids, &reference.lengths).unwrap();
    assert_eq!(normed.dtype(), DType::BF16);
    let logits = rounded.model.logits(rounded.head(), &normed).unwrap();
    assert_eq!(logits.dtype(), DType::F32);
    let error = crate::tiny::relative_error(&logits, reference.get("logits"));
    assert!(error < 0.03, "{error}");
}

/// The forward equals torch's up to f32 rounding. Processors with bf16 instructions round attention's probabilities, as the
/// reference's second set of results does. In backward each gradient is
/// rounded to bf16 several times, by 2^-9 each.
#[test]
fn a_model_in_bf16_with_an_f32_residual_stream_is_torchs() {
    let (reference, exact) = (Reference::load("fp32_residual"), Tiny::load("qwen3"));
    let rounded = |model: Model| {
        Tiny::with_weights(model, |param| exact.value(&param.name).unwrap().to_dtype(DType::BF16).unwrap())
    };
    let get = |prefix: &str, name: &str| reference.get(&format!("{prefix}{name}")).to_dtype(DType::F32).unwrap();
    let logits = |tiny: &Tiny| tiny.logits(&reference.ids, &reference.lengths);
    let tiny = rounded(exact.model.clone().with_f32_residual());
    let ours = logits(&tiny);
    let error = |prefix: &&str| relative_error(&ours, &get(prefix, "logits"));
    let prefix = ["", "rounded."].into_iter().min_by(|a, b| error(a).total_cmp(&error(b))).unwrap();
    assert_close("logits", &ours, &get(prefix, "logits"));
    let (loss, want) = (tiny.loss_and_grads(&reference), get(prefix, "loss").to_scalar::<f32>().unwrap());
    assert!(((loss - want) / want).abs() < 1e-5, "loss {loss}, want {want}");
    for param in tiny.model.units().iter().flat_map(|unit| &unit.params) {
        let error = relative_error(&tiny.grad(&param.name), &get(prefix, &format!("grad.{}", param.name)));
        assert!(error < 2e-2, "{}: {error}", param.name);
    }
    let in_bf16 = relative_error(&logits(&rounded(exact.model.clone())), &get(prefix, "logits"));
    assert!(in_bf16 > 5e-3, "the residual stream has no effect: {in_bf16}");
}
