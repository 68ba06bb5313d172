//! Weights, losses and gradients of Megatron-LM and transformers, written by `tests/reference/moe_router.py`.

use std::sync::LazyLock;

use candle_core::{Device, Tensor};
use candlewick_ops::{
    DropPolicy, GroupLimit, RouterSpec, ScoreFunction, Tape, TokenSequences, TopKOrder, expert_bias_change,
    expert_capacity, expert_counts, limit_capacity, load_balancing_loss, no_grad, route, route_by, router_z_loss,
    scale, select_rows, sequence_load_balancing_loss, sinkhorn,
};
use serde_json::Value;

use super::router::SPEC;
use super::{devices, statistics, to_u32s, u32s};
use crate::cases::{assert_close, check_each, tape, values};

pub(super) static FIXTURE: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../fixtures/moe_router.json")).unwrap());

fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(all) => all.iter().flat_map(floats).collect(),
        number => vec![number.as_f64().unwrap() as f32],
    }
}

pub(super) fn matrix(value: &Value) -> Tensor {
    let rows = value.as_array().unwrap().len();
    let all = floats(value);
    let columns = all.len() / rows;
    Tensor::from_vec(all, (rows, columns), &Device::Cpu).unwrap()
}

fn vector(value: &Value) -> Tensor {
    Tensor::new(floats(value), &Device::Cpu).unwrap()
}

fn score(value: &Value) -> ScoreFunction {
    match value.as_str().unwrap() {
        "softmax" => ScoreFunction::Softmax,
        "sigmoid" => ScoreFunction::Sigmoid,
        "sqrt_softplus" => ScoreFunction::SqrtSoftplus,
        other => panic!("unknown score function {other}"),
    }
}

fn spec(settings: &Value) -> RouterSpec {
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let limit = |groups: &Value| GroupLimit {
        n_groups: number(&groups["n_groups"]),
        n_selected: number(&groups["n_selected"]),
        n_scores_per_group: number(&groups["n_scores_per_group"]),
    };
    RouterSpec {
        top_k: number(&settings["top_k"]),
        score: score(&settings["score"]),
        order: if settings["order"] == "score_first" { TopKOrder::ScoreFirst } else { TopKOrder::TopKFirst },
        normalize: settings["normalize"].as_bool().unwrap(),
        groups: Some(&settings["groups"]).filter(|groups| !groups.is_null()).map(limit),
        scaling: settings["scaling"].as_f64().unwrap(),
    }
}

