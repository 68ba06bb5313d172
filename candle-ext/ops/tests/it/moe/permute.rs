use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{ExpertAssignment, permute, permute_weights, unpermute};

use super::{assignment, check_all_dtypes, devices, experts, to_u32s, u32s};
use crate::cases::{OpCase, TestDevice, assert_error, check_each, randn, tape, values};

const CASES: [(usize, usize, usize, Option<usize>); 6] = [
    (37, 4, 9, None),
    (5, 2, 3, Some(3)),
    (1, 1, 2, None),
    (1, 3, 4, Some(1)),
    (60, 8, 64, Some(7)),
    (300, 1, 5, None),
];

#[test]
fn rows_are_sorted_by_expert_and_stay_in_the_order_of_slots() {
    for test_device in devices() {
        let chosen = u32s(&[2, 0, 0, u32::MAX, 2, 3]).reshape((3, 2)).unwrap();
        test_device.run(|| {
            let sorted = assignment(&chosen, 4, &test_device.device());
            assert_eq!(to_u32s(&sorted.offsets), [0, 2, 2, 4, 5]);
            assert_eq!(to_u32s(&sorted.order), [1, 2, 0, 4, 5, 3]);
            assert_eq!(to_u32s(&sorted.rows), [2, 0, 1, 5, 3, 4]);
            assert_eq!(values(&sorted.counts().unwrap()), [2.0, 0.0, 2.0, 1.0]);
            let sizes = (sorted.n_tokens(), sorted.top_k(), sorted.n_rows(), sorted.n_experts());
            assert_eq!(sizes, (3, 2, 6, 4));
        });
    }
}

#[test]
fn every_assignment_equals_a_stable_sort() {
    check_each(CASES, |(t, k, e, dropped)| {
        let chosen = experts(t, k, e, dropped);
        let keys = to_u32s(&chosen);
        let mut order: Vec<u32> = (0..keys.len() as u32).collect();
        order.sort_by_key(|slot| keys[*slot as usize]);
        for test_device in devices() {
            let sorted = test_device.run(|| assignment(&chosen, e, &test_device.device()));
            assert_eq!(to_u32s(&sorted.order), order);
            let rows = to_u32s(&sorted.rows);
            assert!(order.iter().enumerate().all(|(row, slot)| rows[*slot as usize] == row as u32));
            let below = |expert: u32| keys.iter().filter(|key| **key < expert).count() as u32;
            assert_eq!(to_u32s(&sorted.offsets), (0..=e as u32).map(below).collect::<Vec<u32>>());
        }
    });
}

/// Returns 1 for each kept element and 0 for dropped ones, f64 [n, 1], in the order of rows or of slots.
fn kept(experts: &Tensor, order: Option<&Tensor>) -> Tensor {
    let kept = experts.flatten_all().unwrap().ne(u32::MAX).unwrap();
    let kept = match order {
        Some(order) => kept.index_select(order, 0).unwrap(),
        None => kept,
    };
    kept.to_dtype(DType::F64).unwrap().unsqueeze(1).unwrap()
}

fn with_case(
    (t, k, e, dropped): (usize, usize, usize, Option<usize>),
    check: impl Fn(&Tensor, &ExpertAssignment, &dyn Fn(&Device) -> ExpertAssignment),
) {
    let chosen = experts(t, k, e, dropped);
    check(&chosen, &assignment(&chosen, e, &Device::Cpu), &|device| assignment(&chosen, e, device));
}

#[test]
fn permutation_equals_the_reference() {
    for (case, d) in CASES.into_iter().flat_map(|case| [1, 24, 130].map(|d| (case, d))) {
        with_case(case, |chosen, sorted, on| {
            let tokens: Vec<u32> = to_u32s(&sorted.order).iter().map(|slot| slot / case.1 as u32).collect();
            check_all_dtypes(&OpCase {
                name: "permute",
                inputs: vec![randn((case.0, d), 1)],
                weights: vec![],
                op: &|x, _| permute(&x[0], &on(x[0].device())),
                reference: &|a| a[0].index_select(&u32s(&tokens), 0)?.broadcast_mul(&kept(chosen, Some(&sorted.order))),
            });
        });
    }
}

