//! Output tiles of CUTLASS's grouped GEMMs: the table of all, the folder of their objects, and the tiles that a program sets for
//! all calls.

use std::path::{Path, PathBuf};
use std::sync::{LazyLock, OnceLock};

use candle_core::{Result, bail};

/// Output tile of a grouped GEMM by CUTLASS: a line of `cuda/gemm/cutlass/tiles.txt`.
#[derive(Debug, PartialEq, Eq)]
pub struct GroupedTile {
    /// Name, also of the object file.
    pub name: &'static str,
    /// Matmuls that the tile computes.
    pub usage: TileUse,
    /// Rows, columns and terms of a stage, such as `128x256x64`.
    pub shape: &'static str,
    /// Blocks that share loads, by rows and columns, such as `2x1`.
    pub cluster: &'static str,
    /// Schedule of the warp groups.
    pub schedule: &'static str,
}

/// Matmuls of a grouped linear layer that a tile computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileUse {
    /// Output and gradient of the input.
    Multiply,
    /// Gradient of the weight.
    GradW,
}

static TILES: LazyLock<Vec<GroupedTile>> = LazyLock::new(|| {
    let lines = include_str!("cuda/gemm/cutlass/tiles.txt").lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(parse).collect()
});

/// Lists all tiles.
pub fn grouped_tiles() -> &'static [GroupedTile] {
    &TILES
}

/// Returns the tile of a line; `None` if it is no tile.
fn parse(line: &'static str) -> Option<GroupedTile> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [name, usage, shape, cluster, schedule] = fields[..] else { return None };
    let usage = match usage {
        "multiply" => TileUse::Multiply,
        "dw" => TileUse::GradW,
        _ => return None,
    };
    Some(GroupedTile { name, usage, shape, cluster, schedule })
}

impl GroupedTile {
    /// Returns the tile of this name, if there is one.
    pub fn named(name: &str) -> Option<&'static Self> {
        grouped_tiles().iter().find(|tile| tile.name == name)
    }

    /// Returns the fields of the line, with single spaces. An object has it, too.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn line(&self) -> String {
        let usage = match self.usage {
            TileUse::Multiply => "multiply",
            TileUse::GradW => "dw",
        };
        [self.name, usage, self.shape, self.cluster, self.schedule].join(" ")
    }
}

static FORCED: [OnceLock<&'static GroupedTile>; 2] = [const { OnceLock::new() }; 2];

/// Sets the tile of all matmuls of its use by CUTLASS, for measurements. Call it before any computation.
pub fn force_grouped_tile(tile: &'static GroupedTile) {
    let _ = FORCED[tile.usage as usize].set(tile);
}

/// Returns the tile that the program has set for a use.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) fn forced(usage: TileUse) -> Option<&'static GroupedTile> {
    FORCED[usage as usize].get().copied()
}

static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Loads the objects of CUTLASS's tiles from `folder`, as scripts/build-cutlass creates it, instead of the folder `cutlass` next to
/// the program. Call it before any computation.
///
/// # Errors
///
/// If `folder` is not a folder.
pub fn load_cutlass_from(folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        bail!("load CUTLASS: {} is no folder; scripts/build-cutlass makes one", folder.display())
    }
    let _ = FOLDER.set(folder.to_owned());
    Ok(())
}

/// Returns the folder of the tiles' objects, which may not exist.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) fn folder() -> PathBuf {
    let next_to_program = || Some(std::env::current_exe().ok()?.parent()?.join("cutlass"));
    FOLDER.get().cloned().or_else(next_to_program).unwrap_or_else(|| "cutlass".into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_table_is_a_tile_with_a_name_of_its_own() {
        let text = include_str!("cuda/gemm/cutlass/tiles.txt");
        let n_lines = text.lines().filter(|line| !line.starts_with('#')).count();
        let mut names: Vec<&str> = grouped_tiles().iter().map(|tile| tile.name).collect();
        assert_eq!(names.len(), n_lines);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), n_lines);
        for tile in grouped_tiles() {
            let n_numbers = |text: &str| text.split('x').filter(|n| n.parse::<u32>().is_ok()).count();
            assert_eq!((n_numbers(tile.shape), n_numbers(tile.cluster)), (3, 2), "{tile:?}");
            assert!(include_str!("cuda/gemm/cutlass/gemm.cuh").contains(&format!("struct {} {{", tile.schedule)));
            let is_dw = tile.name.starts_with("dw-");
            assert_eq!(is_dw, tile.usage == TileUse::GradW, "{tile:?}");
            assert_eq!(GroupedTile::named(tile.name), Some(tile));
        }
    }

    #[test]
    fn the_folder_of_tiles_must_exist() {
        let error = load_cutlass_from(Path::new("/no/such/folder")).unwrap_err().to_string();
        assert!(error.contains("/no/such/folder is no folder; scripts/build-cutlass"), "{error}");
    }
}
