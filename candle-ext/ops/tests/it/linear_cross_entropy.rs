use std::sync::{Barrier, Mutex};
use std::thread;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candlewick_ops::{
    CrossEntropy, LossAndGrad, LossGrad, Reduction, TokenScores, VocabShard, Weight, linear_cross_entropy,
    token_scores, vocab_parallel_cross_entropy,
};

use crate::cases::{
    F32, TestDevice, assert_close, assert_close_above, assert_error, assert_slope, bits, bound, check_each, dot,
    grad_of, norm, randn, trainable, values,
};

const IGNORED: i64 = -100;

fn spec(reduction: Reduction, chunk: usize) -> CrossEntropy {
    CrossEntropy { reduction, ignore_index: IGNORED, label_smoothing: 0.0, chunk }
}

fn smoothed(reduction: Reduction, label_smoothing: f32, chunk: usize) -> CrossEntropy {
    CrossEntropy { label_smoothing, ..spec(reduction, chunk) }
}

fn targets(targets: &[i64]) -> Tensor {
    Tensor::new(targets, &Device::Cpu).unwrap()
}

/// Returns targets of which every third is ignored, the others spread over the vocabulary.
fn some_targets(t: usize, v: usize) -> Tensor {
    let of = |i: usize| if i % 3 == 1 { IGNORED } else { (i * 31 % v) as i64 };
    targets(&(0..t).map(of).collect::<Vec<_>>())
}

/// Computes the loss in plain candle ops.
fn reference(x: &Tensor, w: &Tensor, targets: &Tensor, spec: &CrossEntropy) -> Result<Tensor> {
    let smoothing = f64::from(spec.label_smoothing);
    let logits = x.matmul(&w.t()?)?;
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
    let log_p = shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(D::Minus1)?.log()?)?;
    let counts = targets.ne(IGNORED)?;
    let class = (targets * counts.to_dtype(DType::I64)?)?;
    let of_target = log_p.gather(&class.unsqueeze(1)?, 1)?.squeeze(1)?.neg()?;
    let losses = ((of_target * (1.0 - smoothing))? - (log_p.mean(D::Minus1)? * smoothing)?)?;
    let counts = counts.to_dtype(DType::F64)?;
    let losses = (losses * &counts)?;
    match spec.reduction {
        Reduction::Mean => losses.sum_all()? / counts.sum_all()?.to_scalar::<f64>()?,
        Reduction::Sum => losses.sum_all(),
        Reduction::None => Ok(losses),
    }
}

#[track_caller]
fn check(sizes: (usize, usize, usize), spec: CrossEntropy, dtype: DType) {
    check_each(TestDevice::all(), |test_device| {
        test_device.run(|| check_in(&test_device, sizes, &spec, dtype));
    });
}

#[track_caller]
fn check_in(test_device: &TestDevice, (t, v, d): (usize, usize, usize), spec: &CrossEntropy, dtype: DType) {
    let x = test_device.put(&randn((t, d), 1).to_dtype(dtype).unwrap());
    // Scales logits to a realistic size for any d.
    let root_d = (d as f64).sqrt();
    let w = (randn((v, d), 2) * (4.0 / root_d)).unwrap();
    let w = trainable(&test_device.put(&w.to_dtype(dtype).unwrap()));
    let targets = some_targets(t, v);
    let rows = randn(t, 3);
    let upstream = match spec.reduction {
        Reduction::None => LossGrad::PerToken(&rows),
        _ => LossGrad::Scalar(0.7),
    };
    let got = linear_cross_entropy(&x, &w, &targets, spec, upstream).unwrap();

    let what = |result: &str| format!("{result} of {t} tokens, {v} classes, {spec:?}, {dtype:?} {test_device:?}");
    let exact = |x: &Tensor| {
        let host = x.to_device(&Device::Cpu).unwrap();
        Var::from_tensor(&host.to_dtype(DType::F64).unwrap()).unwrap()
    };
    let (x, w_exact) = (exact(&x), exact(&w.value().unwrap()));
    let want = reference(&x, &w_exact, &targets, spec).unwrap();
    // A confident and right prediction leaves only the rounding of its logits.
    assert_close_above(&what("loss"), &got.loss, &want, F32, 0.1);
    let dy = match spec.reduction {
        Reduction::None => rows.to_dtype(DType::F64).unwrap(),
        _ => Tensor::new(0.7, &Device::Cpu).unwrap(),
    };
    let floor = 0.1 * norm(&dy);
    let grads = (want * dy).unwrap().sum_all().unwrap().backward().unwrap();
    assert_close_above(&what("dx"), &got.dx.unwrap(), grads.get(&x).unwrap(), bound(dtype), 4.0 * floor);
    // A GPU rounds the gradient of the logits to the weight's dtype before the matmul, and so does a CPU with
    // instructions for bf16.
    let is_exact = matches!(test_device, TestDevice::Cpu) && dtype != DType::BF16;
    let bound = if is_exact { F32 } else { bound(dtype) };
    assert_close_above(&what("dw"), &grad_of(&w), grads.get(&w_exact).unwrap(), bound, root_d * floor);
}