#[test]
fn the_inverse_equals_the_reference() {
    for (case, d) in CASES.into_iter().flat_map(|case| [1, 24, 130].map(|d| (case, d))) {
        with_case(case, |chosen, sorted, on| {
            check_all_dtypes(&OpCase {
                name: "unpermute",
                inputs: vec![randn((case.0 * case.1, d), 1)],
                weights: vec![],
                op: &|y, _| unpermute(&y[0], &on(y[0].device())),
                reference: &|a| {
                    let slots = a[0].index_select(&sorted.rows, 0)?.broadcast_mul(&kept(chosen, None))?;
                    slots.reshape((case.0, case.1, d))?.sum(1)
                },
            });
        });
    }
}

#[test]
fn weights_equal_the_reference() {
    check_each(CASES, |case| {
        with_case(case, |chosen, sorted, on| {
            OpCase {
                name: "permute_weights",
                inputs: vec![randn((case.0, case.1), 1)],
                weights: vec![],
                op: &|w, _| permute_weights(&w[0], &on(w[0].device())),
                reference: &|a| {
                    let rows = a[0].flatten_all()?.index_select(&sorted.order, 0)?;
                    rows.mul(&kept(chosen, Some(&sorted.order)).squeeze(1)?)
                },
            }
            .check_on(&devices(), DType::F32);
        });
    });
}

#[test]
fn no_tokens_give_no_rows() {
    for test_device in devices() {
        let none = test_device.put(&u32s(&[0, 1])).reshape((1, 2)).unwrap().narrow(0, 0, 0).unwrap();
        let x = test_device.put(&randn((1, 4), 1)).narrow(0, 0, 0).unwrap();
        test_device.run(|| {
            let none = assignment(&none, 3, &test_device.device());
            assert_eq!(to_u32s(&none.offsets), [0; 4]);
            let tape = tape(std::slice::from_ref(&x), || unpermute(&permute(&x, &none)?, &none));
            let y = tape.output().clone();
            assert_eq!(y.dims(), [0, 4]);
            assert_eq!(tape.backward(&y).unwrap().get(&x).unwrap().dims(), [0, 4]);
        });
    }
}

/// Sums that round in any other order would differ.
#[test]
fn sums_are_in_the_order_of_slots_and_rounded_once() {
    let chosen = u32s(&[2, 0, 1]).reshape((1, 3)).unwrap();
    let y = Tensor::new(&[[-1e8f32], [1.0], [1e8]], &Device::Cpu).unwrap();
    let sum = |test_device: &TestDevice| -> Result<Tensor> {
        unpermute(&test_device.put(&y), &assignment(&chosen, 3, &test_device.device()))
    };
    for test_device in devices() {
        // Slots give rows 2, 0 and 1: (1e8 - 1e8) + 1.
        assert_eq!(values(&test_device.run(|| sum(&test_device)).unwrap()), [1.0]);
    }
}

#[test]
fn wrong_shapes_and_experts_are_named() {
    let chosen = u32s(&[2, 0, 1, 1]).reshape((2, 2)).unwrap();
    assert_error(ExpertAssignment::new(&chosen, 2), "slot 0 has expert 2, but there are 2");
    assert_error(ExpertAssignment::new(&u32s(&[1]), 2), "want u32 experts [t, k]");
    assert_error(ExpertAssignment::new(&randn((2, 2), 1), 2), "got F32 [2, 2]");
    let sorted = assignment(&chosen, 3, &Device::Cpu);
    assert_error(permute(&randn((3, 5), 1), &sorted), "permute: want an input [2, d]");
    assert_error(unpermute(&randn((2, 5), 1), &sorted), "unpermute: want an input [4, d]");
    assert_error(permute_weights(&randn((2, 3), 1), &sorted), "want f32 weights [2, 2], got F32 [2, 3]");
}

