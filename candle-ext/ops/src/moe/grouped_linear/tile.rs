//! Selection of the output tiles of CUTLASS's kernels.

use std::sync::LazyLock;

use candle_core::{Error, Result};

use crate::cuda::gemm::grouped::{GroupedOutput, GroupedTile};
use crate::weight_matmul::Dims;

/// Environment variable with the tile of y and dx: 128x128 or 128x256.
const VARIABLE: &str = "CANDLEWICK_CUTLASS_TILE";

/// Rows of a group, on average, and terms from which wide tiles are used. Fewer rows leave more of a tile empty, and fewer
/// terms leave more of its time to its store.
const WIDE_FROM: [usize; 2] = [512, 1024];

static GIVEN: LazyLock<std::result::Result<Option<GroupedTile>, String>> =
    LazyLock::new(|| given(std::env::var(VARIABLE).ok().as_deref()));

/// Returns the tile of a call with e groups. It depends on sizes that the host knows.
pub(super) fn of(output: GroupedOutput, e: usize, dims: Dims) -> Result<GroupedTile> {
    let given = GIVEN.clone().map_err(Error::Msg)?;
    Ok(given.filter(|_| output != GroupedOutput::W).unwrap_or_else(|| by_sizes(output, e, dims)))
}

fn given(name: Option<&str>) -> std::result::Result<Option<GroupedTile>, String> {
    match name {
        None | Some("") => Ok(None),
        Some("128x128") => Ok(Some(GroupedTile::Narrow)),
        Some("128x256") => Ok(Some(GroupedTile::Wide)),
        Some(other) => Err(format!("{VARIABLE}={other} is no tile; set 128x128 or 128x256, or unset it")),
    }
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
#[allow(clippy::unwrap_used)]
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

    #[test]
    fn the_variable_names_a_tile() {
        assert_eq!(given(None), Ok(None));
        assert_eq!(given(Some("128x128")), Ok(Some(GroupedTile::Narrow)));
        assert_eq!(given(Some("128x256")), Ok(Some(GroupedTile::Wide)));
        assert!(given(Some("64x64")).unwrap_err().contains("CANDLEWICK_CUTLASS_TILE=64x64 is no tile; set 128x128"));
    }
}
