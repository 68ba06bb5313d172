//! Benchmark cases of grouped matmuls by our kernels and by CUTLASS, also by one of its tiles, and of dense ones of equal FLOPs.
//!
//! t rows in e groups, k inputs, n outputs of each group

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{GroupedCall, GroupedGemmImpl, GroupedTile, TileUse, TokensPerCall, Weight, grouped_linear};

use crate::cases::{BenchCase, BenchCost, F32, Graph, both, randn_in, trainable_in};
use crate::linear;
use crate::moe;

/// An implementation with the names of its cases.
#[derive(Clone, Copy)]
pub(crate) struct Implementation {
    implementation: GroupedGemmImpl,
    /// Forward, dx and dw.
    linear: [&'static str; 3],
    layer: &'static str,
}

pub(crate) const FUSED: Implementation = Implementation {
    implementation: GroupedGemmImpl::Fused,
    linear: ["grouped_linear", "grouped_linear dx", "grouped_linear dw"],
    layer: "moe layer",
};

/// Forward, dx and dw of our kernels in f32.
const FUSED_F32: [&str; 3] = ["grouped_linear f32", "grouped_linear f32 dx", "grouped_linear f32 dw"];

const CUTLASS: Implementation = Implementation {
    implementation: GroupedGemmImpl::Cutlass,
    linear: ["grouped_linear cutlass", "grouped_linear cutlass dx", "grouped_linear cutlass dw"],
    layer: "moe layer cutlass",
};

/// t, k, n and e: of a 4B model's width, and both matmuls of an expert of Qwen3-30B-A3B on 16384 and on 4096 tokens.
const SHAPES: [[usize; 4]; 5] = [
    [32_768, 2560, 1280, 64],
    [131_072, 2048, 1536, 128],
    [131_072, 768, 2048, 128],
    [32_768, 2048, 1536, 128],
    [32_768, 768, 2048, 128],
];
/// t, k, n and e on a CPU: gate and up projections of 64 experts of width 256.
const CPU_SHAPE: [usize; 4] = [8192, 512, 512, 64];
const TINY: [usize; 4] = [96, 64, 40, 8];

/// Returns the cases of all implementations that the device has, and dense matmuls of the FLOPs of the first shape; or the matmuls
/// of one tile.
pub(crate) fn all(device: &Device, tile: Option<&GroupedTile>) -> Vec<BenchCase> {
    match (tile, device.is_cpu()) {
        (Some(tile), _) => of_tile(device, tile, &SHAPES),
        (None, true) => on_cpu(CPU_SHAPE),
        (None, false) => on(device, &SHAPES, moe::QWEN3_30B_A3B),
    }
}

/// Returns the same cases at tiny sizes, for a trial run.
pub(crate) fn tiny(device: &Device, tile: Option<&GroupedTile>) -> Vec<BenchCase> {
    if let Some(tile) = tile {
        return of_tile(device, tile, &[TINY]);
    }
    let cpu = if device.is_cpu() { on_cpu(TINY) } else { Vec::new() };
    cpu.into_iter().chain(on(device, &[TINY], moe::TINY)).collect()
}

/// Returns the matmuls of a tile's use by CUTLASS, on a GPU.
fn of_tile(device: &Device, tile: &GroupedTile, shapes: &[[usize; 4]]) -> Vec<BenchCase> {
    let is_dw = |case: &BenchCase| case.op == CUTLASS.linear[2];
    let wanted = move |case: &BenchCase| is_dw(case) == (tile.usage == TileUse::GradW);
    if device.is_cpu() {
        println!("skipped: CUTLASS computes on GPUs only, and this is the CPU");
        return Vec::new();
    }
    shapes.iter().flat_map(|shape| linears(CUTLASS, DType::BF16, *shape)).filter(wanted).collect()
}

/// Returns true if the device has an implementation. Prints the reason if it does not.
fn has(device: &Device, by: Implementation) -> bool {
    let explained = by.implementation.explain(device, DType::BF16, [8, 8]);
    explained.inspect_err(|error| println!("skipped: {error}")).is_ok()
}

/// Returns the cases of grouped matmuls in f32 and bf16, each followed by the dense matmul of equal FLOPs.
fn on_cpu(shape: [usize; 4]) -> Vec<BenchCase> {
    let [t, k, n, _] = shape;
    let in_dtype = |dtype| linears(FUSED, dtype, shape).into_iter().zip(linear::linears(dtype, t, k, n));
    let pairs = [DType::F32, DType::BF16].into_iter().flat_map(in_dtype);
    pairs.flat_map(|(grouped, dense)| [grouped, dense]).collect()
}

fn on(device: &Device, shapes: &[[usize; 4]], layer: moe::MoeLayer) -> Vec<BenchCase> {
    let all = [FUSED, CUTLASS].into_iter().filter(|by| has(device, *by));
    let of = |by: Implementation| {
        let linears = shapes.iter().flat_map(move |shape| linears(by, DType::BF16, *shape));
        linears.chain(moe::layers(by.layer, layer, by.implementation))
    };
    let [t, k, n, _] = shapes[0];
    all.flat_map(of).chain(linear::linears(DType::BF16, t, k, n)).collect()
}

/// Returns the cases of a linear layer with t rows in e skewed groups.
pub(crate) fn linears(by: Implementation, dtype: DType, [t, k, n, e]: [usize; 4]) -> Vec<BenchCase> {
    let of_element = dtype.size_in_bytes() as f64;
    let (x, w, y) = ((t * k) as f64, (e * n * k) as f64, (t * n) as f64);
    let cost = |bytes| BenchCost { bytes, flops: 2.0 * x * n as f64 };
    let shape = || vec![("t", t), ("k", k), ("n", n), ("e", e)];
    let offsets = move |device: &Device| Tensor::new(skewed_offsets(t, e), device);
    let call = GroupedCall { tokens: TokensPerCall::Many, implementation: by.implementation };
    let multiply = move |x: &Tensor, w: &Weight, offsets: &Tensor| grouped_linear(x, w, offsets, call);
    let [name, name_dx, name_dw] = if dtype == DType::F32 { FUSED_F32 } else { by.linear };
    let [forward, grad_x] = both(name, shape(), [cost(of_element * (x + w + y)); 2], move |device| {
        let (w, offsets) = (Weight::frozen(randn_in(dtype, (e * n, k), device)?), offsets(device)?);
        Ok(Graph::new([randn_in(dtype, (t, k), device)?], move |x| multiply(&x[0], &w, &offsets)))
    });
    let cost_w = cost(of_element * (x + y) + 2.0 * F32 * w);
    let [_, grad_w] = both(name_dw, shape(), [cost_w; 2], move |device| -> Result<Graph> {
        let (x, w, offsets) =
            (randn_in(dtype, (t, k), device)?, trainable_in(dtype, &[e * n, k], device)?, offsets(device)?);
        Ok(Graph::new([], move |_| multiply(&x, &w, &offsets)))
    });
    vec![forward, BenchCase { op: name_dx, ..grad_x }, grad_w]
}

/// Returns offsets of e groups of t rows, where group i has about as many rows as 1 / (i + 8) of them.
fn skewed_offsets(t: usize, e: usize) -> Vec<u32> {
    let weight = |n: usize| (0..n).map(|i| 1.0 / (i + 8) as f64).sum::<f64>();
    (0..=e).map(|i| (t as f64 * weight(i) / weight(e)).round() as u32).collect()
}
