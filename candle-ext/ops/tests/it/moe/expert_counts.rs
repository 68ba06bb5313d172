use candle_core::Device;
use candlewick_ops::{TokenSequences, expert_counts};

use super::{devices, u32s};
use crate::cases::{assert_error, values};

const DROPPED: u32 = u32::MAX;

#[test]
fn experts_are_counted_by_sequence() {
    for test_device in devices() {
        let experts = test_device.put(&u32s(&[0, 1, 2, 0, 0, DROPPED, 2, 1]).reshape((4, 2)).unwrap());
        let of_tokens = test_device.put(&u32s(&[2, 0, 0, 2]));
        test_device.run(|| {
            assert_eq!(values(&expert_counts(&experts, None, 3).unwrap()), [3.0, 2.0, 2.0]);
            let sequences = TokenSequences { of_tokens: &of_tokens, n_sequences: 3 };
            let counts = expert_counts(&experts, Some(sequences), 3).unwrap();
            assert_eq!(counts.dims(), [3, 3]);
            assert_eq!(values(&counts), [2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 2.0, 1.0]);
            let none = experts.narrow(0, 0, 0).unwrap();
            assert_eq!(values(&expert_counts(&none, None, 3).unwrap()), [0.0; 3]);
        });
    }
}

#[test]
fn many_slots_are_counted_exactly() {
    let (t, k, e) = (777, 3, 5);
    let experts: Vec<u32> = (0..(t * k) as u32).map(|slot| slot * slot % e as u32).collect();
    let mut want = vec![0.0; e];
    experts.iter().for_each(|expert| want[*expert as usize] += 1.0);
    for test_device in devices() {
        let experts = test_device.put(&u32s(&experts).reshape((t, k)).unwrap());
        assert_eq!(values(&test_device.run(|| expert_counts(&experts, None, e)).unwrap()), want);
    }
}

#[test]
fn wrong_sequences_are_named() {
    let experts = u32s(&[0, 1]).reshape((2, 1)).unwrap().to_device(&Device::Cpu).unwrap();
    let sequences = TokenSequences { of_tokens: &u32s(&[0, 0, 0]), n_sequences: 1 };
    assert_error(expert_counts(&experts, Some(sequences), 2), "want u32 sequences [2], got U32 [3]");
}
