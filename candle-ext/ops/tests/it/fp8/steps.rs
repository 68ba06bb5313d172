//! Scales and statistics of the steps of FP8 layers.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candlewick_ops::{
    Fp8Format, Fp8Layers, Fp8Rounding, OutputDtype, ScaleBlock, ScaleRule, fp8_quantize, fp8_quantize_current, linear,
};

use super::{DELAYED, SUMS, devices_for, layers, recipes, sums};
use crate::cases::{TestDevice, assert_close, bits, randn, tape, trainable, values};

/// A step's amaxes become the next scales, the same for layers that read one input; without them nothing changes.
#[test]
fn delayed_scales_follow_the_tensors_of_the_step() {
    for test_device in devices_for([16, 32], DELAYED) {
        let layers = layers(DELAYED, &test_device);
        let x = test_device.put(&randn((20, 32), 1));
        let weight = |seed, module: &str| {
            trainable(&test_device.put(&randn((16, 32), seed))).with_fp8(layers.layer(module).unwrap())
        };
        let (a, b) = (weight(2, "a"), weight(3, "b"));
        let dy = test_device.put(&randn((20, 16), 4));
        test_device.run(|| {
            let _on = layers.enable(0).unwrap();
            for w in [&a, &b] {
                let tape = tape(std::slice::from_ref(&x), || linear(&x, w, None, OutputDtype::SameAsInput));
                tape.backward(&dy).unwrap();
            }
        });
        let amax_of = |x: &Tensor| values(x).into_iter().fold(0.0, |max: f64, x| max.max(x.abs())) as f32;
        let want = [
            amax_of(&x),
            amax_of(&a.value().unwrap()),
            amax_of(&dy),
            amax_of(&x),
            amax_of(&b.value().unwrap()),
            amax_of(&dy),
        ];
        let amaxes = layers.amaxes().unwrap().clone();
        assert_eq!(amaxes.to_vec1::<f32>().unwrap(), want);
        test_device.run(|| layers.update(&amaxes.copy().unwrap())).unwrap();
        assert_eq!(layers.amaxes().unwrap().to_vec1::<f32>().unwrap(), [0.0; 6], "the next step starts anew");
        let scales = || -> Vec<f32> { layers.states().unwrap()[1].scales.to_vec1().unwrap() };
        let (e4m3, e5m2) = (Fp8Format::E4m3.max(), Fp8Format::E5m2.max());
        assert_eq!(scales(), [e4m3 / want[3], e4m3 / want[4], e5m2 / want[5]]);
        let before = scales();
        let nothing = amaxes.zeros_like().unwrap();
        test_device.run(|| layers.update(&nothing)).unwrap();
        assert_eq!(scales(), before, "a step without tensors keeps the scales");
        // The next step multiplies with these scales, and has amaxes of its own.
        let of_next_step = [want[3], want[4], 0.0];
        let y = test_device.run(|| {
            let _on = layers.enable(0).unwrap();
            linear(&x, &b, None, OutputDtype::SameAsInput).unwrap()
        });
        assert_eq!(layers.amaxes().unwrap().to_vec1::<f32>().unwrap()[3..], of_next_step);
        let quantized = |x: &Tensor, scale: f32| {
            let scale = Tensor::new(&[scale], &Device::Cpu).unwrap();
            fp8_quantize(x, &scale, Fp8Format::E4m3, Fp8Rounding::Nearest).unwrap().dequantize().unwrap()
        };
        let want =
            quantized(&randn((20, 32), 1), before[0]).matmul(&quantized(&randn((16, 32), 3), before[1]).t().unwrap());
        assert_close("y of the second step", &y, &want.unwrap(), sums(&test_device));
    }
}

