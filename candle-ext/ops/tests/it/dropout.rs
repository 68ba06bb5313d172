use candle_core::{DType, Device, Tensor};
use candlewick_ops::{ColumnShard, Dropout, RowRanges, derive_key, dropout, row_dropout, sharded_dropout};

use crate::cases::{OpCase, TestDevice, assert_close, assert_error, bits, bound, check_each, randn, tape, values};

const SPEC: Dropout = Dropout { p: 0.25, key: 7 };

fn ones(n: usize) -> Tensor {
    Tensor::ones(n, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn dropout_drops_the_given_fraction_and_scales_the_rest() {
    let n = 1 << 20;
    check_each([0.05, 0.25, 0.9], |p| {
        let y = values(&dropout(&ones(n), Dropout { p, key: 3 }).unwrap());
        let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / n as f64;
        // Five standard deviations of a binomial.
        assert!((dropped - p).abs() < 5.0 * (p * (1.0 - p) / n as f64).sqrt(), "{dropped} of {p}");
        let rounded = (p * 65_536.0).round() / 65_536.0;
        assert!(y.iter().all(|y| *y == 0.0 || (y * (1.0 - rounded) - 1.0).abs() < 1e-6));
        // The mean is one, with the deviation of a binomial.
        let mean = y.iter().sum::<f64>() / n as f64;
        assert!((mean - 1.0).abs() < 5.0 * (p / (1.0 - p) / n as f64).sqrt(), "mean {mean} for {p}");
        let both = y.windows(2).filter(|pair| pair == &[0.0, 0.0]).count() as f64 / n as f64;
        assert!((both - p * p).abs() < 0.005, "neighbours fall independently: {both} of {}", p * p);
    });
}

#[test]
fn the_key_decides_and_nothing_else_does() {
    let x = randn((37, 129), 1);
    let once = bits(&dropout(&x, SPEC).unwrap());
    assert_eq!(once, bits(&dropout(&x, SPEC).unwrap()));
    let other = Dropout { key: derive_key(SPEC.key, 0), ..SPEC };
    assert_ne!(once, bits(&dropout(&x, other).unwrap()));
    assert_ne!(derive_key(1, 2), derive_key(2, 1));
    assert_ne!(derive_key(1, 2), derive_key(1, 3));
}

#[test]
fn every_place_drops_the_same_elements() {
    check_each([DType::F32, DType::BF16, DType::F16], |dtype| {
        for shape in [(37, 129), (3, 800)] {
            let x = randn(shape, 1).to_dtype(dtype).unwrap();
            for spec in [SPEC, Dropout { p: 0.9, key: u64::MAX }] {
                let want = bits(&dropout(&x, spec).unwrap());
                for test_device in TestDevice::all() {
                    let y = test_device.run(|| dropout(&test_device.put(&x), spec)).unwrap();
                    assert_eq!(bits(&y), want, "{test_device:?}");
                }
            }
        }
    });
}

#[test]
fn backward_uses_the_mask_of_forward() {
    for test_device in TestDevice::all() {
        test_device.run(|| {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let put = |seed| test_device.put(&randn((9, 700), seed).to_dtype(dtype).unwrap());
                let (x, dy) = (put(1), put(2));
                let grads = tape(std::slice::from_ref(&x), || dropout(&x, SPEC)).backward(&dy).unwrap();
                let mask = dropout(&x.ones_like().unwrap().to_dtype(DType::F32).unwrap(), SPEC).unwrap();
                let want = (dy.to_dtype(DType::F32).unwrap() * mask).unwrap();
                assert_close("dropout dx", grads.get(&x).unwrap(), &want, bound(dtype));
            }
        });
    }
}

#[test]
fn the_gradient_is_the_slope() {
    OpCase {
        name: "dropout",
        inputs: vec![randn((6, 20), 1)],
        weights: vec![],
        op: &|x, _| dropout(&x[0], SPEC),
        reference: &|x| Ok(x[0].clone()),
    }
    .check_finite_difference();
}

#[test]
fn a_probability_of_zero_changes_nothing_and_of_one_is_refused() {
    let x = randn((3, 5), 1);
    assert_eq!(bits(&dropout(&x, Dropout { p: 0.0, key: 1 }).unwrap()), bits(&x));
    for p in [1.0, -0.1, f64::NAN] {
        assert_error(dropout(&x, Dropout { p, key: 1 }), "want a probability in [0, 1)");
    }
}

#[test]
fn a_slice_of_rows_has_the_mask_of_the_whole_tensor() {
    let whole = randn((60, 37), 1);
    let ranges = [3..11, 40..41, 12..30];
    let pick = |x: &Tensor| {
        let parts = ranges.clone().map(|range| x.narrow(0, range.start, range.len()).unwrap());
        Tensor::cat(&parts, 0).unwrap()
    };
    let rows = RowRanges::new(ranges.to_vec());
    for test_device in TestDevice::all() {
        test_device.run(|| {
            let (whole, dy) = (test_device.put(&whole), test_device.put(&randn((60, 37), 2)));
            let x = pick(&whole);
            let tape = tape(std::slice::from_ref(&x), || sharded_dropout(&x, SPEC, &rows, ColumnShard::ALL));
            assert_eq!(bits(tape.output()), bits(&pick(&dropout(&whole, SPEC).unwrap())), "{test_device:?}");
            let dx = tape.backward(&pick(&dy)).unwrap().remove(&x).unwrap();
            assert_eq!(bits(&dx), bits(&pick(&dropout(&dy, SPEC).unwrap())), "{test_device:?}");
            let rest = sharded_dropout(&x.narrow(0, 10, 17).unwrap(), SPEC, &rows.skip(10), ColumnShard::ALL).unwrap();
            assert_eq!(bits(&rest), bits(&pick(&dropout(&whole, SPEC).unwrap()).narrow(0, 10, 17).unwrap()));
        });
    }
    assert_error(sharded_dropout(&whole, SPEC, &rows, ColumnShard::ALL), "60 rows, but the row ranges cover 27");
}

#[test]
fn a_slice_of_columns_has_the_mask_of_the_whole_tensor() {
    let rows = RowRanges::new(vec![3..11, 12..30]);
    for (width, dtype) in [(7, DType::F32), (16, DType::BF16), (4096, DType::F32)] {
        let whole = randn((30, 3 * width), 1).to_dtype(dtype).unwrap();
        for test_device in TestDevice::all() {
            test_device.run(|| {
                let whole = test_device.put(&whole);
                let dropped = dropout(&whole, SPEC).unwrap();
                for part in 0..3 {
                    let pick = |x: &Tensor| {
                        let parts = [(3, 8), (12, 18)].map(|(first, n)| x.narrow(0, first, n).unwrap());
                        Tensor::cat(&parts, 0).unwrap().narrow(1, part * width, width).unwrap().contiguous().unwrap()
                    };
                    let y =
                        sharded_dropout(&pick(&whole), SPEC, &rows, ColumnShard { index: part, n_shards: 3 }).unwrap();
                    assert_eq!(bits(&y), bits(&pick(&dropped)), "{test_device:?}, part {part} of {width} elements");
                }
            });
        }
    }
}

/// A row has the mask of a tensor of one row with the derived key, in any order of rows, in forward and backward.
#[test]
fn a_row_with_a_key_has_its_mask_in_any_order() {
    let keys = [3i64, -9, i64::MAX, 3, 77];
    for (width, dtype) in [(7, DType::F32), (48, DType::BF16), (4096 + 8, DType::F16), (64, DType::F32)] {
        let (whole, d_whole) = (randn((5, 2 * width), 1).to_dtype(dtype).unwrap(), randn((5, 2 * width), 2));
        let d_whole = d_whole.to_dtype(dtype).unwrap();
        let of_row = |x: &Tensor, row: usize| {
            let key = derive_key(keys[row] as u64, SPEC.key);
            dropout(&x.narrow(0, row, 1).unwrap().contiguous().unwrap(), Dropout { key, ..SPEC }).unwrap()
        };
        for test_device in TestDevice::all() {
            test_device.run(|| {
                for order in [[0u32, 1, 2, 3, 4], [4, 2, 0, 1, 3]] {
                    let want = |x: &Tensor| {
                        let rows = order.iter().map(|row| of_row(x, *row as usize)).collect::<Vec<_>>();
                        Tensor::cat(&rows, 0).unwrap()
                    };
                    let wants = [want(&whole), want(&d_whole)];
                    let order = Tensor::new(&order, &Device::Cpu).unwrap();
                    let keys = Tensor::new(&keys, &Device::Cpu).unwrap().index_select(&order, 0).unwrap();
                    let pick = |x: &Tensor, shard: usize| {
                        let x = x.index_select(&order, 0).unwrap().narrow(1, shard * width, width).unwrap();
                        test_device.put(&x.contiguous().unwrap())
                    };
                    for shard in 0..2 {
                        let columns = ColumnShard { index: shard, n_shards: 2 };
                        let (x, dy, keys) = (pick(&whole, shard), pick(&d_whole, shard), test_device.put(&keys));
                        let tape = tape(std::slice::from_ref(&x), || row_dropout(&x, &keys, SPEC, columns));
                        let of_shard =
                            |x: &Tensor| bits(&x.narrow(1, shard * width, width).unwrap().contiguous().unwrap());
                        assert_eq!(bits(tape.output()), of_shard(&wants[0]), "{test_device:?} {width} {dtype:?}");
                        let dx = tape.backward(&dy).unwrap().remove(&x).unwrap();
                        assert_eq!(bits(&dx), of_shard(&wants[1]), "{test_device:?} {width} {dtype:?}");
                    }
                }
            });
        }
    }
    let x = randn((5, 4), 1);
    let keys = Tensor::new(&keys, &Device::Cpu).unwrap();
    assert_error(row_dropout(&x, &keys.narrow(0, 0, 4).unwrap(), SPEC, ColumnShard::ALL), "want i64 keys [5]");
    let none = randn((0, 4), 1);
    let of_none = row_dropout(&none, &keys.narrow(0, 0, 0).unwrap(), SPEC, ColumnShard::ALL).unwrap();
    assert_eq!(of_none.dims(), [0, 4]);
}