#[test]
fn it_equals_the_reference() {
    let small = [((23, 301, 32), 4), ((23, 301, 32), 1000), ((23, 304, 32), 7), ((1, 5, 3), 1), ((2, 1, 1), 3)];
    let mut cases = vec![
        ((9, 300, 2560), 4, Reduction::Mean, DType::F32),
        ((5, 3001, 16), 2, Reduction::Mean, DType::BF16),
        ((5, 5000, 16), 2, Reduction::Mean, DType::BF16),
    ];
    for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            cases.extend(small.map(|(sizes, chunk)| (sizes, chunk, reduction, dtype)));
        }
    }
    check_each(cases, |(sizes, chunk, reduction, dtype)| check(sizes, spec(reduction, chunk), dtype));
}

#[test]
fn label_smoothing_equals_the_reference() {
    let small = [((23, 301, 32), 4), ((23, 304, 32), 7), ((9, 3001, 16), 4), ((1, 5, 3), 1), ((2, 1, 1), 3)];
    for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for label_smoothing in [0.1, 0.9] {
                check_each(small, |(sizes, chunk)| check(sizes, smoothed(reduction, label_smoothing, chunk), dtype));
            }
        }
    }
}

/// Expected values: torch 2.15 in f64, `cross_entropy(logits, targets, label_smoothing=0.2, reduction=...)`, and the
/// gradient of the mean.
#[test]
fn label_smoothing_equals_torch() {
    let logits = [[1f32, -2.0, 0.5, 3.0], [0.0, 0.25, -1.0, 2.0], [4.0, 4.0, -4.0, 1.0]];
    let losses = [0.6772534476793519, 0.0, 7.667899562581537];
    let dx = [
        [0.030276875180869613, -0.022247926436208165, 0.00852711957030574, -0.0165560683149672],
        [0.0; 4],
        [0.21888786154998482, 0.21888786154998482, -0.42491818473705095, -0.012857538362918773],
    ];
    let [losses, mean_loss, dx, x] = [
        Tensor::new(&losses, &Device::Cpu),
        Tensor::new(4.172576505130444, &Device::Cpu),
        Tensor::new(&dx, &Device::Cpu),
        Tensor::new(&logits, &Device::Cpu),
    ]
    .map(Result::unwrap);
    let targets = targets(&[3, IGNORED, 2]);
    check_each(TestDevice::all(), |test_device| {
        let w = Weight::frozen(test_device.put(&Tensor::eye(4, DType::F32, &Device::Cpu).unwrap()));
        let run = |reduction, upstream| {
            let (x, spec) = (test_device.put(&x), smoothed(reduction, 0.2, 2));
            test_device.run(|| linear_cross_entropy(&x, &w, &targets, &spec, upstream).unwrap())
        };
        let what = |of: &str| format!("{of}, {test_device:?}");
        assert_close(&what("losses"), &run(Reduction::None, LossGrad::NoGrad).loss, &losses, F32);
        let mean = run(Reduction::Mean, LossGrad::Scalar(1.0));
        assert_close(&what("mean"), &mean.loss, &mean_loss, F32);
        assert_close(&what("dx"), &mean.dx.unwrap(), &dx, F32);
    });
}

