//! Invariants that hold for every op, stated once over the list of ops.

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{
    AttentionChoice, AttentionSpec, CrossEntropy, CuSeqlens, ExpertAssignment, LossGrad, OutputDtype, Reduction,
    TokensPerCall, Weight, add, add_rms_norm, attention, embedding, grouped_linear, linear, linear_cross_entropy,
    permute, reshape, rms_norm, rms_norm_rope, rope, sum_of_squares, swiglu, swiglu_joined, unpermute, weighted_swiglu,
};

use crate::cases::{bits, check_each, grad_of, randn, tape, trainable, values};

pub(crate) struct RepeatedOp {
    pub(crate) name: &'static str,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) weights: Vec<Tensor>,
    pub(crate) run: fn(&[Tensor], &[Weight]) -> Result<Tensor>,
}

pub(crate) fn ops() -> Vec<RepeatedOp> {
    vec![
        RepeatedOp {
            name: "linear",
            inputs: vec![randn((150, 40), 1)],
            weights: vec![randn((70, 40), 2), randn(70, 3)],
            run: |x, w| linear(&x[0], &w[0], Some(&w[1]), OutputDtype::SameAsInput),
        },
        RepeatedOp {
            name: "embedding",
            inputs: vec![],
            weights: vec![randn((50, 8), 2)],
            run: |_, w| {
                let ids: Vec<u32> = (0..150).map(|i| i * 7 % 50).collect();
                embedding(&Tensor::new(ids, w[0].value()?.device())?, &w[0], None)
            },
        },
        RepeatedOp {
            name: "rms_norm",
            inputs: vec![randn((700, 33), 1)],
            weights: vec![randn(33, 2)],
            run: |x, w| rms_norm(&x[0], &w[0], 1e-6),
        },
        RepeatedOp {
            name: "add_rms_norm",
            inputs: vec![randn((700, 33), 1), randn((700, 33), 2)],
            weights: vec![randn(33, 3)],
            run: |x, w| {
                let (sum, normed) = add_rms_norm(&x[0], &x[1], &w[0], 1e-6)?;
                add(&sum, &normed)
            },
        },
        RepeatedOp {
            name: "rope",
            inputs: vec![randn((150, 3, 8), 1)],
            weights: vec![],
            run: |x, _| {
                let angles = randn((150, 4), 2).to_device(x[0].device())?;
                rope(&x[0], &angles.cos()?, &angles.sin()?)
            },
        },
        RepeatedOp {
            name: "rms_norm_rope",
            inputs: vec![randn((150, 3, 8), 1)],
            weights: vec![randn(8, 3)],
            run: |x, w| {
                let angles = randn((150, 4), 2).to_device(x[0].device())?;
                rms_norm_rope(&x[0], &w[0], 1e-6, &angles.cos()?, &angles.sin()?)
            },
        },
        RepeatedOp {
            name: "swiglu",
            inputs: vec![randn((150, 40), 1), randn((150, 40), 2)],
            weights: vec![],
            run: |x, _| swiglu(&x[0], &x[1]),
        },
        RepeatedOp {
            name: "swiglu_joined",
            inputs: vec![randn((150, 80), 1)],
            weights: vec![],
            run: |x, _| swiglu_joined(&x[0]),
        },
        RepeatedOp {
            name: "grouped_linear",
            inputs: vec![randn((150, 40), 1)],
            weights: vec![randn((3 * 24, 40), 2)],
            run: |x, w| {
                let offsets = Tensor::new(&[0u32, 70, 81, 150], x[0].device())?;
                grouped_linear(&x[0], &w[0], &offsets, TokensPerCall::Many)
            },
        },
        RepeatedOp {
            name: "weighted_swiglu",
            inputs: vec![randn((150, 80), 1)],
            weights: vec![],
            run: |x, _| weighted_swiglu(&x[0], &randn(150, 2).to_device(x[0].device())?),
        },
        RepeatedOp {
            name: "permute and unpermute",
            inputs: vec![randn((50, 40), 1)],
            weights: vec![],
            run: |x, _| {
                let experts: Vec<u32> = (0..150).map(|i| i * i % 7).collect();
                let experts = Tensor::from_vec(experts, (50, 3), x[0].device())?;
                let assignment = ExpertAssignment::new(&experts, 7)?;
                unpermute(&permute(&x[0], &assignment)?, &assignment)
            },
        },
        RepeatedOp {
            name: "add",
            inputs: vec![randn((150, 40), 1), randn((150, 40), 2)],
            weights: vec![],
            run: |x, _| add(&x[0], &x[1]),
        },
        RepeatedOp {
            name: "attention",
            inputs: vec![randn((200, 6, 8), 1), randn((200, 2, 8), 2), randn((200, 2, 8), 3)],
            weights: vec![],
            run: |x, _| {
                let spec =
                    AttentionSpec { scale: 0.3, causal: true, window: Some(90), choice: AttentionChoice::default() };
                attention(&x[0], &x[1], &x[2], &CuSeqlens::packed(vec![0, 150, 200])?, &spec)
            },
        },
    ]
}

