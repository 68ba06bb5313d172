//! Selection of the output tiles of CUTLASS's kernels.

use crate::cuda::gemm::grouped::GroupedOutput;
use crate::grouped_tile::{GroupedTile, forced};
use crate::weight_matmul::Dims;

/// Rows of a group, on average, and terms from which wide tiles are used. Fewer rows leave more of a tile empty, and fewer
/// terms leave more of its time to its store.
const WIDE_FROM: [usize; 2] = [512, 1024];

/// Returns the tile of a call with e groups. It depends on sizes that the host knows.
pub(super) fn of(output: GroupedOutput, e: usize, dims: Dims) -> GroupedTile {
    forced().filter(|_| output != GroupedOutput::W).unwrap_or_else(|| by_sizes(output, e, dims))
}

fn by_sizes(output: GroupedOutput, e: usize, Dims { t, n, k }: Dims) -> GroupedTile {
    let terms = match output {
        GroupedOutput::Y => k,
        GroupedOutput::X => n,
        GroupedOutput::W => return GroupedTile::Narrow,
    };
    if t / e >= WIDE_FROM[0] && terms >= WIDE_FROM[1] { GroupedTile::Wide } else { GroupedTile::Narrow }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_groups_with_many_terms_have_wide_tiles() {
        let [gate_up, down] = [[1536, 2048], [2048, 768]].map(|[n, k]| Dims { t: 131_072, n, k });
        assert_eq!(by_sizes(GroupedOutput::Y, 128, gate_up), GroupedTile::Wide);
        assert_eq!(by_sizes(GroupedOutput::X, 128, gate_up), GroupedTile::Wide);
        assert_eq!(by_sizes(GroupedOutput::Y, 128, down), GroupedTile::Narrow);
        assert_eq!(by_sizes(GroupedOutput::X, 128, down), GroupedTile::Wide);
        assert_eq!(by_sizes(GroupedOutput::Y, 512, gate_up), GroupedTile::Narrow);
        assert_eq!(by_sizes(GroupedOutput::W, 1, gate_up), GroupedTile::Narrow);
    }
}
