//! Routed experts in FP8: each group of rows has scales of its own, which are powers of two.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    Contraction, FlatBuffer, Fp8Config, Fp8Format, Fp8Formats, Fp8Layers, Fp8Module, Fp8Operand, Fp8Recipe,
    Fp8Rounding, GradSink, OutputDtype, ScaleRule, TensorOrView, TokensPerCall, Weight, fp8_quantize,
    fp8_quantize_current, grouped_linear, linear, saved_by_readers_only,
};

use crate::cases::{TestDevice, assert_close, assert_error, bits, check_each, grad_of, randn, tape, trainable};
use crate::fp8::{DELAYED, config, devices, recipes, recipes_in_formats, rule};

/// Row offsets of four experts, one without rows and one larger than a block; ten rows belong to none.
const OFFSETS: [u32; 5] = [0, 5, 5, 140, 300];
const N_ROWS: usize = 310;
const N_EXPERTS: usize = 4;

/// Sums of f32 with up to 300 terms.
const SUMS: f64 = 1e-6;

struct Case {
    x: Tensor,
    w: Tensor,
    dy: Tensor,
}

/// Rows of experts with magnitudes of their own.
fn case(k: usize, n: usize, dtype: DType) -> Case {
    let sizes =
        Tensor::from_vec((0..N_ROWS).map(|row| 2f32.powi(row as i32 / 60)).collect(), (N_ROWS, 1), &Device::Cpu);
    let rows = |width, seed| randn((N_ROWS, width), seed).broadcast_mul(sizes.as_ref().unwrap()).unwrap();
    let of_dtype = |x: Tensor| x.to_dtype(dtype).unwrap();
    Case {
        x: of_dtype(rows(k, 1)),
        w: of_dtype((randn((N_EXPERTS * n, k), 2) * 0.05).unwrap()),
        dy: of_dtype((rows(n, 3) * 1e-3).unwrap()),
    }
}

fn put_offsets(offsets: [u32; 5], test_device: &TestDevice) -> Tensor {
    test_device.put(&Tensor::new(&offsets, &Device::Cpu).unwrap())
}

fn experts(config: Fp8Config, test_device: &TestDevice) -> Arc<Fp8Layers> {
    let module = Fp8Module { name: "experts".to_owned(), n_matrices: N_EXPERTS };
    Arc::new(Fp8Layers::new(config, vec![Fp8Module::linear("other"), module], &test_device.device()).unwrap())
}

/// Returns y, dx and dw of a step.
fn step(layers: &Arc<Fp8Layers>, case: &Case, test_device: &TestDevice) -> [Tensor; 3] {
    step_of_rows(OFFSETS, layers, case, test_device)
}

/// Returns y, dx and dw of a step in which the experts have these rows.
fn step_of_rows(offsets: [u32; 5], layers: &Arc<Fp8Layers>, case: &Case, test_device: &TestDevice) -> [Tensor; 3] {
    let w = trainable(&test_device.put(&case.w)).with_fp8(layers.layer("experts").unwrap());
    let (x, dy, offsets) = (test_device.put(&case.x), test_device.put(&case.dy), put_offsets(offsets, test_device));
    test_device.run(|| {
        let _on = layers.enable(0).unwrap();
        let tape = tape(std::slice::from_ref(&x), || grouped_linear(&x, &w, &offsets, TokensPerCall::Many));
        let y = tape.output().clone();
        let dx = tape.backward(&dy).unwrap().remove(&x).unwrap();
        [y, dx, grad_of(&w)]
    })
}

/// Returns the rows of an expert.
fn of_expert(x: &Tensor, expert: usize) -> Tensor {
    rows_of(x, OFFSETS, expert)
}

fn rows_of(x: &Tensor, offsets: [u32; 5], expert: usize) -> Tensor {
    let (start, end) = (offsets[expert] as usize, offsets[expert + 1] as usize);
    x.narrow(0, start, end - start).unwrap()
}

fn matrix_of(w: &Tensor, expert: usize) -> Tensor {
    let n = w.dim(0).unwrap() / N_EXPERTS;
    w.narrow(0, expert * n, n).unwrap()
}