/// Returns the output and the gradients of all inputs and weights.
pub(crate) fn run(op: &RepeatedOp) -> Vec<Tensor> {
    let weights: Vec<Weight> = op.weights.iter().map(trainable).collect();
    let tape = tape(&op.inputs, || (op.run)(&op.inputs, &weights));
    let y = tape.output().clone();
    let dy = randn(y.shape(), 9).to_dtype(y.dtype()).unwrap();
    let grads = tape.backward(&dy.to_device(y.device()).unwrap()).unwrap();
    let of_inputs = op.inputs.iter().map(|x| grads.get(x).unwrap().clone());
    let of_weights = weights.iter().map(grad_of);
    std::iter::once(y).chain(of_inputs).chain(of_weights).collect()
}

#[test]
fn every_input_and_weight_gets_a_gradient() {
    check_each(ops(), |op| {
        let results = run(&op);
        assert_eq!(results.len(), 1 + op.inputs.len() + op.weights.len());
        for (i, result) in results.iter().enumerate() {
            let n_zero = values(result).iter().filter(|x| **x == 0.0 || !x.is_finite()).count();
            assert!(n_zero * 10 < result.elem_count(), "{}: result {i} is mostly zero", op.name);
        }
    });
}

/// Checks that an op between tracked ones propagates the gradient.
#[test]
fn gradients_pass_through_to_the_leaves() {
    check_each(ops(), |op| {
        let weights: Vec<Weight> = op.weights.iter().map(trainable).collect();
        let reshaped = |x: &Tensor| reshape(x, x.shape());
        let tape = tape(&op.inputs, || {
            let inner = op.inputs.iter().map(reshaped).collect::<Result<Vec<_>>>()?;
            reshaped(&(op.run)(&inner, &weights)?)
        });
        let dy = randn(tape.output().shape(), 9);
        let grads = tape.backward(&dy).unwrap();
        let got = op.inputs.iter().map(|x| grads.get(x).unwrap().clone()).chain(weights.iter().map(grad_of));
        for (got, want) in got.zip(&run(&op)[1..]) {
            assert_eq!(bits(&got), bits(want), "{}", op.name);
        }
    });
}

#[test]
fn two_backwards_add_up_in_the_sink() {
    check_each(ops(), |op| {
        let weights: Vec<Weight> = op.weights.iter().map(trainable).collect();
        let dy = randn((op.run)(&op.inputs, &weights).unwrap().shape(), 9);
        for _ in 0..2 {
            tape(&[], || (op.run)(&op.inputs, &weights)).backward(&dy).unwrap();
        }
        let once = &run(&op)[1 + op.inputs.len()..];
        for (weight, once) in weights.iter().zip(once) {
            crate::cases::assert_close(op.name, &grad_of(weight), &(once * 2.0).unwrap(), 1e-6);
        }
    });
}

/// Checks that a weight is trained even if nothing before it is, as in the first layer.
#[test]
fn a_sink_is_reached_from_an_untracked_input() {
    check_each(ops().into_iter().filter(|op| !op.weights.is_empty()), |op| {
        let weights: Vec<Weight> = op.weights.iter().map(trainable).collect();
        let tape = tape(&[], || (op.run)(&op.inputs, &weights));
        let dy = randn(tape.output().shape(), 9);
        tape.backward(&dy).unwrap();
        for (weight, want) in weights.iter().zip(&run(&op)[1 + op.inputs.len()..]) {
            assert_eq!(bits(&grad_of(weight)), bits(want), "{}", op.name);
        }
    });
}