#[test]
fn padding_rounds_each_expert_up_to_a_multiple() {
    let chosen = u32s(&[2, 0, 0, u32::MAX, 2, 0]).reshape((3, 2)).unwrap();
    for test_device in devices() {
        test_device.run(|| {
            let sorted = assignment(&chosen, 3, &test_device.device());
            let padded = sorted.padded(4).unwrap();
            assert_eq!((padded.n_slots(), padded.n_rows()), (6, 15));
            assert_eq!(to_u32s(&padded.offsets), [0, 4, 4, 8]);
            let none = u32::MAX;
            assert_eq!(to_u32s(&padded.order), [&[1, 2, 5, none, 0, 4, none, none, 3][..], &[none; 6]].concat());
            assert_eq!(to_u32s(&padded.rows), [4, 0, 1, 8, 5, 2]);
            assert_eq!(values(&padded.counts().unwrap()), [3.0, 0.0, 2.0]);
            assert_error(padded.padded(2), "want an assignment without padding");
            // A round trip gives what it gives without padding.
            let (x, w) = (test_device.put(&randn((3, 5), 1)), test_device.put(&randn((3, 2), 2)));
            let results = |assignment: &ExpertAssignment| {
                let tape = tape(std::slice::from_ref(&x), || unpermute(&permute(&x, assignment)?, assignment));
                let y = tape.output().clone();
                [y, tape.backward(&x).unwrap().remove(&x).unwrap()]
            };
            for (padded, plain) in results(&padded).iter().zip(&results(&sorted)) {
                assert_eq!(values(padded), values(plain));
            }
            let weights = values(&permute_weights(&w, &padded).unwrap());
            assert!(
                weights.iter().zip(to_u32s(&padded.order)).all(|(w, slot)| (*w == 0.0) == (slot == none || slot == 3))
            );
        });
    }
}

#[test]
fn padding_gives_each_expert_a_fixed_number_of_rows() {
    let chosen = u32s(&[2, 0, 0, u32::MAX, 2, 0]).reshape((3, 2)).unwrap();
    for test_device in devices() {
        test_device.run(|| {
            let sorted = assignment(&chosen, 3, &test_device.device());
            let padded = sorted.padded_to(4).unwrap();
            assert_eq!((padded.n_slots(), padded.n_rows()), (6, 12));
            assert_eq!(to_u32s(&padded.offsets), [0, 4, 8, 12]);
            let none = u32::MAX;
            let order = [[1, 2, 5, none], [none; 4], [0, 4, none, none]];
            assert_eq!(to_u32s(&padded.order), order.as_flattened());
            // The row of the dropped slot is past all experts.
            assert_eq!(to_u32s(&padded.rows), [8, 0, 1, 12, 9, 2]);
            assert_eq!(values(&padded.counts().unwrap()), [3.0, 0.0, 2.0]);
            assert_error(padded.padded_to(5), "want an assignment without padding");
        });
    }
    let sorted = assignment(&chosen, 3, &Device::Cpu);
    assert_error(sorted.padded_to(2), "expert 0 has 3 rows, which cannot be padded to 2");
}

/// Sorted by experts whose numbers of rows differ.
#[test]
fn a_round_trip_with_padding_gives_the_bits_of_one_without() {
    for (case, d) in CASES.into_iter().flat_map(|case| [1, 24].map(|d| (case, d))) {
        with_case(case, |_, _, on| {
            for test_device in devices() {
                let (x, w) = (test_device.put(&randn((case.0, d), 1)), test_device.put(&randn((case.0, case.1), 2)));
                test_device.run(|| {
                    let sorted = on(&test_device.device());
                    let padded = sorted.padded_to(case.0 + 3).unwrap();
                    let results = |assignment: &ExpertAssignment| {
                        let rows = tape(std::slice::from_ref(&x), || unpermute(&permute(&x, assignment)?, assignment));
                        let y = rows.output().clone();
                        let weights = tape(std::slice::from_ref(&w), || permute_weights(&w, assignment));
                        let dw = weights.output().clone();
                        let [dx, dw] = [(rows, &x, &x), (weights, &w, &dw)]
                            .map(|(tape, input, dy)| tape.backward(dy).unwrap().remove(input).unwrap());
                        [y, dx, dw].map(|result| values(&result))
                    };
                    assert_eq!(results(&padded), results(&sorted));
                });
            }
        });
    }
}