#[test]
fn routing_equals_megatron_and_transformers() {
    let (logits, upstream) = (matrix(&FIXTURE["logits"]), matrix(&FIXTURE["upstream"]));
    let (t, e) = logits.dims2().unwrap();
    let cases = FIXTURE["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 13);
    check_each(cases.iter().flat_map(|case| devices().into_iter().map(move |d| (case, d))), |(case, test_device)| {
        let name = case["name"].as_str().unwrap();
        let spec = spec(&case["settings"]);
        let bias = case["settings"]["bias"].as_bool().unwrap().then(|| test_device.put(&vector(&FIXTURE["bias"])));
        let logits = test_device.put(&logits);
        let (weights, experts, tape) = test_device.run(|| {
            let mut experts = None;
            let tape = tape(std::slice::from_ref(&logits), || {
                let routing = route(&logits, bias.as_ref(), spec)?;
                experts = Some(routing.assignment.experts);
                Ok(routing.weights)
            });
            (values(tape.output()), to_u32s(&experts.unwrap()), tape)
        });
        let (mut dense, mut of_slots) = (vec![0.0; t * e], Vec::new());
        let upstream = values(&upstream);
        for (slot, (expert, weight)) in experts.iter().zip(weights).enumerate() {
            let at = slot / spec.top_k * e + *expert as usize;
            dense[at] = weight;
            of_slots.push(upstream[at] as f32);
        }
        let dense = Tensor::from_vec(dense, (t, e), &Device::Cpu).unwrap();
        assert_close(name, &dense, &matrix(&case["weights"]), 1e-6);
        let upstream = Tensor::from_vec(of_slots, (t, spec.top_k), &Device::Cpu).unwrap();
        let grads = test_device.run(|| tape.backward(&test_device.put(&upstream))).unwrap();
        assert_close(name, grads.get(&logits).unwrap(), &matrix(&case["grad"]), 2e-6);
    });
}

/// Compares a loss, times `factor`, and its gradient.
fn check_loss(tape: impl Fn(&Tensor) -> Tape, want: &Value) {
    for test_device in devices() {
        let logits = test_device.put(&matrix(&FIXTURE["logits"]));
        test_device.run(|| {
            let tape = tape(&logits);
            let value = Tensor::new(want["value"].as_f64().unwrap(), &Device::Cpu).unwrap();
            assert_close("loss", tape.output(), &value, 1e-6);
            let one = test_device.put(&Tensor::new(1f32, &Device::Cpu).unwrap());
            let grad = tape.backward(&one).unwrap().remove(&logits).unwrap();
            assert_close("gradient", &grad, &matrix(&want["grad"]), 2e-6);
        });
    }
}

fn scaled(logits: &Tensor, factor: f64, loss: impl FnOnce() -> candle_core::Result<Tensor>) -> Tape {
    tape(std::slice::from_ref(logits), || scale(&loss()?, factor, candle_core::DType::F32))
}

#[test]
fn losses_equal_those_of_megatron() {
    let t = FIXTURE["logits"].as_array().unwrap().len() as f64;
    for want in FIXTURE["load_balancing"].as_array().unwrap() {
        let counts = vector(&want["counts"]);
        let factor = counts.elem_count() as f64 / (want["top_k"].as_f64().unwrap() * t * t);
        let loss = |logits: &Tensor| {
            let counts = counts.to_device(logits.device())?;
            load_balancing_loss(logits, &statistics(logits, score(&want["score"]))?, &counts)
        };
        check_loss(|logits| scaled(logits, factor, || loss(logits)), want);
    }
    check_loss(
        |logits| scaled(logits, 1.0 / t, || router_z_loss(logits, &statistics(logits, ScoreFunction::Sigmoid)?)),
        &FIXTURE["z_loss"],
    );
}

#[test]
fn the_loss_of_sequences_equals_that_of_megatron() {
    for want in FIXTURE["sequence_load_balancing"].as_array().unwrap() {
        let number = |key: &str| want[key].as_u64().unwrap() as usize;
        let (n_tokens, n_sequences, top_k) = (number("n_tokens"), number("n_sequences"), number("top_k"));
        let length = n_tokens / n_sequences;
        let of_tokens: Vec<u32> = (0..n_tokens).map(|token| (token / length) as u32).collect();
        let loss = |logits: &Tensor| {
            let own = select_rows(logits, &Tensor::arange(0, n_tokens as u32, logits.device())?)?;
            let of_tokens = u32s(&of_tokens).to_device(logits.device())?;
            let sequences = TokenSequences { of_tokens: &of_tokens, n_sequences };
            let spec = RouterSpec { top_k, score: score(&want["score"]), order: TopKOrder::ScoreFirst, ..SPEC };
            let experts = no_grad(|| route(&own, None, spec))?.assignment.experts;
            let counts = expert_counts(&experts, Some(sequences), own.dim(1)?)?;
            sequence_load_balancing_loss(&own, &counts, sequences, spec.score)
        };
        let factor = 16.0 / (top_k * length * length * n_sequences) as f64;
        check_loss(|logits| scaled(logits, factor, || loss(logits)), want);
    }
}

#[test]
fn sinkhorn_equals_that_of_megatron_and_chooses_experts() {
    let want = matrix(&FIXTURE["sinkhorn"]);
    for test_device in devices() {
        test_device.run(|| {
            let logits = test_device.put(&matrix(&FIXTURE["logits"]));
            let balanced = sinkhorn(&logits).unwrap();
            assert_close("sinkhorn", &balanced, &want, 1e-6);
            let spec = RouterSpec { top_k: 2, order: TopKOrder::ScoreFirst, ..SPEC };
            let experts = to_u32s(&route_by(&logits, &balanced, spec).unwrap().assignment.experts);
            let by_scores = route(&balanced, None, RouterSpec { order: TopKOrder::TopKFirst, ..spec }).unwrap();
            assert_eq!(experts, to_u32s(&by_scores.assignment.experts));
        });
    }
}

#[test]
fn the_capacity_limit_drops_what_megatron_drops() {
    for want in FIXTURE["capacity"].as_array().unwrap() {
        for test_device in devices() {
            test_device.run(|| {
                let logits = test_device.put(&matrix(&FIXTURE["logits"]));
                let (t, e) = logits.dims2().unwrap();
                let top_k = want["top_k"].as_u64().unwrap() as usize;
                let routing = route(&logits, None, RouterSpec { top_k, ..SPEC }).unwrap();
                let policy = if want["policy"] == "probs" { DropPolicy::Weights } else { DropPolicy::Position };
                let capacity = expert_capacity(t, top_k, e, want["factor"].as_f64().unwrap());
                let limited = limit_capacity(&routing, capacity, policy).unwrap();
                let mut kept = vec![0.0; t * e];
                for (slot, expert) in to_u32s(&limited.assignment.experts).iter().enumerate() {
                    if *expert != u32::MAX {
                        kept[slot / top_k * e + *expert as usize] = 1.0;
                    }
                }
                assert_eq!(kept, values(&matrix(&want["kept"])));
            });
        }
    }
}

#[test]
fn an_expert_bias_moves_as_in_megatron() {
    let want = &FIXTURE["updated_bias"];
    for test_device in devices() {
        test_device.run(|| {
            let change = expert_bias_change(&test_device.put(&vector(&want["counts"])), want["rate"].as_f64().unwrap());
            let moved = values(&change.unwrap()).into_iter().zip(floats(&FIXTURE["bias"]));
            let moved: Vec<f32> = moved.map(|(change, bias)| bias + change as f32).collect();
            assert_eq!(moved, floats(&want["updated"]));
        });
    }
}
