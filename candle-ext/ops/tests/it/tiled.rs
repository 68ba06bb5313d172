use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Result, Tensor};
use candlewick_ops::{
    ColumnShard, Dropout, OutputDtype, RowRanges, Weight, dropout, linear, reshape, sharded_dropout, swiglu, tiled,
    tiled_with_weights, weighted_swiglu,
};

use crate::cases::{
    OpCase, TestDevice, assert_close, assert_error, bits, bound, check_each, grad_of, randn, tape, trainable,
};

/// Computes a gated MLP of a transformer block: gate, up, and down with a bias.
fn mlp(x: &Tensor, w: &[Weight]) -> Result<Tensor> {
    let gate = linear(x, &w[0], None, OutputDtype::SameAsInput)?;
    let up = linear(x, &w[1], None, OutputDtype::SameAsInput)?;
    linear(&swiglu(&gate, &up)?, &w[2], Some(&w[3]), OutputDtype::SameAsInput)
}

fn weights() -> Vec<Tensor> {
    vec![randn((24, 16), 2), randn((24, 16), 3), randn((16, 24), 4), randn(16, 5)]
}

/// Returns the output, the gradient of the input and those of the weights.
fn run(x: &Tensor, tile_rows: Option<usize>) -> Vec<Tensor> {
    let like_x = |w: &Tensor| w.to_dtype(x.dtype()).unwrap().to_device(x.device()).unwrap();
    let w: Vec<Weight> = weights().iter().map(|w| trainable(&like_x(w))).collect();
    let of_tile = w.clone();
    let tape = tape(std::slice::from_ref(x), || {
        let inner = reshape(x, x.shape())?;
        match tile_rows {
            Some(rows) => tiled(&inner, rows, move |x, _| mlp(x, &of_tile)),
            None => mlp(&inner, &w),
        }
    });
    let y = tape.output().clone();
    let grads = tape.backward(&like_x(&randn(y.shape(), 9))).unwrap();
    let dx = grads.get(x).unwrap().clone();
    [y, dx].into_iter().chain(w.iter().map(grad_of)).collect()
}

/// Each row gives the same bits as without tiles, given at least two rows: a single row has its own kernel. Only the
/// weight gradients sum over rows in another order. On a GPU the library selects an algorithm by the number of rows.
#[test]
fn tiles_change_the_order_of_sums_over_rows_and_nothing_else() {
    check_each(TestDevice::all(), |test_device| {
        for (dtype, tile_rows) in [(DType::F32, 8), (DType::F32, 50), (DType::F32, 2), (DType::BF16, 16)] {
            let x = test_device.put(&randn((50, 16), 1).to_dtype(dtype).unwrap());
            let (whole, tiles) = test_device.run(|| (run(&x, None), run(&x, Some(tile_rows))));
            for (what, tiles, whole) in [("y", &tiles[0], &whole[0]), ("dx", &tiles[1], &whole[1])] {
                let what = format!("{what} of {tile_rows} in {test_device:?}");
                match test_device.uses_cublas() {
                    true => assert_close(&what, tiles, whole, bound(dtype)),
                    false => assert_eq!(bits(tiles), bits(whole), "{what}"),
                }
            }
            for (tiles, whole) in tiles[2..].iter().zip(&whole[2..]) {
                assert_close("dw", tiles, whole, 1e-6);
            }
        }
    });
}

#[test]
fn the_gradient_is_the_slope() {
    OpCase {
        name: "tiled",
        inputs: vec![randn((10, 16), 1)],
        weights: weights(),
        op: &|x, w| {
            let w = w.to_vec();
            tiled(&x[0], 4, move |x, _| mlp(x, &w))
        },
        reference: &|x| Ok(x[0].clone()),
    }
    .check_finite_difference();
}

#[test]
fn a_sink_is_reached_from_an_untracked_input() {
    let w: Vec<Weight> = weights().iter().map(trainable).collect();
    let inside = w.clone();
    let tape = tape(&[], || tiled(&randn((50, 16), 1), 20, move |x, _| mlp(x, &inside)));
    let dy = randn(tape.output().shape(), 9);
    tape.backward(&dy).unwrap();
    for (w, want) in w.iter().zip(&run(&randn((50, 16), 1), Some(20))[2..]) {
        assert_eq!(bits(&grad_of(w)), bits(want));
    }
}

#[test]
fn frozen_weights_and_an_untracked_input_record_nothing_and_run_once() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let w: Vec<Weight> = weights().into_iter().map(Weight::frozen).collect();
    let tape = tape(&[], || {
        tiled(&randn((50, 16), 1), 20, move |x, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            mlp(x, &w)
        })
    });
    assert!(tape.is_empty());
    assert_eq!(calls.load(Ordering::Relaxed), 3);
    assert_eq!(Arc::strong_count(&calls), 1, "the function was kept");
}

#[test]
fn a_tile_has_the_dropout_mask_of_its_rows() {
    let x = randn((50, 33), 1);
    let spec = Dropout { p: 0.4, key: 11 };
    let whole = dropout(&x, spec).unwrap();
    let rows = RowRanges::all();
    let tile = move |x: &Tensor, first_row| sharded_dropout(x, spec, &rows.skip(first_row), ColumnShard::ALL);
    let tiles = tiled(&x, 13, tile).unwrap();
    assert_eq!(bits(&tiles), bits(&whole));
}

#[test]
fn no_rows_give_no_rows() {
    let w: Vec<Weight> = weights().into_iter().map(Weight::frozen).collect();
    let y = tiled(&randn((0, 16), 1), 4, move |x, _| mlp(x, &w)).unwrap();
    assert_eq!(y.dims(), [0, 16]);
}

#[test]
fn tiles_without_rows_and_functions_that_lose_rows_are_refused() {
    let x = randn((6, 4), 1);
    assert_error(tiled(&x, 0, |x, _| Ok(x.clone())), "want at least one row in a tile");
    assert_error(tiled(&x, 3, |x, _| x.sum(0)), "want a row for each of 3 rows, got shape [4]");
}

/// Returns the output and the gradients of the rows and of their weights.
fn run_weighted(x: &Tensor, row_weights: &Tensor, tile_rows: Option<usize>) -> Vec<Tensor> {
    let w = trainable(&randn((16, 16), 2));
    let inside = w.clone();
    let f = move |[x, row_weights]: [&Tensor; 2], _| {
        weighted_swiglu(&linear(x, &inside, None, OutputDtype::SameAsInput)?, row_weights)
    };
    let tape = tape(&[x.clone(), row_weights.clone()], || match tile_rows {
        Some(rows) => tiled_with_weights(x, row_weights, rows, f),
        None => f([x, row_weights], 0),
    });
    let y = tape.output().clone();
    let grads = tape.backward(&randn(y.shape(), 9)).unwrap();
    vec![y, grads.get(x).unwrap().clone(), grads.get(row_weights).unwrap().clone(), grad_of(&w)]
}

#[test]
fn tiles_of_weighted_rows_give_the_bits_of_all_rows() {
    let (x, row_weights) = (randn((50, 16), 1), randn(50, 3));
    let whole = run_weighted(&x, &row_weights, None);
    for tile_rows in [2, 8, 50] {
        let tiles = run_weighted(&x, &row_weights, Some(tile_rows));
        for (what, (tiles, whole)) in ["y", "dx", "d_weights"].iter().zip(tiles.iter().zip(&whole)) {
            assert_eq!(bits(tiles), bits(whole), "{what} of {tile_rows}");
        }
        assert_close("dw", &tiles[3], &whole[3], 1e-6);
    }
}