/// Quantizes and dequantizes as `recipe` does for one expert in its first step, by ops that are proven on their own.
fn rounded(config: Fp8Config, x: &Tensor, operand: Fp8Operand, contraction: Contraction) -> Tensor {
    let Fp8Config { recipe, formats, .. } = config;
    let rule = match recipe {
        Fp8Recipe::Delayed(_) => rule(true),
        Fp8Recipe::Current(rule) | Fp8Recipe::Blockwise(rule) => ScaleRule { power_of_two: true, ..rule },
    };
    let format = formats.of(operand);
    let matrix = fp8_quantize_current(x, recipe.block(operand, contraction), rule, format, Fp8Rounding::Nearest);
    matrix.unwrap().dequantize().unwrap().to_dtype(DType::F64).unwrap()
}

/// Computes y, dx and dw in f64 with operands that `round` has made of each expert's.
fn wanted(case: &Case, round: impl Fn(usize, &Tensor, Fp8Operand, Contraction) -> Tensor) -> [Tensor; 3] {
    wanted_of_rows(OFFSETS, case, round)
}

fn wanted_of_rows(
    offsets: [u32; 5],
    case: &Case,
    round: impl Fn(usize, &Tensor, Fp8Operand, Contraction) -> Tensor,
) -> [Tensor; 3] {
    let (mut y, mut dx, mut dw) = (Vec::new(), Vec::new(), Vec::new());
    for expert in 0..N_EXPERTS {
        let [x, dy] = [&case.x, &case.dy].map(|x| rows_of(x, offsets, expert));
        let w = matrix_of(&case.w, expert);
        if x.dim(0).unwrap() == 0 {
            dw.push(w.zeros_like().unwrap().to_dtype(DType::F64).unwrap());
            continue;
        }
        let of = |tensor, operand, contraction| round(expert, tensor, operand, contraction);
        let wq = of(&w, Fp8Operand::Weight, Contraction::Columns);
        y.push(of(&x, Fp8Operand::Input, Contraction::Columns).matmul(&wq.t().unwrap()).unwrap());
        dx.push(of(&dy, Fp8Operand::GradOutput, Contraction::Columns).matmul(&wq).unwrap());
        let dy_rows = of(&dy, Fp8Operand::GradOutput, Contraction::Rows);
        dw.push(dy_rows.t().unwrap().matmul(&of(&x, Fp8Operand::Input, Contraction::Rows)).unwrap());
    }
    let n_rest = N_ROWS - offsets[N_EXPERTS] as usize;
    for rows in [&mut y, &mut dx] {
        let width = rows[0].dim(1).unwrap();
        rows.push(Tensor::zeros((n_rest, width), DType::F64, &Device::Cpu).unwrap());
    }
    [y, dx, dw].map(|parts| Tensor::cat(&parts, 0).unwrap())
}

fn assert_step(what: &str, got: &[Tensor; 3], want: &[Tensor; 3]) {
    for (name, (got, want)) in ["y", "dx", "dw"].iter().zip(got.iter().zip(want)) {
        assert_close(&format!("{name} {what}"), got, want, SUMS);
    }
}

/// Outputs and gradients equal f64 matmuls of the rounded rows and matrices of each expert.
#[test]
fn experts_multiply_quantized_rows_and_matrices() {
    check_each(recipes_in_formats().flat_map(|config| [(130, 48), (16, 136)].map(|size| (config, size))), |case_| {
        let (config, (k, n)) = case_;
        let case = case(k, n, DType::F32);
        let want = wanted(&case, |_, x, operand, contraction| rounded(config, x, operand, contraction));
        for test_device in devices() {
            let got = step(&experts(config, &test_device), &case, &test_device);
            assert_step(&format!("{config:?} {k} {n} {test_device:?}"), &got, &want);
        }
    });
}

/// An expert has the bits of a linear layer with the same recipe and scales that are powers of two.
#[test]
fn an_expert_has_the_bits_of_a_linear_layer() {
    let case = case(128, 48, DType::BF16);
    for recipe in [Fp8Recipe::Current(rule(true)), Fp8Recipe::Blockwise(rule(true))] {
        let test_device = TestDevice::Cpu;
        let [y, dx, dw] = step(&experts(config(recipe), &test_device), &case, &test_device);
        for expert in [0, 2, 3] {
            let layers = Arc::new(Fp8Layers::new(config(recipe), vec![Fp8Module::linear("m")], &Device::Cpu).unwrap());
            let w = trainable(&matrix_of(&case.w, expert)).with_fp8(layers.layer("m").unwrap());
            let x = of_expert(&case.x, expert).copy().unwrap();
            let _on = layers.enable(0).unwrap();
            let tape = tape(std::slice::from_ref(&x), || linear(&x, &w, None, OutputDtype::SameAsInput));
            let of_linear = tape.output().clone();
            let dx_of_linear = tape.backward(&of_expert(&case.dy, expert)).unwrap().remove(&x).unwrap();
            assert!(bits(&of_expert(&y, expert)) == bits(&of_linear), "y {recipe:?}");
            assert!(bits(&of_expert(&dx, expert)) == bits(&dx_of_linear), "dx {recipe:?}");
            assert!(bits(&matrix_of(&dw, expert)) == bits(&grad_of(&w)), "dw {recipe:?}");
        }
    }
}