/// The loss scale of fp16 is a tensor.
#[test]
fn a_loss_scale_multiplies_the_gradients_of_a_smoothed_loss() {
    check_each(TestDevice::all(), |test_device| {
        let (x, w) = (test_device.put(&randn((7, 6), 1)), test_device.put(&randn((11, 6), 2)));
        let factor = test_device.put(&Tensor::new(8f32, &Device::Cpu).unwrap());
        let (targets, spec) = (some_targets(7, 11), smoothed(Reduction::Sum, 0.3, 3));
        let run = |upstream| {
            let w = trainable(&w);
            let out = test_device.run(|| linear_cross_entropy(&x, &w, &targets, &spec, upstream)).unwrap();
            [bits(&out.dx.unwrap()), bits(&grad_of(&w))]
        };
        assert_eq!(run(LossGrad::Scaled(0.25, &factor)), run(LossGrad::Scalar(2.0)), "{test_device:?}");
    });
}

#[test]
fn the_gradient_is_the_slope() {
    let (x, w, targets) = (randn((7, 6), 1), randn((11, 6), 2), some_targets(7, 11));
    let (dx, dw) = (randn((7, 6), 3), randn((11, 6), 4));
    let spec = smoothed(Reduction::Mean, 0.2, 3);
    let run = |h: f64| {
        let x = (&x + (&dx * h).unwrap()).unwrap();
        let w = trainable(&(&w + (&dw * h).unwrap()).unwrap());
        let out = linear_cross_entropy(&x, &w, &targets, &spec, LossGrad::Scalar(1.0)).unwrap();
        (out, w)
    };
    let loss = |h| f64::from(run(h).0.loss.to_scalar::<f32>().unwrap());
    let want = (loss(1e-2) - loss(-1e-2)) / 2e-2;
    let (out, w) = run(0.0);
    let grads = [&out.dx.unwrap(), &grad_of(&w)];
    let got = dot(grads[0], &dx) + dot(grads[1], &dw);
    assert_slope("linear_cross_entropy", got, want, &grads);
}

#[test]
fn the_loss_alone_is_the_same_and_leaves_no_gradient() {
    let (x, w, targets) = (randn((9, 6), 1), trainable(&randn((11, 6), 2)), some_targets(9, 11));
    let reductions = [Reduction::Mean, Reduction::Sum, Reduction::None];
    for (reduction, label_smoothing) in reductions.into_iter().flat_map(|kind| [(kind, 0.0), (kind, 0.1)]) {
        let spec = smoothed(reduction, label_smoothing, 4);
        let run = |upstream| linear_cross_entropy(&x, &w, &targets, &spec, upstream).unwrap();
        let only = run(LossGrad::NoGrad);
        assert!(only.dx.is_none());
        assert_eq!(bits(&grad_of(&w)), [0; 66]);
        let rows = randn(9, 5);
        let with = match reduction {
            Reduction::None => run(LossGrad::PerToken(&rows)),
            _ => run(LossGrad::Scalar(1.0)),
        };
        assert_eq!(bits(&only.loss), bits(&with.loss));
        candlewick_ops::zero_(&grad_of(&w)).unwrap();
    }
}

#[test]
fn a_frozen_head_still_gives_the_input_its_gradient() {
    let (x, w, targets) = (randn((9, 6), 1), randn((11, 6), 2), some_targets(9, 11));
    let run = |w: &Weight| {
        let spec = spec(Reduction::Sum, 4);
        linear_cross_entropy(&x, w, &targets, &spec, LossGrad::Scalar(2.0)).unwrap().dx.unwrap()
    };
    assert_eq!(bits(&run(&Weight::frozen(w.clone()))), bits(&run(&trainable(&w))));
}