/// Returns dx of a step of layer "a" or "b", and updates the scales.
fn dx_of_step(layers: &Arc<Fp8Layers>, module: &str, dy: &Tensor, test_device: &TestDevice) -> Tensor {
    let x = test_device.put(&randn((16, 32), 1));
    let weight = trainable(&test_device.put(&randn((16, 32), 2))).with_fp8(layers.layer(module).unwrap());
    let dy = test_device.put(dy);
    test_device.run(|| {
        let on = layers.enable(0).unwrap();
        let tape = tape(std::slice::from_ref(&x), || linear(&x, &weight, None, OutputDtype::SameAsInput));
        let dx = tape.backward(&dy).unwrap().remove(&x).unwrap();
        drop(on);
        layers.update(&layers.amaxes().unwrap().copy().unwrap()).unwrap();
        dx
    })
}

/// A tensor without an amax of an earlier step has the scale of a first step, whatever other tensors have: a layer that is used
/// for the first time, and a gradient whose amax was infinite. At a scale of 1 these gradients would be zero.
#[test]
fn tensors_without_an_amax_yet_have_scales_of_their_own() {
    let dy = (randn((16, 16), 3) * 1e-7).unwrap();
    for test_device in devices_for([16, 32], DELAYED) {
        let of_step =
            |layers: &Arc<Fp8Layers>, module, dy: &Tensor| bits(&dx_of_step(layers, module, dy, &test_device));
        let new = || layers(DELAYED, &test_device);
        let first = of_step(&new(), "a", &dy);
        assert!(first != bits(&randn((16, 32), 1).zeros_like().unwrap()));
        let late = new();
        of_step(&late, "a", &dy);
        of_step(&late, "a", &dy);
        assert!(of_step(&late, "b", &dy) == first, "{test_device:?}: a layer that is used later");
        let infinite = Tensor::full(f32::INFINITY, (16, 16), &Device::Cpu).unwrap();
        let after_infinity = new();
        of_step(&after_infinity, "a", &infinite);
        let scale = after_infinity.states().unwrap()[0].scales.narrow(0, 1, 1).unwrap();
        let got = dx_of_step(&after_infinity, "a", &dy, &test_device);
        let weight = fp8_quantize(&randn((16, 32), 2), &scale, Fp8Format::E4m3, Fp8Rounding::Nearest);
        let rule = ScaleRule { power_of_two: true, amax_epsilon: 0.0 };
        let dy = fp8_quantize_current(&dy, ScaleBlock::Tensor, rule, Fp8Format::E5m2, Fp8Rounding::Nearest);
        let [dy, weight] = [dy, weight].map(|matrix| matrix.unwrap().dequantize().unwrap());
        assert_close("dx after an infinite gradient", &got, &dy.matmul(&weight).unwrap(), sums(&test_device));
    }
}

/// Statistics read codes in the order of rows, which on a GPU are not those that its matmuls read.
#[test]
fn statistics_of_a_step_are_those_of_the_cpu() {
    for recipe in recipes() {
        let (x, w, dy) = (randn((20, 144), 1), randn((32, 144), 2), (randn((20, 32), 3) * 1e-6).unwrap());
        let of = |test_device: &TestDevice| {
            let layers = layers(recipe, test_device);
            let weight = trainable(&test_device.put(&w)).with_fp8(layers.layer("a").unwrap());
            let (x, dy) = (test_device.put(&x), test_device.put(&dy));
            test_device.run(|| {
                layers.request_stats();
                let on = layers.enable(0).unwrap();
                let run = || linear(&x, &weight, None, OutputDtype::SameAsInput);
                tape(std::slice::from_ref(&x), run).backward(&dy).unwrap();
                drop(on);
                let stats = layers.take_stats().unwrap();
                [stats.sums, stats.amaxes].map(|stats| stats.to_device(&Device::Cpu).unwrap())
            })
        };
        let want = of(&TestDevice::Cpu);
        assert!(values(&want[1])[..3].iter().all(|amax| *amax > 0.0), "all operands of the layer are quantized");
        for test_device in devices_for([32, 144], recipe) {
            for (got, want) in of(&test_device).iter().zip(&want) {
                assert_close(&format!("{recipe:?} {test_device:?}"), got, want, SUMS);
            }
        }
    }
}