#[test]
fn nothing_to_train_is_not_tracked() {
    check_each(ops(), |op| {
        let weights: Vec<Weight> = op.weights.iter().cloned().map(Weight::frozen).collect();
        assert!(tape(&[], || (op.run)(&op.inputs, &weights)).is_empty(), "{}", op.name);
    });
}

#[test]
fn a_frozen_weight_changes_no_other_gradient_and_leaves_none() {
    check_each(ops().into_iter().filter(|op| !op.inputs.is_empty()), |op| {
        let weights: Vec<Weight> = op.weights.iter().cloned().map(Weight::frozen).collect();
        let tape = tape(&op.inputs, || (op.run)(&op.inputs, &weights));
        let dy = randn(tape.output().shape(), 9);
        let grads = tape.backward(&dy).unwrap();
        for (x, want) in op.inputs.iter().zip(&run(&op)[1..]) {
            assert_eq!(bits(grads.get(x).unwrap()), bits(want), "{}", op.name);
        }
    });
}

#[test]
fn results_are_the_same_bits_for_any_number_of_threads() {
    let on = |n_threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        pool.install(|| {
            let mut all: Vec<Vec<u64>> = ops().iter().flat_map(run).map(|x| bits(&x)).collect();
            all.extend(head());
            all.extend(large_linear());
            all.extend(long_attention());
            all.push(bits(&sum_of_squares(&randn(100_001, 1)).unwrap()));
            all
        })
    };
    let one = on(1);
    for n_threads in [2, 3, 16] {
        assert!(on(n_threads) == one, "{n_threads} threads");
    }
}

/// Computes a matmul large enough to be divided among threads.
fn large_linear() -> Vec<Vec<u64>> {
    let op = RepeatedOp {
        name: "linear",
        inputs: vec![randn((600, 300), 1)],
        weights: vec![randn((500, 300), 2), randn(500, 3)],
        run: |x, w| linear(&x[0], &w[0], Some(&w[1]), OutputDtype::SameAsInput),
    };
    run(&op).iter().map(bits).collect()
}

/// Computes attention whose blocks have four tiles of queries on one thread and one on sixteen. A tile of a sequence has one query.
fn long_attention() -> Vec<Vec<u64>> {
    let op = RepeatedOp {
        name: "attention",
        inputs: vec![randn((1429, 4, 16), 1), randn((1429, 2, 16), 2), randn((1429, 2, 16), 3)],
        weights: vec![],
        run: |x, _| {
            let spec =
                AttentionSpec { scale: 0.25, causal: true, window: Some(300), choice: AttentionChoice::default() };
            attention(&x[0], &x[1], &x[2], &CuSeqlens::packed(vec![0, 1300, 1429])?, &spec)
        },
    };
    run(&op).iter().map(bits).collect()
}

fn head() -> [Vec<u64>; 3] {
    let w = trainable(&randn((301, 40), 2));
    let targets: Vec<i64> = (0..150).map(|i| i * 2).collect();
    let out = linear_cross_entropy(
        &randn((150, 40), 1),
        &w,
        &Tensor::new(targets, &Device::Cpu).unwrap(),
        &CrossEntropy { reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0, chunk: 64 },
        LossGrad::Scalar(1.0),
    )
    .unwrap();
    [bits(&out.loss), bits(&out.dx.unwrap()), bits(&grad_of(&w))]
}

#[test]
fn sixteen_bit_inputs_give_outputs_and_gradients_of_their_dtype() {
    check_each([DType::BF16, DType::F16], |dtype| {
        for op in ops() {
            let cast = |x: &Tensor| x.to_dtype(dtype).unwrap();
            let inputs: Vec<Tensor> = op.inputs.iter().map(cast).collect();
            let weights: Vec<Weight> = op.weights.iter().map(|w| trainable(&cast(w))).collect();
            let tape = tape(&inputs, || (op.run)(&inputs, &weights));
            let y = tape.output().clone();
            assert_eq!(y.dtype(), dtype, "{}", op.name);
            let grads = tape.backward(&y.ones_like().unwrap()).unwrap();
            assert!(inputs.iter().all(|x| grads.get(x).unwrap().dtype() == dtype), "{}", op.name);
        }
    });
}