#[test]
fn ignored_tokens_give_and_get_nothing() {
    let w = trainable(&randn((11, 6), 2));
    // A NaN in an ignored row would spread to every result that reads it.
    let x = Tensor::cat(&[randn((1, 6), 1), (randn((1, 6), 1) * f64::NAN).unwrap()], 0).unwrap();
    let spec = spec(Reduction::Mean, 4);
    let out = linear_cross_entropy(&x, &w, &targets(&[3, IGNORED]), &spec, LossGrad::Scalar(1.0));
    let LossAndGrad { loss, dx } = out.unwrap();
    assert!(loss.to_scalar::<f32>().unwrap().is_finite());
    let dx = values(&dx.unwrap());
    assert!(dx[..6].iter().all(|x| x.is_finite() && *x != 0.0));
    assert_eq!(dx[6..], [0.0; 6]);
    assert!(values(&grad_of(&w)).iter().all(|x| x.is_finite()));
}

#[test]
fn all_tokens_ignored_is_a_loss_of_zero() {
    for (t, reduction) in [(3, Reduction::Mean), (3, Reduction::Sum), (0, Reduction::Mean)] {
        let (x, w) = (randn((t, 6), 1), trainable(&randn((11, 6), 2)));
        let all = targets(&vec![IGNORED; t]);
        let spec = spec(reduction, 4);
        let out = linear_cross_entropy(&x, &w, &all, &spec, LossGrad::Scalar(1.0)).unwrap();
        assert_eq!(out.loss.to_scalar::<f32>().unwrap(), 0.0);
        assert_eq!(values(&out.dx.unwrap()), vec![0.0; t * 6]);
        assert_eq!(values(&grad_of(&w)), [0.0; 66]);
    }
}

#[test]
fn large_logits_do_not_overflow() {
    let x = (randn((2, 4), 1) * 1e4).unwrap();
    let w = Weight::frozen(randn((7, 4), 2));
    let spec = spec(Reduction::None, 8);
    let out = linear_cross_entropy(&x, &w, &targets(&[0, 6]), &spec, LossGrad::NoGrad).unwrap();
    let exact = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
    let want = reference(&exact(&x), &exact(&w.value().unwrap()), &targets(&[0, 6]), &spec).unwrap();
    assert_close("loss", &out.loss, &want, F32);
}

#[test]
fn scores_are_the_losses_and_say_what_is_likeliest() {
    check_each(TestDevice::all(), |test_device| {
        for dtype in [DType::F32, DType::BF16] {
            for (t, v, d, chunk) in [(11, 301, 32, 4), (11, 304, 32, 4), (3, 1201, 16, 100), (1, 1, 1, 1), (0, 7, 3, 2)]
            {
                check_scores(&test_device, (t, v, d), chunk, dtype);
            }
        }
    });
}

#[track_caller]
fn check_scores(test_device: &TestDevice, (t, v, d): (usize, usize, usize), chunk: usize, dtype: DType) {
    let x = test_device.put(&randn((t, d), 1).to_dtype(dtype).unwrap());
    let w = Weight::frozen(test_device.put(&randn((v, d), 2).to_dtype(dtype).unwrap()));
    let exact = |x: &Tensor| x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    let logits = exact(&x).matmul(&exact(&w.value().unwrap()).t().unwrap()).unwrap().to_vec2::<f32>().unwrap();
    let largest = |row: &Vec<f32>| (0..v).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
    // Every other target has the largest logit.
    let of = |(i, row): (usize, &Vec<f32>)| if i % 2 == 0 { largest(row) } else { (i * 31 % v) as u32 };
    let ids: Vec<u32> = logits.iter().enumerate().map(of).collect();
    let got = test_device.run(|| token_scores(&x, &w, &ids, chunk)).unwrap();
    let is_greedy: Vec<bool> = ids.iter().zip(&logits).map(|(id, row)| *id == largest(row)).collect();
    assert_eq!(got.is_greedy, is_greedy, "{t} {v} {d} {dtype:?} {test_device:?}");
    let spec = spec(Reduction::None, chunk);
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let losses =
        test_device.run(|| linear_cross_entropy(&x, &w, &targets(&ids), &spec, LossGrad::NoGrad)).unwrap().loss;
    let negated: Vec<f32> = losses.to_vec1::<f32>().unwrap().iter().map(|loss| -loss).collect();
    assert_eq!(got.logprobs, negated, "{t} {v} {d} {dtype:?} {test_device:?}");
}

