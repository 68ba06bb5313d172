//! Softmax, cross-entropy and AdamW compared with candle-nn, which shares no code with this crate above candle-core.
//!
//! The relative tolerance is 1e-5. Both sides compute in f32 (6e-8 per rounding) and add at most some hundred terms, in
//! different orders.

use ::candle_nn::optim::{AdamW as Reference, Optimizer, ParamsAdamW};
use candle_core::{DType, Device, Tensor, Var};
use candlewick_ops::{
    AdamW, AdamWState, AdamWStep, AttentionChoice, AttentionSpec, CrossEntropy, CuSeqlens, GradPolicy, GradScaler,
    LossGrad, Reduction, adamw, attention, linear_cross_entropy,
};

use crate::cases::{grad_of, randn, relative_error, trainable};

const TOLERANCE: f64 = 1e-5;

#[track_caller]
fn assert_near(what: &str, ours: &Tensor, reference: &Tensor) {
    let error = relative_error(ours, reference, 0.0);
    assert!(error < TOLERANCE, "{what}: relative error {error:.2e}");
}

fn var(x: &Tensor) -> Var {
    Var::from_tensor(&x.to_dtype(DType::F32).unwrap()).unwrap()
}

/// With one head and sequence and no mask, attention is a softmax between two matmuls.
#[test]
fn attention_computes_candle_nns_softmax() {
    for (t, s, d) in [(1, 1, 4), (3, 17, 8), (64, 130, 16)] {
        let [q, k, v] = [((t, d), 1), ((s, d), 2), ((s, d), 3)].map(|(shape, seed)| var(&randn(shape, seed)));
        let scores = (q.matmul(&k.t().unwrap()).unwrap() * 0.3).unwrap();
        let want = ::candle_nn::ops::softmax(&scores, 1).unwrap().matmul(&v).unwrap();
        let seqs = CuSeqlens::from_q_and_k(vec![0, t], vec![0, s]).unwrap();
        let spec = AttentionSpec { scale: 0.3, causal: false, window: None, choice: AttentionChoice::default() };
        let [q, k, v] = [&q, &k, &v].map(|x| x.unsqueeze(1).unwrap());
        let ours = attention(&q, &k, &v, &seqs, &spec).unwrap().squeeze(1).unwrap();
        assert_near(&format!("{t} queries, {s} keys"), &ours, &want);
    }
}

#[test]
fn loss_and_gradients_are_candle_nns_cross_entropy() {
    for (t, classes, d, chunk) in [(1, 2, 3, 1), (7, 33, 8, 3), (40, 101, 16, 40)] {
        let (x, w) = (var(&randn((t, d), 1)), var(&randn((classes, d), 2)));
        let ids: Vec<i64> = (0..t).map(|i| (i * 31 % classes) as i64).collect();
        let targets = Tensor::new(ids, &Device::Cpu).unwrap();
        let logits = x.matmul(&w.t().unwrap()).unwrap();
        let want = ::candle_nn::loss::cross_entropy(&logits, &targets).unwrap();
        let grads = want.backward().unwrap();
        let weight = trainable(w.as_tensor());
        let spec = CrossEntropy { reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0, chunk };
        let ours = linear_cross_entropy(x.as_tensor(), &weight, &targets, &spec, LossGrad::Scalar(1.0)).unwrap();
        assert_near("loss", &ours.loss, &want);
        assert_near("dx", &ours.dx.unwrap(), grads.get(&x).unwrap());
        assert_near("dw", &grad_of(&weight), grads.get(&w).unwrap());
    }
}

#[test]
fn ten_steps_are_candle_nns_adamw() {
    let n = 100;
    let (lr, beta1, beta2, eps, weight_decay) = (0.05, 0.9, 0.95, 1e-8, 0.1);
    let theirs = var(&randn(n, 1));
    let params = ParamsAdamW { lr, beta1, beta2, eps, weight_decay };
    let mut optimizer = Reference::new(vec![theirs.clone()], params).unwrap();
    let hyper = AdamW { lr, beta1, beta2, eps, weight_decay };
    let master = randn(n, 1).to_dtype(DType::F32).unwrap().copy().unwrap();
    let zeros = || Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap();
    let (exp_avg, exp_avg_sq) = (zeros(), zeros());
    let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu).unwrap();
    for step in 0..10 {
        let grad = randn(n, 10 + step).to_dtype(DType::F32).unwrap();
        let loss = (theirs.as_tensor() * &grad).unwrap().sum_all().unwrap();
        optimizer.backward_step(&loss).unwrap();
        let squares = Tensor::new(&[1f64], &Device::Cpu).unwrap();
        scaler.update(&squares, &Tensor::new(&[1f32], &Device::Cpu).unwrap()).unwrap();
        let state =
            AdamWState { master: &master, grad: &grad, exp_avg: &exp_avg, exp_avg_sq: &exp_avg_sq, compute: None };
        adamw(&hyper, &AdamWStep::new(&hyper, &scaler).unwrap(), state).unwrap();
    }
    assert_near("weights", &master, theirs.as_tensor());
}
