//! FP8 copies of weights in their buffers, of whole weights and of shards.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{
    FP8_WEIGHT_FORMAT, FlatBuffer, Fp8Layers, Fp8Module, Fp8Recipe, GradSink, OutputDtype, Weight, amax, dequantize,
    linear, quantize,
};

use super::{DELAYED, SUMS, config, devices_for, layers, recipes, rule};
use crate::cases::{TestDevice, assert_close, assert_error, bits, check_each, grad_of, randn, tape};

/// The copy of a weight in its buffer is used until the contents change, and dropped with them.
#[test]
fn a_quantized_weight_is_cached_until_its_buffer_changes() {
    let recipe = Fp8Recipe::Current(rule(false));
    for test_device in devices_for([16, 16], recipe) {
        let layers = layers(recipe, &test_device);
        let flat = test_device.put(&randn(256, 1));
        let buffer = FlatBuffer::from_tensor(flat.copy().unwrap());
        let weight = Weight::frozen(buffer.view(0, (16, 16)).unwrap()).with_fp8(layers.layer("a").unwrap());
        let x = test_device.put(&randn((3, 16), 2));
        let _on = layers.enable(0).unwrap();
        let run = || test_device.run(|| linear(&x, &weight, None, OutputDtype::SameAsInput));
        let y = || bits(&run().unwrap());
        let first = y();
        test_device.run(|| candlewick_ops::zero_(&buffer.data().unwrap())).unwrap();
        assert!(y() == first, "the copy is used");
        buffer.drop_fp8_copies();
        assert!(y().iter().all(|bits| f64::from_bits(*bits) == 0.0), "the new contents are used");
        buffer.release();
        assert!(run().is_err());
        buffer.materialize(flat).unwrap();
        assert!(y() == first);
    }
}

/// A copy made for the forward alone is replaced by one that backward can read.
#[test]
fn a_cached_weight_serves_a_later_backward() {
    let recipe = Fp8Recipe::Blockwise(rule(true));
    for test_device in devices_for([32, 16], recipe) {
        let layers = layers(recipe, &test_device);
        let buffer = FlatBuffer::from_tensor(test_device.put(&randn(32 * 16, 1)));
        let weight = Weight::frozen(buffer.view(0, (32, 16)).unwrap()).with_fp8(layers.layer("a").unwrap());
        let (x, dy) = (test_device.put(&randn((3, 16), 2)), test_device.put(&randn((3, 32), 3)));
        let dx = || {
            test_device.run(|| {
                let _on = layers.enable(0).unwrap();
                let run = || linear(&x, &weight, None, OutputDtype::SameAsInput);
                let tape = tape(std::slice::from_ref(&x), run);
                bits(&tape.backward(&dy).unwrap().remove(&x).unwrap())
            })
        };
        let want = dx();
        buffer.drop_fp8_copies();
        test_device.run(|| {
            let _on = layers.enable(0).unwrap();
            linear(&x, &weight, None, OutputDtype::SameAsInput).unwrap()
        });
        assert!(dx() == want, "{test_device:?}");
    }
}

/// Returns output and gradients of a linear layer whose weight is a view of `buffer`.
fn step_with(weight: &Weight, x: &Tensor, dy: &Tensor) -> [Vec<u64>; 3] {
    weight.sink().unwrap().reset();
    let tape = tape(std::slice::from_ref(x), || linear(x, weight, None, OutputDtype::SameAsInput));
    let y = bits(tape.output());
    let dx = bits(&tape.backward(dy).unwrap().remove(x).unwrap());
    [y, dx, bits(&grad_of(weight))]
}

/// A weight of which ranks have parts: the codes of all parts, with the scale of the whole, are those of the whole weight. A
/// layer with these codes in its buffer needs no elements, and has the same statistics.
#[test]
fn codes_of_parts_are_those_of_the_whole_weight() {
    let (n, k, start) = (80, 272, 128);
    let values = randn(start + n * k, 1);
    let recipes = recipes().into_iter().filter(|recipe| !matches!(recipe, Fp8Recipe::Blockwise(_)));
    check_each(
        recipes.flat_map(|recipe| devices_for([n, k], recipe).into_iter().map(move |on| (recipe, on))),
        |case| {
            let (recipe, test_device) = case;
            let flat = test_device.put(&values.to_dtype(DType::BF16).unwrap());
            let buffer = FlatBuffer::from_tensor(flat.clone());
            let sink = GradSink::new(Tensor::zeros((n, k), DType::F32, flat.device()).unwrap()).unwrap();
            // Its only weight: amaxes of weights are needed until all have scales.
            let modules = vec![Fp8Module::linear("b")];
            let layers = Arc::new(Fp8Layers::new(config(recipe), modules, &test_device.device()).unwrap());
            let layer = layers.layer("b").unwrap();
            let weight = Weight::trainable(buffer.view(start, (n, k)).unwrap(), sink).with_fp8(layer.clone());
            let bf16 =
                |shape: (usize, usize), seed| test_device.put(&randn(shape, seed).to_dtype(DType::BF16).unwrap());
            let (x, dy) = (bf16((20, k), 2), bf16((20, n), 3));
            // The parts of three ranks: the second has whole tiles, the third the rest.
            let parts = [0..1003, 1003..1003 + 4096, 5099..n * k]
                .map(|part: std::ops::Range<usize>| flat.narrow(0, start + part.start, part.len()).unwrap());
            for step in 0..2 {
                test_device.run(|| {
                    layers.request_stats();
                    let on = layers.enable(0).unwrap();
                    let want = step_with(&weight, &x, &dy);
                    drop(on);
                    let amaxes = layers.amaxes().map(|amaxes| amaxes.copy().unwrap());
                    let stats = layers.take_stats().unwrap();
                    if let Some(amaxes) = layers.amaxes() {
                        candlewick_ops::zero_(amaxes).unwrap();
                    }
                    buffer.release();
                    layers.request_stats();
                    let on = layers.enable(0).unwrap();
                    let of_parts = parts.each_ref().map(|part| amax(part).unwrap());
                    of_parts.iter().for_each(|amax| layer.record_weight_amax(amax).unwrap());
                    let whole = Tensor::cat(&of_parts, 0).unwrap().max_keepdim(0).unwrap();
                    let scale = layer.weight_scale(&whole).unwrap();
                    assert_eq!(layers.weight_scales_need_amaxes(), step == 0 || recipe != DELAYED);
                    let codes = parts.each_ref().map(|part| layer.quantize_part(part, &scale).unwrap());
                    let codes = Tensor::cat(&codes, 0).unwrap().reshape((n, k)).unwrap();
                    buffer.hold_fp8_copies([(start, layer.weight_from_codes(codes, &scale).unwrap())].into());
                    assert!(buffer.has_fp8_copies() && !buffer.is_allocated());
                    assert!(step_with(&weight, &x, &dy) == want, "{recipe:?} {test_device:?} step {step}");
                    drop(on);
                    let of_codes = layers.take_stats().unwrap();
                    assert_close("sums of statistics", &of_codes.sums, &stats.sums, SUMS);
                    assert!(bits(&of_codes.amaxes) == bits(&stats.amaxes), "{recipe:?} {test_device:?} step {step}");
                    if let (Some(amaxes), Some(want)) = (layers.amaxes(), &amaxes) {
                        assert!(bits(amaxes) == bits(want), "{test_device:?}: the next scales");
                        layers.update(want).unwrap();
                    }
                    buffer.materialize(flat.clone()).unwrap();
                });
            }
        },
    );
}

