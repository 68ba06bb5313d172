//! Measured cases in which a tile of CUTLASS was faster than our kernels.

use std::sync::LazyLock;

use candle_core::DType;

use super::operands::GroupedOperands;
use crate::cuda::gemm::grouped::GroupedOutput;
use crate::grouped_tile::{GroupedTile, folder};

/// Case in which a tile was faster: a line of winners.txt.
#[derive(Debug, PartialEq, Eq)]
struct TileWin {
    output: GroupedOutput,
    output_dtype: DType,
    /// Mean rows of a group, as the next power of two.
    n_average: usize,
    n_in: usize,
    n_out: usize,
    tile: &'static GroupedTile,
    /// Name of the GPU that measured it.
    gpu: String,
}

/// Cases of the file in the folder of the tiles' objects if there is one, else those of this program.
static WINS: LazyLock<Vec<TileWin>> = LazyLock::new(|| {
    let path = folder().join("winners.txt");
    let given = std::fs::read_to_string(&path);
    let (text, source) = match &given {
        Ok(text) => (text.as_str(), path.display().to_string()),
        Err(_) => (include_str!("winners.txt"), "winners.txt".into()),
    };
    parse(text).unwrap_or_else(|error| {
        tracing::warn!("experts: {source}: {error}; `auto` computes by our kernels");
        Vec::new()
    })
});

/// Returns the tile that was faster than our kernels in this case on this GPU.
pub(super) fn of(gpu: &str, operands: &GroupedOperands<'_>) -> Option<&'static GroupedTile> {
    find(&WINS, gpu, operands)
}

/// Returns the tiles that were faster in a case of experts of this hidden size and width.
///
/// # Errors
///
/// If there is none.
#[cfg(feature = "cuda")]
pub(super) fn tiles(gpu: &str, sizes: [usize; 2]) -> Result<Vec<&'static GroupedTile>, String> {
    of_experts(&WINS, gpu, sizes)
}

fn find(wins: &[TileWin], gpu: &str, operands: &GroupedOperands<'_>) -> Option<&'static GroupedTile> {
    let GroupedOperands { output, output_dtype, e, dims, .. } = *operands;
    let n_average = dims.t.div_ceil(e).next_power_of_two();
    let is_case = |win: &&TileWin| {
        (win.output, win.output_dtype, win.n_average) == (output, output_dtype, n_average)
            && (win.n_in, win.n_out) == (dims.k, dims.n)
            && win.gpu == gpu
    };
    wins.iter().find(is_case).map(|win| win.tile)
}

#[cfg(any(feature = "cuda", test))]
fn of_experts(wins: &[TileWin], gpu: &str, [hidden, width]: [usize; 2]) -> Result<Vec<&'static GroupedTile>, String> {
    let matmuls = [(hidden, 2 * width), (width, hidden)];
    let mut tiles = Vec::new();
    for win in wins.iter().filter(|win| win.gpu == gpu && matmuls.contains(&(win.n_in, win.n_out))) {
        if !tiles.contains(&win.tile) {
            tiles.push(win.tile);
        }
    }
    if tiles.is_empty() {
        return Err(format!(
            "no measurement on {gpu} is recorded in which it is faster for experts of {hidden} x {width}"
        ));
    }
    Ok(tiles)
}

fn parse(text: &str) -> Result<Vec<TileWin>, String> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty());
    lines.map(|(i, line)| parse_line(line).map_err(|why| format!("line {}: {why}", i + 1))).collect()
}