/// Delayed scaling has a history for each expert. One without rows keeps its scales.
#[test]
fn each_expert_has_delayed_scales() {
    let case = case(64, 32, DType::F32);
    for test_device in devices() {
        let layers = experts(config(DELAYED), &test_device);
        step(&layers, &case, &test_device);
        layers.update(&layers.amaxes().unwrap().copy().unwrap()).unwrap();
        let scales =
            layers.states().unwrap().remove(1).scales.to_device(&Device::Cpu).unwrap().to_vec1::<f32>().unwrap();
        for expert in 0..N_EXPERTS {
            let is_used = expert != 1;
            for (operand, x) in Fp8Operand::ALL.into_iter().zip([&case.x, &case.w, &case.dy]) {
                let of_expert = if operand == Fp8Operand::Weight { matrix_of(x, expert) } else { of_expert(x, expert) };
                let amax = of_expert.abs().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let amax = amax.into_iter().fold(0.0, f32::max);
                let want = Fp8Formats::Hybrid.of(operand).max() / amax;
                let has_amax = is_used || operand == Fp8Operand::Weight;
                let got = scales[3 * expert + operand as usize];
                assert_eq!(got, if has_amax { want } else { 0.0 }, "{expert} {operand:?} {test_device:?}");
            }
        }
        // The next step's tensors are twice as large. Their scales are the old ones, rounded down to powers of two.
        let double = |x: &Tensor| (x * 2.0).unwrap();
        let next = Case { x: double(&case.x), w: double(&case.w), dy: double(&case.dy) };
        let got = step(&layers, &next, &test_device);
        let want = wanted(&next, |expert, x, operand, _| {
            let scale = f32::from_bits(scales[3 * expert + operand as usize].to_bits() & f32::INFINITY.to_bits());
            let scale = Tensor::new(&[scale], &Device::Cpu).unwrap();
            let format = Fp8Formats::Hybrid.of(operand);
            let matrix = fp8_quantize(x, &scale, format, Fp8Rounding::Nearest).unwrap();
            matrix.dequantize().unwrap().to_dtype(DType::F64).unwrap()
        });
        assert_step(&format!("{test_device:?}"), &got, &want);
    }
}

/// An expert without rows in the first step has no scales of input and gradient. When its first rows come, their scales follow from
/// the rows themselves, as those of the other experts did. At a scale of 1 its gradients would be zero.
#[test]
fn the_scales_of_an_expert_with_late_rows_follow_from_them() {
    let case = case(64, 32, DType::F32);
    let case = Case { dy: (case.dy * 1e-4).unwrap(), ..case };
    let late = [0, 0, 70, 140, 300];
    for test_device in devices() {
        let layers = experts(config(DELAYED), &test_device);
        step(&layers, &case, &test_device);
        layers.update(&layers.amaxes().unwrap().copy().unwrap()).unwrap();
        let scales =
            layers.states().unwrap().remove(1).scales.to_device(&Device::Cpu).unwrap().to_vec1::<f32>().unwrap();
        let got = step_of_rows(late, &layers, &case, &test_device);
        let want = wanted_of_rows(late, &case, |expert, x, operand, contraction| {
            if expert == 1 && operand != Fp8Operand::Weight {
                return rounded(config(DELAYED), x, operand, contraction);
            }
            let scale = f32::from_bits(scales[3 * expert + operand as usize].to_bits() & f32::INFINITY.to_bits());
            let scale = Tensor::new(&[scale], &Device::Cpu).unwrap();
            let format = Fp8Formats::Hybrid.of(operand);
            let matrix = fp8_quantize(x, &scale, format, Fp8Rounding::Nearest).unwrap();
            matrix.dequantize().unwrap().to_dtype(DType::F64).unwrap()
        });
        assert!(rows_of(&got[1], late, 1).abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap() > 0.0);
        assert_step(&format!("{test_device:?}"), &got, &want);
    }
}

