use candle_core::{DType, Device, Tensor};
use candlewick_ops::{Weight, embedding, vocab_parallel_embedding};

use crate::cases::{OpCase, TestDevice, assert_error, bits, check_each, grad_of, randn, tape, trainable, values};

fn ids(ids: &[u32]) -> Tensor {
    Tensor::new(ids, &Device::Cpu).unwrap()
}

#[test]
fn it_equals_the_reference() {
    let many: Vec<u32> = (0..700).map(|i| i * i % 601).collect();
    check_each(
        [
            (601, 5, ids(&many)),
            (4, 3, ids(&[3, 3, 3, 0])),
            (1, 1, ids(&[0])),
            (151_936, 3, ids(&[151_935, 70_000, 0, 70_000])),
            (9, 2560, ids(&[8, 8, 1, 5])),
            (10, 8, ids(&[1, 9, 9, 0, 2, 1]).reshape((2, 3)).unwrap()),
        ],
        |(v, d, ids)| {
            let lookup = ids.flatten_all().unwrap();
            let shape = [ids.dims(), &[d]].concat();
            OpCase {
                name: "embedding",
                inputs: vec![],
                weights: vec![randn((v, d), 1)],
                op: &|_, w| embedding(&ids.to_device(w[0].value()?.device())?, &w[0], None),
                reference: &|a| a[0].index_select(&lookup, 0)?.reshape(shape.as_slice()),
            }
            .check_all_formats();
        },
    );
}

#[test]
fn sixteen_bit_tables_get_an_f32_sum() {
    for test_device in TestDevice::all() {
        test_device.run(|| {
            let w = trainable(&test_device.put(&randn((2, 1), 1).to_dtype(DType::BF16).unwrap()));
            let tape = tape(&[], || embedding(&test_device.put(&ids(&[1; 600])), &w, None));
            let dy = tape.output().ones_like().unwrap();
            tape.backward(&dy).unwrap();
            assert_eq!(values(&grad_of(&w)), [0.0, 600.0], "{test_device:?}");
        });
    }
}

#[test]
fn padding_gets_no_gradient() {
    for test_device in TestDevice::all() {
        test_device.run(|| {
            let w = trainable(&test_device.put(&randn((4, 3), 1)));
            let tape = tape(&[], || embedding(&test_device.put(&ids(&[2, 1, 2, 3])), &w, Some(2)));
            let y = tape.output().clone();
            assert_eq!(values(&y)[..3], values(&w.value().unwrap())[6..9]);
            tape.backward(&y.ones_like().unwrap()).unwrap();
            let ones = [1.0; 3].as_slice();
            assert_eq!(values(&grad_of(&w)), [&[0.0; 3], ones, &[0.0; 3], ones].concat(), "{test_device:?}");
        });
    }
}

#[test]
fn no_ids_give_no_rows() {
    for test_device in TestDevice::all() {
        test_device.run(|| {
            let w = trainable(&test_device.put(&randn((4, 3), 1)));
            let none = test_device.put(&ids(&[0])).narrow(0, 0, 0).unwrap();
            let tape = tape(&[], || embedding(&none, &w, None));
            let y = tape.output().clone();
            assert_eq!(y.dims(), [0, 3]);
            tape.backward(&y).unwrap();
            assert_eq!(bits(&grad_of(&w)), [0; 12]);
        });
    }
}

/// Covers more positions than one sort or merge, runs of uneven length, and rows wider than a block's columns.
#[test]
fn rows_of_many_positions_are_summed() {
    check_each(
        [(1500, 7, 13, 1), (1500, 7, 13, 264), (1500, 601, 1202, 1040), (17_000, 997, 1994, 8)],
        |(t, n_ids, v, d)| {
            let ids = ids(&(0..t).map(|i: u32| i * i % n_ids * 2).collect::<Vec<_>>());
            OpCase {
                name: "embedding",
                inputs: vec![],
                weights: vec![randn((v, d), 1)],
                op: &|_, w| embedding(&ids.to_device(w[0].value()?.device())?, &w[0], None),
                reference: &|a| a[0].index_select(&ids, 0),
            }
            .check(DType::BF16);
        },
    );
}

#[test]
fn wrong_ids_are_nan_where_there_is_no_waiting_for_the_device() {
    for test_device in TestDevice::all().into_iter().filter(|test_device| !matches!(test_device, TestDevice::Cpu)) {
        test_device.run(|| {
            let w = trainable(&test_device.put(&randn((4, 3), 1)));
            let tape = tape(&[], || embedding(&test_device.put(&ids(&[3, 4, u32::MAX])), &w, None));
            let y = tape.output().clone();
            assert_eq!(values(&y)[..3], values(&w.value().unwrap())[9..]);
            assert!(values(&y)[3..].iter().all(|y| y.is_nan()));
            tape.backward(&y.ones_like().unwrap()).unwrap();
            assert_eq!(values(&grad_of(&w)), [[0.0; 9].as_slice(), &[1.0; 3]].concat());
        });
    }
}

#[test]
fn wrong_ids_are_named() {
    let w = Weight::frozen(randn((4, 3), 1));
    assert_error(embedding(&ids(&[0, 3, 4]), &w, None), "id 4 at position 2 is not in the table of 4 rows");
    let signed = Tensor::new(&[0i64], &Device::Cpu).unwrap();
    assert_error(embedding(&signed, &w, None), "ids are I64, want u32");
    assert_error(embedding(&ids(&[0]), &Weight::frozen(randn(4, 1)), None), "want a table [v, d]");
}

#[test]
fn vocabulary_shards_give_the_rows_and_gradients_of_the_whole_table() {
    for test_device in TestDevice::all() {
        test_device.run(|| {
            let table = test_device.put(&randn((7, 3), 1));
            let looked_up = test_device.put(&ids(&[6, 0, 2, 2, 5, 4, 3, 1]));
            let whole = trainable(&table);
            let all = tape(&[], || embedding(&looked_up, &whole, Some(2)));
            let y = all.output().clone();
            let dy = test_device.put(&randn((8, 3), 2));
            all.backward(&dy).unwrap();

            let (mut sum, mut grads) = (None, Vec::new());
            for (first, n_rows) in [(0, 3), (3, 3), (6, 1)] {
                let part = trainable(&table.narrow(0, first, n_rows).unwrap().copy().unwrap());
                let tape = tape(&[], || vocab_parallel_embedding(&looked_up, &part, first as u32, Some(2)));
                let y = tape.output().clone();
                sum = Some(sum.map_or(y.clone(), |sum: Tensor| (sum + y).unwrap()));
                tape.backward(&dy).unwrap();
                grads.push(grad_of(&part));
            }
            assert_eq!(bits(&sum.unwrap()), bits(&y), "{test_device:?}");
            assert_eq!(bits(&Tensor::cat(&grads, 0).unwrap()), bits(&grad_of(&whole)), "{test_device:?}");
        });
    }
}
