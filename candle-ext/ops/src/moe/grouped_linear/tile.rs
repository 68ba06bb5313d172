//! Selection of the output tiles of CUTLASS's kernels, where no measurement has selected one.

use crate::cuda::gemm::grouped::GroupedOutput;
use crate::grouped_tile::{GroupedTile, forced};
use crate::weight_matmul::Dims;

const NARROW: &str = "128x128";
const WIDE: &str = "128x256";
const GRAD_W: &str = "dw-128x128";

/// Rows of a group, on average, and terms from which wide tiles are used. Fewer rows leave more of a tile empty, and fewer
/// terms leave more of its time to its store.
const WIDE_FROM: [usize; 2] = [512, 1024];

/// Returns the tile that the program has set, or the one for the sizes of a call with e groups. It depends on sizes that the
/// host knows.
pub(super) fn of(output: GroupedOutput, e: usize, dims: Dims) -> &'static GroupedTile {
    forced(output.tile_use()).unwrap_or_else(|| tile(by_sizes(output, e, dims)))
}

/// Lists the tiles that the selection may return.
#[cfg(feature = "cuda")]
pub(super) fn selectable() -> Vec<&'static GroupedTile> {
    use crate::grouped_tile::TileUse::{GradW, Multiply};
    let of_use = |usage, names: &[&str]| match forced(usage) {
        Some(tile) => vec![tile],
        None => names.iter().map(|name| tile(name)).collect(),
    };
    [of_use(Multiply, &[NARROW, WIDE]), of_use(GradW, &[GRAD_W])].concat()
}

fn tile(name: &str) -> &'static GroupedTile {
    GroupedTile::named(name).expect("a test finds the tile")
}

fn by_sizes(output: GroupedOutput, e: usize, Dims { t, n, k }: Dims) -> &'static str {
    let terms = match output {
        GroupedOutput::Y => k,
        GroupedOutput::X => n,
        GroupedOutput::W => return GRAD_W,
    };
    if t / e >= WIDE_FROM[0] && terms >= WIDE_FROM[1] { WIDE } else { NARROW }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_groups_with_many_terms_have_wide_tiles() {
        let [gate_up, down] = [[1536, 2048], [2048, 768]].map(|[n, k]| Dims { t: 131_072, n, k });
        assert_eq!(by_sizes(GroupedOutput::Y, 128, gate_up), WIDE);
        assert_eq!(by_sizes(GroupedOutput::X, 128, gate_up), WIDE);
        assert_eq!(by_sizes(GroupedOutput::Y, 128, down), NARROW);
        assert_eq!(by_sizes(GroupedOutput::X, 128, down), WIDE);
        assert_eq!(by_sizes(GroupedOutput::Y, 512, gate_up), NARROW);
        assert_eq!(by_sizes(GroupedOutput::W, 1, gate_up), GRAD_W);
    }

    #[test]
    fn every_selected_tile_is_in_the_table_with_its_use() {
        for (name, output) in [(NARROW, GroupedOutput::Y), (WIDE, GroupedOutput::X), (GRAD_W, GroupedOutput::W)] {
            assert_eq!(tile(name).usage, output.tile_use(), "{name}");
        }
    }
}
