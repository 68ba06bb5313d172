//! Linear layers in FP8: outputs and gradients.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    Contraction, Fp8Config, Fp8Layers, Fp8Module, Fp8Operand, Fp8Recipe, Fp8Rounding, GradSink, OutputDtype,
    ScaleBlock, Weight, fp8_quantize_current, linear, saved_by_readers_only,
};

use super::{
    DELAYED, FORMATS, SUMS, config_in, devices, devices_for, layers, layers_of, recipes, recipes_in_formats, rule, sums,
};
use crate::cases::{
    TestDevice, assert_close, assert_error, bits, check_each, grad_of, identity_exchange, randn, tape, trainable,
};

/// Quantizes and dequantizes as the recipe does in its first step, by the ops that the reference has proven.
fn rounded(config: Fp8Config, x: &Tensor, operand: Fp8Operand, contraction: Contraction) -> Tensor {
    let Fp8Config { recipe, formats, .. } = config;
    let format = formats.of(operand);
    let matrix = match recipe {
        Fp8Recipe::Delayed(_) => fp8_quantize_current(x, ScaleBlock::Tensor, rule(true), format, Fp8Rounding::Nearest),
        Fp8Recipe::Current(rule) | Fp8Recipe::Blockwise(rule) => {
            fp8_quantize_current(x, recipe.block(operand, contraction), rule, format, Fp8Rounding::Nearest)
        }
    };
    matrix.unwrap().dequantize().unwrap().to_dtype(DType::F64).unwrap()
}

/// Returns y, dx, dw and db of a layer with this input, weight, bias and gradient of the output.
fn step_of_linear(layers: &Arc<Fp8Layers>, [x, w, bias, dy]: [&Tensor; 4], test_device: &TestDevice) -> [Tensor; 4] {
    let w = trainable(&test_device.put(w)).with_fp8(layers.layer("a").unwrap());
    let (x, bias) = (test_device.put(x), trainable(&test_device.put(bias)));
    test_device.run(|| {
        let _on = layers.enable(0).unwrap();
        let tape = tape(std::slice::from_ref(&x), || linear(&x, &w, Some(&bias), OutputDtype::SameAsInput));
        let y = tape.output().clone();
        let dx = tape.backward(&test_device.put(dy)).unwrap().remove(&x).unwrap();
        [y, dx, grad_of(&w), grad_of(&bias)]
    })
}

/// Output and all gradients equal f64 matmuls of the quantized operands, in which nothing else is rounded.
#[test]
fn a_linear_layer_multiplies_the_quantized_operands() {
    let shapes = [
        (33, 65, 17),
        (300, 130, 260),
        (1, 64, 48),
        (9, 700, 5),
        (2, 1, 1),
        (150, 272, 144),
        (16, 128, 256),
        (40, 16, 400),
    ];
    check_each(recipes_in_formats().flat_map(|config| shapes.map(|shape| (config, shape))), |(config, (t, k, n))| {
        let (x, w, dy) = (randn((t, k), 1), (randn((n, k), 2) * 0.05).unwrap(), (randn((t, n), 3) * 1e-3).unwrap());
        let bias = randn(n, 4);
        let round = |x: &Tensor, operand, contraction| rounded(config, x, operand, contraction);
        let [xq, wq, dyq] = [(&x, Fp8Operand::Input), (&w, Fp8Operand::Weight), (&dy, Fp8Operand::GradOutput)]
            .map(|(tensor, operand)| round(tensor, operand, Contraction::Columns));
        let y = xq.matmul(&wq.t().unwrap()).unwrap().broadcast_add(&bias.to_dtype(DType::F64).unwrap()).unwrap();
        let dx = dyq.matmul(&wq).unwrap();
        let [x_rows, dy_rows] = [(&x, Fp8Operand::Input), (&dy, Fp8Operand::GradOutput)]
            .map(|(tensor, operand)| round(tensor, operand, Contraction::Rows));
        let dw = dy_rows.t().unwrap().matmul(&x_rows).unwrap();
        for test_device in devices_for([n, k], config.recipe) {
            let layers = layers_of(config, &test_device);
            let got = step_of_linear(&layers, [&x, &w, &bias, &dy], &test_device);
            let db = dy.to_dtype(DType::F64).unwrap().sum(0).unwrap();
            for (what, (got, want)) in ["y", "dx", "dw", "db"].iter().zip(got.iter().zip([&y, &dx, &dw, &db])) {
                assert_close(&format!("{what} {config:?} {t} {k} {n} {test_device:?}"), got, want, sums(&test_device));
            }
        }
    });
}