#[test]
fn of_equal_logits_the_first_is_the_likeliest() {
    check_each(TestDevice::all(), |test_device| {
        let x = test_device.put(&Tensor::ones((4, 1), DType::F32, &Device::Cpu).unwrap());
        let w = Weight::frozen(test_device.put(&Tensor::new(&[[1f32], [3.0], [2.0], [3.0]], &Device::Cpu).unwrap()));
        let TokenScores { is_greedy, .. } = test_device.run(|| token_scores(&x, &w, &[0, 1, 2, 3], 3)).unwrap();
        assert_eq!(is_greedy, [false, true, false, false], "{test_device:?}");
    });
}

#[test]
fn wrong_arguments_are_named() {
    let (x, w) = (randn((2, 4), 1), Weight::frozen(randn((7, 4), 2)));
    let ok = targets(&[0, 1]);
    let rows = randn(2, 1);
    let run = |x: &Tensor, targets: &Tensor, reduction, chunk, upstream| {
        linear_cross_entropy(x, &w, targets, &spec(reduction, chunk), upstream)
    };
    let (sum, none) = (Reduction::Sum, Reduction::None);
    let one = LossGrad::Scalar(1.0);
    assert_error(run(&x, &targets(&[0, 7]), sum, 4, one), "target 7 in row 1 is not in 0..7");
    assert_error(run(&x, &targets(&[-1, 0]), sum, 4, one), "target -1 in row 0");
    assert_error(run(&x, &targets(&[1]), sum, 4, one), "targets are I64 [1], want i64 [2]");
    assert_error(run(&x, &ok.to_dtype(DType::U32).unwrap(), sum, 4, one), "targets are U32");
    assert_error(run(&x, &ok, sum, 0, one), "a chunk of 0 tokens");
    assert_error(run(&x, &ok, none, 4, one), "need a gradient per token");
    assert_error(run(&x, &ok, sum, 4, LossGrad::PerToken(&rows)), "a reduced loss needs one gradient");
    for label_smoothing in [-0.1, 1.0, f32::NAN] {
        let spec = smoothed(sum, label_smoothing, 4);
        let result = linear_cross_entropy(&x, &w, &ok, &spec, one);
        assert_error(result, &format!("a label smoothing of {label_smoothing}, want at least 0 and below 1"));
    }
    let short = randn(1, 1);
    assert_error(run(&x, &ok, none, 4, LossGrad::PerToken(&short)), "per-token loss gradients are F32 [1]");
    assert_error(run(&randn((2, 5), 1), &ok, sum, 4, one), "weight has shape [7, 4], want [7, 5]");
    assert_error(token_scores(&x, &w, &[0, 7], 4), "target 7 in row 1 is not in 0..7");
    assert_error(token_scores(&x, &w, &[0], 4), "targets are I64 [1], want i64 [2]");
}

