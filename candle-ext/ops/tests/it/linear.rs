use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    FlatBuffer, GradSink, OpInput, OutputDtype, Weight, add, linear, linear_plus, linear_plus_columns, linear_scaled,
    record,
};

use crate::cases::{
    F32, OpCase, TestDevice, assert_close, assert_error, bits, bound, check_each, grad_of, randn, tape, trainable,
};

fn check(lead: &[usize], k: usize, n: usize) {
    let x = randn([lead, &[k]].concat(), 1);
    OpCase {
        name: "linear",
        inputs: vec![x.clone()],
        weights: vec![randn((n, k), 2)],
        op: &|x, w| linear(&x[0], &w[0], None, OutputDtype::SameAsInput),
        reference: &|a| a[0].broadcast_matmul(&a[1].t()?),
    }
    .check_all_formats();
    OpCase {
        name: "linear with a bias",
        inputs: vec![x],
        weights: vec![randn((n, k), 2), randn(n, 3)],
        op: &|x, w| linear(&x[0], &w[0], Some(&w[1]), OutputDtype::SameAsInput),
        reference: &|a| a[0].broadcast_matmul(&a[1].t()?)?.broadcast_add(&a[2]),
    }
    .check_all_formats();
}

#[test]
fn it_equals_the_reference() {
    let shapes: [(&[usize], usize, usize); 7] = [
        (&[33], 65, 17),
        (&[2, 5], 16, 300),
        (&[1], 64, 48),
        (&[1], 1, 1),
        (&[3, 1, 2], 7, 5),
        (&[9], 9728, 64),
        (&[9], 64, 9728),
    ];
    check_each(shapes, |(lead, k, n)| check(lead, k, n));
}

#[test]
fn a_weight_of_several_panels_equals_the_reference() {
    check(&[9], 3000, 700);
}

#[test]
fn a_tall_input_goes_through_in_blocks() {
    check(&[5000], 3, 2);
    check(&[700], 3, 24);
}

#[test]
fn no_tokens_give_no_output() {
    let x = Tensor::zeros((0, 4), DType::F32, &Device::Cpu).unwrap();
    let w = trainable(&randn((3, 4), 1));
    let tape = tape(std::slice::from_ref(&x), || linear(&x, &w, None, OutputDtype::SameAsInput));
    let y = tape.output().clone();
    assert_eq!(y.dims(), [0, 3]);
    assert_eq!(tape.backward(&y).unwrap().get(&x).unwrap().dims(), [0, 4]);
}

#[test]
fn full_precision_is_f32_and_unrounded() {
    let x = randn((5, 40), 1).to_dtype(DType::BF16).unwrap();
    let w = randn((6, 40), 2).to_dtype(DType::BF16).unwrap();
    let y = linear(&x, &Weight::frozen(w.clone()), None, OutputDtype::F32).unwrap();
    assert_eq!(y.dtype(), DType::F32);
    let exact = |t: &Tensor| t.to_dtype(DType::F64).unwrap();
    assert_close("y", &y, &exact(&x).matmul(&exact(&w).t().unwrap()).unwrap(), F32);
}

#[test]
fn the_weight_may_have_another_dtype_than_the_input() {
    let x = randn((5, 40), 1).to_dtype(DType::BF16).unwrap();
    let w = randn((6, 40), 2);
    let y = linear(&x, &Weight::frozen(w.clone()), None, OutputDtype::SameAsInput).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
    let exact = |t: &Tensor| t.to_dtype(DType::F64).unwrap();
    let want = exact(&x).matmul(&exact(&w).t().unwrap()).unwrap();
    assert_close("y", &y, &want, 2f64.powi(-9));
}

#[test]
fn a_view_of_a_flat_buffer_is_read_in_place() {
    let flat = randn(100, 1);
    let w = flat.narrow(0, 10, 12).unwrap().reshape((3, 4)).unwrap();
    let x = randn((2, 4), 2);
    let y = linear(&x, &Weight::frozen(w.clone()), None, OutputDtype::SameAsInput).unwrap();
    let copy = Weight::frozen(w.force_contiguous().unwrap());
    let want = linear(&x, &copy, None, OutputDtype::SameAsInput).unwrap();
    assert_eq!(bits(&y), bits(&want));
}

#[test]
fn a_strided_input_equals_its_copy() {
    let x = randn((4, 6), 1).t().unwrap();
    let w = Weight::frozen(randn((3, 4), 2));
    let y = linear(&x, &w, None, OutputDtype::SameAsInput).unwrap();
    let want = linear(&x.contiguous().unwrap(), &w, None, OutputDtype::SameAsInput).unwrap();
    assert_eq!(bits(&y), bits(&want));
}

