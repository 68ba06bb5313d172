//! A whole layer of experts: its output and gradients, what it saves, and its independence of threads.

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{
    DropPolicy, ExpertAssignment, RouterSpec, Routing, ScoreFunction, TokensPerCall, TopKOrder, Weight, grouped_linear,
    limit_capacity, load_balancing_loss, permute, permute_weights, route, router_z_loss, unpermute, weighted_swiglu,
};

use super::{devices, statistics, to_u32s};
use crate::cases::{OpCase, bits, grad_of, randn, tape, trainable};

const T: usize = 61;
const D: usize = 24;
const F: usize = 20;
const E: usize = 7;
const SPEC: RouterSpec = RouterSpec {
    top_k: 3,
    score: ScoreFunction::Sigmoid,
    order: TopKOrder::ScoreFirst,
    normalize: true,
    groups: None,
    scaling: 1.5,
};

/// Computes a layer of x [t, d] and logits [t, e] with gate and up [e * 2f, d] and down [e * d, f].
fn experts(x: &Tensor, logits: &Tensor, [gate_up, down]: [&Weight; 2]) -> Result<Tensor> {
    let routing = route(logits, None, SPEC)?;
    compute(x, &routing, &routing.assignment, [gate_up, down])
}

/// Computes a layer whose experts are selected, with the rows of `assignment`.
fn compute(
    x: &Tensor,
    routing: &Routing,
    assignment: &ExpertAssignment,
    [gate_up, down]: [&Weight; 2],
) -> Result<Tensor> {
    let rows = permute(x, assignment)?;
    let hidden = grouped_linear(&rows, gate_up, &assignment.offsets, TokensPerCall::Many)?;
    let hidden = weighted_swiglu(&hidden, &permute_weights(&routing.weights, assignment)?)?;
    unpermute(&grouped_linear(&hidden, down, &assignment.offsets, TokensPerCall::Many)?, assignment)
}

/// Computes every expert for every token, weighted by 0 where it was not chosen.
fn reference(a: &[Tensor]) -> Result<Tensor> {
    let [x, logits, gate_up, down] = a else { unreachable!("four operands") };
    let chosen = route(&logits.to_dtype(DType::F32)?.detach(), None, SPEC)?.assignment.experts;
    let mut mask = vec![0.0f64; T * E];
    to_u32s(&chosen).iter().enumerate().for_each(|(slot, expert)| mask[slot / SPEC.top_k * E + *expert as usize] = 1.0);
    let mask = Tensor::from_vec(mask, (T, E), &Device::Cpu)?;
    let scores = (((logits.neg()?.exp()? + 1.0)?.recip())? * mask)?;
    let weights = (scores.broadcast_div(&scores.sum_keepdim(1)?)? * SPEC.scaling)?;
    let mut sum = x.zeros_like()?;
    for expert in 0..E {
        let hidden = x.matmul(&gate_up.narrow(0, expert * 2 * F, 2 * F)?.t()?)?;
        let hidden = (hidden.narrow(1, 0, F)?.silu()? * hidden.narrow(1, F, F)?)?;
        let y = hidden.matmul(&down.narrow(0, expert * D, D)?.t()?)?;
        sum = (sum + y.broadcast_mul(&weights.narrow(1, expert, 1)?)?)?;
    }
    Ok(sum)
}

#[test]
fn it_equals_the_sum_over_all_experts() {
    OpCase {
        name: "experts",
        inputs: vec![randn((T, D), 1), randn((T, E), 2)],
        weights: vec![randn((E * 2 * F, D), 3), randn((E * D, F), 4)],
        op: &|x, w| experts(&x[0], &x[1], [&w[0], &w[1]]),
        reference: &reference,
    }
    .check_on(&devices(), DType::F32);
}

#[test]
fn results_are_the_same_bits_for_any_number_of_threads() {
    let on = |n_threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        pool.install(|| {
            let (t, d, f, e) = (900, 64, 48, 5);
            let inputs = [randn((t, d), 1), randn((t, e), 2)];
            let weights = [trainable(&randn((e * 2 * f, d), 3)), trainable(&randn((e * d, f), 4))];
            let tape = tape(&inputs, || experts(&inputs[0], &inputs[1], [&weights[0], &weights[1]]));
            let y = tape.output().clone();
            let grads = tape.backward(&randn((t, d), 5)).unwrap();
            let counts = Tensor::ones(e, DType::F32, &Device::Cpu).unwrap();
            let of_logits = statistics(&inputs[1], ScoreFunction::Sigmoid).unwrap();
            let losses = [
                load_balancing_loss(&inputs[1], &of_logits, &counts).unwrap(),
                router_z_loss(&inputs[1], &of_logits).unwrap(),
                of_logits.totals().unwrap(),
            ];
            let grads = inputs.iter().map(|x| grads.get(x).unwrap().clone());
            let all = std::iter::once(y).chain(grads).chain(weights.iter().map(grad_of)).chain(losses);
            all.map(|x| bits(&x)).collect::<Vec<_>>()
        })
    };
    let one = on(1);
    for n_threads in [2, 3] {
        assert!(on(n_threads) == one, "{n_threads} threads");
    }
}

#[test]
fn experts_padded_to_their_capacity_give_the_bits_of_those_without_padding() {
    let (t, capacity) = (200, 70);
    for (test_device, policy) in devices()
        .into_iter()
        .flat_map(|device| [DropPolicy::Weights, DropPolicy::Position].map(|p| (device.clone(), p)))
    {
        let inputs = [randn((t, D), 1), randn((t, E), 2)].map(|x| test_device.put(&x));
        let results = |padding: Option<usize>| {
            let weights = [randn((E * 2 * F, D), 3), randn((E * D, F), 4)].map(|w| trainable(&test_device.put(&w)));
            let tape = tape(&inputs, || {
                let routing = limit_capacity(&route(&inputs[1], None, SPEC)?, capacity, policy)?;
                let assignment = &routing.assignment;
                let assignment = padding.map_or(Ok(assignment.clone()), |n_rows| assignment.padded_to(n_rows))?;
                compute(&inputs[0], &routing, &assignment, [&weights[0], &weights[1]])
            });
            let y = tape.output().clone();
            let grads = tape.backward(&test_device.put(&randn((t, D), 5))).unwrap();
            let grads = inputs.iter().map(|x| grads.get(x).unwrap().clone());
            std::iter::once(y).chain(grads).chain(weights.iter().map(grad_of)).map(|x| bits(&x)).collect::<Vec<_>>()
        };
        let plain = test_device.run(|| results(None));
        for n_rows in [capacity, capacity + 9] {
            assert!(test_device.run(|| results(Some(n_rows))) == plain, "{policy:?}, {n_rows} rows");
        }
    }
}
