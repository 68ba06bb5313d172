use candle_core::{DType, Device, Tensor};
use candlewick_ops::{DropPolicy, Routing, expert_capacity, limit_capacity, permute_weights};

use super::{assignment, devices, to_u32s, u32s};
use crate::cases::{randn, tape, values};

const DROPPED: u32 = u32::MAX;

/// Returns a routing of four tokens to two of three experts each.
fn routing(device: &Device) -> Routing {
    let experts = u32s(&[0, 1, 0, 2, 1, 0, 0, 2]).reshape((4, 2)).unwrap();
    let weights = Tensor::new(&[[0.3f32, 0.7], [0.9, 0.1], [0.5, 0.5], [0.3, 0.7]], device).unwrap();
    Routing { weights, assignment: assignment(&experts, 3, device) }
}

#[test]
fn slots_beyond_the_capacity_are_dropped() {
    for test_device in devices() {
        test_device.run(|| {
            let routing = routing(&test_device.device());
            let limited =
                |capacity, policy| to_u32s(&limit_capacity(&routing, capacity, policy).unwrap().assignment.experts);
            // Expert 0 has the weights 0.3, 0.9, 0.5 and 0.3.
            assert_eq!(limited(2, DropPolicy::Position), [0, 1, 0, 2, 1, DROPPED, DROPPED, 2]);
            assert_eq!(limited(2, DropPolicy::Weights), [DROPPED, 1, 0, 2, 1, 0, DROPPED, 2]);
            assert_eq!(limited(3, DropPolicy::Weights), [0, 1, 0, 2, 1, 0, DROPPED, 2]);
            assert_eq!(limited(4, DropPolicy::Weights), [0, 1, 0, 2, 1, 0, 0, 2]);
            assert_eq!(limited(0, DropPolicy::Position), [DROPPED; 8]);
        });
    }
}

#[test]
fn a_dropped_slot_has_no_weight_and_no_gradient() {
    for test_device in devices() {
        test_device.run(|| {
            let Routing { weights, assignment } = routing(&test_device.device());
            let tape = tape(std::slice::from_ref(&weights), || {
                let routing = Routing { weights: weights.clone(), assignment };
                let limited = limit_capacity(&routing, 1, DropPolicy::Weights)?;
                permute_weights(&limited.weights, &limited.assignment)
            });
            assert_eq!(values(tape.output())[3..], [0.0; 5]);
            let grads = tape.backward(&test_device.put(&randn(8, 1))).unwrap();
            let kept: Vec<bool> = values(grads.get(&weights).unwrap()).iter().map(|d| *d != 0.0).collect();
            assert_eq!(kept, [false, true, true, false, false, false, false, true]);
        });
    }
}

#[test]
fn the_capacity_is_the_balanced_load_times_the_factor() {
    assert_eq!(expert_capacity(7, 4, 16, 1.0), 2);
    assert_eq!(expert_capacity(8, 4, 16, 1.0), 2);
    assert_eq!(expert_capacity(8, 4, 16, 1.25), 3);
    assert_eq!(expert_capacity(0, 4, 16, 1.25), 0);
    let of_ten = [1e-300, 1.5, 4.0, 4.1, 1e300].map(|factor| expert_capacity(10, 2, 8, factor));
    assert_eq!(of_ten, [1, 4, 10, 10, 10], "a token selects an expert once");
}

#[test]
fn counts_are_those_of_kept_slots() {
    let limited = limit_capacity(&routing(&Device::Cpu), 1, DropPolicy::Position).unwrap();
    assert_eq!(values(&limited.assignment.counts().unwrap()), [1.0; 3]);
    assert_eq!(limited.weights.dtype(), DType::F32);
}
