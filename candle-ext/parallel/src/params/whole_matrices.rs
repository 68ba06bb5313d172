//! Shards of whole matrices: sizes, without tensors.

use super::sharding::ALIGNMENT;

/// Returns the elements of each of `n_shards` equal shards that hold matrices of these sizes whole and in order.
///
/// It is the smallest length that suffices, at least that of the largest matrix. A unit with fewer matrices than shards, or with
/// one large matrix, has shards that are mostly padding.
pub fn whole_matrix_shard_len(sizes: &[usize], n_shards: usize) -> usize {
    let sizes: Vec<usize> = sizes.iter().map(|n| n.next_multiple_of(ALIGNMENT)).collect();
    let (mut least, mut most) = (sizes.iter().copied().max().unwrap_or(0), sizes.iter().sum::<usize>());
    least = least.max(most.div_ceil(n_shards));
    while least < most {
        let middle = (least + most) / 2;
        if n_shards_of(&sizes, middle) <= n_shards { most = middle } else { least = middle + 1 }
    }
    most.next_multiple_of(ALIGNMENT)
}

/// Returns the number of shards of length `shard_len` that matrices fill in order.
fn n_shards_of(sizes: &[usize], shard_len: usize) -> usize {
    let (mut n_shards, mut free) = (0, 0);
    for n in sizes {
        if *n > free {
            (n_shards, free) = (n_shards + 1, shard_len);
        }
        free -= n;
    }
    n_shards
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_of_whole_matrices_are_as_short_as_their_order_allows() {
        let a = ALIGNMENT;
        for (sizes, n_shards, want) in [
            (vec![a], 1, a),
            (vec![a], 4, a),
            (vec![3 * a, a, a], 1, 5 * a),
            (vec![3 * a, a, a], 2, 3 * a),
            // In another order, two shards of 3 would do.
            (vec![a, 3 * a, 2 * a], 2, 4 * a),
            (vec![2 * a, 2 * a, 2 * a, a], 3, 3 * a),
            (vec![1, a + 1], 2, 2 * a),
            (Vec::new(), 3, 0),
        ] {
            assert_eq!(whole_matrix_shard_len(&sizes, n_shards), want, "{sizes:?} in {n_shards}");
        }
    }
}