/// Gradients that are rounded stochastically are the same on every device, and others in another step.
#[test]
fn stochastic_gradients_do_not_depend_on_the_device() {
    let case = case(32, 16, DType::BF16);
    for recipe in [Fp8Recipe::Current(rule(false)), Fp8Recipe::Blockwise(rule(true))] {
        let stochastic = Fp8Config { gradient_rounding: Fp8Rounding::Stochastic { key: 7 }, ..config(recipe) };
        let gradients = |config, test_device: &TestDevice| step(&experts(config, test_device), &case, test_device);
        let [_, want_dx, want_dw] = gradients(stochastic, &TestDevice::Cpu);
        let [_, nearest_dx, _] = gradients(config(recipe), &TestDevice::Cpu);
        assert!(bits(&want_dx) != bits(&nearest_dx), "{recipe:?}");
        for test_device in devices() {
            let [_, dx, dw] = gradients(stochastic, &test_device);
            // bf16 rounds sums whose order differs.
            let ulp = 2f64.powi(-8);
            assert_close(&format!("dx {recipe:?} {test_device:?}"), &dx, &want_dx, ulp);
            assert_close(&format!("dw {recipe:?} {test_device:?}"), &dw, &want_dw, ulp);
        }
    }
}

/// Returns y, dx and dw of a step with a weight.
fn step_of(w: &Weight, case: &Case, test_device: &TestDevice) -> [Tensor; 3] {
    let (x, dy, offsets) = (test_device.put(&case.x), test_device.put(&case.dy), put_offsets(OFFSETS, test_device));
    w.sink().unwrap().reset();
    let tape = tape(std::slice::from_ref(&x), || grouped_linear(&x, w, &offsets, TokensPerCall::Many));
    let y = tape.output().clone();
    let dx = tape.backward(&dy).unwrap().remove(&x).unwrap();
    [y, dx, grad_of(w).copy().unwrap()]
}

/// Weights in a buffer are quantized once in two micro-batches, and again after the contents change. Others are quantized for
/// each matmul. All results have the same bits.
#[test]
fn experts_are_quantized_once_until_their_buffer_changes() {
    check_each(recipes().into_iter().flat_map(|recipe| devices().into_iter().map(move |on| (recipe, on))), |on| {
        let ((recipe, test_device), (k, n)) = (on, (130, 48));
        let what = format!("{recipe:?} {test_device:?}");
        let case = case(k, n, DType::BF16);
        let layers = experts(config(recipe), &test_device);
        let flat = test_device.put(&case.w).flatten_all().unwrap();
        let buffer = FlatBuffer::from_tensor(flat.copy().unwrap());
        let of_value = |value: TensorOrView| {
            let dw = Tensor::zeros(value.dims(), DType::F32, flat.device()).unwrap();
            Weight::trainable(value, GradSink::new(dw).unwrap()).with_fp8(layers.layer("experts").unwrap())
        };
        let weight = of_value(buffer.view(0, (N_EXPERTS * n, k)).unwrap().into());
        let alone = of_value(test_device.put(&case.w).into());
        // Returns the bits of all micro-batches, and how often the weight was quantized.
        let steps = |weight: &Weight, n_micros: usize| {
            test_device.run(|| {
                layers.request_stats();
                let on = layers.enable(0).unwrap();
                let micro = |_| step_of(weight, &case, &test_device).map(|x| bits(&x));
                let results: Vec<_> = (0..n_micros).map(micro).collect();
                drop(on);
                let sums = layers.take_stats().unwrap().sums.to_device(&Device::Cpu).unwrap();
                let n_elements = sums.to_vec2::<f64>().unwrap()[3 + Fp8Operand::Weight as usize][0];
                (results, n_elements / (N_EXPERTS * n * k) as f64)
            })
        };
        let (want, n_each) = steps(&alone, 2);
        let (got, n_quantized) = steps(&weight, 2);
        assert!(n_each == 4.0 && n_quantized == 1.0 && got == want, "{n_each} {n_quantized} {what}");
        test_device.run(|| candlewick_ops::zero_(&buffer.data().unwrap())).unwrap();
        let (got, n_quantized) = steps(&weight, 1);
        assert!(n_quantized == 0.0 && got[0] == want[0], "{n_quantized} {what}: the copy of an earlier step is used");
        buffer.drop_fp8_copies();
        let (zeros, n_quantized) = steps(&weight, 1);
        assert!(
            n_quantized == 1.0 && zeros[0][0].iter().all(|bits| f64::from_bits(*bits) == 0.0),
            "{n_quantized} {what}"
        );
        buffer.release();
        buffer.materialize(flat.clone()).unwrap();
        let (again, n_quantized) = steps(&weight, 1);
        assert!(n_quantized == 1.0 && again[0] == want[0], "{n_quantized} {what}");
    });
}