#[test]
fn the_sink_is_added_to_inside_its_buffer_only() {
    let flat = Tensor::ones(20, DType::F32, &Device::Cpu).unwrap();
    let view = flat.narrow(0, 4, 6).unwrap().reshape((2, 3)).unwrap();
    let w = Weight::trainable(randn((2, 3), 1), GradSink::new(view).unwrap());
    let x = randn((5, 3), 2);
    tape(&[], || linear(&x, &w, None, OutputDtype::SameAsInput)).backward(&randn((5, 2), 3)).unwrap();
    let flat: Vec<f32> = flat.to_vec1().unwrap();
    assert!(flat[..4].iter().chain(&flat[10..]).all(|&x| x == 1.0));
    assert!(flat[4..10].iter().all(|&x| x != 1.0));
    let dw = randn((5, 2), 3).t().unwrap().matmul(&randn((5, 3), 2)).unwrap();
    assert_close("dw", &(grad_of(&w) - 1.0).unwrap(), &dw, F32);
}

/// Returns weights [n_i, k] that are adjacent in memory, with their gradients.
fn adjacent(test_device: &TestDevice, dtype: DType, rows: &[usize], k: usize) -> Vec<Weight> {
    let n: usize = rows.iter().sum::<usize>() * k;
    let values = FlatBuffer::from_tensor(test_device.put(&randn(n, 5).to_dtype(dtype).unwrap()));
    let grads = FlatBuffer::from_tensor(test_device.put(&Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap()));
    let mut start = 0;
    let weight = |rows: &usize| {
        let view = |buffer: &FlatBuffer| buffer.view(start, (*rows, k)).unwrap();
        let weight = Weight::trainable(view(&values), GradSink::new(view(&grads)).unwrap());
        start += rows * k;
        weight
    };
    rows.iter().map(weight).collect()
}

/// The CPU sums dx like separate layers. A GPU sums over all rows at once.
#[test]
fn a_joined_weight_gives_what_its_parts_give() {
    let rows = [40, 70, 30];
    for (test_device, dtype) in TestDevice::all()
        .into_iter()
        .flat_map(|test_device| [DType::F32, DType::BF16].map(|dtype| (test_device.clone(), dtype)))
    {
        let x = test_device.put(&randn((150, 48), 1).to_dtype(dtype).unwrap());
        let dy: Vec<Tensor> = rows.iter().map(|n| randn((150, *n), 9).to_dtype(dtype).unwrap()).collect();
        let results = |is_joined: bool| {
            let weights = adjacent(&test_device, dtype, &rows, x.dim(1).unwrap());
            let inputs = std::slice::from_ref(&x);
            let dx = test_device.run(|| {
                let run = |w: &Weight, dy: &Tensor| {
                    let tape = tape(inputs, || linear(&x, w, None, OutputDtype::SameAsInput));
                    tape.backward(&test_device.put(dy)).unwrap().remove(&x).unwrap()
                };
                if is_joined {
                    let joined = Weight::joined(&weights.iter().collect::<Vec<_>>(), &x).unwrap();
                    return run(&joined, &Tensor::cat(&dy, 1).unwrap());
                }
                let parts = weights.iter().zip(&dy).rev().map(|(w, dy)| run(w, dy));
                parts.reduce(|sum, part| add(&sum, &part).unwrap()).unwrap()
            });
            [vec![dx], weights.iter().map(grad_of).collect()].concat()
        };
        let what = format!("{dtype:?} {test_device:?}");
        for (i, (joined, apart)) in results(true).iter().zip(results(false)).enumerate() {
            assert_close(&format!("{i} {what}"), joined, &apart, 2.0 * bound(dtype));
            if matches!(test_device, TestDevice::Cpu) && dtype == DType::F32 {
                assert!(bits(joined) == bits(&apart), "{i} {what}");
            }
        }
    }
}

#[test]
fn wrong_shapes_and_dtypes_are_named() {
    let x = randn((2, 4), 1);
    let frozen = |shape: &[usize]| Weight::frozen(randn(shape, 2));
    let run = |x: &Tensor, w: &Weight, b| linear(x, w, b, OutputDtype::SameAsInput);
    assert_error(run(&x, &frozen(&[3, 5]), None), "weight has shape [3, 5], want [3, 4]");
    assert_error(run(&x, &frozen(&[3]), None), "a weight [n, k]");
    let bias = frozen(&[4]);
    assert_error(run(&x, &frozen(&[3, 4]), Some(&bias)), "weight has shape [4], want [3]");
    let ids = Tensor::zeros((2, 4), DType::U32, &Device::Cpu).unwrap();
    assert_error(run(&ids, &frozen(&[3, 4]), None), "want f32, bf16 or f16");
    let transposed = Weight::frozen(randn((4, 3), 1).t().unwrap());
    assert_error(run(&x, &transposed, None), "contiguous");
    let sink = GradSink::new(Tensor::zeros(5, DType::F32, &Device::Cpu).unwrap()).unwrap();
    let w = Weight::trainable(randn((3, 4), 2), sink);
    assert_error(run(&x, &w, None), "its gradient sink [5]");
}