/// With `fake_quantize` any device multiplies the rounded operands of any sizes, with scales that are powers of two.
#[test]
fn a_fake_quantized_layer_multiplies_rounded_operands() {
    let recipes = [DELAYED, Fp8Recipe::Current(rule(true)), Fp8Recipe::Blockwise(rule(true))];
    for config in FORMATS.into_iter().flat_map(|formats| recipes.map(|recipe| config_in(formats, recipe))) {
        let (t, k, n) = (150, 130, 33);
        let (x, w, dy) =
            (randn((3, t / 3, k), 1), (randn((n, k), 2) * 0.05).unwrap(), (randn((3, t / 3, n), 3) * 1e-3).unwrap());
        let bias = randn(n, 4);
        let round = |x: &Tensor, operand, contraction| {
            rounded(config, &x.flatten_to(x.rank() - 2).unwrap(), operand, contraction)
        };
        let wq = round(&w, Fp8Operand::Weight, Contraction::Columns);
        let product = round(&x, Fp8Operand::Input, Contraction::Columns).matmul(&wq.t().unwrap()).unwrap();
        let y = product.broadcast_add(&bias.to_dtype(DType::F64).unwrap()).unwrap().reshape((3, t / 3, n)).unwrap();
        let dx = round(&dy, Fp8Operand::GradOutput, Contraction::Columns).matmul(&wq).unwrap();
        let dx = dx.reshape((3, t / 3, k)).unwrap();
        let dy_rows = round(&dy, Fp8Operand::GradOutput, Contraction::Rows);
        let dw = dy_rows.t().unwrap().matmul(&round(&x, Fp8Operand::Input, Contraction::Rows)).unwrap();
        let db = dy.to_dtype(DType::F64).unwrap().sum((0, 1)).unwrap();
        for test_device in devices() {
            let config = Fp8Config { fake_quantize: true, ..config };
            let layers = Arc::new(Fp8Layers::new(config, vec![Fp8Module::linear("a")], &test_device.device()).unwrap());
            let got = step_of_linear(&layers, [&x, &w, &bias, &dy], &test_device);
            for (what, (got, want)) in ["y", "dx", "dw", "db"].iter().zip(got.iter().zip([&y, &dx, &dw, &db])) {
                assert_close(&format!("{what} {config:?} {test_device:?}"), got, want, SUMS);
            }
        }
    }
}

/// Small integers times powers of two have exact sums, so that any order of summation gives the same bits.
#[test]
fn exact_sums_are_exact() {
    let integers = |rows: usize, columns: usize, seed: usize| {
        let values: Vec<f32> =
            (0..rows * columns).map(|i| ((i * 7919 + seed * 31 + i / 13) % 15) as f32 - 7.0).collect();
        Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
    };
    let (x, w, dy) = (integers(40, 304, 1), integers(32, 304, 2), integers(40, 32, 3));
    let recipes = [Fp8Recipe::Current(rule(true)), Fp8Recipe::Blockwise(rule(true))];
    for config in FORMATS.into_iter().flat_map(|formats| recipes.map(|recipe| config_in(formats, recipe))) {
        for test_device in devices_for([32, 304], config.recipe) {
            let layers = layers_of(config, &test_device);
            let weight = trainable(&test_device.put(&w)).with_fp8(layers.layer("a").unwrap());
            let input = test_device.put(&x);
            let got = test_device.run(|| {
                let _on = layers.enable(0).unwrap();
                let tape =
                    tape(std::slice::from_ref(&input), || linear(&input, &weight, None, OutputDtype::SameAsInput));
                let y = tape.output().clone();
                let dx = tape.backward(&test_device.put(&dy)).unwrap().remove(&input).unwrap();
                [y, dx, grad_of(&weight)]
            });
            // E4M3 holds integers to 16, and E5M2 to 8.
            let want = [x.matmul(&w.t().unwrap()), dy.matmul(&w), dy.t().unwrap().matmul(&x)];
            for (got, want) in got.iter().zip(want) {
                assert!(bits(got) == bits(&want.unwrap()), "{config:?} {test_device:?}");
            }
        }
    }
}

/// With bf16 activations the output is rounded once.
#[test]
fn bf16_outputs_are_rounded_once() {
    let (x, w) =
        (randn((9, 128), 1).to_dtype(DType::BF16).unwrap(), randn((16, 128), 2).to_dtype(DType::BF16).unwrap());
    let recipe = Fp8Recipe::Current(rule(false));
    for test_device in devices_for([16, 128], recipe) {
        let layers = layers(recipe, &test_device);
        let weight = Weight::frozen(test_device.put(&w)).with_fp8(layers.layer("a").unwrap());
        let x = test_device.put(&x);
        let of = |dtype| {
            test_device.run(|| {
                let _on = layers.enable(0).unwrap();
                linear(&x, &weight, None, dtype).unwrap()
            })
        };
        let wide = of(OutputDtype::F32).to_dtype(DType::BF16).unwrap();
        assert!(bits(&of(OutputDtype::SameAsInput)) == bits(&wide));
    }
}