/// Rows that no other op saves, such as those of another rank, are saved as codes. No bit depends on it.
#[test]
fn codes_of_rows_give_the_bits_of_saved_rows() {
    let case = case(130, 48, DType::BF16);
    for recipe in recipes() {
        for test_device in devices() {
            let layers = experts(config(recipe), &test_device);
            let of = |mark: fn(&Tensor)| {
                let w = trainable(&test_device.put(&case.w)).with_fp8(layers.layer("experts").unwrap());
                let (x, dy, offsets) =
                    (test_device.put(&case.x), test_device.put(&case.dy), put_offsets(OFFSETS, &test_device));
                test_device.run(|| {
                    let _on = layers.enable(0).unwrap();
                    let tape = tape(std::slice::from_ref(&x), || {
                        mark(&x);
                        grouped_linear(&x, &w, &offsets, TokensPerCall::Many)
                    });
                    let y = bits(tape.output());
                    let dx = bits(&tape.backward(&dy).unwrap().remove(&x).unwrap());
                    [y, dx, bits(&grad_of(&w))]
                })
            };
            assert!(of(saved_by_readers_only) == of(|_| ()), "{recipe:?} {test_device:?}");
        }
    }
}

/// Statistics count the rows of all experts, and no others.
#[test]
fn statistics_of_experts_count_their_rows() {
    let case = case(32, 16, DType::F32);
    for test_device in devices() {
        let layers = experts(config(Fp8Recipe::Current(rule(false))), &test_device);
        layers.request_stats();
        step(&layers, &case, &test_device);
        let stats = layers.take_stats().unwrap();
        let sums = stats.sums.to_device(&Device::Cpu).unwrap().to_vec2::<f64>().unwrap();
        let n_elements: Vec<f64> = sums.iter().map(|sums| sums[0]).collect();
        // Forward and backward quantize input and weight once each.
        assert_eq!(n_elements, [0.0, 0.0, 0.0, 2.0 * 300.0 * 32.0, 2.0 * 64.0 * 32.0, 300.0 * 16.0], "{test_device:?}");
    }
}

/// Statistics that are requested for one operand count no other.
#[test]
fn statistics_of_experts_are_those_of_the_selected_operands() {
    let case = case(32, 16, DType::F32);
    let layers = experts(config(Fp8Recipe::Current(rule(false))), &TestDevice::Cpu);
    layers.request_stats_of(|module, operand| module == "experts" && operand == Fp8Operand::GradOutput);
    step(&layers, &case, &TestDevice::Cpu);
    let stats = layers.take_stats().unwrap();
    let n_elements: Vec<f64> = stats.sums.to_vec2::<f64>().unwrap().iter().map(|sums| sums[0]).collect();
    assert_eq!(n_elements, [0.0, 0.0, 0.0, 0.0, 0.0, 300.0 * 16.0]);
}

/// A weight with scales for another number of experts is an error.
#[test]
fn the_scales_of_other_experts_are_an_error() {
    let layers = experts(config(DELAYED), &TestDevice::Cpu);
    let case = case(32, 16, DType::F32);
    let w = Weight::frozen(case.w.clone()).with_fp8(layers.layer("experts").unwrap().with_matrices(1..3));
    let _on = layers.enable(0).unwrap();
    let got = grouped_linear(&case.x, &w, &put_offsets(OFFSETS, &TestDevice::Cpu), TokensPerCall::Many);
    assert_error(got, "experts: the scales of 2 matrices cannot serve 4 groups");
}

/// Values of both formats are exact in bf16.
#[test]
fn all_scaled_codes_are_exact_in_bf16() {
    for format in [Fp8Format::E4m3, Fp8Format::E5m2] {
        let x = randn((64, 64), 5);
        let matrix =
            fp8_quantize_current(&x, candlewick_ops::ScaleBlock::Tensor, rule(true), format, Fp8Rounding::Nearest);
        let wide = matrix.unwrap().dequantize().unwrap();
        let narrow = wide.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
        assert!(bits(&wide) == bits(&narrow));
    }
}
