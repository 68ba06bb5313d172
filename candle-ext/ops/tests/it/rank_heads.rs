//! Layout changes of DeepSpeed-Ulysses.

use candle_core::{DType, Tensor};
use candlewick_ops::{heads_by_rank, heads_of_ranks};

use crate::cases::{TestDevice, assert_error, bits, check_each, randn};

/// Ranks, tokens, heads and head size, with more and fewer heads than ranks.
const CASES: [(usize, usize, usize, usize); 8] = [
    (1, 5, 3, 8),
    (2, 7, 4, 16),
    (4, 33, 8, 64),
    (4, 9, 2, 24),
    (8, 3, 2, 5),
    (6, 1, 3, 7),
    (8, 65, 1, 128),
    (3, 0, 3, 8),
];

/// Returns the head of each of the ranks' heads, one rank after the other.
fn heads_of(n_ranks: usize, h: usize) -> Vec<u32> {
    let n = h.div_ceil(n_ranks);
    (0..n_ranks * n).map(|slot| (slot * h / (n_ranks * n)) as u32).collect()
}

/// Computes [ranks * t, n, k] by candle's ops.
fn naive(x: &Tensor, n_ranks: usize) -> Tensor {
    let (t, h, k) = x.dims3().unwrap();
    let heads = heads_of(n_ranks, h);
    let n = heads.len() / n_ranks;
    let chosen = x.index_select(&Tensor::new(heads, x.device()).unwrap(), 1).unwrap();
    let by_rank = chosen.reshape((t, n_ranks, n, k)).unwrap().transpose(0, 1).unwrap().contiguous().unwrap();
    by_rank.reshape((n_ranks * t, n, k)).unwrap()
}

/// Sums [ranks * t, n, k] over the copies of each of `h` heads by candle's ops.
fn naive_inverse(y: &Tensor, h: usize, n_ranks: usize) -> Tensor {
    let (rows, n, k) = y.dims3().unwrap();
    let t = rows / n_ranks;
    let chosen = y.reshape((n_ranks, t, n, k)).unwrap().transpose(0, 1).unwrap().contiguous().unwrap();
    let chosen = chosen.reshape((t, n_ranks * n, k)).unwrap();
    let heads = Tensor::new(heads_of(n_ranks, h), y.device()).unwrap();
    Tensor::zeros((t, h, k), y.dtype(), y.device()).unwrap().index_add(&heads, &chosen, 1).unwrap()
}

#[test]
fn both_directions_have_the_bits_of_candles_ops() {
    check_each(CASES, |(n_ranks, t, h, k)| {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = randn((t, h, k), 1).to_dtype(dtype).unwrap();
            let y = randn((n_ranks * t, h.div_ceil(n_ranks), k), 2).to_dtype(dtype).unwrap();
            for test_device in TestDevice::all() {
                let (on_x, on_y) = (test_device.put(&x), test_device.put(&y));
                let got = test_device.run(|| heads_by_rank(&on_x, n_ranks).unwrap());
                assert_eq!(got.dims(), naive(&x, n_ranks).dims());
                assert_eq!(bits(&got), bits(&naive(&x, n_ranks)), "{dtype:?} {test_device:?}");
                let got = test_device.run(|| heads_of_ranks(&on_y, h, n_ranks).unwrap());
                assert_eq!(got.dims(), [t, h, k]);
                assert_eq!(bits(&got), bits(&naive_inverse(&y, h, n_ranks)), "{dtype:?} {test_device:?}");
            }
        }
    });
}

/// A GPU writes each element once, in one launch.
#[test]
#[cfg(not(feature = "cuda"))]
fn one_launch_writes_each_element_once() {
    check_each(CASES.into_iter().filter(|(_, t, ..)| *t > 0), |(n_ranks, t, h, k)| {
        let n = h.div_ceil(n_ranks);
        let x = randn((t, h, k), 1).to_dtype(DType::BF16).unwrap();
        let (y, work) = candlewick_ops::emulate_counted(|| heads_by_rank(&x, n_ranks).unwrap());
        assert_eq!((work.launches.len(), work.output_bytes), (1, 2 * n_ranks * t * n * k), "{work:?}");
        let (_, work) = candlewick_ops::emulate_counted(|| heads_of_ranks(&y, h, n_ranks).unwrap());
        assert_eq!((work.launches.len(), work.output_bytes), (1, 2 * t * h * k), "{work:?}");
    });
}

#[test]
fn heads_that_ranks_cannot_divide_are_named() {
    assert_error(heads_by_rank(&randn((2, 3, 4), 1), 2), "3 heads over 2 ranks: one must be a multiple of the other");
    assert_error(heads_by_rank(&randn((2, 0, 4), 1), 2), "0 heads over 2 ranks");
    assert_error(heads_of_ranks(&randn((4, 2, 4), 1), 3, 2), "3 heads over 2 ranks");
    assert_error(heads_of_ranks(&randn((4, 2, 4), 1), 2, 2), "[4, 2, 4] does not hold 2 heads of 2 ranks");
}