/// Computes a loss over `parts` vocabulary shards, one thread each. Returns loss, dx and dw of each.
fn in_parts(
    test_device: &TestDevice,
    x: &Tensor,
    w: &Tensor,
    parts: &[std::ops::Range<usize>],
    targets: &Tensor,
    (spec, upstream): (&CrossEntropy, LossGrad<'_>),
) -> Vec<(LossAndGrad, Tensor)> {
    let meeting = Barrier::new(parts.len());
    let given = Mutex::new(vec![None; parts.len()]);
    let gather = |part_idx: usize, own: &Tensor| {
        given.lock().unwrap()[part_idx] = Some(own.clone());
        meeting.wait();
        let all = given.lock().unwrap().iter().flatten().cloned().collect::<Vec<Tensor>>();
        meeting.wait();
        Tensor::cat(&all, 0)
    };
    let run = |part_idx: usize| {
        let rows = parts[part_idx].clone();
        let gather = |own: &Tensor| gather(part_idx, own);
        let max_shard_rows = parts.iter().map(ExactSizeIterator::len).max().unwrap();
        let part = VocabShard { first_row: rows.start, n_vocab: w.dims()[0], max_shard_rows, all_gather: &gather };
        test_device.run(|| {
            let w = trainable(&w.narrow(0, rows.start, rows.len()).unwrap().copy().unwrap());
            let out = vocab_parallel_cross_entropy(x, &w, targets, spec, upstream, &part).unwrap();
            (out, grad_of(&w))
        })
    };
    thread::scope(|scope| {
        let parts: Vec<_> = (0..parts.len()).map(|part_idx| scope.spawn(move || run(part_idx))).collect();
        parts.into_iter().map(|part| part.join().unwrap()).collect()
    })
}

/// A shard may have none of the targets; the last one may be shorter.
#[test]
fn vocabulary_shards_give_the_loss_and_gradients_of_the_whole_head() {
    check_each(TestDevice::all(), |test_device| {
        for (dtype, chunk) in [(DType::F32, 4), (DType::F32, 100), (DType::BF16, 5)] {
            for label_smoothing in [0.0, 0.3] {
                for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                    check_shards(&test_device, &smoothed(reduction, label_smoothing, chunk), dtype);
                }
            }
        }
    });
}

#[track_caller]
fn check_shards(test_device: &TestDevice, spec: &CrossEntropy, dtype: DType) {
    let (t, v, d) = (13, 31, 8);
    let put = |x: Tensor| test_device.put(&x.to_dtype(dtype).unwrap());
    let (x, w) = (put(randn((t, d), 1)), put((randn((v, d), 2) * 1.5).unwrap()));
    let (targets, rows) = (some_targets(t, 20), randn(t, 3));
    let upstream = match spec.reduction {
        Reduction::None => LossGrad::PerToken(&rows),
        _ => LossGrad::Scalar(0.7),
    };
    let whole_w = trainable(&w);
    let whole = test_device.run(|| linear_cross_entropy(&x, &whole_w, &targets, spec, upstream).unwrap());
    let parts = in_parts(test_device, &x, &w, &[0..12, 12..24, 24..31], &targets, (spec, upstream));
    let what = |of: &str| format!("{of} in {dtype:?}, {spec:?}, {test_device:?}");
    let sum = |parts: Vec<&Tensor>| {
        let wide = parts.iter().map(|part| part.to_dtype(DType::F32).unwrap());
        wide.reduce(|a, b| (a + b).unwrap()).unwrap()
    };
    for (out, _) in &parts {
        assert_close(&what("loss"), &out.loss, &whole.loss, F32);
    }
    let dx = sum(parts.iter().map(|(out, _)| out.dx.as_ref().unwrap()).collect());
    assert_close(&what("dx"), &dx, &whole.dx.unwrap(), 2.0 * bound(dtype));
    let dw = Tensor::cat(&parts.iter().map(|(_, dw)| dw).collect::<Vec<_>>(), 0).unwrap();
    let is_exact = matches!(test_device, TestDevice::Cpu) && dtype != DType::BF16;
    let bound = if is_exact { F32 } else { bound(dtype) };
    assert_close(&what("dw"), &dw, &grad_of(&whole_w), bound);

    let only = in_parts(test_device, &x, &w, &[0..16, 16..31], &targets, (spec, LossGrad::NoGrad));
    assert_close(&what("loss alone"), &only[1].0.loss, &whole.loss, F32);
}