/// Computes w x^T plus an adapter as a layer with LoRA does: base, A, B.
fn adapted(x: &Tensor, w: &[Weight]) -> candle_core::Result<Tensor> {
    let base = linear(x, &w[0], None, OutputDtype::SameAsInput)?;
    linear_plus(&linear_scaled(x, &w[1], 2.5)?, &w[2], &base)
}

#[test]
fn an_adapter_equals_the_reference() {
    check_each([(&[33][..], 65, 17, 8), (&[2, 5], 16, 300, 4), (&[1], 64, 48, 1)], |(lead, k, n, r)| {
        let case = OpCase {
            name: "linear with an adapter",
            inputs: vec![randn([lead, &[k]].concat(), 1)],
            weights: vec![randn((n, k), 2), randn((r, k), 3), (randn((n, r), 4) * 0.1).unwrap()],
            op: &|x, w| adapted(&x[0], w),
            reference: &|a| {
                let down = (a[0].broadcast_matmul(&a[2].t()?)? * 2.5)?;
                a[0].broadcast_matmul(&a[1].t()?)? + down.broadcast_matmul(&a[3].t()?)?
            },
        };
        case.check_all_formats();
    });
}

#[test]
fn an_adapter_joins_a_sum_in_f32() {
    let half = |x: Tensor| x.to_dtype(DType::BF16).unwrap();
    let (x, w, base) = (half(randn((5, 40), 1)), half(randn((6, 40), 2)), randn((5, 6), 3));
    let exact = |t: &Tensor| t.to_dtype(DType::F64).unwrap();
    let want = (exact(&base) + exact(&x).matmul(&exact(&w).t().unwrap()).unwrap()).unwrap();
    check_each(TestDevice::all(), |test_device| {
        let [x, base, w] = [&x, &base, &w].map(|t| test_device.put(t));
        let y = test_device.run(|| linear_plus(&x, &Weight::frozen(w), &base).unwrap());
        assert_eq!(y.dtype(), DType::F32);
        assert_close("y", &y, &want, F32);
    });
}

/// A GPU computes a layer with an adapter by its three matmuls, and the gradients by five.
#[test]
#[cfg(not(feature = "cuda"))]
fn an_adapter_launches_its_matmuls_alone() {
    let half = |x: Tensor| x.to_dtype(DType::BF16).unwrap();
    let x = half(randn((9, 64), 1));
    let [w, a, b] = [(48, 64), (8, 64), (48, 8)].map(|shape| half(randn(shape, 2)));
    let weights = [Weight::frozen(w), trainable(&a), trainable(&b)];
    let inputs = [x];
    let (tape, forward) = candlewick_ops::emulate_counted(|| tape(&inputs, || adapted(&inputs[0], &weights)));
    assert_eq!(forward.launches, ["gemm"; 3]);
    let dy = half(randn((9, 48), 5));
    let (_, backward) = candlewick_ops::emulate_counted(|| tape.backward(&dy).unwrap());
    assert_eq!(backward.launches, ["gemm"; 5]);

    // With an op for each step: the scaling, two conversions and the sum have launches of their own.
    let apart = |x: &Tensor| {
        let base = linear(x, &weights[0], None, OutputDtype::SameAsInput)?;
        let down = linear(x, &weights[1], None, OutputDtype::F32)?;
        let down = candlewick_ops::scale(&down, 2.5, x.dtype())?;
        add(&base, &linear(&down, &weights[2], None, OutputDtype::SameAsInput)?)
    };
    let (_, forward) = candlewick_ops::emulate_counted(|| apart(&inputs[0]).unwrap());
    // candle computes the scaling and a conversion.
    assert_eq!(forward.launches, ["gemm", "gemm", "gemm", "add_bf16"]);
}