fn parse_line(line: &str) -> Result<TileWin, String> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [output, dtype, n_average, n_in, n_out, tile, _tflops, _fused, _date, gpu @ ..] = &fields[..] else {
        return Err("want output, dtype, rows, inputs, outputs, tile, TFLOP/s, TFLOP/s of fused, date and GPU".into());
    };
    let number = |text: &str| text.parse::<usize>().map_err(|_| format!("{text} is no number"));
    let output = match *output {
        "y" => GroupedOutput::Y,
        "dx" => GroupedOutput::X,
        "dw" => GroupedOutput::W,
        other => return Err(format!("{other} is neither y, dx nor dw")),
    };
    let output_dtype = match *dtype {
        "bf16" => DType::BF16,
        "f32" => DType::F32,
        other => return Err(format!("{other} is neither bf16 nor f32")),
    };
    let tile = GroupedTile::named(tile).ok_or_else(|| format!("there is no tile {tile}"))?;
    if tile.usage != output.tile_use() {
        return Err(format!("the tile {} does not compute {}", tile.name, fields[0]));
    }
    let [n_average, n_in, n_out] = [number(n_average)?, number(n_in)?, number(n_out)?];
    Ok(TileWin { output, output_dtype, n_average, n_in, n_out, tile, gpu: gpu.join(" ") })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::weight_matmul::Dims;

    const TEXT: &str = "# comment\n\
        y bf16 256 2048 1536 128x256-1x2 560 279 2026-12-01 NVIDIA H200\n\
        dw f32 256 2048 1536 dw-128x256 390 92 2026-12-01 NVIDIA H200\n\
        y bf16 256 768 2048 128x256-1x2 500 250 2026-12-01 NVIDIA H200\n";

    #[track_caller]
    fn check(gpu: &str, output: GroupedOutput, output_dtype: DType, t: usize, want: Option<&str>) {
        let dims = Dims { t, n: 1536, k: 2048 };
        let operands = GroupedOperands { output, dtype: DType::BF16, output_dtype, e: 128, dims, addresses: &[] };
        let found = find(&parse(TEXT).unwrap(), gpu, &operands);
        assert_eq!(found.map(|tile| tile.name), want);
    }

    #[test]
    fn auto_has_a_tile_in_the_measured_case_alone() {
        use GroupedOutput::{W, X, Y};
        for rows in [129, 200, 256] {
            check("NVIDIA H200", Y, DType::BF16, 128 * rows, Some("128x256-1x2"));
        }
        check("NVIDIA H200", W, DType::F32, 128 * 256, Some("dw-128x256"));
        check("NVIDIA H200", W, DType::BF16, 128 * 256, None);
        check("NVIDIA H200", X, DType::BF16, 128 * 256, None);
        for rows in [1, 128, 257, 1024] {
            check("NVIDIA H200", Y, DType::BF16, 128 * rows, None);
        }
        check("NVIDIA H100 80GB HBM3", Y, DType::BF16, 128 * 256, None);
    }

    #[test]
    fn the_tiles_of_experts_are_those_of_both_matmuls() {
        let wins = parse(TEXT).unwrap();
        let names = |sizes| -> Result<Vec<&str>, String> {
            Ok(of_experts(&wins, "NVIDIA H200", sizes)?.iter().map(|tile| tile.name).collect())
        };
        assert_eq!(names([2048, 768]), Ok(vec!["128x256-1x2", "dw-128x256"]));
        let why = "no measurement on NVIDIA H200 is recorded in which it is faster for experts of 768 x 2048";
        assert_eq!(names([768, 2048]), Err(why.into()));
    }

    #[test]
    fn a_wrong_line_is_named() {
        let check =
            |line: &str, want: &str| assert_eq!(parse(&format!("#\n{line}")).unwrap_err(), format!("line 2: {want}"));
        check("z bf16 1 8 8 128x128 1 1 d H200", "z is neither y, dx nor dw");
        check("y f64 1 8 8 128x128 1 1 d H200", "f64 is neither bf16 nor f32");
        check("y bf16 many 8 8 128x128 1 1 d H200", "many is no number");
        check("y bf16 1 8 8 64x64 1 1 d H200", "there is no tile 64x64");
        check("dw f32 1 8 8 128x128 1 1 d H200", "the tile 128x128 does not compute dw");
        assert!(parse("y bf16").unwrap_err().contains("line 1: want output, dtype, rows"));
    }

    #[test]
    fn every_recorded_line_is_read() {
        let text = include_str!("winners.txt");
        assert_eq!(parse(text).unwrap().len(), text.lines().filter(|line| !line.starts_with('#')).count());
    }
}
