//! Out of memory on a device, in the emulation of the CUDA kernels.

use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Device;
use candlewick_comm::World;
use candlewick_ops::{MemoryLimit, emulate_with_limit};
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::{Hub, HubSettings};
use trainer::exit::{ExitCode, classify};
use trainer::run::{prepare_data, train};

use crate::estimated::Case;
use crate::{ALLOCATOR, alone};

/// Peak of the bytes in use at the time when an op allocates its output.
static PEAK_IN_USE: AtomicU64 = AtomicU64::new(0);

fn in_use() -> u64 {
    let now = ALLOCATOR.current_usage() as u64;
    PEAK_IN_USE.fetch_max(now, Ordering::Relaxed);
    now
}

#[test]
fn out_of_memory_is_exit_code_4_with_bytes_by_category_the_estimate_and_settings_that_need_less() {
    alone(
        "out_of_memory::out_of_memory_is_exit_code_4_with_bytes_by_category_the_estimate_and_settings_that_need_less",
        check,
    );
}

fn check() {
    let width = ["hidden_size=32", "intermediate_size=64", "vocab_size=1024"];
    let mut arguments: Vec<String> = width.iter().map(|key| format!("model.config.{key}")).collect();
    arguments.extend(["data.max_length=32".to_owned(), "train_iters=1".to_owned()]);
    let case = Case::new(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let hub = Hub::new(HubSettings { offline: true, ..HubSettings::from_env() }).unwrap();
    prepare_data(&case.plan, &hub, RunId::now()).unwrap();
    let run = || train(&case.plan, &hub, &World::solo(), &Device::Cpu);
    let peak = || ALLOCATOR.peak_usage() as u64;
    let with_limit = |total_bytes| emulate_with_limit(MemoryLimit { total_bytes, in_use, peak }, run);

    // The first run leaves memory in use that later runs use again.
    with_limit(u64::MAX).unwrap();
    let before = in_use();
    PEAK_IN_USE.store(before, Ordering::Relaxed);
    with_limit(u64::MAX).unwrap();
    let peak_in_use = PEAK_IN_USE.load(Ordering::Relaxed);
    // The parameters fit, the activations do not.
    ALLOCATOR.reset_peak_usage();
    let error = with_limit(peak_in_use - (peak_in_use - before) / 4).unwrap_err();
    assert_eq!(classify(&error), ExitCode::OutOfMemory, "{error:#}");
    let report = trainer::exit::report(&error);
    for words in [
        "out of memory on cpu: ",
        " were in use\n  weights ",
        "\n  gradients ",
        "\n  optimizer states ",
        "\n  activations and scratch ",
        "\nestimate: memory of ",
        "model.activation_checkpoint=full: ",
        "allocate ",
        "CUDA_ERROR_OUT_OF_MEMORY",
    ] {
        assert!(report.contains(words), "{words:?} is missing in:\n{report}");
    }
}