/// A frozen weight that is stored in FP8, and one in bf16 with its values: both multiply the same numbers.
#[test]
fn the_codes_of_a_stored_weight_multiply_as_they_are() {
    let recipe = Fp8Recipe::Blockwise(rule(true));
    for [n, k] in [[256, 128], [144, 272], [16, 400], [40, 72]] {
        let bytes = quantize(&randn((n, k), 1), &FP8_WEIGHT_FORMAT).unwrap();
        let values = dequantize(&bytes, &FP8_WEIGHT_FORMAT, &[n, k], DType::BF16).unwrap();
        for test_device in devices_for([n, k], recipe) {
            let bf16 =
                |shape: (usize, usize), seed| test_device.put(&randn(shape, seed).to_dtype(DType::BF16).unwrap());
            let (x, dy) = (bf16((20, k), 2), bf16((20, n), 3));
            let layers = layers(recipe, &test_device);
            let stored = FlatBuffer::from_tensor(test_device.put(&bytes));
            let view = stored.view(0, bytes.elem_count()).unwrap();
            let stored = Weight::quantized(view, &FP8_WEIGHT_FORMAT, [n, k]).unwrap();
            let dense = FlatBuffer::from_tensor(test_device.put(&values.flatten_all().unwrap()));
            let dense = Weight::frozen(dense.view(0, (n, k)).unwrap());
            let [of_stored, of_dense] = [stored, dense].map(|weight| {
                let weight = weight.with_fp8(layers.layer("a").unwrap());
                let run = || {
                    let _on = layers.enable(0).unwrap();
                    let tape = tape(std::slice::from_ref(&x), || linear(&x, &weight, None, OutputDtype::SameAsInput));
                    let y = bits(tape.output());
                    [y, bits(&tape.backward(&dy).unwrap().remove(&x).unwrap())]
                };
                assert_multiplies_codes(&test_device, &weight, run)
            });
            assert!(of_stored == of_dense, "[{n}, {k}] {test_device:?}");
        }
    }
}

/// Runs `run`, and in the emulator checks that a stored weight is neither dequantized nor quantized again.
fn assert_multiplies_codes<T>(test_device: &TestDevice, weight: &Weight, run: impl FnOnce() -> T) -> T {
    #[cfg(not(feature = "cuda"))]
    if matches!(test_device, TestDevice::Emulated) && weight.dtype() == DType::U8 {
        let (result, work) = candlewick_ops::emulate_counted(run);
        let of_weight = |name: &&String| name.starts_with("dequantize") || name.starts_with("transpose_codes");
        let of_weight: Vec<&String> = work.launches.iter().filter(of_weight).collect();
        assert_eq!(of_weight, ["transpose_codes"], "{:?}", work.launches);
        let n_orders = work.launches.iter().filter(|name| *name == "order_scales").count();
        assert!(n_orders >= 2, "the device orders the scales: {:?}", work.launches);
        let n_of = |block: &str| work.launches.iter().filter(|name| name.contains(block)).count();
        assert_eq!([n_of("1x128"), n_of("128x128")], [2, 0], "the input and the gradient: {:?}", work.launches);
        return result;
    }
    let _ = weight;
    test_device.run(run)
}

#[test]
fn parts_of_a_weight_have_no_blocks() {
    let layers = layers(Fp8Recipe::Blockwise(rule(true)), &TestDevice::Cpu);
    let scale = layers.layer("b").unwrap().weight_scale(&Tensor::ones(1, DType::F32, &Device::Cpu).unwrap());
    assert_error(scale, "b: fp8_param_gather: shards of a weight divide the blocks of blockwise scaling");
}
