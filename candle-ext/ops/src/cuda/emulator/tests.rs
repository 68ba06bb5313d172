//! Tests of the emulator with the kernels of `emulator/faulty.cu`.

use candle_core::{Device, Tensor};

use super::{emulate, emulate_with_seed};
use crate::cuda::{Arg, Gpu, Kernels, address};

/// Kernels of `emulator/faulty.cu`.
static FAULTY: Kernels = Kernels {
    op: "faulty",
    signatures: {
        #[allow(unused_imports, reason = "the macro `kernels` imports the same")]
        use crate::cuda::{Class::*, Signature};
        include!(concat!(env!("OUT_DIR"), "/faulty.rs"))
    },
    #[cfg(feature = "cuda")]
    fatbin: &[],
    #[cfg(feature = "cuda")]
    functions: crate::cuda::LoadedFunctions::new(),
    library: concat!(env!("OUT_DIR"), "/libfaulty.so"),
};

/// Seeds of the orders of lanes and blocks.
const SEEDS: std::ops::Range<u64> = 0..16;

/// Elements of the input and the output, more than any kernel reads or writes.
const LEN: usize = 160;

/// Runs a kernel on the numbers 1, 2, 3 and so on. Both addresses are moved on from multiples of 16 bytes. Returns y.
fn run(name: &str, n_blocks: usize, [x_bytes, y_bytes]: [u64; 2]) -> Result<Vec<f32>, String> {
    let x = Tensor::arange(1f32, LEN as f32, &Device::Cpu).unwrap();
    let y = Tensor::zeros(LEN, candle_core::DType::F32, &Device::Cpu).unwrap();
    let start = address("test", &y).unwrap();
    let [at_x, at_y] = [&x, &y].map(|tensor| address("test", tensor).unwrap().next_multiple_of(16));
    let args = [Arg::Address(at_x + x_bytes), Arg::Address(at_y + y_bytes)];
    let gpu = Gpu::Emulated(std::marker::PhantomData);
    // SAFETY: the kernels read and write fewer elements than there are after the aligned addresses.
    unsafe { FAULTY.launch(gpu, name, [n_blocks, 1, 1], 32, &args) }.map_err(|error| error.to_string())?;
    Ok(y.to_vec1::<f32>().unwrap().split_off((at_y - start) as usize / size_of::<f32>()))
}

/// Returns the bits of y: shared memory that was not written is NaN.
fn run_with_seed(name: &str, n_blocks: usize, seed: u64) -> Vec<u32> {
    bits(emulate_with_seed(seed, || run(name, n_blocks, [0, 0])))
}

fn bits(y: Result<Vec<f32>, String>) -> Vec<u32> {
    y.unwrap().into_iter().map(f32::to_bits).collect()
}

#[track_caller]
fn check_fails(name: &str, moved: [u64; 2], want: &[&str]) {
    let error = emulate(|| run(name, 1, moved)).unwrap_err();
    for part in [&["faulty: emulated kernel ", name, ", block (0, 0, 0)"], want].concat() {
        assert!(error.contains(part), "`{error}` has no `{part}`");
    }
}

/// Checks that the results of a faulty kernel depend on the seed, and those of the right kernel do not.
#[track_caller]
fn check_race(right: &str, faulty: &str) {
    let wanted = run_with_seed(right, 1, 0);
    let mut n_wrong = 0;
    for seed in SEEDS {
        assert_eq!(run_with_seed(right, 1, seed), wanted, "{right} with seed {seed}");
        let found = run_with_seed(faulty, 1, seed);
        assert_eq!(run_with_seed(faulty, 1, seed), found, "seed {seed} does not repeat the order");
        n_wrong += usize::from(found != wanted);
    }
    assert_eq!(n_wrong, SEEDS.count(), "{faulty} has the right results with some seeds");
}

#[test]
fn aligned_packs_are_copied() {
    for name in ["copy_packs", "read_pack"] {
        let y = emulate(|| run(name, 1, [0, 0])).unwrap();
        let first = y[0];
        let wanted: Vec<f32> = (0..128).map(|i| first + i as f32).collect();
        assert!(first >= 1.0 && y[..128] == wanted, "{name}: {y:?}");
    }
}

#[test]
fn a_misaligned_load_or_store_fails_with_its_kernel_and_line() {
    check_fails("copy_packs", [4, 0], &["common.cuh:", "4 bytes past a multiple of 16"]);
    check_fails("copy_packs", [0, 8], &["common.cuh:", "8 bytes past a multiple of 16"]);
    let source = include_str!("../../../emulator/faulty.cu");
    let line = 1 + source.lines().position(|line| line.contains("line of read_pack")).unwrap();
    check_fails("read_pack", [12, 0], &[&format!("faulty.cu:{line}: "), "12 bytes past a multiple of 16"]);
    check_fails("read_pack", [1, 0], &["past a multiple of"]);
}

#[test]
fn a_read_that_does_not_wait_for_another_lanes_write_depends_on_the_seed() {
    check_race("predecessor", "predecessor_without_wait");
}

#[test]
fn a_write_that_does_not_wait_for_another_lanes_read_depends_on_the_seed() {
    check_race("moved", "moved_without_second_wait");
}

#[test]
fn launches_draw_different_orders_of_lanes() {
    let name = "predecessor_without_wait";
    let both = emulate_with_seed(0, || [0, 1].map(|_| bits(run(name, 1, [0, 0]))));
    assert_ne!(both[0], both[1]);
}

#[test]
fn a_block_that_reads_another_blocks_output_depends_on_the_seed() {
    let results: Vec<_> = SEEDS.map(|seed| run_with_seed("previous_block", 2, seed)).collect();
    assert!(results.iter().any(|y| *y != results[0]), "{results:?}");
}

#[test]
fn lanes_that_miss_a_barrier_fail() {
    check_fails("half_warp", [0, 0], &["a warp-wide instruction that some lanes do not reach"]);
    check_fails("uneven_waits", [0, 0], &["its threads deadlock"]);
}