/// On a GPU the error names the layer and its sizes, and the CPU multiplies all sizes.
#[test]
fn a_weight_that_cublas_cannot_multiply_is_an_error() {
    for (n, k) in [(24, 32), (32, 40), (1, 16)] {
        for test_device in devices() {
            let layers = layers(Fp8Recipe::Current(rule(false)), &test_device);
            let w = Weight::frozen(test_device.put(&randn((n, k), 1))).with_fp8(layers.layer("b").unwrap());
            let x = test_device.put(&randn((2, k), 2));
            let y = test_device.run(|| {
                let _on = layers.enable(0).unwrap();
                linear(&x, &w, None, OutputDtype::SameAsInput)
            });
            match test_device {
                TestDevice::Cpu => assert_eq!(y.unwrap().dims(), [2, n]),
                _ => assert_error(
                    y,
                    &format!(
                        "b: FP8 on a GPU needs a weight whose rows and columns are multiples of 16, not [{n}, {k}]"
                    ),
                ),
            }
        }
    }
}

#[test]
fn a_layer_is_dense_while_fp8_is_off() {
    let layers = layers(Fp8Recipe::Current(rule(false)), &TestDevice::Cpu);
    let (x, value) = (randn((5, 32), 1), randn((8, 32), 2));
    let dense = Weight::frozen(value.clone());
    let weight = Weight::frozen(value).with_fp8(layers.layer("a").unwrap());
    let y = |w: &Weight| bits(&linear(&x, w, None, OutputDtype::SameAsInput).unwrap());
    assert!(y(&weight) == y(&dense));
    let guard = layers.enable(0).unwrap();
    assert!(y(&weight) != y(&dense));
    drop(guard);
    assert!(y(&weight) == y(&dense));
}

/// A layer whose input is recomputed in backward, or that saves its codes, has the gradient of one that saves the input.
#[test]
fn a_recomputed_input_and_saved_codes_give_the_same_gradient() {
    check_each(
        recipes().into_iter().flat_map(|recipe| devices_for([32, 48], recipe).into_iter().map(move |on| (recipe, on))),
        |(recipe, on)| {
            let layers = layers(recipe, &on);
            let w = trainable(&on.put(&randn((32, 48), 1))).with_fp8(layers.layer("a").unwrap());
            let [gate, up] = [2, 3].map(|seed| on.put(&randn((30, 48), seed)));
            let dy = on.put(&randn((30, 32), 4));
            let _enabled = layers.enable(0).unwrap();
            on.run(|| {
                let gated = candlewick_ops::swiglu(&gate, &up).unwrap();
                let saved = tape(std::slice::from_ref(&gated), || linear(&gated, &w, None, OutputDtype::SameAsInput));
                saved.backward(&dy).unwrap();
                let want = bits(&grad_of(&w));
                let sink: &GradSink = w.sink().unwrap();
                sink.reset();
                let recomputed = tape(&[gate.clone(), up.clone()], || {
                    linear(&candlewick_ops::swiglu(&gate, &up)?, &w, None, OutputDtype::SameAsInput)
                });
                recomputed.backward(&dy).unwrap();
                assert!(bits(&grad_of(&w)) == want, "{recipe:?}");
                sink.reset();
                let of_codes = tape(std::slice::from_ref(&gated), || {
                    saved_by_readers_only(&gated);
                    linear(&gated, &w, None, OutputDtype::SameAsInput)
                });
                of_codes.backward(&dy).unwrap();
                assert!(bits(&grad_of(&w)) == want, "{recipe:?}: codes");
            });
        },
    );
}

/// If an exchange waits for dx, dw is computed after it: from the same codes, to the bit.
#[test]
fn a_deferred_weight_gradient_is_the_plain_one() {
    for recipe in recipes() {
        for test_device in devices() {
            let layers = layers(recipe, &test_device);
            let value = test_device.put(&randn((48, 32), 2));
            let (x, dy) = (test_device.put(&randn((40, 32), 1)), test_device.put(&randn((40, 48), 3)));
            let run = |exchanges: bool| {
                let w = trainable(&value).with_fp8(layers.layer("a").unwrap());
                let _on = layers.enable(0).unwrap();
                let op = || {
                    let y = match exchanges {
                        false => x.clone(),
                        true => identity_exchange(&x)?,
                    };
                    linear(&y, &w, None, OutputDtype::SameAsInput)
                };
                let dx = tape(std::slice::from_ref(&x), op).backward(&dy).unwrap().remove(&x).unwrap();
                (bits(&dx), bits(&grad_of(&w)))
            };
            assert!(test_device.run(|| run(true)) == test_device.run(|| run(false)), "{recipe:?} {test_device:?}");
        }
    }
}