/// Returns the bits of the outputs, of the gradients of x (with a bound, if joined), and of those of the factors.
fn results_of_adapters(test_device: &TestDevice, dtype: DType, is_joined: bool) -> (Vec<Vec<u64>>, Tensor, usize) {
    const OUT: [usize; 3] = [48, 16, 16];
    let put = |x: Tensor| test_device.put(&x.to_dtype(dtype).unwrap());
    let buffer = FlatBuffer::from_tensor(put(randn(80 * 64, 2)));
    let starts = [0, 48 * 64, 64 * 64];
    let bases: Vec<Weight> =
        starts.iter().zip(OUT).map(|(start, n)| Weight::frozen(buffer.view(*start, (n, 64)).unwrap())).collect();
    let factors = |seed: u64, n: usize| [(8, 64), (n, 8)].map(|shape| trainable(&put(randn(shape, seed))));
    // The second layer has no adapter.
    let adapters = [Some(factors(10, 48)), None, Some(factors(20, 16))];
    let inputs = [put(randn((9, 64), 1))];
    let down = |x: &Tensor, a: &Weight| linear_scaled(x, a, 2.5);
    let forward = || {
        let x = &inputs[0];
        if is_joined {
            let joined = Weight::joined(&bases.iter().collect::<Vec<_>>(), x).unwrap();
            let mut y = linear(x, &joined, None, OutputDtype::SameAsInput)?;
            for (adapter, first) in adapters.iter().zip([0, 48, 64]) {
                if let Some([a, b]) = adapter {
                    y = linear_plus_columns(&down(x, a)?, b, &y, first)?;
                }
            }
            return Ok(y);
        }
        let each = bases.iter().zip(&adapters).map(|(base, adapter)| {
            let y = linear(x, base, None, OutputDtype::SameAsInput)?;
            adapter.as_ref().map_or(Ok(y.clone()), |[a, b]| linear_plus(&down(x, a)?, b, &y))
        });
        let each = each.collect::<candle_core::Result<Vec<_>>>()?;
        let rows: Vec<Tensor> = each.iter().map(|y| y.t()?.contiguous()).collect::<candle_core::Result<_>>()?;
        let all = Tensor::cat(&rows, 0)?.t()?.contiguous()?;
        let parts = each.clone();
        Ok(record("joined columns", each_input(&parts), all, move |dy, _| {
            let column = |first, n| dy.narrow(1, first, n)?.contiguous().map(Some);
            Ok([column(0, 48)?, column(48, 16)?, column(64, 16)?])
        }))
    };
    let dy = put(randn((9, 80), 5));
    let ((y, dx), work) = counted(test_device, || {
        let tape = tape(&inputs, forward);
        let y = tape.output().clone();
        (y, tape.backward(&dy).unwrap().remove(&inputs[0]).unwrap())
    });
    let of_factors = adapters.iter().flatten().flatten().map(|factor| bits(&grad_of(factor)));
    ([bits(&y)].into_iter().chain(of_factors).collect(), dx, work)
}

fn each_input(parts: &[Tensor]) -> [OpInput<'_>; 3] {
    [(&parts[0]).into(), (&parts[1]).into(), (&parts[2]).into()]
}

/// Runs `f` on a device, and returns the number of its matmuls in the emulator, else 0.
fn counted<T>(test_device: &TestDevice, f: impl FnOnce() -> T) -> (T, usize) {
    #[cfg(not(feature = "cuda"))]
    if matches!(test_device, TestDevice::Emulated) {
        let (result, work) = candlewick_ops::emulate_counted(f);
        return (result, work.launches.iter().filter(|name| *name == "gemm").count());
    }
    (test_device.run(f), 0)
}

#[test]
fn adapters_on_columns_of_joined_layers_have_the_bits_of_separate_layers() {
    for test_device in TestDevice::all() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let (joined, dx, n_joined) = results_of_adapters(&test_device, dtype, true);
            let (separate, want_dx, n_separate) = results_of_adapters(&test_device, dtype, false);
            assert!(joined == separate, "{test_device:?} {dtype:?}");
            // Separate layers round the gradient of the input once more for each.
            assert_close("dx", &dx, &want_dx, 2.0 * bound(dtype));
            #[cfg(not(feature = "cuda"))]
            if matches!(test_device, TestDevice::Emulated) {
                assert_eq!((n_joined, n_separate), (14, 18), "one matmul for three layers, in both passes");
            }
            let _ = (n_joined, n_separate);
        }
    }
}

#[test]
fn columns_beyond_a_joined_output_are_an_error() {
    let (x, w, base) = (randn((3, 4), 1), Weight::frozen(randn((5, 4), 2)), randn((3, 8), 3));
    assert_error(linear_plus_columns(&x, &w, &base, 4), "want 5 columns from 4 on of 3 rows of F32");
    assert_error(linear_plus_columns(&randn((2, 4), 1), &w, &base, 0), "of 2 rows");
}
